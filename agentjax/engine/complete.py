"""The end of a leap: tokens, first tokens, service; then the calls that leave their replica, one a step."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.engine import pool, slots
from agentjax.engine.arrays import at, count, put, quotient, replace, with_entry
from agentjax.engine.leap import duration_ns, growth_blocks
from agentjax.engine.observe import Subject, attained, observe, reach
from agentjax.engine.state import (
    BAD_RETENTION,
    COMPLETING,
    DONE,
    FINE,
    FOREVER,
    NEVER,
    QUEUED,
    RECORD,
    RUNNING,
    UNPROTECTED,
    WAITING,
    Gaps,
    Lane,
    Replica,
    Shape,
    State,
    Threads,
    Traffic,
)
from agentjax.policies.base import decide, has_trait


class Leap(eqx.Module):
    """One leap as far as the times between tokens are concerned."""

    boundaries: Int[Array, ""]  # 0: there was none
    first: Int[Array, ""]  # calls with a token at its start and at its first boundary
    second: Int[Array, ""]  # calls with a token at its first and at its second boundary
    later: Int[Array, ""]  # calls with a token at each boundary from the second on
    lead: Int[Array, ""]
    first_ns: Float[Array, ""]
    next_ns: Float[Array, ""]
    growth_ns: Float[Array, ""]


def end_leap(
    state: State, one: Replica, lane: Lane, replica: Int[Array, ""], when: Bool[Array, ""]
) -> tuple[State, Replica, Leap | None]:
    """Apply the iterations that a replica has run: every call of its batches that is past its prompt got a
    token in each.

    With asynchronous scheduling the batch formed before runs first and the one formed last is running at the
    end; else `lead` is 0 and the batch formed last runs first.
    """
    threads, totals, flight = state.threads, state.totals, state.threads.flight
    iterations = one.iterations
    took = one.end - one.start
    batch = when & (threads.replica == replica) & (threads.scheduled > 0)
    sampling = batch & (threads.computed == reach(threads))
    more = iterations - 1  # iterations formed after the first one
    grown = count(jnp.where(sampling, growth_blocks(threads.computed, iterations, lane.limits.block_size), 0))
    first = one.start + duration_ns(one, jnp.ones_like(iterations))
    if flight is None:
        tokens = jnp.where(sampling, iterations, 0)
        earliest = first
        service = jnp.where(batch, took, 0)
        flies = sampling
    else:
        flying = when & (threads.replica == replica) & (flight.tokens > 0)
        flies = flying & flight.samples
        tokens = flies + jnp.where(sampling, more, 0)
        earliest = jnp.where(flies, first, one.start + duration_ns(one, jnp.full_like(iterations, 2)))
        service = jnp.where(flying, one.lead, 0) + jnp.where(batch, took - one.lead, 0)
        stale = count(jnp.where(flying & (threads.status == QUEUED), flight.tokens, 0))
        totals = replace(totals, wasted=totals.wasted + stale)
        flight = replace(
            flight,
            tokens=jnp.where(
                flying | batch, jnp.where(batch, jnp.where(more > 0, 1, threads.scheduled), 0), flight.tokens
            ),
            samples=jnp.where(flying | batch, sampling, flight.samples),
            blind=jnp.where(flying | batch, flies | (more > 0), flight.blind),
        )
    gaps, told = threads.gaps, None
    if gaps is not None:
        gaps, told = _with_gaps(gaps, one, flies, sampling, tokens, earliest, when)
    threads = replace(
        threads,
        computed=threads.computed + jnp.where(sampling, more, 0),
        known=threads.known + tokens,
        output_left=threads.output_left - tokens,
        scheduled=jnp.where(batch, 0, threads.scheduled),
        service=threads.service + service,
        first_token=jnp.where((tokens > 0) & (threads.first_token < 0), earliest, threads.first_token),
        flight=flight,
        gaps=gaps,
    )
    ahead = one.ahead
    if ahead is not None:
        formed = jnp.any(batch)
        next_end = one.start + duration_ns(one, iterations + 1)
        ahead = replace(
            ahead,
            runs=jnp.where(when, formed, ahead.runs),
            end=jnp.where(when & formed, next_end, ahead.end),
        )
    one = replace(
        one,
        phase=jnp.where(when, COMPLETING, one.phase),
        pool=replace(one.pool, owed=one.pool.owed + jnp.where(when, grown - one.booked, 0)),
        booked=jnp.where(when, 0, one.booked),
        busy=one.busy + jnp.where(when, took, 0),
        passed=one.passed & ~when,
        preempted=one.preempted & ~when,
        ahead=ahead,
    )
    totals = replace(totals, iterations=totals.iterations + jnp.where(when, iterations, 0))
    return replace(state, threads=threads, totals=totals), one, told


def _with_gaps(
    gaps: Gaps,
    one: Replica,
    first: Bool[Array, " threads"],
    later: Bool[Array, " threads"],
    tokens: Int[Array, " threads"],
    earliest: Int[Array, " threads"],
    when: Bool[Array, ""],
) -> tuple[Gaps, Leap]:
    """The times between tokens after a leap, and the leap. A call gets a token at its first boundary
    (`first`), and one at each later boundary if it is in the batch formed last (`later`).
    """
    k = one.iterations
    got = tokens > 0
    gap = jnp.where(got & (gaps.last >= 0), earliest - gaps.last, -1)
    regular = first & (gaps.last == one.start)

    def between(boundary: Int[Array, ""]) -> Int[Array, ""]:
        return duration_ns(one, boundary) - duration_ns(one, boundary - 1)

    steady = jnp.where(first, between(jnp.full_like(k, 2)), between(jnp.full_like(k, 3)))
    steady = jnp.where(later & (tokens > 1), jnp.maximum(steady, between(k)), -1)
    new = replace(
        gaps,
        last=jnp.where(got, jnp.where(later & (tokens > first), one.end, earliest), gaps.last),
        longest=jnp.maximum(gaps.longest, jnp.maximum(gap, steady)),
        pending=jnp.where((gap > 0) & ~regular, gap, gaps.pending),
    )
    return new, Leap(
        boundaries=jnp.where(when, k, 0),
        first=count(regular & (gap > 0)),
        second=count(first & later),
        later=count(later),
        lead=one.lead,
        first_ns=one.first_ns,
        next_ns=one.next_ns,
        growth_ns=one.growth_ns,
    )


def finishers(threads: Threads, replica: Int[Array, ""]) -> Bool[Array, " threads"]:
    """Calls of the replica with all their output; one may have been preempted before the last token came."""
    here = (threads.replica == replica) & (threads.output_left == 0)
    if threads.flight is None:
        return here & (threads.status == RUNNING)
    return here & ((threads.status == RUNNING) | (threads.status == QUEUED))


def leave(
    state: State,
    one: Replica,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    thread: Int[Array, ""],
    finishes: Bool[Array, ""],
    preempted: Bool[Array, ""],
) -> tuple[State, Replica]:
    """One call leaves: it has all its output (`finishes`), or it makes room for others (`preempted`), or
    neither is so and nothing happens. Rules 3.4, 5 and 6 of docs/semantics.md.
    """
    workload, limits, block_size = lane.workload, lane.limits, lane.limits.block_size
    when = finishes | preempted
    threads, totals = state.threads, state.totals
    program, call, turn = at(threads.program, thread), at(threads.call, thread), at(threads.turn, thread)
    last = turn + 1 >= at(traffic.calls[workload], program)
    prefix = at(traffic.prefix[workload], program)
    below = pool.prefix_blocks(traffic.prefix_tokens[workload], prefix, block_size, shape)
    known, computed = at(threads.known, thread), at(threads.computed, thread)
    holds = at(threads.status, thread) == RUNNING
    subject = Subject(
        thread=thread,
        program=program,
        prefix=prefix,
        turn=turn,
        context=known,
        home=replica,
        attained=at(attained(threads, state.now), thread),
        released=at(threads.released, thread),
        prompt=known,
        preempted=at(threads.preemptions, thread) > 0,
        below=below,
        most=known // block_size,
    )
    seen = replace(state, replicas=with_entry(state.replicas, replica, one))
    observation = observe(seen, traffic, lane, shape, subject, replica, jnp.zeros_like(seen.replicas.booked))
    if shape.slots:
        state = slots.vacate(state, replica, program, computed, when)
    retain = decide(shape.policies.retention, lane.policy.retention, observation)
    lasting = state.now + jnp.round(jnp.clip(retain.protect_s, 0.0, 1e9) * 1e9).astype(jnp.int64)
    lasting = jnp.where(jnp.isinf(retain.protect_s), FOREVER, lasting)
    hashed = jnp.minimum(computed, known)
    if threads.flight is not None:  # no block has content before all its tokens are known
        unknown = at(threads.flight.blind & (threads.flight.tokens > 0), thread)
        hashed = hashed - (unknown & (at(threads.scheduled, thread) == 0))
    full = quotient(jnp.where(finishes, known - 1, hashed), block_size)
    private = jnp.maximum(full - below, 0)
    keep = (retain.keep | preempted) & (shape.slots == 0)
    content = jnp.where(keep, private, 0)
    protect = finishes & keep & (retain.protect_s > 0) & ~last & (full > 0)
    pools = pool.give_back(
        one.pool,
        shape,
        thread,
        prefix,
        content=content,
        blanks=pool.blocks_for(computed, block_size) - full + private - content,
        ends=last & finishes,
        protect_until=jnp.where(protect, lasting, UNPROTECTED),
        blanks_first=limits.blanks_first,
        on=when & holds,
    )
    front = has_trait(shape.policies.scheduling, lane.policy.scheduling, "fcfs_queue")
    status = jnp.where(preempted, QUEUED, jnp.where(last, DONE, WAITING))
    wake = jnp.where(preempted | last, NEVER, state.now + at(traffic.gap[workload], call))
    service = at(threads.service, thread)
    flight = threads.flight
    if flight is not None and one.ahead is not None:
        # The batch that is running goes on with a call that has ended.
        wasted = jnp.where(at(flight.tokens, thread) > 0, one.ahead.end - state.now, 0)
        totals = replace(totals, wasted=totals.wasted + jnp.where(finishes, at(flight.tokens, thread), 0))
        service = service + wasted
        flight = replace(
            flight,
            tokens=put(flight.tokens, thread, 0, finishes),
            samples=put(flight.samples, thread, False, finishes),
            wasted=put(flight.wasted, thread, wasted, finishes),
            wasted_until=put(flight.wasted_until, thread, one.ahead.end, finishes),
        )
    if shape.chunked:  # a chunk that was to be computed again leaves the batch with its call
        chunk = at(threads.scheduled, thread)
        decodes = (
            (chunk == 1) & (computed == at(reach(threads), thread)) & (computed > at(threads.prompt, thread))
        )
        undone = preempted & ~decodes & (at(threads.preemptions, thread) > 0)
        totals = replace(totals, recomputed=totals.recomputed - jnp.where(undone, chunk, 0))
    state = _record(state, thread, service, finishes, last)
    threads = replace(
        threads,
        status=put(threads.status, thread, status, when),
        wake=put(threads.wake, thread, wake, when),
        call=put(threads.call, thread, call + 1, finishes),
        turn=put(threads.turn, thread, turn + 1, finishes),
        computed=put(threads.computed, thread, 0, preempted),
        scheduled=put(threads.scheduled, thread, 0, preempted),
        service=threads.service if flight is None else put(threads.service, thread, service, finishes),
        preemptions=put(threads.preemptions, thread, at(threads.preemptions, thread) + 1, preempted),
        order=put(threads.order, thread, -(totals.preemptions + 1), preempted & front),
        flight=flight,
    )
    ahead = one.ahead
    if ahead is not None:
        ahead = replace(ahead, told=ahead.told & ~finishes)
    one = replace(
        one,
        pool=pools,
        running=one.running - (when & holds),
        queued=one.queued + preempted - (finishes & ~holds),
        preempted=one.preempted | preempted,
        preempting=jnp.where(preempted, -1, one.preempting),
        ahead=ahead,
    )
    bad = finishes & jnp.isnan(retain.protect_s) & (state.fault == FINE)
    return replace(
        state,
        threads=threads,
        totals=replace(
            totals,
            preemptions=totals.preemptions + preempted,
            completions=totals.completions + finishes,
        ),
        fault=jnp.where(bad, BAD_RETENTION, state.fault),
    ), one


def _record(
    state: State,
    thread: Int[Array, ""],
    service: Int[Array, ""],
    when: Bool[Array, ""],
    last: Bool[Array, ""],
) -> State:
    """Write the record of a call that has ended, and of its program if that was its last one."""
    threads, records, programs = state.threads, state.records, state.programs
    spare = programs.shape[0] - 1
    row = jnp.stack([jnp.asarray(state.now), service])
    place = jnp.where(when & last, at(threads.program, thread), spare)
    programs = programs.at[place].set(row, mode="promise_in_bounds")
    if records is None:
        return replace(state, programs=programs)
    columns = {
        "released": at(threads.released, thread),
        "scheduled": at(threads.first_scheduled, thread),
        "first_token": at(threads.first_token, thread),
        "finished": state.now,
        "service": service - at(threads.service_before, thread),
        "cached": at(threads.cached, thread),
        "preemptions": at(threads.preemptions, thread),
        "resumed": at(threads.resumed, thread),
        "replica": at(threads.replica, thread),
        "longest_gap": jnp.asarray(-1) if threads.gaps is None else at(threads.gaps.longest, thread),
    }
    row = jnp.stack([columns[name].astype(jnp.int64) for name in RECORD])
    place = jnp.where(when, at(threads.call, thread), records.shape[0] - 1)
    return replace(state, programs=programs, records=records.at[place].set(row, mode="promise_in_bounds"))
