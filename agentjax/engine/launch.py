"""Start of a leap: the batch, its duration, and how many iterations change no decision."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.engine import leap, pool
from agentjax.engine.arrays import column, count, replace
from agentjax.engine.observe import reach
from agentjax.engine.state import (
    BUSY,
    DEADLOCKED,
    FINE,
    FOREVER,
    IDLE,
    LONGEST,
    NEVER,
    TOO_LONG,
    Lane,
    Replica,
    Shape,
    State,
    Threads,
)
from agentjax.performance.base import BatchShape, decode_batch


def batch_of(threads: Threads, replica: Int[Array, ""]) -> BatchShape:
    """The iteration that has been formed on a replica."""
    batch = (threads.replica == replica) & (threads.scheduled > 0)
    tokens = jnp.where(batch, threads.scheduled, 0)
    known = reach(threads)
    decoding = batch & (tokens == 1) & (known > threads.prompt) & (threads.computed == known)
    after = threads.computed
    chunk = jnp.where(decoding, 0, tokens)
    context = jnp.where(decoding, after, 0)
    before = jnp.where(chunk > 0, after - chunk, 0)

    def total(x: Array) -> Array:
        return jnp.sum(x, dtype=jnp.int64).astype(jnp.float64)

    return BatchShape(
        sequences=count(batch).astype(jnp.float64),
        decode_sequences=count(decoding).astype(jnp.float64),
        decode_context_tokens=total(context),
        decode_context_max_tokens=jnp.max(context).astype(jnp.float64),
        prefill_tokens=count(chunk).astype(jnp.float64),
        prefill_context_tokens=total(before),
        prefill_work_tokens2=0.5 * total(chunk.astype(jnp.int64) * (before + after)),
    )


def launch(
    state: State, one: Replica, lane: Lane, shape: Shape, replica: Int[Array, ""], outcome
) -> tuple[State, Replica]:
    """Run the iteration if nothing is left to decide; an empty one costs no time.

    With asynchronous scheduling an iteration that finds none running starts at once, and the next one is
    formed before any time passes; otherwise it waits until the running one ends, and that is where the leap
    begins.
    """
    threads, totals, now = state.threads, state.totals, state.now
    block_size = lane.limits.block_size
    when = outcome.settled & (one.pool.owed == 0)
    empty = when & (outcome.tokens == 0)
    formed = when & (outcome.tokens > 0)
    start, repeat, asked = formed, empty & one.preempted, empty & one.preempted
    if one.ahead is not None:
        repeat = repeat & ~one.ahead.runs
        start = when & one.ahead.runs
        asked = empty & ((one.running + one.queued > 0) | ~one.ahead.told)
        one = replace(one, ahead=replace(one.ahead, told=one.ahead.told | when))

    batch = batch_of(threads, replica)
    first = jnp.maximum(jnp.round(lane.performance.iteration_ns(batch)), 1.0)
    woken = now > (one.end if one.ahead is None else jnp.where(one.ahead.runs, NEVER, one.ahead.end))
    first = first + jnp.where(woken, jnp.round(lane.performance.wakeup_ns), 0.0)
    too_long = ~(first < LONGEST)
    sequences = batch.sequences
    scheduled = (threads.replica == replica) & (threads.scheduled > 0)
    known = reach(threads)
    longest_context = jnp.max(jnp.where(scheduled, threads.computed, 0)).astype(jnp.float64)
    following = decode_batch(sequences, batch.context_tokens + sequences, longest_context + 1.0)
    partial = jnp.any(scheduled & (threads.computed < known))
    room = pool.blocks_for(threads.computed, block_size) * block_size - threads.computed
    until_block = jnp.min(jnp.where(scheduled, room, block_size))
    victim, has_victim = jnp.maximum(one.pool.victim, 0), one.pool.victim >= 0
    spare = column(one.pool.spent, victim) + column(one.pool.blocks, victim)
    breaking = jnp.asarray(False)
    if shape.protects:
        breaking = has_victim & (column(one.pool.deadline, victim) >= 0)
    # A protected context is never broken up completely within a leap: its shared prefix would be freed in
    # the middle.
    spare = one.pool.fresh + one.pool.head + jnp.where(has_victim, spare, 0) - breaking
    tokens_left = _tokens_left(threads, replica)
    longest = leap.longest(tokens_left, spare, count(scheduled), until_block, block_size)
    can_leap = outcome.may_leap & ~partial & ~one.preempted & formed
    iterations = jnp.where(can_leap & shape.leaps, longest, 1)
    straight, growth = lane.performance.leap(following, jnp.maximum(iterations - 1, 1).astype(jnp.float64))
    iterations = jnp.minimum(iterations, 1 + jnp.floor(straight).astype(jnp.int32))

    one = replace(
        one,
        start=jnp.where(start, now, one.start),
        iterations=jnp.where(start, iterations, one.iterations),
        first_ns=jnp.where(start, first, one.first_ns),
        next_ns=jnp.where(start, lane.performance.iteration_ns(following), one.next_ns),
        growth_ns=jnp.where(start, growth, one.growth_ns),
        breaking=jnp.where(start, breaking, one.breaking),
        head_priority=jnp.where(start, outcome.head_priority, one.head_priority),
        passed=one.passed & ~empty,
        preempted=one.preempted & ~empty,
        phase=jnp.where(start, BUSY, jnp.where(empty & ~repeat, IDLE, one.phase)),
    )
    if one.ahead is not None:
        one = replace(one, lead=jnp.where(start, one.ahead.end - now, one.lead))
        state, one = _take_off(state, one, replica, formed & ~start, first)
    # Protections are broken in an order that changes at the next deadline: no iteration after it may start
    # in this leap. Nothing after the horizon happens.
    least = one.iterations
    if shape.protects:
        before = jnp.where(breaking, pool.next_deadline(one.pool, now), FOREVER)
        least = leap.boundaries_until(one, before - now)
    within = leap.boundaries_until(one, lane.limits.until + 1 - now) - 1
    iterations = jnp.minimum(one.iterations, jnp.minimum(least, jnp.maximum(within, 1)))
    one = replace(one, iterations=jnp.where(start, iterations, one.iterations))
    end = now + leap.duration_ns(one, one.iterations)
    one = replace(one, end=jnp.where(start, end, one.end))
    fault = jnp.where(outcome.deadlocked, DEADLOCKED, FINE)
    fault = jnp.where(formed & (too_long | (end > LONGEST)), TOO_LONG, fault)
    return replace(
        state,
        totals=replace(totals, empty_schedules=totals.empty_schedules + asked),
        fault=jnp.where(state.fault == FINE, fault, state.fault),
    ), one


def _take_off(
    state: State, one: Replica, replica: Int[Array, ""], when: Bool[Array, ""], duration: Float[Array, ""]
) -> tuple[State, Replica]:
    """The iteration that was formed starts now, and another one can be formed while it runs."""
    threads, flight = state.threads, state.threads.flight
    assert flight is not None
    assert one.ahead is not None
    batch = when & (threads.replica == replica) & (threads.scheduled > 0)
    flight = replace(
        flight,
        tokens=jnp.where(batch, threads.scheduled, flight.tokens),
        samples=jnp.where(batch, threads.computed == threads.known, flight.samples),
        blind=flight.blind & ~batch,
    )
    end = state.now + duration.astype(jnp.int64)
    ahead = replace(one.ahead, runs=one.ahead.runs | when, end=jnp.where(when, end, one.ahead.end))
    one = replace(one, ahead=ahead, passed=one.passed & ~when, preempted=one.preempted & ~when)
    threads = replace(threads, scheduled=jnp.where(batch, 0, threads.scheduled), flight=flight)
    return replace(state, threads=threads), one


def _tokens_left(threads: Threads, replica: Int[Array, ""]) -> Int[Array, ""]:
    """Boundaries until a call of the running or the formed batch has all its output, or until a later batch
    is formed without it.
    """
    here = threads.replica == replica
    formed = here & (threads.scheduled > 0)
    most = jnp.iinfo(jnp.int32).max
    if threads.flight is None:
        return jnp.min(jnp.where(formed, threads.output_left, most))
    flight = threads.flight
    flies = here & flight.samples
    left = threads.output_left + ~flies - (formed & ~flight.eos)
    return jnp.min(jnp.where(flies | formed, left, most))
