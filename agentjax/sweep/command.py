"""`python -m agentjax.sweep`: a grid from the configuration to a cube, a table and a figure."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentjax.compilation import prepare
from agentjax.config import CommandLine
from agentjax.config.build import build_cluster, build_policy, build_workload
from agentjax.config.compose import SIMULATION_GROUPS, Groups, plain, refuse_missing
from agentjax.config.paths import output_path
from agentjax.engine.run import LaneSpec
from agentjax.errors import complaint, shown
from agentjax.plotting import change_figure, check_ending, save_figure
from agentjax.policies import FAMILIES
from agentjax.report import check_published, level_sentence, make_console, policy_table
from agentjax.store import open_dataset, save_dataset
from agentjax.sweep.cube import build_cube
from agentjax.sweep.grid import Grid, canonical, expand, flatten, reference, seeds
from agentjax.sweep.run import Finished, run_points
from agentjax.sweep.tiles import Tiles
from agentjax.version import package_version
from agentjax.workloads.pack import Workload

if TYPE_CHECKING:
    import xarray as xr

NOT_SIMULATED = ("out", "figure", "execution")
"""Root keys that say where and how a grid runs; no result depends on them."""


def run_grid(config: DictConfig, line: CommandLine) -> None:
    """Runs the grid of a composed configuration and writes its outputs."""
    start = time.perf_counter()
    raw = plain(config)
    grid = expand(raw, line.axes, Groups(line.overrides), _resolved(config))
    _refuse_axes(line.overrides, grid)
    baseline = reference(grid.axes, _baseline(config, line, grid))
    check_published(_mapping(config, "published"))
    published = _published(config, line, grid)
    lanes = config.execution.lanes_per_tile
    points, workloads = _build(grid, raw.get("until_s"))
    folder = output_path("out", config.out, "a folder") or Path("outputs") / _name(config, grid)
    if folder.exists() and not folder.is_dir():
        raise complaint(f"out={folder}", "a file", "a folder")
    picture = _picture(config, folder)
    prepare(config.execution.devices)
    console = make_console()
    attrs = _attributes(raw, grid, baseline, published, _title(grid, points))
    finished = _run(points, workloads, folder, lanes, bool(config.execution.token_gaps), console)
    path = folder / "cube.zarr"
    cube = build_cube(grid.axes, finished.records, attrs)
    _report(cube, console)
    is_new = _save(cube, path)
    console.print(f"cube   {path}", highlight=False, soft_wrap=True)
    if picture is not None:
        _figure(cube, picture, is_new)
        console.print(f"figure {picture}", highlight=False, soft_wrap=True)
    wall = time.perf_counter() - start
    if finished.simulated:
        each = f", {finished.wall_s / finished.simulated:.3g} s each"
        console.print(
            f"{finished.simulated} of {len(points)} configurations simulated "
            f"in {finished.wall_s:.1f} s{each}; {wall:.1f} s in all"
        )
    else:
        console.print(f"all {len(points)} configurations were finished before; {wall:.1f} s in all")


def _resolved(config: DictConfig) -> Any:
    def resolve(point: dict[str, Any]) -> dict[str, Any]:
        if "${" not in canonical(point):
            refuse_missing(point)
            return point
        whole = OmegaConf.create(plain(config) | point)
        return {group: plain(whole[group], resolve=True) for group in point}

    return resolve


def _mapping(config: DictConfig, key: str) -> dict[str, Any]:
    value = plain(config.grid, resolve=True).get(key) or {}
    if not isinstance(value, dict):
        raise complaint(f"grid.{key}", shown(value), "a mapping")
    return value


def _refuse_axes(overrides: list[str], grid: Grid) -> None:
    """Refuses a single value for a key that the grid has an axis for, and seeds that draw nothing."""
    for item in overrides:
        key, _, value = item.partition("=")
        if "." in key and key in (axis.key for axis in grid.axes):
            raise complaint(f"argument {item!r}", "one value for an axis", f"grid.axes.{key}=[{value}]")
    has_seeds = any(axis.key == "workload.seed" and len(axis.values) > 1 for axis in grid.axes)
    files = [config["workload"] for config in grid.configs if "path" in config["workload"]]
    if has_seeds and any(workload.get("rate") is None for workload in files):
        found = "a file with arrivals of its own, the same for every seed"
        raise complaint("grid axis 'workload.seed'", found, "workload.rate=R, to draw arrivals, or no seeds")


def _baseline(config: DictConfig, line: CommandLine, grid: Grid) -> dict[str, Any]:
    """The labels that changes are measured against.

    Those of a grid file count only as far as they lie on axes that the command line changes.
    """
    labels = _mapping(config, "baseline")
    if any(item.lstrip("+~").startswith("grid.baseline") for item in line.overrides):
        return labels
    kept: dict[str, Any] = {}
    for key, value in labels.items():
        axis = next((axis for axis in grid.axes if key in (axis.name, axis.key)), None)
        is_changed = (axis.key if axis else key) in line.axes
        if not is_changed or (axis is not None and value in axis.values):
            kept[key] = value
    return kept


def _published(config: DictConfig, line: CommandLine, grid: Grid) -> dict[str, Any]:
    """The published figures; none where the command line simulates anything else than the grid file."""
    written = flatten(plain(config.grid)["axes"] or {})
    others = [axis.key for axis in grid.axes if axis.key not in written and not axis.is_seed]
    keys = [item.lstrip("+~").partition("=")[0] for item in line.overrides]
    others += [key for key in keys if key.partition(".")[0] in SIMULATION_GROUPS]
    return {} if others else _mapping(config, "published")


def _picture(config: DictConfig, folder: Path) -> Path | None:
    """Where the figure goes: a file that is named, else one beside the cube."""
    if config.figure is True:
        return folder / "figure.png"
    path = output_path("figure", config.figure, "true, false or the name of a file")
    if path:
        check_ending(path)
    return path


def _name(config: DictConfig, grid: Grid) -> str:
    return config.grid.name or "_x_".join(axis.name for axis in grid.axes)


def _build(grid: Grid, until_s: float | None) -> tuple[list[LaneSpec], list[Workload]]:
    """The objects of every point; equal parts of configurations are built once."""
    built: dict[str, Any] = {}
    workloads: list[Workload] = []

    def once(kind: str, build: Any, *configs: Mapping[str, Any]) -> Any:
        key = f"{kind} {canonical({str(index): config for index, config in enumerate(configs)})}"
        if key not in built:
            built[key] = build(*configs)
        return built[key]

    def add_workload(config: Mapping[str, Any]) -> int:
        workloads.append(build_workload(config))
        return len(workloads) - 1

    points = []
    for config in grid.configs:
        policy = {family: config[family] for family in FAMILIES}
        points.append(
            LaneSpec(
                once("workload", add_workload, config["workload"]),
                once("cluster", build_cluster, config["cluster"], config["performance"]),
                once("policy", build_policy, policy),
                until_s,
            )
        )
    return points, workloads


def _attributes(
    raw: Mapping[str, Any],
    grid: Grid,
    baseline: Mapping[str, Any],
    published: Mapping[str, Any],
    title: str,
) -> dict[str, Any]:
    config = {key: value for key, value in raw.items() if key not in NOT_SIMULATED} | grid.configs[0]
    config["grid"] = config["grid"] | {
        "axes": {axis.key: list(axis.values) for axis in grid.axes},
        "baseline": dict(baseline),
        "published": dict(published),
    }
    return {
        "version": package_version(),
        "title": title,
        "config": OmegaConf.to_yaml(config),
        "seeds": seeds(grid.axes),
        "baseline": json.dumps(dict(baseline)),
        "published": json.dumps(dict(published)),
    }


def _title(grid: Grid, points: list[LaneSpec]) -> str:
    """Workload, rate and pool, as far as they are the same everywhere in the grid."""

    def common(values: Iterable[Any]) -> Any:
        found = set(values)
        return found.pop() if len(found) == 1 else None

    workloads = [config["workload"] for config in grid.configs]
    name = common(config.get("generator") or Path(str(config.get("path", ""))).name for config in workloads)
    programs = common(config.get("programs") for config in workloads)
    rate = common(config.get("rate") for config in workloads)
    replicas = common(point.cluster.replicas for point in points)
    pool = common(point.cluster.kv_blocks * point.cluster.block_size for point in points)
    parts = [name] if name else []
    parts += [f"{programs} programs"] if programs else []
    parts += [f"{rate:g} programs/s"] if rate else []
    parts += [f"{replicas} replica{'s' if replicas > 1 else ''}"] if replicas else []
    parts += [f"{pool:,} KV tokens{' each' if replicas != 1 else ''}"] if pool else []
    return ", ".join(parts)


def _run(
    points: list[LaneSpec],
    workloads: list[Workload],
    folder: Path,
    lanes: int,
    token_gaps: bool,
    console: Console,
) -> Finished:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[whole]}/{task.total:.0f} configurations"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )
    progress = Progress(*columns, console=console, transient=True, speed_estimate_period=600)
    task = progress.add_task("compiling", total=len(points), whole=0)

    def show(done: float, total: int) -> None:
        if progress.live.is_started:
            progress.update(task, description="simulating")
        elif done < total:
            progress.start()
        progress.update(task, completed=done, total=total, whole=int(done))

    try:
        return run_points(points, workloads, Tiles(folder / "tiles"), lanes, show, token_gaps=token_gaps)
    except KeyboardInterrupt:
        console.print(
            f"finished tiles are kept in {folder / 'tiles'}: the same command resumes", highlight=False
        )
        raise
    finally:
        if progress.live.is_started:
            progress.stop()


def _save(cube: "xr.Dataset", path: Path) -> bool:
    """Writes the cube where it is not there yet; whether it was written."""
    if (path / "zarr.json").is_file():
        try:
            if open_dataset(path).identical(cube):
                return False
        except (OSError, ValueError, KeyError):  # not a store that can be read: replaced
            pass
    return save_dataset(cube, path)


def _report(cube: "xr.Dataset", console: Console) -> None:
    console.print(policy_table(cube))
    sentence = level_sentence(cube)
    if sentence:
        console.print(sentence, highlight=False)
    failed = int((cube.status != 0).sum())
    if failed:
        console.print(
            f"[bold red]{failed} configurations did not complete[/]: "
            "their metrics cover only what completed, see the variable status"
        )


def _figure(cube: "xr.Dataset", path: Path, is_new: bool) -> None:
    if not is_new and path.is_file():
        return
    save_figure(change_figure(cube), path)
