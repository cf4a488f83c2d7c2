"""The engine against recorded runs of vLLM's scheduler, call by call, to the nanosecond: 0.19.0 and 0.33.0,
synchronous and asynchronous.
"""

from functools import cache

import pytest

from tests import engine_cases
from tests.engine_cases import CALL, PROGRAM, TOTALS
from tests.reference import golden

LARGE = ("f_swe_fcfs", "g_bfcl", "s_burst300", "u_long_lifo", "p_thrash")
"""Too many steps to run them one iteration at a time."""
OTHERS = tuple(name for name in golden.SHARED_NAMES if name not in golden.NAMES)
ALL = golden.NAMES + OTHERS

beside = pytest.mark.skipif(not OTHERS, reason=f"{golden.SHARED} is not there")


def is_small(name):
    return not name.rpartition("/")[2].startswith(LARGE)


SMALL = [name for name in ALL if is_small(name)]


@cache
def recording(name):
    return golden.load(name) if name in golden.NAMES else golden.load_shared(name)


@cache
def replayed(asynchronous, leaps):
    """All recordings of a kind as lanes of one run: name -> (engine's result, recorded result, steps)."""
    names = [name for name in ALL if recording(name)["config"]["async_scheduling"] == asynchronous]
    names = names if leaps else [name for name in names if is_small(name)]
    cases = [golden.convert(recording(name)) for name in names]
    with engine_cases.priorities():
        outcome = engine_cases.run_lanes(
            [engine_cases.workload(*case) for case in cases],
            [engine_cases.lane(index, config) for index, (_, config) in enumerate(cases)],
            gaps=True,
            leaps=leaps,
            window=max(len(programs) for programs, _ in cases),  # it compiles once, and does not grow
        )
    assert not outcome.status.any()
    got = [engine_cases.recorded(outcome, index, *case) for index, case in enumerate(cases)]
    want = [golden.expected(recording(name)) for name in names]
    return dict(zip(names, zip(got, want, outcome.steps.tolist(), strict=True), strict=True))


def check(name, leaps):
    got, want, _ = replayed(recording(name)["config"]["async_scheduling"], leaps)[name]
    for kind, names in (("calls", CALL), ("programs", PROGRAM)):
        names = [each for each in names if each in want[kind][0]]
        for index, (a, b) in enumerate(zip(got[kind], want[kind], strict=True)):
            assert {each: a[each] for each in names} == {each: b[each] for each in names}, f"{kind}[{index}]"
    names = [each for each in (*TOTALS, "busy_ns") if each in want["totals"]]
    assert {each: got["totals"][each] for each in names} == {each: want["totals"][each] for each in names}


@pytest.mark.parametrize("name", [*golden.NAMES, *(OTHERS or [pytest.param("others", marks=beside)])])
def test_equals_the_recorded_vllm_run(name):
    check(name, leaps=True)


@pytest.mark.parametrize("name", SMALL)
def test_equals_the_recorded_vllm_run_without_leaps(name):
    check(name, leaps=False)


@beside
def test_wasted_tokens_were_recorded():
    """Of asynchronous runs in which the end of a call is not known in advance."""
    kinds = {name: recording(name)["config"] for name in OTHERS}
    wasted = {
        name: replayed(True, True)[name][1]["totals"]["wasted_tokens"]
        for name, config in kinds.items()
        if config["async_scheduling"] and config["finish"] == "eos"
    }
    assert len(wasted) > 3
    assert all(wasted.values())


def test_a_call_takes_few_steps():
    _, want, steps = replayed(False, True)["f_swe_fcfs"]
    assert steps / len(want["calls"]) <= 3.8
