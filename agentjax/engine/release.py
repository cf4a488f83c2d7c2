"""Release of one call: routed, given a priority, queued. An arriving program takes a row of the window."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine import leap, pool, slots
from agentjax.engine.arrays import (
    argmin,
    at,
    column,
    entry,
    first_where,
    put,
    replace,
    sortable,
    where_put,
    with_entry,
)
from agentjax.engine.observe import Subject, attained, blocks_lost, blocks_taken, observe
from agentjax.engine.state import (
    BAD_PRIORITY,
    BAD_ROUTE,
    BUSY,
    DECIDING,
    DONE,
    FINE,
    IDLE,
    NEVER,
    OUTSIDE,
    QUEUED,
    Lane,
    Replica,
    Shape,
    State,
    Traffic,
)
from agentjax.policies.base import decide, has_trait


class Coming(eqx.Module):
    """The next release: the earliest, ties by program."""

    time: Int[Array, ""]  # NEVER: there is none
    thread: Int[Array, ""]  # its row
    program: Int[Array, ""]
    arrives: Bool[Array, ""]  # a program's first call, in a row that was another's or nobody's


def next_time(state: State, traffic: Traffic, lane: Lane, shape: Shape) -> Int[Array, ""]:
    """Instant of the next release; NEVER if there is none."""
    returns = jnp.min(state.threads.wake)
    if not shape.reuses:
        return returns
    return jnp.minimum(returns, _next_arrival(state, traffic, lane)[0])


def next_release(state: State, traffic: Traffic, lane: Lane, shape: Shape) -> Coming:
    """What `next_time` is the time of."""
    threads = state.threads
    if not shape.reuses:  # program p has row p, where it waits for its arrival too
        thread = argmin(threads.wake)
        return Coming(at(threads.wake, thread), thread, thread, jnp.asarray(False))
    returns = jnp.min(threads.wake)
    thread = first_where(threads.wake == returns, threads.program)
    program = at(threads.program, thread)
    arrival, newcomer = _next_arrival(state, traffic, lane)
    arrives = (arrival < returns) | ((arrival == returns) & (newcomer < program))
    return Coming(
        time=jnp.minimum(arrival, returns),
        thread=jnp.where(arrives, jnp.argmax(_vacant(state)).astype(jnp.int32), thread),
        program=jnp.where(arrives, newcomer, program),
        arrives=arrives & (arrival < NEVER),
    )


def _next_arrival(state: State, traffic: Traffic, lane: Lane) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Instant and program of the next arrival."""
    order = traffic.order[lane.workload]
    index = state.totals.arrivals
    program = at(order, jnp.minimum(index, order.shape[0] - 1))
    comes = index < traffic.programs[lane.workload]
    return jnp.where(comes, at(traffic.arrival[lane.workload], program), NEVER), program


def _vacant(state: State) -> Bool[Array, " threads"]:
    """Rows whose program has ended and has nothing in any cache."""
    threads = state.threads.status.shape[0]
    queued = jnp.any(state.replicas.pool.key[:, :threads] < OUTSIDE, axis=0)
    return (state.threads.status == DONE) & ~queued


def make_room(state: State, lane: Lane, shape: Shape, when: Bool[Array, ""]) -> tuple[State, Bool[Array, ""]]:
    """A program is about to arrive: where no row is vacant, one context of a program that has ended gives up
    its row on one replica, or, if there is none, the window is crowded. Returns the state and whether a row
    is vacant.
    """
    vacant = jnp.any(_vacant(state))
    pools, busy = state.replicas.pool, state.replicas.phase == BUSY
    rows = jnp.arange(shape.threads)
    ended = (pools.key[:, : shape.threads] < OUTSIDE) & (state.threads.status == DONE)
    ended = ended & ~(busy[:, None] & (pools.victim[:, None] == rows))
    replica = jnp.argmax(jnp.any(ended, axis=1)).astype(jnp.int32)
    thread = jnp.argmax(at(ended, replica)).astype(jnp.int32)
    on = when & ~vacant & lane.limits.blanks_first & at(column(ended, thread), replica)
    pools = with_entry(pools, replica, pool.retire(entry(pools, replica), thread, on))
    state = replace(
        state,
        replicas=replace(state.replicas, pool=pools),
        crowded=state.crowded | (when & ~vacant & ~on),
    )
    return state, vacant


