"""One scheduling action of one replica: vLLM's `schedule()`, taken apart into steps that cost no time.

An action schedules all running calls, or goes on to the first that does not fit and notes whom to preempt
for it; then it admits one call; then, if nothing else can be admitted, it launches. Rules:
docs/semantics.md, sections 4 and 6.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine import leap, pool, slots
from agentjax.engine.arrays import (
    at,
    column,
    count,
    first_where,
    lexicographic_argmin,
    put,
    put_column,
    quotient,
    replace,
    with_entry,
)
from agentjax.engine.launch import launch
from agentjax.engine.observe import blocks_taken, observe_queue, reach
from agentjax.engine.state import BUSY, QUEUED, RUNNING, Lane, Replica, Shape, State, Threads, Traffic
from agentjax.policies.base import decide, has_trait


class Survey(eqx.Module):
    """What pass 1 would do for the running calls that are not scheduled yet."""

    calls: Bool[Array, " threads"]
    prefills: Bool[Array, " threads"]  # at most one of them
    full: Bool[Array, " threads"]  # calls without room in their last block
    all_of_them: Bool[Array, ""]  # nobody is left out
    scheduled: Int[Array, ""]  # tokens in the batch already
    chunk: Int[Array, ""]  # tokens of the prefill
    tokens: Int[Array, ""]  # tokens of all these calls
    chunk_blocks: Int[Array, ""]  # blocks the prefill needs
    blocks: Int[Array, ""]  # blocks all need
    recomputed: Int[Array, ""]  # the chunk, if its call was preempted before


class Outcome(eqx.Module):
    """Where the formation of an iteration stands after an action."""

    tokens: Int[Array, ""]  # in the batch
    settled: Bool[Array, ""]  # nothing more to decide
    may_leap: Bool[Array, ""]  # and it stays so until a call of the batch completes
    head_priority: Int[Array, ""]  # a release with a smaller one would change that
    deadlocked: Bool[Array, ""]  # calls wait, none runs and none can be admitted


LAST, FIRST = 2**63 - 1, -(2**63)
"""Sortable priorities behind and before all others."""


def longest_chunk(one: Replica, lane: Lane) -> Int[Array, ""]:
    """`long_prefill_token_threshold`; from vLLM 0.33 on not for a call that is alone in the engine."""
    limits = lane.limits
    alone = limits.goes_on & (one.running + one.queued == 1)
    return jnp.where(alone, jnp.iinfo(jnp.int32).max, limits.long_prefill_tokens)


def survey(threads: Threads, one: Replica, lane: Lane, shape: Shape, replica: Int[Array, ""]) -> Survey:
    """Needs of the running calls of a replica; calls that have all their output, or will have it when the
    running batch ends, are left out.

    A partial prefill usually uses up the budget, so it is the last in order. Where chunks are shorter than
    that (`shape.chunked`), the survey ends at the first prefill.
    """
    block_size, budget = lane.limits.block_size, lane.limits.max_num_batched_tokens
    running = (threads.status == RUNNING) & (threads.replica == replica) & (threads.output_left > 0)
    calls = running & (threads.scheduled == 0)
    if threads.flight is not None:
        flight = threads.flight
        calls = calls & ~(flight.samples & ~flight.eos & (threads.output_left <= 1))
    known = reach(threads)
    left = known - threads.computed
    prefills = calls & ((left > 1) | (known == threads.prompt))
    scheduled = count(jnp.where(running, threads.scheduled, 0))
    all_of_them = jnp.asarray(True)
    if shape.chunked:
        first = first_where(prefills, threads.admitted)
        ends = jnp.any(prefills) & (threads.admitted > at(threads.admitted, first))
        all_of_them = ~jnp.any(calls & ends)
        prefills = prefills & (jax.lax.iota(jnp.int32, prefills.shape[0]) == first)
        calls = calls & ~ends
        # As many decodes as the chunks before them have left tokens for.
        earlier = (calls & ~prefills) & (threads.admitted[:, None] > threads.admitted)
        calls = calls & (prefills | (jnp.sum(earlier, axis=1) < budget - scheduled))
        spent = scheduled + count(calls & ~prefills) >= budget
        all_of_them = all_of_them | spent
        prefills = prefills & ~spent
        calls = calls & (prefills | ~(left > 1) & (known > threads.prompt))
    decodes = count(calls & ~prefills)
    prefill_left = count(jnp.where(prefills, left, 0))
    prefill_at = count(jnp.where(prefills, threads.computed, 0))
    chunk = jnp.minimum(prefill_left, budget - scheduled - decodes)
    if shape.chunked:
        chunk = jnp.minimum(chunk, longest_chunk(one, lane))
    # A chunk is sized once: tokens that its victims return to the budget do not lengthen it.
    chunk = jnp.where(one.chunk >= 0, jnp.minimum(one.chunk, prefill_left), chunk)
    chunk_blocks = pool.blocks_for(prefill_at + chunk, block_size) - pool.blocks_for(prefill_at, block_size)
    full = quotient(threads.computed, block_size) * block_size == threads.computed
    decode_blocks = count(calls & ~prefills & full)
    return Survey(
        calls=calls,
        prefills=prefills,
        full=calls & full,
        all_of_them=all_of_them,
        scheduled=scheduled,
        chunk=chunk,
        tokens=decodes + chunk,
        chunk_blocks=chunk_blocks,
        blocks=decode_blocks + chunk_blocks,
        recomputed=jnp.where(jnp.any(prefills & (threads.preemptions > 0)), chunk, 0),
    )


def schedule(
    state: State,
    one: Replica,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    when: Bool[Array, ""],
) -> tuple[State, Replica]:
    """One scheduling action on a replica at an iteration boundary; everything else due at this instant has
    been handled. Returns the state, in which other replicas may have changed, and the replica.
    """
    ready = when & (one.pool.owed == 0)
    prefixes = row_prefixes(state, traffic, lane, shape)
    first = lane.limits.blanks_first

    programs, now = state.threads.program, state.now

    def noted(pools: pool.Pool) -> pool.Pool:
        return pool.choose_victim(pools, shape, programs, now, first, when)

    def paid(pools: pool.Pool) -> pool.Pool:
        return pool.pay(noted(pools), shape, prefixes, first, when)

    state, one, tokens, stopped_at = _schedule_running(state, one, traffic, lane, shape, replica, ready)
    one = replace(one, pool=paid(one.pool))
    state, one, outcome = _preempt_or_admit(
        state, one, traffic, lane, shape, replica, ready, tokens, stopped_at
    )
    one = replace(one, pool=noted(paid(one.pool)))
    return launch(state, one, lane, shape, replica, outcome)


def row_prefixes(state: State, traffic: Traffic, lane: Lane, shape: Shape) -> Int[Array, " threads"]:
    """Shared prefix of every row's program, -1 for none."""
    if shape.prefixes == 0:
        return state.threads.program
    if not shape.reuses:
        return traffic.prefix[lane.workload]
    return traffic.prefix[lane.workload][jnp.maximum(state.threads.program, 0)]


