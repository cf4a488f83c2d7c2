"""The shipped coefficients: files, the fit to operator tables again, and the warning outside their range."""

import csv
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml

import agentjax as ajx
from agentjax.errors import OutsideRange
from agentjax.performance import (
    Affine,
    BatchShape,
    Piecewise,
    build_performance,
    decode_batch,
    load,
    load_table,
    valid,
)
from agentjax.performance.load import available, folder, read
from agentjax.performance.valid import Reach, Watch, ranges_of
from agentjax.simulate.__main__ import main
from agentjax.workloads import Call, Program
from agentjax.workloads.pack import pack
from tests.stub_engine import stub_stream_lanes

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
LARGE = "rtx-pro-6000/llama-3.1-70b/tp2"
SMALL = "rtx-pro-6000/llama-3.1-8b/tp1"
EXPERTS = "rtx-pro-6000/qwen3-30b-a3b/tp1"
FROM_TABLES = (
    SMALL,
    "rtx-pro-6000/llama-3.1-8b/tp2",
    "rtx-pro-6000/qwen3-32b/tp1",
    "rtx-pro-6000/qwen3-32b/tp2",
    EXPERTS,
    "rtx-4090/llama-3.1-8b/tp1",
)
SERVER = "llama_cpp/mid"

needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the published measurements (../shared/data) are not here"
)


@pytest.fixture(autouse=True)
def _nothing_warned_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(valid, "_warned", set())


def programs(*calls: tuple[int, int], copies: int = 1) -> list[Program]:
    """Programs that arrive together, of calls with so many new and output tokens."""
    stages = ((tuple(Call(new, output, None, None, 0.0) for new, output in calls),),)
    return [Program(f"p{copy}", 0.0, stages, None) for copy in range(copies)]


def test_every_set_is_listed_and_has_a_configuration():
    assert set(available()) == {LARGE, *FROM_TABLES, SERVER}
    configured = set()
    for path in (ROOT / "conf" / "performance").glob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        if config.get("coefficients", "???") != "???":
            configured.add(config["coefficients"])
            form = Piecewise if config["coefficients"] == SERVER else Affine
            assert isinstance(build_performance(config), form)
    assert configured == set(available())


@pytest.mark.parametrize("name", FROM_TABLES)
def test_a_set_says_where_it_is_from_and_how_far_off_it_is(name: str):
    file = read(name)
    assert file.tensor_parallel == file.gpus == int(name[-1])
    assert {Path(source.file).name for source in file.inputs} >= {"attention.csv", "dense.csv", "meta.yaml"}
    assert file.valid["tokens"].high == 2048
    assert file.valid["context tokens of a decode"].high == 16_384
    with (folder() / "fit_tables.csv").open(newline="") as table:
        rows = [row for row in csv.DictReader(table) if row["coefficients"] == name]
    assert [row["region"] for row in rows] == list(file.residuals)
    assert [float(row["worst_pct"]) for row in rows] == [
        residual.worst_pct for residual in file.residuals.values()
    ]
    assert all(abs(residual.median_pct) < 30 for residual in file.residuals.values())


@needs_data
@pytest.mark.parametrize(
    ("name", "profile", "within"),
    [
        (EXPERTS, "RTXPRO6000__Qwen3-30B-A3B-Instruct-2507__tp1", 0.15),
        ("rtx-pro-6000/qwen3-32b/tp2", "RTXPRO6000__Qwen3-32B__tp2", 0.05),
        ("rtx-4090/llama-3.1-8b/tp1", "RTX4090__Llama-3.1-8B__tp1", 0.10),
    ],
)
def test_a_set_follows_its_tables(name: str, profile: str, within: float):
    jax.config.update("jax_enable_x64", True)
    model = load(name)
    table = load_table(DATA / "profiles" / profile, overhead_s=float(model.overhead_s))
    decodes = decode_batch(np.float64(32), np.float64(32 * 1024), np.float64(1024))
    mixed = BatchShape(
        sequences=np.float64(9),
        decode_sequences=np.float64(8),
        decode_context_tokens=np.float64(8 * 2048),
        decode_context_max_tokens=np.float64(2048),
        prefill_tokens=np.float64(2040),
        prefill_context_tokens=np.float64(0),
        prefill_work_tokens2=np.float64(2040 * 1020),
    )
    for batch in (decodes, mixed):
        measured = float(table.iteration_s(batch))
        assert float(model.iteration_s(batch)) == pytest.approx(measured, rel=within)


@needs_data
def test_the_fit_to_tables_gives_the_same_bytes(tmp_path: Path):
    script = ROOT / "calibration" / "fit_tables.py"
    command = [sys.executable, str(script), "--data", str(DATA), "--out", str(tmp_path), "--only", SMALL]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=True, timeout=120)
    assert (tmp_path / f"{SMALL}.json").read_bytes() == (folder() / f"{SMALL}.json").read_bytes()


