"""Running lanes: what goes in, how it is grouped, and what comes out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from agentjax.engine.gaps import Gaps, count_gaps
from agentjax.engine.lanes import FIRST_WINDOW, Ended, stream
from agentjax.engine.observe import Sample
from agentjax.engine.stack import LaneSpec, stack_traffic
from agentjax.engine.state import (
    BAD_PRIORITY,
    BAD_RETENTION,
    BAD_ROUTE,
    CUT,
    DEADLOCKED,
    DONE,
    FINE,
    NEVER,
    PROGRAM_RECORD,
    RECORD,
    STALLED,
    TOO_LONG,
    Shape,
    State,
    Traffic,
)
from agentjax.errors import InputError, complaint
from agentjax.policies.policy import PolicySpace, used
from agentjax.workloads.pack import Workload, refuse_unfit

__all__ = ["STATUS", "LaneSpec", "Outcome", "fault_of", "run_lanes", "stream_lanes"]

WIDTH = 64
"""Lanes that run side by side at most."""

STATUS = {
    FINE: "completed",
    DEADLOCKED: "deadlocked: calls wait, none runs and none can be admitted",
    STALLED: "no progress within a chunk of steps",
    CUT: "cut at its horizon: not all programs have ended",
    BAD_PRIORITY: "its scheduling policy answered a priority that is no finite number",
    BAD_ROUTE: "its routing policy answered a replica that there is not",
    BAD_RETENTION: "its retention policy answered a protection time that is no number",
    TOO_LONG: "an iteration that never ends, or an end later than 36 years",
}
"""What `Outcome.status` says of a lane."""

_FAULTS = {
    BAD_PRIORITY: ("scheduling", "a priority that is NaN or infinite", "a finite number"),
    BAD_ROUTE: ("routing", "a replica that there is not", "a replica in use: obs.replicas.in_use"),
    BAD_RETENTION: ("retention", "a protect_s that is NaN", "seconds, 0 or inf"),
}


@dataclass(frozen=True)
class Outcome:
    """Results, one lane a row; times in ns, −1 where something did not happen; calls in the order of the
    workload.

    The arrays of calls are None where no call records were kept, those of gaps where none were counted.
    """

    call_released_ns: Int[np.ndarray, "lanes calls"] | None
    call_scheduled_ns: Int[np.ndarray, "lanes calls"] | None
    call_first_token_ns: Int[np.ndarray, "lanes calls"] | None
    call_finished_ns: Int[np.ndarray, "lanes calls"] | None
    call_service_ns: Int[np.ndarray, "lanes calls"] | None
    call_cached_tokens: Int[np.ndarray, "lanes calls"] | None
    call_resumed_tokens: Int[np.ndarray, "lanes calls"] | None
    call_preemptions: Int[np.ndarray, "lanes calls"] | None
    call_replica: Int[np.ndarray, "lanes calls"] | None
    call_longest_gap_ns: Int[np.ndarray, "lanes calls"] | None  # between two tokens of the call
    program_finished_ns: Int[np.ndarray, "lanes programs"]
    program_service_ns: Int[np.ndarray, "lanes programs"]
    prompt_tokens: Int[np.ndarray, " lanes"]
    hit_tokens: Int[np.ndarray, " lanes"]  # at first admissions
    recomputed_tokens: Int[np.ndarray, " lanes"]  # prefill of preempted calls
    wasted_tokens: Int[np.ndarray, " lanes"]  # of calls that had ended or been preempted meanwhile
    preemptions: Int[np.ndarray, " lanes"]
    evicted_blocks: Int[np.ndarray, " lanes"]  # blocks with content that were reclaimed
    iterations: Int[np.ndarray, " lanes"]
    empty_schedules: Int[np.ndarray, " lanes"]
    steps: Int[np.ndarray, " lanes"]
    busy_ns: Int[np.ndarray, "lanes replicas"]
    makespan_ns: Int[np.ndarray, " lanes"]
    status: Int[np.ndarray, " lanes"]
    token_gaps: tuple[Gaps, ...] | None  # of each lane
    series: Sample | None  # of a single lane, where asked for


def run_lanes(workloads: Sequence[Workload], lanes: Sequence[LaneSpec], **options: Any) -> Outcome:
    """Simulate lanes to their ends, side by side on all devices of the default backend.

    Args and Raises: as of `stream_lanes`.
    """
    parts, indices = [], []
    for index, part in stream_lanes(workloads, lanes, **options):
        parts.append(part)
        indices += index
    back = np.argsort(indices, kind="stable")

    def joined(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if values[0] is None or name == "series":
            return values[0]
        if name == "token_gaps":
            flat = [gaps for value in values for gaps in value]
            return tuple(flat[row] for row in back)
        return np.concatenate(values)[back]

    return Outcome(**{field.name: joined(field.name) for field in fields(Outcome)})


def stream_lanes(
    workloads: Sequence[Workload],
    lanes: Sequence[LaneSpec],
    *,
    calls: bool = True,
    leaps: bool = True,
    gaps: bool = False,
    checks: bool = False,
    series: bool = False,
    width: int = WIDTH,
    window: int = FIRST_WINDOW,
    policies: PolicySpace | None = None,
    progress: Callable[[float], None] | None = None,
) -> Iterator[tuple[list[int], Outcome]]:
    """Simulate lanes and give each one's outcome when it has ended, with its index among the lanes; a lane
    that ends makes room for one that waits.

    Args:
        workloads: what the lanes refer to.
        lanes: the configurations; all with the same kind of performance model.
        calls: keep a record of every call (80 bytes each).
        leaps: take many iterations in one step where nothing can change; the results are the same without.
        gaps: count the times between tokens.
        checks: verify the invariants after every step (slow) and raise at the first that does not hold.
        series: keep the replicas' state at every event, of a single lane.
        width: most lanes side by side.
        window: programs in flight that there is room for at first; no result depends on it.
        policies: what is compiled; None: what the lanes use.
        progress: called with the share of the work that is done, 0 to 1.

    Raises:
        InputError: no lanes, series of more than one, lanes that cannot run together, or a call that never
            fits into a replica of its lane.
    """
    if not lanes:
        raise complaint("lanes", "none", "at least one")
    if series and len(lanes) > 1:
        raise complaint("series", f"{len(lanes)} lanes", "one lane: time series are kept of single runs")
    _refuse_mixed(workloads, lanes)
    refuse_unfit_lanes(workloads, lanes)
    with jax.enable_x64(True):
        traffic = stack_traffic(workloads)
        first = lanes[0].cluster
        programs = traffic.arrival.shape[1]
        threads = min(programs, window)
        shape = Shape(
            programs=programs,
            threads=threads,
            reuses=threads < programs,
            replicas=max(spec.cluster.replicas for spec in lanes),
            prefixes=0 if first.slots else traffic.prefix_tokens.shape[1],  # a slot holds its own copy
            calls=traffic.new_tokens.shape[1],
            slots=max(spec.cluster.max_num_seqs for spec in lanes) if first.slots else 0,
            policies=policies or used([spec.policy for spec in lanes]),
            asynchronous=bool(first.async_scheduling),
            compacts=bool(np.any(np.asarray(traffic.kept_tokens) >= 0)),
            chunked=any(spec.cluster.long_prefill_token_threshold for spec in lanes),
            leaps=leaps,
            records=calls,
            gaps=gaps,
            checks=checks,
            series=series,
        )
        ends = stream(lanes, traffic, shape, width, progress or (lambda share: None))
    while True:
        with jax.enable_x64(True):
            ended = next(ends, None)
        if ended is None:
            return
        yield [end.index for end in ended], _outcome(ended, traffic, workloads, lanes)


def fault_of(status: int, spec: LaneSpec) -> InputError | None:
    """The complaint about a lane that something it was given has spoilt: a policy's answer, or durations
    that no clock holds; None for any other status.
    """
    if status in _FAULTS:
        family, found, expected = _FAULTS[status]
        return complaint(f"{family} {getattr(spec.policy, family).member.name!r}", found, expected)
    if status == TOO_LONG:
        return complaint("performance", "an iteration that ends later than 36 years", "less time")
    return None


def _refuse_mixed(workloads: Sequence[Workload], lanes: Sequence[LaneSpec]) -> None:
    """Slots and asynchronous scheduling are part of the compiled program; slots leave a retention policy
    nothing to decide; and with short chunks several calls could compute one shared prefix side by side, each
    in blocks of its own, which the counts of the pool do not hold.
    """
    for name in ("slots", "async_scheduling"):
        if len({getattr(spec.cluster, name) for spec in lanes}) > 1:
            raise complaint(
                f"cluster.{name}", "true and false", "the same in all lanes that are run together"
            )
    for spec in lanes:
        chunk = spec.cluster.long_prefill_token_threshold
        if chunk and (workloads[spec.workload].prefix >= 0).any():
            raise complaint(
                "cluster.long_prefill_token_threshold", str(chunk), "0, for programs have a shared prefix"
            )
    for spec in lanes if lanes[0].cluster.slots else ():
        name = spec.policy.retention.member.name
        if name != "lru":
            raise complaint("retention", repr(name), "lru, for contexts stay in their slots (cluster.slots)")


def refuse_unfit_lanes(workloads: Sequence[Workload], lanes: Sequence[LaneSpec]) -> None:
    """Refuse lanes with a call that never fits into a replica.

    Raises:
        InputError: names the program and the call.
    """
    names = ("kv_blocks", "block_size", "max_context_tokens")
    limits = {(spec.workload, *(getattr(spec.cluster, name) for name in names)) for spec in lanes}
    for workload, *most in sorted(limits):
        refuse_unfit(workloads[workload], *most)


def _outcome(
    ended: Sequence[Ended], traffic: Traffic, workloads: Sequence[Workload], specs: Sequence[LaneSpec]
) -> Outcome:
    """The final states as an `Outcome`."""
    final: Any = jax.tree.map(lambda *x: np.stack(x), *[end.state for end in ended])
    totals, pools = final.totals, final.replicas.pool
    which = np.asarray([specs[end.index].workload for end in ended])
    records = None if final.records is None else _records(final)
    programs = final.programs[:, :-1]
    finished = programs[:, :, PROGRAM_RECORD.index("finished")]
    calls = np.asarray(traffic.calls)[which].sum(axis=1)
    complete = totals.completions == calls
    status = np.where((final.fault == FINE) & ~complete, CUT, final.fault)
    prompts = np.asarray([int(np.sum(workload.prompt_tokens, dtype=np.int64)) for workload in workloads])

    def column(name: str) -> np.ndarray | None:
        return None if records is None else records[:, :, RECORD.index(name)]

    has_gaps = final.threads.gaps is not None
    return Outcome(
        call_released_ns=column("released"),
        call_scheduled_ns=column("scheduled"),
        call_first_token_ns=column("first_token"),
        call_finished_ns=column("finished"),
        call_service_ns=column("service"),
        call_cached_tokens=column("cached"),
        call_resumed_tokens=column("resumed"),
        call_preemptions=column("preemptions"),
        call_replica=column("replica"),
        call_longest_gap_ns=column("longest_gap") if has_gaps else None,
        program_finished_ns=finished,
        program_service_ns=programs[:, :, PROGRAM_RECORD.index("service")],
        prompt_tokens=prompts[which],
        hit_tokens=totals.hits,
        recomputed_tokens=totals.recomputed,
        wasted_tokens=totals.wasted,
        preemptions=totals.preemptions,
        evicted_blocks=pools.evicted.sum(axis=1),
        iterations=totals.iterations,
        empty_schedules=totals.empty_schedules,
        steps=totals.steps,
        busy_ns=final.replicas.busy,
        makespan_ns=np.where(complete, final.now, -1),
        status=status,
        token_gaps=tuple(count_gaps(end.told, end.state) for end in ended) if has_gaps else None,
        series=_series(ended[0].samples) if ended[0].samples and ended[0].samples[0] is not None else None,
    )


def _series(samples: Sequence[Sample]) -> Sample:
    """The samples of all chunks, one an instant: the last."""
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *samples)
    last = np.append(np.diff(joined.now) > 0, True)
    return jax.tree.map(lambda values: values[last], joined)


def _records(final: State) -> np.ndarray:
    """The call records, with what is known of calls that have been released and not ended."""
    assert final.records is not None
    threads = final.threads
    records = np.array(final.records[:, :-1])
    lane, thread = np.nonzero((threads.status != DONE) & (threads.replica >= 0) & (threads.wake >= NEVER))
    known = {
        "released": threads.released,
        "scheduled": threads.first_scheduled,
        "first_token": threads.first_token,
        "cached": np.where(threads.first_scheduled >= 0, threads.cached, -1),
        "preemptions": threads.preemptions,
        "resumed": threads.resumed,
        "replica": threads.replica,
    }
    for name, values in known.items():
        records[lane, threads.call[lane, thread], RECORD.index(name)] = np.asarray(values)[lane, thread]
    return records
