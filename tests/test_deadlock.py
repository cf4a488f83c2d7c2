"""Calls that can never run are refused by name; a lane that cannot go on is flagged, and the others finish.

No input that is accepted can deadlock: an idle replica has all its blocks available, and every call fits. The
flags are tested with the refusal switched off, and with steps that do nothing.
"""

import pytest

from agentjax import Cluster, InputError, Policy, simulate
from agentjax.engine import lanes as engine
from agentjax.engine import run
from agentjax.engine.run import LaneSpec, run_lanes
from agentjax.performance import Affine
from agentjax.workloads import Call, Program
from agentjax.workloads.pack import pack
from tests import engine_cases


def program(new, output):
    return Program("job", 0.0, (((Call(4, 1, None, None, 0.0), Call(new, output, None, None, 0.0)),),))


def cluster(**limits):
    limits = {"block_size": 4, "kv_blocks": 8, "async_scheduling": False} | limits
    return Cluster(**limits, performance=Affine(0.01))


@pytest.mark.parametrize(
    ("limits", "needs", "limit"),
    [({"kv_blocks": 3}, "4 KV blocks", 3), ({"max_model_len": 13}, "14 tokens of context", 13)],
)
def test_a_call_that_can_never_fit_is_refused(limits, needs, limit):
    with pytest.raises(InputError) as error:
        simulate([program(3, 6)], cluster(**limits))
    assert str(error.value) == (
        f"program 'job', calls[1]: found a prompt of 8 and an output of 6 tokens, {needs} in all, "
        f"expected at most {limit}, all that a replica has"
    )


def test_a_call_that_just_fits_runs():
    result = simulate([program(3, 6)], cluster(kv_blocks=4, max_model_len=14))
    assert result.attrs["status"] == "completed"
    assert result["finished_s"].values.tolist() == [0.01, 0.07]


def lanes_beside_a_good_one(*programs, **limits):
    """A run of one lane for each program, which need not fit, and a last lane that completes."""
    workloads = [pack([each]) for each in (*programs, program(1, 1))]
    lanes = [LaneSpec(index, cluster(kv_blocks=3, **limits), Policy()) for index in range(len(workloads))]
    return run_lanes(workloads, lanes)


@pytest.mark.parametrize(("asynchronous", "makespan_ns"), [(False, 20_000_000), (True, 40_000_000)])
def test_a_lane_that_can_admit_nothing_is_flagged(monkeypatch, asynchronous, makespan_ns):
    monkeypatch.setattr(run, "refuse_unfit", lambda *limits: None)
    too_long = program(20, 1), program(3, 40)  # the prompt; the output
    outcome = lanes_beside_a_good_one(*too_long, async_scheduling=asynchronous)
    assert outcome.status.tolist() == [1, 1, 0]
    assert run.STATUS[1] == "deadlocked: calls wait, none runs and none can be admitted"
    assert (outcome.call_finished_ns[:, 0] == 10_000_000).all()
    assert (outcome.call_finished_ns[:2, 1] == -1).all()
    assert outcome.makespan_ns.tolist() == [-1, -1, makespan_ns]  # each end is seen an iteration late


def test_a_lane_that_makes_no_progress_is_flagged(monkeypatch):
    engine_cases.compile_anew(monkeypatch)
    monkeypatch.setattr(engine, "step", lambda state, *rest: (state, None))
    outcome = lanes_beside_a_good_one()
    assert outcome.status.tolist() == [2]
    assert run.STATUS[2] == "no progress within a chunk of steps"


def test_many_events_of_one_instant_are_progress(monkeypatch):
    engine_cases.compile_anew(monkeypatch)
    monkeypatch.setattr(engine, "CHUNK", 4)
    burst = [Program(f"job {index}", 0.0, program(1, 1).stages) for index in range(16)]
    outcome = run_lanes([pack(burst)], [LaneSpec(0, cluster(), Policy())])
    assert outcome.status.tolist() == [0]
    assert (outcome.program_finished_ns > 0).all()
