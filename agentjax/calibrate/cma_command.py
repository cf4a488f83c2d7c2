"""Method `cma_es` of the command: a recording in, parameters of the simulator out."""

import math
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentjax.calibrate.cma import CmaFit, Progress, fit_cma
from agentjax.calibrate.cma_write import METRICS, file_content
from agentjax.calibrate.parameters import choose_parameters
from agentjax.calibrate.replayed import Replayed, replayed
from agentjax.calibrate.settings import about, coefficient_path, whole
from agentjax.calibrate.write import source, stated, write_coefficients
from agentjax.config.build import build_cluster, build_policy
from agentjax.errors import complaint, shown
from agentjax.performance.load import read
from agentjax.readers import read_recording
from agentjax.workloads.recorded import Recorded, recorded_programs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table


def run_cma(resolved: Mapping[str, Any], console: "Console") -> None:
    """Fits parameters to a recorded schedule, prints how well, and writes the coefficients if asked to.

    Args:
        resolved: the keys of `conf/calibrate.yaml`.
        console: where to print.
    """
    out = coefficient_path(resolved["out"])
    if resolved.get("figure"):
        raise complaint("figure", shown(resolved["figure"]), "null: method=cma_es draws none")
    for group, example in (("performance", "my_server.json"), ("cluster", "llama_cpp")):
        if not resolved.get(group):
            raise complaint(group, "nothing", f"what the search starts from, such as {group}={example}")
    settings = {
        key: whole(key, resolved[key], least)
        for key, least in (("generations", 1), ("population", 4), ("seed", 0))
    }
    share = resolved["hold_out"]
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise complaint("hold_out", shown(share), "a share from 0 to below 1")
    data = resolved["data"]
    if not isinstance(data, str):
        raise complaint("data", shown(data), "one file of recorded requests or programs")
    given = about(resolved["about"])
    base = _base(resolved["performance"], out)
    cluster = build_cluster(resolved["cluster"], resolved["performance"])
    recording = read_recording(data)
    found = recorded_programs(recording, warmups=True)
    targets = replayed(found, share, settings["seed"])
    parameters = choose_parameters(resolved["parameters"], resolved["bounds"], cluster, targets)
    console.print(_load(found, targets), highlight=False)
    with _bar(console, settings["generations"]) as progress:
        fit = fit_cma(targets, cluster, build_policy(resolved), parameters, progress=progress, **settings)
    console.print(parameter_table(fit))
    console.print(error_table(fit))
    console.print(_summary(fit), highlight=False)
    worse = [METRICS[metric] for metric, errors in fit.errors_pct.items() if errors[3] > errors[2]]
    if worse:
        console.print(
            f"held out, the error of the {' and the '.join(worse)} has grown: too many parameters for what "
            "was recorded, or too few programs to tell",
            highlight=False,
        )
    limits = {name: value for name, value in fit.values.items() if not name.endswith("_s")}
    if limits:
        overrides = " ".join(f"cluster.{name}={value:.0f}" for name, value in limits.items())
        console.print(f"limits {overrides}", highlight=False, soft_wrap=True)
    if out:
        described = stated(given, [recording], base)
        sources = [source(Path(data), recording)]
        write_coefficients(out, file_content(fit, base, sources, described, settings["seed"]))
        console.print(f"coefficients {out}", highlight=False, soft_wrap=True)


def parameter_table(fit: CmaFit) -> "Table":
    """Each parameter before and after, and what the recording says about it."""
    from rich.table import Table

    table = Table(title="parameters", title_justify="left")
    for header in ("", "start", "fitted", "by the recording"):
        table.add_column(header, justify="right" if header in ("start", "fitted") else "left")
    for parameter, told in zip(fit.parameters, fit.determined, strict=True):
        table.add_row(parameter.name, f"{parameter.start:.4g}", f"{told.value:.4g}", told.words)
    return table


def error_table(fit: CmaFit) -> "Table":
    """Mean absolute errors before and after, in training and held out."""
    from rich.table import Table

    table = Table(title="mean absolute error, per cent", title_justify="left")
    for header in ("", "before", "after", "before, held out", "after, held out"):
        table.add_column(header, justify="right" if header else "left")
    for metric, errors in fit.errors_pct.items():
        if not all(math.isnan(error) for error in errors):
            cells = ["-" if math.isnan(error) else f"{error:.2f}" for error in errors]
            table.add_row(METRICS[metric], *cells)
    return table


def _load(found: Recorded, targets: Replayed) -> str:
    calls = len(targets.calls)
    held = len(set(targets.unit[targets.held_out].tolist()))
    parts = [f"{len(found.programs) - len(found.warmups):,} programs of {calls:,} calls"]
    if found.warmups:
        parts.append(f"{len(found.warmups):,} more to warm up")
    parts.append(f"{held:,} held out" if held else "none held out")
    parts += [f"{count:,} left out, {reason}" for reason, count in found.reasons.items()]
    return "; ".join(parts)


def _summary(fit: CmaFit) -> str:
    return (
        f"typical error {100 * fit.loss_before:.2f} % before, {100 * fit.loss:.2f} % after "
        f"{len(fit.history)} generations, {fit.simulated:,} simulated runs"
    )


@contextmanager
def _bar(console: "Console", generations: int) -> "Iterator[Progress]":
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} generations"),
        TextColumn("typical error {task.fields[error]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=generations, error="-")

        def show(what: str, done: float, loss: float) -> None:
            error = f"{100 * loss:.2f} %" if math.isfinite(loss) else "-"
            bar.update(task, description=what, completed=done, error=error)

        yield show


def _base(performance: Mapping[str, Any], out: Path | None) -> dict[str, Any]:
    """The file that the search starts from; empty where there is none."""
    if isinstance(performance.get("coefficients"), str):
        return read(performance["coefficients"]).model_dump(mode="json", exclude_unset=True)
    if out and "c0_s" not in performance:
        raise complaint(
            f"out={out}",
            "a performance model without coefficients",
            "performance=FILE.json or the affine one",
        )
    return {}
