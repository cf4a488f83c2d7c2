"""What every service metric means, in one place, for simulated and measured runs alike.

Times are float seconds; calls and programs that have not reached an event hold NaN there, and every summary
leaves NaN out. All functions work on the last axis, so that they take one run or a stack of runs.

| metric | of each | from | to |
|---|---|---|---|
| JCT | program | arrival | last token of its last call |
| queue delay | call | release | first iteration that schedules it |
| TTFT | call | release | first token |
| TPOT | call | first token | last token, divided by (output tokens - 1); calls with one output token have
none |
| e2e | call | release | last token |
| ITL | token after a call's first | the token before | this token |
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

SUMMARIES = {"mean": None, "p50": 50.0, "p95": 95.0, "p99": 99.0}
"""Suffixes of summarised metrics; percentiles interpolate linearly between order statistics."""

LOAD_REGIMES = ("stable", "saturated", "overloaded")
STABLE_QUEUE_SHARE = 0.05
"""Below this share of the calls' time in the system spent in the queue, a run is stable."""
OVERLOAD_GROWTH = 1.5
"""Above this ratio of late to early backlog, a run that queues is overloaded; linear growth gives 2.3."""


@dataclass(frozen=True)
class CallTimes:
    """The instants of calls, in seconds, and their output tokens; NaN where an instant was not reached."""

    released_s: Float[np.ndarray, "*runs calls"]
    scheduled_s: Float[np.ndarray, "*runs calls"]
    first_token_s: Float[np.ndarray, "*runs calls"]
    finished_s: Float[np.ndarray, "*runs calls"]
    output_tokens: Int[np.ndarray, "*runs calls"]


def queue_delay_s(calls: CallTimes) -> Float[np.ndarray, "*runs calls"]:
    """Release to first scheduling."""
    return calls.scheduled_s - calls.released_s


def ttft_s(calls: CallTimes) -> Float[np.ndarray, "*runs calls"]:
    """Time to first token: release to first token."""
    return calls.first_token_s - calls.released_s


def tpot_s(calls: CallTimes) -> Float[np.ndarray, "*runs calls"]:
    """Time per output token after the first; NaN for calls with a single output token."""
    intervals = np.where(calls.output_tokens > 1, calls.output_tokens - 1.0, np.nan)
    return (calls.finished_s - calls.first_token_s) / intervals


def e2e_s(calls: CallTimes) -> Float[np.ndarray, "*runs calls"]:
    """End-to-end latency of a call: release to last token."""
    return calls.finished_s - calls.released_s


def jct_s(
    arrival_s: Float[np.ndarray, "*runs programs"], finished_s: Float[np.ndarray, "*runs programs"]
) -> Float[np.ndarray, "*runs programs"]:
    """Job completion time of a program: arrival to the last token of its last call."""
    return finished_s - arrival_s


def summarize(name: str, values: Float[np.ndarray, "*runs n"]) -> dict[str, Float[np.ndarray, "*runs"]]:
    """Mean and percentiles over the last axis, as `name_mean`, `name_p50`, ...; NaN without values."""
    out: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all-NaN slices give NaN, which is what is meant
        for suffix, percentile in SUMMARIES.items():
            if percentile is None:
                out[f"{name}_{suffix}"] = np.nanmean(values, axis=-1)
            else:
                out[f"{name}_{suffix}"] = np.nanpercentile(values, percentile, axis=-1)
    return out


def summarize_counts(
    name: str, values: Float[np.ndarray, " n"], counts: Int[np.ndarray, " n"]
) -> dict[str, float]:
    """What `summarize` gives of every value repeated as often as it is counted, and the largest
    (`name_max`); `values` ascend.
    """
    total = int(counts.sum())
    if total == 0:
        return {f"{name}_{suffix}": float("nan") for suffix in (*SUMMARIES, "max")}
    last = np.cumsum(counts)  # places in the order of all values, from 1, at which each value ends
    out: dict[str, float] = {}
    for suffix, percentile in SUMMARIES.items():
        if percentile is None:
            out[f"{name}_{suffix}"] = float((values * counts).sum() / total)
            continue
        place = percentile / 100 * (total - 1)
        low, high = values[np.searchsorted(last, [math.floor(place), math.ceil(place)], side="right")]
        out[f"{name}_{suffix}"] = float(low + (high - low) * (place - math.floor(place)))
    return out | {f"{name}_max": float(values[-1])}


