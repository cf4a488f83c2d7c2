"""Measured operator tables as a performance model.

Iteration time = overhead + layers · (dense operators by tokens + attention on four axes + experts by tokens)
+ operators by sequences + collectives of a group of GPUs, each interpolated in the measurements by straight
lines.
`profile` reads the measurements and holds the same arithmetic call by call.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from agentjax.errors import closest, complaint, shown
from agentjax.performance.base import MOST_S, AbstractPerformance, BatchShape, Number
from agentjax.performance.catalogue import available, read_entry
from agentjax.performance.profile import ENDS, LAYERS, PER_SEQUENCE, Profile, read_profile

Values = Float[Array, "..."] | Float[np.ndarray, "..."]

COLLECTIVE_LATENCY_S = 20e-6
"""Time of one collective operation of any size (s) between GPUs on PCIe 5.0 without NVLink: what
LLMServingSim (commit 5daddb21) states for its machine with two RTX PRO 6000."""

COLLECTIVE_BYTES_PER_S = 16e9
"""Rate of collective operations there: bytes of the whole tensor a second."""

SHORTEST = 0.25
"""Shortest context of a batch of decodes as a share of their mean: all that a batch's sums leave open. In
recorded runs of 128 chat requests it is 0.2 to 0.4."""

_BYTES = 2  # of an activation


class Table(AbstractPerformance):
    """Iteration time interpolated in measured operator tables.

    All arrays are float64 leaves and all times ns of a whole iteration, so tables with arrays of equal sizes
    (`aligned`) can be stacked and vmapped. Attention holds every knot of the measurements, so nothing is lost
    against interpolating in them directly.
    """

    tokens: Values  # knots: tokens computed
    tokens_ns: Values  # dense operators, experts and collectives of all layers
    sequences: Values  # knots: scheduled calls
    sequences_ns: Values  # output head and sampler
    chunks: Values  # knots of attention, as in `profile.Attention`
    histories: Values
    decodes: Values
    contexts: Values
    attention_ns: Values  # by chunks, histories, decodes, contexts
    skew_edges: tuple[Values, Values, Values, Values, Values]  # as in `profile.Skew`
    skew_middles: Values
    skew: Values
    overhead_ns: Number
    wakeup_ns: Number

    def iteration_ns(self, batch: BatchShape) -> Number:
        """Duration of an iteration (ns), not rounded."""
        chunk = batch.prefill_tokens
        # several prompts count as one of the same prefill work
        history = jnp.maximum(batch.prefill_work_tokens2 / jnp.maximum(chunk, 1.0) - 0.5 * chunk, 0.0)
        mean, longest = _mean_longest(batch)
        i, of_chunk = _segment(self.chunks, _beyond_zero(chunk, self.chunks))
        j, of_history = _segment(self.histories, history)
        k, of_decodes = _segment(self.decodes, _beyond_zero(batch.decode_sequences, self.decodes))
        m, of_context = _segment(self.contexts, jnp.stack([mean, longest], -1))
        last = self.contexts.shape[-1]
        start = jnp.asarray(0)
        for offset, width in ((i, self.histories.shape[-1]), (j, self.decodes.shape[-1]), (k, last)):
            start = (start + offset) * width
        strides = (
            last * self.decodes.shape[-1] * self.histories.shape[-1],
            last * self.decodes.shape[-1],
            last,
        )
        corners = np.stack(np.meshgrid(*([0, stride] for stride in strides), [0, 1], indexing="ij"))
        flat = self.attention_ns.reshape(-1)
        times = flat[(start + m)[..., None, None, None, None] + corners.sum(0)]
        for share in (of_chunk, of_history, of_decodes):  # leading corner axis after that of mean and longest
            times = times[:, 0] + share * (times[:, 1] - times[:, 0])
        times = times[:, 0] + of_context * (times[:, 1] - times[:, 0])
        return self._rest_ns(batch) + times[0] + self._alpha(batch, history) * (times[1] - times[0])

    def leap(self, batch: BatchShape, iterations: Number) -> tuple[Number, Number]:
        """As many as stay between two knots and in one bin of the skew: over those, time grows by a line."""
        mean, longest = _mean_longest(batch)
        k, of_decodes = _segment(self.decodes, _beyond_zero(batch.decode_sequences, self.decodes))
        point = jnp.stack([mean, longest], -1)
        m, _ = _segment(self.contexts, point)
        rows = self.attention_ns[0, 0, jnp.stack([k, k + 1])]
        steps = (rows[:, m + 1] - rows[:, m]) / (self.contexts[m + 1] - self.contexts[m])
        slopes = steps[0] + of_decodes * (steps[1] - steps[0])
        slopes = jnp.where(point < self.contexts[0], 0.0, slopes)
        alpha = self._alpha(batch, mean * 0.0)
        ahead = jnp.min(_next(self.contexts, point) - point)
        ahead = jnp.minimum(ahead, _next(self.skew_edges[3], longest, closed=True) - longest)
        rate = _next(
            self.skew_edges[2], _rate(mean, longest), closed=True
        )  # the rate grows with the contexts
        short = rate * (longest - SHORTEST * mean) - (1.0 - SHORTEST) * mean
        ahead = jnp.minimum(ahead, jnp.where(rate < 1.0, short / ((1.0 - SHORTEST) * (1.0 - rate)), jnp.inf))
        straight = jnp.clip(1.0 + jnp.floor(ahead), 1.0, iterations)
        return straight, slopes[0] + alpha * (slopes[1] - slopes[0])

    def _rest_ns(self, batch: BatchShape) -> Number:
        """All but attention."""
        return (
            self.overhead_ns
            + _value(self.tokens, self.tokens_ns, batch.tokens)
            + _value(self.sequences, self.sequences_ns, batch.sequences)
        )

    def _alpha(self, batch: BatchShape, history: Number) -> Number:
        """Share of the way from a batch of mean to one of longest contexts."""
        mean, longest = _mean_longest(batch)
        rate = _rate(mean, longest)
        values = (batch.prefill_tokens, batch.decode_sequences, rate, longest, history)
        i, j, k, m, n = (jnp.sum(x > edges) for x, edges in zip(values, self.skew_edges, strict=True))
        below, share = _segment(self.skew_middles, rate)
        share = jnp.clip(share, 0.0, 1.0)
        mixed = batch.prefill_tokens > 0
        low = self.skew[i, j, jnp.where(mixed, below, k), m, n]
        high = self.skew[i, j, below + 1, m, n]
        return jnp.where(mixed, low + share * (high - low), low)


def load_table(
    folder: str | Path,
    *,
    overhead_s: float = 0.0,
    wakeup_s: float = 0.0,
    layers: int | None = None,
    tp: int | None = None,
    hidden_size: int | None = None,
    collective_latency_s: float = COLLECTIVE_LATENCY_S,
    collective_bytes_per_s: float = COLLECTIVE_BYTES_PER_S,
    expert_parallel: int = 1,
) -> Table:
    """The model of a profile folder (`dense.csv`, `per_sequence.csv`, `attention.csv`, `meta.yaml`, ...).

    Args:
        folder: the folder `tp<N>` itself, or the one that holds it beside `meta.yaml`.
        overhead_s: host time per iteration.
        wakeup_s: per iteration that starts on an idle replica.
        layers: layers of the model; None: as the model that `meta.yaml` names has in `conf/model`.
        tp: GPUs a replica; None: as the folder's name says. For more than one, every layer has two
            all-reduces.
        hidden_size: width of the residual stream; None: as for `layers`. Only used for collectives.
        collective_latency_s: time of one collective operation of any size.
        collective_bytes_per_s: bytes of the whole tensor that a collective operation handles a second.
        expert_parallel: replicas that share the experts of each layer and run in step with equal batches;
            every layer then has two collectives over all their tokens.

    Raises:
        InputError: a file that is missing or does not have the format, or an argument that cannot be used.
    """
    profile = read_profile(folder, tp)
    for name, value in (
        ("overhead_s", overhead_s),
        ("wakeup_s", wakeup_s),
        ("collective_latency_s", collective_latency_s),
    ):
        fine = _is_number(value) and 0 <= value <= MOST_S
        _check(name, value, fine, f"a number of seconds from 0 to {MOST_S:g}")
    rate = collective_bytes_per_s
    _check("collective_bytes_per_s", rate, _is_number(rate) and rate > 0, "a number > 0")
    for name, value in (
        ("layers", layers),
        ("hidden_size", hidden_size),
        ("expert_parallel", expert_parallel),
    ):
        fine = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
        _check(name, value, fine, "an integer from 1")
    if expert_parallel > 1 and not profile.experts:
        raise complaint("expert_parallel", str(expert_parallel), f"1, as {profile.model} has no experts")
    if expert_parallel > 1 and max(profile.experts) % expert_parallel:
        raise complaint(
            "expert_parallel", str(expert_parallel), f"a divisor of {max(profile.experts)} experts"
        )
    if layers is None:
        layers = _model_number(profile, "layers", "num_hidden_layers")
    collective_s = np.zeros(2)  # of all layers: once, and per token
    for number, group in (
        (2 if profile.tensor_parallel > 1 else 0, 1),
        (2 if expert_parallel > 1 else 0, expert_parallel),
    ):
        if number:
            hidden_size = hidden_size or _model_number(profile, "hidden_size", "hidden_size")
            per_token = group * hidden_size * _BYTES / rate
            collective_s += layers * number * np.asarray([collective_latency_s, per_token])

    tokens = np.unique(np.concatenate([curve.knots for curve in profile.dense.values()]))
    time_us = sum(layers * profile.dense[name].at(tokens) for name in LAYERS[profile.architecture])
    time_us = time_us + sum(profile.dense[name].at(tokens) for name in ENDS)
    if profile.experts:
        activated = [profile.activated(n * expert_parallel) / expert_parallel for n in tokens]
        pairs = zip(tokens, activated, strict=True)
        time_us = time_us + layers * np.asarray([profile.moe_us(n, experts) for n, experts in pairs])
    rows = [profile.per_sequence[name] for name in PER_SEQUENCE]
    sequences = np.unique(np.concatenate([curve.knots for curve in rows]))
    attention = profile.attention
    return Table(
        tokens=tokens,
        tokens_ns=1e3 * time_us + 1e9 * (collective_s[0] + collective_s[1] * tokens),
        sequences=sequences,
        sequences_ns=1e3 * np.sum([curve.at(sequences) for curve in rows], axis=0),
        chunks=attention.axes[0],
        histories=attention.axes[1],
        decodes=attention.axes[2],
        contexts=attention.axes[3],
        attention_ns=1e3 * layers * attention.times,
        skew_edges=profile.skew.edges,
        skew_middles=profile.skew.middles,
        skew=profile.skew.alpha,
        overhead_ns=np.asarray(1e9 * overhead_s),
        wakeup_ns=np.asarray(1e9 * wakeup_s),
    )


_ARGUMENTS = (
    "overhead_s",
    "wakeup_s",
    "layers",
    "tp",
    "hidden_size",
    "collective_latency_s",
    "collective_bytes_per_s",
    "expert_parallel",
)


def build_table(config: Mapping[str, Any]) -> Table:
    """The model of a `performance` group with the key `profile`, a folder, and keys as for `load_table`.

    Raises:
        InputError: a key that there is not, or what `load_table` raises.
    """
    for key in config:
        if key not in ("profile", *_ARGUMENTS):
            raise complaint(
                f"performance.{key}", "an unknown field", closest(str(key), ("profile", *_ARGUMENTS))
            )
    folder = config["profile"]
    if not isinstance(folder, str) or not folder:
        raise complaint("performance.profile", shown(folder), "the path of a profile folder")
    return load_table(folder, **{key: config[key] for key in _ARGUMENTS if config.get(key) is not None})


def aligned(tables: Sequence[Table]) -> list[Table]:
    """The same tables with arrays of equal sizes, so that lanes may have different ones.

    Axes are made longer at their ends along the lines that go on there, and the skew by bins that nothing
    falls into, so no duration changes.
    """
    sizes = [
        max(getattr(table, axis).shape[-1] for table in tables)
        for axis in ("tokens", "sequences", "chunks", "histories", "decodes", "contexts")
    ]
    bins = np.max([table.skew.shape for table in tables], axis=0)
    out = []
    for table in tables:
        tokens, tokens_ns = _longer(table.tokens, np.asarray(table.tokens_ns), 0, sizes[0])
        sequences, sequences_ns = _longer(table.sequences, np.asarray(table.sequences_ns), 0, sizes[1])
        attention, axes = np.asarray(table.attention_ns), []
        for i, knots in enumerate((table.chunks, table.histories, table.decodes, table.contexts)):
            knots, attention = _longer(knots, attention, i, sizes[2 + i])
            axes.append(knots)
        width = [(0, int(more)) for more in bins - table.skew.shape]
        added = np.arange(1, int(bins[2]) - len(table.skew_middles) + 1)
        middles = np.append(table.skew_middles, table.skew_middles[-1] + added)
        edges = tuple(
            np.append(old, np.full(int(count) - 1 - old.shape[-1], np.inf))
            for old, count in zip(table.skew_edges, bins, strict=True)
        )
        out.append(
            Table(
                tokens=tokens,
                tokens_ns=tokens_ns,
                sequences=sequences,
                sequences_ns=sequences_ns,
                chunks=axes[0],
                histories=axes[1],
                decodes=axes[2],
                contexts=axes[3],
                attention_ns=attention,
                skew_edges=(edges[0], edges[1], edges[2], edges[3], edges[4]),
                skew_middles=middles,
                skew=np.pad(np.asarray(table.skew), width, mode="edge"),
                overhead_ns=table.overhead_ns,
                wakeup_ns=table.wakeup_ns,
            )
        )
    return out


def _longer(knots: Values, values: np.ndarray, axis: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Knots beyond the end, with the values on the line that goes on there."""
    knots = np.asarray(knots)
    more = size - len(knots)
    if more == 0:
        return knots, values
    ends = np.moveaxis(values, axis, -1)[..., -2:]
    steps = np.arange(1, more + 1) * (knots[-1] - knots[-2])
    slope = (ends[..., 1:] - ends[..., :1]) / (knots[-1] - knots[-2])
    added = np.moveaxis(ends[..., 1:] + slope * steps, -1, axis)
    return np.append(knots, knots[-1] + steps), np.concatenate([values, added], axis=axis)


