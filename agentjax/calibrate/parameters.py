"""What a gradient-free fit may change: coefficients of the performance model, and limits of the cluster."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import numpy as np

from agentjax.calibrate.replayed import Replayed
from agentjax.cluster import Cluster
from agentjax.errors import closest, complaint, shown
from agentjax.performance.base import AbstractPerformance, BatchShape, nanoseconds

LIMITS = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "kv_blocks": 1}
"""Limits of a cluster that may be fitted, and the least value of each."""
WIDEST = 30.0
"""A limit is looked for up to this factor from its start, if no bounds are given."""
LEAST_SHARE = 1e-6
"""A coefficient matters little if it adds less than this share of a call's latency to an iteration."""
_AT_KNOTS = ("decode_s",)


@dataclass(frozen=True)
class Parameter:
    """A number to fit, within bounds.

    Attributes:
        name: in seconds, `..._s`, or a limit of the cluster.
        start: its value before the fit.
        low, high: bounds, included; low > 0, for the search is in the logarithm.
    """

    name: str
    start: float
    low: float
    high: float

    @property
    def is_limit(self) -> bool:
        """A limit of the cluster, a whole number; otherwise a coefficient."""
        return self.name in LIMITS

    def round(self, value: float) -> float:
        """The value as it is used: whole for a limit, never outside the bounds."""
        value = min(max(value, self.low), self.high)
        return float(round(value)) if self.is_limit else value


def coefficient_names(model: AbstractPerformance) -> tuple[str, ...]:
    """The coefficients of a model that are single numbers, by their name in seconds."""
    names = [*inspect.signature(type(model).__init__).parameters, "overhead_s", "wakeup_s"]
    found = [name for name in names if name.endswith("_s") and name not in _AT_KNOTS]
    return tuple(dict.fromkeys(name for name in found if np.ndim(getattr(model, _leaf(name), [0])) == 0))


def coefficient_s(model: AbstractPerformance, name: str) -> float:
    """A coefficient of a model, in seconds."""
    return float(getattr(model, _leaf(name))) * 1e-9


def choose_parameters(names: Any, bounds: Any, cluster: Cluster, replayed: Replayed) -> tuple[Parameter, ...]:
    """The parameters of a fit.

    Args:
        names: of coefficients of the cluster's performance model and of limits.
        bounds: pairs [low, high] by name; None for no bounds of one's own.
        cluster: has the values to start from.
        replayed: what they are fitted to; tells what size they can have.

    Raises:
        InputError: no names, an unknown name, a limit that is known for slots, or bounds that are none.
    """
    known = (*coefficient_names(cluster.performance), *LIMITS)
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        raise complaint("parameters", shown(names), f"a list of names out of {', '.join(known)}")
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in known:
            raise complaint(f"parameters[{index}]", shown(name), closest(str(name), known))
        if name in names[:index]:
            raise complaint(f"parameters[{index}]", f"{shown(name)} again", "each name once")
        if name in ("max_num_seqs", "kv_blocks") and cluster.slots:
            expected = "other names: slots have the number and size that the server was started with"
            raise complaint(f"parameters[{index}]", shown(name), expected)
    given = {} if bounds is None else bounds
    if not isinstance(given, Mapping):
        raise complaint("bounds", shown(bounds), "pairs [low, high] by the name of a parameter")
    for name in given:
        if name not in names:
            raise complaint(f"bounds.{name}", "a name that is not fitted", closest(str(name), names))
    return tuple(_parameter(name, given.get(name), cluster, replayed) for name in names)


def _parameter(name: str, pair: Any, cluster: Cluster, replayed: Replayed) -> Parameter:
    least = 0.0
    if name in LIMITS:
        start = float(getattr(cluster, name))
        least = float(LIMITS[name])
        if name == "kv_blocks":
            tokens = replayed.workload.prompt_tokens + replayed.workload.output_tokens - 1
            least = float(np.max(-(-tokens // cluster.block_size)))
        low, high = max(min(least, start), start / WIDEST), max(start, least) * WIDEST
    else:
        start = coefficient_s(cluster.performance, name)
        largest = _largest_s(cluster.performance, name, replayed)
        low, high = min(start or largest, largest) * LEAST_SHARE, max(start * WIDEST, largest)
    if pair is not None:
        low, high = _bounds(name, pair, least)
        if start and not low <= start <= high:
            raise complaint(f"bounds.{name}", f"[{low:g}, {high:g}]", f"a range around the start, {start:g}")
        low = max(low, high * LEAST_SHARE)
    return Parameter(name, start, low, high)


def _largest_s(model: AbstractPerformance, name: str, replayed: Replayed) -> float:
    """The value with which a coefficient alone makes an iteration last as long as a call does."""
    latency_s = float(np.median(replayed.recorded_s[replayed.metric == 1]))
    prompt, output = (
        float(np.median(tokens))
        for tokens in (replayed.workload.prompt_tokens, replayed.workload.output_tokens)
    )
    more_s = 1e-9
    moved = _with_coefficients(model, {name: coefficient_s(model, name) + more_s})
    effects = [1.0] if name == "wakeup_s" else []  # not part of an iteration, but added to it
    with jax.enable_x64(True):
        for decodes, prefill in ((1.0, 0.0), (0.0, prompt), (1.0, prompt)):
            batch = _batch(decodes, prefill, prompt + output / 2)
            effects.append(abs(float(moved.iteration_s(batch)) - float(model.iteration_s(batch))) / more_s)
    return latency_s / (max(effects) or 1.0)


def _batch(decodes: float, prefill: float, context: float) -> BatchShape:
    return BatchShape(
        sequences=np.float64(decodes + (prefill > 0)),
        decode_sequences=np.float64(decodes),
        decode_context_tokens=np.float64(decodes * context),
        decode_context_max_tokens=np.float64(decodes * context),
        prefill_tokens=np.float64(prefill),
        prefill_context_tokens=np.float64(0.0),
        prefill_work_tokens2=np.float64(prefill**2 / 2),
    )


def _bounds(name: str, pair: Any, least: float) -> tuple[float, float]:
    both = [each for each in pair if _is_number(each)] if isinstance(pair, list | tuple) else []
    if len(both) != 2 or len(pair) != 2:
        raise complaint(f"bounds.{name}", shown(pair), "two numbers, [low, high]")
    low, high = float(both[0]), float(both[1])
    if not least <= low < high:
        raise complaint(f"bounds.{name}", f"[{low:g}, {high:g}]", f"two rising numbers from {least:g}")
    return low, high


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def with_values(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """The cluster with these coefficients (s) and limits. An iteration has a token for every running call: a
    limit that is given yields to one that is not.
    """
    limits = {name: round(value) for name, value in values.items() if name in LIMITS}
    if "max_num_batched_tokens" in limits:
        seqs = limits.get("max_num_seqs", cluster.max_num_seqs)
        limits["max_num_batched_tokens"] = max(seqs, limits["max_num_batched_tokens"])
    elif "max_num_seqs" in limits:
        limits["max_num_seqs"] = min(cluster.max_num_batched_tokens, limits["max_num_seqs"])
    coefficients = {name: value for name, value in values.items() if name not in LIMITS}
    return replace(cluster, performance=_with_coefficients(cluster.performance, coefficients), **limits)


def _with_coefficients(model: AbstractPerformance, values: Mapping[str, float]) -> AbstractPerformance:
    if not values:
        return model
    return eqx.tree_at(
        lambda model: [getattr(model, _leaf(name)) for name in values],
        model,
        [nanoseconds(name, value) for name, value in values.items()],
    )


def _leaf(name: str) -> str:
    return name.removesuffix("_s") + "_ns"
