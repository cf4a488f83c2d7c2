"""What must hold after every step; for runs with `checks=True`."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool

from agentjax.engine import pool
from agentjax.engine.state import BUSY, NEVER, RUNNING, Lane, Shape, State, Traffic


def check(state: State, before: State, traffic: Traffic, lane: Lane, shape: Shape) -> State:
    """The state unchanged; raises (through `equinox.error_if`) at the first invariant that does not hold."""
    for law, broken in laws(state, before, traffic, lane, shape).items():
        state = eqx.error_if(state, broken, f"invariant broken: {law}")
    return state


def laws(
    state: State, before: State, traffic: Traffic, lane: Lane, shape: Shape
) -> dict[str, Bool[Array, ""]]:
    """Whether each invariant is broken."""
    threads, extents, replicas, limits = state.threads, state.extents, state.replicas, lane.limits
    block_size = limits.block_size
    rows = jnp.arange(shape.replicas)
    mine = (threads.replica[None, :] == rows[:, None]) & (threads.status == RUNNING)[None, :]
    held = pool.blocks_for(threads.computed, block_size)
    queued = extents.key < NEVER
    guarded = extents.deadline >= 0
    own = jnp.arange(shape.threads + shape.prefixes) < shape.threads
    in_queue = (
        jnp.sum(jnp.where(queued, extents.blocks + extents.blanks, 0), axis=1)
        + replicas.fresh
        + replicas.tail
    )
    protected = jnp.sum(jnp.where(guarded & own, extents.blocks, 0), axis=1)
    if shape.prefixes:
        prefix = traffic.prefix[lane.workload]
        whole = jnp.where(
            prefix >= 0, traffic.prefix_tokens[lane.workload][jnp.maximum(prefix, 0)] // block_size, 0
        )
        private = jnp.maximum(held - whole, 0)
        shared = extents.blocks[:, shape.threads :]
        running = state.prefixes.running > 0
        protected = protected + jnp.sum(
            jnp.where(~running & (state.prefixes.protected > 0), shared, 0), axis=1
        )
        partial = (held > 0) & (held <= whole) & (threads.computed % block_size > 0)
        used = jnp.sum(jnp.where(mine, private + partial, 0), axis=1) + jnp.sum(
            jnp.where(running, shared, 0), axis=1
        )
    else:
        used = jnp.sum(jnp.where(mine, held, 0), axis=1)
    budget = jnp.sum(jnp.where(mine, threads.scheduled, 0), axis=1)
    settled = replicas.owed == 0
    exists = rows < limits.replicas
    return {
        "time goes forward": state.now < before.now,
        "the free queue is as long as its parts": jnp.any(exists & (in_queue != replicas.free)),
        "protected blocks are counted": jnp.any(exists & (protected != replicas.protected)),
        "in use + protected + free = pool": jnp.any(
            exists
            & settled
            & (used + replicas.booked + replicas.free + replicas.protected != limits.kv_blocks)
        ),
        "no count of blocks is negative": jnp.any(
            (replicas.free < 0)
            | (replicas.protected < 0)
            | (replicas.fresh < 0)
            | (replicas.tail < 0)
            | (replicas.owed < 0)
        )
        | jnp.any((extents.blocks < 0) | (extents.blanks < 0)),
        "what is owed can be had": jnp.any(replicas.owed > replicas.free + replicas.protected),
        "running <= max_num_seqs": jnp.any(replicas.running > limits.max_num_seqs),
        "running calls are counted": jnp.any(jnp.sum(mine, axis=1) != replicas.running),
        "tokens of an iteration <= max_num_batched_tokens": jnp.any(budget > limits.max_num_batched_tokens),
        "no call computes or samples more than it has": jnp.any(threads.computed > threads.known)
        | jnp.any(threads.output_left < 0),
        "an iteration ends after now": jnp.any((replicas.phase == BUSY) & (replicas.end < state.now)),
        "a call starts after its release": jnp.any(
            (threads.first_scheduled >= 0) & (threads.first_scheduled < threads.released)
        ),
    }
