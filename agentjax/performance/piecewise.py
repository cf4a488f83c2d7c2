"""The piecewise model: prompts and decodes with times of their own, those of decodes bent at batch sizes."""

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from agentjax.errors import complaint
from agentjax.performance.base import AbstractPerformance, BatchShape, Number, nanoseconds


class Piecewise(AbstractPerformance):
    """Iteration time = overhead + decodes + prompts − what the two share.

    Decodes: A(d) + K(d)·mean context, where d calls decode. A and K are lines between the knots, which are
    numbers of decodes, level before the first knot and straight on after the last. Prompts: p0 + p_tok·tokens
    + p_work·prefill work + p_ctx·context before. Each counts only if there is such a call. An iteration with
    both takes `shared` less than the sum, but never less than its decodes alone. Where attention has a kernel
    of its own for few tokens, p_work is another below so many prompt tokens.

    Affine in context: iterations of an unchanging batch of decodes form an arithmetic series. Coefficients
    are held in ns, those of decodes as a start and a change of slope at every knot.
    """

    knots: Number  # numbers of decodes, rising
    decode_ns: Number  # A at the first knot
    decode_bends_ns: Number  # change of the slope of A at each knot, per decode
    context_ns: Number  # K at the first knot, per token of mean context
    context_bends_ns: Number  # change of the slope of K at each knot
    prefill_ns: Number
    prefill_tok_ns: Number
    prefill_work_ns: Number
    prefill_context_ns: Number
    short_prefill_tokens: Number  # prompt tokens of an iteration below which the next holds for p_work
    short_prefill_work_ns: Number
    shared_ns: Number
    overhead_ns: Number
    wakeup_ns: Number

    def __init__(
        self,
        knots: ArrayLike,
        decode_s: ArrayLike,
        decode_context_s: ArrayLike,
        prefill_s: float = 0.0,
        prefill_tok_s: float = 0.0,
        prefill_work_s: float = 0.0,
        prefill_context_s: float = 0.0,
        short_prefill_tokens: float = 0.0,
        short_prefill_work_s: float = 0.0,
        shared_s: float = 0.0,
        overhead_s: float = 0.0,
        wakeup_s: float = 0.0,
    ):
        """Build the model from seconds.

        **Arguments:**

        - `knots`: numbers of decodes at which the lines bend, rising from at least 1.
        - `decode_s`: A at each knot: an iteration of so many decodes without context.
        - `decode_context_s`: K at each knot, per token of the mean context of the decodes.
        - `prefill_s`: every iteration with prompt tokens.
        - `prefill_tok_s`: per prompt token computed.
        - `prefill_work_s`: per unit of prefill work (tokens²): attention of a prompt chunk over its context.
        - `prefill_context_s`: per token of context before a prompt chunk.
        - `short_prefill_tokens`: prompt tokens of an iteration below which `short_prefill_work_s` takes the
            place of `prefill_work_s`; 0: never.
        - `short_prefill_work_s`: per unit of prefill work, then.
        - `shared_s`: what an iteration with decodes and prompt tokens saves against the two one by one.
        - `overhead_s`: host time per iteration, on top of the others.
        - `wakeup_s`: per iteration that starts on an idle replica.

        Raises `InputError` for numbers that are not finite and >= 0, knots that do not rise, times at the
        knots that fall from one to the next, and `shared_s` above the first of `decode_s`.
        """
        self.knots = _knots(knots)
        self.decode_ns, self.decode_bends_ns = _bends("decode_s", decode_s, self.knots)
        self.context_ns, self.context_bends_ns = _bends("decode_context_s", decode_context_s, self.knots)
        self.prefill_ns = nanoseconds("prefill_s", prefill_s)
        self.prefill_tok_ns = nanoseconds("prefill_tok_s", prefill_tok_s)
        self.prefill_work_ns = nanoseconds("prefill_work_s", prefill_work_s)
        self.prefill_context_ns = nanoseconds("prefill_context_s", prefill_context_s)
        self.short_prefill_tokens = np.asarray(short_prefill_tokens, np.float64)
        if not np.all(np.isfinite(self.short_prefill_tokens) & (self.short_prefill_tokens >= 0)):
            raise complaint("short_prefill_tokens", str(short_prefill_tokens), "a number of tokens >= 0")
        self.short_prefill_work_ns = nanoseconds("short_prefill_work_s", short_prefill_work_s)
        self.shared_ns = nanoseconds("shared_s", shared_s)
        self.overhead_ns = nanoseconds("overhead_s", overhead_s)
        self.wakeup_ns = nanoseconds("wakeup_s", wakeup_s)
        if np.any(self.shared_ns > self.decode_ns):
            raise complaint("shared_s", str(shared_s), "at most the first of decode_s, or mixed times fall")

    def iteration_ns(self, batch: BatchShape) -> Number:
        """Duration of an iteration (ns), not rounded; exact if all its terms are whole nanoseconds."""
        decodes = batch.decode_sequences
        past = self._past(decodes)
        # a product with the sum, divided last: exact wherever the quotient is
        slope = self.context_ns + jnp.sum(self.context_bends_ns * past, axis=-1)
        context = slope * batch.decode_context_tokens / jnp.maximum(decodes, 1.0)
        decode = self.decode_ns + jnp.sum(self.decode_bends_ns * past, axis=-1) + context
        decode = jnp.where(decodes > 0, decode, 0.0)
        is_short = batch.prefill_tokens < self.short_prefill_tokens
        work_ns = jnp.where(is_short, self.short_prefill_work_ns, self.prefill_work_ns)
        prefill = (
            self.prefill_ns
            + self.prefill_tok_ns * batch.prefill_tokens
            + work_ns * batch.prefill_work_tokens2
            + self.prefill_context_ns * batch.prefill_context_tokens
        )
        beside = prefill - jnp.where(decodes > 0, jnp.minimum(self.shared_ns, prefill), 0.0)
        return self.overhead_ns + decode + jnp.where(batch.prefill_tokens > 0, beside, 0.0)

    def leap(self, batch: BatchShape, iterations: Number) -> tuple[Number, Number]:
        """All of them: each iteration adds one token to the mean context."""
        past = self._past(batch.decode_sequences)
        return iterations, self.context_ns + jnp.sum(self.context_bends_ns * past, axis=-1)

    def _past(self, decodes: Number) -> Number:
        """By how many decodes each knot is exceeded."""
        return jnp.maximum(jnp.expand_dims(decodes, -1) - self.knots, 0.0)


def _knots(knots: ArrayLike) -> np.ndarray:
    try:
        found = np.asarray(knots, dtype=np.float64)
    except (TypeError, ValueError):
        raise complaint("knots", repr(knots), "a list of numbers of decodes") from None
    if (
        found.ndim != 1
        or not len(found)
        or not np.all(np.isfinite(found))
        or found[0] < 1
        or np.any(np.diff(found) <= 0)
    ):
        raise complaint("knots", str(knots), "a list of numbers of decodes that rises from at least 1")
    return found


def _bends(name: str, seconds: ArrayLike, knots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value at the first knot and the change of slope at each: the last line goes on, so none at the last."""
    values = nanoseconds(name, seconds)
    if values.shape != knots.shape:
        raise complaint(name, f"{values.size} numbers", f"one for each of the {len(knots)} knots")
    if np.any(np.diff(values) < 0):
        raise complaint(name, str(seconds), "times that do not fall from one knot to the next")
    slopes = np.diff(values) / np.diff(knots)
    return values[0], np.append(np.diff(slopes, prepend=0.0), 0.0)
