"""From observations to coefficients: the models compared, the simplest good one chosen, intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from agentjax.calibrate.forms import Form, forms
from agentjax.calibrate.observations import DECODE, MIXED, PREFILL, Observations
from agentjax.calibrate.optimise import LANES, minimise
from agentjax.errors import complaint
from agentjax.performance.affine import Affine
from agentjax.performance.piecewise import Piecewise

FOLDS = 5
RESAMPLES = 6 * LANES
SHARES = {DECODE: 0.45, PREFILL: 0.45, MIXED: 0.1}
"""What each kind of observation weighs in the fit."""
MOST_PCT = 50.0
"""No single error counts as more in the comparison of models: a few that were disturbed do not decide it."""
CLOSE = 0.05, 0.1
"""A simpler model is as good as the best within one standard error, or within this share of the best's error,
or within so many percentage points."""


@dataclass(frozen=True)
class Rung:
    """A model of the ladder: how far it is off, over all observations and over those it was not fitted to."""

    form: Form
    values: Float[np.ndarray, " coefficients"]
    error_pct: float
    held_out_pct: float
    standard_error_pct: float
    """Of the difference of `held_out_pct` to the best model's."""


@dataclass(frozen=True)
class Fit:
    """The chosen model with all that was compared; coefficients as in a coefficient file (s)."""

    rungs: tuple[Rung, ...]
    chosen: int
    coefficients: dict[str, Any]
    low: dict[str, Any]
    high: dict[str, Any]
    """Bounds of the 95 % intervals."""
    held_out_units: int
    """Prompts and periods of decoding that were held out in turn, in `FOLDS` parts."""

    @property
    def form(self) -> Form:
        """The chosen form."""
        return self.rungs[self.chosen].form

    @property
    def model(self) -> Affine | Piecewise:
        """The chosen model."""
        return self.form.model(self.coefficients)


