"""A real server on this machine: measured, fitted, played on, and predicted, by the commands a user gives.

llama.cpp's own HTTP server, from a binary wheel, serves a model of random weights made here. Recordings are
read on a clock that stands still while the server waits for a core (`tests/undisturbed.py`), so that other work
on the machine does not count. What is left of it, a slower core while others are at work, is measured: some
requests are sent before and after the programs, and the bounds are wider by what changed in between.
calibration/llama_cpp has the errors on a quiet machine.
"""

import importlib.util
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from agentjax.bench.__main__ import main as bench
from agentjax.bench.log import RecordLog
from agentjax.calibrate.__main__ import main as calibrate
from agentjax.config.build import build_cluster
from agentjax.performance import load
from agentjax.readers import read_recording
from agentjax.validate.__main__ import main as validate
from agentjax.validate.programs import ProgramValidation, validate_programs
from agentjax.workloads.recorded import recorded_programs
from tests.undisturbed import Undisturbed

FOLDER = Path(__file__).parent.parent / "calibration" / "llama_cpp"
SLOTS, TOKENS = 3, 6144
MODEL = ("--size", "mid", "--layers", "4")
PROGRAMS = (
    *("workload.programs=6", "workload.rate=0.6", "workload.calls_median=4", "workload.calls_max=7"),
    *("workload.gap_python_median_s=0.6", "workload.gap_max_s=2", "workload.output_median_tokens=24"),
    "workload.max_context_tokens=900",
)
GRID = {"prompt_tokens": "[48,240,900]", "output_tokens": "[32]", "concurrency": f"[1,2,{SLOTS}]"}
AGAIN = {"prompt_tokens": "[240]", "output_tokens": "[32]", "concurrency": f"[1,{SLOTS}]"}
METRICS = ("jct_mean", "e2e_mean")
MOST_PCT = 20
"""Bound on the errors of the mean job completion time and the mean latency, where the machine stays the same."""
LEAST_AGREEMENT = 0.8


@dataclass(frozen=True)
class Loop:
    """The whole chain: its files on the undisturbed clock, and what was predicted of the programs.

    Attributes:
        change_pct: how much slower or faster the same requests were after the programs than before.
    """

    files: dict[str, str]
    validation: ProgramValidation
    change_pct: float


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
    """Requests are measured, programs played, requests measured again; all is fitted, and predicted."""
    url, process = server
    folder = tmp_path_factory.mktemp("run")
    client = [f"url={url}", "model=random-llama", "endpoint=completions", "prompts=ids"]
    parts = {
        "bench": [*(f"{key}={values}" for key, values in GRID.items()), "cached_share=[0,0.75]"],
        "programs": ["mode=programs", "workload=small_agents", *PROGRAMS],
        "again": [f"{key}={values}" for key, values in AGAIN.items()],
    }
    files = {name: str(folder / f"{name}.jsonl") for name in parts} | {"server": str(folder / "server.json")}
    with Undisturbed(process) as clock:
        for name, arguments in parts.items():
            assert bench([*client, *arguments, f"out={folder / name}.raw.jsonl"]) == 0
    recordings = {name: clock.recording(read_recording(folder / f"{name}.raw.jsonl")) for name in parts}
    for name, recording in recordings.items():
        write(recording, files[name])
    data = f"data=[{files['bench']},{files['again']}]"
    assert calibrate([data, f"out={files['server']}"]) == 0
    limits = {"slots": True, "max_num_seqs": SLOTS, "kv_blocks": TOKENS, "block_size": 1}
    cluster = build_cluster({**limits, "max_num_batched_tokens": 2048}, {"coefficients": files["server"]})
    validation = validate_programs([recordings["programs"]], cluster)
    return Loop(files, validation, change_pct(recordings["bench"], recordings["again"]))


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


def change_pct(before, after):
    """How much slower or faster the same requests were, in per cent; the median over kinds of request."""

    def latencies(recording):
        found = defaultdict(list)
        for record in recording.requests:
            if not record.warmup and not record.asked.cached_share:
                found[record.asked.prompt_tokens, record.asked.concurrency].append(record.latency_s)
        return {kind: np.median(values) for kind, values in found.items()}

    first, second = latencies(before), latencies(after)
    return 100 * abs(np.median([second[kind] / first[kind] for kind in second]) - 1)


def agreement(validation):
    """Share of the calls that find as many tokens in their slot as on the server."""
    return np.mean(validation.measured[0].cached_tokens == validation.simulated[0].cached_tokens)


def test_every_request_was_answered_at_full_length(loop):
    for name in ("bench", "programs", "again"):
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


def test_what_is_found_in_the_slots_is_predicted_call_by_call(validation):
    """Decisions are the same but where two events are closer than the noise of their times."""
    assert not validation.left_out
    assert agreement(validation) >= LEAST_AGREEMENT
    assert validation.measured[0].cached_tokens.sum() > 0


@pytest.mark.parametrize("name", METRICS)
def test_times_are_predicted(loop, name):
    error = loop.validation.errors[name]
    assert abs(error.error_pct) < MOST_PCT + loop.change_pct, error


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
