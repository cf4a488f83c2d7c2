"""The block pool of a replica: what is in the free queue, what is protected, who goes first.

Every function works where `on` holds, on one pool or on all of them at once (a leading axis of replicas).
Rules: docs/semantics.md, section 3.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine.arrays import argmin, at, column, first_where, put_column, quotient, replace
from agentjax.engine.state import FOREVER, NEVER, OUTSIDE, UNPROTECTED, Pool, Shape


def blocks_for(tokens: Int[Array, "..."], block_size: Int[Array, ""]) -> Int[Array, "..."]:
    """Blocks that hold so many tokens."""
    return quotient(tokens + block_size - 1, block_size)


def prefix_blocks(
    prefix_tokens: Int[Array, " prefixes"], prefix: Int[Array, ""], block_size: Int[Array, ""], shape: Shape
) -> Int[Array, ""]:
    """Whole blocks of a shared prefix; 0 for none (-1)."""
    if shape.prefixes == 0:
        return jnp.zeros((), jnp.int32)
    return jnp.where(prefix >= 0, at(prefix_tokens, jnp.maximum(prefix, 0)) // block_size, 0)


def available(pool: Pool) -> Int[Array, "*r"]:
    """Blocks that can be had without a preemption: free or breakable, less those handed out already."""
    return pool.free + pool.protected - pool.owed


def resident(
    pool: Pool,
    shape: Shape,
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    prefix_blocks: Int[Array, ""],
    limit_blocks: Int[Array, ""],
) -> tuple[Int[Array, "*r"], Int[Array, "*r"]]:
    """(shared, private) blocks that a lookup of at most `limit_blocks` blocks finds."""
    private = column(pool.blocks, thread)
    if shape.prefixes == 0:
        return jnp.zeros_like(private), jnp.minimum(private, limit_blocks)
    blocks = column(pool.blocks, shape.threads + jnp.maximum(prefix, 0))
    shared = jnp.minimum(jnp.where(prefix >= 0, blocks, 0), jnp.minimum(prefix_blocks, limit_blocks))
    whole = shared == prefix_blocks
    return shared, jnp.where(whole, jnp.minimum(private, limit_blocks - shared), 0)


def prefix_in_use(pool: Pool, shape: Shape, prefix: Int[Array, ""]) -> Bool[Array, "*r"]:
    """Whether a running call holds the shared prefix."""
    if shape.prefixes == 0:
        return jnp.zeros_like(pool.free, bool)
    return column(pool.users, jnp.maximum(prefix, 0)) > 0


def _join(pool: Pool, extent: Int[Array, ""], blocks: Int[Array, "*r"], on: Bool[Array, "*r"]) -> Pool:
    """Append an extent of so many blocks to the queue, behind the spent blocks at its tail; nothing happens
    for 0 blocks.
    """
    on = on & (blocks > 0)
    stamp = pool.stamp + 1
    return replace(
        pool,
        blocks=put_column(pool.blocks, extent, blocks, on),
        key=put_column(pool.key, extent, stamp, on),
        spent=put_column(pool.spent, extent, pool.tail, on),
        tail=jnp.where(on, 0, pool.tail),
        free=pool.free + jnp.where(on, blocks, 0),
        stamp=jnp.where(on, stamp, pool.stamp),
    )


def _leave(pool: Pool, extent: Int[Array, ""], left: Int[Array, "*r"], on: Bool[Array, "*r"]) -> Pool:
    """Take an extent out of the queue, all but `left` blocks of it, which are spent: with those before it
    they pass to its successor, or to the tail. Its `blocks` stay for the caller.
    """
    key = column(pool.key, extent)
    on = on & (key < OUTSIDE)
    spent = column(pool.spent, extent) + left
    newer = jnp.where(pool.key > key[..., None], pool.key, OUTSIDE)
    newer_key = jnp.min(newer, axis=-1)
    successor = (newer == newer_key[..., None]) & ((newer_key < OUTSIDE) & on)[..., None]
    moved = pool.spent + jnp.where(successor, spent[..., None], 0)
    return replace(
        pool,
        key=put_column(pool.key, extent, OUTSIDE, on),
        spent=put_column(moved, extent, 0, on),
        tail=pool.tail + jnp.where(on & (newer_key == OUTSIDE), spent, 0),
        free=pool.free - jnp.where(on, column(pool.blocks, extent) - left, 0),
    )


def retire(pool: Pool, thread: Int[Array, ""], on: Bool[Array, "*r"]) -> Pool:
    """The context of a program that has ended stays where it is in the queue, but needs no row any more."""
    blocks = column(pool.blocks, thread)
    pool = _leave(pool, thread, blocks, on)
    return replace(pool, blocks=put_column(pool.blocks, thread, 0, on))


def _drop_reference(
    pool: Pool, shape: Shape, prefix: Int[Array, ""], on: Bool[Array, "*r"], was_protected: Array
) -> Pool:
    """A shared prefix has just lost one reference: protect it, or queue it, if that was the last of its kind.

    `was_protected`: its blocks were counted as protected before (no running user then).
    """
    index = jnp.maximum(prefix, 0)
    on = on & (prefix >= 0)
    blocks = column(pool.blocks, shape.threads + index)
    unused = on & (column(pool.users, index) == 0)
    guarded = column(pool.guards, index) > 0
    before = jnp.where(on & was_protected, blocks, 0)
    after = jnp.where(unused & guarded, blocks, 0)
    pool = replace(pool, protected=pool.protected - before + after)
    return _join(pool, shape.threads + index, blocks, unused & ~guarded)


def give_back(
    pool: Pool,
    shape: Shape,
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    *,
    content: Int[Array, ""],
    blanks: Int[Array, ""],
    ends: Bool[Array, ""],
    protect_until: Int[Array, ""],
    blanks_first: Bool[Array, ""],
    on: Bool[Array, ""],
) -> Pool:
    """A running call leaves its blocks: `blanks`, and `content` private blocks, to the queue or under a
    protection (`protect_until` >= 0). Content of a program that `ends` is spent where spent blocks have
    content.
    """
    protect = protect_until >= 0 if shape.protects else jnp.zeros_like(on)
    spent = jnp.where(ends & blanks_first, content, 0)
    content = content - spent
    first = jnp.where(blanks_first, blanks, 0)
    pool = replace(
        pool,
        fresh=pool.fresh + jnp.where(on, first, 0),
        tail=pool.tail + jnp.where(on, blanks - first + spent, 0),
        free=pool.free + jnp.where(on, blanks + spent, 0),
        protected=pool.protected + jnp.where(on & protect, content, 0),
        blocks=put_column(pool.blocks, thread, content, on),
        deadline=put_column(pool.deadline, thread, protect_until, on) if shape.protects else pool.deadline,
    )
    pool = _join(pool, thread, content, on & ~protect)
    if shape.prefixes == 0:
        return pool
    index = jnp.maximum(prefix, 0)
    shared = on & (prefix >= 0)
    pool = replace(
        pool,
        users=put_column(pool.users, index, column(pool.users, index) - 1, shared),
        guards=put_column(pool.guards, index, column(pool.guards, index) + 1, shared & protect),
    )
    return _drop_reference(pool, shape, prefix, on, jnp.zeros_like(on))


def end_protection(
    pool: Pool, shape: Shape, thread: Int[Array, ""], prefix: Int[Array, ""], on: Bool[Array, "*r"]
) -> Pool:
    """The protection of a context ends, if there is one: its blocks join the queue, then its prefix if
    unused.
    """
    on = on & (column(pool.deadline, thread) >= 0)
    blocks = column(pool.blocks, thread)
    pool = replace(
        pool,
        deadline=put_column(pool.deadline, thread, UNPROTECTED, on),
        protected=pool.protected - jnp.where(on, blocks, 0),
    )
    pool = _join(pool, thread, blocks, on)
    return _unprotect_prefix(pool, shape, prefix, on)


def _unprotect_prefix(pool: Pool, shape: Shape, prefix: Int[Array, ""], on: Bool[Array, "*r"]) -> Pool:
    """One protected context above the prefix fewer."""
    if shape.prefixes == 0:
        return pool
    index = jnp.maximum(prefix, 0)
    left = column(pool.guards, index) - 1
    was_protected = column(pool.users, index) == 0
    pool = replace(pool, guards=put_column(pool.guards, index, left, on & (prefix >= 0)))
    return _drop_reference(pool, shape, prefix, on, was_protected)


def book(
    pool: Pool,
    thread: Int[Array, ""],
    taken: Int[Array, "*r"],
    blanks_first: Bool[Array, ""],
    on: Bool[Array, "*r"],
) -> tuple[Pool, Int[Array, "*r"]]:
    """Book what running leaps have taken so far, where they are breaking up this row's protected context.
    Returns the pools and the blocks booked.

    Otherwise booking can wait for the end of the leap: what happens to the pool meanwhile does not touch what
    the leap takes. Here it would, for the context is about to be cut or to join the queue. These leaps are
    cut at their next iteration boundary, so nothing is taken after this.
    """
    on = on & (pool.victim == thread) & (taken > 0)
    taken = jnp.where(on, taken, 0)
    fresh = jnp.minimum(pool.fresh, taken)
    head = jnp.minimum(pool.head, taken - fresh)
    broken = taken - fresh - head
    return replace(
        pool,
        blocks=put_column(pool.blocks, thread, column(pool.blocks, thread) - broken, on),
        fresh=pool.fresh - fresh,
        head=pool.head - head,
        free=pool.free - fresh - head,
        protected=pool.protected - broken,
        evicted=pool.evicted + broken + jnp.where(blanks_first, head, 0),
    ), taken


def cut_context(
    pool: Pool,
    thread: Int[Array, ""],
    blocks_left: Int[Array, ""],
    prefix_blocks: Int[Array, ""],
    lost: Int[Array, "*r"],
    blanks_first: Bool[Array, ""],
    on: Bool[Array, "*r"],
) -> Pool:
    """Compaction: resident private blocks beyond `blocks_left` are spent where they are; protected ones join
    the queue.

    `lost`: blocks of a queued context that running leaps have taken but not booked; those had content when
    they were taken, and will be booked as spent.
    """
    blocks = column(pool.blocks, thread)
    queued = column(pool.key, thread) < OUTSIDE
    pinned = column(pool.deadline, thread) >= 0
    dead = jnp.where(on, jnp.maximum(blocks - blocks_left, 0), 0)
    bare = on & pinned & (blocks == dead) & (prefix_blocks == 0)
    uncounted = jnp.where(queued & ~blanks_first, jnp.minimum(lost, dead), 0)
    joined = jnp.where(pinned, dead, 0)
    return replace(
        pool,
        blocks=put_column(pool.blocks, thread, blocks - dead, on),
        spent=put_column(pool.spent, thread, column(pool.spent, thread) + dead, on & queued),
        deadline=put_column(pool.deadline, thread, UNPROTECTED, bare),
        tail=pool.tail + joined,
        free=pool.free + joined,
        protected=pool.protected - joined,
        evicted=pool.evicted + uncounted,
    )


def touch(
    pool: Pool,
    shape: Shape,
    thread: Int[Array, ""],
    prefix: Int[Array, ""],
    hit: Int[Array, ""],
    on: Bool[Array, ""],
) -> Pool:
    """An admitted call takes its `hit` private blocks out of the queue, or from under its own protection;
    what else is resident of its context is spent.
    """
    blocks = column(pool.blocks, thread)
    own = jnp.zeros_like(on)
    if shape.protects:
        own = on & (column(pool.deadline, thread) >= 0)
        pool = replace(
            pool,
            deadline=put_column(pool.deadline, thread, UNPROTECTED, own),
            protected=pool.protected - jnp.where(own, blocks, 0),
        )
    pool = _leave(pool, thread, blocks - hit, on)
    pool = replace(pool, blocks=put_column(pool.blocks, thread, 0, on))
    if shape.prefixes == 0:
        return pool
    index = jnp.maximum(prefix, 0)
    shared = on & (prefix >= 0)
    users, guards = column(pool.users, index), column(pool.guards, index)
    was_protected = shared & (users == 0) & (guards > 0)
    pool = replace(
        pool,
        users=put_column(pool.users, index, users + 1, shared),
        guards=put_column(pool.guards, index, guards - 1, own & (prefix >= 0)),
        protected=pool.protected - jnp.where(was_protected, column(pool.blocks, shape.threads + index), 0),
    )
    return _leave(pool, shape.threads + index, jnp.zeros_like(pool.free), shared)


def choose_victim(
    pool: Pool,
    shape: Shape,
    programs: Int[Array, " threads"],
    now: Int[Array, ""],
    blanks_first: Bool[Array, ""],
    on: Bool[Array, ""],
) -> Pool:
    """Note the extent of a replica to reclaim from next: the oldest in the queue; else expired protections by
    deadline, then the others, latest deadline first; ties by program. Spent blocks behind the last extent go
    to the head of an otherwise empty queue.
    """
    if shape.protects:
        expired = pool.deadline <= now
        broken = jnp.where(expired, pool.deadline, NEVER - pool.deadline)
        guarded = jnp.where(pool.deadline >= 0, broken, jnp.iinfo(jnp.int64).max)
        order = jnp.where(pool.key < OUTSIDE, pool.key.astype(jnp.int64) - NEVER, guarded)
        victim, best = argmin(order), jnp.min(order)
        if shape.reuses:  # rows are not in the order of their programs
            tie = first_where(order[: shape.threads] == best, programs)
            victim = jnp.where(at(order, tie) == best, tie, victim)
        none, queued = best == jnp.iinfo(jnp.int64).max, best < 0
    else:
        victim = first_where(pool.key < OUTSIDE, pool.key)
        none = column(pool.key, victim) == OUTSIDE
        queued = ~none
    victim = jnp.where(none, -1, victim)
    moved = jnp.where(on & ~queued, pool.tail, 0)
    return replace(
        pool,
        victim=jnp.where(on, victim, pool.victim),
        fresh=pool.fresh + jnp.where(blanks_first, 0, moved),
        head=pool.head + jnp.where(blanks_first, moved, 0),
        tail=pool.tail - moved,
    )


def next_deadline(pool: Pool, now: Int[Array, ""]) -> Int[Array, ""]:
    """The next deadline of a replica after now; FOREVER if none."""
    return jnp.min(jnp.where(pool.deadline > now, pool.deadline, FOREVER))


def pay_front(pool: Pool, on: Bool[Array, ""]) -> Pool:
    """Take owed blocks from the head of the queue, as far as no extent begins."""
    fresh = jnp.where(on, jnp.minimum(pool.fresh, pool.owed), 0)
    head = jnp.where(on, jnp.minimum(pool.head, pool.owed - fresh), 0)
    return replace(
        pool,
        fresh=pool.fresh - fresh,
        head=pool.head - head,
        owed=pool.owed - fresh - head,
        free=pool.free - fresh - head,
        evicted=pool.evicted + head,  # up to vLLM 0.23 there are none: they are among the fresh ones
    )


def pay(
    pool: Pool,
    shape: Shape,
    prefixes: Int[Array, " threads"],
    blanks_first: Bool[Array, ""],
    on: Bool[Array, ""],
) -> Pool:
    """Take owed blocks from the head of the queue and from one extent behind it, the victim noted before."""
    pool = pay_front(pool, on)
    on = on & (pool.victim >= 0) & (pool.owed > 0)
    victim = jnp.maximum(pool.victim, 0)
    spent, blocks = column(pool.spent, victim), column(pool.blocks, victim)
    guarded = column(pool.deadline, victim) >= 0 if shape.protects else jnp.zeros_like(on)
    from_spent = jnp.where(on, jnp.minimum(spent, pool.owed), 0)
    from_blocks = jnp.where(on, jnp.minimum(blocks, pool.owed - from_spent), 0)
    emptied = on & (blocks == from_blocks) & (spent == from_spent)
    pool = replace(
        pool,
        spent=put_column(pool.spent, victim, spent - from_spent, on),
        blocks=put_column(pool.blocks, victim, blocks - from_blocks, on),
        key=put_column(pool.key, victim, OUTSIDE, emptied),
        deadline=put_column(pool.deadline, victim, UNPROTECTED, emptied) if shape.protects else pool.deadline,
        owed=pool.owed - from_spent - from_blocks,
        free=pool.free - from_spent - jnp.where(guarded, 0, from_blocks),
        protected=pool.protected - jnp.where(guarded, from_blocks, 0),
        evicted=pool.evicted + from_blocks + jnp.where(blanks_first, from_spent, 0),
    )
    if shape.prefixes == 0:
        return pool
    prefix = at(prefixes, jnp.minimum(victim, shape.threads - 1))
    return _unprotect_prefix(pool, shape, prefix, emptied & guarded)
