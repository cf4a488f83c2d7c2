"""Times between tokens: what the lanes told of their leaps, counted gap by gap."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from agentjax.engine.state import State
from agentjax.engine.step import Told

Gaps = tuple[Int[np.ndarray, " gaps"], Int[np.ndarray, " gaps"]]
"""Different gaps (ns), ascending, and how often each occurred."""


def count_gaps(told: Sequence[Told], final: State) -> Gaps:
    """All gaps between two tokens of a call in a lane, from what its steps told and its final state."""
    steps = jax.tree.map(lambda *parts: np.concatenate(parts), *told)
    leap = steps.leap
    ran = leap.boundaries > 0
    leap = jax.tree.map(lambda x: x[ran], leap)
    # Boundary j of each leap, flat: leaps one after another.
    many = leap.boundaries
    which = np.repeat(np.arange(len(many)), many)
    boundary = np.arange(len(which)) - np.repeat(np.cumsum(many) - many, many) + 1
    is_async = final.replicas.ahead is not None
    until = _duration_ns(leap, which, boundary, is_async) - _duration_ns(leap, which, boundary - 1, is_async)
    calls = np.where(boundary == 1, leap.first[which], leap.later[which])
    calls = np.where(boundary == 2, leap.second[which], calls)
    rest = [steps.gap[steps.gap > 0]]
    if final.threads.gaps is not None:
        rest.append(final.threads.gaps.pending[final.threads.gaps.pending > 0])
    rest = np.concatenate(rest)
    values, place = np.unique(np.concatenate([until[calls > 0], rest]), return_inverse=True)
    counts = np.concatenate([calls[calls > 0], np.ones(len(rest), np.int64)])
    return values.astype(np.int64), np.bincount(place, counts, len(values)).astype(np.int64)


def _duration_ns(leap, which: np.ndarray, boundaries: np.ndarray, is_async: bool) -> np.ndarray:
    """As `engine.leap.duration_ns`."""
    iterations = boundaries - 1 if is_async else boundaries
    more = np.maximum(iterations - 1, 0).astype(np.float64)
    total = (
        leap.first_ns[which] + more * leap.next_ns[which] + leap.growth_ns[which] * (more * (more - 1) / 2)
    )
    after = np.where(iterations > 0, np.round(total), 0).astype(np.int64)
    return np.where(boundaries > 0, leap.lead[which] + after, 0) if is_async else after
