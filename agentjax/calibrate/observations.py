"""Durations with the iterations that they consist of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float, Int

from agentjax.performance.base import AbstractPerformance, BatchShape

DECODE, PREFILL, MIXED = range(3)
KINDS = ("decode", "prefill", "mixed")


@dataclass(frozen=True)
class Observations:
    """Durations with the iterations that they consist of; all arrays have one entry per observation.

    An observation is `iterations` iterations with the same decodes, `chunks` of them with a part of a prompt
    too, and `wakeups` times the latency of a request that finds the server idle.
    """

    kind: Int[np.ndarray, " n"]
    """`DECODE`, `PREFILL` or `MIXED`."""
    duration_s: Float[np.ndarray, " n"]
    iterations: Float[np.ndarray, " n"]
    chunks: Float[np.ndarray, " n"]
    prompts: Float[np.ndarray, " n"]
    """Prompts that are computed in these."""
    wakeups: Float[np.ndarray, " n"]
    decodes: Float[np.ndarray, " n"]
    """Requests that decode in each of the iterations."""
    context_tokens: Float[np.ndarray, " n"]
    """Their mean context at the end of an iteration, a mean over the iterations."""
    tokens: Float[np.ndarray, " n"]
    """Prompt tokens, all chunks together."""
    work_tokens2: Float[np.ndarray, " n"]
    """Sum over the chunks of tokens · (context before + tokens / 2)."""
    history_tokens: Float[np.ndarray, " n"]
    """Sum over the chunks of the context before."""
    weight: Float[np.ndarray, " n"]
    """Iterations, divided by the number of requests that see them."""
    unit: Int[np.ndarray, " n"]
    """Observations of a unit share their error: a prompt, or a period in which the same requests decode."""
    request: np.ndarray
    """Name of the request that saw it."""

    def __len__(self) -> int:
        return len(self.duration_s)

    def take(self, which: np.ndarray) -> "Observations":
        """Some of the observations, by mask or index."""
        return Observations(**{entry.name: getattr(self, entry.name)[which] for entry in fields(self)})

    def decode_batch(self) -> BatchShape:
        """The iterations without a part of a prompt."""
        none = np.zeros(len(self))
        return BatchShape(
            sequences=self.decodes,
            decode_sequences=self.decodes,
            decode_context_tokens=self.decodes * self.context_tokens,
            decode_context_max_tokens=self.context_tokens,
            prefill_tokens=none,
            prefill_context_tokens=none,
            prefill_work_tokens2=none,
        )

    def chunk_batch(self) -> BatchShape:
        """The iterations with a part of a prompt, on average."""
        chunks = np.maximum(self.chunks, 1.0)
        return BatchShape(
            sequences=self.decodes + np.maximum(self.prompts, chunks) / chunks * (self.chunks > 0),
            decode_sequences=self.decodes,
            decode_context_tokens=self.decodes * self.context_tokens,
            decode_context_max_tokens=self.context_tokens,
            prefill_tokens=self.tokens / chunks,
            prefill_context_tokens=self.history_tokens / chunks,
            prefill_work_tokens2=self.work_tokens2 / chunks,
        )

    def predicted_s(self, model: AbstractPerformance) -> Float[np.ndarray, " n"]:
        """What a model says the observations take (s). Enable x64 first."""
        plain = np.asarray(model.iteration_s(self.decode_batch()))
        chunk = np.asarray(model.iteration_s(self.chunk_batch()))
        without = self.iterations - self.chunks
        return (
            without * np.where(without > 0, plain, 0.0)
            + self.chunks * np.where(self.chunks > 0, chunk, 0.0)
            + self.wakeups * float(model.wakeup_s)
        )

    def region(self) -> list[str]:
        """Where each observation belongs: observations of a region weigh the same as those of any other."""
        return [
            _region(*row)
            for row in zip(
                self.kind, self.decodes, self.context_tokens, self.tokens, self.before_tokens(), strict=True
            )
        ]

    def before_tokens(self) -> Float[np.ndarray, " n"]:
        """Context before the first chunk."""
        chunked = self.chunks > 0
        tokens = np.where(chunked, self.tokens, 1.0)
        return np.where(chunked, np.maximum(self.work_tokens2 / tokens - tokens / 2, 0.0), 0.0)


def concatenate(parts: Sequence[Observations]) -> Observations:
    """The observations of several recordings."""
    offsets = np.cumsum([0, *[int(part.unit.max(initial=-1)) + 1 for part in parts]])
    columns = {
        entry.name: np.concatenate([getattr(part, entry.name) for part in parts])
        for entry in fields(Observations)
    }
    columns["unit"] = np.concatenate(
        [part.unit + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
    )
    return Observations(**columns)


def _region(kind: int, decodes: float, context: float, tokens: float, before: float) -> str:
    """Halves and doubles: sizes between powers of two go together."""
    if kind == DECODE:
        return f"decode of {decodes:.0f} at {scale(context)} tokens"
    over = f" over {scale(before)}" if before >= 1 else ""
    beside = f" beside {decodes:.0f}" if kind == MIXED else ""
    return f"prompt of {scale(tokens)} tokens{over}{beside}"


def scale(value: float) -> int:
    """The nearest power of two."""
    return int(2 ** round(math.log2(max(value, 1.0))))
