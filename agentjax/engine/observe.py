"""What the policies see: `Observation`s built from the state, past only."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentjax.engine.arrays import at, column, quotient, replace
from agentjax.engine.leap import growth_blocks, iterations_until
from agentjax.engine.pool import resident
from agentjax.engine.slots import cached_tokens
from agentjax.engine.state import BUSY, RUNNING, Lane, Shape, State, Traffic
from agentjax.policies.base import CallView, Observation, ProgramView, ReplicaView


def seconds(time: Int[Array, "..."]) -> Float[Array, "..."]:
    """Nanoseconds to seconds."""
    return time.astype(jnp.float64) / 1e9


def blocks_taken(state: State, lane: Lane, now: Int[Array, "..."]) -> Int[Array, " replicas"]:
    """Blocks that the iterations begun before `now` in each running leap have taken, beyond those taken at
    its launch and not booked yet.
    """
    threads, replicas = state.threads, state.replicas
    begun = jnp.where(replicas.phase == BUSY, iterations_until(replicas, now - replicas.start), 0)
    rows = jnp.arange(begun.shape[0])[:, None]
    sampling = (threads.status == RUNNING) & (threads.computed == threads.known) & (threads.replica == rows)
    grown = growth_blocks(threads.computed, begun[:, None], lane.limits.block_size)
    return jnp.sum(jnp.where(sampling, grown, 0), axis=1, dtype=jnp.int32) - replicas.booked


def replica_view(state: State, lane: Lane, taken: Int[Array, " replicas"]) -> ReplicaView:
    """All replicas as of their last iteration boundary at or before now."""
    replicas = state.replicas
    free = jnp.maximum(replicas.free - taken, 0)
    used = lane.limits.kv_blocks - replicas.free + taken
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


def _service(state: State, shape: Shape) -> Int[Array, " programs"]:
    """Attained service of every program (ns)."""
    return jnp.sum(state.threads.service.reshape(shape.programs, shape.threads_per_program), axis=1)


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
    replicas = state.replicas
    used = lane.limits.kv_blocks - replicas.free - replicas.protected + replicas.owed
    return Sample(
        now=state.now,
        in_use_blocks=used + blocks_taken(state, lane, state.now),
        protected_blocks=replicas.protected,
        running=replicas.running,
        queued=replicas.queued,
        end=replicas.end,
    )


def blocks_lost(state: State, taken: Int[Array, " replicas"]) -> Int[Array, "replicas extents"]:
    """Blocks with content that the running leaps have already taken, though this is booked only when they
    end.
    """
    extents, replicas = state.extents, state.replicas
    is_victim = jnp.arange(extents.blocks.shape[1])[None, :] == replicas.victim[:, None]
    beyond = jnp.maximum(taken - replicas.fresh, 0)[:, None] - extents.blanks
    return jnp.where(is_victim, jnp.clip(beyond, 0, extents.blocks), 0)


def observe(
    state: State,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    thread: Int[Array, ""],
    here: Int[Array, ""],
    prompt: Int[Array, ""],
    prefix_blocks: Int[Array, ""],
    limit_blocks: Int[Array, ""],
    taken: Int[Array, " replicas"],
) -> Observation:
    """The observation for one call: of `prompt` tokens, of which at most `limit_blocks` blocks can be
    cached.
    """
    threads = state.threads
    prefix = at(traffic.prefix[lane.workload], thread)
    settled = replace(state.extents, blocks=state.extents.blocks - blocks_lost(state, taken))
    shared, private = resident(settled, shape, thread, prefix, prefix_blocks, limit_blocks)
    cached = (shared + private) * lane.limits.block_size
    if state.slots is not None:
        cached = cached_tokens(state.slots, traffic, lane, thread, prompt)
    program = thread // shape.threads_per_program
    return Observation(
        now_s=seconds(state.now),
        releases=state.totals.releases,
        here=here,
        block_size=lane.limits.block_size,
        program=ProgramView(
            arrival_s=seconds(at(traffic.arrival[lane.workload], program)),
            turn=at(threads.turn, thread),
            attained_service_s=seconds(at(_service(state, shape), program)),
            context_tokens=at(threads.known, thread),
            replica=at(threads.replica, thread),
            is_protected=jnp.any(column(state.extents.deadline, thread) >= 0),
        ),
        call=CallView(
            released_s=seconds(at(threads.released, thread)),
            prompt_tokens=prompt,
            cached_tokens=cached,
            was_preempted=at(threads.preemptions, thread) > 0,
        ),
        replicas=replica_view(state, lane, taken),
    )


def observe_queue(
    state: State, traffic: Traffic, lane: Lane, shape: Shape, here: Int[Array, ""]
) -> tuple[Observation, Observation]:
    """The observations for all threads at once, for a replica at an iteration boundary, and the axes to map
    over.
    """
    threads = state.threads
    each = state.extents.blocks[:, : shape.threads]
    block_size = lane.limits.block_size
    limit = quotient(jnp.maximum(threads.known - 1, 0), block_size)
    if shape.prefixes == 0:
        cached = jnp.minimum(each, limit)
    else:
        prefix = traffic.prefix[lane.workload]
        index = jnp.maximum(prefix, 0)
        whole = jnp.where(prefix >= 0, traffic.prefix_tokens[lane.workload][index] // block_size, 0)
        shared = jnp.where(prefix >= 0, state.extents.blocks[:, shape.threads + index], 0)
        shared = jnp.minimum(shared, jnp.minimum(whole, limit))
        cached = shared + jnp.where(shared == whole, jnp.minimum(each, limit - shared), 0)
    cached = cached.T * block_size
    if state.slots is not None:
        held = state.slots
        cached = jax.vmap(lambda thread, prompt: cached_tokens(held, traffic, lane, thread, prompt))(
            jnp.arange(shape.threads), threads.prompt
        )
    programs = jnp.arange(shape.threads) // shape.threads_per_program
    observation = Observation(
        now_s=seconds(state.now),
        releases=state.totals.releases,
        here=here,
        block_size=block_size,
        program=ProgramView(
            arrival_s=seconds(traffic.arrival[lane.workload])[programs],
            turn=threads.turn,
            attained_service_s=seconds(_service(state, shape))[programs],
            context_tokens=threads.known,
            replica=threads.replica,
            is_protected=jnp.any(state.extents.deadline[:, : shape.threads] >= 0, axis=0),
        ),
        call=CallView(
            released_s=seconds(threads.released),
            prompt_tokens=threads.prompt,
            cached_tokens=cached,
            was_preempted=threads.preemptions > 0,
        ),
        replicas=replica_view(state, lane, jnp.zeros_like(state.replicas.free)),
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
