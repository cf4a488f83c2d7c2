"""Leaps: many iterations of one batch, as closed forms of their number.

The first iteration takes `first_ns`, the second `next_ns`, and each one after that `growth_ns` more than the
one before: exact for models affine in the context. Duration of k iterations:
first + (k − 1)·next + growth·(k − 1)(k − 2)/2, rounded to whole nanoseconds at the end.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine.arrays import quotient
from agentjax.engine.state import Replicas


def duration_ns(replicas: Replicas, iterations: Int[Array, " replicas"]) -> Int[Array, " replicas"]:
    """Time from the start of each replica's leap to the end of so many iterations; 0 for none."""
    more = jnp.maximum(iterations - 1, 0).astype(jnp.float64)
    total = replicas.first_ns + more * replicas.next_ns + replicas.growth_ns * (more * (more - 1.0) * 0.5)
    return jnp.where(iterations > 0, jnp.round(total).astype(jnp.int64), 0)


def iterations_until(replicas: Replicas, elapsed: Int[Array, " replicas"]) -> Int[Array, " replicas"]:
    """The smallest number of iterations, at least 1, that take `elapsed` or longer."""
    rest = elapsed.astype(jnp.float64) - replicas.first_ns
    half = 0.5 * replicas.growth_ns
    linear = replicas.next_ns - half
    root = jnp.sqrt(jnp.maximum(linear * linear + 4.0 * half * rest, 0.0))
    more = jnp.where(rest > 0.0, 2.0 * rest / (linear + root), 0.0)
    guess = 1 + jnp.ceil(jnp.minimum(more, 1e9)).astype(jnp.int32)
    # the square root may be off by one iteration, as may the rounding to nanoseconds
    shorter = jnp.maximum(guess - 1, 1)
    guess = jnp.where(duration_ns(replicas, shorter) >= elapsed, shorter, guess)
    return jnp.where(duration_ns(replicas, guess) >= elapsed, guess, guess + 1)


def cut(replicas: Replicas, now: Int[Array, "..."], on: Bool[Array, " replicas"]) -> Replicas:
    """End the running leaps of the mask at their first iteration boundary at or after now."""
    iterations = jnp.minimum(iterations_until(replicas, now - replicas.start), replicas.iterations)
    iterations = jnp.where(on, iterations, replicas.iterations)
    end = jnp.where(on, replicas.start + duration_ns(replicas, iterations), replicas.end)
    return Replicas(**{**vars(replicas), "iterations": iterations, "end": end})


def longest(
    output_left: Int[Array, ""],
    blocks: Int[Array, ""],
    sequences: Int[Array, ""],
    until_block: Int[Array, ""],
    block_size: Int[Array, ""],
) -> Int[Array, ""]:
    """The most iterations that change no decision, at least 1.

    Args:
        output_left: the fewest tokens that a call of the batch has left to sample.
        blocks: blocks that can be handed out from the blanks and one context at the head of the queue.
        sequences: calls in the batch.
        until_block: tokens until the first of them needs a block, once all are decoding.
        block_size: tokens a block. In any `block_size` iterations every call needs one block.
    """
    rounds = blocks // jnp.maximum(sequences, 1)
    return jnp.maximum(jnp.minimum(output_left, 1 + rounds * block_size + until_block), 1)


def growth_blocks(
    computed: Int[Array, "..."], iterations: Int[Array, "..."], block_size: Int[Array, ""]
) -> Int[Array, "..."]:
    """Blocks that a decoding call takes in the iterations after the first of a leap."""
    last = computed + jnp.maximum(iterations - 1, 0)
    return quotient(last + block_size - 1, block_size) - quotient(computed + block_size - 1, block_size)
