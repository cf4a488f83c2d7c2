"""Profile folders: measured operator latencies in LLMServingSim's layout, read, checked and completed.

A folder `tp<N>` holds `dense.csv`, `per_sequence.csv` and `attention.csv`, with `moe.csv` for a mixture of
experts and `skew_fit.csv` where batches of unequal contexts were measured; `meta.yaml` lies in it or above.
All times are microseconds of one call of one operator on one GPU of the group.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jaxtyping import Float

from agentjax.errors import among, complaint, shown

Values = Float[np.ndarray, "..."]

_LAYER = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm")
_MLP = ("gate_up_proj", "act_fn", "down_proj")
LAYERS: Mapping[str, tuple[str, ...]] = {
    "llama": (*_LAYER, *_MLP),
    "qwen3": (*_LAYER, "qk_norm", *_MLP),
    "qwen3_moe": (*_LAYER, "qk_norm"),
}
"""Dense operators of one layer, by the architecture in `meta.yaml`; one called twice is listed twice."""

ENDS = ("embedding", "final_layernorm")
"""Dense operators that run once an iteration."""

PER_SEQUENCE = ("lm_head", "sampler")
"""Operators that run once an iteration, on one row a sequence."""

ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
"""Axes of `attention.csv`: prompt tokens computed, tokens before them, decodes, context of a decode."""

_SKEW = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label")
_BINS = (("n", "n_label"), ("skew_rate", "skew_rate_label"), ("kv_big", "kv_big_label"), ("kp", "kp_label"))


@dataclass(frozen=True)
class Curve:
    """Straight lines between knots; the first value below the first knot, the last line beyond the last."""

    knots: Values
    values: Values

    def __call__(self, x: float) -> float:
        """The value at x."""
        i, share = _segment(self.knots, x)
        return float(self.values[i] + share * (self.values[i + 1] - self.values[i]))

    def at(self, knots: Values) -> Values:
        """The values at many points."""
        return np.asarray([self(x) for x in knots])


@dataclass(frozen=True)
class Skew:
    """How far a batch of unequal contexts lies between one of all-mean and one of all-longest contexts.

    Fits of neighbouring bins of the skew rate differ by up to a fifth of an iteration that computes prompt
    tokens: for these the share is interpolated between the middles of the bins. For decodes alone it is that
    of the bin.

    Args:
        edges: five rows of upper bin edges: prompt tokens computed, decodes, skew rate (mean − shortest) /
            (longest − shortest), longest context, tokens before the prompt chunk. A value belongs to the
            first bin whose edge is not below it; the last bin has no edge.
        middles: middles of the bins of the skew rate.
        alpha: share of the way by bin on the five axes, 0 to 1.
    """

    edges: tuple[Values, Values, Values, Values, Values]
    middles: Values
    alpha: Values

    def __call__(self, chunk: float, decodes: float, rate: float, longest: float, history: float) -> float:
        """The share for a batch."""
        point = (chunk, decodes, rate, longest, history)
        i, j, k, m, n = (int(np.sum(x > edges)) for x, edges in zip(point, self.edges, strict=True))
        if chunk == 0:
            return float(self.alpha[i, j, k, m, n])
        return float(np.interp(rate, self.middles, self.alpha[i, j, :, m, n]))


@dataclass(frozen=True)
class Attention:
    """Attention of one layer (µs) on a full grid: what was not measured is filled in from its neighbours.

    Args:
        axes: knots of the four axes; those of the prompt and the number of decodes begin at 0.
        times: by the four axes. An iteration without prompt and one without decodes run other kernels than a
            mixed one, so 0 is a place of its own: nothing is interpolated between it and the next knot.
    """

    axes: tuple[Values, Values, Values, Values]
    times: Float[np.ndarray, "chunks histories decodes contexts"]

    def __call__(self, chunk: float, history: float, decodes: float, context: float) -> float:
        """Time (µs) by straight lines along every axis; above the last knots the lines go on."""
        point = (_beyond_zero(chunk, self.axes[0]), history, _beyond_zero(decodes, self.axes[2]), context)
        corners = self.times
        for knots, x in zip(self.axes, point, strict=True):
            i, share = _segment(knots, x)
            corners = corners[i] + share * (corners[i + 1] - corners[i])
        return float(corners)


@dataclass(frozen=True)
class Profile:
    """A profile folder: operators by name, attention and skew, with what says which model they are of."""

    folder: Path
    architecture: str
    model: str
    gpu: str
    tensor_parallel: int
    dense: Mapping[str, Curve]
    per_sequence: Mapping[str, Curve]
    attention: Attention
    skew: Skew
    experts: Mapping[int, Curve]  # by experts activated: time by tokens

    def moe_us(self, tokens: float, activated: float) -> float:
        """The experts of one layer (µs): by tokens, and by how many experts at least one of them uses."""
        knots = np.asarray(sorted(self.experts), np.float64)
        column = np.asarray([self.experts[int(knot)](tokens) for knot in knots])
        return Curve(knots, column)(activated)

    def activated(self, tokens: float) -> float:
        """Experts that at least one of so many tokens uses, if each picks its own at random."""
        most, one = max(self.experts), min(self.experts)
        return most * -math.expm1(tokens * math.log1p(-one / most)) if one < most else float(most)

    def attention_us(self, prompts: Sequence[tuple[float, float]], contexts: Sequence[float]) -> float:
        """Attention of one layer (µs) for an iteration given call by call.

        Args:
            prompts: tokens computed, and tokens before them, of every call in its prompt.
            contexts: context after the iteration of every call that decodes.

        Several prompts count as one of the same prefill work: the sum over them of n · (c + n/2).
        """
        chunk = float(sum(n for n, _ in prompts))
        work = float(sum(n * (c + n / 2) for n, c in prompts))
        history = max(work / chunk - chunk / 2, 0.0) if prompts else 0.0
        decodes = float(len(contexts))
        if not contexts:
            return self.attention(chunk, history, 0.0, 0.0)
        mean, longest, shortest = float(np.mean(contexts)), float(max(contexts)), float(min(contexts))
        time = self.attention(chunk, history, decodes, mean)
        if longest == mean:
            return time
        rate = (mean - shortest) / (longest - shortest)
        alpha = self.skew(chunk, decodes, rate, longest, history)
        return time + alpha * (self.attention(chunk, history, decodes, longest) - time)


def read_profile(folder: str | Path, tp: int | None = None) -> Profile:
    """A profile folder.

    Args:
        folder: the folder `tp<N>` itself, or the one that holds it beside `meta.yaml`.
        tp: GPUs a replica; None: as the folder's name says.

    Raises:
        InputError: a file that is missing or does not have the format.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise complaint(str(folder), "no such folder", "a profile folder")
    if tp is not None and (isinstance(tp, bool) or not isinstance(tp, int) or tp < 1):
        raise complaint("tp", shown(tp), "an integer from 1")
    if tp is not None and (folder / f"tp{tp}").is_dir():
        folder = folder / f"tp{tp}"
    path = folder / "meta.yaml" if (folder / "meta.yaml").is_file() else folder.parent / "meta.yaml"
    if not path.is_file():
        raise complaint(str(folder / "meta.yaml"), "no such file", "meta.yaml in the folder or the one above")
    meta = _read_meta(path)
    architecture, model = _text(meta, path, "architecture"), _text(meta, path, "model")
    if architecture not in LAYERS:
        raise complaint(f"{path}, architecture", shown(architecture), among(architecture, LAYERS))
    tp = _tensor_parallel(folder, path, meta, tp)

    dense = _read_curves(folder / "dense.csv", "tokens", {*LAYERS[architecture], *ENDS})
    per_sequence = _read_curves(folder / "per_sequence.csv", "sequences", set(PER_SEQUENCE))
    experts: dict[int, Curve] = {}
    if architecture == "qwen3_moe":
        experts = _read_experts(folder / "moe.csv")
    return Profile(
        folder=folder,
        architecture=architecture,
        model=model,
        gpu=str(meta.get("gpu", "")),
        tensor_parallel=tp,
        dense=dense,
        per_sequence=per_sequence,
        attention=complete(*_read_points(folder / "attention.csv"), where=str(folder / "attention.csv")),
        skew=_read_skew(folder / "skew_fit.csv", path, meta, tp),
        experts=experts,
    )


