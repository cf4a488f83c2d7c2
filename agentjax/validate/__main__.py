"""`python -m agentjax.validate data=FOLDER KEY=VALUE`: simulated against measured, by metric."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from agentjax.compilation import prepare
from agentjax.config import CommandLine, run_command
from agentjax.config.build import build_policy
from agentjax.config.compose import plain, refuse_missing
from agentjax.config.paths import output_path
from agentjax.errors import complaint, shown
from agentjax.performance import build_performance
from agentjax.performance.estimate import estimate_kv_blocks
from agentjax.plotting import check_ending, save_figure
from agentjax.report import make_console
from agentjax.validate.figure import validation_figure
from agentjax.validate.in_step import in_step
from agentjax.validate.measured import Measured, read_measured
from agentjax.validate.run import Validation, fit_overhead, measured_cluster, validate, with_overhead

if TYPE_CHECKING:
    from rich.table import Table

_METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "latency", "queue_delay": "queue delay"}
_STATISTICS = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}


def run_validation(config: DictConfig, line: CommandLine) -> None:
    """Simulates a measured run, prints the errors and writes what was asked for."""
    start = time.perf_counter()
    resolved = plain(config, resolve=True)
    refuse_missing(resolved)
    figure = output_path("figure", config.figure, "the name of a file, such as validation.png")
    if figure:
        check_ending(figure)
    out = output_path("out", config.out, "the name of a JSON file, such as validation.json")
    for key in ("fit_overhead", "prefixes", "in_step"):
        if not isinstance(resolved[key], bool):
            raise complaint(key, shown(resolved[key]), "true or false")
    for key in ("data", "start"):
        if not isinstance(resolved[key], str):
            raise complaint(key, shown(resolved[key]), "text")
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
    console.print(_summary(validation), highlight=False)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        content = {**validation.to_json(), "fitted": resolved["fit_overhead"]}
        Path(out).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console.print(f"result {out}", highlight=False, soft_wrap=True)
    if figure:
        save_figure(validation_figure(validation), figure)
        console.print(f"figure {figure}", highlight=False, soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.1f} s in all")


def error_table(validation: Validation) -> "Table":
    """Every statistic, measured and simulated, its error, and another simulator's where known."""
    from rich.table import Table

    measured = validation.measured
    peer = measured.peer_error_pct
    table = Table(title=f"{measured.name}, {measured.engine}", title_justify="left")
    headers = ["", "measured", "simulated", "error %", *(["LLMServingSim %"] if peer else [])]
    for header in headers:
        table.add_column(header, justify="right" if header else "left")
    for metric, words in _METRICS.items():
        unit, scale = ("ms", 1e3) if metric == "tpot" else ("s", 1.0)
        for statistic, name in _STATISTICS.items():
            error = validation.errors[f"{metric}_{statistic}"]
            cells = [f"{error.measured_s * scale:.3f}", f"{error.simulated_s * scale:.3f}"]
            cells.append("-" if error.error_pct is None else f"{error.error_pct:+.2f}")
            if peer:
                stated = peer.get(f"{metric}_{statistic}")
                cells.append("" if stated is None else f"{stated:+.1f}")
            last = statistic == list(_STATISTICS)[-1]
            table.add_row(f"{words} {name} ({unit})", *cells, end_section=last)
    return table


def _limits(resolved: Mapping[str, Any], measured: Measured) -> dict[str, Any]:
    """The limits given for the cluster; KV blocks as estimated where that is asked for."""
    limits = dict(resolved["cluster"])
    if limits.get("kv_blocks") == "auto":
        settings = measured.settings
        own = {
            "block_size": 16,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
        }
        given = {name: value for name, value in limits.items() if value is not None}
        limits["kv_blocks"] = estimate_kv_blocks(own | given, resolved["performance"])
    return limits


def _summary(validation: Validation) -> str:
    absolute = [
        f"{_METRICS[metric]} {values['mape_pct']:.1f} %"
        for metric, values in validation.request_errors.items()
        if values["mape_pct"] is not None
    ]
    prompt = validation.prompt_tokens
    parts = [
        f"mean absolute error of a request: {', '.join(absolute)}",
        f"generation throughput over time {validation.timeline_error_pct:.1f} %",
        f"prefix hits {100 * validation.hit_tokens / prompt:.2f} % of {prompt:,} prompt tokens "
        f"(recorded matches {100 * validation.recorded_hit_tokens / prompt:.2f} %)",
        f"{validation.preemptions} preemptions",
        f"{validation.evicted_blocks} blocks evicted",
        f"{validation.iterations:,} iterations",
    ]
    return "; ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(run_validation, "validate", arguments)


if __name__ == "__main__":
    sys.exit(main())
