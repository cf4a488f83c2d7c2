"""What a calibration prints."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentjax.calibrate.fit import Fit
from agentjax.calibrate.identify import Identification
from agentjax.calibrate.observations import KINDS
from agentjax.calibrate.observe import Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_PER = {
    "c0_s": "iteration",
    "c_tok_s": "token computed",
    "c_seq_s": "scheduled call",
    "c_kv_s": "token of context of the scheduled calls",
    "c_prefill_s": "token² of prefill work",
    "c_mixed_s": "token of context of decodes beside a prompt",
    "overhead_s": "iteration (given, not fitted)",
    "wakeup_s": "iteration that starts on an idle server",
    "decode_s": "step of so many decodes without context",
    "decode_context_s": "token of their mean context",
    "prefill_s": "iteration with prompt tokens",
    "prefill_tok_s": "prompt token computed",
    "prefill_work_s": "token² of prefill work",
    "short_prefill_work_s": "token² of prefill work of fewer tokens than {short_prefill_tokens:.0f}",
    "prefill_context_s": "token of context before a prompt chunk",
    "shared_s": "iteration with both, less",
}


def print_observations(console: "Console", report: Report) -> None:
    """How many observations there are, and what was left out."""
    _say(console, f"observations: {', '.join(f'{report.kept[kind]:,} {kind}' for kind in KINDS)}")
    for reason, count in report.left_out.items():
        if count:
            _say(console, f"  left out: {count:,} {reason}")
    for note in report.notes:
        _say(console, f"  {note}")


def print_fit(
    console: "Console",
    fitted: Fit,
    residuals: Mapping[str, Mapping[str, float]],
    identified: Identification,
) -> None:
    """Ladder, coefficients, residuals and what is not determined, one after the other."""
    console.print(ladder_table(fitted))
    console.print(coefficient_table(fitted))
    console.print(residual_rows(residuals))
    if not identified.undetermined:
        _say(console, "the measurements determine every coefficient")
    for one in identified.undetermined:
        _say(console, f"not determined: {one.sentence}")
    for suggestion in identified.suggestions:
        _say(console, f"  would help most: bench {suggestion}")


def ladder_table(fitted: Fit) -> "Table":
    """The models compared, by their mean absolute error."""
    from rich.table import Table

    table = Table(
        title="models, mean absolute error in per cent; "
        f"held out in turn: {fitted.held_out_units} prompts and periods of decoding",
        title_justify="left",
    )
    table.add_column("model")
    for header in ("form", "coefficients", "fitted to", "held out", "± to the best", ""):
        table.add_column(header, justify="right")
    for index, rung in enumerate(fitted.rungs):
        table.add_row(
            rung.form.terms,
            rung.form.form,
            str(len(rung.form.names)),
            f"{rung.error_pct:.2f}",
            f"{rung.held_out_pct:.2f}",
            f"{rung.standard_error_pct:.2f}",
            "chosen" if index == fitted.chosen else "",
        )
    return table


def coefficient_table(fitted: Fit) -> "Table":
    """The chosen model's coefficients with their 95 % intervals."""
    from rich.table import Table

    table = Table(title=f"coefficients ({fitted.form.form})", title_justify="left")
    table.add_column("coefficient")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("per")
    knots = fitted.coefficients.get("knots", [])
    for name, value in fitted.coefficients.items():
        if name in ("knots", "short_prefill_tokens"):
            continue
        values = value if isinstance(value, list) else [value]
        lows = fitted.low.get(name, value)
        highs = fitted.high.get(name, value)
        for index, one in enumerate(values):
            low, high = (bound[index] if isinstance(bound, list) else bound for bound in (lows, highs))
            label = f"{name}, {knots[index]:.0f}" if isinstance(value, list) else name
            interval = f"{_time(low)} to {_time(high)}" if high > 0 and name in fitted.low else ""
            per = _PER[name].format(**fitted.coefficients) if index == 0 else ""
            table.add_row(label, _time(one), interval, per)
    return table


def residual_rows(residuals: Mapping[str, Mapping[str, float]]) -> "Table":
    """Error of the fitted against the measured time."""
    from rich.table import Table

    table = Table(title="fitted against measured, per cent; positive: too slow", title_justify="left")
    for header in ("", "observations", "median", "10 %", "90 %", "worst"):
        table.add_column(header, justify="right" if header else "left")
    for line, row in residuals.items():
        numbers = [f"{row[key]:+.1f}" for key in ("median_pct", "p10_pct", "p90_pct", "worst_pct")]
        table.add_row(line, f"{row['points']:,}", *numbers)
    return table


def _say(console: "Console", text: str) -> None:
    console.print(text, highlight=False, markup=False)


def _time(seconds: Any) -> str:
    """Four digits in the unit that suits."""
    if not seconds:
        return "0"
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if seconds >= scale), (1e-9, "ns"))
    return f"{seconds / scale:.4g} {unit}"
