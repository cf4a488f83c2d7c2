"""One scheduling action of one replica: vLLM's `schedule()`, taken apart into steps that cost no time.

An action schedules all running calls, or goes on to the first that does not fit and notes whom to preempt
for it; then it admits one call; then, if nothing else can be admitted, it launches. Rules:
docs/semantics.md, sections 4 and 6.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
)
from agentjax.engine.launch import launch
from agentjax.engine.observe import blocks_taken, observe_queue
from agentjax.engine.state import BUSY, QUEUED, RUNNING, Lane, Shape, State, Traffic
from agentjax.policies.base import decide, has_trait


class Survey(eqx.Module):
    """What pass 1 would do for the running calls that are not scheduled yet."""

    calls: Bool[Array, " threads"]
    prefills: Bool[
        Array, " threads"
    ]  # at most one: a partial prefill uses up the budget, so it is last in order
    full: Bool[Array, " threads"]  # calls without room in their last block
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
    head_priority: Float[Array, ""]  # a release with a smaller one would change that
    deadlocked: Bool[Array, ""]  # calls wait, none runs and none can be admitted


def survey(state: State, lane: Lane, replica: Int[Array, ""]) -> Survey:
    """Needs of the running calls of a replica; calls that have all their output are left out."""
    threads = state.threads
    block_size = lane.limits.block_size
    running = (threads.status == RUNNING) & (threads.replica == replica) & (threads.output_left > 0)
    calls = running & (threads.scheduled == 0)
    left = threads.known - threads.computed
    prefills = calls & ((left > 1) | (threads.known == threads.prompt))
    scheduled = count(jnp.where(running, threads.scheduled, 0))
    decodes = count(calls & ~prefills)
    prefill_left = count(jnp.where(prefills, left, 0))
    prefill_at = count(jnp.where(prefills, threads.computed, 0))
    chunk = jnp.minimum(prefill_left, lane.limits.max_num_batched_tokens - scheduled - decodes)
    # A chunk is sized once: tokens that its victims return to the budget do not lengthen it.
    sized = at(state.replicas.chunk, replica)
    chunk = jnp.where(sized >= 0, jnp.minimum(sized, prefill_left), chunk)
    chunk_blocks = pool.blocks_for(prefill_at + chunk, block_size) - pool.blocks_for(prefill_at, block_size)
    full = quotient(threads.computed, block_size) * block_size == threads.computed
    decode_blocks = count(calls & ~prefills & full)
    return Survey(
        calls=calls,
        prefills=prefills,
        full=calls & full,
        scheduled=scheduled,
        chunk=chunk,
        tokens=decodes + chunk,
        chunk_blocks=chunk_blocks,
        blocks=decode_blocks + chunk_blocks,
        recomputed=jnp.where(jnp.any(prefills & (threads.preemptions > 0)), chunk, 0),
    )


def schedule(
    state: State, traffic: Traffic, lane: Lane, shape: Shape, replica: Int[Array, ""], when: Bool[Array, ""]
) -> State:
    """One scheduling action on a replica at an iteration boundary; everything else due at this instant has
    been handled.
    """
    on = when & (jnp.arange(shape.replicas) == replica)
    ready = when & (at(state.replicas.owed, replica) == 0)
    state, tokens, stopped_at = _schedule_running(state, traffic, lane, shape, replica, ready)
    state = pool.pay_fresh(state, on)
    state, outcome = _preempt_or_admit(state, traffic, lane, shape, replica, ready, tokens, stopped_at)
    state = pool.pay_fresh(state, on)
    state = pool.choose_victim(state, on)
    return launch(state, lane, shape, replica, outcome)


def _schedule_running(
    state: State, traffic: Traffic, lane: Lane, shape: Shape, replica: Int[Array, ""], ready: Bool[Array, ""]
) -> tuple[State, Int[Array, ""], Int[Array, ""]]:
    """Pass 1. Returns the state, the tokens in the batch, and the thread for which a call must be preempted
    (-1: none).
    """
    threads, replicas = state.threads, state.replicas
    open_pass = ready & ~at(replicas.passed, replica)
    needs = survey(state, lane, replica)
    space = at(pool.available(state), replica)
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
    on = open_pass & (jnp.arange(shape.replicas) == replica)
    owed = jnp.where(fits, needs.blocks, jnp.where(next_fits, need, 0))
    state = replace(
        state,
        threads=replace(
            threads,
            computed=threads.computed + jnp.where(chosen, tokens, 0),
            scheduled=jnp.where(chosen, tokens, threads.scheduled),
        ),
        replicas=replace(
            replicas,
            owed=replicas.owed + jnp.where(on, owed, 0),
            passed=replicas.passed | (on & fits),
            chunk=jnp.where(
                on,
                jnp.where(fits | next_fits | ~at(needs.prefills, next_call), -1, needs.chunk),
                replicas.chunk,
            ),
        ),
        totals=replace(
            state.totals,
            recomputed=state.totals.recomputed + jnp.where(jnp.any(prefilled), needs.recomputed, 0),
        ),
    )
    if shape.prefixes > 0:
        state = _fill_prefix(state, traffic, lane, shape, jnp.argmax(prefilled), on & jnp.any(prefilled))
    batch = needs.scheduled + jnp.where(open_pass & fits, needs.tokens, 0)
    return state, batch, jnp.where(open_pass & ~fits & ~next_fits, next_call, -1)


def _fill_prefix(
    state: State,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    thread: Int[Array, ""],
    on: Bool[Array, " replicas"],
) -> State:
    """Blocks of a shared prefix have content as soon as a call that computes them is scheduled (rule 3.3)."""
    prefix = at(traffic.prefix[lane.workload], thread)
    whole = pool.prefix_blocks(traffic.prefix_tokens[lane.workload], prefix, lane.limits.block_size, shape)
    extent = shape.threads + jnp.maximum(prefix, 0)
    filled = jnp.minimum(at(state.threads.computed, thread) // lane.limits.block_size, whole)
    blocks = jnp.maximum(column(state.extents.blocks, extent), filled)
    extents = replace(
        state.extents, blocks=put_column(state.extents.blocks, extent, blocks, on & (prefix >= 0))
    )
    return replace(state, extents=extents)


def _preempt_or_admit(
    state: State,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    ready: Bool[Array, ""],
    tokens: Int[Array, ""],
    stopped_at: Int[Array, ""],
) -> tuple[State, Outcome]:
    """Choose a thread: the victim of a preemption if pass 1 was stopped, else the head of the queue, and
    admit it if it fits.
    """
    threads, replicas, limits = state.threads, state.replicas, lane.limits
    workload = lane.workload
    block_size = limits.block_size
    here = threads.replica == replica
    running, queued = at(replicas.running, replica), at(replicas.queued, replica)
    preempting = stopped_at >= 0
    waiting = (threads.status == QUEUED) & here
    eligible = _eligible(state, traffic, lane, shape, replica, waiting, running)
    fcfs = has_trait(shape.policies.scheduling, lane.policy.scheduling, "fcfs_queue")
    worst = jnp.where(fcfs, 0.0, -threads.priority)
    latest = -jnp.where(fcfs, threads.admitted, threads.released)
    thread = lexicographic_argmin(
        jnp.where(preempting, (threads.status == RUNNING) & here, eligible),
        jnp.where(preempting, worst, threads.priority),
        jnp.where(preempting, latest, threads.order),
        threads.admitted,
    )
    on = jnp.arange(shape.replicas) == replica
    passed = at(replicas.passed, replica) | (preempting & (thread == stopped_at))
    replicas = replace(
        replicas,
        preempting=jnp.where(on & preempting, thread, replicas.preempting),
        passed=jnp.where(on & ready, passed, replicas.passed),
    )
    state = replace(state, replicas=replicas)

    # Pass 2: the head of the queue.
    preempted = at(replicas.preempted, replica) | preempting
    budget = limits.max_num_batched_tokens - tokens
    paid = at(replicas.owed, replica) == 0
    decide_now = ready & passed & paid & ~preempted
    full = running >= limits.max_num_seqs
    tries = decide_now & (budget > 0) & ~full & jnp.any(eligible)
    known = at(threads.known, thread)
    prefix = at(traffic.prefix[workload], thread)
    below = pool.prefix_blocks(traffic.prefix_tokens[workload], prefix, block_size, shape)
    shared, private = pool.resident(state.extents, shape, thread, prefix, below, (known - 1) // block_size)
    shared, private = at(shared, replica), at(private, replica)
    in_use = pool.prefix_in_use(state, shape, prefix, replica)
    hit = shared + private
    idle = private + jnp.where(in_use, 0, shared)
    found, slot = hit * block_size, thread
    if state.slots is not None:
        slot, found = slots.choose(state.slots, traffic, lane, replica, thread, known)
    fits = pool.blocks_for(known, block_size) - hit + idle <= at(pool.available(state), replica)
    admits = tries & fits
    chunk = jnp.where(admits, jnp.minimum(known - found, budget), 0)
    state = _admit(state, traffic, lane, shape, replica, thread, prefix, hit, found, chunk, admits)
    if shape.slots:
        state = slots.occupy(state, traffic, lane, replica, thread, slot, admits)

    tokens = tokens + chunk
    queued = queued - admits
    full = running + admits >= limits.max_num_seqs
    blocked = decide_now & (full | (queued == 0) | ((budget > 0) & ~admits))
    settled = ready & passed & (preempted | blocked | (paid & (tokens >= limits.max_num_batched_tokens)))
    gates = has_trait(shape.policies.admission, lane.policy.admission, "gates")
    monotone = has_trait(shape.policies.admission, lane.policy.admission, "monotone")
    head = jnp.where(tries & ~admits, at(threads.priority, thread), jnp.inf)
    return state, Outcome(
        tokens=tokens,
        settled=settled & ~preempting,
        may_leap=blocked & (full | (queued == 0) | ~gates | (monotone & ~jnp.any(eligible))),
        head_priority=jnp.where(full, -jnp.inf, head),
        deadlocked=tries & ~admits & (running == 0),
    )


def _eligible(
    state: State,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    waiting: Bool[Array, " threads"],
    running: Int[Array, ""],
) -> Bool[Array, " threads"]:
    """Waiting calls that the admission policy lets pass; preempted ones always, all where none would and
    none runs.
    """
    observation, axes = observe_queue(state, traffic, lane, shape, replica)
    answers = jax.vmap(
        lambda obs: decide(shape.policies.admission, lane.policy.admission, obs), in_axes=(axes,)
    )(observation)
    passing = waiting & (answers | (state.threads.first_scheduled >= 0))
    return jnp.where((running == 0) & ~jnp.any(passing), waiting, passing)


def _admit(
    state: State,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    replica: Int[Array, ""],
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    hit: Int[Array, ""],
    found: Int[Array, ""],
    chunk: Int[Array, ""],
    when: Bool[Array, ""],
) -> State:
    """The call takes its `hit` blocks and a seat, and computes `chunk` tokens in this iteration, on top of
    the `found` ones.
    """
    block_size = lane.limits.block_size
    on = when & (jnp.arange(shape.replicas) == replica)
    state = pool.touch(state, shape, thread, prefix, on)
    until_admission = has_trait(shape.policies.retention, lane.policy.retention, "until_admission")
    elsewhere = when & until_admission & (jnp.arange(shape.replicas) != replica)
    if shape.replicas > 1:
        gates = has_trait(shape.policies.admission, lane.policy.admission, "gates")
        frees = elsewhere & (column(state.extents.deadline, thread) >= 0) & (state.replicas.breaking | gates)
        # Replicas before this one have begun the iteration that starts now, those after it have not.
        begun = state.now + (jnp.arange(shape.replicas) < replica)
        cut = leap.cut(state.replicas, begun, frees & (state.replicas.phase == BUSY))
        state = pool.book(replace(state, replicas=cut), thread, blocks_taken(state, lane, begun), frees)
        state = pool.end_protection(state, shape, thread, prefix, elsewhere)
    threads, replicas, totals = state.threads, state.replicas, state.totals
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
        replicas=replace(
            replicas,
            running=replicas.running + on,
            queued=replicas.queued - on,
            owed=replicas.owed + jnp.where(on, taken, 0),
        ),
        totals=replace(
            totals,
            admissions=totals.admissions + when,
            hits=totals.hits + jnp.where(new, found, 0),
            recomputed=totals.recomputed + jnp.where(again & ~decodes, chunk, 0),
        ),
    )
    if shape.prefixes == 0:
        return state
    return _fill_prefix(state, traffic, lane, shape, thread, on)