def waiting_calls(calls: CallTimes, start_s: float, end_s: float) -> float:
    """Calls released but not yet scheduled for the first time, averaged over a window of time (one run)."""
    if not end_s > start_s:
        return float("nan")
    left = np.where(np.isnan(calls.scheduled_s), np.inf, calls.scheduled_s)
    overlap = np.minimum(left, end_s) - np.maximum(calls.released_s, start_s)
    return float(np.nansum(np.clip(overlap, 0.0, None)) / (end_s - start_s))


def queue_share(calls: CallTimes) -> float:
    """Share of the calls' end-to-end time that passes before they are first scheduled (one run)."""
    total = np.nansum(e2e_s(calls))
    waited = np.nansum(np.where(np.isnan(calls.finished_s), np.nan, queue_delay_s(calls)))
    return float(waited / total) if total > 0 else 0.0


def backlog_growth(calls: CallTimes, arrival_s: Float[np.ndarray, " programs"]) -> float:
    """Waiting calls in the last quarter of the arrival window against its second quarter.

    The arrival window runs from the first program's arrival to the last one's. One call is added to both, so
    that short queues do not count as growth. 1 where all programs arrive at once.
    """
    first, last = np.nanmin(arrival_s), np.nanmax(arrival_s)
    quarter = (last - first) / 4
    if not quarter > 0:
        return 1.0
    early = waiting_calls(calls, first + quarter, first + 2 * quarter)
    late = waiting_calls(calls, last - quarter, last)
    return (late + 1.0) / (early + 1.0)


def load_regime(queue_share: float, backlog_growth: float) -> str:
    """The load of one run, judged by its queue.

    A replica under continuous batching is busy whenever any call is running, so its busy share does not tell
    how much more it could take; its queue does.

    * stable: calls spend less than 5 % of their time in the system waiting to be scheduled. Policies that
      order the queue or protect contexts have little to decide.
    * saturated: calls wait, but no more of them towards the end of the arrival window than earlier in it.
    * overloaded: calls wait, and ever more of them while programs still arrive: the late backlog is more than
      1.5 times the early one. Job completion times then depend on how many programs the run has.
    """
    if queue_share < STABLE_QUEUE_SHARE:
        return LOAD_REGIMES[0]
    return LOAD_REGIMES[2] if backlog_growth > OVERLOAD_GROWTH else LOAD_REGIMES[1]


def run_metrics(
    calls: CallTimes,
    arrival_s: Float[np.ndarray, " programs"],
    program_finished_s: Float[np.ndarray, " programs"],
    busy_s: float,
    replicas: int,
    totals: Mapping[str, int],
) -> dict[str, Any]:
    """Every metric of one run, by name.

    Args:
        calls: the run's calls.
        arrival_s: arrival of every program.
        program_finished_s: completion of every program, NaN where it did not complete.
        busy_s: time in iterations, summed over the replicas.
        replicas: number of replicas in use.
        totals: `prompt_tokens`, `hit_tokens` and `preemptions` of the run.
    """
    jct = jct_s(arrival_s, program_finished_s)
    done: Bool[np.ndarray, " programs"] = ~np.isnan(jct)
    makespan = float(np.nanmax(program_finished_s) - np.nanmin(arrival_s)) if done.any() else float("nan")
    share, growth = queue_share(calls), backlog_growth(calls, arrival_s)
    out: dict[str, Any] = {"jct": jct}
    for name, values in (
        ("jct", jct),
        ("ttft", ttft_s(calls)),
        ("tpot", tpot_s(calls)),
        ("queue_delay", queue_delay_s(calls)),
        ("e2e", e2e_s(calls)),
    ):
        out |= summarize(name, values)
    out["makespan"] = makespan
    out["throughput"] = done.sum() / makespan if makespan > 0 else float("nan")
    out["hit_rate"] = (
        totals["hit_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else float("nan")
    )
    out["preemptions"] = int(totals["preemptions"])
    out["utilization"] = busy_s / (replicas * makespan) if makespan > 0 else float("nan")
    out["busy"] = busy_s
    out["completed"] = int(done.sum())
    out["output_tokens"] = int(calls.output_tokens[~np.isnan(calls.finished_s)].sum())
    out["queue_share"] = share
    out["backlog_growth"] = growth
    out["load_regime"] = load_regime(share, growth)
    return out
