"""Figures of cubes and runs: dataset in, matplotlib figure out."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentjax.errors import complaint
from agentjax.report import Row, baseline, label, load_text, rows, title
from agentjax.statistics import mean_interval
from agentjax.store import replacing

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Of Okabe and Ito, for all common forms of colour vision; markers and dashes differ too."""
BLUE, ORANGE, GREEN = PALETTE[:3]
GREY = "#999999"
_MOST_ROWS = 40


def change_figure(cube: "xr.Dataset") -> "Figure":
    """Change of the mean JCT against the baseline, and its level, for every configuration of a cube.

    Left: mean over seeds with its interval, the seeds behind it, and the published change. Right: the same
    for the level.
    """
    from matplotlib.figure import Figure

    found = _shown(rows(cube))
    labels = [label(row.labels) for row in found]
    height = 1.9 + 0.36 * len(found)
    figure = Figure(figsize=(10, height), layout="constrained")
    change, level = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [3, 2]})
    source = str(json.loads(cube.attrs.get("published", "{}")).get("source", "")).partition(",")[0]
    _changes(change, found, f"published ({source})" if source else "published")
    _levels(level, cube, found)
    change.set_yticks(range(len(found)), labels)
    change.invert_yaxis()
    change.set_xlabel(f"change of mean JCT against {label(baseline(cube))}, same seed (%)")
    level.set_xlabel("mean JCT (s)")
    level.xaxis.set_major_formatter("{x:,.0f}" if float(cube.jct_mean.max()) > 100 else "{x:g}")
    for axes in (change, level):
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    load = load_text(sum((row.regimes for row in found), Counter()))
    figure.suptitle(f"{title(cube)}; load: {load}", fontsize=10, x=0.01, ha="left")
    handles, names = change.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8)
    return figure


def jct_figure(jct_s: np.ndarray, heading: str) -> "Figure":
    """Distribution of the job completion times of one run."""
    from matplotlib.figure import Figure

    done = np.sort(np.asarray(jct_s, float))
    done = done[~np.isnan(done)]
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    if len(done):
        shares = np.arange(len(done) + 1) / len(done)
        axes.step(np.concatenate([[0.0], done]), shares, where="post", color=BLUE)
        marks = {"mean": done.mean(), "median": np.percentile(done, 50), "p99": np.percentile(done, 99)}
        for (words, value), style in zip(marks.items(), ("-", "--", ":"), strict=True):
            axes.axvline(value, color=ORANGE, linestyle=style, linewidth=1, label=f"{words} {value:,.4g} s")
        axes.legend(frameon=False, fontsize=8)
    else:
        axes.annotate("no program completed", (0.5, 0.5), xycoords="axes fraction", ha="center")
    axes.set_xlabel("job completion time (s)")
    axes.set_ylabel("share of programs")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(heading, fontsize=10, loc="left")
    return figure


def save_figure(figure: "Figure", path: str | Path) -> None:
    """Writes a figure; the kind follows the file's ending. Equal figures are equal PNG bytes.

    Raises:
        InputError: an ending that matplotlib cannot write, a full disk, or a place that cannot be written to.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    check_ending(path)
    FigureCanvasAgg(figure)
    metadata: dict[str, Any] = {".png": {"Software": None}, ".svg": {"Date": None}}.get(
        path.suffix.lower(), {"CreationDate": None}
    )
    with replacing(path) as partial:
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=150, metadata=metadata)


def check_ending(path: str | Path) -> None:
    """Refuses a figure file of a kind that is not written.

    Raises:
        InputError: another ending than .png, .svg or .pdf.
    """
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise complaint(f"figure={path}", f"the ending {Path(path).suffix!r}", "one of .png, .svg, .pdf")


def _shown(found: Sequence[Row]) -> list[Row]:
    if len(found) <= _MOST_ROWS:
        return list(found)
    ordered = sorted(
        found, key=lambda row: (not row.is_baseline, math.isnan(row.jct_mean.mean), row.jct_mean.mean)
    )
    return ordered[:_MOST_ROWS]


def _changes(axes: "Axes", found: Sequence[Row], published: str) -> None:
    axes.axvline(0, color="black", linewidth=0.8)
    for position, row in enumerate(found):
        first = position == 0
        if row.is_baseline:
            axes.plot(0, position, "|", color="black", markersize=12)
            axes.annotate(
                "baseline", (0, position), (6, 0), textcoords="offset points", va="center", fontsize=8
            )
        else:
            _points_with_interval(
                axes, position, row.per_seed, row.change.mean, row.change.low, row.change.high
            )
        if row.published is not None:
            axes.plot(
                row.published, position, "D", color=ORANGE, markerfacecolor="none", markersize=7, zorder=4
            )
        if first:
            _legend_entries(axes, found, published)


def _legend_entries(axes: "Axes", found: Sequence[Row], published: str) -> None:
    seeds = found[0].jct_mean.seeds
    axes.plot(
        [],
        [],
        "o",
        color=BLUE,
        markersize=7,
        label="mean over seeds, 95 % interval" if seeds > 1 else "simulated",
    )
    if seeds > 1:
        axes.plot([], [], "o", color=GREY, markersize=3.5, alpha=0.7, label="one seed")
    if any(row.published is not None for row in found):
        axes.plot([], [], "D", color=ORANGE, markerfacecolor="none", markersize=7, label=published)


def _levels(axes: "Axes", cube: "xr.Dataset", found: Sequence[Row]) -> None:
    level = json.loads(cube.attrs.get("published", "{}")).get("level", {}).get("jct_mean")
    for position, row in enumerate(found):
        values = np.atleast_1d(cube.jct_mean.sel(row.labels).values).ravel()
        interval = mean_interval(values)
        _points_with_interval(axes, position, values, interval.mean, interval.low, interval.high)
        if level is None:
            continue
        if row.is_baseline:
            axes.plot(level, position, "D", color=ORANGE, markerfacecolor="none", markersize=7, zorder=4)
        elif row.published is not None:
            axes.plot(
                level * (1 + row.published / 100),
                position,
                "D",
                color=ORANGE,
                markerfacecolor="none",
                markersize=7,
                zorder=4,
            )
    axes.set_xlim(left=0)


def _points_with_interval(
    axes: "Axes", position: int, values: np.ndarray, mean: float, low: float, high: float
) -> None:
    if len(values) > 1:
        spread = 0.22 * (np.arange(len(values)) / (len(values) - 1) - 0.5)
        axes.plot(values, position + spread, "o", color=GREY, markersize=3.5, alpha=0.7, linestyle="none")
    if not math.isnan(low):
        axes.plot([low, high], [position, position], "-", color=BLUE, linewidth=2.2, solid_capstyle="butt")
    axes.plot(mean, position, "o", color=BLUE, markersize=7, zorder=3)
