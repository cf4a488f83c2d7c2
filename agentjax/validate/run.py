"""The simulation of a measured run, and what comes out of the comparison."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import equinox as eqx
import numpy as np

from agentjax.cluster import LIMITS, Cluster
from agentjax.engine.run import STATUS, LaneSpec, Outcome, run_lanes
from agentjax.errors import complaint
from agentjax.metrics import CallTimes, tpot_s
from agentjax.performance import AbstractPerformance
from agentjax.policies import Policy
from agentjax.validate.compare import (
    Error,
    Timeline,
    as_json,
    errors,
    request_errors,
    timeline,
    timeline_error_pct,
)
from agentjax.validate.measured import Measured
from agentjax.validate.replay import Replay, replay
from agentjax.workloads.pack import SECOND, pack

ENOUGH = "enough"
"""`kv_blocks` of a cluster in which nothing ever waits for memory and nothing is evicted."""

_ARGUMENTS = {
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "reserve_full_isl": "scheduler_reserve_full_isl",
    "watermark": "watermark",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
}
"""Limits of a cluster, and the engine arguments that state them where they are not the defaults."""

_FIT_TURNS = 12
_FIT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Validation:
    """A measured and a simulated run, and its errors; requests in order of their index."""

    measured: Measured
    cluster: Cluster
    start: str
    replay: Replay
    measured_calls: CallTimes
    simulated_calls: CallTimes
    errors: Mapping[str, Error]
    request_errors: Mapping[str, Mapping[str, float | None]]
    measured_timeline: Timeline
    simulated_timeline: Timeline
    timeline_error_pct: float
    prompt_tokens: int
    hit_tokens: int
    preemptions: int
    evicted_blocks: int
    iterations: int

    @property
    def recorded_hit_tokens(self) -> int:
        """Prompt tokens of whole blocks that an earlier request's prompt has, as recorded."""
        return int(self.measured.shared_blocks.sum()) * self.cluster.block_size

    def to_json(self) -> dict[str, Any]:
        """All of it but the requests themselves, as plain values; times in s, NaN as None."""
        measured, cluster = self.measured, self.cluster
        limits = {name: getattr(cluster, name) for name in LIMITS}
        return {
            "run": measured.name,
            "model": measured.model,
            "hardware": measured.hardware,
            "engine": measured.engine,
            "requests": len(measured.index),
            "start": self.start,
            "cluster": limits,
            "overhead_s": float(np.asarray(cluster.performance.overhead_s)),
            "errors": {
                name: {key: _plain(value) for key, value in asdict(error).items()}
                | (
                    {"peer_error_pct": measured.peer_error_pct[name]}
                    if name in measured.peer_error_pct
                    else {}
                )
                for name, error in self.errors.items()
            },
            "requests_error": {name: dict(values) for name, values in self.request_errors.items()},
            "generation_throughput_error_pct": _plain(self.timeline_error_pct),
            "prefix": {
                "prompt_tokens": self.prompt_tokens,
                "hit_tokens": self.hit_tokens,
                "recorded_hit_tokens": self.recorded_hit_tokens,
                "substituted_lenders": self.replay.substitutes,
                "matches_left_out": self.replay.unmatched,
            },
            "preemptions": self.preemptions,
            "evicted_blocks": self.evicted_blocks,
            "iterations": self.iterations,
            "peer_source": measured.peer_source or None,
            "timeline": {
                "measured": as_json(self.measured_timeline),
                "simulated": as_json(self.simulated_timeline),
            },
        }