def test_the_range_is_found_by_the_coefficients_whatever_the_host_times():
    for model in (load(SMALL), build_performance({"coefficients": SMALL, "overhead_s": 0.01})):
        found = ranges_of(model)
        assert found is not None
        assert found[0] == SMALL
    assert ranges_of(Affine(c0_s=0.04)) is None
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), load(SMALL), load(LARGE))
    assert ranges_of(stacked) is None


def test_a_run_beyond_the_range_warns_once():
    cluster = ajx.Cluster(max_num_batched_tokens=2048, performance=load(SMALL))
    ajx.simulate(programs((2_000, 2)), cluster)  # warnings are errors here
    with pytest.warns(OutsideRange) as caught:
        ajx.simulate(programs((17_000, 2)), cluster)
    assert [str(warning.message) for warning in caught] == [
        f"{SMALL}: durations are extrapolated, for there are contexts of 17,001 tokens (fitted up to 16,384)"
    ]
    assert caught[0].filename == __file__
    ajx.simulate(programs((17_000, 2)), cluster)
    with pytest.warns(OutsideRange, match=LARGE):
        ajx.simulate(programs((33_000, 2)), ajx.Cluster())


def test_a_grid_warns_once_for_all_its_points():
    grid = {"retention": ["lru", "evict"], "cluster.max_num_batched_tokens": [2048, 3000, 8192]}
    cluster = ajx.Cluster(performance=load(SMALL))
    with pytest.warns(OutsideRange, match=r"iterations of 4,000 tokens \(fitted up to 2,048\)$") as caught:
        ajx.sweep(programs((4000, 2)), cluster, ajx.Policy(), grid=grid, stream_lanes=stub_stream_lanes)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_limits_that_are_not_reached_do_not_warn():
    cluster = ajx.Cluster(max_num_batched_tokens=16_384, max_num_seqs=512, performance=load(SMALL))
    grid = {"retention": ["lru", "evict"]}
    few = programs((2000, 50), (40, 1))
    ajx.sweep(few, cluster, ajx.Policy(), grid=grid, stream_lanes=stub_stream_lanes)


def test_every_way_out_of_the_range_is_named():
    some = Reach(context=40_000, tokens=20_000, calls=17).outside(read(LARGE).valid)
    assert some == [
        "contexts of 40,000 tokens (fitted up to 32,768)",
        "iterations of 20,000 tokens (fitted up to 16,384)",
        "iterations of 17 calls (fitted up to 16)",
    ]
    assert Reach(context=32_768, tokens=16_384, calls=16, mean_calls=1.0).outside(read(LARGE).valid) == []
    assert Reach(mean_calls=1.04).outside(read(EXPERTS).valid) == [
        "iterations of 1.0 calls on average (fitted from 32)"
    ]


def test_before_a_run_only_what_every_run_reaches_is_known():
    watch = Watch()
    cluster = ajx.Cluster(max_num_batched_tokens=4096, performance=load(SMALL))
    watch.see(pack(programs((1000, 10), (5000, 2), copies=200)), cluster)
    reach = watch.reached[SMALL][1]
    assert (reach.context, reach.tokens, reach.calls, reach.mean_calls) == (6011, 4096, 0, np.inf)


def test_calls_at_once_are_counted_by_replica_and_without_preempted_ones():
    columns = {
        "call_scheduled_ns": [0, 5, 10, 0, 0],
        "call_finished_ns": [10, 20, 30, 40, 40],
        "call_service_ns": [10, 15, 20, 40, 20],
        "call_cached_tokens": [0, 0, 40, 0, 0],
        "call_preemptions": [0, 0, 0, 0, 1],
        "call_replica": [0, 0, 0, 1, 0],
        "busy_ns": [30, 40],
    }
    outcome = SimpleNamespace(**{name: np.asarray([column]) for name, column in columns.items()})
    cluster = ajx.Cluster(replicas=2, performance=load(SMALL))
    watch = Watch()
    watch.see(pack(programs((100, 1), copies=5)), cluster, outcome)
    reach = watch.reached[SMALL][1]
    assert (reach.calls, reach.tokens, reach.mean_calls) == (2, 100, 1.5)


def test_a_command_warns_in_one_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text(
        '{"program": "p0", "arrival_s": 0, "calls": [{"new_tokens": 17000, "output_tokens": 2, '
        '"tool": null, "tool_s": 0}]}\n'
    )
    arguments = ["workload=file", "workload.path=mine.jsonl", "performance=rtx_pro_6000_llama_8b_tp1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*arguments, "cluster.max_num_batched_tokens=2048"]) == 0
    err = capsys.readouterr().err
    assert err == (
        f"warning: {SMALL}: durations are extrapolated, for there are contexts of 17,001 tokens "
        "(fitted up to 16,384)\n"
    )
    assert main([*arguments, "cluster.max_num_batched_tokens=2048"]) == 0
    assert capsys.readouterr().err == ""
