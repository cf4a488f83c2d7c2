"""The engine against recorded runs of the vLLM 0.19.0 scheduler, call by call, to the nanosecond."""

import pytest

from tests import engine_cases
from tests.engine_cases import CALL, PROGRAM, TOTALS
from tests.reference import golden

LARGE = {"f_swe_fcfs", "g_bfcl"}


def replayed(names, **options):
    """Recordings as lanes of one run: name -> (engine's result, recorded result), and the outcome."""
    recordings = [golden.load(name) for name in names]
    cases = [golden.convert(recording) for recording in recordings]
    outcome = engine_cases.run_lanes(
        [engine_cases.workload(*case) for case in cases],
        [engine_cases.lane(index, config) for index, (_, config) in enumerate(cases)],
        **options,
    )
    assert not outcome.status.any()
    got = [engine_cases.recorded(outcome, index, *case) for index, case in enumerate(cases)]
    want = [golden.expected(recording) for recording in recordings]
    return dict(zip(names, zip(got, want, strict=True), strict=True)), outcome


@pytest.fixture(scope="module")
def all_of_them():
    return replayed(golden.NAMES)


@pytest.fixture(scope="module")
def small_ones_step_by_step():
    return replayed([name for name in golden.NAMES if name not in LARGE], leaps=False)[0]


def check(got, want):
    for kind, names in (("calls", CALL), ("programs", PROGRAM)):
        for index, (a, b) in enumerate(zip(got[kind], want[kind], strict=True)):
            assert a == {name: b[name] for name in names}, f"{kind}[{index}]"
    names = [name for name in (*TOTALS, "busy_ns") if name in want["totals"]]
    assert {name: got["totals"][name] for name in names} == {name: want["totals"][name] for name in names}


@pytest.mark.parametrize("name", golden.NAMES)
def test_equals_the_recorded_vllm_run(name, all_of_them):
    check(*all_of_them[0][name])


@pytest.mark.parametrize("name", [name for name in golden.NAMES if name not in LARGE])
def test_equals_the_recorded_vllm_run_without_leaps(name, small_ones_step_by_step):
    check(*small_ones_step_by_step[name])


def test_a_call_takes_few_steps(all_of_them):
    results, outcome = all_of_them
    steps = outcome.steps[golden.NAMES.index("f_swe_fcfs")]
    assert steps / len(results["f_swe_fcfs"][1]["calls"]) <= 8
