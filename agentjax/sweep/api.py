"""The Python function behind grids: objects in, dataset out."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import equinox as eqx
import numpy as np

from agentjax.cluster import Cluster
from agentjax.config.build import chosen
from agentjax.engine.run import LaneSpec
from agentjax.errors import among, complaint
from agentjax.performance.base import MOST_S
from agentjax.policies import FAMILIES, Policy
from agentjax.policies.base import Member
from agentjax.store import save_dataset
from agentjax.sweep.cube import build_cube
from agentjax.sweep.grid import check_values, labels_of, make_axes, reference, seeds
from agentjax.sweep.run import LANES_PER_TILE, run_points
from agentjax.sweep.tiles import Tiles
from agentjax.version import package_version
from agentjax.workloads import Program
from agentjax.workloads.pack import Workload, pack

if TYPE_CHECKING:
    import xarray as xr

_OBJECTS = ("workload", "cluster", "performance")


def sweep(
    workload: Workload | Sequence[Program] | Callable[..., Any],
    cluster: Cluster,
    policy: Policy,
    *,
    grid: Mapping[str, Any],
    baseline: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    until_s: float | None = None,
    token_gaps: bool = False,
    lanes_per_tile: int = LANES_PER_TILE,
    progress: Callable[[float, int], None] | None = None,
    stream_lanes: Callable[..., Any] | None = None,
) -> "xr.Dataset":
    """Simulates every combination of the values of a grid.

    Args:
        workload: programs, a packed workload, or a function that draws programs, for example
            `functools.partial(agentjax.workloads.swebench, rate=0.02)`; axes over its arguments, such as
            `seed`, need the function.
        cluster: the cluster, where no axis varies it.
        policy: the policy, where no axis varies it.
        grid: axes in order. A key is `retention`, `scheduling`, `routing` or `admission` (values: names); a
            parameter of one of these (`retention.tau_s`), a field of the cluster (`cluster.kv_blocks`), a
            coefficient of its performance model (`performance.c0_ns`, ns) or an argument of the workload
            (`workload.seed`), where the last part alone will do if it is unambiguous; or `workload`,
            `cluster` or `performance` with a mapping from labels to objects.
        baseline: labels that reports measure changes against; the first value of every axis where absent.
        out: folder for `cube.zarr` and the finished tiles, from which an interrupted call resumes;
            None keeps all in memory.
        until_s: horizon of every run: nothing later than this happens (s); None: to the end.
        token_gaps: count the times between tokens too (`itl_p99`, ...).
        lanes_per_tile: configurations computed side by side, and saved together at most.
        progress: called with the number of configurations finished and of all.
        stream_lanes: the engine, for tests.

    Returns:
        One dimension per axis, with its values as labels; one variable per metric, units in the attributes.
        Where an axis does not apply to a configuration (`tau_s` under `lru`), the values along it are equal.

    Raises:
        InputError: an axis or a value that does not exist, before anything runs.
    """
    if isinstance(lanes_per_tile, bool) or not isinstance(lanes_per_tile, int) or lanes_per_tile < 1:
        raise complaint("lanes_per_tile", repr(lanes_per_tile), "a whole number >= 1")
    subject = _Subject(workload, cluster, policy, grid, until_s)
    axes = make_axes(subject.values_of)
    labels = reference(axes, baseline or {})
    points = [subject.point(labels) for labels in labels_of(axes)]
    folder = Path(out) if out is not None else None
    finished = run_points(
        points,
        subject.packed,
        Tiles(folder / "tiles") if folder else None,
        lanes_per_tile,
        progress,
        token_gaps=token_gaps,
        stream_lanes=stream_lanes,
    )
    attrs = {"version": package_version(), "seeds": seeds(axes), "baseline": json.dumps(labels)}
    cube = build_cube(axes, finished.records, attrs)
    if folder:
        save_dataset(cube, folder / "cube.zarr")
    return cube


class _Subject:
    """What a grid varies, and what is left when labels are chosen."""

    def __init__(
        self,
        workload: Any,
        cluster: Cluster,
        policy: Policy,
        grid: Mapping[str, Any],
        until_s: float | None,
    ):
        self._until_s = until_s
        self._base = {"workload": workload, "cluster": cluster, "policy": policy}
        self._objects: dict[str, dict[str, Any]] = {}
        self._families: dict[str, list[str]] = {}
        self.packed: list[Workload] = []
        self._packed_index: dict[str, int] = {}
        if not grid:
            raise complaint("grid", "no axes", "at least one, such as {'retention': ['lru', 'ttl']}")
        for key, values in grid.items():
            if key in _OBJECTS:
                if not isinstance(values, Mapping) or not values:
                    raise complaint(
                        f"grid axis {key!r}", type(values).__name__, "a mapping from labels to objects"
                    )
                self._objects[key] = dict(values)
            elif key in FAMILIES:
                self._families[key] = [str(value) for value in check_values(key, values)]
                for name in self._families[key]:
                    _member(key, name)
        self.values_of: dict[str, Sequence[Any]] = {}
        for key, values in grid.items():
            if key in self._objects:
                self.values_of[key] = list(self._objects[key])
            elif key in self._families:
                self.values_of[key] = self._families[key]
            else:
                self.values_of[self._full_key(key)] = check_values(key, values)

    def point(self, labels: Mapping[str, Any]) -> LaneSpec:
        """The objects at one point of the grid."""
        cluster = (
            self._objects["cluster"][labels["cluster"]] if "cluster" in labels else self._base["cluster"]
        )
        performance = cluster.performance
        if "performance" in labels:
            performance = self._objects["performance"][labels["performance"]]
        performance = _replaced(performance, _under("performance", labels))
        cluster = _replaced(cluster, {**_under("cluster", labels), "performance": performance})
        return LaneSpec(self._workload(labels), cluster, self._policy(labels), self._until_s)

    def _policy(self, labels: Mapping[str, Any]) -> Policy:
        names: dict[str, str] = {}
        parameters: dict[str, dict[str, float]] = {}
        for family, (own, values) in chosen(self._base["policy"]).items():
            member = _member(family, labels.get(family, own.name))
            values = (values if member is own else {}) | _under(family, labels)
            names[family] = member.name
            parameters[family] = {key: values[key] for key, _ in member.parameters if key in values}
        return Policy(**names, parameters=parameters)

    def _workload(self, labels: Mapping[str, Any]) -> int:
        arguments = _under("workload", labels)
        key = json.dumps([labels.get("workload"), arguments], sort_keys=True)
        if key not in self._packed_index:
            source = (
                self._objects["workload"][labels["workload"]]
                if "workload" in labels
                else self._base["workload"]
            )
            self._packed_index[key] = len(self.packed)
            self.packed.append(_packed(source, arguments))
        return self._packed_index[key]

    def _full_key(self, key: str) -> str:
        known = self._known_keys()
        if "." in key:
            if key in known:
                return key
        else:
            exact = [full for full in known if full.partition(".")[2] == key]
            near = exact or [full for full in known if full.partition(".")[2].startswith(key + "_")]
            if len(near) == 1:
                return near[0]
            if near:
                raise complaint(f"grid axis {key!r}", f"{len(near)} keys of that name", among(key, near))
        if key.rpartition(".")[2] == "seed":
            raise complaint(
                f"grid axis {key!r}",
                "a workload that is drawn already",
                "a function of the seed as the workload",
            )
        raise complaint(f"grid axis {key!r}", "no such key", among(key, [*FAMILIES, *_OBJECTS, *known]))

    def _known_keys(self) -> list[str]:
        known = []
        for family, (own, _) in chosen(self._base["policy"]).items():
            for name in self._families.get(family, [own.name]):
                known += [f"{family}.{key}" for key, _ in _member(family, name).parameters]
        cluster = next(iter(self._objects.get("cluster", {}).values()), self._base["cluster"])
        performance = next(iter(self._objects.get("performance", {}).values()), cluster.performance)
        known += [f"cluster.{name}" for name in _fields(cluster) if name not in ("performance", "hardware")]
        known += [f"performance.{name}" for name in _fields(performance)]
        source = next(iter(self._objects.get("workload", {}).values()), self._base["workload"])
        if callable(source):
            known += [f"workload.{name}" for name in inspect.signature(source).parameters]
        return list(dict.fromkeys(known))


def _member(family: str, name: str) -> Member:
    members = FAMILIES[family].members
    if name not in members:
        raise complaint(family, repr(name), among(name, members))
    return members[name]


def _under(group: str, labels: Mapping[str, Any]) -> dict[str, Any]:
    """Labels of the keys below a group, by the rest of the key."""
    return {key.partition(".")[2]: value for key, value in labels.items() if key.startswith(group + ".")}


def _fields(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if field.init]


def _replaced(value: Any, changes: Mapping[str, Any]) -> Any:
    if not changes:
        return value
    if isinstance(value, eqx.Module):  # a performance model: its numbers are leaves
        for name, number in changes.items():
            fine = isinstance(number, int | float) and not isinstance(number, bool)
            if not fine or not 0 <= number <= MOST_S * 1e9:
                raise complaint(f"performance.{name}", repr(number), f"a number from 0 to {MOST_S * 1e9:g}")
        numbers = [np.asarray(number, np.float64) for number in changes.values()]
        return eqx.tree_at(lambda model: [getattr(model, name) for name in changes], value, numbers)
    return dataclasses.replace(value, **changes)


def _packed(source: Any, arguments: Mapping[str, Any]) -> Workload:
    if callable(source):
        source = source(**arguments)
    if isinstance(source, Workload):
        return source
    if not isinstance(source, Iterable):
        raise complaint(
            "workload",
            type(source).__name__,
            "programs, a packed workload or a function that returns one of them",
        )
    return pack(cast("Sequence[Program]", list(source)))