def fit(
    found: Observations,
    latency_s: Sequence[float] = (),
    overhead_s: float = 0.0,
    wakeup_s: float | None = None,
    seed: int = 0,
) -> Fit:
    """Fit every model of the ladder, choose the simplest that is as good as the best, and bound it.

    **Arguments:**

    - `found`: decode steps and prompts at least.
    - `latency_s`: time to the first token of single requests without the server's own time of the prompt.
    - `overhead_s`: host time of an iteration, if it is known; it is taken off what each iteration takes.
    - `wakeup_s`: latency of a request that finds the server idle; None: the median of `latency_s`, or fitted.
    - `seed`: of the parts that are held out and of the resamples.

    Raises `InputError` without decode steps or without prompts.
    """
    _refuse_too_little(found)
    rng = np.random.default_rng(seed)
    fitted_wakeup = wakeup_s is None and not len(latency_s) and bool(np.any(found.wakeups > 0))
    idle_s = (
        wakeup_s if wakeup_s is not None else float(max(np.median(latency_s), 0.0)) if len(latency_s) else 0.0
    )
    known = found.iterations * overhead_s + found.wakeups * idle_s
    if np.any(known >= found.duration_s):
        raise complaint(
            "overhead_s and wakeup_s",
            f"{np.max(known / found.duration_s):.2f} times a measured duration",
            "less than any of them",
        )
    ladder = forms(found, fitted_wakeup)
    columns = _padded([form.columns(found) for form in ladder])
    lean = _padded([form.lean[None] for form in ladder])[:, 0]
    weights = balance(found)
    folds = _folds(found, rng)
    masks = np.stack([np.ones(len(found))] + [np.where(folds == fold, 0.0, 1.0) for fold in range(FOLDS)])
    which = np.repeat(np.arange(len(ladder)), len(masks))
    values = minimise(
        columns, known, found.duration_s, which, np.tile(weights * masks, (len(ladder), 1)), lean
    )
    # what nowhere makes up a thousandth of a duration is nothing
    noticed = np.max(columns[which] * values[:, None, :] / found.duration_s[:, None], axis=1) > 1e-3
    values = np.where(noticed, values, 0.0).reshape(len(ladder), len(masks), -1)

    def errors(rung: int, fitted: int) -> np.ndarray:
        """Absolute relative error of each observation (%), as far as it counts."""
        predicted = np.maximum(columns[rung] @ values[rung, fitted] + known, 1e-30)
        return np.minimum(100 * np.abs(np.log(predicted / found.duration_s)), MOST_PCT)

    inside = [errors(rung, 0) for rung in range(len(ladder))]
    held = [
        np.select(
            [folds == fold for fold in range(FOLDS)],
            [errors(rung, 1 + fold) for fold in range(FOLDS)],
            np.nan,
        )
        for rung in range(len(ladder))
    ]
    scored = folds >= 0
    if not np.any(scored):  # one of everything: nothing can be held out
        held, scored = inside, np.ones(len(found), bool)
    means = [float(np.average(error[scored], weights=weights[scored])) for error in held]
    best = int(np.argmin(means))
    spread = [_standard_error(error - held[best], weights, found.unit, scored) for error in held]
    rungs = tuple(
        Rung(
            form,
            values[rung, 0, : len(form.names)],
            float(np.average(inside[rung], weights=weights)),
            means[rung],
            spread[rung],
        )
        for rung, form in enumerate(ladder)
    )
    chosen = _simplest(means, spread, best)
    form = ladder[chosen]
    resampled = rng.exponential(size=(RESAMPLES, int(found.unit.max()) + 1))[:, found.unit]
    many = minimise(columns, known, found.duration_s, np.full(RESAMPLES, chosen), weights * resampled, lean)[
        :, : len(form.names)
    ]
    idles = np.full(RESAMPLES, idle_s)
    if wakeup_s is None and len(latency_s):
        idles = np.maximum(np.median(rng.choice(latency_s, (RESAMPLES, len(latency_s))), axis=1), 0.0)
    all_of = [
        form.coefficients(row, overhead_s, idle)
        for row, idle in zip(many.tolist(), idles.tolist(), strict=True)
    ]
    coefficients = _rounded(form.coefficients(rungs[chosen].values.tolist(), overhead_s, idle_s))
    bounds = {
        name: np.percentile(np.asarray([one[name] for one in all_of]), [2.5, 97.5], axis=0)
        for name in coefficients
        if name not in ("knots", "short_prefill_tokens", "overhead_s")
    }
    return Fit(
        rungs=rungs,
        chosen=chosen,
        coefficients=coefficients,
        low=_rounded({name: bound[0].tolist() for name, bound in bounds.items()}),
        high=_rounded({name: bound[1].tolist() for name, bound in bounds.items()}),
        held_out_units=len(np.unique(found.unit[folds >= 0])),
    )


def balance(found: Observations) -> Float[np.ndarray, " n"]:
    """Weight of each observation: kinds as in `SHARES`; within a kind regions weigh the same, however many
    tokens they have, but a region of u prompts or periods only u / (u + 1) of it.
    """
    regions = np.asarray(found.region(), object)
    weights = np.zeros(len(found))
    for region in dict.fromkeys(regions):
        here = regions == region
        units = len(np.unique(found.unit[here]))
        weights[here] = found.weight[here] / found.weight[here].sum() * units / (units + 1)
    for kind, share in SHARES.items():
        here = found.kind == kind
        if np.any(here):
            weights[here] *= share / weights[here].sum()
    return weights / weights.sum()


