"""Leaps: many iterations of one batch, as closed forms of their number.

The first iteration takes `first_ns`, the second `next_ns`, and each one after that `growth_ns` more than the
one before: exact for models affine in the context. Duration of k iterations:
first + (k − 1)·next + growth·(k − 1)(k − 2)/2, rounded to whole nanoseconds at the end.

With asynchronous scheduling the batch that was formed before runs first, for `lead` ns: the boundaries of a
leap are its end and then those of the iterations above. `lead` is 0 with synchronous scheduling.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine.arrays import quotient, replace
from agentjax.engine.state import Replica


def duration_ns(replica: Replica, boundaries: Int[Array, "*r"]) -> Int[Array, "*r"]:
    """Time from the start of a leap to so many iteration boundaries; 0 for none."""
    if replica.ahead is not None:
        after = _duration_ns(replica, boundaries - 1)
        return jnp.where(boundaries > 0, replica.lead + after, 0)
    return _duration_ns(replica, boundaries)


def boundaries_until(replica: Replica, elapsed: Int[Array, "*r"]) -> Int[Array, "*r"]:
    """The smallest number of iteration boundaries, at least 1, by which `elapsed` has passed."""
    if replica.ahead is not None:
        return jnp.where(elapsed <= replica.lead, 1, 1 + _iterations_until(replica, elapsed - replica.lead))
    return _iterations_until(replica, elapsed)


def _duration_ns(replica: Replica, iterations: Int[Array, "*r"]) -> Int[Array, "*r"]:
    more = jnp.maximum(iterations - 1, 0).astype(jnp.float64)
    total = replica.first_ns + more * replica.next_ns + replica.growth_ns * (more * (more - 1.0) * 0.5)
    return jnp.where(iterations > 0, jnp.round(total).astype(jnp.int64), 0)


def _iterations_until(replica: Replica, elapsed: Int[Array, "*r"]) -> Int[Array, "*r"]:
    rest = elapsed.astype(jnp.float64) - replica.first_ns
    half = 0.5 * replica.growth_ns
    linear = replica.next_ns - half
    root = jnp.sqrt(jnp.maximum(linear * linear + 4.0 * half * rest, 0.0))
    more = jnp.where(rest > 0.0, 2.0 * rest / (linear + root), 0.0)
    guess = 1 + jnp.ceil(jnp.minimum(more, 1e9)).astype(jnp.int32)
    # the square root may be off by one iteration, as may the rounding to nanoseconds
    shorter = jnp.maximum(guess - 1, 1)
    guess = jnp.where(_duration_ns(replica, shorter) >= elapsed, shorter, guess)
    return jnp.where(_duration_ns(replica, guess) >= elapsed, guess, guess + 1)


def cut(replica: Replica, now: Int[Array, "..."], on: Bool[Array, "*r"]) -> Replica:
    """End the running leaps where `on` holds at their first iteration boundary at or after now."""
    iterations = jnp.minimum(boundaries_until(replica, now - replica.start), replica.iterations)
    iterations = jnp.where(on, iterations, replica.iterations)
    end = jnp.where(on, replica.start + duration_ns(replica, iterations), replica.end)
    return replace(replica, iterations=iterations, end=end)


def longest(
    tokens_left: Int[Array, ""],
    blocks: Int[Array, ""],
    sequences: Int[Array, ""],
    until_block: Int[Array, ""],
    block_size: Int[Array, ""],
) -> Int[Array, ""]:
    """The most iterations that change no decision, at least 1.

    Args:
        tokens_left: iterations until a call of the batch has all its output, or is not scheduled any more.
        blocks: blocks that can be handed out from the head of the queue and one context behind it.
        sequences: calls in the batch.
        until_block: tokens until the first of them needs a block, once all are decoding.
        block_size: tokens a block. In any `block_size` iterations every call needs one block.
    """
    rounds = blocks // jnp.maximum(sequences, 1)
    return jnp.maximum(jnp.minimum(tokens_left, 1 + rounds * block_size + until_block), 1)


def growth_blocks(
    computed: Int[Array, "..."], iterations: Int[Array, "..."], block_size: Int[Array, ""]
) -> Int[Array, "..."]:
    """Blocks that a decoding call takes in the iterations after the first of a leap."""
    last = computed + jnp.maximum(iterations - 1, 0)
    return quotient(last + block_size - 1, block_size) - quotient(computed + block_size - 1, block_size)
