"""From the axes of a grid to its points: what can be an axis, and which configuration each point has."""

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from agentjax.config.compose import MOST_POINTS, SIMULATION_GROUPS, Groups
from agentjax.config.sentences import unknown_key
from agentjax.errors import InputError, among, complaint, shown

_SCALARS = (str, int, float, bool)
_TAKEN = ("program", "jct")
_UNITS = ("_s", "_tokens", "_blocks")


@dataclass(frozen=True)
class Axis:
    """One dimension of a cube.

    Attributes:
        name: name of the dimension.
        key: config group or dotted config key that varies along it.
        values: its labels.
    """

    name: str
    key: str
    values: tuple[Any, ...]

    @property
    def is_seed(self) -> bool:
        """Whether the axis repeats the same configuration with other random draws."""
        return self.key.rpartition(".")[2] == "seed"


def make_axes(values_of: Mapping[str, Sequence[Any]]) -> tuple[Axis, ...]:
    """Axes from checked keys and values; a dimension has the name its key ends with, if unique.

    Raises:
        InputError: more points than a grid may have.
    """
    points = math.prod(map(len, values_of.values()))
    if points > MOST_POINTS:
        raise complaint("grid", f"{points:,} points", f"at most {MOST_POINTS:,}")
    shorts = [key.rpartition(".")[2] for key in values_of]
    axes = []
    for key, short in zip(values_of, shorts, strict=True):
        is_clear = shorts.count(short) == 1 and short not in SIMULATION_GROUPS and short not in _TAKEN
        axes.append(Axis(short if is_clear or short == key else key, key, tuple(values_of[key])))
    return tuple(axes)


def check_values(key: str, values: Any) -> list[Any]:
    """The values of an axis as a list.

    Raises:
        InputError: not a list, empty, with repeated or with structured values, or longer than a grid may be.
    """
    if isinstance(values, _SCALARS):
        values = [values]
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        raise complaint(f"grid axis {key!r}", shown(values), "a list of values")
    values = list(itertools.islice(values, MOST_POINTS + 1))
    if len(values) > MOST_POINTS:
        expected = f"at most {MOST_POINTS:,}"
        raise complaint(f"grid axis {key!r}", f"more than {MOST_POINTS:,} values", expected)
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    if not values:
        raise complaint(f"grid axis {key!r}", "an empty list", "at least one value")
    seen: set[Any] = set()
    for value in values:
        if not isinstance(value, _SCALARS):
            raise complaint(f"grid axis {key!r}", shown(value), "single values")
        if value in seen:
            raise complaint(f"grid axis {key!r}", f"{shown(value)} twice", "each value once")
        seen.add(value)
    return values


def labels_of(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """The points of a grid in row-major order, as labels by axis key."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield {axis.key: value for axis, value in zip(axes, values, strict=True)}


def reference(axes: Sequence[Axis], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """The baseline by dimension name, completed with the first value of every axis that it leaves out.

    Raises:
        InputError: no such axis, or a value that does not lie on it.
    """
    by_name = {axis.name: axis for axis in axes if not axis.is_seed}
    by_key = {axis.key: axis.name for axis in by_name.values()}
    labels = {name: axis.values[0] for name, axis in by_name.items()}
    for key, value in baseline.items():
        name = by_key.get(key, key)
        if name not in by_name:
            raise complaint("grid.baseline", f"no axis {key!r}", among(key, by_name))
        if value not in by_name[name].values:
            raise complaint(f"grid.baseline.{key}", repr(value), among(value, by_name[name].values))
        labels[name] = value
    return labels


def seeds(axes: Sequence[Axis]) -> list[Any]:
    """The values of the axes that repeat configurations with other draws."""
    return [value for axis in axes if axis.is_seed for value in axis.values]


def flatten(axes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Axes written as nested mappings, by dotted key."""
    out: dict[str, Any] = {}
    for key, value in axes.items():
        if isinstance(value, Mapping):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


@dataclass(frozen=True)
class Grid:
    """The axes of a grid and the resolved configuration of each of its points, row by row."""

    axes: tuple[Axis, ...]
    configs: tuple[dict[str, Any], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Values along each axis."""
        return tuple(len(axis.values) for axis in self.axes)


def expand(
    config: Mapping[str, Any],
    command_axes: Mapping[str, list[Any] | None],
    groups: Groups,
    resolve: Callable[[dict[str, Any]], dict[str, Any]],
) -> Grid:
    """The grid that a composed configuration asks for.

    Args:
        config: the composed configuration, unresolved.
        command_axes: axes from the command line; they replace those of the same key, None removes one.
        groups: the options of the config groups.
        resolve: resolves interpolations.

    Raises:
        InputError: no axes, an unknown axis, or values that an axis cannot have.
    """
    written = config["grid"]["axes"] or {}
    if not isinstance(written, Mapping):
        raise complaint("grid.axes", shown(written), "a mapping from groups or keys to lists of values")
    wanted = flatten(written)
    for key, values in command_axes.items():
        if values is None:
            if wanted.pop(key, None) is None:
                raise complaint(f"argument ~grid.axes.{key}", f"no axis {key!r}", among(key, wanted))
        else:
            wanted[key] = values
    if not wanted:
        listed = ", ".join(groups.options("grid"))
        raise complaint("grid", "no axes", f"grid=NAME ({listed}) or grid.axes.KEY=[V1,V2,...]")
    base = {group: config[group] for group in SIMULATION_GROUPS}
    options: dict[str, dict[str, dict[str, Any]]] = {}
    values_of: dict[str, list[Any]] = {}
    for key in [key for key in wanted if key in SIMULATION_GROUPS]:
        options[key] = {
            str(value): groups.compose(key, str(value)) for value in check_values(key, wanted[key])
        }
    candidates = {
        group: list(options[group].values()) if group in options else [base[group]]
        for group in SIMULATION_GROUPS
    }
    for key in wanted:
        if key in options:
            values_of[key] = list(options[key])
        else:
            full = _full_key(key, candidates)
            if full in values_of:
                raise complaint(f"grid axis {key!r}", f"a second axis over {full}", "each key once")
            values_of[full] = _checked_like(full, check_values(full, wanted[key]), candidates)
    axes = make_axes(values_of)
    configs = tuple(resolve(_point(base, options, labels)) for labels in labels_of(axes))
    return Grid(axes, configs)


def canonical(config: Mapping[str, Any]) -> str:
    """A configuration as text, the same for equal configurations."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def _point(
    base: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]], labels: Mapping[str, Any]
) -> dict[str, Any]:
    config = {group: options[group][labels[group]] if group in options else base[group] for group in base}
    config = copy.deepcopy(config)
    for key, value in labels.items():
        if key not in options:
            holder = _holder(config, key)
            if holder is not None:  # an option without the key stays as it is
                holder[key.rpartition(".")[2]] = value
    return config


