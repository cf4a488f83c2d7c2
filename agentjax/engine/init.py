"""The state of a lane before anything has happened."""

import jax.numpy as jnp

from agentjax.engine.slots import initial_slots
from agentjax.engine.state import (
    DONE,
    IDLE,
    NEVER,
    RECORD,
    UNPROTECTED,
    WAITING,
    Extents,
    Lane,
    Prefixes,
    Replicas,
    Shape,
    State,
    Threads,
    Totals,
    Traffic,
)


def initial_state(traffic: Traffic, lane: Lane, shape: Shape) -> State:
    """All programs yet to arrive, all blocks never used."""
    workload, threads, replicas = lane.workload, shape.threads, shape.replicas
    exists = traffic.calls[workload] > 0
    arrival = jnp.repeat(traffic.arrival[workload], shape.threads_per_program)
    prefix = traffic.prefix[workload]
    context = jnp.zeros(threads, jnp.int32)
    if traffic.prefix_tokens.shape[1]:
        context = jnp.where(prefix >= 0, traffic.prefix_tokens[workload][jnp.maximum(prefix, 0)], 0)

    def each_thread(value: float, dtype: type = jnp.int32):
        return jnp.full(threads, value, dtype)

    def each_replica(value: float, dtype: type = jnp.int32):
        return jnp.full(replicas, value, dtype)

    def each_extent(value: int, dtype: type = jnp.int32):
        return jnp.full((replicas, threads + shape.prefixes), value, dtype)

    zero, zero64 = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int64)
    blocks = jnp.broadcast_to(lane.limits.kv_blocks, (replicas,)).astype(jnp.int32)
    return State(
        now=zero64,
        threads=Threads(
            status=jnp.where(exists, WAITING, DONE).astype(jnp.int32),
            wake=jnp.where(exists, arrival, NEVER),
            call=traffic.first_call[workload],
            turn=each_thread(0),
            replica=each_thread(-1),
            priority=each_thread(0, jnp.float64),
            order=each_thread(0),
            prompt=each_thread(0),
            known=context,
            computed=each_thread(0),
            output_left=each_thread(0),
            scheduled=each_thread(0),
            admitted=each_thread(0),
            service=each_thread(0, jnp.int64),
            service_before=each_thread(0, jnp.int64),
            released=each_thread(0, jnp.int64),
            first_scheduled=each_thread(-1, jnp.int64),
            first_token=each_thread(-1, jnp.int64),
            finished=each_thread(-1, jnp.int64),
            cached=each_thread(0),
            resumed=each_thread(0),
            preemptions=each_thread(0),
        ),
        extents=Extents(
            blocks=each_extent(0),
            key=each_extent(NEVER, jnp.int64),
            blanks=each_extent(0),
            deadline=each_extent(UNPROTECTED, jnp.int64),
        ),
        prefixes=Prefixes(
            running=jnp.zeros((replicas, shape.prefixes), jnp.int32),
            protected=jnp.zeros((replicas, shape.prefixes), jnp.int32),
        ),
        slots=initial_slots(lane, shape),
        replicas=Replicas(
            phase=each_replica(IDLE),
            fresh=blocks,
            tail=each_replica(0),
            free=blocks,
            protected=each_replica(0),
            owed=each_replica(0),
            victim=each_replica(-1),
            passed=each_replica(False, jnp.bool_),
            preempted=each_replica(False, jnp.bool_),
            preempting=each_replica(-1),
            chunk=each_replica(-1),
            running=each_replica(0),
            queued=each_replica(0),
            start=each_replica(0, jnp.int64),
            end=each_replica(-1, jnp.int64),
            iterations=each_replica(0),
            first_ns=each_replica(0, jnp.float64),
            next_ns=each_replica(0, jnp.float64),
            growth_ns=each_replica(0, jnp.float64),
            booked=each_replica(0),
            breaking=each_replica(False, jnp.bool_),
            head_priority=each_replica(jnp.inf, jnp.float64),
            busy=each_replica(0, jnp.int64),
        ),
        totals=Totals(
            releases=zero,
            admissions=zero,
            stamp=zero64,
            iterations=zero,
            empty_schedules=zero,
            preemptions=zero,
            hits=zero64,
            recomputed=zero64,
            evicted=zero64,
            steps=zero,
        ),
        records=jnp.full((shape.calls + 1, len(RECORD)), -1, jnp.int64) if shape.records else None,
        stuck=jnp.asarray(False),
    )
