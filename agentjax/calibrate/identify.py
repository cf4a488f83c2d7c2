"""What the observations do not determine, and which measurement would.

From the Fisher information of the relative errors at the fitted coefficients. A prompt, or a period in which
the same requests decode, counts as one observation, as its parts share their error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from jaxtyping import Float

from agentjax.calibrate.fit import Fit
from agentjax.calibrate.forms import AFFINE, PROMPT, WAKEUP, Form
from agentjax.calibrate.observations import DECODE, KINDS, PREFILL, Observations

THRESHOLD = 0.25
"""Relative standard error from which a coefficient counts as not determined."""
SMALL = 0.05
"""A coefficient that nowhere makes up this share of a duration need not be known better than to that."""
UNKNOWN = 3.0
"""Relative standard error of a coefficient before anything is measured."""
LEAST_NOISE = 0.01
"""Relative error of an observation, at least."""
TOGETHER = 0.3
"""Correlation of errors from which coefficients are named together."""
REPEATS = 3
SHARES = 0.0, 0.5, 0.9
OUTPUT = 64
"""Output tokens of a measurement that is thought of."""
MOST_SUGGESTIONS = 3


@dataclass(frozen=True)
class Undetermined:
    """Coefficients that the observations do not tell, or do not tell apart."""

    names: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Suggestion:
    """A measurement that would help: a cell of a benchmark."""

    prompt_tokens: int
    concurrency: int
    cached_share: float
    gain: float
    """By which share the summed variance of what is not determined would fall."""

    def __str__(self) -> str:
        cell = f"prompt_tokens=[{self.prompt_tokens}] concurrency=[{self.concurrency}]"
        cached = f" cached_share=[{self.cached_share:g}]" if self.cached_share else ""
        return f"{cell}{cached} output_tokens=[{OUTPUT}]"


@dataclass(frozen=True)
class Identification:
    """Relative standard error of every coefficient, what is not determined, what to measure, best first."""

    relative_error: dict[str, float]
    undetermined: tuple[Undetermined, ...]
    suggestions: tuple[Suggestion, ...]


def identify(found: Observations, fitted: Fit) -> Identification:
    """Which coefficients of a fit the observations leave open."""
    form, values = _with_unmeasured(fitted)
    values = form.at_knots() @ values
    candidates = _candidates(found, WAKEUP in form.names)
    rows = _columns(form, found)
    predicted = rows @ values + _known(fitted, found)
    scale = _scale(fitted, form, values, found, [part for _, part in candidates])
    sensitivity = rows * scale / predicted[:, None]
    noise = _noise(found, predicted)
    each = 1.0 / np.bincount(found.unit)[found.unit]
    information = (sensitivity * (each / noise**2)[:, None]).T @ sensitivity
    covariance = np.linalg.inv(information + np.eye(len(values)) / UNKNOWN**2)
    errors = np.sqrt(np.diag(covariance))
    open_ = np.flatnonzero(errors > THRESHOLD)
    level = {kind: float(np.median(noise[found.kind == kind])) for kind in (DECODE, PREFILL)}
    return Identification(
        relative_error={name: float(error) for name, error in zip(form.names, errors, strict=True)},
        undetermined=tuple(_named(form, rows, covariance, errors)),
        suggestions=tuple(_suggest(fitted, form, values, scale, covariance, open_, candidates, level)),
    )


def _with_unmeasured(fitted: Fit) -> tuple[Form, np.ndarray]:
    """The form with the coefficients that it lacks, which a file has as 0."""
    form, values = fitted.form, fitted.rungs[fitted.chosen].values
    more = tuple(name for name in ((*PROMPT, "shared_s") if form.knots else AFFINE) if name not in form.names)
    return replace(form, names=(*form.names, *more)), np.append(values, np.zeros(len(more)))


def _columns(form: Form, found: Observations) -> Float[np.ndarray, "n coefficients"]:
    """What the times at the knots are multiplied with."""
    return form.columns(found) @ np.linalg.inv(form.at_knots())


def _known(fitted: Fit, part: Observations) -> Float[np.ndarray, " n"]:
    """The part of each duration that was not fitted: host time, and a latency that is known (s)."""
    latency_s = 0.0 if WAKEUP in fitted.form.names else fitted.coefficients[WAKEUP]
    return part.iterations * fitted.coefficients["overhead_s"] + part.wakeups * latency_s


def _scale(
    fitted: Fit, form: Form, values: np.ndarray, found: Observations, candidates: Sequence[Observations]
) -> Float[np.ndarray, " coefficients"]:
    """What the error of each coefficient is relative to: its value, or what would be just noticed."""
    floors = np.full(len(values), np.nan)
    for part in (*candidates, found):  # the last, what was measured, counts where it has to do with it
        columns = _columns(form, part)
        durations = _durations(fitted, columns, values, part)[:, None]
        sizes = np.abs(columns)
        present = sizes > 1e-9
        floor = np.min(np.where(present, durations / np.where(present, sizes, 1.0), np.inf), axis=0)
        measured = np.isfinite(floor)
        floors[measured] = floor[measured] if part is found else np.fmin(floors, floor)[measured]
    return np.where(np.isfinite(floors), np.maximum(values, SMALL * floors), np.maximum(values, 1e-12))


def _durations(
    fitted: Fit, columns: np.ndarray, values: np.ndarray, part: Observations
) -> Float[np.ndarray, " n"]:
    """Fitted durations (s); the measured or typical ones where the fit says nothing."""
    predicted = columns @ values + _known(fitted, part)
    return np.where(predicted > 0, predicted, part.duration_s)


def _noise(found: Observations, predicted: np.ndarray) -> Float[np.ndarray, " n"]:
    """Relative error of the observations of each kind, by the median of its absolute values."""
    error = np.abs(np.log(np.maximum(predicted, 1e-30) / found.duration_s))
    noise = np.full(len(found), LEAST_NOISE)
    for kind in range(len(KINDS)):
        here = found.kind == kind
        if np.any(here):
            noise[here] = max(LEAST_NOISE, 1.4826 * float(np.median(error[here])))
    return noise


def _named(
    form: Form, rows: np.ndarray, covariance: np.ndarray, errors: np.ndarray
) -> Iterator[Undetermined]:
    """Coefficients with a large error: alone, or with those whose errors make up for theirs."""
    correlation = covariance / np.outer(errors, errors)
    left = [index for index in np.argsort(-errors) if errors[index] > THRESHOLD]
    while left:
        index = left.pop(0)
        word = _words(form, form.names[index])
        if np.all(np.abs(rows[:, index]) < 1e-9):
            yield Undetermined((form.names[index],), f"{word} was not measured at all")
            continue
        others = [
            other
            for other in range(len(errors))
            if other != index and abs(correlation[index, other]) > TOGETHER and errors[other] > THRESHOLD
        ]
        left = [other for other in left if other not in others]
        names = tuple(form.names[other] for other in (index, *others))
        if others:
            listed = ", ".join([word, *(_words(form, form.names[other]) for other in others)])
            yield Undetermined(names, f"only together are these determined: {listed}")
        else:
            yield Undetermined(names, f"{word} is known to ±{100 * errors[index]:.0f} % only")


def _words(form: Form, name: str) -> str:
    """A coefficient in words."""
    base, _, index = name.partition("[")
    knot = form.knots[int(index[:-1]) if index else 0] if form.knots else 0
    decodes = f"{knot:.0f} decode{'s' if knot > 1 else ''}"
    return {
        "decode_s": f"the time of a step of {decodes} without context",
        "decode_context_s": f"the time per token of context of {decodes}",
        "prefill_s": "the time of an iteration with prompt tokens as such (prefill_s)",
        "prefill_tok_s": "the time per prompt token (prefill_tok_s)",
        "prefill_work_s": "the attention within a prompt (prefill_work_s)",
        "short_prefill_work_s": "the attention within a short prompt (short_prefill_work_s)",
        "prefill_context_s": "the time per token of context before a prompt (prefill_context_s)",
        "shared_s": "what prompts and decodes share in an iteration (shared_s)",
        "c0_s": "the time of an iteration as such (c0_s)",
        "c_tok_s": "the time per token (c_tok_s)",
        "c_seq_s": "the time per call (c_seq_s)",
        "c_kv_s": "the time per token of context (c_kv_s)",
        "c_prefill_s": "the attention within a prompt (c_prefill_s)",
        WAKEUP: "the latency of an idle server (wakeup_s)",
    }[base]


def _candidates(found: Observations, has_latency: bool) -> list[tuple[tuple[int, int, float], Observations]]:
    """Cells of a benchmark around what was measured, and what they would observe.

    Prompts are at most twice as long as the longest one measured: the server may have no room for more.
    """
    alone = found.take(found.kind == PREFILL)
    prompts = alone.tokens / alone.prompts + alone.before_tokens()
    low, high = max(16.0, prompts.min() / 4), 2 * prompts.max()
    lengths = 2 ** np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
    sizes = found.decodes[found.kind == DECODE]
    batches = sorted({*sizes.astype(int).tolist(), *(2**k for k in range(int(np.log2(sizes.max())) + 2))})
    return [
        ((int(length), batch, share), _cell(int(length), batch, share, has_latency, found))
        for length, batch, share in product(lengths, batches, SHARES)
        if batch == 1 or share == 0.0
    ]


def _cell(length: int, batch: int, share: float, has_latency: bool, found: Observations) -> Observations:
    """Its decode steps and, if requests come one at a time, its prompt."""
    before = float(int(share * length))
    new = length - before
    rows = [(DECODE, float(batch), length + OUTPUT / 2, 0.0, 0.0)]
    if batch == 1:
        rows.append((PREFILL, 0.0, 0.0, new, before))
    kind, decodes, context, tokens, history = (np.asarray(column) for column in zip(*rows, strict=True))
    prompt = tokens > 0
    count = len(rows)
    typical = [float(np.median(found.duration_s[found.kind == each])) for each in kind]
    return Observations(
        kind=kind,
        duration_s=np.asarray(typical),
        iterations=np.ones(count),
        chunks=prompt * 1.0,
        prompts=prompt * 1.0,
        wakeups=prompt * float(has_latency),
        decodes=decodes * 1.0,
        context_tokens=context,
        tokens=tokens,
        work_tokens2=tokens * (history + tokens / 2),
        history_tokens=history,
        weight=np.ones(count),
        unit=np.arange(count),
        request=np.full(count, "", object),
    )


def _suggest(
    fitted: Fit,
    form: Form,
    values: np.ndarray,
    scale: np.ndarray,
    covariance: np.ndarray,
    open_: np.ndarray,
    candidates: Sequence[tuple[tuple[int, int, float], Observations]],
    noise: dict[int, float],
) -> Iterator[Suggestion]:
    """One cell after the other, each the one that lowers the variance of what is open the most."""
    taken = set()
    for _ in range(MOST_SUGGESTIONS):
        before = float(np.sum(np.diag(covariance)[open_]))
        if not len(open_) or not before:
            return
        best, cell, after = None, None, before
        for key, part in candidates:
            columns = _columns(form, part)
            rows = columns * scale / _durations(fitted, columns, values, part)[:, None]
            updated = covariance
            for row, kind in zip(rows, part.kind, strict=True):
                along = updated @ row
                updated = updated - np.outer(along, along) / (noise[int(kind)] ** 2 / REPEATS + row @ along)
            total = float(np.sum(np.diag(updated)[open_]))
            if total < 0.98 * after:
                best, cell, after = updated, key, total
        if best is None or cell is None or after > 0.9 * before or cell in taken:
            return
        taken.add(cell)
        yield Suggestion(*cell, gain=1 - after / before)
        covariance = best
        open_ = open_[np.sqrt(np.diag(covariance)[open_]) > THRESHOLD]
