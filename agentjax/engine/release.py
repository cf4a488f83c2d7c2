"""Release of one call: recorded, routed, given a priority, queued."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine import leap, pool, slots
from agentjax.engine.arrays import at, column, put, replace, where_put
from agentjax.engine.observe import blocks_lost, blocks_taken, observe
from agentjax.engine.state import BUSY, DECIDING, IDLE, NEVER, QUEUED, Lane, Shape, State, Traffic
from agentjax.policies.base import decide, has_trait


def record(state: State, thread: Int[Array, ""], when: Bool[Array, ""]) -> State:
    """Write the record of a thread's last completed call, if records are kept; before the first call there
    is none.
    """
    if state.records is None:
        return state
    threads = state.threads
    when = when & (at(threads.turn, thread) > 0)
    row = jnp.stack([column.astype(jnp.int64) for column in record_columns(state, thread)])
    spare = state.records.shape[0] - 1
    call = jnp.where(when, at(threads.call, thread) - 1, spare)
    return replace(state, records=state.records.at[call].set(row, mode="promise_in_bounds"))


def record_columns(state: State, thread: Int[Array, ""]) -> tuple[Array, ...]:
    """The columns of RECORD for a thread's current or last call."""
    threads = state.threads
    return (
        at(threads.released, thread),
        at(threads.first_scheduled, thread),
        at(threads.first_token, thread),
        at(threads.finished, thread),
        at(threads.service, thread) - at(threads.service_before, thread),
        at(threads.cached, thread),
        at(threads.preemptions, thread),
        at(threads.resumed, thread),
        at(threads.replica, thread),
    )


def release_one(
    state: State, traffic: Traffic, lane: Lane, shape: Shape, thread: Int[Array, ""], when: Bool[Array, ""]
) -> State:
    """The next call of a thread is due: rules 2 and 8 of docs/semantics.md.

    A running leap is cut where the release could change a decision: the call goes to the head of the queue,
    an admission gate looks at the queue again, or the leap is breaking protections and this release frees
    protected blocks.
    """
    state = record(state, thread, when)
    threads, replicas, workload = state.threads, state.replicas, lane.workload
    block_size = lane.limits.block_size
    began = at(threads.turn, thread) > 0
    call = at(threads.call, thread)
    kept = at(traffic.kept_tokens[workload], call)
    context = at(threads.known, thread)
    kept = jnp.where((kept >= 0) & began, jnp.minimum(kept, context), context)
    prompt = kept + at(traffic.new_tokens[workload], call)
    prefix = at(traffic.prefix[workload], thread)
    below = pool.prefix_blocks(traffic.prefix_tokens[workload], prefix, block_size, shape)
    limit = jnp.minimum((prompt - 1) // block_size, kept // block_size)
    if shape.slots:
        state = slots.cut_context(state, thread, kept, when & began)
    taken = blocks_taken(state, lane, state.now)
    home = at(threads.replica, thread)

    observation = observe(
        state, traffic, lane, shape, thread, jnp.maximum(home, 0), prompt, below, limit, taken
    )
    target = decide(shape.policies.routing, lane.policy.routing, observation).astype(jnp.int32)
    target = jnp.clip(target, 0, lane.limits.replicas - 1)
    observation = replace(observation, here=target)
    priority = decide(shape.policies.scheduling, lane.policy.scheduling, observation).astype(jnp.float64)

    here = when & (jnp.arange(shape.replicas) == target)
    guarded = column(state.extents.deadline, thread) >= 0
    until_admission = has_trait(shape.policies.retention, lane.policy.retention, "until_admission")
    gates = has_trait(shape.policies.admission, lane.policy.admission, "gates")
    ends = when & guarded & ~until_admission
    frees = when & guarded
    concerned = (
        (here & (priority < replicas.head_priority)) | (frees & replicas.breaking) | (gates & (here | frees))
    )
    state = replace(state, replicas=leap.cut(replicas, state.now, concerned & (replicas.phase == BUSY)))

    state = pool.book(state, thread, taken, frees)
    queued = jnp.where(guarded, 0, column(blocks_lost(state, taken), thread))
    state = pool.end_protection(state, shape, thread, prefix, ends)
    left = jnp.maximum(kept // block_size - below, 0)
    state = pool.cut_context(state, thread, left, below, queued, jnp.broadcast_to(when & began, here.shape))
    threads, replicas, totals = state.threads, state.replicas, state.totals
    order = totals.releases + 1
    return replace(
        state,
        threads=replace(
            threads,
            status=put(threads.status, thread, QUEUED, when),
            wake=put(threads.wake, thread, NEVER, when),
            replica=put(threads.replica, thread, target, when),
            priority=put(threads.priority, thread, priority, when),
            order=put(threads.order, thread, order, when),
            prompt=put(threads.prompt, thread, prompt, when),
            known=put(threads.known, thread, prompt, when),
            computed=put(threads.computed, thread, 0, when),
            output_left=put(threads.output_left, thread, at(traffic.output_tokens[workload], call), when),
            released=put(threads.released, thread, state.now, when),
            first_scheduled=put(threads.first_scheduled, thread, -1, when),
            first_token=put(threads.first_token, thread, -1, when),
            service_before=put(threads.service_before, thread, at(threads.service, thread), when),
            resumed=put(threads.resumed, thread, 0, when),
            preemptions=put(threads.preemptions, thread, 0, when),
        ),
        replicas=replace(
            replicas,
            queued=replicas.queued + here,
            phase=where_put(here & (replicas.phase == IDLE), DECIDING, replicas.phase),
        ),
        totals=replace(totals, releases=totals.releases + when),
    )
