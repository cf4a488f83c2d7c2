"""The state of a lane before anything has happened, and a state with a wider window."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from agentjax.engine.arrays import replace
from agentjax.engine.release import prefix_tokens
from agentjax.engine.slots import initial_slots
from agentjax.engine.state import (
    DONE,
    FINE,
    IDLE,
    NEVER,
    OUTSIDE,
    PROGRAM_RECORD,
    RECORD,
    UNPROTECTED,
    WAITING,
    Ahead,
    Flight,
    Gaps,
    Lane,
    Pool,
    Replica,
    Shape,
    State,
    Threads,
    Totals,
    Traffic,
)


def initial_state(traffic: Traffic, lane: Lane, shape: Shape, exists: Bool[Array, ""]) -> State:
    """All programs yet to arrive, all blocks never used; a lane that does not exist has nothing to do.

    Where the window has a row for every program, each waits for its arrival in its own.
    """
    workload, replicas = lane.workload, shape.replicas
    threads = _empty_rows(shape, shape.threads)
    arrivals = jnp.where(exists, 0, traffic.programs[workload])
    if not shape.reuses:
        waits = exists & (traffic.calls[workload] > 0)
        threads = replace(
            threads,
            status=jnp.where(waits, WAITING, DONE).astype(jnp.int32),
            wake=jnp.where(waits, traffic.arrival[workload], NEVER),
            program=jnp.arange(shape.threads, dtype=jnp.int32),
            call=traffic.first_call[workload],
            known=prefix_tokens(traffic, lane, shape, traffic.prefix[workload]).astype(jnp.int32),
        )

    def each(value: float, dtype: type = jnp.int32):
        return jnp.full(replicas, value, dtype)

    def extents(value: int, dtype: type = jnp.int32):
        return jnp.full((replicas, shape.extents), value, dtype)

    blocks = jnp.broadcast_to(lane.limits.kv_blocks, (replicas,)).astype(jnp.int32)
    references = jnp.zeros((replicas, shape.prefixes), jnp.int32)
    zero, zero64 = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int64)
    return State(
        now=zero64,
        threads=threads,
        replicas=Replica(
            phase=each(IDLE),
            pool=Pool(
                blocks=extents(0),
                key=extents(OUTSIDE),
                spent=extents(0),
                deadline=extents(UNPROTECTED, jnp.int64),
                users=references,
                guards=references,
                fresh=blocks,
                head=each(0),
                tail=each(0),
                free=blocks,
                protected=each(0),
                owed=each(0),
                victim=each(-1),
                stamp=each(0),
                evicted=each(0, jnp.int64),
            ),
            running=each(0),
            queued=each(0),
            passed=each(False, jnp.bool_),
            preempted=each(False, jnp.bool_),
            preempting=each(-1),
            chunk=each(-1),
            start=each(0, jnp.int64),
            end=each(-1, jnp.int64),
            lead=each(0, jnp.int64),
            iterations=each(0),
            first_ns=each(0, jnp.float64),
            next_ns=each(0, jnp.float64),
            growth_ns=each(0, jnp.float64),
            booked=each(0),
            breaking=each(False, jnp.bool_),
            head_priority=each(0, jnp.int64),
            busy=each(0, jnp.int64),
            ahead=Ahead(each(False, jnp.bool_), each(-1, jnp.int64), each(True, jnp.bool_))
            if shape.asynchronous
            else None,
        ),
        slots=initial_slots(lane, shape),
        totals=Totals(
            arrivals=arrivals.astype(jnp.int32),
            releases=zero,
            admissions=zero,
            completions=zero,
            iterations=zero64,
            empty_schedules=zero,
            preemptions=zero,
            hits=zero64,
            recomputed=zero64,
            wasted=zero,
            steps=zero,
        ),
        records=jnp.full((shape.calls + 1, len(RECORD)), -1, jnp.int64) if shape.records else None,
        programs=jnp.full((shape.programs + 1, len(PROGRAM_RECORD)), -1, jnp.int64),
        fault=jnp.asarray(FINE, jnp.int32),
        crowded=jnp.asarray(False),
    )


def _empty_rows(shape: Shape, rows: int) -> Threads:
    """So many rows that nobody has used."""

    def each(value: float, dtype: type = jnp.int32):
        return jnp.full(rows, value, dtype)

    none, zero64 = each(-1, jnp.int64), each(0, jnp.int64)
    no = each(False, jnp.bool_)
    flight = Flight(each(0), no, no, no, zero64, none)
    return Threads(
        status=each(DONE),
        wake=each(NEVER, jnp.int64),
        program=each(-1),
        call=each(0),
        turn=each(0),
        replica=each(-1),
        priority=zero64,
        order=each(0),
        prompt=each(0),
        known=each(0),
        computed=each(0),
        output_left=each(0),
        scheduled=each(0),
        admitted=each(0),
        service=zero64,
        service_before=zero64,
        released=zero64,
        first_scheduled=none,
        first_token=none,
        cached=each(0),
        resumed=each(0),
        preemptions=each(0),
        flight=flight if shape.asynchronous else None,
        gaps=Gaps(none, none, zero64) if shape.gaps else None,
    )


def widened(state: State, shape: Shape, wider: Shape) -> State:
    """Stacked states with the rows of a wider window added, on the host: what has happened stays as it is."""
    more = wider.threads - shape.threads
    lanes = state.fault.shape[0]
    empty = jax.tree.map(np.asarray, _empty_rows(shape, more))
    threads = jax.tree.map(
        lambda x, fill: np.concatenate([x, np.broadcast_to(fill, (lanes, more))], axis=1),
        state.threads,
        empty,
    )
    pools = state.replicas.pool

    def inserted(x: Array, fill: int) -> np.ndarray:
        new = np.full((*x.shape[:2], more), fill, x.dtype)
        return np.concatenate([x[..., : shape.threads], new, x[..., shape.threads :]], axis=2)

    pools = replace(
        pools,
        blocks=inserted(pools.blocks, 0),
        key=inserted(pools.key, OUTSIDE),
        spent=inserted(pools.spent, 0),
        deadline=inserted(pools.deadline, UNPROTECTED),
        victim=pools.victim + np.where(pools.victim >= shape.threads, more, 0).astype(np.int32),
    )
    return replace(
        state,
        threads=threads,
        replicas=replace(state.replicas, pool=pools),
        crowded=np.zeros_like(state.crowded),
    )
