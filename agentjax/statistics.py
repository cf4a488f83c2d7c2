"""Comparison of configurations over workload seeds: paired changes and their intervals."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with a confidence interval; its bounds are NaN with fewer than two seeds."""

    mean: float
    low: float
    high: float
    seeds: int


def t_cdf(t: float, degrees: int) -> float:
    """Distribution function of Student's t with an integer number of degrees of freedom.

    The finite trigonometric sums of Abramowitz and Stegun, 26.7.3 and 26.7.4: exact up to rounding.
    """
    theta = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    if degrees % 2:
        term, total = cosine, 0.0
        for k in range(1, degrees - 1, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        inside = 2 / math.pi * (theta + sine * total)
    else:
        term, total = 1.0, 0.0
        for k in range(0, degrees - 1, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        inside = sine * total
    return 0.5 * (1 + inside)


def t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t falls below with the given probability, by bisection of `t_cdf`."""
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return 0.5 * (low + high)


def mean_interval(values: Float[np.ndarray, " seeds"], confidence: float = CONFIDENCE) -> Interval:
    """Mean and Student t interval over seeds; seeds without a value (NaN) are left out."""
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(values.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = t_quantile(0.5 + confidence / 2, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def change_percent(
    values: Float[np.ndarray, "*points seeds"], baseline: Float[np.ndarray, " seeds"]
) -> Float[np.ndarray, "*points seeds"]:
    """Change against the baseline run of the same seed, in per cent.

    Seeds draw different workloads, whose level differs far more than policies do; within a seed the workload
    is the same, so the change is taken seed by seed and only then averaged.
    """
    return 100.0 * (np.asarray(values, float) / np.asarray(baseline, float) - 1.0)