def _mean_longest(batch: BatchShape) -> tuple[Array, Array]:
    """Mean and longest context of the decodes, at least 1."""
    mean = batch.decode_context_tokens / jnp.maximum(batch.decode_sequences, 1.0)
    return jnp.maximum(mean, 1.0), jnp.maximum(batch.decode_context_max_tokens, 1.0)


def _rate(mean: Number, longest: Number) -> Array:
    """Skew rate, (mean − shortest) / (longest − shortest)."""
    return jnp.asarray((1.0 - SHORTEST) * mean / (jnp.maximum(longest, mean) - SHORTEST * mean))


def _segment(knots: Values, x: Number) -> tuple[Array, Array]:
    """The segment that holds x, the last one beyond the end, and where in it; below all, the first knot."""
    x = jnp.maximum(jnp.asarray(x), knots[0])
    i = jnp.clip(jnp.sum(x[..., None] >= knots, axis=-1) - 1, 0, knots.shape[-1] - 2)
    return i, (x - knots[i]) / (knots[i + 1] - knots[i])


def _value(knots: Values, values: Values, x: Number) -> Array:
    i, share = _segment(knots, x)
    return values[i] + share * (values[i + 1] - values[i])


def _next(knots: Values, x: Number, closed: bool = False) -> Array:
    """The first knot above x, or not below it where `closed`; infinity beyond the last."""
    x = jnp.asarray(x)[..., None]
    above = (x <= knots) if closed else (x < knots)
    return jnp.min(jnp.where(above, knots, jnp.inf), axis=-1, initial=jnp.inf)


def _beyond_zero(x: Number, knots: Values) -> Array:
    return jnp.where(x > 0, jnp.maximum(x, knots[1]), 0.0)


def _model_number(profile: Profile, argument: str, field: str) -> int:
    """A number of the model that a profile is of, from the catalogue of models."""
    name = profile.model.rpartition("/")[2].lower().replace("-", "_").replace(".", "_")
    known = [entry for entry in available("model") if name == entry or name.startswith(f"{entry}_")]
    if not known:
        raise complaint(argument, "nothing", f"a number, as conf/model has no entry for {profile.model}")
    path, fields = read_entry("model", max(known, key=len))
    if not isinstance(fields.get(field), int):
        raise complaint(f"{path}, {field}", shown(fields.get(field)), "an integer")
    return fields[field]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(name: str, value: object, fine: bool, expected: str) -> None:
    if not fine:
        raise complaint(name, shown(value), expected)


__all__ = ["Table", "aligned", "build_table", "load_table"]
