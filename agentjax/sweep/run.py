"""Runs the points of a grid, tile by tile, each distinct configuration once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from agentjax.cluster import LIMITS, Cluster
from agentjax.config.build import chosen
from agentjax.engine import run as engine
from agentjax.performance.valid import Watch
from agentjax.policies import Policy
from agentjax.results import Record, cluster_energy, lane_record
from agentjax.sweep.tiles import Tiles, cut, fingerprint
from agentjax.workloads.pack import Workload

LANES_PER_TILE = 64
Progress = Callable[[float, int], None]
"""Called with the number of configurations finished (a fraction inside a tile) and the number of all."""


@dataclass(frozen=True)
class Finished:
    """The records of all points in grid order, and what it took to get them."""

    records: tuple[Record, ...]
    simulated: int
    wall_s: float


def run_points(
    points: Sequence[engine.LaneSpec],
    workloads: Sequence[Workload],
    tiles: Tiles | None = None,
    lanes_per_tile: int = LANES_PER_TILE,
    progress: Progress | None = None,
    run_lanes: Callable[..., Any] | None = None,
) -> Finished:
    """The results of all points.

    Raises:
        InputError: a call that never fits into a replica, or a folder that cannot be written.

    Args:
        points: the points of a grid; equal ones are simulated once.
        workloads: the workloads that the points refer to.
        tiles: where finished results are found and kept.
        lanes_per_tile: configurations computed and saved together.
        progress: called with the number of configurations finished (a fraction inside a tile) and the number
        of all.
        run_lanes: the engine.
    """
    contents = [fingerprint(workload) for workload in workloads]
    keys = [
        fingerprint(contents[point.workload], _cluster_content(point.cluster), _policy_content(point.policy))
        for point in points
    ]
    engine.refuse_unfit_lanes(workloads, points)
    records = tiles.load() if tiles else {}
    pending = {key: point for key, point in zip(keys, points, strict=True) if key not in records}
    total = len(set(keys))
    if pending and tiles:
        tiles.prepare()
    report = progress or (lambda done, total: None)
    report(total - len(pending), total)
    watch = Watch()
    for point in points:
        watch.see(workloads[point.workload], point.cluster)
    start = time.perf_counter()
    done = total - len(pending)
    for part in _parts(pending, lanes_per_tile):
        lanes = [point for _, point in part]
        outcome = (run_lanes or engine.run_lanes)(
            workloads,
            lanes + lanes[-1:] * (lane_count(len(lanes)) - len(lanes)),
            calls=True,
            progress=partial(_report_share, report, done, len(part), total),
        )
        fresh = {
            key: lane_record(outcome, row, workloads[point.workload], point.cluster)
            for row, (key, point) in enumerate(part)
        }
        for row, (_, point) in enumerate(part):
            watch.see(workloads[point.workload], point.cluster, outcome, row)
        if tiles:
            tiles.save(fresh)
        records |= fresh
        done += len(part)
        report(done, total)
    found = tuple(
        records[key] | cluster_energy(records[key], point.cluster)
        for key, point in zip(keys, points, strict=True)
    )
    watch.warn(stacklevel=3)
    return Finished(found, len(pending), time.perf_counter() - start)


def lane_count(lanes: int) -> int:
    """Lanes of a tile with at least the given number, padded so that few different numbers are compiled."""
    return next((count for count in (1, 2, 4) if lanes <= count), -(-lanes // 8) * 8)


def _parts(
    pending: Mapping[str, engine.LaneSpec], lanes_per_tile: int
) -> Iterator[Sequence[tuple[str, engine.LaneSpec]]]:
    """The lanes of each tile; those of a tile have the same kind of performance model."""
    kinds: dict[Any, list[tuple[str, engine.LaneSpec]]] = {}
    for key, point in pending.items():
        leaves, structure = jax.tree.flatten(point.cluster.performance)
        kinds.setdefault((structure, *(np.shape(leaf) for leaf in leaves)), []).append((key, point))
    for items in kinds.values():
        yield from cut(items, lanes_per_tile)


def _report_share(report: Progress, done: int, lanes: int, total: int, share: float) -> None:
    """Reports a tile that is finished by the given share."""
    report(done + share * lanes, total)


def _cluster_content(cluster: Cluster) -> dict[str, Any]:
    """What decides the results of a cluster; energy and cost are computed from them at the end."""
    return {name: getattr(cluster, name) for name in (*LIMITS, "performance")}


def _policy_content(policy: Policy) -> dict[str, Any]:
    """Names, functions and parameters of the chosen policies; indices depend on what else is registered."""
    return {
        family: [member.name, member.function, member.traits, values]
        for family, (member, values) in chosen(policy).items()
    }
