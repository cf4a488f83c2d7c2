"""Gradient-free fits: what a recording made by the simulator itself says is found again, and no more."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentjax.calibrate.__main__ import main
from agentjax.calibrate.cma import CmaFit, fit_cma
from agentjax.calibrate.parameters import choose_parameters, coefficient_names, with_values
from agentjax.calibrate.replayed import Replayed, replayed
from agentjax.cluster import Cluster
from agentjax.engine.run import LaneSpec, run_lanes
from agentjax.errors import InputError
from agentjax.performance import Affine, Piecewise, load
from agentjax.policies import Policy
from agentjax.records import Place, Recording, RequestRecord, to_json
from agentjax.workloads import swebench
from agentjax.workloads.pack import SECOND, pack
from agentjax.workloads.recorded import recorded_programs

LANES = 16
TRUE = Cluster(
    kv_blocks=20_000,
    max_num_batched_tokens=256,
    max_num_seqs=64,
    async_scheduling=False,
    performance=Affine(c0_s=0.01, c_tok_s=5e-5, c_kv_s=2e-8, overhead_s=0.003, wakeup_s=0.02),
)


def recorded(cluster: Cluster) -> Recording:
    """What a client would have seen of a simulated cluster."""
    workload = pack(
        swebench(3, programs=12, rate=0.2, calls_median=8.0, calls_sigma=0.3, context_tokens_per_call=None)
    )
    outcome = run_lanes([workload], [LaneSpec(0, cluster, Policy())] * LANES)
    names = ("released", "first_token", "finished")
    times = {name: getattr(outcome, f"call_{name}_ns")[0] / SECOND for name in names}
    records = []
    for call, (program, turn) in enumerate(zip(workload.call_program, workload.call_turn, strict=True)):
        name = workload.names[program]
        sent, first, finished = (round(float(times[each][call]), 7) for each in names)
        prompt, output = int(workload.prompt_tokens[call]), int(workload.output_tokens[call])
        cached = int(outcome.call_cached_tokens[0, call])  # pyright: ignore[reportOptionalSubscript]
        place = Place(name, 0, 0, int(turn))
        records.append(
            RequestRecord(f"{name}-{turn}", sent, first, finished, prompt, output, cached, place=place)
        )
    return Recording(tuple(sorted(records, key=lambda record: record.sent_s)))


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded(TRUE)


@pytest.fixture(scope="module")
def targets(recording: Recording) -> Replayed:
    return replayed(recorded_programs(recording), hold_out=0.2, seed=0)


def fit(targets: Replayed, start: Cluster, *names: str, generations: int = 80, seed: int = 0) -> CmaFit:
    parameters = choose_parameters(list(names), {}, start, targets)
    return fit_cma(targets, start, Policy(), parameters, generations=generations, population=LANES, seed=seed)


@pytest.fixture(scope="module")
def found(targets: Replayed) -> CmaFit:
    start = with_values(TRUE, {"overhead_s": 0.001, "wakeup_s": 0.0, "max_num_batched_tokens": 2048})
    return fit(targets, start, "overhead_s", "wakeup_s", "max_num_batched_tokens")


def test_observations_and_what_is_held_out(recording: Recording, targets: Replayed) -> None:
    calls = len(recording.requests)
    assert np.bincount(targets.metric).tolist() == [calls, calls, 12]
    assert len(np.unique(targets.unit[targets.held_out])) == 2
    assert targets.weight.sum() == pytest.approx(1.0) and not np.any(targets.weight[targets.held_out])
    sums = np.bincount(targets.metric, targets.weight)
    assert sums == pytest.approx([1 / 3] * 3)
    outcome = run_lanes([targets.workload], [LaneSpec(0, TRUE, Policy())] * LANES)
    assert np.abs(targets.log_ratios(outcome)).max() < 1e-4
    most = replayed(recorded_programs(recording), hold_out=0.99, seed=0)
    assert most.weight.sum() == pytest.approx(1.0) and len(np.unique(most.unit[most.held_out])) == 11
    other = replayed(recorded_programs(recording), hold_out=0.2, seed=1)
    assert set(other.unit[other.held_out]) != set(targets.unit[targets.held_out])


def test_finds_the_parameters_that_made_the_recording(found: CmaFit) -> None:
    assert found.values["overhead_s"] == pytest.approx(0.003, rel=2e-3)
    assert found.values["wakeup_s"] == pytest.approx(0.02, rel=5e-3)
    assert found.values["max_num_batched_tokens"] == pytest.approx(256, abs=1)
    assert found.loss < 1e-3 < 0.05 < found.loss_before
    assert found.loss <= min(found.history) + 1e-12
    for before, after, before_held_out, after_held_out in found.errors_pct.values():
        assert after < 0.5 < before and after_held_out < 0.5 < before_held_out


def test_says_how_well_they_are_determined(found: CmaFit) -> None:
    overhead, wakeup, budget = found.determined
    for told, true in ((overhead, 0.003), (budget, 256)):
        assert told.low is not None and told.high is not None and told.together_with is None
        assert told.low < true < told.high < 1.3 * told.low
        assert told.words == f"between {told.low:.4g} and {told.high:.4g}"
    # few requests find the server idle, and some programs have none of them
    assert not wakeup.is_free and (wakeup.low or 0.0) < 0.02 < (wakeup.high or 1.0)


def test_what_the_recording_does_not_determine_stays_where_it_was(targets: Replayed) -> None:
    start = with_values(TRUE, {"overhead_s": 0.004, "max_num_seqs": 100})
    result = fit(targets, start, "overhead_s", "max_num_seqs", "c_prefill_s", generations=10)
    overhead, seats, attention = result.determined
    assert result.values["overhead_s"] == pytest.approx(0.003, rel=0.01) and not overhead.is_free
    assert seats.words == "not determined by this recording"
    assert result.values["max_num_seqs"] == seats.value == 100
    # it was 0 when the recording was made, and is not told apart from that
    assert attention.low is None and attention.high is not None
    assert attention.words == f"below {attention.high:.4g}" and attention.value < attention.high < 1e-8


def test_parameters_that_do_the_same_are_determined_only_together(targets: Replayed) -> None:
    start = with_values(TRUE, {"overhead_s": 0.002, "c0_s": 0.012})
    result = fit(targets, start, "overhead_s", "c0_s", generations=10)
    assert result.values["overhead_s"] + result.values["c0_s"] == pytest.approx(0.013, rel=0.01)
    for told, other in zip(result.determined, ("c0_s", "overhead_s"), strict=True):
        assert told.together_with == other and told.words == f"determined only together with {other}"
        assert not told.is_free


def test_the_same_seed_gives_the_same_fit(targets: Replayed) -> None:
    start = with_values(TRUE, {"overhead_s": 0.001})
    one, same, other = (fit(targets, start, "overhead_s", generations=2, seed=seed) for seed in (1, 1, 2))
    assert one.values == same.values and one.history == same.history
    assert one.history != other.history


def test_names_of_coefficients() -> None:
    affine = coefficient_names(TRUE.performance)
    assert (
        affine[:2] == ("c0_s", "c_tok_s") and affine[-2:] == ("overhead_s", "wakeup_s") and len(affine) == 8
    )
    knots = Piecewise([1, 4], [0.01, 0.02], [1e-8, 2e-8])
    assert coefficient_names(knots) == (
        "prefill_s", "prefill_tok_s", "prefill_work_s", "prefill_context_s", "short_prefill_work_s",
        "shared_s", "overhead_s", "wakeup_s",
    )  # fmt: skip
    moved = with_values(TRUE, {"c_kv_s": 3e-8, "kv_blocks": 999.6})
    assert float(moved.performance.c_kv_ns) == pytest.approx(30.0) and moved.kv_blocks == 1000  # pyright: ignore[reportAttributeAccessIssue]
    assert with_values(TRUE, {}) == TRUE


@pytest.mark.parametrize(
    ("names", "bounds", "sentence"),
    [
        ([], {}, "parameters: found an empty list, expected a list of names out of c0_s"),
        ("overhead_s", {}, 'parameters: found "overhead_s", expected a list of names'),
        (["overhead"], {}, r'parameters\[0\]: found "overhead", expected overhead_s'),
        (["wakeup_s", "wakeup_s"], {}, r'parameters\[1\]: found "wakeup_s" again, expected each name once'),
        (["wakeup_s"], {"overhead_s": [0, 1]}, "bounds.overhead_s: found a name that is not fitted"),
        (
            ["wakeup_s"],
            {"wakeup_s": [1]},
            r"bounds.wakeup_s: found a list, expected two numbers, \[low, high\]",
        ),
        (["wakeup_s"], {"wakeup_s": [1, 0]}, r"bounds.wakeup_s: found \[1, 0\], expected two rising numbers"),
        (["wakeup_s"], {"wakeup_s": [1, 2]}, "expected a range around the start, 0.02"),
        (["kv_blocks"], {"kv_blocks": [1, 2e4]}, "expected two rising numbers from"),
        (["wakeup_s"], [], "bounds: found an empty list, expected pairs"),
    ],
)
def test_faults(targets: Replayed, names: object, bounds: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        choose_parameters(names, bounds, TRUE, targets)


def test_slots_are_known(targets: Replayed) -> None:
    slots = replace(TRUE, slots=True, block_size=1, kv_blocks=10**6, max_num_seqs=4)
    with pytest.raises(InputError, match="slots have the number and size that the server was started with"):
        choose_parameters(["max_num_seqs"], {}, slots, targets)


def write(recording: Recording, path: Path) -> Path:
    lines = [{"agentjax_bench": 1, "mode": "programs", "model": "tiny", "started": "2026-11-30T08:00:00Z"}]
    lines += [to_json(record) for record in recording.requests]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


COMMAND = [
    "method=cma_es", "performance=affine", "performance.c0_s=0.01", "performance.c_tok_s=5e-5",
    "performance.c_seq_s=0", "performance.c_kv_s=2e-8", "performance.wakeup_s=0.02",
    "cluster=rtx_pro_6000_pair", "cluster.kv_blocks=20000", "cluster.max_num_seqs=64",
    "cluster.max_num_batched_tokens=128", "cluster.async_scheduling=false",
    "parameters=[overhead_s,max_num_batched_tokens]",
]  # fmt: skip


def test_command_writes_coefficients_that_load(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(recording, tmp_path / "programs.jsonl"), tmp_path / "fitted.json"
    assert main([*COMMAND, f"data={data}", f"out={out}", "generations=20"]) == 0
    text = capsys.readouterr().out
    assert "12 programs of" in text and "2 held out" in text
    assert "limits cluster.max_num_batched_tokens=25" in text and f"coefficients {out}" in text
    content = json.loads(out.read_text())
    assert content["coefficients"]["overhead_s"] == pytest.approx(0.003, rel=0.02)
    assert content["coefficients"]["wakeup_s"] == 0.02 and content["model"] == "tiny"
    assert "CMA-ES" in content["method"] and "cluster.max_num_batched_tokens=25" in content["notes"][0]
    assert content["inputs"][0]["file"] == "programs.jsonl" and content["software"]["seed"] == 0
    assert content["intervals"]["overhead_s"]["low"] < 0.003 < content["intervals"]["overhead_s"]["high"]
    assert float(load(out).c0_ns) == 1e7  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["parameters=[overheads]"], "parameters[0]: found \"overheads\", expected overhead_s"),
        (["generations=0"], "generations: found 0, expected an integer from 1"),
        (["population=2"], "population: found 2, expected an integer from 4"),
        (["out=fitted.yaml"], "out=fitted.yaml: found the ending '.yaml', expected the name of a JSON"),
        (["about.gpus=0"], "about.gpus: found 0, expected an integer from 1"),
        (["hold_out=1"], "hold_out: found 1, expected a share from 0 to below 1"),
        (["figure=fit.png"], "figure: found \"fit.png\", expected null: method=cma_es draws none"),
        (["~cluster"], "cluster: found nothing, expected what the search starts from"),
        (["data=[a.jsonl,b.jsonl]"], "data: found a list, expected one file"),
    ],
)  # fmt: skip
def test_command_faults(
    recording: Recording,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    sentence: str,
) -> None:
    data = write(recording, tmp_path / "programs.jsonl")
    arguments = [argument for argument in COMMAND if not (changes == ["~cluster"] and "cluster" in argument)]
    assert main([*arguments, f"data={data}", *(change for change in changes if change != "~cluster")]) == 2
    assert sentence in capsys.readouterr().err


def test_evosax_is_asked_for(monkeypatch: pytest.MonkeyPatch, targets: Replayed) -> None:
    monkeypatch.setitem(sys.modules, "evosax.algorithms", None)
    with pytest.raises(InputError, match=r"no evosax.*expected it: pip install 'agentjax\[search\]'"):
        fit(targets, TRUE, "overhead_s", generations=2)
