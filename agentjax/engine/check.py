"""What must hold after every step; for runs with `checks=True`."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool

from agentjax.engine import pool
from agentjax.engine.observe import reach
from agentjax.engine.state import BUSY, OUTSIDE, RUNNING, Lane, Shape, State, Traffic


def check(state: State, before: State, traffic: Traffic, lane: Lane, shape: Shape) -> State:
    """The state unchanged; raises (through `equinox.error_if`) at the first invariant that does not hold."""
    for law, broken in laws(state, before, traffic, lane, shape).items():
        state = eqx.error_if(state, broken, f"invariant broken: {law}")
    return state


def laws(
    state: State, before: State, traffic: Traffic, lane: Lane, shape: Shape
) -> dict[str, Bool[Array, ""]]:
    """Whether each invariant is broken."""
    threads, replicas, pools, limits = state.threads, state.replicas, state.replicas.pool, lane.limits
    block_size = limits.block_size
    rows = jnp.arange(shape.replicas)
    mine = (threads.replica[None, :] == rows[:, None]) & (threads.status == RUNNING)[None, :]
    held = pool.blocks_for(threads.computed, block_size)
    queued = pools.key < OUTSIDE
    guarded = pools.deadline >= 0
    own = jnp.arange(shape.extents) < shape.threads
    in_queue = (
        jnp.sum(jnp.where(queued, pools.blocks + pools.spent, 0), axis=1)
        + pools.fresh
        + pools.head
        + pools.tail
    )
    protected = jnp.sum(jnp.where(guarded & own, pools.blocks, 0), axis=1)
    if shape.prefixes:
        prefix = traffic.prefix[lane.workload][jnp.maximum(threads.program, 0)]
        whole = jnp.where(
            prefix >= 0, traffic.prefix_tokens[lane.workload][jnp.maximum(prefix, 0)] // block_size, 0
        )
        private = jnp.maximum(held - whole, 0)
        shared = pools.blocks[:, shape.threads :]
        running = pools.users > 0
        protected = protected + jnp.sum(jnp.where(~running & (pools.guards > 0), shared, 0), axis=1)
        partial = (held > 0) & (held <= whole) & (threads.computed % block_size > 0)
        used = jnp.sum(jnp.where(mine, private + partial, 0), axis=1) + jnp.sum(
            jnp.where(running, shared, 0), axis=1
        )
    else:
        used = jnp.sum(jnp.where(mine, held, 0), axis=1)
    budget = jnp.sum(jnp.where(mine, threads.scheduled, 0), axis=1)
    settled = pools.owed == 0
    exists = rows < limits.replicas
    return {
        "time goes forward": state.now < before.now,
        "the free queue is as long as its parts": jnp.any(exists & (in_queue != pools.free)),
        "protected blocks are counted": jnp.any(exists & (protected != pools.protected)),
        "in use + protected + free = pool": jnp.any(
            exists & settled & (used + replicas.booked + pools.free + pools.protected != limits.kv_blocks)
        ),
        "no count of blocks is negative": jnp.any(
            (pools.free < 0)
            | (pools.protected < 0)
            | (pools.fresh < 0)
            | (pools.head < 0)
            | (pools.tail < 0)
            | (pools.owed < 0)
        )
        | jnp.any((pools.blocks < 0) | (pools.spent < 0)),
        "what is owed can be had": jnp.any(pools.owed > pools.free + pools.protected),
        "running <= max_num_seqs": jnp.any(replicas.running > limits.max_num_seqs),
        "running calls are counted": jnp.any(jnp.sum(mine, axis=1) != replicas.running),
        "tokens of an iteration <= max_num_batched_tokens": jnp.any(budget > limits.max_num_batched_tokens),
        "no call computes or samples more than it has": jnp.any(threads.computed > reach(threads))
        | jnp.any(threads.output_left < 0),
        "an iteration ends after now": jnp.any((replicas.phase == BUSY) & (replicas.end < state.now)),
        "a call starts after its release": jnp.any(
            (threads.first_scheduled >= 0) & (threads.first_scheduled < threads.released)
        ),
    }
