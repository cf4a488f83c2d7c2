"""The end of a leap: tokens, first tokens, service; then the calls that leave their replica, one a step."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine import pool, slots
from agentjax.engine.arrays import at, count, put, replace
from agentjax.engine.leap import duration_ns, growth_blocks
from agentjax.engine.observe import observe
from agentjax.engine.state import (
    COMPLETING,
    DONE,
    FOREVER,
    NEVER,
    QUEUED,
    RUNNING,
    UNPROTECTED,
    WAITING,
    Lane,
    Shape,
    State,
    Traffic,
)
from agentjax.policies.base import decide, has_trait


def end_leap(state: State, lane: Lane, replica: Int[Array, ""], on: Bool[Array, " replicas"]) -> State:
    """Apply the iterations that the replica has run: every call of its batch that is past its prompt got a
    token in each.
    """
    threads, replicas = state.threads, state.replicas
    iterations = at(replicas.iterations, replica)
    took = at(replicas.end, replica) - at(replicas.start, replica)
    first = at(replicas.start + duration_ns(replicas, jnp.ones_like(replicas.iterations)), replica)
    when = jnp.any(on)
    batch = when & (threads.replica == replica) & (threads.scheduled > 0)
    sampling = batch & (threads.computed == threads.known)
    grown = count(jnp.where(sampling, growth_blocks(threads.computed, iterations, lane.limits.block_size), 0))
    return replace(
        state,
        threads=replace(
            threads,
            computed=threads.computed + jnp.where(sampling, iterations - 1, 0),
            known=threads.known + jnp.where(sampling, iterations, 0),
            output_left=threads.output_left - jnp.where(sampling, iterations, 0),
            scheduled=jnp.where(batch, 0, threads.scheduled),
            service=threads.service + jnp.where(batch, took, 0),
            first_token=jnp.where(sampling & (threads.first_token < 0), first, threads.first_token),
        ),
        replicas=replace(
            replicas,
            phase=jnp.where(on, COMPLETING, replicas.phase),
            owed=replicas.owed + jnp.where(on, grown - replicas.booked, 0),
            booked=jnp.where(on, 0, replicas.booked),
            busy=replicas.busy + jnp.where(on, took, 0),
            passed=replicas.passed & ~on,
            preempted=replicas.preempted & ~on,
        ),
        totals=replace(state.totals, iterations=state.totals.iterations + jnp.where(when, iterations, 0)),
    )


def finishers(state: State, replica: Int[Array, ""]) -> Bool[Array, " threads"]:
    """Running calls of the replica that have all their output."""
    threads = state.threads
    return (threads.status == RUNNING) & (threads.replica == replica) & (threads.output_left == 0)


def leave(
    state: State,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    thread: Int[Array, ""],
    finishes: Bool[Array, ""],
    preempted: Bool[Array, ""],
) -> State:
    """One running call leaves: it has all its output (`finishes`), or it makes room for others
    (`preempted`), or neither is so and nothing happens. Rules 3.4, 5 and 6 of docs/semantics.md.
    """
    workload = lane.workload
    block_size = lane.limits.block_size
    when = finishes | preempted
    on = when & (jnp.arange(shape.replicas) == replica)
    threads = state.threads
    call = at(threads.call, thread)
    turn = at(threads.turn, thread)
    last = turn + 1 >= at(traffic.calls[workload], thread)
    prefix = at(traffic.prefix[workload], thread)
    below = pool.prefix_blocks(traffic.prefix_tokens[workload], prefix, block_size, shape)
    known = at(threads.known, thread)
    observation = observe(
        state,
        traffic,
        lane,
        shape,
        thread,
        replica,
        known,
        below,
        known // block_size,
        jnp.zeros_like(state.replicas.free),
    )
    if shape.slots:
        state = slots.vacate(state, replica, thread, at(threads.computed, thread), when)
    retain = decide(shape.policies.retention, lane.policy.retention, observation)
    lasting = state.now + jnp.round(jnp.clip(retain.protect_s, 0.0, 1e9) * 1e9).astype(jnp.int64)
    lasting = jnp.where(jnp.isinf(retain.protect_s), FOREVER, lasting)
    protect = finishes & (retain.protect_s > 0) & ~last
    state = pool.give_back(
        state,
        shape,
        thread,
        prefix,
        below,
        block_size,
        keep=(retain.keep | preempted) & (shape.slots == 0),
        protect_until=jnp.where(protect, lasting, UNPROTECTED),
        on=on,
    )
    front = has_trait(shape.policies.scheduling, lane.policy.scheduling, "fcfs_queue")
    threads, replicas, totals = state.threads, state.replicas, state.totals
    status = jnp.where(preempted, QUEUED, jnp.where(last, DONE, WAITING))
    wake = jnp.where(preempted | last, NEVER, state.now + at(traffic.gap[workload], call))
    return replace(
        state,
        threads=replace(
            threads,
            status=put(threads.status, thread, status, when),
            wake=put(threads.wake, thread, wake, when),
            call=put(threads.call, thread, call + 1, finishes),
            turn=put(threads.turn, thread, turn + 1, finishes),
            finished=put(threads.finished, thread, state.now, finishes),
            computed=put(threads.computed, thread, 0, preempted),
            scheduled=put(threads.scheduled, thread, 0, preempted),
            preemptions=put(threads.preemptions, thread, at(threads.preemptions, thread) + 1, preempted),
            order=put(threads.order, thread, -(totals.preemptions + 1), preempted & front),
        ),
        replicas=replace(
            replicas,
            running=replicas.running - on,
            queued=replicas.queued + (on & preempted),
            preempted=replicas.preempted | (on & preempted),
            preempting=jnp.where(on & preempted, -1, replicas.preempting),
        ),
        totals=replace(totals, preemptions=totals.preemptions + preempted),
    )
