"""The figure of played programs: each program's job completion time, the times between tokens, the errors."""

from typing import TYPE_CHECKING

import numpy as np

from agentjax.plotting import BLUE, GREY, ORANGE
from agentjax.validate.programs import METRICS, STATISTICS, ProgramValidation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORDS = {"jct": "JCT", "ttft": "TTFT", "itl": "ITL", "e2e": "latency"}
STATISTIC_WORDS = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}


def programs_figure(validation: ProgramValidation) -> "Figure":
    """Left: job completion times, measured against simulated. Middle: times between tokens. Right: errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    completion, tokens, errors = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1, 1, 1.15]})
    _completion(completion, validation)
    _tokens(tokens, validation)
    _errors(errors, validation)
    for axes in (completion, tokens, errors):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e3e3e3", linewidth=0.6)
        axes.set_axisbelow(True)
    repeats = len(validation.measured)
    figure.suptitle(
        f"{validation.about.get('model') or 'endpoint'}: {validation.programs} programs of "
        f"{validation.calls} calls, {repeats} {'repeat' if repeats == 1 else 'repeats'}, "
        "simulated against measured",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    return figure


def _completion(axes: "Axes", validation: ProgramValidation) -> None:
    theirs = np.stack([played.jct_s for played in validation.measured])
    ours = np.stack([played.jct_s for played in validation.simulated])
    high = 1.05 * float(max(theirs.max(), ours.max()))
    axes.plot([0, high], [0, high], color="black", linewidth=0.9, label="equal")
    axes.plot(theirs.ravel(), ours.ravel(), "o", color=BLUE, markersize=4, alpha=0.6, markeredgewidth=0)
    axes.plot(
        theirs.mean(), ours.mean(), "D", color=ORANGE, markersize=8, markerfacecolor="none", label="mean"
    )
    axes.set_xlim(0, high)
    axes.set_ylim(0, high)
    axes.set_aspect("equal")
    axes.set_xlabel("measured JCT (s)")
    axes.set_ylabel("simulated JCT (s)")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _tokens(axes: "Axes", validation: ProgramValidation) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    both = (*validation.measured, *validation.simulated)
    all_gaps = np.concatenate([played.itl_s for played in both]) * 1e3
    for side, color, style, words in (
        (validation.measured, BLUE, "-", "measured"),
        (validation.simulated, ORANGE, "--", "simulated"),
    ):
        gaps = np.sort(np.concatenate([played.itl_s for played in side])) * 1e3
        if len(gaps):
            shares = np.arange(1, len(gaps) + 1) / len(gaps)
            axes.step(gaps, shares, where="post", color=color, linestyle=style, label=words)
    low, high = np.quantile(all_gaps, (0.005, 1.0)) if len(all_gaps) else (1.0, 10.0)
    axes.set_xscale("log")
    axes.set_xlim(0.9 * low, 1.1 * high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.01)
    axes.set_xlabel("time between tokens (ms)")
    axes.set_ylabel("share of all gaps")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _errors(axes: "Axes", validation: ProgramValidation) -> None:
    names = [(metric, statistic) for metric in METRICS for statistic in STATISTICS]
    found = [validation.errors[f"{metric}_{statistic}"] for metric, statistic in names]
    places = np.arange(len(found))
    axes.axvline(0, color="black", linewidth=0.8)
    spreads = [error.spread_pct for error in found]
    if all(spread is not None for spread in spreads):
        axes.barh(
            places,
            [2 * (spread or 0) for spread in spreads],
            left=[-(spread or 0) for spread in spreads],
            height=0.7,
            color=GREY,
            alpha=0.35,
            label="range of the repeats",
        )
    axes.plot(
        [error.error_pct for error in found], places, "o", color=ORANGE, label="error of the simulation"
    )
    axes.set_yticks(places, [f"{WORDS[metric]} {STATISTIC_WORDS[statistic]}" for metric, statistic in names])
    axes.invert_yaxis()
    axes.set_xlabel("error (%)")
    axes.legend(
        frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, borderaxespad=0
    )
