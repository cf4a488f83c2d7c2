"""The affine model: a sum of terms, each proportional to one number of the batch."""

from typing import Self

import jax.numpy as jnp
from numpy.typing import ArrayLike

from agentjax.performance.base import AbstractPerformance, BatchShape, Number, nanoseconds


class Affine(AbstractPerformance):
    """Iteration time = overhead + c0 + c_tok·tokens + c_seq·sequences + c_prefill·prefill work + c_kv·context
    (+ c_mixed·context of the decodes if any call is in its prompt).

    Affine in tokens and in context: iterations of an unchanging batch of decodes form an arithmetic series.
    Coefficients are held in ns; with whole nanoseconds every time up to 2^53 ns (104 days) is exact.
    """

    c0_ns: Number
    c_tok_ns: Number
    c_seq_ns: Number
    c_prefill_ns: Number
    c_kv_ns: Number
    c_mixed_ns: Number
    overhead_ns: Number
    wakeup_ns: Number

    def __init__(
        self,
        c0_s: ArrayLike,
        c_tok_s: ArrayLike = 0.0,
        c_seq_s: ArrayLike = 0.0,
        c_prefill_s: ArrayLike = 0.0,
        c_kv_s: ArrayLike = 0.0,
        c_mixed_s: ArrayLike = 0.0,
        overhead_s: ArrayLike = 0.0,
        wakeup_s: ArrayLike = 0.0,
    ):
        """Build the model from seconds; each coefficient is a number, or an array of one number per lane.

        **Arguments:**

        - `c0_s`: every iteration.
        - `c_tok_s`: per token computed.
        - `c_seq_s`: per scheduled call.
        - `c_prefill_s`: per unit of prefill work (tokens²): attention of a prompt chunk over its context.
        - `c_kv_s`: per token of context of the scheduled calls: reading the KV cache.
        - `c_mixed_s`: per token of context of the decodes, on top of `c_kv_s`, if the iteration computes any
            prompt tokens: the attention of a mixed batch.
        - `overhead_s`: host time per iteration, on top of `c0_s`.
        - `wakeup_s`: per iteration that starts on an idle replica.

        Raises `InputError` for a coefficient that is not a finite number >= 0.
        """
        self.c0_ns = nanoseconds("c0_s", c0_s)
        self.c_tok_ns = nanoseconds("c_tok_s", c_tok_s)
        self.c_seq_ns = nanoseconds("c_seq_s", c_seq_s)
        self.c_prefill_ns = nanoseconds("c_prefill_s", c_prefill_s)
        self.c_kv_ns = nanoseconds("c_kv_s", c_kv_s)
        self.c_mixed_ns = nanoseconds("c_mixed_s", c_mixed_s)
        self.overhead_ns = nanoseconds("overhead_s", overhead_s)
        self.wakeup_ns = nanoseconds("wakeup_s", wakeup_s)

    @classmethod
    def from_seconds(cls, **coefficients: ArrayLike) -> Self:
        """The constructor under a name that says the unit: `Affine.from_seconds(c0_s=0.04, c_kv_s=5e-8)`."""
        return cls(**coefficients)

    def iteration_ns(self, batch: BatchShape) -> Number:
        """Duration of an iteration (ns), not rounded; exact if all coefficients are whole nanoseconds."""
        return (
            self.overhead_ns
            + self.c0_ns
            + self.c_tok_ns * batch.tokens
            + self.c_seq_ns * batch.sequences
            + self.c_prefill_ns * batch.prefill_work_tokens2
            + self.c_kv_ns * batch.context_tokens
            + self.c_mixed_ns * jnp.where(batch.prefill_tokens > 0, batch.decode_context_tokens, 0.0)
        )

    def leap(self, batch: BatchShape, iterations: Number) -> tuple[Number, Number]:
        """All of them: each iteration adds one token to the context of every decoding call."""
        return iterations, self.c_kv_ns * batch.decode_sequences
