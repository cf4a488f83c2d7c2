"""A real server on this machine: measured, fitted, played on, and predicted, by the commands a user gives.

llama.cpp's own HTTP server, from a binary wheel, serves a model of random weights made here. Other work on
the machine must not decide the outcome, so

- recordings are read on a clock that stands still while the server waits for a core (`tests/undisturbed.py`);
- programs come more slowly where that clock does, so that their load is the same;
- a core is slower while others use its memory, by up to a half and within a minute. The fit has to follow the
  requests that it was fitted to, and steps and prompts of the programs have to take about as long as it says;
  then the programs are predicted at the pace that these had.

calibration/llama_cpp has the errors on a quiet machine, without any of this.
"""

import importlib.util
import json
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from agentjax.bench.__main__ import main as bench
from agentjax.bench.log import RecordLog
from agentjax.calibrate.__main__ import main as calibrate
from agentjax.calibrate.observations import DECODE, PREFILL
from agentjax.calibrate.observe import observe
from agentjax.config.build import build_cluster
from agentjax.performance import load
from agentjax.readers import read_recording
from agentjax.validate.__main__ import main as validate
from agentjax.validate.programs import ProgramValidation, validate_programs
from agentjax.workloads.recorded import recorded_programs
from tests.undisturbed import Undisturbed

pytestmark = pytest.mark.xdist_group("server")

FOLDER = Path(__file__).parent.parent / "calibration" / "llama_cpp"
SLOTS, TOKENS = 3, 6144
MODEL = ("--size", "mid", "--layers", "4")
PROGRAMS = {
    "programs": 6,
    "calls_median": 4,
    "calls_max": 7,
    "output_median_tokens": 24,
    "max_context_tokens": 900,
}
RATE = 0.3
GAPS_S = {"gap_shell_median_s": 0.4, "gap_python_median_s": 0.6, "gap_max_s": 2.0}
"""Arrivals a second and tool gaps, on the undisturbed clock."""
GRID = {
    "prompt_tokens": "[48,240,900]",
    "output_tokens": "[32]",
    "concurrency": f"[1,2,{SLOTS}]",
    "cached_share": "[0,0.75]",
}
METRICS = ("jct_mean", "e2e_mean")
MOST_PCT = 20
"""Bound on the errors of the mean job completion time and of the mean latency."""
OWN_PCT = 15
"""Bound on the error of all decode steps together, and of all prompts, that the model was fitted to."""
PACE = 2.0
"""Most that steps and prompts of the programs are slower or faster than the fit says, where no time is spent
waiting for a core; more by as much as the clocks differ, which a slower core and late clients go with."""
KINDS = {"decode": DECODE, "prefill": PREFILL}
LEAST_AGREEMENT = 0.8