def _schedule_running(
    state: State,
    one: Replica,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    ready: Bool[Array, ""],
) -> tuple[State, Replica, Int[Array, ""], Int[Array, ""]]:
    """Pass 1. Returns the state, the replica, the tokens in the batch, and the row for which a call must be
    preempted (-1: none).
    """
    threads = state.threads
    open_pass = ready & ~one.passed
    needs = survey(threads, one, lane, shape, replica)
    space = pool.available(one.pool)
    fits = needs.blocks <= space
    # Where not all fit: go on, in order, to the next call that needs a block.
    needing = jnp.where(needs.prefills, needs.chunk_blocks > 0, needs.full)
    next_call = first_where(needing, threads.admitted)
    need = jnp.where(at(needs.prefills, next_call), needs.chunk_blocks, 1)
    next_fits = need <= space
    turn = at(threads.admitted, next_call)
    reached = (threads.admitted < turn) | (next_fits & (threads.admitted == turn))
    chosen = open_pass & needs.calls & (fits | reached)
    tokens = jnp.where(needs.prefills, needs.chunk, 1)
    prefilled = chosen & needs.prefills
    owed = jnp.where(fits, needs.blocks, jnp.where(next_fits, need, 0))
    waits = ~fits & ~next_fits & at(needs.prefills, next_call)
    one = replace(
        one,
        pool=replace(one.pool, owed=one.pool.owed + jnp.where(open_pass, owed, 0)),
        passed=one.passed | (open_pass & fits & needs.all_of_them),
        chunk=jnp.where(open_pass, jnp.where(waits, needs.chunk, -1), one.chunk),
    )
    totals = state.totals
    recomputed = jnp.where(jnp.any(prefilled), needs.recomputed, 0)
    state = replace(
        state,
        threads=replace(
            threads,
            computed=threads.computed + jnp.where(chosen, tokens, 0),
            scheduled=jnp.where(chosen, tokens, threads.scheduled),
        ),
        totals=replace(totals, recomputed=totals.recomputed + recomputed),
    )
    if shape.prefixes > 0:
        thread = jnp.argmax(prefilled)
        pools = _fill_prefix(
            one.pool, state.threads, traffic, lane, shape, thread, open_pass & jnp.any(prefilled)
        )
        one = replace(one, pool=pools)
    batch = needs.scheduled + jnp.where(open_pass & fits, needs.tokens, 0)
    stopped_at = jnp.where(open_pass & ~fits & ~next_fits, next_call, -1)
    return state, one, batch, stopped_at


