"""The figure of a calibration: what was measured and what the model says, by prompt length and batch size."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from agentjax.calibrate.fit import Fit, residual_table
from agentjax.calibrate.observations import DECODE, MIXED, PREFILL, Observations, scale
from agentjax.performance.base import BatchShape, decode_batch
from agentjax.plotting import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^Dvp"


def calibration_figure(
    found: Observations, fitted: Fit, error_pct: np.ndarray, lines: Sequence[str], heading: str
) -> "Figure":
    """Prompts and decode steps, measured and fitted, and the error of every observation.

    **Arguments:**

    - `error_pct`, `lines`: error and line of the table of each observation, of `residuals`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.8), layout="constrained")
    prompts, steps, errors = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1, 1, 1.05]})
    with jax.enable_x64(True):
        _prompts(prompts, found, fitted)
        _steps(steps, found, fitted)
    _errors(errors, found, error_pct, lines)
    for axes in (prompts, steps, errors):
        axes.grid(color="#e3e3e3", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{heading}: {fitted.form.form} model ({fitted.form.terms}), held-out error "
        f"{fitted.rungs[fitted.chosen].held_out_pct:.1f} %",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    return figure


def _prompts(axes: "Axes", found: Observations, fitted: Fit) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    alone = found.take((found.kind == PREFILL) & (found.prompts == 1))
    latency = float(fitted.model.wakeup_s) * alone.wakeups
    before = np.asarray([scale(tokens) if tokens >= 1 else 0 for tokens in alone.before_tokens()])
    for (group, marker), colour in zip(_groups(before), PALETTE, strict=False):
        here = before == group
        label = "nothing cached" if group == 0 else f"about {group:,} tokens cached"
        axes.plot(
            alone.tokens[here],
            (alone.duration_s - latency)[here] * 1e3,
            marker,
            color=colour,
            markersize=5,
            alpha=0.55,
            markeredgewidth=0,
            label=label,
        )
        low, high = alone.tokens[here].min(), alone.tokens[here].max()
        tokens = np.geomspace(low / 1.3, high * 1.3, 100)
        history = float(np.median(alone.before_tokens()[here]))
        # as many iterations to a prompt as were taken for the measured one of the nearest length
        chunks = np.interp(tokens, *_ordered(alone.tokens[here], alone.chunks[here])).round()
        contexts = np.where(chunks > 1, history + tokens * (chunks - 1) / (2 * chunks), history)
        none = np.zeros_like(tokens)
        batch = BatchShape(
            sequences=none + 1.0,
            decode_sequences=none,
            decode_context_tokens=none,
            decode_context_max_tokens=none,
            prefill_tokens=tokens / chunks,
            prefill_context_tokens=contexts,
            prefill_work_tokens2=tokens * (history + tokens / 2) / chunks,
        )
        model = np.asarray(fitted.model.iteration_s(batch)) * chunks
        axes.plot(tokens, model * 1e3, color=colour, linewidth=1.4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("prompt tokens computed")
    axes.set_ylabel("ms")
    axes.set_title("prompt alone on the server", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)


def _steps(axes: "Axes", found: Observations, fitted: Fit) -> None:
    steps = found.take(found.kind == DECODE)
    contexts = np.asarray([scale(context) for context in steps.context_tokens])
    batches = np.linspace(1.0, float(steps.decodes.max()) * 1.04, 200)
    groups = _groups(contexts)
    for place, ((group, marker), colour) in enumerate(zip(groups, PALETTE, strict=False)):
        here = contexts == group
        mean = float(np.average(steps.context_tokens[here], weights=steps.weight[here]))
        step = np.asarray(
            fitted.model.iteration_s(decode_batch(batches, batches * mean, batches * 0.0 + mean))
        )
        axes.plot(batches, step * 1e3, color=colour, linewidth=1.4)
        shift = 0.012 * steps.decodes.max() * (place - (len(groups) - 1) / 2)
        for batch in np.unique(steps.decodes[here]):
            low, middle, high = np.percentile(
                steps.duration_s[here & (steps.decodes == batch)] * 1e3, [10, 50, 90]
            )
            axes.plot([batch + shift] * 2, [low, high], color=colour, linewidth=1, alpha=0.7)
            axes.plot(batch + shift, middle, marker, color=colour, markersize=5.5, markeredgecolor="white")
        axes.plot([], [], marker, color=colour, markersize=5.5, label=f"{mean:,.0f} tokens of context")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests decoding")
    axes.set_ylabel("ms")
    axes.set_title("decode step (median, 10 % and 90 %)", fontsize=10, loc="left")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], frameon=False, fontsize=8)


def _errors(axes: "Axes", found: Observations, error_pct: np.ndarray, lines: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    table = list(residual_table(error_pct, lines))
    where = np.asarray(lines, object)
    rng = np.random.default_rng(0)
    colours = {DECODE: PALETTE[0], PREFILL: PALETTE[1], MIXED: PALETTE[2]}
    for row, line in enumerate(table):
        here = where == line
        colour = colours[int(found.kind[here][0])]
        spread = rng.uniform(-0.28, 0.28, int(here.sum()))
        axes.plot(
            error_pct[here], row + spread, ".", color=colour, markersize=3, alpha=0.3, markeredgewidth=0
        )
        low, middle, high = np.percentile(error_pct[here], [10, 50, 90])
        axes.plot([low, high], [row, row], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot(middle, row, "o", color=colour, markersize=6, markeredgecolor="white")
    axes.axvline(0, color="black", linewidth=0.9)
    edge = max(10.0, 1.25 * float(np.percentile(np.abs(error_pct), 98)))
    beyond = int(np.sum(np.abs(error_pct) > edge))
    axes.set_xlim(-edge, edge)
    axes.set_yticks(range(len(table)), table, fontsize=8)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("fitted against measured (%; positive: too slow)")
    more = f"; {beyond} points outside" if beyond else ""
    axes.set_title(f"error (median, 10 % to 90 %{more})", fontsize=10, loc="left")


def _groups(values: np.ndarray) -> list[tuple[int, str]]:
    """The groups with most observations, in order, each with its marker."""
    groups, counts = np.unique(values, return_counts=True)
    kept = np.sort(groups[np.argsort(-counts, kind="stable")[: len(PALETTE)]])
    return list(zip(kept.tolist(), _MARKERS, strict=False))


def _ordered(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(x, kind="stable")
    return x[order], y[order]