def complete(
    points: Float[np.ndarray, "points 4"], times: Float[np.ndarray, " points"], where: str
) -> Attention:
    """Measured points of attention as a full grid.

    Profiles sweep several grids and leave out combinations. A missing point is filled along the first axis on
    which it lies between measured ones (context, history, chunk, decodes). One that is outside of all of them
    lies on the line through the last two, or has the value of the first. Iterations with and without prompt,
    with and without decodes are filled apart.
    """
    knots = [np.unique(points[:, axis]) for axis in range(4)]
    knots[0], knots[1], knots[2] = (np.union1d(knots[axis], [0.0]) for axis in range(3))
    knots[3] = knots[3][knots[3] > 0]
    for axis in range(4):
        if (knots[axis] > 0).sum() < 1:
            raise complaint(where, f"no row with {ATTENTION[axis]} > 0", "a sweep of all four axes")
    if len(knots[3]) == 1:
        knots[3] = np.append(knots[3], 2 * knots[3])
    grid = np.full([len(axis) for axis in knots], np.nan)
    mixed, prompt, decode = grid[1:, :, 1:, :], grid[1:, :, 0, :], grid[0, :, 1:, :]
    index = [np.searchsorted(axis, points[:, i]) for i, axis in enumerate(knots)]
    chunk, _, decodes, _ = points.T
    both, alone, none = (chunk > 0) & (decodes > 0), decodes == 0, chunk == 0
    i, j, k, m = index
    grid[i[both], j[both], k[both], m[both]] = times[both]
    prompt[i[alone] - 1, j[alone], :] = times[alone, None]
    decode[:, k[none] - 1, m[none]] = times[none]
    for part, axes, name in (
        (mixed, {3: knots[3], 1: knots[1], 0: knots[0][1:], 2: knots[2][1:]}, "prompt and decodes"),
        (prompt, {1: knots[1], 0: knots[0][1:]}, "a prompt alone"),
        (decode, {2: knots[3], 1: knots[2][1:]}, "decodes alone"),
    ):
        if np.isnan(part).all():
            raise complaint(where, f"no row with {name}", "at least one")
        for axis, places in axes.items():
            _fill(part, places, axis, outward=False)
        while np.isnan(part).any():
            for axis, places in axes.items():
                _fill(part, places, axis, outward=True)
    grid[0, :, 0, :] = grid[1, :, 0, :]  # an iteration of nothing, which no batch is
    return Attention(axes=(knots[0], knots[1], knots[2], knots[3]), times=grid)


