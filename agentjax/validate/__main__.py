"""`python -m agentjax.validate data=FOLDER|FILE.jsonl KEY=VALUE`: simulated against measured, by metric."""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from agentjax.compilation import prepare
from agentjax.config import CommandLine, run_command
from agentjax.config.build import build_cluster, build_policy
from agentjax.config.compose import plain, refuse_missing
from agentjax.config.paths import output_path
from agentjax.errors import complaint, shown
from agentjax.performance import build_performance
from agentjax.performance.estimate import estimate_kv_blocks
from agentjax.plotting import check_ending, save_figure
from agentjax.readers import read_recording
from agentjax.report import make_console
from agentjax.validate.figure import validation_figure
from agentjax.validate.in_step import in_step
from agentjax.validate.measured import Measured, read_measured
from agentjax.validate.programs import validate_programs
from agentjax.validate.programs_figure import programs_figure
from agentjax.validate.run import fit_overhead, measured_cluster, validate, with_overhead
from agentjax.validate.tables import error_table, programs_summary, programs_table, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


_OPTIONS = (
    "block_size",
    "vllm",
    "async_scheduling",
    "reserve_full_isl",
    "watermark",
    "long_prefill_token_threshold",
)
"""Keys of a cluster that may be null for played programs too: the defaults of a cluster."""


def run_validation(config: DictConfig, line: CommandLine) -> None:
    """Simulates a measured run, prints the errors and writes what was asked for."""
    begin = time.perf_counter()
    resolved = plain(config, resolve=True)
    refuse_missing(resolved)
    figure = output_path("figure", config.figure, "the name of a file, such as validation.png")
    if figure:
        check_ending(figure)
    out = output_path("out", config.out, "the name of a JSON file, such as validation.json")
    for key in ("fit_overhead", "prefixes", "in_step"):
        if not isinstance(resolved[key], bool):
            raise complaint(key, shown(resolved[key]), "true or false")
    if not isinstance(resolved["start"], str):
        raise complaint("start", shown(resolved["start"]), "text")
    if played := _recordings(resolved["data"]):
        for key in ("fit_overhead", "in_step"):
            if resolved[key]:
                raise complaint(key, "true", "false for a recording; it is of a folder of requests")
        if not any(re.match(r"[+~]*performance\b", override) for override in line.overrides):
            raise complaint("performance", "nothing", "the endpoint's, such as performance=my_server.json")
        _validate_programs(config, resolved, played, out, figure)
        return
    measured = read_measured(resolved["data"])
    performance = build_performance(resolved["performance"])
    cluster = measured_cluster(measured, performance, _limits(resolved, measured))
    if resolved["in_step"]:
        cluster = in_step(cluster, resolved["performance"])
    policy = build_policy(resolved)
    prepare(config.execution.devices)
    options = {"start": resolved["start"], "prefixes": resolved["prefixes"]}
    console = make_console()
    if resolved["fit_overhead"]:
        overhead_s = fit_overhead(measured, cluster, policy, **options)
        cluster = with_overhead(cluster, overhead_s)
        console.print(
            f"overhead_s {overhead_s:.3e} per iteration, fitted to the mean TPOT of this run, "
            "which therefore does not test it",
            highlight=False,
        )
    validation = validate(measured, cluster, policy, **options)
    console.print(error_table(validation))
    console.print(summary(validation), highlight=False)
    content = {**validation.to_json(), "fitted": resolved["fit_overhead"]}
    _write(console, content, out, validation_figure(validation) if figure else None, figure)
    console.print(f"{time.perf_counter() - begin:.1f} s in all")


def _recordings(data: Any) -> list[str]:
    """The files that `data` names; none if it names a folder."""
    files = data if isinstance(data, list) else [data]
    if not files or not all(isinstance(name, str) for name in files):
        raise complaint("data", shown(data), "a folder, a recording, or a list of recordings")
    is_folder = Path(files[0]).is_dir() or Path(files[0]).suffix not in (".json", ".jsonl", ".gz")
    return [] if len(files) == 1 and is_folder else files


def _validate_programs(
    config: DictConfig, resolved: dict[str, Any], files: list[str], out: Path | None, figure: Path | None
) -> None:
    """Simulates played programs, prints the errors and writes what was asked for."""
    begin = time.perf_counter()
    if resolved["cluster"]["max_num_seqs"] is None:
        raise complaint("cluster", "no limits", "cluster=NAME: a recording does not say what the endpoint is")
    limits = {
        name: value
        for name, value in resolved["cluster"].items()
        if value is not None or name not in _OPTIONS
    }
    cluster = build_cluster(limits, resolved["performance"])
    policy = build_policy(resolved)
    recordings = [read_recording(name) for name in files]
    prepare(config.execution.devices)
    validation = validate_programs(recordings, cluster, policy)
    console = make_console()
    console.print(programs_table(validation))
    console.print(programs_summary(validation), highlight=False)
    _write(console, validation.to_json(), out, programs_figure(validation) if figure else None, figure)
    console.print(f"{time.perf_counter() - begin:.1f} s in all")


def _write(
    console: "Console", content: dict[str, Any], out: Path | None, drawn: "Figure | None", figure: Path | None
) -> None:
    """Writes the result and the figure where they are asked for, and says where they are."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console.print(f"result {out}", highlight=False, soft_wrap=True)
    if drawn and figure:
        save_figure(drawn, figure)
        console.print(f"figure {figure}", highlight=False, soft_wrap=True)


def _limits(resolved: Mapping[str, Any], measured: Measured) -> dict[str, Any]:
    """The limits given for the cluster; KV blocks as estimated where that is asked for."""
    limits = {key: value for key, value in resolved["cluster"].items() if key not in ("hardware", "gpus")}
    if limits.get("kv_blocks") == "auto":
        settings = measured.settings
        own = {
            "block_size": settings.block_size or 16,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
        }
        given = {name: value for name, value in limits.items() if value is not None}
        limits["kv_blocks"] = estimate_kv_blocks(own | given, resolved["performance"])
    return limits


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(run_validation, "validate", arguments)


if __name__ == "__main__":
    sys.exit(main())
