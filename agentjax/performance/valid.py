"""Where coefficients hold: the range they were fitted to, against what a run reaches.

Nothing of this is part of a model, so that lanes of different coefficients still stack: a range is found by
the coefficients themselves.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from agentjax.errors import OutsideRange
from agentjax.performance.affine import Affine
from agentjax.performance.base import AbstractPerformance
from agentjax.performance.piecewise import Piecewise

TOKENS = "tokens"
SEQUENCES = "sequences"
CONTEXTS = ("context tokens of a decode", "context tokens before a chunk")
"""Names of ranges in a coefficient file that are compared with what a run reaches."""

_HOST = ("overhead_ns", "wakeup_ns")


class Interval(Protocol):
    """Both ends of a range, included."""

    low: float
    high: float


_ranges: dict[tuple[bytes, ...], tuple[str, Mapping[str, Interval]]] = {}
_warned: set[str] = set()


def remember(model: Affine | Piecewise, name: str, ranges: Mapping[str, Interval]) -> None:
    """Keep the ranges of a coefficient file for models with its coefficients, whatever their host times."""
    key = _key(model)
    if key is not None:
        _ranges[key] = name, ranges


def ranges_of(model: AbstractPerformance) -> tuple[str, Mapping[str, Interval]] | None:
    """Name and ranges of the coefficient file that a model was loaded from; None for any other model."""
    key = _key(model)
    return None if key is None else _ranges.get(key)


def _key(model: AbstractPerformance) -> tuple[bytes, ...] | None:
    """All coefficients but the host times; None for another kind of model, or a stack of them."""
    if not isinstance(model, Affine | Piecewise) or np.ndim(model.overhead_ns):
        return None
    leaves = [value for name, value in vars(model).items() if name not in _HOST]
    return (type(model).__name__.encode(), *(np.asarray(leaf).tobytes() for leaf in leaves))


@dataclass
class Reach:
    """What runs reach: longest context, most tokens and calls of an iteration, and fewest calls on average.

    Args:
        context: tokens of the longest context.
        tokens: tokens of the largest iteration.
        calls: calls of the largest iteration; 0 where not known.
        mean_calls: calls of an iteration, a mean over time, of the run with the fewest; infinite where not
            known.
    """

    context: int = 0
    tokens: int = 0
    calls: int = 0
    mean_calls: float = np.inf

    def outside(self, ranges: Mapping[str, Interval]) -> list[str]:
        """A phrase for each range that is left."""
        contexts = [ranges[name].high for name in CONTEXTS if name in ranges]
        out = []
        if contexts and self.context > min(contexts):
            out.append(f"contexts of {self.context:,} tokens (fitted up to {min(contexts):,.0f})")
        if TOKENS in ranges and self.tokens > ranges[TOKENS].high:
            out.append(f"iterations of {self.tokens:,} tokens (fitted up to {ranges[TOKENS].high:,.0f})")
        if SEQUENCES in ranges and self.calls > ranges[SEQUENCES].high:
            out.append(f"iterations of {self.calls} calls (fitted up to {ranges[SEQUENCES].high:,.0f})")
        if SEQUENCES in ranges and self.mean_calls < ranges[SEQUENCES].low - 0.5:
            low = ranges[SEQUENCES].low
            out.append(f"iterations of {self.mean_calls:.1f} calls on average (fitted from {low:,.0f})")
        return out


@dataclass
class Watch:
    """Collects what runs reach, coefficient file by coefficient file, and warns where that is outside.

    A file is warned of once per process.
    """

    reached: dict[str, tuple[Mapping[str, Interval], Reach]] = field(default_factory=dict)

    def see(self, workload: Any, cluster: Any, outcome: Any = None, lane: int = 0) -> None:
        """Take a run into account.

        **Arguments:**

        - `workload`, `cluster`: what was simulated, or will be; a packed `Workload` and a `Cluster`.
        - `outcome`, `lane`: its results, a lane of those that `run_lanes` returns. Without them only what
            every run of the workload reaches is known.
        """
        found = ranges_of(cluster.performance)
        if found is None or found[0] in _warned:
            return
        name, ranges = found
        reach = self.reached.setdefault(name, (ranges, Reach()))[1]
        prompts = workload.prompt_tokens
        reach.context = max(reach.context, int(np.max(prompts + workload.output_tokens - 1)))
        # a prompt is computed at once, up to the budget; where decodes take a part of it, all of it is used
        computed = workload.new_tokens
        columns = [getattr(outcome, f"call_{column}", None) for column in _COLUMNS]
        if all(column is not None for column in columns):
            scheduled, finished, service, cached, preempted, replica = (
                np.asarray(column)[lane, : len(prompts)] for column in columns
            )
            done = (scheduled >= 0) & (finished >= 0)
            computed = np.where(done, prompts - cached, 0)
            # a preempted call does not run all the time
            whole = done & (preempted == 0)
            reach.calls = max(reach.calls, _most_at_once(scheduled[whole], finished[whole], replica[whole]))
            busy = float(np.asarray(outcome.busy_ns)[lane, : cluster.replicas].sum())
            if busy > 0 and done.all():
                reach.mean_calls = min(reach.mean_calls, float(service.sum()) / busy)
        largest = min(int(np.max(computed)), cluster.max_num_batched_tokens)
        reach.tokens = max(reach.tokens, largest)

    def sentences(self) -> list[str]:
        """One sentence a file that was left and has not been warned of before."""
        out = []
        for name, (ranges, reach) in self.reached.items():
            phrases = reach.outside(ranges)
            if phrases and name not in _warned:
                _warned.add(name)
                out.append(f"{name}: durations are extrapolated, for there are {_joined(phrases)}")
        return out

    def warn(self, stacklevel: int = 2) -> None:
        """Warn (`OutsideRange`) for each file that was left; `stacklevel` as in `warnings.warn`."""
        for sentence in self.sentences():
            warnings.warn(sentence, OutsideRange, stacklevel=stacklevel + 1)


_COLUMNS = ("scheduled_ns", "finished_ns", "service_ns", "cached_tokens", "preemptions", "replica")


def _most_at_once(start: np.ndarray, end: np.ndarray, replica: np.ndarray) -> int:
    """Most calls that run at the same time on a replica."""
    instants, places = np.concatenate([end, start]), np.concatenate([replica, replica])
    change = np.repeat([-1, 1], len(start))
    order = np.lexsort((change, instants, places))
    return int(np.max(np.cumsum(change[order]), initial=0))


def _joined(phrases: Sequence[str]) -> str:
    *before, last = phrases
    return f"{', '.join(before)} and {last}" if before else last
