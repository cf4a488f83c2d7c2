"""How long an iteration takes: what a performance model sees of a batch, and what every model answers.

A model's numbers are float64 array leaves, in nanoseconds, so that a sweep may vary them without a new
compilation and a model with stacked leaves can be vmapped. Enable x64 before tracing a model.
"""

from abc import abstractmethod

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from agentjax.errors import complaint

Number = Float[Array, "..."] | Float[np.ndarray, "..."] | np.float64
"""A float64 scalar, or the same with leading axes of lanes."""


class BatchShape(eqx.Module):
    """One iteration's batch. A call that decodes brings one token; any other brings a chunk of its prompt.

    The sums run over the scheduled calls; a call brings n tokens on top of c tokens of context.
    """

    sequences: Number  # number of calls
    decode_sequences: Number  # number of calls that decode
    decode_context_tokens: Number  # sum of c + 1 over the calls that decode
    decode_context_max_tokens: Number  # the largest of these
    prefill_tokens: Number  # sum of n over the calls that do not decode
    prefill_context_tokens: Number  # sum of c over the calls that do not decode
    prefill_work_tokens2: Number  # sum of n * (c + n / 2) over the calls that do not decode

    @property
    def tokens(self) -> Number:
        """Sum of n over all calls."""
        return self.prefill_tokens + self.decode_sequences

    @property
    def context_tokens(self) -> Number:
        """Sum of c + n over all calls."""
        return self.prefill_context_tokens + self.prefill_tokens + self.decode_context_tokens


def decode_batch(sequences: Number, context_tokens: Number, context_max_tokens: Number) -> BatchShape:
    """An iteration of decodes only, whose contexts add up to `context_tokens` after it."""
    none = context_tokens * 0.0
    return BatchShape(
        sequences=sequences,
        decode_sequences=sequences,
        decode_context_tokens=context_tokens,
        decode_context_max_tokens=context_max_tokens,
        prefill_tokens=none,
        prefill_context_tokens=none,
        prefill_work_tokens2=none,
    )


MOST_S = 1e3
"""The largest coefficient of a model (s): no part of an iteration takes longer."""


class AbstractPerformance(eqx.Module):
    """A performance model: the duration of an iteration, overhead included."""

    overhead_ns: eqx.AbstractVar[Number]
    """Host time between two iterations; part of every iteration's duration."""
    wakeup_ns: eqx.AbstractVar[Number]
    """Added by the engine to an iteration that starts on an idle replica; not part of `iteration_ns`."""

    @abstractmethod
    def iteration_ns(self, batch: BatchShape) -> Number:
        """Duration of an iteration (ns), not rounded."""

    @abstractmethod
    def leap(self, batch: BatchShape, iterations: Number) -> tuple[Number, Number]:
        """Many iterations of one batch of decodes, each context growing by one token in each.

        Args:
            batch: the first of them.
            iterations: at most so many, at least 1.

        Returns:
            How many of them may be taken as a line (at least 1), and by how much (ns) each takes longer than
            the one before. For a model affine in the context that is all of them, exactly.
        """

    def iteration_s(self, batch: BatchShape) -> Number:
        """Duration of an iteration (s)."""
        return self.iteration_ns(batch) * 1e-9

    @property
    def overhead_s(self) -> Number:
        """Host time between two iterations (s)."""
        return self.overhead_ns * 1e-9

    @property
    def wakeup_s(self) -> Number:
        """Extra time of an iteration that starts on an idle replica (s)."""
        return self.wakeup_ns * 1e-9


def nanoseconds(name: str, seconds: ArrayLike) -> np.ndarray:
    """Seconds as float64 nanoseconds, rounded to 1e-6 ns, so that 5e-8 s is 50 ns, not 50.00000000000001.

    Raises:
        InputError: anything but numbers from 0 to `MOST_S`, under this name.
    """
    try:
        value = np.asarray(seconds, dtype=np.float64)
    except (TypeError, ValueError):
        raise complaint(name, repr(seconds), "a number of seconds") from None
    if not np.all((value >= 0) & (value <= MOST_S)):
        raise complaint(name, str(seconds), f"a number of seconds from 0 to {MOST_S:g}")
    return np.asarray(np.round(value * 1e9, 6))
