"""The models that are compared, from simple to rich. Each is a sum of coefficients >= 0, each times a column
of numbers that an observation has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from agentjax.calibrate.observations import DECODE, MIXED, PREFILL, Observations
from agentjax.performance.affine import Affine
from agentjax.performance.piecewise import Piecewise

MOST_KNOTS = 8
LEAST_AT_KNOT = 3
"""Observations of a batch size, at least, for a knot there."""

AFFINE = ("c0_s", "c_tok_s", "c_seq_s", "c_kv_s", "c_prefill_s")
PROMPT = ("prefill_s", "prefill_tok_s", "prefill_work_s", "prefill_context_s")
WAKEUP = "wakeup_s"
SHORT = "short_prefill_work_s"
OF_CONTEXT = {"c_kv_s", "c_prefill_s", "decode_context_s", "prefill_work_s", "prefill_context_s", SHORT}
LITTLE = 0.02
NOTICED = 0.1
"""A context before a prompt tells something of its cost from this share of the prompt on: the few tokens of a
chat template, which all prompts share, do not."""


@dataclass(frozen=True)
class Form:
    """One model: its name, its coefficients and, if it is piecewise, its knots."""

    terms: str
    names: tuple[str, ...]
    knots: tuple[float, ...] = ()
    short_tokens: float = 0.0
    """Prompt tokens of an iteration below which prefill work has a coefficient of its own; 0: it has not."""
    tied: bool = False
    """Nothing tells the latency of an idle server from the time of an iteration with prompt tokens."""

    @property
    def form(self) -> str:
        """`affine` or `piecewise`, as in a coefficient file."""
        return "piecewise" if self.knots else "affine"

    @property
    def lean(self) -> Float[np.ndarray, " coefficients"]:
        """How much each coefficient explains where the data cannot tell: those of context little, lest times
        grow without bound beyond the contexts that were measured."""
        return np.asarray([LITTLE if name.partition("[")[0] in OF_CONTEXT else 1.0 for name in self.names])

    def columns(self, found: Observations) -> Float[np.ndarray, "n coefficients"]:
        """What each coefficient is multiplied with, for every observation."""
        if self.knots:
            column = _piecewise_columns(found, self.knots, self.short_tokens)
        else:
            column = _affine_columns(found)
        return np.stack([column[name] for name in self.names], axis=1)

    def at_knots(self) -> Float[np.ndarray, "coefficients coefficients"]:
        """What turns the coefficients of `columns` into those of a file: times at knots instead of rises."""
        matrix = np.eye(len(self.names))
        place = {name: index for index, name in enumerate(self.names)}
        for base in ("decode_s", "decode_context_s"):
            own = [
                place[name]
                for name in (base, *(f"{base}[{i}]" for i in range(1, len(self.knots))))
                if name in place
            ]
            for i, row in enumerate(own):
                matrix[row, own[:i]] = 1.0
                if base == "decode_s" and "shared_s" in place:
                    matrix[row, place["shared_s"]] = 1.0
        return matrix

    def coefficients(self, values: Sequence[float], overhead_s: float, wakeup_s: float) -> dict[str, Any]:
        """The fields of a coefficient file. `wakeup_s` counts where the model has none of its own."""
        own = dict(zip(self.names, map(float, values), strict=True))
        if self.tied:
            own = self._told_apart(own)
        host = {"overhead_s": overhead_s, WAKEUP: own.pop(WAKEUP, wakeup_s)}
        if not self.knots:
            return {name: own.get(name, 0.0) for name in AFFINE} | {"c_mixed_s": 0.0} | host
        shared = own.get("shared_s", 0.0)
        rises = range(1, len(self.knots))
        decode = np.cumsum([own["decode_s"] + shared, *(own[f"decode_s[{i}]"] for i in rises)])
        context = np.cumsum([own["decode_context_s"], *(own[f"decode_context_s[{i}]"] for i in rises)])
        prompt = {name: own.get(name, 0.0) for name in PROMPT}
        if self.short_tokens:
            prompt |= {"short_prefill_tokens": self.short_tokens, SHORT: own[SHORT]}
        if "shared_s" not in own:  # not measured: the reading of the weights, which both need once
            shared = min(float(decode[0]), prompt["prefill_s"])
        return {
            "knots": [float(knot) for knot in self.knots],
            "decode_s": decode.tolist(),
            "decode_context_s": context.tolist(),
            **prompt,
            "shared_s": shared,
            **host,
        }

    def _told_apart(self, own: dict[str, float]) -> dict[str, float]:
        """Times of single prompts are the latency and an iteration, and what a prompt adds beside decodes is
        an iteration less what is shared: the time of the iteration itself is free. It is taken to be that of
        one decode without context, but no more than there is.
        """
        decode = own["decode_s"] + own.get("shared_s", 0.0)
        whole = own["prefill_s"] + own[WAKEUP]
        change = min(whole, decode) - own["prefill_s"]
        if "shared_s" in own:
            change = min(max(change, -own["shared_s"]), own["decode_s"])
            own = {**own, "shared_s": own["shared_s"] + change, "decode_s": own["decode_s"] - change}
        return {**own, "prefill_s": own["prefill_s"] + change, WAKEUP: own[WAKEUP] - change}

    def model(self, coefficients: Mapping[str, Any]) -> Affine | Piecewise:
        """The performance model with these fields of a coefficient file."""
        return Piecewise(**coefficients) if self.knots else Affine(**coefficients)


def forms(found: Observations, fit_wakeup: bool) -> list[Form]:
    """The models that the observations can tell apart, from simple to rich.

    **Arguments:**

    - `found`: coefficients that multiply only zeros are left out.
    - `fit_wakeup`: durations of prompts contain the latency of an idle server, which is to be fitted.
    """
    wakeup = (WAKEUP,) if fit_wakeup else ()
    words = ("tokens only", "+ per sequence", "+ context", "+ prefill work")
    rungs = [Form(words[i], (*AFFINE[: i + 2], *wakeup)) for i in range(len(words))]
    levels = batch_sizes(found)
    if not levels:
        return rungs
    # with every prompt in one chunk nothing tells the latency from the time of any chunk
    tied = fit_wakeup and not np.any((found.chunks > 1) | ((found.kind == PREFILL) & (found.wakeups == 0)))
    prompt = list(PROMPT)
    if np.sum(found.history_tokens > NOTICED * found.tokens) < LEAST_AT_KNOT:
        prompt.remove("prefill_context_s")
    both = ("shared_s",) if np.any(found.kind == MIXED) else ()

    def piecewise(terms: str, knots: tuple[float, ...], short_tokens: float = 0.0) -> Form:
        rises = range(1, len(knots))
        decode = ("decode_s", *(f"decode_s[{i}]" for i in rises))
        context = ("decode_context_s", *(f"decode_context_s[{i}]" for i in rises))
        short = (SHORT,) if short_tokens else ()
        names = (*decode, *context, *prompt, *short, *both, *wakeup)
        return Form(terms, names, knots, short_tokens, tied)

    ends = (levels[0], levels[-1]) if len(levels) > 1 else levels
    bends: list[tuple[str, tuple[float, ...]]] = [("decodes and prompts apart", ends)]
    if len(levels) > 3:
        bends.append((f"batches of {levels[0]:.0f} apart", (*levels[:2], levels[-1])))
    if len(levels) > 2:
        bends.append(("decodes bent at batch sizes", levels))
    short_tokens = short_prompts(found)
    for terms, knots in bends:
        rungs.append(piecewise(terms, knots))
        if short_tokens:
            rungs.append(piecewise(f"+ prompts below {short_tokens:.0f} apart", knots, short_tokens))
    return rungs


def short_prompts(found: Observations) -> float:
    """The power of two that best parts prompts computed alone, over a context, into short and long ones: by
    the relative errors of least squares in which each part has a coefficient of its own for its prefill work.
    0 where the prompts do not tell.
    """
    alone = found.take((found.kind == PREFILL) & (found.chunks == 1))
    if len(alone) < 3 * LEAST_AT_KNOT:
        return 0.0
    over_context = alone.history_tokens > alone.tokens
    best, least = 0.0, np.inf
    for exponent in range(3, 12):
        is_short = alone.tokens < 2.0**exponent
        if min(np.sum(is_short & over_context), np.sum(~is_short & over_context)) < LEAST_AT_KNOT:
            continue
        columns = np.stack(
            [alone.chunks, alone.tokens, *(alone.work_tokens2 * part for part in (is_short, ~is_short))],
            axis=1,
        )
        relative = columns / alone.duration_s[:, None]
        solution = np.linalg.lstsq(relative, np.ones(len(alone)), rcond=None)[0]
        error = float(np.mean(np.abs(relative @ solution - 1)))
        if error < least:
            best, least = 2.0**exponent, error
    return best


def batch_sizes(found: Observations) -> tuple[float, ...]:
    """Numbers of decodes that were measured well, at most `MOST_KNOTS` of them, ends included."""
    sizes, counts = np.unique(found.decodes[found.kind == DECODE], return_counts=True)
    enough = sizes[counts >= LEAST_AT_KNOT]
    levels = enough if len(enough) else sizes
    if len(levels) > MOST_KNOTS:
        targets = np.geomspace(levels[0], levels[-1], MOST_KNOTS)
        levels = np.unique([levels[np.argmin(np.abs(np.log(levels / target)))] for target in targets])
    return tuple(levels.tolist())


def _affine_columns(found: Observations) -> dict[str, np.ndarray]:
    steps = found.iterations * found.decodes
    return {
        "c0_s": found.iterations,
        "c_tok_s": steps + found.tokens,
        "c_seq_s": steps + np.where(found.chunks > 0, np.maximum(found.chunks, found.prompts), 0.0),
        "c_kv_s": steps * found.context_tokens + found.history_tokens + found.tokens,
        "c_prefill_s": found.work_tokens2,
        WAKEUP: found.wakeups,
    }


def _piecewise_columns(
    found: Observations, knots: tuple[float, ...], short_tokens: float
) -> dict[str, np.ndarray]:
    is_short = found.tokens < short_tokens * np.maximum(found.chunks, 1.0)
    with_decodes = found.iterations * (found.decodes > 0)
    with_context = with_decodes * found.context_tokens
    columns = {
        "decode_s": with_decodes,
        "decode_context_s": with_context,
        "prefill_s": found.chunks,
        "prefill_tok_s": found.tokens,
        "prefill_work_s": np.where(is_short, 0.0, found.work_tokens2),
        SHORT: np.where(is_short, found.work_tokens2, 0.0),
        "prefill_context_s": found.history_tokens,
        # the first of decode_s is this and more, so that it cannot exceed it
        "shared_s": with_decodes - found.chunks * (found.decodes > 0),
        WAKEUP: found.wakeups,
    }
    for i in range(1, len(knots)):
        low, high = knots[i - 1], knots[i]
        share = np.maximum((found.decodes - low) / (high - low), 0.0)
        if i < len(knots) - 1:
            share = np.minimum(share, 1.0)
        columns[f"decode_s[{i}]"] = with_decodes * share
        columns[f"decode_context_s[{i}]"] = with_context * share
    return columns
