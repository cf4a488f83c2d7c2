"""How long an iteration takes: what a performance model sees of a batch, and what every model answers.

A model's numbers are float64 array leaves, in nanoseconds, so that a sweep may vary them without a new
compilation and a model with stacked leaves can be vmapped. Enable x64 before tracing a model.
"""

from abc import abstractmethod

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

Number = Float[Array, "..."] | Float[np.ndarray, "..."] | np.float64
"""A float64 scalar, or the same with leading axes of lanes."""


class BatchShape(eqx.Module):
    """One iteration's batch. A call that decodes brings one token; any other brings a chunk of its prompt.

    The sums run over the scheduled calls; a call brings n tokens on top of c tokens of context.
    """

    tokens: Number  # sum of n
    sequences: Number  # number of calls
    context_tokens: Number  # sum of c + n
    prefill_work_tokens2: Number  # sum of n * (c + n / 2) over the calls that do not decode
    prefill_tokens: Number  # sum of n over the calls that do not decode
    decode_sequences: Number  # number of calls that decode


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
    def growth_ns(self, decode_sequences: Number) -> Number:
        """How much longer (ns) each further iteration of the same `decode_sequences` decoding calls takes."""

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