def measured_cluster(
    measured: Measured, performance: AbstractPerformance, limits: Mapping[str, Any] | None = None
) -> Cluster:
    """The cluster of a measured run.

    Args:
        measured: the run; its version and engine settings are the limits, vLLM's defaults where it states
            none.
        performance: iteration times of one replica.
        limits: those that differ, by name; None stands for the run's own. `kv_blocks` may be `ENOUGH`.

    Raises:
        InputError: an unknown limit or a value that it cannot have.
    """
    settings = measured.settings
    given = {name: value for name, value in (limits or {}).items() if value is not None}
    own: dict[str, Any] = {
        "replicas": settings.data_parallel_size,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "block_size": 16,
        "vllm": measured.vllm,
    }
    if not given.get("slots"):
        own["async_scheduling"] = measured.async_scheduling
    for name, argument in _ARGUMENTS.items():
        if (value := getattr(settings, argument)) is not None:
            own[name] = value
    merged = own | given
    if merged.get("kv_blocks", ENOUGH) == ENOUGH:
        size = merged["block_size"]
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise complaint("cluster.block_size", repr(size), "an integer from 1")
        contexts = measured.input_tokens + measured.output_tokens
        merged["kv_blocks"] = int(np.sum(-(-contexts // size) + 1))
    unknown = [name for name in merged if name not in LIMITS]
    if unknown:
        raise complaint("cluster", f"an unknown key {unknown[0]!r}", "a limit of a cluster")
    return Cluster(**merged, performance=performance)


def validate(
    measured: Measured,
    cluster: Cluster,
    policy: Policy | None = None,
    *,
    start: str = "queued",
    prefixes: bool = True,
) -> Validation:
    """Serve the requests of a measured run on a simulated cluster and compare.

    Every request is a program of one call, released at the instant that `start` names; the metrics of both
    sides count from that instant.

    Args:
        measured: the run.
        cluster: where it is served, usually `measured_cluster`.
        policy: vLLM's own behaviour where absent.
        start: `queued`, when the engine noted the request, or `arrival`, when the client sent it.
        prefixes: simulate the recorded matches between prompts.

    Raises:
        InputError: an unknown start, a request that can never run on the cluster, or a run that does not end.
    """
    replayed = replay(measured, start, cluster.block_size, prefixes)
    outcome = _simulate(replayed, cluster, policy)
    theirs, ours = _measured_calls(measured, start), _simulated_calls(outcome, replayed, measured)
    end = float(max(np.max(theirs.finished_s), np.max(ours.finished_s)))
    lines = timeline(theirs, end), timeline(ours, end)
    return Validation(
        measured=measured,
        cluster=cluster,
        start=start,
        replay=replayed,
        measured_calls=theirs,
        simulated_calls=ours,
        errors=errors(theirs, ours),
        request_errors=request_errors(theirs, ours),
        measured_timeline=lines[0],
        simulated_timeline=lines[1],
        timeline_error_pct=timeline_error_pct(*lines),
        prompt_tokens=int(outcome.prompt_tokens[0]),
        hit_tokens=int(outcome.hit_tokens[0]),
        preemptions=int(outcome.preemptions[0]),
        evicted_blocks=int(outcome.evicted_blocks[0]),
        iterations=int(outcome.iterations[0]),
    )


def fit_overhead(
    measured: Measured,
    cluster: Cluster,
    policy: Policy | None = None,
    *,
    start: str = "queued",
    prefixes: bool = True,
) -> float:
    """The overhead of an iteration (s) with which the mean TPOT of the simulated run is the measured one.

    0 if the simulated run is too slow without any. It is fitted to this run, so that this run no longer tests
    it; other runs of the same engine do.
    """
    replayed = replay(measured, start, cluster.block_size, prefixes)
    target = float(np.nanmean(tpot_s(_measured_calls(measured, start))))

    def excess(overhead_s: float) -> float:
        outcome = _simulate(replayed, with_overhead(cluster, overhead_s), policy)
        return float(np.nanmean(tpot_s(_simulated_calls(outcome, replayed, measured)))) - target

    low, at_low = 0.0, excess(0.0)
    if at_low >= 0:
        return 0.0
    high = -at_low
    at_high = excess(high)
    for _ in range(_FIT_TURNS):
        if abs(at_high) <= _FIT_TOLERANCE * target or at_high == at_low:
            break
        low, high, at_low = high, max(0.0, high - at_high * (high - low) / (at_high - at_low)), at_high
        at_high = excess(high)
    return high


def with_overhead(cluster: Cluster, overhead_s: float) -> Cluster:
    """The cluster with another overhead per iteration."""
    performance = eqx.tree_at(
        lambda model: model.overhead_ns, cluster.performance, np.asarray(round(overhead_s * SECOND, 6))
    )
    return replace(cluster, performance=performance)


def _simulate(replayed: Replay, cluster: Cluster, policy: Policy | None) -> Outcome:
    outcome = run_lanes([pack(replayed.programs)], [LaneSpec(0, cluster, policy or Policy())])
    status = int(outcome.status[0])
    if status:
        raise complaint("simulated run", f"one that is {STATUS[status]}", "one that completes")
    return outcome


def _measured_calls(measured: Measured, start: str) -> CallTimes:
    return CallTimes(
        released_s=getattr(measured, f"{start}_s"),
        scheduled_s=measured.scheduled_s,
        first_token_s=measured.first_token_s,
        finished_s=measured.last_token_s,
        output_tokens=measured.output_tokens,
    )


def _simulated_calls(outcome: Outcome, replayed: Replay, measured: Measured) -> CallTimes:
    """The simulated calls in the order of the measured requests."""
    count = len(replayed.order)

    def seconds(column: np.ndarray | None) -> np.ndarray:
        assert column is not None
        values = np.empty(count)
        values[replayed.order] = np.where(column[0][:count] >= 0, column[0][:count] / SECOND, np.nan)
        return values

    return CallTimes(
        released_s=seconds(outcome.call_released_ns),
        scheduled_s=seconds(outcome.call_scheduled_ns),
        first_token_s=seconds(outcome.call_first_token_ns),
        finished_s=seconds(outcome.call_finished_ns),
        output_tokens=measured.output_tokens,
    )


def _plain(value: float | None) -> float | None:
    return None if value is None or np.isnan(value) else round(float(value), 9)