def release_one(
    state: State, traffic: Traffic, lane: Lane, shape: Shape, coming: Coming, when: Bool[Array, ""]
) -> State:
    """The next call of a program is due: rules 2 and 8 of docs/semantics.md.

    A running leap is cut where the release could change a decision: the call goes to the head of the queue,
    or it may free blocks that a leap breaks or that a gate waits for.
    """
    threads, replicas, workload = state.threads, state.replicas, lane.workload
    limits, block_size = lane.limits, lane.limits.block_size
    thread, program, new = coming.thread, coming.program, coming.arrives
    prefix = at(traffic.prefix[workload], program)
    turn = at(threads.turn, thread)
    call, context, home = at(threads.call, thread), at(threads.known, thread), at(threads.replica, thread)
    service, attained_before = at(threads.service, thread), at(attained(threads, state.now), thread)
    if shape.reuses:
        turn, home = jnp.where(new, 0, turn), jnp.where(new, -1, home)
        call = jnp.where(new, at(traffic.first_call[workload], program), call)
        context = jnp.where(new, prefix_tokens(traffic, lane, shape, prefix), context)
        service, attained_before = jnp.where(new, 0, service), jnp.where(new, 0, attained_before)
    began = turn > 0
    kept = at(traffic.kept_tokens[workload], call)
    kept = jnp.where((kept >= 0) & began, jnp.minimum(kept, context), context)
    prompt = kept + at(traffic.new_tokens[workload], call)
    below = pool.prefix_blocks(traffic.prefix_tokens[workload], prefix, block_size, shape)
    if shape.slots:
        state = slots.cut_context(state, program, kept, when & began)
    taken = blocks_taken(threads, replicas, block_size, state.now)

    subject = Subject(
        thread=thread,
        program=program,
        prefix=prefix,
        turn=turn,
        context=context,
        home=home,
        attained=attained_before,
        released=at(threads.released, thread),
        prompt=prompt,
        preempted=jnp.asarray(False),
        below=below,
        most=jnp.minimum((prompt - 1) // block_size, kept // block_size),
    )
    observation = observe(state, traffic, lane, shape, subject, jnp.maximum(home, 0), taken)
    route = decide(shape.policies.routing, lane.policy.routing, observation).astype(jnp.int32)
    target = jnp.clip(route, 0, limits.replicas - 1)
    observation = replace(observation, here=target)
    answer = decide(shape.policies.scheduling, lane.policy.scheduling, observation).astype(jnp.float64)
    priority = sortable(answer)
    fault = jnp.where(route == target, FINE, BAD_ROUTE)
    fault = jnp.where(jnp.isfinite(answer), fault, BAD_PRIORITY)

    here = when & (jnp.arange(shape.replicas) == target)
    gates = has_trait(shape.policies.admission, lane.policy.admission, "gates")
    concerned = here & ((priority < replicas.head_priority) | gates)
    if shape.protects:
        guarded = column(replicas.pool.deadline, thread) >= 0
        concerned = concerned | (when & guarded & (replicas.breaking | gates))
    replicas = leap.cut(replicas, state.now, concerned & (replicas.phase == BUSY))
    if shape.protects or shape.compacts:
        replicas = _settle_context(
            replicas, lane, shape, thread, prefix, kept, below, taken, when, when & began
        )
    totals = state.totals
    threads = replace(
        threads,
        status=put(threads.status, thread, QUEUED, when),
        wake=put(threads.wake, thread, NEVER, when),
        replica=put(threads.replica, thread, target, when),
        priority=put(threads.priority, thread, priority, when),
        order=put(threads.order, thread, totals.releases + 1, when),
        prompt=put(threads.prompt, thread, prompt, when),
        known=put(threads.known, thread, prompt, when),
        computed=put(threads.computed, thread, 0, when),
        output_left=put(threads.output_left, thread, at(traffic.output_tokens[workload], call), when),
        service_before=put(threads.service_before, thread, service, when),
        released=put(threads.released, thread, state.now, when),
        first_scheduled=put(threads.first_scheduled, thread, -1, when),
        first_token=put(threads.first_token, thread, -1, when),
        resumed=put(threads.resumed, thread, 0, when),
        preemptions=put(threads.preemptions, thread, 0, when),
    )
    if shape.reuses:
        threads = replace(
            threads,
            program=put(threads.program, thread, program, when),
            call=put(threads.call, thread, call, when),
            turn=put(threads.turn, thread, turn, when),
            service=put(threads.service, thread, service, when),
        )
        totals = replace(totals, arrivals=totals.arrivals + (when & new))
    if threads.flight is not None:
        flight = threads.flight
        # The server itself ends a call at max_model_len.
        ends_in_time = prompt + at(traffic.output_tokens[workload], call) < limits.max_model_len
        eos = at(traffic.eos[workload], call) & ends_in_time
        flight = replace(flight, eos=put(flight.eos, thread, eos, when))
        if shape.reuses:
            flight = replace(
                flight, wasted=put(flight.wasted, thread, jnp.where(new, 0, at(flight.wasted, thread)), when)
            )
        threads = replace(threads, flight=flight)
    if threads.gaps is not None:
        gaps = threads.gaps
        gaps = replace(
            gaps, last=put(gaps.last, thread, -1, when), longest=put(gaps.longest, thread, -1, when)
        )
        threads = replace(threads, gaps=gaps)
    return replace(
        state,
        threads=threads,
        replicas=replace(
            replicas,
            queued=replicas.queued + here,
            phase=where_put(here & (replicas.phase == IDLE), DECIDING, replicas.phase),
        ),
        totals=replace(totals, releases=totals.releases + when),
        fault=jnp.where(when & (state.fault == FINE), fault, state.fault),
    )


def _settle_context(
    replicas: Replica,
    lane: Lane,
    shape: Shape,
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    kept: Int[Array, ""],
    below: Int[Array, ""],
    taken: Int[Array, " replicas"],
    when: Bool[Array, ""],
    cuts: Bool[Array, ""],
) -> Replica:
    """At a release the protection of the program's context ends, and what its call does not keep is spent, on
    every replica.
    """
    limits = lane.limits
    until_admission = has_trait(shape.policies.retention, lane.policy.retention, "until_admission")
    guarded = column(replicas.pool.deadline, thread) >= 0
    breaking = when & guarded & replicas.breaking
    pools, booked = pool.book(replicas.pool, thread, taken, limits.blanks_first, breaking)
    lost = jnp.where(guarded, 0, column(blocks_lost(replace(replicas, pool=pools), taken), thread))
    pools = pool.end_protection(pools, shape, thread, prefix, when & guarded & ~until_admission)
    if shape.compacts:
        left = jnp.maximum(kept // limits.block_size - below, 0)
        on = jnp.broadcast_to(cuts, taken.shape)
        pools = pool.cut_context(pools, thread, left, below, lost, limits.blanks_first, on)
    return replace(replicas, pool=pools, booked=replicas.booked + booked)


def prefix_tokens(traffic: Traffic, lane: Lane, shape: Shape, prefix: Int[Array, "..."]) -> Int[Array, "..."]:
    """Tokens of a shared prefix; 0 for none (-1)."""
    tokens = traffic.prefix_tokens[lane.workload]
    if tokens.shape[0] == 0:
        return jnp.zeros_like(prefix)
    return jnp.where(prefix >= 0, tokens[jnp.maximum(prefix, 0)], 0)