def _fill_prefix(
    pools: pool.Pool,
    threads: Threads,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    thread: Int[Array, ""],
    on: Bool[Array, ""],
) -> pool.Pool:
    """Blocks of a shared prefix have content as soon as a call that computes them is scheduled (rule 3.3)."""
    prefix = at(traffic.prefix[lane.workload], jnp.maximum(at(threads.program, thread), 0))
    whole = pool.prefix_blocks(traffic.prefix_tokens[lane.workload], prefix, lane.limits.block_size, shape)
    extent = shape.threads + jnp.maximum(prefix, 0)
    filled = jnp.minimum(at(threads.computed, thread) // lane.limits.block_size, whole)
    blocks = jnp.maximum(column(pools.blocks, extent), filled)
    return replace(pools, blocks=put_column(pools.blocks, extent, blocks, on & (prefix >= 0)))


def _preempt_or_admit(
    state: State,
    one: Replica,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    ready: Bool[Array, ""],
    tokens: Int[Array, ""],
    stopped_at: Int[Array, ""],
) -> tuple[State, Replica, Outcome]:
    """Choose a row: the victim of a preemption if pass 1 was stopped, else the head of the queue, and admit
    it if it fits.
    """
    threads, limits = state.threads, lane.limits
    workload = lane.workload
    block_size = limits.block_size
    here = threads.replica == replica
    preempting = stopped_at >= 0
    waiting = (threads.status == QUEUED) & here
    eligible = _eligible(state, one, traffic, lane, shape, replica, waiting)
    fcfs = has_trait(shape.policies.scheduling, lane.policy.scheduling, "fcfs_queue")
    candidates = jnp.where(preempting, (threads.status == RUNNING) & here, eligible)
    if all(member.trait("fcfs_queue") for member in shape.policies.scheduling):
        thread = lexicographic_argmin(
            candidates,
            jnp.where(preempting, 0, threads.priority),
            jnp.where(preempting, -threads.admitted, threads.order),
        )
    else:
        worst = jnp.where(fcfs, 0, ~threads.priority)
        latest = -jnp.where(fcfs, threads.admitted, threads.released)
        thread = lexicographic_argmin(
            candidates,
            jnp.where(preempting, worst, threads.priority),
            jnp.where(preempting, latest, threads.order),
            threads.admitted,
        )
    itself = preempting & (thread == stopped_at)
    one = replace(
        one,
        preempting=jnp.where(preempting, thread, one.preempting),
        passed=one.passed | (ready & itself & ~(limits.goes_on & ~fcfs)),
        chunk=jnp.where(itself, -1, one.chunk),
    )

    # Pass 2: the head of the queue.
    preempted = one.preempted | preempting
    budget = limits.max_num_batched_tokens - tokens
    paid = one.pool.owed == 0
    decide_now = ready & one.passed & paid & ~preempted
    full = one.running >= limits.max_num_seqs
    tries = decide_now & (budget > 0) & ~full & jnp.any(eligible)
    known = at(threads.known, thread)
    program = jnp.maximum(at(threads.program, thread), 0)
    prefix = at(traffic.prefix[workload], program)
    below = pool.prefix_blocks(traffic.prefix_tokens[workload], prefix, block_size, shape)
    shared, private = pool.resident(one.pool, shape, thread, prefix, below, (known - 1) // block_size)
    in_use = pool.prefix_in_use(one.pool, shape, prefix)
    hit = shared + private
    idle = private + jnp.where(in_use, 0, shared)
    found, slot = hit * block_size, thread
    if state.slots is not None:
        slot, found = slots.choose(state.slots, traffic, lane, replica, program, known)
    chunk = jnp.minimum(known - found, budget)
    if shape.chunked:
        chunk = jnp.minimum(chunk, longest_chunk(one, lane))
    first = jnp.where(limits.reserve_full_isl, known, found + chunk)
    spare = jnp.where(one.running > 0, limits.watermark_blocks, 0)
    fits = pool.blocks_for(first, block_size) - hit + idle + spare <= pool.available(one.pool)
    admits = tries & fits
    chunk = jnp.where(admits, chunk, 0)
    state, one = _admit(
        state, one, traffic, lane, shape, replica, thread, prefix, hit, private, found, chunk, admits
    )
    if shape.slots:
        state = slots.occupy(state, traffic, lane, replica, program, slot, admits)

    tokens = tokens + chunk
    full = one.running >= limits.max_num_seqs
    blocked = decide_now & (full | (one.queued == 0) | ((budget > 0) & ~admits))
    exhausted = paid & (tokens >= limits.max_num_batched_tokens)
    settled = ready & one.passed & (preempted | blocked | exhausted)
    gates = has_trait(shape.policies.admission, lane.policy.admission, "gates")
    monotone = has_trait(shape.policies.admission, lane.policy.admission, "monotone")
    head = jnp.where(tries & ~admits, at(threads.priority, thread), LAST)
    return (
        state,
        one,
        Outcome(
            tokens=tokens,
            settled=settled & ~preempting,
            may_leap=blocked & (full | (one.queued == 0) | ~gates | (monotone & ~jnp.any(eligible))),
            head_priority=jnp.where(full, FIRST, head),
            deadlocked=tries & ~admits & (one.running == 0),
        ),
    )


def _eligible(
    state: State,
    one: Replica,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    waiting: Bool[Array, " threads"],
) -> Bool[Array, " threads"]:
    """Waiting calls that the admission policy lets pass; preempted ones always, all where none would and
    none runs.
    """
    if not any(member.trait("gates") for member in shape.policies.admission):
        return waiting
    seen = replace(state, replicas=with_entry(state.replicas, replica, one))
    observation, axes = observe_queue(seen, traffic, lane, shape, replica)
    answers = jax.vmap(
        lambda obs: decide(shape.policies.admission, lane.policy.admission, obs), in_axes=(axes,)
    )(observation)
    passing = waiting & (answers | (state.threads.first_scheduled >= 0))
    return jnp.where((one.running == 0) & ~jnp.any(passing), waiting, passing)


def _admit(
    state: State,
    one: Replica,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    hit: Int[Array, ""],
    private: Int[Array, ""],
    found: Int[Array, ""],
    chunk: Int[Array, ""],
    when: Bool[Array, ""],
) -> tuple[State, Replica]:
    """The call takes its `hit` blocks and a seat, and computes `chunk` tokens in this iteration, on top of
    the `found` ones.
    """
    block_size = lane.limits.block_size
    pools = pool.touch(one.pool, shape, thread, prefix, private, when)
    if shape.replicas > 1:
        state = _end_protection_elsewhere(state, lane, shape, replica, thread, prefix, when)
    threads, totals = state.threads, state.totals
    computed = found + chunk
    new = when & (at(threads.first_scheduled, thread) < 0)
    again = when & ~new
    taken = pool.blocks_for(computed, block_size) - hit
    resumed = at(threads.resumed, thread) + found
    known = at(threads.known, thread)
    decodes = (found == known - 1) & (known > at(threads.prompt, thread))
    state = replace(
        state,
        threads=replace(
            threads,
            status=put(threads.status, thread, RUNNING, when),
            computed=put(threads.computed, thread, computed, when),
            scheduled=put(threads.scheduled, thread, chunk, when),
            admitted=put(threads.admitted, thread, totals.admissions, when),
            first_scheduled=put(threads.first_scheduled, thread, state.now, new),
            cached=put(threads.cached, thread, found, new),
            resumed=put(threads.resumed, thread, resumed, again),
        ),
        totals=replace(
            totals,
            admissions=totals.admissions + when,
            hits=totals.hits + jnp.where(new, found, 0),
            recomputed=totals.recomputed + jnp.where(again & ~decodes, chunk, 0),
        ),
    )
    one = replace(
        one,
        pool=replace(pools, owed=pools.owed + jnp.where(when, taken, 0)),
        running=one.running + when,
        queued=one.queued - when,
    )
    if shape.prefixes > 0:
        pools = _fill_prefix(one.pool, state.threads, traffic, lane, shape, thread, when)
        one = replace(one, pool=pools)
    return state, one


def _end_protection_elsewhere(
    state: State,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    when: Bool[Array, ""],
) -> State:
    """Policies that protect until admission: the context is admitted here, so it is free everywhere else."""
    if not shape.protects or not any(member.trait("until_admission") for member in shape.policies.retention):
        return state
    until_admission = has_trait(shape.policies.retention, lane.policy.retention, "until_admission")
    replicas, block_size = state.replicas, lane.limits.block_size
    elsewhere = when & until_admission & (jnp.arange(shape.replicas) != replica)
    gates = has_trait(shape.policies.admission, lane.policy.admission, "gates")
    guarded = column(replicas.pool.deadline, thread) >= 0
    frees = elsewhere & guarded & (replicas.breaking | gates)
    # Replicas before this one have begun the iteration that starts now, those after it have not.
    begun = state.now + (jnp.arange(shape.replicas) < replica)
    replicas = leap.cut(replicas, begun, frees & (replicas.phase == BUSY))
    taken = blocks_taken(state.threads, replicas, block_size, begun)
    pools, booked = pool.book(
        replicas.pool, thread, taken, lane.limits.blanks_first, frees & replicas.breaking
    )
    pools = pool.end_protection(pools, shape, thread, prefix, elsewhere)
    replicas = replace(replicas, pool=pools, booked=replicas.booked + booked)
    return replace(state, replicas=replicas)
