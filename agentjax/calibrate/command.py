"""Method `optax` of the command: recordings in, coefficients out."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentjax.calibrate.figure import calibration_figure
from agentjax.calibrate.fit import fit, residual_table, residuals
from agentjax.calibrate.identify import identify
from agentjax.calibrate.observations import concatenate
from agentjax.calibrate.observe import Report, observe
from agentjax.calibrate.settings import about, coefficient_path, seconds, whole
from agentjax.calibrate.tables import print_fit, print_observations
from agentjax.calibrate.write import file_content, source, stated, write_coefficients
from agentjax.config.paths import output_path
from agentjax.errors import complaint, shown
from agentjax.plotting import check_ending, save_figure
from agentjax.readers import read_recording

if TYPE_CHECKING:
    from rich.console import Console


def run_optax(resolved: Mapping[str, Any], console: "Console") -> None:
    """Fits coefficients to recordings, prints how well, and writes what was asked for.

    **Arguments:**

    - `resolved`: the keys of `conf/calibrate.yaml`.
    """
    figure = output_path("figure", resolved["figure"], "the name of a file, such as fit.png")
    if figure:
        check_ending(figure)
    out = coefficient_path(resolved["out"])
    budget = resolved["max_num_batched_tokens"]
    if budget is not None:
        whole("max_num_batched_tokens", budget, 1)
    seed = whole("seed", resolved["seed"], 0)
    overhead_s = seconds("overhead_s", resolved["overhead_s"]) or 0.0
    wakeup_s = seconds("wakeup_s", resolved["wakeup_s"])
    given = about(resolved["about"])

    paths = data_paths(resolved["data"])
    recordings = [read_recording(path) for path in paths]
    parts, reports = zip(*(observe(recording, budget) for recording in recordings), strict=True)
    found, report = concatenate(parts), merged(reports)
    print_observations(console, report)
    fitted = fit(found, report.latency_s, overhead_s, wakeup_s, seed)
    error_pct, lines = residuals(fitted.model, found)
    table = residual_table(error_pct, lines)
    identified = identify(found, fitted)
    print_fit(console, fitted, table, identified)
    described = stated(given, recordings)
    if out:
        notes = list(report.notes)
        if fitted.form.tied:
            notes.append(
                "the latency of an idle server and the time of an iteration with prompt tokens could not be "
                "told apart: the latter was taken to be that of one decode without context"
            )
        sources = [source(path, recording) for path, recording in zip(paths, recordings, strict=True)]
        write_coefficients(
            out, file_content(fitted, found, table, identified, sources, described, notes, seed)
        )
        console.print(f"coefficients {out}", highlight=False, soft_wrap=True)
    if figure:
        heading = f"{described['model']}, {described['engine']}"
        save_figure(calibration_figure(found, fitted, error_pct, lines, heading), figure)
        console.print(f"figure {figure}", highlight=False, soft_wrap=True)


def data_paths(value: Any) -> list[Path]:
    """The files that `data` names.

    Raises:
        InputError: neither a path nor a list of paths that differ.
    """
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, str) and one for one in values):
        raise complaint("data", shown(value), "a file of recorded requests, or a list of such files")
    twice = next((one for one in values if values.count(one) > 1), None)
    if twice is not None:
        raise complaint("data", f"{shown(twice)} twice", "files that differ")
    return [Path(one) for one in values]


def merged(reports: tuple[Report, ...]) -> Report:
    """What all recordings together gave and lacked."""
    total = Report()
    for report in reports:
        total.kept += report.kept
        total.left_out += report.left_out
        total.notes += report.notes
        total.latency_s += report.latency_s
    return total
