"""Metric definitions on hand-made runs whose answers are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.metrics import (
    CallTimes,
    backlog_growth,
    e2e_s,
    jct_s,
    load_regime,
    queue_delay_s,
    queue_share,
    run_metrics,
    summarize,
    summarize_counts,
    tpot_s,
    ttft_s,
    waiting_calls,
)

NAN = np.nan


def times(released: list, scheduled: list, first: list, finished: list, output: list) -> CallTimes:
    """Calls from lists of seconds and tokens."""
    instants = [np.array(column, float) for column in (released, scheduled, first, finished)]
    return CallTimes(instants[0], instants[1], instants[2], instants[3], np.array(output))


THREE = times([0.0, 10.0, 20.0], [1.0, 10.0, 25.0], [2.0, 11.0, 26.0], [6.0, 11.0, 30.0], [5, 1, 3])


def test_calls_are_measured_from_their_release():
    np.testing.assert_allclose(queue_delay_s(THREE), [1, 0, 5])
    np.testing.assert_allclose(ttft_s(THREE), [2, 1, 6])
    np.testing.assert_allclose(e2e_s(THREE), [6, 1, 10])


def test_tpot_is_per_interval_and_leaves_single_token_calls_out():
    np.testing.assert_allclose(tpot_s(THREE), [4 / 4, NAN, 4 / 2])
    assert summarize("tpot", tpot_s(THREE))["tpot_mean"] == pytest.approx(1.5)


def test_ttft_and_tpot_add_up_to_e2e():
    intervals = np.maximum(THREE.output_tokens - 1, 0)
    np.testing.assert_allclose(ttft_s(THREE) + np.nan_to_num(tpot_s(THREE)) * intervals, e2e_s(THREE))


def test_what_did_not_happen_is_left_out():
    calls = times([0.0, 5.0], [1.0, NAN], [2.0, NAN], [3.0, NAN], [2, 2])
    assert summarize("e2e", e2e_s(calls))["e2e_mean"] == 3.0
    assert np.isnan(summarize("jct", np.array([NAN, NAN]))["jct_p99"])


def test_percentiles_interpolate_linearly():
    summary = summarize("jct", np.arange(101.0))
    assert (summary["jct_mean"], summary["jct_p50"], summary["jct_p95"], summary["jct_p99"]) == (
        50,
        50,
        95,
        99,
    )
    assert summarize("jct", np.array([0.0, 10.0]))["jct_p95"] == pytest.approx(9.5)


def test_summaries_work_on_stacks_of_runs():
    stack = np.arange(12.0).reshape(3, 4)
    np.testing.assert_allclose(summarize("jct", stack)["jct_mean"], [1.5, 5.5, 9.5])
    np.testing.assert_allclose(jct_s(np.ones((3, 4)), stack), stack - 1)


@given(st.dictionaries(st.integers(0, 10**12), st.integers(1, 50), max_size=20))
def test_a_summary_of_counted_values_is_that_of_all_of_them(times: dict):
    counted = dict(sorted(times.items()))
    values, counts = np.array([*counted], float) / 1e9, np.array([*counted.values()], np.int64)
    found = summarize_counts("itl", values, counts)
    each = np.repeat(values, counts)
    expected = summarize("itl", each) | {"itl_max": each.max() if len(each) else NAN}
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-12)


def test_a_summary_of_counted_values_by_hand():
    """11, 11 and 16 ms: p95 is nine tenths of the way from the second to the third, p99 98 hundredths."""
    found = summarize_counts("itl", np.array([11.0, 16.0]), np.array([2, 1]))
    expected = {"mean": 38 / 3, "p50": 11, "p95": 15.5, "p99": 15.9, "max": 16}
    assert found == pytest.approx({f"itl_{name}": value for name, value in expected.items()})


def test_waiting_calls_is_a_time_average():
    calls = times([0.0, 2.0], [4.0, NAN], [5.0, NAN], [6.0, NAN], [2, 2])
    assert waiting_calls(calls, 0.0, 4.0) == pytest.approx((4 + 2) / 4)
    assert waiting_calls(calls, 4.0, 8.0) == pytest.approx(1.0)


def steady(wait: float, horizon: float = 1000.0) -> tuple[CallTimes, np.ndarray]:
    """One call every second that waits for `wait` seconds and runs for one."""
    released = np.arange(horizon)
    scheduled = released + wait
    return CallTimes(released, scheduled, scheduled + 0.5, scheduled + 1, np.full(len(released), 5)), released


@pytest.mark.parametrize(("wait", "regime"), [(0.01, "stable"), (30.0, "saturated")])
def test_steady_queues(wait: float, regime: str):
    calls, arrivals = steady(wait)
    assert load_regime(queue_share(calls), backlog_growth(calls, arrivals)) == regime


def test_a_queue_that_grows_while_programs_arrive_is_overload():
    released = np.arange(1000.0)
    scheduled = released * 2  # served at half the rate of arrival
    calls = CallTimes(released, scheduled, scheduled + 1, scheduled + 2, np.full(1000, 5))
    assert backlog_growth(calls, released) == pytest.approx(875 / 375, rel=0.15)
    assert load_regime(queue_share(calls), backlog_growth(calls, released)) == "overloaded"


def test_programs_that_arrive_at_once_have_no_growth():
    calls, _ = steady(30.0)
    assert backlog_growth(calls, np.zeros(5)) == 1.0


def test_run_metrics_of_a_run():
    found = run_metrics(
        THREE,
        np.array([0.0, 10.0]),
        np.array([20.0, 30.0]),
        busy_s=15.0,
        replicas=1,
        totals={"prompt_tokens": 200, "hit_tokens": 50, "preemptions": 3},
    )
    assert found["jct_mean"] == 20.0
    assert found["makespan"] == 30.0
    assert found["throughput"] == pytest.approx(2 / 30)
    assert found["utilization"] == pytest.approx(0.5)
    assert found["hit_rate"] == 0.25
    assert (found["preemptions"], found["completed"]) == (3, 2)


def test_run_metrics_of_a_run_that_completed_nothing():
    calls = times([0.0], [NAN], [NAN], [NAN], [2])
    totals = {"prompt_tokens": 0, "hit_tokens": 0, "preemptions": 0}
    found = run_metrics(calls, np.array([0.0]), np.array([NAN]), 0.0, 1, totals)
    assert found["completed"] == 0
    assert np.isnan(found["jct_mean"])
    assert np.isnan(found["throughput"])
    assert np.isnan(found["hit_rate"])
