"""Slots, as in llama.cpp's server: each idle slot keeps the context of the last call that ran in it.

With slots, no context lives in the block pool once its call has completed. Rules: docs/semantics.md, Slots.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine.arrays import at, replace, where_put
from agentjax.engine.state import Lane, Shape, Slots, State, Traffic

BUSY = 2**30
"""Time of last use of a slot that a running call occupies, or that is padding."""
NEVER_USED = -1
SIMILAR = 10
"""A slot is taken for its content if that is more than 1 / SIMILAR of the prompt (llama.cpp's
`slot_prompt_similarity` of 0.1)."""


def initial_slots(lane: Lane, shape: Shape) -> Slots | None:
    """All slots empty; None for replicas without slots."""
    if not shape.slots:
        return None
    exists = jnp.arange(shape.slots) < lane.limits.max_num_seqs
    used = jnp.where(exists, NEVER_USED, BUSY).astype(jnp.int32)
    empty = jnp.full((shape.replicas, shape.slots), -1, jnp.int32)
    return Slots(
        owner=empty,
        prefix=empty,
        matching=jnp.zeros_like(empty),
        used=jnp.broadcast_to(used, empty.shape),
        stamp=jnp.zeros((), jnp.int32),
    )


def shared_tokens(
    slots: Slots, traffic: Traffic, lane: Lane, program: Int[Array, ""]
) -> Int[Array, "replicas slots"]:
    """Leading tokens that the content of each slot shares with the prompt of a program's call."""
    own = jnp.where(slots.owner == program, slots.matching, 0)
    tokens = traffic.prefix_tokens[lane.workload]
    if tokens.shape[0] == 0:
        return own
    prefix = at(traffic.prefix[lane.workload], program)
    common = jnp.where(prefix >= 0, at(tokens, jnp.maximum(prefix, 0)), 0)
    return jnp.maximum(own, jnp.where(slots.prefix == prefix, common, 0))


def cached_tokens(
    slots: Slots, traffic: Traffic, lane: Lane, program: Int[Array, ""], prompt: Int[Array, ""]
) -> Int[Array, " replicas"]:
    """Tokens of a prompt that the most similar idle slot of each replica holds."""
    shared = jnp.where(slots.used < BUSY, shared_tokens(slots, traffic, lane, program), 0)
    return jnp.minimum(jnp.max(shared, axis=1), prompt - 1)


def choose(
    slots: Slots,
    traffic: Traffic,
    lane: Lane,
    replica: Int[Array, ""],
    program: Int[Array, ""],
    prompt: Int[Array, ""],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """(slot, tokens found in it) for a call that is admitted; meaningless if no slot of the replica is idle.

    The most similar slot, the lowest number on a tie; if none is similar enough, a slot never used, the
    highest number first, or else the one least recently used.
    """
    idle = at(slots.used, replica) < BUSY
    shared = jnp.where(idle, at(shared_tokens(slots, traffic, lane, program), replica), -1)
    similar = jnp.argmax(shared).astype(jnp.int32)
    numbers = jnp.arange(idle.shape[0], dtype=jnp.int32)
    used = at(slots.used, replica)
    oldest = jnp.argmin(jnp.where(used == NEVER_USED, NEVER_USED - numbers, used)).astype(jnp.int32)
    slot = jnp.where(SIMILAR * at(shared, similar) > prompt, similar, oldest)
    return slot, jnp.clip(at(shared, slot), 0, prompt - 1)


def occupy(
    state: State,
    traffic: Traffic,
    lane: Lane,
    replica: Int[Array, ""],
    program: Int[Array, ""],
    slot: Int[Array, ""],
    when: Bool[Array, ""],
) -> State:
    """A call starts in a slot, whose content is lost but for what its prompt shares with it."""
    slots = state.slots
    assert slots is not None
    rows, numbers = jnp.arange(slots.used.shape[0]), jnp.arange(slots.used.shape[1])
    here = when & (rows == replica)[:, None] & (numbers == slot)[None, :]
    prefix = at(traffic.prefix[lane.workload], program)
    return replace(
        state,
        slots=replace(
            slots,
            owner=where_put(here, program, slots.owner),
            prefix=where_put(here, prefix, slots.prefix),
            used=where_put(here, BUSY, slots.used),
        ),
    )


def vacate(
    state: State,
    replica: Int[Array, ""],
    program: Int[Array, ""],
    tokens: Int[Array, ""],
    when: Bool[Array, ""],
) -> State:
    """A call leaves its slot, with the KV of so many tokens of its context."""
    slots = state.slots
    assert slots is not None
    rows = (jnp.arange(slots.used.shape[0]) == replica)[:, None]
    here = when & rows & (slots.owner == program) & (slots.used == BUSY)
    return replace(
        state,
        slots=replace(
            slots,
            matching=where_put(here, tokens, slots.matching),
            used=where_put(here, slots.stamp, slots.used),
            stamp=slots.stamp + when,
        ),
    )


def cut_context(state: State, program: Int[Array, ""], kept: Int[Array, ""], when: Bool[Array, ""]) -> State:
    """Compaction: what slots hold of a program's context agrees with it up to the tokens it keeps."""
    slots = state.slots
    assert slots is not None
    theirs = when & (slots.owner == program)
    matching = jnp.where(theirs, jnp.minimum(slots.matching, kept), slots.matching)
    return replace(state, slots=replace(slots, matching=matching))
