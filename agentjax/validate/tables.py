"""What the command prints of a validation: tables of errors and a line of the rest."""

import math
from typing import TYPE_CHECKING

from agentjax.cluster import Cluster
from agentjax.validate.programs import ProgramValidation
from agentjax.validate.programs_figure import STATISTIC_WORDS, WORDS
from agentjax.validate.run import Validation

if TYPE_CHECKING:
    from rich.table import Table

_METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "latency", "queue_delay": "queue delay"}


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
        for statistic, name in STATISTIC_WORDS.items():
            error = validation.errors[f"{metric}_{statistic}"]
            cells = [f"{error.measured_s * scale:.3f}", f"{error.simulated_s * scale:.3f}"]
            cells.append("-" if error.error_pct is None else f"{error.error_pct:+.2f}")
            if peer:
                stated = peer.get(f"{metric}_{statistic}")
                cells.append("" if stated is None else f"{stated:+.1f}")
            last = statistic == list(STATISTIC_WORDS)[-1]
            table.add_row(f"{words} {name} ({unit})", *cells, end_section=last)
    return table


def summary(validation: Validation) -> str:
    """One line about the requests, prefix hits, preemptions, iterations and how they were scheduled."""
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
        _scheduled(validation.cluster),
    ]
    return "; ".join(parts)


def _scheduled(cluster: Cluster) -> str:
    if cluster.slots:
        return "scheduled in slots"
    return f"scheduled as vLLM {cluster.vllm}, {'a' if cluster.async_scheduling else ''}synchronously"


def programs_table(validation: ProgramValidation) -> "Table":
    """Every statistic of played programs, measured and simulated, its error, and the repeats' spread."""
    from rich.table import Table

    table = Table(title=f"programs on {validation.about.get('url') or 'the endpoint'}", title_justify="left")
    for header in ("", "measured", "simulated", "error %", "repeats ± %"):
        table.add_column(header, justify="right" if header else "left")
    for metric, words in WORDS.items():
        unit, scale = ("ms", 1e3) if metric == "itl" else ("s", 1.0)
        for statistic, name in STATISTIC_WORDS.items():
            error = validation.errors[f"{metric}_{statistic}"]
            table.add_row(
                f"{words} {name} ({unit})",
                _digits(error.measured_s * scale, ".3f"),
                _digits(error.simulated_s * scale, ".3f"),
                _digits(error.error_pct, "+.2f"),
                "-" if error.spread_pct is None else _digits(error.spread_pct, ".2f"),
                end_section=statistic == list(STATISTIC_WORDS)[-1],
            )
    return table


def _digits(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def programs_summary(validation: ProgramValidation) -> str:
    """One line about the programs, their mean absolute error and the hit rates."""
    measured, simulated = (
        "not told" if math.isnan(rate) else f"{100 * rate:.1f} %" for rate in validation.hit_rates
    )
    repeats = len(validation.measured)
    parts = [
        f"{validation.programs} programs of {validation.calls} calls, "
        f"{repeats} {'repeat' if repeats == 1 else 'repeats'}",
        f"mean absolute error of a program's JCT {validation.program_error_pct:.1f} %",
        f"hit rate {simulated} simulated, {measured} measured",
    ]
    parts += [f"left out: {count} programs {reason}" for reason, count in validation.left_out.items()]
    return "; ".join(parts)
