"""Start of a leap: the batch, its duration, and how many iterations change no decision."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from agentjax.engine import leap, pool
from agentjax.engine.arrays import at, column, count, replace
from agentjax.engine.state import BUSY, FOREVER, IDLE, Lane, Shape, State
from agentjax.performance.base import BatchShape, decode_batch


def batch_of(state: State, replica: Int[Array, ""]) -> BatchShape:
    """The iteration that has been formed on a replica."""
    threads = state.threads
    batch = (threads.replica == replica) & (threads.scheduled > 0)
    tokens = jnp.where(batch, threads.scheduled, 0)
    decoding = batch & (tokens == 1) & (threads.known > threads.prompt) & (threads.computed == threads.known)
    after = threads.computed.astype(jnp.float64)
    chunk = jnp.where(decoding, 0, tokens).astype(jnp.float64)
    context = jnp.where(decoding, after, 0.0)
    return BatchShape(
        sequences=jnp.sum(batch.astype(jnp.float64)),
        decode_sequences=jnp.sum(decoding.astype(jnp.float64)),
        decode_context_tokens=jnp.sum(context),
        decode_context_max_tokens=jnp.max(context),
        prefill_tokens=jnp.sum(chunk),
        prefill_context_tokens=jnp.sum(jnp.where(chunk > 0, after - chunk, 0.0)),
        prefill_work_tokens2=jnp.sum(chunk * (after - 0.5 * chunk)),
    )


def launch(state: State, lane: Lane, shape: Shape, replica: Int[Array, ""], outcome) -> State:
    """Run the iteration if nothing is left to decide; an empty one costs no time."""
    threads, replicas, totals = state.threads, state.replicas, state.totals
    block_size = lane.limits.block_size
    on = jnp.arange(shape.replicas) == replica
    when = outcome.settled & (at(replicas.owed, replica) == 0)
    empty = when & (outcome.tokens == 0)
    start = when & (outcome.tokens > 0)
    repeat = empty & at(replicas.preempted, replica)

    batch = batch_of(state, replica)
    first = jnp.maximum(jnp.round(lane.performance.iteration_ns(batch)), 1.0)
    woken = state.now > at(replicas.end, replica)
    first = first + jnp.where(woken, jnp.round(lane.performance.wakeup_ns), 0.0)
    sequences = batch.sequences
    scheduled = (threads.replica == replica) & (threads.scheduled > 0)
    longest_context = jnp.max(jnp.where(scheduled, threads.computed, 0)).astype(jnp.float64)
    following = decode_batch(sequences, batch.context_tokens + sequences, longest_context + 1.0)
    partial = jnp.any(scheduled & (threads.computed < threads.known))
    output_left = jnp.min(jnp.where(scheduled, threads.output_left, jnp.iinfo(jnp.int32).max))
    room = pool.blocks_for(threads.computed, block_size) * block_size - threads.computed
    until_block = jnp.min(jnp.where(scheduled, room, block_size))
    victim = jnp.maximum(at(replicas.victim, replica), 0)
    has_victim = at(replicas.victim, replica) >= 0
    spare = at(column(state.extents.blanks, victim) + column(state.extents.blocks, victim), replica)
    breaking = has_victim & (at(column(state.extents.deadline, victim), replica) >= 0)
    # A protected context is never broken up completely within a leap: its shared prefix would be freed in
    # the middle.
    spare = at(replicas.fresh, replica) + jnp.where(has_victim, spare, 0) - breaking
    longest = leap.longest(output_left, spare, count(scheduled), until_block, block_size)
    can_leap = outcome.may_leap & ~partial & ~at(replicas.preempted, replica)
    iterations = jnp.where(can_leap & shape.leaps, longest, 1)
    straight, growth = lane.performance.leap(following, jnp.maximum(iterations - 1, 1).astype(jnp.float64))
    iterations = jnp.minimum(iterations, 1 + jnp.floor(straight).astype(jnp.int32))

    here = on & start
    replicas = replace(
        replicas,
        start=jnp.where(here, state.now, replicas.start),
        iterations=jnp.where(here, iterations, replicas.iterations),
        first_ns=jnp.where(here, first, replicas.first_ns),
        next_ns=jnp.where(here, lane.performance.iteration_ns(following), replicas.next_ns),
        growth_ns=jnp.where(here, growth, replicas.growth_ns),
        breaking=jnp.where(here, breaking, replicas.breaking),
        head_priority=jnp.where(here, outcome.head_priority, replicas.head_priority),
        passed=replicas.passed & ~(on & empty),
        preempted=replicas.preempted & ~(on & empty),
        phase=jnp.where(here, BUSY, jnp.where(on & empty & ~repeat, IDLE, replicas.phase)),
    )
    # Protections are broken in an order that changes at the next deadline: no iteration after it may start
    # in this leap.
    deadline = pool.next_deadline(state, on)
    before = jnp.broadcast_to(jnp.where(breaking, deadline, FOREVER) - state.now, on.shape)
    replicas = replace(
        replicas,
        iterations=jnp.where(
            here,
            jnp.minimum(replicas.iterations, leap.iterations_until(replicas, before)),
            replicas.iterations,
        ),
    )
    end = state.now + leap.duration_ns(replicas, replicas.iterations)
    return replace(
        state,
        replicas=replace(replicas, end=jnp.where(here, end, replicas.end)),
        totals=replace(totals, empty_schedules=totals.empty_schedules + repeat),
        stuck=state.stuck | outcome.deadlocked,
    )