@dataclass(frozen=True)
class Loop:
    """The whole chain: its files on the undisturbed clock, and what was predicted of the programs.

    Attributes:
        own: time of the steps, and of the prompts, of the requests that were fitted to, by what the fit says.
        pace: the same of the programs.
        slow: seconds of the wall's clock for one of the undisturbed one, of the busier recording.
    """

    files: dict[str, str]
    validation: ProgramValidation
    own: dict[str, float]
    pace: dict[str, float]
    slow: float


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The server's address and process."""
    missing = [name for name in ("xllamacpp", "gguf", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'agentjax[llama-cpp]'")
    folder = tmp_path_factory.mktemp("llama_cpp")
    model = folder / "model.gguf"
    subprocess.run(
        [sys.executable, FOLDER / "make_model.py", *MODEL, "--out", model],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, FOLDER / "serve.py", "--model", model, "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--slots", str(SLOTS), "--context", str(TOKENS)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready"), (folder / "server.log").read_text("utf-8")[-2000:]
        yield ready.split()[1], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="module")
def loop(server, tmp_path_factory):
    return closed_loop(*server, tmp_path_factory.mktemp("run"))


def closed_loop(url, process, folder):
    """Requests are measured, a model is fitted, programs are played and predicted."""
    names = ("bench", "programs")
    files = {name: str(folder / f"{name}.jsonl") for name in names}
    files |= {name: str(folder / f"{name}.json") for name in ("server", "paced")}
    raw = {name: folder / f"{name}.raw.jsonl" for name in names}

    def measure(name, *arguments):
        client = [f"url={url}", "model=random-llama", "endpoint=completions", "prompts=ids"]
        assert bench([*client, *arguments, f"out={raw[name]}"]) == 0

    with Undisturbed(process) as clock:
        measure("bench", *(f"{key}={values}" for key, values in GRID.items()))
        slow = clock.slowness(read_recording(raw["bench"]))
        timed = {"rate": RATE / slow} | {name: slow * gap_s for name, gap_s in GAPS_S.items()}
        workload = [f"workload.{key}={value}" for key, value in (PROGRAMS | timed).items()]
        measure("programs", "mode=programs", "workload=small_agents", *workload)
    recordings = {name: clock.recording(read_recording(raw[name])) for name in names}
    slow = max(clock.slowness(read_recording(raw[name])) for name in names)
    for name, recording in recordings.items():
        write(recording, files[name])
    assert calibrate([f"data={files['bench']}", f"out={files['server']}"]) == 0
    own, pace = (paces(recordings[name], load(files["server"])) for name in names)
    content = json.loads(Path(files["server"]).read_text("utf-8"))
    content["coefficients"] = paced(content["coefficients"], pace)
    Path(files["paced"]).write_text(json.dumps(content), encoding="utf-8")
    limits = {"slots": True, "max_num_seqs": SLOTS, "kv_blocks": TOKENS, "block_size": 1}
    cluster = build_cluster({**limits, "max_num_batched_tokens": 2048}, {"coefficients": files["paced"]})
    return Loop(files, validate_programs([recordings["programs"]], cluster), own, pace, slow)


def paces(recording, model):
    """By kind: time of all observed iterations of a recording, by what a model says of them."""
    found, _ = observe(recording)
    with jax.enable_x64(True):
        predicted_s = found.predicted_s(model)
    of_kind = {name: found.kind == kind for name, kind in KINDS.items()}
    return {
        name: float(found.duration_s[which].sum() / predicted_s[which].sum())
        for name, which in of_kind.items()
    }


def paced(coefficients, pace):
    """Coefficients at another pace: of prompts those of prompt tokens, of decodes all others."""

    def scaled(name, value):
        if not name.endswith("_s"):
            return value
        factor = pace["prefill" if "prefill" in name or name == "c_tok_s" else "decode"]
        return [factor * one for one in value] if isinstance(value, list) else factor * value

    return {name: scaled(name, value) for name, value in coefficients.items()}


@pytest.fixture(scope="module")
def validation(loop):
    return loop.validation


def write(recording, path):
    """The file of a recording, as the benchmark writes it."""
    log = RecordLog(path)
    log.open({"agentjax_bench": 1} | {k: v for k, v in recording.about.items() if k not in ("tool", "file")})
    for record in recording.requests:
        log.append(record)
    log.close()


def agreement(validation):
    """Share of the calls that find as many tokens in their slot as on the server."""
    return np.mean(validation.measured[0].cached_tokens == validation.simulated[0].cached_tokens)


def test_every_request_was_answered_at_full_length(loop):
    for name in ("bench", "programs"):
        records = read_recording(loop.files[name]).requests
        assert [record.error for record in records] == [None] * len(records)
        assert all(len(record.gaps_s) == record.output_tokens - 1 for record in records if not record.warmup)
    cells = [record for record in read_recording(loop.files["bench"]).requests if not record.warmup]
    assert {record.asked.concurrency for record in cells} == {1, 2, SLOTS}
    for record in cells:
        cached = round(record.asked.cached_share * record.asked.prompt_tokens)
        assert record.prompt_tokens == record.asked.prompt_tokens
        assert record.cached_tokens == cached


def test_the_fit_is_of_the_recorded_server(loop):
    model = load(loop.files["server"])
    assert float(model.wakeup_s) < 0.1
    durations = [
        record.server_prefill_s
        for record in read_recording(loop.files["bench"]).requests
        if not record.warmup and record.asked.concurrency == 1 and not record.cached_tokens
    ]
    assert min(durations) < max(durations) / 3
    for name, ratio in loop.own.items():
        assert abs(ratio - 1) < OWN_PCT / 100, name


def test_steps_and_prompts_of_programs_take_about_as_long_as_those_fitted_to(loop):
    for name, ratio in loop.pace.items():
        assert max(ratio, 1 / ratio) < PACE * loop.slow, name


def test_what_is_found_in_the_slots_is_predicted_call_by_call(validation):
    """Decisions are the same but where two events are closer than the noise of their times."""
    assert not validation.left_out
    assert agreement(validation) >= LEAST_AGREEMENT
    assert validation.measured[0].cached_tokens.sum() > 0


@pytest.mark.parametrize("name", METRICS)
def test_times_are_predicted(loop, name):
    """Within a bound that is as much wider as other work made the machine slower, which was measured."""
    error = loop.validation.errors[name]
    ratio = error.simulated_s / error.measured_s
    bound = loop.slow / (1 - MOST_PCT / 100)
    assert 1 / bound < ratio < bound, (error, loop.slow)


def test_validate_prints_the_errors(loop, capsys):
    assert (
        validate(
            [
                f"data={loop.files['programs']}",
                f"performance={loop.files['server']}",
                "cluster=llama_cpp",
                f"cluster.max_num_seqs={SLOTS}",
                f"cluster.kv_blocks={TOKENS}",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    programs = len(recorded_programs(read_recording(loop.files["programs"])).programs)
    assert "JCT mean (s)" in said
    assert f"{programs} programs" in said