def residuals(model: Affine | Piecewise, found: Observations) -> tuple[np.ndarray, list[str]]:
    """Error of the model at each observation (%; positive: too slow), and the line of the table it is in."""
    with jax.enable_x64(True):
        predicted = found.predicted_s(model)
    prompts = np.unique(found.tokens[found.kind == PREFILL])
    middle = float(prompts[(len(prompts) - 1) // 2]) if len(prompts) else 0.0
    lines = []
    for kind, decodes, tokens in zip(found.kind, found.decodes, found.tokens, strict=True):
        if kind == DECODE:
            lines.append(f"decode, batch {decodes:.0f}")
        elif kind == MIXED:
            lines.append("prompt beside decodes")
        else:
            lines.append(f"prompt alone, {'up to' if tokens <= middle else 'above'} {middle:,.0f} tokens")
    return 100 * (predicted / found.duration_s - 1), lines


def residual_table(error_pct: np.ndarray, lines: Sequence[str]) -> dict[str, dict[str, float]]:
    """Median, 10 %, 90 % and worst error of each line; prompts first, then decodes by batch size."""
    place = np.asarray(lines, object)

    def order(line: str) -> tuple[bool, bool, int]:
        batch = int(line.rpartition(" ")[2]) if line.startswith("decode") else 0
        return line == "prompt beside decodes", line.startswith("decode"), batch

    return {
        line: _summary(error_pct[place == line])
        for line in sorted(dict.fromkeys(lines), key=lambda line: (*order(line), "above" in line))
    }


def _summary(error: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(error, [10, 50, 90])
    numbers = {
        "median_pct": middle,
        "p10_pct": low,
        "p90_pct": high,
        "worst_pct": error[np.argmax(np.abs(error))],
    }
    return {"points": len(error)} | {name: round(float(value), 1) + 0.0 for name, value in numbers.items()}


def _refuse_too_little(found: Observations) -> None:
    counts = {kind: int(np.sum(found.kind == kind)) for kind in (DECODE, PREFILL)}
    if not counts[DECODE]:
        raise complaint(
            "data", "no decode step while nothing else changed", "requests with several output tokens"
        )
    if not counts[PREFILL]:
        raise complaint(
            "data",
            "no prompt alone on the server",
            "requests sent one at a time (a concurrency of 1) among others",
        )


def _padded(designs: Sequence[np.ndarray]) -> np.ndarray:
    width = max(design.shape[1] for design in designs)
    return np.stack([np.pad(design, ((0, 0), (0, width - design.shape[1]))) for design in designs])


def _folds(found: Observations, rng: np.random.Generator) -> np.ndarray:
    """The part in which each observation is held out. Units stay whole and each region is spread over the
    parts; -1: never held out, as the only one of its region."""
    regions = np.asarray(found.region(), object)
    units, first = np.unique(found.unit, return_index=True)
    fold = np.full(len(units), -1)
    place, turn = regions[first], 0
    for region in dict.fromkeys(place):
        members = np.flatnonzero(place == region)
        if len(members) < 2:
            continue
        fold[rng.permutation(members)] = (turn + np.arange(len(members))) % FOLDS
        turn += len(members)
    return fold[np.searchsorted(units, found.unit)]


def _standard_error(
    difference: np.ndarray, weights: np.ndarray, unit: np.ndarray, scored: np.ndarray
) -> float:
    """Standard error of the weighted mean of a difference, units taken as independent."""
    weights = weights[scored]
    total = weights.sum()
    rest = weights * (difference[scored] - np.average(difference[scored], weights=weights))
    sums = np.bincount(unit[scored], rest)
    count = len(np.unique(unit[scored]))
    return float(np.sqrt(np.sum(sums**2) * count / max(count - 1, 1)) / total)


def _simplest(means: Sequence[float], spread: Sequence[float], best: int) -> int:
    share, points = CLOSE
    near = [
        mean - means[best] <= max(error, share * means[best], points)
        for mean, error in zip(means, spread, strict=True)
    ]
    return near.index(True)


def _rounded(coefficients: Mapping[str, Any]) -> dict[str, Any]:
    """Five digits; what adds nothing to any duration is 0."""

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(each) for each in value]
        return 0.0 if value < 1e-15 else float(f"{value:.5g}")

    return {name: short(value) for name, value in coefficients.items()}
