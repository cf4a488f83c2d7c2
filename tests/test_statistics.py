"""Student t by its closed form, and paired comparison over seeds."""

import math

import numpy as np
import pytest

from agentjax.statistics import change_percent, mean_interval, t_cdf, t_quantile

TABLE = {
    1: 12.7062,
    2: 4.3027,
    3: 3.1824,
    4: 2.7764,
    7: 2.3646,
    9: 2.2622,
    15: 2.1314,
    30: 2.0423,
    120: 1.9799,
}
"""0.975 quantiles as printed in tables, by degrees of freedom."""


@pytest.mark.parametrize(("degrees", "value"), TABLE.items())
def test_quantiles_equal_the_printed_ones(degrees: int, value: float):
    assert t_quantile(0.975, degrees) == pytest.approx(value, abs=5e-5)
    assert t_quantile(0.025, degrees) == pytest.approx(-value, abs=5e-5)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 63])
def test_distribution_equals_scipy(degrees: int):
    stats = pytest.importorskip("scipy.stats")
    for t in (-7.0, -1.3, 0.0, 0.4, 2.0, 11.0):
        assert t_cdf(t, degrees) == pytest.approx(stats.t.cdf(t, degrees), abs=1e-12)


def test_interval_of_known_values():
    interval = mean_interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (interval.mean, interval.seeds) == (3.0, 5)
    assert (interval.low, interval.high) == pytest.approx((3 - half, 3 + half), abs=1e-5)


def test_interval_without_enough_seeds():
    assert math.isnan(mean_interval(np.array([2.0])).low)
    assert mean_interval(np.array([2.0, np.nan])).seeds == 1
    assert math.isnan(mean_interval(np.array([np.nan])).mean)


def test_interval_covers_the_mean_as_often_as_it_says():
    draw = np.random.default_rng(0).normal(5.0, 2.0, (2000, 6))
    intervals = [mean_interval(values) for values in draw]
    share = np.mean([interval.low <= 5.0 <= interval.high for interval in intervals])
    assert share == pytest.approx(0.95, abs=0.015)


def test_changes_are_paired_by_seed():
    level = np.array([100.0, 1000.0, 10_000.0])
    change = change_percent(0.9 * level, level)
    np.testing.assert_allclose(change, -10.0)
    interval = mean_interval(change)
    assert (interval.low, interval.high) == pytest.approx((-10.0, -10.0))
