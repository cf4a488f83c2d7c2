"""A horizon cuts a run: what happens up to it is what happens without it, and nothing happens later."""

import random

import numpy as np
import pytest

from agentjax import Cluster, InputError, Policy, simulate
from agentjax.engine.run import LaneSpec
from agentjax.engine.state import CUT, FINE
from agentjax.performance import Affine
from agentjax.workloads import Call, Program
from tests import engine_cases
from tests.engine_cases import LANES, recorded
from tests.reference import simulator
from tests.test_engine_properties import MOMENTS, both_modes, compare, draw, sampled_before

SEEDS = range(3000, 3000 + LANES - 1)
KNOWN = {"cached_tokens": "scheduled", "replica": "released"}
"""What is known of a call from one of its moments on."""


def with_horizon(case, horizon_ns):
    programs, config = case
    return programs, config | {"until_s": horizon_ns / 1e9}


def tokens_between(case, horizon_ns):
    """How many tokens after the first their calls had got by the horizon, from the log of the reference."""
    programs, config = case
    log = []
    calls = iter(simulator.simulate(programs, config, log)["calls"])
    keys = [(p, k) for p, program in enumerate(programs) for k in range(len(program["calls"]))]
    prompts = {key: call["prompt"] for key, call in zip(keys, calls, strict=True)}
    sampled = sampled_before(log, programs, prompts, horizon_ns + 1)
    # an asynchronous batch may go on with a call that has its output
    return sum(max(0, min(sampled[p, k], programs[p]["calls"][k][1]) - 1) for p, k in keys)


@both_modes
def test_up_to_the_horizon_everything_happens_and_nothing_later(asynchronous):
    cases = draw(SEEDS, asynchronous)
    whole = engine_cases.run(cases)
    rng, horizons = random.Random(0), []
    for index, case in enumerate(cases):
        calls = recorded(whole, index, *case)["calls"]
        moment = rng.choice([call[name] for call in calls for name in MOMENTS])
        horizons.append(max(1, moment + rng.randint(-1, 1)))
    cut = engine_cases.run([with_horizon(*pair) for pair in zip(cases, horizons, strict=True)])
    for index, (seed, case, horizon) in enumerate(zip(SEEDS, cases, horizons, strict=True)):
        got, want = recorded(cut, index, *case), recorded(whole, index, *case)
        ends = [call["finished"] for call in want["calls"]]
        assert cut.status[index] == (CUT if max(ends) > horizon else FINE), f"seed {seed}"
        for a, b in zip(got["calls"], want["calls"], strict=True):
            if b["finished"] <= horizon:
                assert a == b, f"seed {seed}"
                continue
            for name in MOMENTS:
                assert a[name] == (b[name] if b[name] <= horizon else -1), f"seed {seed}: {name}"
            for name, since in KNOWN.items():
                assert a[name] == (b[name] if b[since] <= horizon else -1), f"seed {seed}: {name}"
            assert a["service_ns"] == -1
        for a, b in zip(got["programs"], want["programs"], strict=True):
            assert a == (b if b["finished"] <= horizon else {"finished": -1, "service": -1}), f"seed {seed}"
        assert sum(got["totals"]["token_gaps"].values()) == tokens_between(case, horizon), f"seed {seed}"
        for name in ("iterations", "preemptions", "hit_tokens", "wasted_tokens", "evicted_blocks"):
            assert got["totals"][name] <= want["totals"][name], f"seed {seed}: {name}"
    assert (cut.status == CUT).sum() > LANES // 2


@both_modes
def test_a_horizon_after_the_end_changes_nothing(asynchronous):
    cases = draw(SEEDS, asynchronous)
    whole = engine_cases.run(cases)
    ends = whole.makespan_ns[: len(cases)].tolist()
    ends = [end + index % 2 for index, end in enumerate(ends)]
    compare(
        SEEDS, cases, engine_cases.run([with_horizon(*pair) for pair in zip(cases, ends, strict=True)]), whole
    )


def test_the_dataset_of_a_run_that_is_cut():
    """An iteration takes 10 ms. The second call would end at 60 ms, the third is never released."""
    calls = tuple(Call(4, output, None, None, gap) for output, gap in ((2, 0.01), (3, 0.02), (1, 0.0)))
    cluster = Cluster(async_scheduling=False, performance=Affine(0.01))
    run = simulate([Program("job", 0.0, ((calls,),))], cluster, until_s=0.055)
    assert run.attrs["status"] == "cut at its horizon: not all programs have ended"
    nan = np.nan
    for name, expected in (
        ("released_s", [0, 0.03, nan]),
        ("scheduled_s", [0, 0.03, nan]),
        ("first_token_s", [0.01, 0.04, nan]),
        ("finished_s", [0.02, nan, nan]),
        ("program_finished_s", [nan]),
        ("makespan_s", nan),
    ):
        np.testing.assert_array_equal(run[name].values, expected, err_msg=name)
    assert run.iterations.item() == 4


@pytest.mark.parametrize("until_s", [0, -1, np.nan, np.inf, 1e12, True, "1"])
def test_a_horizon_is_a_number_of_seconds(until_s):
    with pytest.raises(InputError, match=r"^until_s: found .*, expected null or seconds up to"):
        LaneSpec(0, Cluster(), Policy(), until_s)
