"""Runs the points of a grid, each distinct configuration once, and keeps results as they come."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from agentjax.cluster import LIMITS, Cluster
from agentjax.config.build import chosen
from agentjax.engine import run as engine
from agentjax.errors import InputError
from agentjax.performance.valid import Watch
from agentjax.policies import Policy
from agentjax.results import Record, cluster_energy, lane_record
from agentjax.sweep.tiles import Tiles, fingerprint
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
    *,
    token_gaps: bool = False,
    stream_lanes: Callable[..., Any] | None = None,
) -> Finished:
    """The results of all points.

    Args:
        points: the points of a grid; equal ones are simulated once.
        workloads: the workloads that the points refer to.
        tiles: where finished results are found and kept.
        lanes_per_tile: configurations computed side by side, and saved together at most.
        progress: called with the number of configurations finished (and fractions of one) and the number of
            all.
        token_gaps: count the times between tokens too.
        stream_lanes: the engine.

    Raises:
        InputError: a call that never fits into a replica, a folder that cannot be written, or a policy whose
            answers cannot be used (all other points are finished, and saved, before).
    """
    contents = [fingerprint(workload) for workload in workloads]
    keys = [
        fingerprint(
            contents[point.workload],
            _cluster_content(point.cluster),
            _policy_content(point.policy),
            point.until_s,
            token_gaps,
        )
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
    keeper = _Keeper(tiles, lanes_per_tile)
    faults: list[InputError] = []
    for items in _kinds(pending):
        try:
            for indices, outcome in (stream_lanes or engine.stream_lanes)(
                workloads,
                [point for _, point in items],
                width=lanes_per_tile,
                gaps=token_gaps,
                progress=partial(_report_share, report, done, len(items), total),
            ):
                for row, index in enumerate(indices):
                    key, point = items[index]
                    fault = engine.fault_of(int(outcome.status[row]), point)
                    if fault is not None:
                        faults.append(fault)
                        continue
                    keeper.add(key, lane_record(outcome, row, workloads[point.workload], point.cluster))
                    watch.see(workloads[point.workload], point.cluster, outcome, row)
        finally:
            keeper.save()
        done += len(items)
        report(done, total)
    if faults:
        raise faults[0]
    records |= keeper.records
    found = tuple(
        records[key] | cluster_energy(records[key], point.cluster)
        for key, point in zip(keys, points, strict=True)
    )
    watch.warn(stacklevel=3)
    return Finished(found, len(pending), time.perf_counter() - start)


class _Keeper:
    """Finished results, saved when there are enough of them or some have waited for long."""

    LONGEST_S = 5.0

    def __init__(self, tiles: Tiles | None, most: int):
        self.tiles, self.most = tiles, most
        self.records: dict[str, Record] = {}
        self.unsaved: dict[str, Record] = {}
        self.saved_at = time.monotonic()

    def add(self, key: str, record: Record) -> None:
        """Takes a result."""
        self.records[key] = self.unsaved[key] = record
        if len(self.unsaved) >= self.most or time.monotonic() - self.saved_at > self.LONGEST_S:
            self.save()

    def save(self) -> None:
        """Saves what is not saved yet."""
        if self.tiles and self.unsaved:
            self.tiles.save(self.unsaved)
        self.unsaved = {}
        self.saved_at = time.monotonic()


def _kinds(pending: Mapping[str, engine.LaneSpec]) -> Iterable[list[tuple[str, engine.LaneSpec]]]:
    """The points by what is compiled together: the kind of performance model, and how batches are formed."""
    kinds: dict[Any, list[tuple[str, engine.LaneSpec]]] = {}
    for key, point in pending.items():
        leaves, structure = jax.tree.flatten(point.cluster.performance)
        cluster = point.cluster
        batches = (cluster.slots, cluster.async_scheduling, cluster.long_prefill_token_threshold > 0)
        kinds.setdefault((structure, *batches, *(np.shape(leaf) for leaf in leaves)), []).append((key, point))
    return kinds.values()


def _report_share(report: Progress, done: int, lanes: int, total: int, share: float) -> None:
    """Reports lanes that are finished by the given share."""
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
