"""A real server on this machine: measured, fitted, played on, and predicted, by the commands a user gives.

llama.cpp's own HTTP server, from a binary wheel, serves a model of random weights made here. The bounds are
what holds beside other work on two cores; calibration/llama_cpp has the errors on a quiet machine.
"""

import importlib.util
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentjax.bench.__main__ import main as bench
from agentjax.calibrate.__main__ import main as calibrate
from agentjax.config.build import build_cluster
from agentjax.performance import load
from agentjax.readers import read_recording
from agentjax.validate.__main__ import main as validate
from agentjax.validate.programs import validate_programs
from agentjax.workloads.recorded import recorded_programs

FOLDER = Path(__file__).parent.parent / "calibration" / "llama_cpp"
SLOTS, TOKENS = 3, 6144
MODEL = ("--size", "mid", "--layers", "4")
PROGRAMS = (
    *("workload.programs=6", "workload.rate=0.6", "workload.calls_median=4", "workload.calls_max=7"),
    *("workload.gap_python_median_s=0.6", "workload.gap_max_s=2", "workload.output_median_tokens=24"),
    "workload.max_context_tokens=900",
)
METRICS = ("jct_mean", "itl_p50")
MOST_PCT = 25
"""Bound on the errors of the mean job completion time and of the median time between tokens."""
LEAST_AGREEMENT = 0.8
ATTEMPTS = 3


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
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
        server = subprocess.Popen(
            [*command, "--slots", str(SLOTS), "--context", str(TOKENS)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert server.stdout is not None
        ready = server.stdout.readline()
        assert ready.startswith("ready"), (folder / "server.log").read_text("utf-8")[-2000:]
        yield ready.split()[1]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
        server.stdout.close()


@pytest.fixture(scope="module")
def measured(endpoint, tmp_path_factory):
    """The files of the whole chain, requests, coefficients, played programs, and what was predicted of them.

    The speed of a machine with other work to do changes between fit and play, so that a single prediction may
    be far off for no fault of the chain: it is repeated, up to three times, until one is within the bounds.
    """
    for _ in range(ATTEMPTS):
        folder = tmp_path_factory.mktemp("run")
        files = {name: str(folder / name) for name in ("bench.jsonl", "server.json", "programs.jsonl")}
        server = [f"url={endpoint}", "model=random-llama", "endpoint=completions", "prompts=ids"]
        grid = ["prompt_tokens=[48,240,900]", "output_tokens=[32]", f"concurrency=[1,2,{SLOTS}]"]
        assert bench([*server, *grid, "cached_share=[0,0.75]", f"out={files['bench.jsonl']}"]) == 0
        assert calibrate([f"data={files['bench.jsonl']}", f"out={files['server.json']}"]) == 0
        played = ["mode=programs", "workload=small_agents", *PROGRAMS, f"out={files['programs.jsonl']}"]
        assert bench([*server, *played]) == 0
        limits = {"slots": True, "max_num_seqs": SLOTS, "kv_blocks": TOKENS, "block_size": 1}
        cluster = build_cluster(
            {**limits, "max_num_batched_tokens": 2048}, {"coefficients": files["server.json"]}
        )
        validation = validate_programs([read_recording(files["programs.jsonl"])], cluster)
        errors = [abs(validation.errors[name].error_pct or 0.0) for name in METRICS]
        if max(errors) < MOST_PCT and agreement(validation) >= LEAST_AGREEMENT:
            break
    return files, validation


@pytest.fixture(scope="module")
def run(measured):
    return measured[0]


@pytest.fixture(scope="module")
def validation(measured):
    return measured[1]


def agreement(validation):
    """Share of the calls that find as many tokens in their slot as on the server."""
    return np.mean(validation.measured[0].cached_tokens == validation.simulated[0].cached_tokens)


def test_every_request_was_answered_at_full_length(run):
    for name in ("bench.jsonl", "programs.jsonl"):
        records = read_recording(run[name]).requests
        assert [record.error for record in records] == [None] * len(records)
        assert all(len(record.gaps_s) == record.output_tokens - 1 for record in records if not record.warmup)
    cells = [record for record in read_recording(run["bench.jsonl"]).requests if not record.warmup]
    assert {record.asked.concurrency for record in cells} == {1, 2, SLOTS}
    for record in cells:
        cached = round(record.asked.cached_share * record.asked.prompt_tokens)
        assert record.prompt_tokens == record.asked.prompt_tokens
        assert record.cached_tokens == cached


def test_the_fit_is_of_the_recorded_server(run):
    model = load(run["server.json"])
    assert float(model.wakeup_s) < 0.1
    durations = [
        record.server_prefill_s
        for record in read_recording(run["bench.jsonl"]).requests
        if not record.warmup and record.asked.concurrency == 1 and not record.cached_tokens
    ]
    assert min(durations) < max(durations) / 3


def test_what_is_found_in_the_slots_is_predicted_call_by_call(run, validation):
    """Decisions are the same but where two events are closer than the noise of their times."""
    assert not validation.left_out
    assert agreement(validation) >= LEAST_AGREEMENT
    assert validation.measured[0].cached_tokens.sum() > 0


@pytest.mark.parametrize("name", METRICS)
def test_times_are_predicted(validation, name):
    error = validation.errors[name]
    assert abs(error.error_pct) < MOST_PCT, error


def test_validate_prints_the_errors(run, capsys):
    assert (
        validate(
            [
                f"data={run['programs.jsonl']}",
                f"performance={run['server.json']}",
                "cluster=llama_cpp",
                f"cluster.max_num_seqs={SLOTS}",
                f"cluster.kv_blocks={TOKENS}",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    programs = len(recorded_programs(read_recording(run["programs.jsonl"])).programs)
    assert "JCT mean (s)" in said
    assert f"{programs} programs" in said