def _holder(config: Any, key: str) -> dict[str, Any] | None:
    """The dictionary that holds the last part of a dotted key, if the configuration has the key."""
    *above, last = key.split(".")
    for part in above:
        config = config.get(part) if isinstance(config, Mapping) else None
    return config if isinstance(config, dict) and last in config else None


def _full_key(key: str, candidates: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The dotted key that an axis means: itself, or the one key that ends so."""
    if "." in key:
        group = key.partition(".")[0]
        if group not in candidates:
            raise complaint(f"grid axis {key!r}", f"no config group {group!r}", among(group, candidates))
        configs = [{group: option} for option in candidates[group]]
        if all(_holder(config, key) is None for config in configs):
            richest = max(configs, key=lambda config: len(config[group]))
            raise InputError(f"grid axis: {unknown_key(key, richest)}")
        return key
    leaves = {
        leaf
        for group, found in candidates.items()
        for option in found
        for leaf in _leaves(option, f"{group}.")
    }
    exact = sorted(leaf for leaf in leaves if leaf.rpartition(".")[2] == key)
    near = exact or sorted(
        leaf for leaf in leaves if leaf.rpartition(".")[2] in [key + unit for unit in _UNITS]
    )
    if len(near) == 1:
        return near[0]
    if near:
        raise complaint(f"grid axis {key!r}", f"{len(near)} keys of that name", among(key, near))
    near = get_close_matches(
        key, [*SIMULATION_GROUPS, *(leaf.rpartition(".")[2] for leaf in leaves), *leaves], n=1
    )
    closest = f", closest: {near[0]}" if near else ""
    groups, keys = ", ".join(SIMULATION_GROUPS), _by_group(leaves)
    raise complaint(
        f"grid axis {key!r}",
        "neither a group nor a key",
        f"a config group ({groups}) or a key ({keys}){closest}",
    )


def _by_group(leaves: Iterable[str]) -> str:
    """Dotted keys, shortened: `cluster.{block_size, kv_blocks}`."""
    grouped = itertools.groupby(sorted(leaves), key=lambda leaf: leaf.partition(".")[0])
    return ", ".join(
        f"{group}.{{{', '.join(leaf.partition('.')[2] for leaf in own)}}}" for group, own in grouped
    )


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif key != "name":
            yield f"{prefix}{key}"


def _checked_like(
    key: str, values: list[Any], candidates: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[Any]:
    """Values of the kind that the key has in the configuration: a number stays a number."""
    group = key.partition(".")[0]
    holders = [
        holder for option in candidates[group] if (holder := _holder({group: option}, key)) is not None
    ]
    before = holders[0][key.rpartition(".")[2]]
    if isinstance(before, int | float) and not isinstance(before, bool):
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise complaint(f"grid axis {key!r}", shown(value), f"numbers, as {key}={before}")
    return values
