"""Errors of a simulated run against a measured one; both sides by the definitions of `agentjax.metrics`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from agentjax.metrics import CallTimes, e2e_s, queue_delay_s, tpot_s, ttft_s

METRICS: Mapping[str, Callable[[CallTimes], np.ndarray]] = {
    "ttft": ttft_s,
    "tpot": tpot_s,
    "e2e": e2e_s,
    "queue_delay": queue_delay_s,
}
"""Metrics of a call that are compared."""

STATISTICS = {"mean": None, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
"""Statistics of each; percentiles interpolate linearly between order statistics."""

LEAST_S = 1e-3
"""Below this a measured duration has no error in per cent: the queue delay of one that did not queue."""

TICK_S = 1.0
"""Width of the bins of a timeline."""


@dataclass(frozen=True)
class Error:
    """A statistic on both sides (s), and the error of the simulated one in per cent (None: `LEAST_S`)."""

    measured_s: float
    simulated_s: float
    error_pct: float | None


@dataclass(frozen=True)
class Timeline:
    """Load over time, tick by tick; the first tick begins at 0.

    Attributes:
        time_s: end of each tick.
        generation_tokens_per_s: output tokens of the tick, on the assumption that the tokens of a call are
            evenly spread between its first and its last.
        running, waiting: calls between first scheduling and last token, and between release and first
            scheduling, at the end of the tick.
    """

    time_s: Float[np.ndarray, " ticks"]
    generation_tokens_per_s: Float[np.ndarray, " ticks"]
    running: Float[np.ndarray, " ticks"]
    waiting: Float[np.ndarray, " ticks"]


def errors(measured: CallTimes, simulated: CallTimes) -> dict[str, Error]:
    """Every statistic of every metric, as `ttft_mean`, `ttft_p50`, ..."""
    out: dict[str, Error] = {}
    for metric, of in METRICS.items():
        ours, theirs = of(simulated), of(measured)
        for statistic, percentile in STATISTICS.items():
            before, after = _statistic(theirs, percentile), _statistic(ours, percentile)
            out[f"{metric}_{statistic}"] = Error(before, after, _error_pct(before, after))
    return out


def request_errors(measured: CallTimes, simulated: CallTimes) -> dict[str, dict[str, float | None]]:
    """By metric, over requests: `mape_pct`, the mean absolute error in per cent of the measured value (None
    for the queue delay, which may be 0), and `mae_s`, the mean absolute error in s."""
    out: dict[str, dict[str, float | None]] = {}
    for metric, of in METRICS.items():
        ours, theirs = of(simulated), of(measured)
        known = ~np.isnan(ours) & ~np.isnan(theirs)
        off = np.abs(ours - theirs)[known]
        relative = None
        if metric != "queue_delay" and len(off) and np.all(theirs[known] > 0):
            relative = float(np.mean(off / theirs[known]) * 100)
        out[metric] = {"mape_pct": relative, "mae_s": float(np.mean(off)) if len(off) else None}
    return out


def timeline(calls: CallTimes, end_s: float, tick_s: float = TICK_S) -> Timeline:
    """The timeline of a run until `end_s`."""
    ticks = max(1, math.ceil(end_s / tick_s))
    edges = np.arange(ticks + 1) * tick_s
    time = edges[1:]
    intervals = np.maximum(calls.output_tokens - 1, 0)
    spacing = (calls.finished_s - calls.first_token_s) / np.maximum(intervals, 1)
    place = np.concatenate([np.arange(n) for n in intervals + 1])
    token_s = np.repeat(calls.first_token_s, intervals + 1) + place * np.repeat(spacing, intervals + 1)
    tokens, _ = np.histogram(np.clip(token_s, 0.0, edges[-1]), edges)

    def between(start: np.ndarray, end: np.ndarray) -> np.ndarray:
        inside = (start[:, None] <= time) & (time < end[:, None])
        return inside.sum(axis=0).astype(float)

    return Timeline(
        time,
        tokens / tick_s,
        between(calls.scheduled_s, calls.finished_s),
        between(calls.released_s, calls.scheduled_s),
    )


def timeline_error_pct(measured: Timeline, simulated: Timeline) -> float:
    """Mean absolute difference of the generation throughput, in per cent of the measured mean."""
    off = np.abs(simulated.generation_tokens_per_s - measured.generation_tokens_per_s)
    return float(100 * off.mean() / measured.generation_tokens_per_s.mean())


def as_json(timeline: Timeline) -> dict[str, Any]:
    """A timeline as lists."""
    return {name: np.round(values, 6).tolist() for name, values in vars(timeline).items()}


def _statistic(values: np.ndarray, percentile: float | None) -> float:
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan
    return float(known.mean() if percentile is None else np.percentile(known, percentile))


def _error_pct(measured: float, simulated: float) -> float | None:
    if math.isnan(measured) or math.isnan(simulated) or measured < LEAST_S:
        return None
    return 100 * (simulated / measured - 1)
