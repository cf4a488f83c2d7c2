"""The figure of a validation: request by request, over time, and the errors."""

from typing import TYPE_CHECKING

import numpy as np

from agentjax.plotting import BLUE, GREEN, ORANGE
from agentjax.validate.compare import METRICS, STATISTICS
from agentjax.validate.run import Validation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY = "#777777"
_SCATTERS = {"ttft": ("TTFT", 1.0, "s"), "tpot": ("TPOT", 1e3, "ms"), "e2e": ("end-to-end latency", 1.0, "s")}
_WORDS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "latency", "queue_delay": "queue delay"}
_SHOWN = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}


def validation_figure(validation: Validation) -> "Figure":
    """Above: every request, measured against simulated. Below: throughput and load over time, errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    for place, metric in zip(axes[0], _SCATTERS, strict=True):
        _scatter(place, validation, metric)
    _throughput(axes[1, 0], validation)
    _load(axes[1, 1], validation)
    _errors(axes[1, 2], validation)
    for place in axes.flat:
        place.spines[["top", "right"]].set_visible(False)
        place.grid(color="#e3e3e3", linewidth=0.6)
        place.set_axisbelow(True)
    measured = validation.measured
    figure.suptitle(
        f"{measured.model} on {measured.hardware}, {measured.engine}, {len(measured.index)} requests: "
        f"simulated against measured, times from {validation.start}",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    return figure


def _scatter(axes: "Axes", validation: Validation, metric: str) -> None:
    words, scale, unit = _SCATTERS[metric]
    theirs = METRICS[metric](validation.measured_calls) * scale
    ours = METRICS[metric](validation.simulated_calls) * scale
    both = np.concatenate([theirs, ours])
    both = both[~np.isnan(both)]
    low, high = (float(both.min()), float(both.max())) if len(both) else (0.0, 1.0)
    logarithmic = low > 0 and high > 100 * low
    margin = 1.15 if logarithmic else 0.04 * (high - low)
    ends = (low / margin, high * margin) if logarithmic else (max(0.0, low - margin), high + margin)
    axes.plot(ends, ends, color="black", linewidth=0.9, label="equal")
    axes.plot(theirs, ours, "o", color=BLUE, markersize=3.5, alpha=0.6, markeredgewidth=0, label="request")
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    axes.set_xlabel(f"measured {words} ({unit})")
    axes.set_ylabel(f"simulated {words} ({unit})")
    off = validation.request_errors[metric]["mape_pct"]
    axes.set_title(
        words if off is None else f"{words}: request by request {off:.1f} % off", fontsize=9, loc="left"
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _throughput(axes: "Axes", validation: Validation) -> None:
    theirs, ours = validation.measured_timeline, validation.simulated_timeline
    series = validation.measured.series
    if series is not None:
        axes.plot(
            series.time_s,
            series.generation_tokens_per_s,
            ".",
            color=_GREY,
            markersize=4,
            label="logged by the engine",
        )
    axes.plot(
        theirs.time_s, theirs.generation_tokens_per_s, "-", color=ORANGE, linewidth=1.8, label="measured"
    )
    axes.plot(ours.time_s, ours.generation_tokens_per_s, "--", color=BLUE, linewidth=1.5, label="simulated")
    axes.set_xlabel("time (s)")
    axes.set_ylabel("generation throughput (tokens/s)")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"throughput: {validation.timeline_error_pct:.1f} % off on average", fontsize=9, loc="left"
    )
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _load(axes: "Axes", validation: Validation) -> None:
    theirs, ours = validation.measured_timeline, validation.simulated_timeline
    for name, measured_colour, simulated_colour in (
        ("running", ORANGE, BLUE),
        ("waiting", GREEN, "black"),
    ):
        axes.plot(
            theirs.time_s,
            getattr(theirs, name),
            "-",
            color=measured_colour,
            linewidth=1.8,
            label=f"{name}, measured",
        )
        axes.plot(
            ours.time_s,
            getattr(ours, name),
            "--",
            color=simulated_colour,
            linewidth=1.3,
            label=f"{name}, simulated",
        )
    axes.set_xlabel("time (s)")
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)
    axes.set_title("load", fontsize=9, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _errors(axes: "Axes", validation: Validation) -> None:
    peer = validation.measured.peer_error_pct
    rows = [
        f"{metric}_{statistic}"
        for metric in METRICS
        for statistic in STATISTICS
        if statistic in _SHOWN and validation.errors[f"{metric}_{statistic}"].error_pct is not None
    ]
    labels = [
        f"{_WORDS[metric]} {_SHOWN[statistic]}"
        for metric, _, statistic in (row.rpartition("_") for row in rows)
    ]
    axes.axvline(0, color="black", linewidth=0.8)
    values = [validation.errors[row].error_pct or 0.0 for row in rows]
    axes.barh(range(len(rows)), values, height=0.55, color=BLUE, label="this simulator")
    known = [(place, peer[row]) for place, row in enumerate(rows) if row in peer]
    if known:
        axes.plot(
            [value for _, value in known],
            [place for place, _ in known],
            "D",
            color=ORANGE,
            markerfacecolor="none",
            markersize=5,
            linestyle="none",
            label="LLMServingSim, as stated",
        )
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("error against measured (%)")
    axes.set_title("errors", fontsize=9, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
