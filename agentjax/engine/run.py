"""Running lanes: stacking and padding, one compilation, scanning in chunks over all devices, and what comes
out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Int

from agentjax.cluster import Cluster
from agentjax.engine.check import check
from agentjax.engine.init import initial_state
from agentjax.engine.observe import Sample, sample
from agentjax.engine.state import DONE, RECORD, Lane, Limits, Shape, State, Traffic
from agentjax.engine.step import step
from agentjax.errors import complaint
from agentjax.policies.policy import Policy, PolicySpace, indexed, registered
from agentjax.workloads.pack import Workload, refuse_unfit

CHUNK = 1024
"""Steps between two looks at the lanes from outside."""

STATUS = {
    0: "completed",
    1: "deadlocked: calls wait, none runs and none can be admitted",
    2: "no progress within a chunk of steps",
}
"""What `Outcome.status` says of a lane."""


@dataclass(frozen=True)
class LaneSpec:
    """One configuration to simulate: an index into the workloads, a cluster and its policies."""

    workload: int
    cluster: Cluster
    policy: Policy


@dataclass(frozen=True)
class Outcome:
    """Results, one lane a row; times in ns, −1 where something did not happen; calls in the order of the
    workload.

    The arrays of calls are None where no call records were kept.
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
    program_finished_ns: Int[np.ndarray, "lanes programs"]
    program_service_ns: Int[np.ndarray, "lanes programs"]
    prompt_tokens: Int[np.ndarray, " lanes"]
    hit_tokens: Int[np.ndarray, " lanes"]  # at first admissions
    recomputed_tokens: Int[np.ndarray, " lanes"]  # prefill of preempted calls
    preemptions: Int[np.ndarray, " lanes"]
    evicted_blocks: Int[np.ndarray, " lanes"]  # blocks with content that were reclaimed
    iterations: Int[np.ndarray, " lanes"]
    empty_schedules: Int[np.ndarray, " lanes"]
    steps: Int[np.ndarray, " lanes"]
    busy_ns: Int[np.ndarray, "lanes replicas"]
    makespan_ns: Int[np.ndarray, " lanes"]
    status: Int[np.ndarray, " lanes"]
    series: Sample | None  # of a single lane, where asked for