def _fill(part: Values, knots: Values, axis: int, outward: bool) -> None:
    """Fill gaps along an axis in place: between measured points, or outside of them."""
    lines = np.moveaxis(part, axis, -1)
    for place in np.argwhere(np.isnan(lines).any(-1) & ~np.isnan(lines).all(-1)):
        line = lines[tuple(place)]
        known = np.flatnonzero(~np.isnan(line))
        curve = Curve(knots[known], line[known])
        inside = slice(known[0], known[-1] + 1)
        line[inside] = np.interp(knots[inside], curve.knots, curve.values)
        if outward:
            line[: known[0]] = line[known[0]]
            above = slice(known[-1] + 1, None)
            line[above] = curve.at(knots[above]) if len(known) > 1 else line[known[-1]]


def _segment(knots: Values, x: float) -> tuple[int, float]:
    """The segment that holds x, the last one beyond the end, and where in it."""
    x = max(x, float(knots[0]))
    i = int(np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2))
    return i, float((x - knots[i]) / (knots[i + 1] - knots[i]))


def _beyond_zero(x: float, knots: Values) -> float:
    return max(x, float(knots[1])) if x > 0 else 0.0


def _read_meta(path: Path) -> Mapping[str, Any]:
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise complaint(str(path), "bytes that are not UTF-8", "YAML") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise complaint(where, "text that is not YAML", "keys and values") from None
    if not isinstance(meta, dict):
        raise complaint(str(path), "no fields", "an object")
    return meta


def _text(meta: Mapping[str, Any], path: Path, field: str) -> str:
    value = meta.get(field)
    if not isinstance(value, str) or not value:
        raise complaint(f"{path}, {field}", shown(value), "a string that is not empty")
    return value


def _tensor_parallel(folder: Path, path: Path, meta: Mapping[str, Any], tp: int | None) -> int:
    named = re.search(r"(?:^|_)tp(\d+)$", folder.name)
    degrees = meta.get("tp_degrees")
    if (
        not isinstance(degrees, list)
        or not all(isinstance(x, int) and x >= 1 for x in degrees)
        or not degrees
    ):
        raise complaint(f"{path}, tp_degrees", shown(degrees), "a list of integers from 1")
    if named is None and tp is None and len(degrees) > 1:
        raise complaint("tp", "nothing", f"{among('', degrees)}, for {folder} does not end in tp<N>")
    found = int(named[1]) if named else tp if tp is not None else degrees[0]
    if tp is not None and tp != found:
        raise complaint("tp", str(tp), f"{found}, which {folder} is of")
    if found not in degrees:
        raise complaint(f"{path}, tp_degrees", f"no {found}", f"the degree that {folder} is of")
    return found


