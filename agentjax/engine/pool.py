"""The block pool of each replica: what is in the free queue, what is protected, who goes first.

The queue is held as counts: `fresh` blanks at its head, then extents in order of `key`, each behind its
`blanks`, then `tail` blanks. Every function works on all replicas of the mask `on` at once. Rules:
docs/semantics.md, section 3.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine.arrays import at, column, put_column, quotient, replace, where_put
from agentjax.engine.state import FOREVER, NEVER, UNPROTECTED, Extents, Shape, State


def blocks_for(tokens: Int[Array, "..."], block_size: Int[Array, ""]) -> Int[Array, "..."]:
    """Blocks that hold so many tokens."""
    return quotient(tokens + block_size - 1, block_size)


def available(state: State) -> Int[Array, " replicas"]:
    """Blocks that can be had without a preemption: free or breakable, less those handed out already."""
    replicas = state.replicas
    return replicas.free + replicas.protected - replicas.owed


def _join(
    state: State, extent: Int[Array, ""], blocks: Int[Array, " replicas"], on: Bool[Array, " replicas"]
) -> State:
    """Append an extent of so many blocks to the queue, behind the blanks at its tail; nothing happens for 0
    blocks.
    """
    extents, replicas = state.extents, state.replicas
    on = on & (blocks > 0)
    stamp = state.totals.stamp + 1
    return replace(
        state,
        extents=replace(
            extents,
            blocks=put_column(extents.blocks, extent, blocks, on),
            key=put_column(extents.key, extent, jnp.broadcast_to(stamp, on.shape), on),
            blanks=put_column(extents.blanks, extent, replicas.tail, on),
        ),
        replicas=replace(
            replicas, tail=where_put(on, 0, replicas.tail), free=replicas.free + jnp.where(on, blocks, 0)
        ),
        totals=replace(state.totals, stamp=stamp),
    )


def _leave(state: State, extent: Int[Array, ""], on: Bool[Array, " replicas"]) -> State:
    """Take an extent out of the queue; its blanks pass to its successor, or to the tail. Its `blocks` stay
    for the caller.
    """
    extents, replicas = state.extents, state.replicas
    key = column(extents.key, extent)
    on = on & (key < NEVER)
    blanks = column(extents.blanks, extent)
    blocks = column(extents.blocks, extent)
    newer = (extents.key > key[:, None]) & (extents.key < NEVER)
    newer_key = jnp.min(jnp.where(newer, extents.key, NEVER), axis=1)
    successor = (extents.key == newer_key[:, None]) & (newer_key < NEVER)[:, None] & on[:, None]
    moved = extents.blanks + jnp.where(successor, blanks[:, None], 0)
    return replace(
        state,
        extents=replace(
            extents,
            key=put_column(extents.key, extent, NEVER, on),
            blanks=put_column(moved, extent, 0, on),
        ),
        replicas=replace(
            replicas,
            tail=replicas.tail + jnp.where(on & (newer_key == NEVER), blanks, 0),
            free=replicas.free - jnp.where(on, blocks, 0),
        ),
    )


def _drop_reference(
    state: State, shape: Shape, prefix: Int[Array, ""], on: Bool[Array, " replicas"], was_protected: Array
) -> State:
    """A shared prefix has just lost one reference: protect it, or queue it, if that was the last of its kind.

    `was_protected`: its blocks were counted as protected before (no running user then).
    """
    if shape.prefixes == 0:
        return state
    index = jnp.maximum(prefix, 0)
    on = on & (prefix >= 0)
    blocks = column(state.extents.blocks, shape.threads + index)
    running = column(state.prefixes.running, index)
    protected = column(state.prefixes.protected, index)
    unused = on & (running == 0)
    before = jnp.where(on & was_protected, blocks, 0)
    after = jnp.where(unused & (protected > 0), blocks, 0)
    state = replace(
        state, replicas=replace(state.replicas, protected=state.replicas.protected - before + after)
    )
    return _join(state, shape.threads + index, blocks, unused & (protected == 0))


def give_back(
    state: State,
    shape: Shape,
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    prefix_blocks: Int[Array, ""],
    block_size: Int[Array, ""],
    keep: Bool[Array, ""],
    protect_until: Int[Array, ""],
    on: Bool[Array, " replicas"],
) -> State:
    """A running call leaves its blocks: tail first, to the queue or under a protection (`protect_until` >=
    0).
    """
    threads = state.threads
    computed, known = at(threads.computed, thread), at(threads.known, thread)
    full = jnp.minimum(quotient(computed, block_size), quotient(known - 1, block_size))
    blank = blocks_for(computed, block_size) - full
    private = jnp.maximum(full - prefix_blocks, 0)
    protect = keep & (protect_until >= 0) & (full > 0)
    blank = blank + jnp.where(keep, 0, private)
    content = jnp.where(keep, private, 0)
    replicas = state.replicas
    state = replace(
        state,
        replicas=replace(
            replicas,
            tail=replicas.tail + jnp.where(on, blank, 0),
            free=replicas.free + jnp.where(on, blank, 0),
            protected=replicas.protected + jnp.where(on & protect, content, 0),
        ),
        extents=replace(
            state.extents,
            blocks=put_column(state.extents.blocks, thread, jnp.broadcast_to(content, on.shape), on),
            deadline=put_column(
                state.extents.deadline,
                thread,
                jnp.broadcast_to(jnp.where(protect, protect_until, UNPROTECTED), on.shape),
                on,
            ),
        ),
    )
    state = _join(state, thread, jnp.broadcast_to(content, on.shape), on & ~protect)
    if shape.prefixes == 0:
        return state
    index = jnp.maximum(prefix, 0)
    shared = on & (prefix >= 0)
    counts = state.prefixes
    state = replace(
        state,
        prefixes=replace(
            counts,
            running=put_column(counts.running, index, column(counts.running, index) - 1, shared),
            protected=put_column(
                counts.protected, index, column(counts.protected, index) + 1, shared & protect
            ),
        ),
    )
    return _drop_reference(state, shape, prefix, on, jnp.zeros_like(on))


def end_protection(
    state: State, shape: Shape, thread: Int[Array, ""], prefix: Int[Array, ""], on: Bool[Array, " replicas"]
) -> State:
    """The protection of a thread's context ends, if there is one: its blocks join the queue, then its prefix
    if unused.
    """
    extents, replicas = state.extents, state.replicas
    on = on & (column(extents.deadline, thread) >= 0)
    blocks = column(extents.blocks, thread)
    state = replace(
        state,
        extents=replace(extents, deadline=put_column(extents.deadline, thread, UNPROTECTED, on)),
        replicas=replace(replicas, protected=replicas.protected - jnp.where(on, blocks, 0)),
    )
    state = _join(state, thread, blocks, on)
    return _unprotect_prefix(state, shape, prefix, on)


def _unprotect_prefix(
    state: State, shape: Shape, prefix: Int[Array, ""], on: Bool[Array, " replicas"]
) -> State:
    """One protected context above the prefix fewer."""
    if shape.prefixes == 0:
        return state
    index = jnp.maximum(prefix, 0)
    counts = state.prefixes
    left = column(counts.protected, index) - 1
    was_protected = column(counts.running, index) == 0
    state = replace(
        state,
        prefixes=replace(counts, protected=put_column(counts.protected, index, left, on & (prefix >= 0))),
    )
    return _drop_reference(state, shape, prefix, on, was_protected)


def book(
    state: State, thread: Int[Array, ""], taken: Int[Array, " replicas"], on: Bool[Array, " replicas"]
) -> State:
    """Book what running leaps have taken so far, where they are breaking up this thread's protected context.

    Otherwise booking can wait for the end of the leap: what happens to the pool meanwhile does not touch what
    the leap takes. Here it would, for the context is about to be cut or to join the queue. These leaps are
    cut at their next iteration boundary, so nothing is taken after this.
    """
    extents, replicas = state.extents, state.replicas
    on = on & replicas.breaking & (replicas.victim == thread) & (taken > 0)
    taken = jnp.where(on, taken, 0)
    fresh = jnp.minimum(replicas.fresh, taken)
    broken = taken - fresh
    blocks = column(extents.blocks, thread)
    return replace(
        state,
        extents=replace(extents, blocks=put_column(extents.blocks, thread, blocks - broken, on)),
        replicas=replace(
            replicas,
            fresh=replicas.fresh - fresh,
            free=replicas.free - fresh,
            protected=replicas.protected - broken,
            booked=replicas.booked + taken,
        ),
        totals=replace(
            state.totals, evicted=state.totals.evicted + jnp.sum(broken, dtype=state.totals.evicted.dtype)
        ),
    )


def cut_context(
    state: State,
    thread: Int[Array, ""],
    blocks_left: Int[Array, ""],
    prefix_blocks: Int[Array, ""],
    lost: Int[Array, " replicas"],
    on: Bool[Array, " replicas"],
) -> State:
    """Compaction: resident private blocks beyond `blocks_left` become blanks where they are; protected ones
    join the queue.

    `lost`: blocks of a queued context that running leaps have taken but not booked; those had content when
    they were taken, and will be booked as blanks.
    """
    extents, replicas = state.extents, state.replicas
    blocks = column(extents.blocks, thread)
    queued = column(extents.key, thread) < NEVER
    pinned = column(extents.deadline, thread) >= 0
    dead = jnp.where(on, jnp.maximum(blocks - blocks_left, 0), 0)
    bare = on & pinned & (blocks == dead) & (prefix_blocks == 0)
    return replace(
        state,
        extents=replace(
            extents,
            blocks=put_column(extents.blocks, thread, blocks - dead, on),
            blanks=put_column(extents.blanks, thread, column(extents.blanks, thread) + dead, on & queued),
            deadline=put_column(extents.deadline, thread, UNPROTECTED, bare),
        ),
        replicas=replace(
            replicas,
            tail=replicas.tail + jnp.where(pinned, dead, 0),
            free=replicas.free + jnp.where(pinned, dead, 0),
            protected=replicas.protected - jnp.where(pinned, dead, 0),
        ),
        totals=replace(
            state.totals,
            evicted=state.totals.evicted
            + jnp.sum(jnp.where(queued, jnp.minimum(lost, dead), 0), dtype=state.totals.evicted.dtype),
        ),
    )


def resident(
    extents: Extents,
    shape: Shape,
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    prefix_blocks: Int[Array, ""],
    limit_blocks: Int[Array, ""],
) -> tuple[Int[Array, " replicas"], Int[Array, " replicas"]]:
    """(shared, private) blocks that a lookup of at most `limit_blocks` blocks finds on each replica."""
    private = column(extents.blocks, thread)
    if shape.prefixes == 0:
        return jnp.zeros_like(private), jnp.minimum(private, limit_blocks)
    blocks = column(extents.blocks, shape.threads + jnp.maximum(prefix, 0))
    shared = jnp.minimum(jnp.where(prefix >= 0, blocks, 0), jnp.minimum(prefix_blocks, limit_blocks))
    whole = shared == prefix_blocks
    return shared, jnp.where(whole, jnp.minimum(private, limit_blocks - shared), 0)


def touch(
    state: State,
    shape: Shape,
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    on: Bool[Array, " replicas"],
) -> State:
    """An admitted call takes its hits out of the queue, or from under its own protection."""
    extents, replicas = state.extents, state.replicas
    own = on & (column(extents.deadline, thread) >= 0)
    blocks = column(extents.blocks, thread)
    state = replace(
        state,
        extents=replace(extents, deadline=put_column(extents.deadline, thread, UNPROTECTED, own)),
        replicas=replace(replicas, protected=replicas.protected - jnp.where(own, blocks, 0)),
    )
    state = _leave(state, thread, on)
    state = replace(
        state, extents=replace(state.extents, blocks=put_column(state.extents.blocks, thread, 0, on))
    )
    if shape.prefixes == 0:
        return state
    index = jnp.maximum(prefix, 0)
    counts = state.prefixes
    shared = on & (prefix >= 0)
    running, protected = column(counts.running, index), column(counts.protected, index)
    prefix_blocks = column(state.extents.blocks, shape.threads + index)
    was_protected = shared & (running == 0) & (protected > 0)
    state = replace(
        state,
        prefixes=replace(
            counts,
            running=put_column(counts.running, index, running + 1, shared),
            protected=put_column(counts.protected, index, protected - 1, own & (prefix >= 0)),
        ),
        replicas=replace(
            state.replicas, protected=state.replicas.protected - jnp.where(was_protected, prefix_blocks, 0)
        ),
    )
    return _leave(state, shape.threads + index, shared)


def reclaim_order(extents: Extents, now: Int[Array, ""]) -> Int[Array, "replicas extents"]:
    """Sort key of reclaiming: the queue by age, then expired protections by deadline, then the others,
    latest deadline first.
    """
    guarded = extents.deadline >= 0
    expired = extents.deadline <= now
    broken = jnp.where(expired, extents.deadline, NEVER - extents.deadline)
    return jnp.where(
        extents.key < NEVER, extents.key - NEVER, jnp.where(guarded, broken, jnp.iinfo(jnp.int64).max)
    )


def choose_victim(state: State, on: Bool[Array, " replicas"]) -> State:
    """Note the extent to reclaim from next; blanks behind the last extent join the head of an otherwise
    empty queue.
    """
    replicas = state.replicas
    order = reclaim_order(state.extents, state.now)
    victim = jnp.argmin(order, axis=1).astype(jnp.int32)
    best = jnp.min(order, axis=1)
    victim = jnp.where(best < jnp.iinfo(jnp.int64).max, victim, -1)
    empty = on & (best >= 0)
    return replace(
        state,
        replicas=replace(
            replicas,
            victim=jnp.where(on, victim, replicas.victim),
            fresh=replicas.fresh + jnp.where(empty, replicas.tail, 0),
            tail=jnp.where(empty, 0, replicas.tail),
        ),
    )


def next_deadline(state: State, on: Bool[Array, " replicas"]) -> Int[Array, ""]:
    """The next deadline after now on the replicas of the mask; FOREVER if none."""
    deadline = state.extents.deadline
    later = (deadline > state.now) & on[:, None]
    return jnp.min(jnp.where(later, deadline, FOREVER))


def pay_fresh(state: State, on: Bool[Array, " replicas"]) -> State:
    """Take owed blocks from the blanks at the head of the queue."""
    replicas = state.replicas
    paid = jnp.where(on, jnp.minimum(replicas.fresh, replicas.owed), 0)
    return replace(
        state,
        replicas=replace(
            replicas, fresh=replicas.fresh - paid, owed=replicas.owed - paid, free=replicas.free - paid
        ),
    )


def pay(
    state: State,
    shape: Shape,
    thread_prefix: Int[Array, " threads"],
    replica: Int[Array, ""],
    on: Bool[Array, " replicas"],
) -> State:
    """Take owed blocks from the head of the queue and from one extent behind it, the victim noted before."""
    state = pay_fresh(state, on)
    extents, replicas = state.extents, state.replicas
    victim = at(replicas.victim, replica)
    on = on & (victim >= 0) & (replicas.owed > 0)
    victim = jnp.maximum(victim, 0)
    blanks, blocks = column(extents.blanks, victim), column(extents.blocks, victim)
    guarded = column(extents.deadline, victim) >= 0
    from_blanks = jnp.where(on, jnp.minimum(blanks, replicas.owed), 0)
    from_blocks = jnp.where(on, jnp.minimum(blocks, replicas.owed - from_blanks), 0)
    emptied = on & (blocks == from_blocks) & (blanks == from_blanks)
    state = replace(
        state,
        extents=replace(
            extents,
            blanks=put_column(extents.blanks, victim, blanks - from_blanks, on),
            blocks=put_column(extents.blocks, victim, blocks - from_blocks, on),
            key=put_column(extents.key, victim, NEVER, emptied),
            deadline=put_column(extents.deadline, victim, UNPROTECTED, emptied),
        ),
        replicas=replace(
            replicas,
            owed=replicas.owed - from_blanks - from_blocks,
            free=replicas.free - from_blanks - jnp.where(guarded, 0, from_blocks),
            protected=replicas.protected - jnp.where(guarded, from_blocks, 0),
        ),
        totals=replace(
            state.totals,
            evicted=state.totals.evicted + jnp.sum(from_blocks, dtype=state.totals.evicted.dtype),
        ),
    )
    if shape.prefixes == 0:
        return state
    prefix = at(thread_prefix, jnp.minimum(victim, shape.threads - 1))
    return _unprotect_prefix(state, shape, prefix, emptied & guarded)


def prefix_blocks(
    prefix_tokens: Int[Array, " prefixes"], prefix: Int[Array, ""], block_size: Int[Array, ""], shape: Shape
) -> Int[Array, ""]:
    """Whole blocks of a shared prefix; 0 for none (-1)."""
    if shape.prefixes == 0:
        return jnp.zeros((), jnp.int32)
    return jnp.where(prefix >= 0, at(prefix_tokens, jnp.maximum(prefix, 0)) // block_size, 0)


def prefix_in_use(
    state: State, shape: Shape, prefix: Int[Array, ""], replica: Int[Array, ""]
) -> Bool[Array, ""]:
    """Whether a running call of the replica holds the shared prefix."""
    if shape.prefixes == 0:
        return jnp.asarray(False)
    return at(column(state.prefixes.running, jnp.maximum(prefix, 0)), replica) > 0
