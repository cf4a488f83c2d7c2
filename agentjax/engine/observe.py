"""What the policies see: `Observation`s built from the state, past only."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.engine.arrays import at, column, quotient, replace
from agentjax.engine.leap import boundaries_until, growth_blocks
from agentjax.engine.pool import resident
from agentjax.engine.slots import cached_tokens
from agentjax.engine.state import BUSY, RUNNING, Lane, Replica, Shape, State, Threads, Traffic
from agentjax.policies.base import CallView, Observation, ProgramView, ReplicaView


class Subject(eqx.Module):
    """The call that a policy decides on, and its program."""

    thread: Int[Array, ""]
    program: Int[Array, ""]
    prefix: Int[Array, ""]
    turn: Int[Array, ""]
    context: Int[Array, ""]  # tokens of the program's context so far
    home: Int[Array, ""]  # replica of the previous call, -1 for none
    attained: Int[Array, ""]  # service of the program (ns)
    released: Int[Array, ""]
    prompt: Int[Array, ""]
    preempted: Bool[Array, ""]
    below: Int[Array, ""]  # whole blocks of the shared prefix
    most: Int[Array, ""]  # blocks that may be found


def seconds(time: Int[Array, "..."]) -> Float[Array, "..."]:
    """Nanoseconds to seconds."""
    return time.astype(jnp.float64) / 1e9


def attained(threads: Threads, now: Int[Array, ""]) -> Int[Array, " threads"]:
    """Service of every row's program so far (ns); a batch counts when it has ended."""
    if threads.flight is None:
        return threads.service
    return threads.service - jnp.where(threads.flight.wasted_until > now, threads.flight.wasted, 0)


def reach(threads: Threads) -> Int[Array, " threads"]:
    """Tokens of each context, those included that a running batch is about to sample."""
    if threads.flight is None:
        return threads.known
    return threads.known + threads.flight.samples


def blocks_taken(
    threads: Threads, replicas: Replica, block_size: Int[Array, ""], now: Int[Array, "..."]
) -> Int[Array, " replicas"]:
    """Blocks that the iterations formed before `now` in each running leap have taken, beyond those taken at
    its launch and not booked yet.
    """
    formed = jnp.where(replicas.phase == BUSY, boundaries_until(replicas, now - replicas.start), 0)
    rows = jnp.arange(formed.shape[0])[:, None]
    sampling = (threads.status == RUNNING) & (threads.scheduled > 0) & (threads.computed == reach(threads))
    grown = growth_blocks(threads.computed, formed[:, None], block_size)
    grown = jnp.where(sampling & (threads.replica == rows), grown, 0)
    return jnp.sum(grown, axis=1, dtype=jnp.int32) - replicas.booked


def replica_view(replicas: Replica, lane: Lane, taken: Int[Array, " replicas"]) -> ReplicaView:
    """All replicas as of their last iteration boundary at or before now."""
    free = jnp.maximum(replicas.pool.free - taken, 0)
    used = lane.limits.kv_blocks - replicas.pool.free + taken
    in_use = jnp.arange(free.shape[0]) < lane.limits.replicas
    # Not a broadcast scalar: XLA would multiply by its reciprocal, and 28 / 40 would exceed 0.7.
    pool = jnp.where(in_use, lane.limits.kv_blocks, 1).astype(jnp.float64)
    return ReplicaView(
        in_use=in_use,
        running=replicas.running,
        queued=replicas.queued,
        free_blocks=free,
        kv_utilization=used / pool,
    )


class Sample(eqx.Module):
    """The replicas at one instant, as of their last iteration boundary."""

    now: Int[Array, ""]  # ns
    in_use_blocks: Int[Array, " replicas"]  # by running calls
    protected_blocks: Int[Array, " replicas"]
    running: Int[Array, " replicas"]  # calls
    queued: Int[Array, " replicas"]  # calls
    end: Int[Array, " replicas"]  # of the running or last leap (ns); without leaps, of an iteration


def sample(state: State, lane: Lane) -> Sample:
    """What a time series keeps of a state."""
    replicas, pool = state.replicas, state.replicas.pool
    used = lane.limits.kv_blocks - pool.free - pool.protected + pool.owed
    return Sample(
        now=state.now,
        in_use_blocks=used + blocks_taken(state.threads, replicas, lane.limits.block_size, state.now),
        protected_blocks=pool.protected,
        running=replicas.running,
        queued=replicas.queued,
        end=replicas.end,
    )


