"""`python -m agentjax.simulate GROUP=OPTION KEY=VALUE`: one run and its metrics."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from agentjax.compilation import prepare
from agentjax.config import CommandLine, run_command
from agentjax.config.build import build_cluster, build_policy, build_workload
from agentjax.config.compose import plain, refuse_missing
from agentjax.config.paths import output_path
from agentjax.engine.run import STATUS, LaneSpec
from agentjax.errors import complaint
from agentjax.metrics import LOAD_REGIMES
from agentjax.performance.valid import Watch
from agentjax.plotting import check_ending, jct_figure, save_figure
from agentjax.policies import FAMILIES
from agentjax.report import make_console, run_table
from agentjax.results import lane_record
from agentjax.simulate import run_dataset, run_one
from agentjax.store import save_dataset
from agentjax.workloads.pack import Workload


def run_command_line(config: DictConfig, line: CommandLine) -> None:
    """Runs the simulation of a composed configuration, prints its metrics and writes what was asked for."""
    start = time.perf_counter()
    resolved = plain(config, resolve=True)
    refuse_missing(resolved)
    out = output_path("out", config.out, "the name of a Zarr store, such as result.zarr")
    figure = output_path("figure", config.figure, "the name of a file, such as jct.png")
    if figure:
        check_ending(figure)
    if out and out.is_file():
        raise complaint(f"out={out}", "a file", "the name of a Zarr store, such as result.zarr")
    workload = build_workload(resolved["workload"])
    cluster = build_cluster(resolved["cluster"], resolved["performance"])
    policy = build_policy(resolved)
    prepare(config.execution.devices)
    lane = LaneSpec(0, cluster, policy, resolved["until_s"])
    console = make_console()
    with _progress(workload, console) as show:
        outcome = run_one(workload, lane, show)
    watch = Watch()
    watch.see(workload, cluster, outcome)
    record = lane_record(outcome, 0, workload, cluster)
    heading = _heading(resolved)
    console.print(run_table(record, heading))
    console.print(_summary(record), highlight=False)
    watch.warn()
    if out:
        save_dataset(run_dataset(outcome, workload, lane), out)
        console.print(f"result {out}", highlight=False, soft_wrap=True)
    if figure:
        save_figure(jct_figure(record["jct"], heading), figure)
        console.print(f"figure {figure}", highlight=False, soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.1f} s in all")


@contextlib.contextmanager
def _progress(workload: Workload, console: Console) -> Iterator[Callable[[float], None]]:
    """A bar of completed calls, from before anything is compiled until the run has ended."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} calls"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        calls = len(workload.gap)
        task = progress.add_task("compiling", total=calls)
        yield lambda share: progress.update(task, description="simulating", completed=round(share * calls))


def _heading(config: dict[str, Any]) -> str:
    workload = config["workload"]
    name = workload.get("generator") or Path(str(workload.get("path", "workload"))).name
    return f"{name}: " + ", ".join(str(config[family]["name"]) for family in FAMILIES)


def _summary(record: dict[str, Any]) -> str:
    parts = [
        f"{record['completed']} of {len(record['jct'])} programs completed in {record['makespan']:,.1f} s",
        f"{record['throughput']:.4g} programs/s",
        f"hit rate {100 * record['hit_rate']:.1f} %",
        f"longest time between two tokens {1e3 * record['itl_max']:,.0f} ms",
        f"{record['preemptions']} preemptions",
        f"utilization {100 * record['utilization']:.1f} %",
        f"load {record['load_regime']} (of {', '.join(LOAD_REGIMES)})",
    ]
    if record["status"]:
        parts.append(f"the run did not complete ({STATUS[record['status']]})")
    return "; ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(run_command_line, "simulate", arguments)


if __name__ == "__main__":
    sys.exit(main())