def _rows(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """The rows of a CSV file with their line numbers; it must have these columns and no others."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if header is None or sorted(header) != sorted(columns):
                raise complaint(f"{path}, line 1", ",".join(header or ()) or "nothing", ",".join(columns))
            rows = []
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise complaint(
                        f"{path}, line {reader.line_num}", f"{len(cells)} values", f"{len(header)}"
                    )
                rows.append((reader.line_num, dict(zip(header, cells, strict=True))))
    except OSError as error:
        reason = error.strerror or "unreadable file"
        raise complaint(str(path), reason[0].lower() + reason[1:], ",".join(columns)) from None
    except UnicodeDecodeError:
        raise complaint(str(path), "bytes that are not UTF-8", "CSV") from None
    except csv.Error as error:
        raise complaint(str(path), str(error), "CSV") from None
    if not rows:
        raise complaint(str(path), "no rows", "at least one measurement")
    return rows


def _number(
    path: Path, line: int, row: Mapping[str, str], field: str, low: float, whole: bool = False
) -> float:
    """A cell as a number, whole or above `low`."""
    expected = f"an integer from {low:g}" if whole else f"a number > {low:g}"
    try:
        value = float(row[field])
    except ValueError:
        value = math.nan
    fine = value >= low and value == int(value) if whole and math.isfinite(value) else value > low
    if not math.isfinite(value) or not fine:
        raise complaint(f"{path}, line {line}, {field}", shown(row[field]), expected)
    return value


def _unique(path: Path, line: int, key: object, seen: dict[Any, int]) -> None:
    if key in seen:
        raise complaint(f"{path}, line {line}", f"the same point as in line {seen[key]}", "each point once")
    seen[key] = line


def _read_curves(path: Path, axis: str, names: set[str]) -> dict[str, Curve]:
    """Operators by name; others than `names` are left out."""
    points: dict[str, dict[float, float]] = {}
    seen: dict[tuple[str, float], int] = {}
    for line, row in _rows(path, ("layer", axis, "time_us")):
        x = _number(path, line, row, axis, 1, whole=True)
        _unique(path, line, (row["layer"], x), seen)
        points.setdefault(row["layer"], {})[x] = _number(path, line, row, "time_us", 0)
    for name in sorted(names):
        if len(points.get(name, {})) < 2:
            raise complaint(f"{path}, layer", f"{len(points.get(name, {}))} rows of {name}", "at least 2")
    return {name: _curve(points[name]) for name in sorted(names)}


def _curve(points: Mapping[float, float]) -> Curve:
    knots = np.asarray(sorted(points), np.float64)
    return Curve(knots, np.asarray([points[x] for x in knots], np.float64))


def _read_experts(path: Path) -> dict[int, Curve]:
    points: dict[int, dict[float, float]] = {}
    seen: dict[tuple[float, float], int] = {}
    for line, row in _rows(path, ("tokens", "activated_experts", "time_us")):
        tokens = _number(path, line, row, "tokens", 1, whole=True)
        activated = _number(path, line, row, "activated_experts", 1, whole=True)
        _unique(path, line, (tokens, activated), seen)
        points.setdefault(int(activated), {})[tokens] = _number(path, line, row, "time_us", 0)
    few = [activated for activated, curve in points.items() if len(curve) < 2]
    if few or len(points) < 2:
        found = f"1 row of {few[0]} experts" if few else f"rows of {min(points)} experts only"
        raise complaint(
            f"{path}, activated_experts", found, "at least 2 rows of at least 2 numbers of experts"
        )
    return {activated: _curve(points[activated]) for activated in sorted(points)}


def _read_points(path: Path) -> tuple[Float[np.ndarray, "points 4"], Float[np.ndarray, " points"]]:
    """The points of `attention.csv` and their times (µs)."""
    seen: dict[tuple[float, ...], int] = {}
    times: list[float] = []
    for line, row in _rows(path, (*ATTENTION, "time_us")):
        point = tuple(_number(path, line, row, field, 0, whole=True) for field in ATTENTION)
        chunk, history, decodes, context = point
        for field, value, owner, tokens in (
            ("kv_prefill", history, "prefill_chunk", chunk),
            ("kv_decode", context, "n_decode", decodes),
        ):
            if value > 0 and tokens == 0:
                raise complaint(f"{path}, line {line}, {field}", f"{value:g}", f"0, as {owner} is 0")
        if decodes > 0 and context == 0:
            raise complaint(
                f"{path}, line {line}, kv_decode", "0", f"an integer from 1, as n_decode is {decodes:g}"
            )
        if chunk == 0 and decodes == 0:
            raise complaint(f"{path}, line {line}", "neither prefill_chunk nor n_decode", "one above 0")
        _unique(path, line, point, seen)
        times.append(_number(path, line, row, "time_us", 0))
    return np.asarray(list(seen), np.float64), np.asarray(times)


def _read_skew(path: Path, meta_path: Path, meta: Mapping[str, Any], tp: int) -> Skew:
    """The fitted shares; all 0 where unequal contexts were not measured."""
    fit = meta.get("skew_fit") or {}
    if not isinstance(fit, dict):
        raise complaint(f"{meta_path}, skew_fit", shown(fit), "an object")
    if not fit.get("enabled"):
        none = np.zeros(0)
        return Skew(
            (none, none, np.asarray([0.5]), none, none), np.asarray([0.25, 0.75]), np.zeros((1, 1, 2, 1, 1))
        )
    axes = fit.get("bucket_axes")
    if not isinstance(axes, dict):
        raise complaint(f"{meta_path}, skew_fit.bucket_axes", shown(axes), "an object")
    default = (fit.get("per_tp") or {}).get(tp)
    default = default.get("alpha_default") if isinstance(default, dict) else None
    if isinstance(default, bool) or not isinstance(default, int | float):
        raise complaint(f"{meta_path}, skew_fit.per_tp.{tp}.alpha_default", shown(default), "a number")
    labels: list[list[str]] = []
    edges: list[Values] = []
    for name, _ in _BINS:
        bins, texts = axes.get(f"{name}_bins"), axes.get(f"{name}_labels")
        where = f"{meta_path}, skew_fit.bucket_axes.{name}_bins"
        if (
            not isinstance(bins, list)
            or not all(isinstance(x, int | float) for x in bins)
            or bins != sorted(set(bins))
        ):
            raise complaint(where, shown(bins), "a list of increasing numbers")
        if not isinstance(texts, list) or len(texts) != len(bins) - 1:
            raise complaint(where, f"{len(bins)} edges", "one more than labels")
        labels.append([str(text) for text in texts])
        edges.append(np.asarray(bins[1:-1], np.float64))

    rows = _rows(path, (*_SKEW, "alpha", "n_samples"))
    chunks = np.asarray(sorted({_number(path, line, row, "pc", 0, whole=True) for line, row in rows} | {0.0}))
    alpha = np.full((len(chunks), *(len(texts) for texts in labels)), np.nan)
    seen: dict[tuple[int, ...], int] = {}
    for line, row in rows:
        place = [int(np.searchsorted(chunks, float(row["pc"])))]
        for texts, (_, field) in zip(labels, _BINS, strict=True):
            if row[field] not in texts:
                raise complaint(f"{path}, line {line}, {field}", shown(row[field]), among(row[field], texts))
            place.append(texts.index(row[field]))
        _unique(path, line, tuple(place), seen)
        alpha[tuple(place)] = _number(path, line, row, "alpha", -math.inf)
    # a bin without a fit takes that of the nearest rate, longest context, history, number of decodes
    for axis in (2, 3, 4, 1):
        _nearest(np.moveaxis(alpha, axis, -1))
    alpha = np.clip(np.where(np.isnan(alpha), float(default), alpha), 0.0, 1.0)
    # chunks between two profiled ones belong to the nearer by ratio; none to that of no prompt
    between = np.concatenate([[0.0], np.sqrt(chunks[1:-1] * chunks[2:])])[: len(chunks) - 1]
    ends = np.concatenate([[0.0], edges[1], [1.0]])
    return Skew((between, edges[0], edges[1], edges[2], edges[3]), 0.5 * (ends[1:] + ends[:-1]), alpha)


def _nearest(lines: Values) -> None:
    """Fill gaps along the last axis in place, each from the nearest value, the lower of two."""
    for place in np.argwhere(np.isnan(lines).any(-1) & ~np.isnan(lines).all(-1)):
        line = lines[tuple(place)]
        known = np.flatnonzero(~np.isnan(line))
        distance = np.abs(np.arange(len(line))[:, None] - known)
        line[:] = line[known[np.argmin(distance, axis=1)]]