def blocks_lost(replicas: Replica, taken: Int[Array, " replicas"]) -> Int[Array, "replicas extents"]:
    """Blocks with content that the running leaps have already taken, though this is booked only when they
    end.
    """
    pool = replicas.pool
    is_victim = jnp.arange(pool.blocks.shape[1])[None, :] == pool.victim[:, None]
    beyond = jnp.maximum(taken - pool.fresh - pool.head, 0)[:, None] - pool.spent
    return jnp.where(is_victim, jnp.clip(beyond, 0, pool.blocks), 0)


def observe(
    state: State,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    subject: Subject,
    here: Int[Array, ""],
    taken: Int[Array, " replicas"],
) -> Observation:
    """The observation for one call."""
    pool, workload = state.replicas.pool, lane.workload
    settled = replace(pool, blocks=pool.blocks - blocks_lost(state.replicas, taken))
    shared, private = resident(settled, shape, subject.thread, subject.prefix, subject.below, subject.most)
    cached = (shared + private) * lane.limits.block_size
    if state.slots is not None:
        cached = cached_tokens(state.slots, traffic, lane, subject.program, subject.prompt)
    return Observation(
        now_s=seconds(state.now),
        releases=state.totals.releases,
        here=here,
        block_size=lane.limits.block_size,
        program=ProgramView(
            arrival_s=seconds(at(traffic.arrival[workload], subject.program)),
            turn=subject.turn,
            attained_service_s=seconds(subject.attained),
            context_tokens=subject.context,
            replica=subject.home,
            is_protected=jnp.any(column(pool.deadline, subject.thread) >= 0),
        ),
        call=CallView(
            released_s=seconds(subject.released),
            prompt_tokens=subject.prompt,
            cached_tokens=cached,
            was_preempted=subject.preempted,
        ),
        replicas=replica_view(state.replicas, lane, taken),
    )


def observe_queue(
    state: State, traffic: Traffic, lane: Lane, shape: Shape, here: Int[Array, ""]
) -> tuple[Observation, Observation]:
    """The observations for all rows at once, for a replica at an iteration boundary, and the axes to map
    over.
    """
    threads, pool, workload = state.threads, state.replicas.pool, lane.workload
    each = pool.blocks[:, : shape.threads]
    block_size = lane.limits.block_size
    programs = jnp.maximum(threads.program, 0)
    limit = quotient(jnp.maximum(threads.known - 1, 0), block_size)
    if shape.prefixes == 0:
        cached = jnp.minimum(each, limit)
    else:
        prefix = traffic.prefix[workload][programs]
        index = jnp.maximum(prefix, 0)
        whole = jnp.where(prefix >= 0, traffic.prefix_tokens[workload][index] // block_size, 0)
        shared = jnp.where(prefix >= 0, pool.blocks[:, shape.threads + index], 0)
        shared = jnp.minimum(shared, jnp.minimum(whole, limit))
        cached = shared + jnp.where(shared == whole, jnp.minimum(each, limit - shared), 0)
    cached = cached.T * block_size
    if state.slots is not None:
        held = state.slots
        cached = jax.vmap(lambda program, prompt: cached_tokens(held, traffic, lane, program, prompt))(
            programs, threads.prompt
        )
    observation = Observation(
        now_s=seconds(state.now),
        releases=state.totals.releases,
        here=here,
        block_size=block_size,
        program=ProgramView(
            arrival_s=seconds(traffic.arrival[workload])[programs],
            turn=threads.turn,
            attained_service_s=seconds(attained(threads, state.now)),
            context_tokens=threads.known,
            replica=threads.replica,
            is_protected=jnp.any(pool.deadline[:, : shape.threads] >= 0, axis=0),
        ),
        call=CallView(
            released_s=seconds(threads.released),
            prompt_tokens=threads.prompt,
            cached_tokens=cached,
            was_preempted=threads.preemptions > 0,
        ),
        replicas=replica_view(state.replicas, lane, jnp.zeros_like(pool.free)),
    )
    axes = Observation(
        now_s=None,  # pyright: ignore[reportArgumentType]
        releases=None,  # pyright: ignore[reportArgumentType]
        here=None,  # pyright: ignore[reportArgumentType]
        block_size=None,  # pyright: ignore[reportArgumentType]
        program=ProgramView(0, 0, 0, 0, 0, 0),  # pyright: ignore[reportArgumentType]
        call=CallView(0, 0, 0, 0),  # pyright: ignore[reportArgumentType]
        replicas=None,  # pyright: ignore[reportArgumentType]
    )
    return observation, axes