def run_lanes(
    workloads: Sequence[Workload],
    lanes: Sequence[LaneSpec],
    *,
    calls: bool = True,
    leaps: bool = True,
    checks: bool = False,
    series: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Simulate lanes to their ends, side by side on all devices of the default backend.

    Args:
        workloads: what the lanes refer to.
        lanes: the configurations; all with the same kind of performance model.
        calls: keep a record of every call (72 bytes each).
        leaps: take many iterations in one step where nothing can change; the results are the same without.
        checks: verify the invariants after every step (slow) and raise at the first that does not hold.
        series: keep the replicas' state at every event, of a single lane.
        progress: called with the share of the work that is done, 0 to 1.

    Raises:
        InputError: no lanes, series of more than one, or a call that never fits into a replica of its lane.
    """
    if not lanes:
        raise complaint("lanes", "none", "at least one")
    if series and len(lanes) > 1:
        raise complaint("series", f"{len(lanes)} lanes", "one lane: time series are kept of single runs")
    _refuse_mixed(lanes)
    refuse_unfit_lanes(workloads, lanes)
    with jax.enable_x64(True):
        return _run(workloads, lanes, calls, leaps, checks, series, progress or (lambda share: None))


def _refuse_mixed(lanes: Sequence[LaneSpec]) -> None:
    """Slots are part of the compiled program, and leave a retention policy nothing to decide."""
    if len({spec.cluster.slots for spec in lanes}) > 1:
        raise complaint("cluster.slots", "true and false", "the same in all lanes that are run together")
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


def _run(
    workloads: Sequence[Workload],
    specs: Sequence[LaneSpec],
    records: bool,
    leaps: bool,
    checks: bool,
    series: bool,
    progress: Callable[[float], None],
) -> Outcome:
    devices = jax.local_devices()
    devices = devices[: max(1, min(len(devices), len(specs)))]
    traffic = stack_traffic(workloads)
    padded = [*specs, *[specs[-1]] * (-len(specs) % len(devices))]
    policies = registered([spec.policy for spec in specs])
    lanes = stack_lanes(padded, policies)
    has_slots = specs[0].cluster.slots
    shape = Shape(
        programs=traffic.arrival.shape[1],
        threads_per_program=1,
        replicas=max(spec.cluster.replicas for spec in specs),
        prefixes=0 if has_slots else traffic.prefix_tokens.shape[1],  # a slot holds its own copy
        calls=traffic.new_tokens.shape[1],
        slots=max(spec.cluster.max_num_seqs for spec in specs) if has_slots else 0,
        policies=policies,
        leaps=leaps,
        records=records,
        checks=checks,
        series=series,
    )
    begin, advance = compiled(shape, tuple(devices), len(padded) // len(devices))
    total = float(np.sum(np.asarray(traffic.calls)[np.asarray(lanes.workload)]))
    state = begin(traffic, lanes)
    before = None
    samples: list[Sample] = []
    stalled = np.zeros(len(padded), bool)
    while True:
        state, active, turns, mark, sampled = advance(state, traffic, lanes)
        if series:
            samples.append(jax.tree.map(lambda x: np.asarray(x)[0], sampled))
        active, mark = np.asarray(active), np.asarray(mark)
        progress(float(np.sum(turns)) / total)
        if before is not None:
            stalled |= active & (mark == before).all(axis=1)
        before = mark
        if not (active & ~stalled).any():
            break
    return _outcome(state, traffic, workloads, specs, stalled, samples)


@lru_cache(maxsize=32)
def compiled(shape: Shape, devices: tuple[Any, ...], lanes_per_device: int) -> tuple[Callable, Callable]:
    """The functions (initial states; one chunk of steps) for lanes split over devices; compiled at their
    first call.
    """
    mesh = Mesh(np.asarray(devices), ("lanes",))
    split, whole = PartitionSpec("lanes"), PartitionSpec()

    def begin(traffic: Traffic, lanes: Lane) -> State:
        return jax.vmap(lambda lane: initial_state(traffic, lane, shape))(lanes)

    def one(state: State, traffic: Traffic, lane: Lane) -> tuple[State, Sample | None]:
        def body(state: State, _: None) -> tuple[State, Sample | None]:
            after = step(state, traffic, lane, shape)
            if shape.checks:
                after = check(after, state, traffic, lane, shape)
            return after, (sample(after, lane) if shape.series else None)

        return jax.lax.scan(body, state, None, length=CHUNK)

    def advance(state: State, traffic: Traffic, lanes: Lane):
        if lanes_per_device == 1:  # gathers of a lone lane are cheaper without a batch axis
            first = jax.tree.map(lambda x: x[0], (state, lanes))
            state, samples = jax.tree.map(lambda x: x[None], one(first[0], traffic, first[1]))
        else:
            state, samples = jax.vmap(one, in_axes=(0, None, 0))(state, traffic, lanes)
        active = jnp.any(state.threads.status != DONE, axis=1) & ~state.stuck
        return state, active, jnp.sum(state.threads.turn, axis=1), jax.vmap(_mark)(state), samples

    begin = jax.shard_map(begin, mesh=mesh, in_specs=(whole, split), out_specs=split, check_vma=False)
    advance = jax.shard_map(
        advance, mesh=mesh, in_specs=(split, whole, split), out_specs=split, check_vma=False
    )
    return jax.jit(begin), jax.jit(advance, donate_argnums=0)


def _mark(state: State) -> Int[jax.Array, " counters"]:
    """Numbers of which some change in any step that does something, `totals.steps` apart."""
    totals = vars(state.totals).items()
    counters = [state.now, jnp.sum(state.threads.turn), jnp.sum(state.replicas.free)]
    counters += [value for name, value in totals if name != "steps"]
    return jnp.stack([counter.astype(jnp.int64) for counter in counters])


def stack_traffic(workloads: Sequence[Workload]) -> Traffic:
    """The workloads padded and stacked; sizes are rounded up, so that similar workloads share a
    compilation.
    """

    def stacked(name: str, fill: int, multiple: int) -> Any:
        rows = [getattr(workload, name) for workload in workloads]
        width = -(-max(len(row) for row in rows) // multiple) * multiple
        out = np.full((1 << (len(rows) - 1).bit_length(), width), fill, rows[0].dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out

    return Traffic(
        arrival=stacked("arrival", 0, 8),
        first_call=stacked("first_call", 0, 8),
        calls=stacked("calls", 0, 8),
        prefix=stacked("prefix", -1, 8),
        prefix_tokens=stacked("prefix_tokens", 0, 1),
        new_tokens=stacked("new_tokens", 1, 512),
        output_tokens=stacked("output_tokens", 1, 512),
        kept_tokens=stacked("kept_tokens", -1, 512),
        gap=stacked("gap", 0, 512),
    )


def stack_lanes(specs: Sequence[LaneSpec], policies: PolicySpace | None = None) -> Lane:
    """The lanes' traced values with a leading axis; their policies as places in `policies` (None: all that
    are registered).
    """
    policies = policies or registered([spec.policy for spec in specs])
    names = [field.name for field in fields(Limits)]
    lanes = [
        Lane(
            workload=np.int32(spec.workload),  # pyright: ignore[reportArgumentType]
            limits=Limits(**{name: np.int32(getattr(spec.cluster, name)) for name in names}),  # pyright: ignore[reportArgumentType]
            policy=indexed(spec.policy, policies),  # pyright: ignore[reportArgumentType]
            performance=spec.cluster.performance,
        )
        for spec in specs
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *lanes)


def _outcome(
    state: State,
    traffic: Traffic,
    workloads: Sequence[Workload],
    specs: Sequence[LaneSpec],
    stalled: np.ndarray,
    samples: Sequence[Sample],
) -> Outcome:
    """The final states as an `Outcome`."""
    count = len(specs)
    final: Any = jax.tree.map(lambda x: np.asarray(x)[:count], state)
    threads, totals = final.threads, final.totals
    which = np.asarray([spec.workload for spec in specs])
    records = None if final.records is None else _last_records(final, traffic, which)
    prompts = np.asarray([int(np.sum(workload.prompt_tokens, dtype=np.int64)) for workload in workloads])[
        which
    ]
    finished = np.where(threads.status == DONE, threads.finished, -1)
    stuck = final.stuck | np.any(threads.status != DONE, axis=1) & ~stalled[:count]

    def column(name: str) -> np.ndarray | None:
        return None if records is None else records[:, :, RECORD.index(name)]

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
        program_finished_ns=finished,
        program_service_ns=threads.service,
        prompt_tokens=prompts,
        hit_tokens=totals.hits,
        recomputed_tokens=totals.recomputed,
        preemptions=totals.preemptions,
        evicted_blocks=totals.evicted,
        iterations=totals.iterations,
        empty_schedules=totals.empty_schedules,
        steps=totals.steps,
        busy_ns=final.replicas.busy,
        makespan_ns=finished.max(axis=1),
        status=np.where(stuck, 1, np.where(stalled[:count], 2, 0)),
        series=_series(samples) if samples else None,
    )


def _series(samples: Sequence[Sample]) -> Sample:
    """The samples of all chunks, one an instant: the last."""
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *samples)
    last = np.append(np.diff(joined.now) > 0, True)
    return jax.tree.map(lambda values: values[last], joined)


def _last_records(state: State, traffic: Traffic, workload: np.ndarray) -> np.ndarray:
    """The call records, completed with the last call of every thread, which is still in the thread's
    state.
    """
    assert state.records is not None
    threads = state.threads
    records = np.array(state.records[:, :-1])
    first = np.asarray(traffic.first_call)[workload]
    calls = np.asarray(traffic.calls)[workload]
    lane, thread = np.nonzero((calls > 0) & (threads.turn > 0) & (threads.turn >= calls))
    columns = {
        "released": threads.released,
        "scheduled": threads.first_scheduled,
        "first_token": threads.first_token,
        "finished": threads.finished,
        "service": threads.service - threads.service_before,
        "cached": threads.cached,
        "preemptions": threads.preemptions,
        "resumed": threads.resumed,
        "replica": threads.replica,
    }
    rows = np.stack([np.asarray(columns[name])[lane, thread] for name in RECORD], axis=-1)
    records[lane, (first + calls - 1)[lane, thread]] = rows
    return records
