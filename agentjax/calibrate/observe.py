"""What a recording says about the durations of iterations.

A client sees tokens arrive, not iterations. But between two tokens of a request lies one iteration, and which
other requests decode meanwhile follows from their own first and last tokens. Three kinds of observation come
out of that:

- decode: consecutive steps of one request while no prompt is under way and no request starts or ends to
  decode; a batch of all requests that decode.
- prefill: the time to the first token of a request that has the server for itself.
- mixed: the time between two tokens of a request, around the prompt of one other request.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float

from agentjax.calibrate.observations import DECODE, KINDS, MIXED, PREFILL, Observations
from agentjax.calibrate.timeline import READING_S, Request, Timeline, read_timeline, tolerance
from agentjax.records import Recording

BLOCK = 16
"""Steps of a request that are taken together: single gaps are blurred by how the client reads."""
MOST_BLOCKS = 3_000
"""Longer blocks are taken where there would be more of them."""
OBSERVERS = 8
"""Requests of a batch that are looked at; the others see the same iterations."""
BUNCH = 0.3
"""Events closer than this share of a request's median gap have come in a bunch."""


@dataclass
class Report:
    """How many observations came out, and what was left out for which reason."""

    kept: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    """Time to the first token of requests alone on the server, less the server's own time of the prompt."""


def observe(recording: Recording, max_num_batched_tokens: int | None = None) -> tuple[Observations, Report]:
    """All that the requests of a recording say about durations.

    **Arguments:**

    - `recording`: what a client saw. Requests to warm up count as load, but are not looked at themselves.
    - `max_num_batched_tokens`: most tokens that the server computes in one iteration; None: any prompt is
        computed in one.
    """
    report = Report()
    timeline = read_timeline(recording, report.left_out, report.notes)
    rows: list[dict] = []
    seen = [request for request in timeline.requests if not request.warmup]
    for request in seen:
        rows += _prefill(request, timeline, max_num_batched_tokens, report)
    block, left_out = BLOCK, report.left_out.copy()
    while True:
        decodes = [row for request in seen for row in _decodes(request, timeline, block, report)]
        if len(decodes) <= MOST_BLOCKS or block >= 16 * BLOCK:
            break
        block, report.left_out = math.ceil(len(decodes) / MOST_BLOCKS) * block, left_out.copy()
    rows += decodes
    columns = {entry.name: [row[entry.name] for row in rows] for entry in fields(Observations)}
    units = {unit: index for index, unit in enumerate(dict.fromkeys(columns["unit"]))}
    columns["unit"] = [units[unit] for unit in columns["unit"]]
    whole = {"kind", "unit"}
    arrays = {
        name: np.asarray(column, object if name == "request" else int if name in whole else float)
        for name, column in columns.items()
    }
    found = Observations(**arrays)
    for kind, name in enumerate(KINDS):
        report.kept[name] = int(np.sum(found.kind == kind))
    return found, report


def _row(kind: int, duration_s: float, request: str, unit: tuple, **numbers: float) -> dict:
    none = dict.fromkeys(
        (
            *("chunks", "prompts", "wakeups", "decodes", "context_tokens"),
            *("tokens", "work_tokens2", "history_tokens"),
        ),
        0.0,
    )
    return {"kind": kind, "duration_s": duration_s, "request": request, "unit": unit, **none, **numbers}


def _chunks(requests: Sequence[Request], decodes: int, budget: int | None) -> dict[str, float]:
    """Prompts computed together, cut into what the budget leaves beside so many decodes."""
    new = np.asarray([request.prompt - (request.cached or 0) for request in requests])
    before = np.asarray([request.cached or 0 for request in requests])
    size = max(1, budget - decodes) if budget is not None else int(new.sum())
    # each prompt's chunks begin where the last one ended
    chunks = math.ceil(new.sum() / size)
    starts = np.concatenate(
        [first + np.arange(0, count, size) for first, count in zip(before, new, strict=True)]
    )
    return {
        "chunks": chunks,
        "prompts": float(len(requests)),
        "tokens": float(new.sum()),
        "work_tokens2": float(np.sum(new * (before + new / 2))),
        "history_tokens": float(starts.sum()),
    }


def _prefill(request: Request, timeline: Timeline, budget: int | None, report: Report) -> list[dict]:
    """The prompt of a request and those computed with it: alone on the server, or beside decodes."""
    if request.first is None:
        return []
    others, *_ = timeline.during(request.began, request.first)
    together = [timeline.requests[index] for index in sorted(others | {request.index})]
    if max((one.first or math.inf, one.index) for one in together) != (request.first, request.index):
        return []  # counts with the one whose first token came last
    if any(one.cached is None for one in together):
        report.left_out["prompts of which it is not known how much was cached"] += len(together)
        return []
    began = max(one.began for one in together)
    moments = {moment for one in together for moment in (one.began, one.first) if moment is not None}
    prompting, around, changes = timeline.during(min(one.began for one in together), request.first, moments)
    members = {one.index for one in together}
    decoding = around - members
    apart = max(abs(one.first - request.first) for one in together if one.first is not None)
    chunks = _chunks(together, len(decoding), budget)
    most = timeline.longest_prompt if budget is None else budget - len(decoding)
    if (
        prompting != members
        or changes
        or apart > tolerance(began, request.first, 0.02)
        or (len(together) > 1 and chunks["tokens"] > most)
        or any(one.warmup or timeline.may_share_a_chunk(one, budget) for one in together)
    ):
        report.left_out["prompts beside other prompts, or beside a change of the batch"] += len(together)
        return []
    if decoding:
        return _mixed(request, timeline, members, moments, began, decoding, chunks, report)
    idle = all(one.began == one.sent for one in together)
    seconds, wakeups = request.first - began, float(idle)
    if request.server_prefill is not None:
        if len(together) == 1 and not timeline.in_flight(request.sent):
            report.latency_s.append(request.first - request.sent - request.server_prefill)
        told = [one.server_prefill for one in together if one.server_prefill is not None]
        seconds, wakeups = min(told), 0.0
    if seconds <= 0:
        report.left_out["prompts without a duration"] += len(together)
        return []
    row = {"iterations": chunks["chunks"], "weight": 1.0, "wakeups": wakeups, **chunks}
    return [_row(PREFILL, seconds, request.name, ("prompt", request.index), **row)]


def _mixed(
    request: Request,
    timeline: Timeline,
    together: set[int],
    moments: set[float],
    began: float,
    decoding: set[int],
    chunks: dict[str, float],
    report: Report,
) -> list[dict]:
    """The gaps of each decoding request from the beginning of the prompt to its first token."""
    assert request.first is not None
    rows = []
    for index in sorted(decoding)[:OBSERVERS]:
        other = timeline.requests[index]
        if other.times is None:
            continue
        times = other.times
        step = float(np.median(np.diff(times)))
        start = int(np.searchsorted(times, began + max(READING_S, BUNCH * step), "right")) - 1
        end = int(np.searchsorted(times, request.first - 0.5 * step, "left"))
        if start < 0 or end >= len(times) or end <= start:
            continue
        prompting, around, changes = timeline.during(times[start], times[end], moments)
        if changes or not prompting <= together or around - together != decoding:
            continue
        iterations = float(other.tokens[end] - other.tokens[start])
        row = {**chunks, "chunks": min(chunks["chunks"], iterations), "iterations": iterations}
        row["weight"] = 1.0 / min(len(decoding), OBSERVERS)
        row["decodes"] = float(len(decoding))
        row["context_tokens"] = timeline.context(sorted(decoding), times[start], times[end])
        seconds = float(times[end] - times[start])
        rows.append(_row(MIXED, seconds, other.name, ("prompt", request.index), **row))
    if not rows:
        report.left_out["prompts beside decodes that no unbroken gap of them surrounds"] += 1
    return rows


def _decodes(request: Request, timeline: Timeline, block: int, report: Report) -> list[dict]:
    """The steps of a request in blocks, each within one period of an unchanged batch."""
    if request.first is None or request.finished is None or request.output < 2:
        return []
    if request.times is None:
        return _mean_step(request, timeline, report)
    times, tokens = request.times, request.tokens
    period = timeline.period(times[:-1], times[1:])
    steps = np.diff(tokens)
    clean = (period >= 0) & ~timeline.has_prompt[period]
    report.left_out["decode steps beside a prompt, or while a request started or ended"] += int(
        steps[1:][~clean[1:]].sum()
    )
    report.left_out["decode steps right after a first token"] += int(steps[0])
    clean[0] = False
    reliable = _reliable(times)
    rows = []
    edges = np.flatnonzero(np.diff(np.where(clean, period, -1), prepend=-2, append=-2))
    for start, end in pairwise(edges.tolist()):
        if not clean[start] or request.index not in timeline.decoding[period[start]][:OBSERVERS]:
            continue
        blocks = _blocks(start, end, block, reliable)
        whole = sum(last - first for first, last in blocks)
        report.left_out["decode steps whose tokens came in a bunch"] += int(end - start - whole)
        for first, last in blocks:
            rows += _steps(request, timeline, int(period[start]), first, last, report)
    return rows


def _reliable(times: Float[np.ndarray, " events"]) -> Bool[np.ndarray, " events"]:
    """Whether each event came at its time: not right before or after another one, as when a client that was
    held up reads several at once."""
    gaps = np.diff(times)
    apart = gaps > BUNCH * np.median(gaps)
    return np.append(apart, True) & np.insert(apart, 0, True)


def _blocks(start: int, end: int, block: int, reliable: np.ndarray) -> list[tuple[int, int]]:
    """Gaps from start to end in equal parts of about `block`, each from a reliable event to another."""
    ends = start + np.flatnonzero(reliable[start : end + 1])
    if len(ends) < 2:
        return []
    parts = max(1, round((ends[-1] - ends[0]) / block))
    cuts = np.linspace(ends[0], ends[-1], parts + 1)
    nearest = np.unique([ends[np.argmin(np.abs(ends - cut))] for cut in cuts])
    return list(zip(nearest[:-1].tolist(), nearest[1:].tolist(), strict=True))


def _steps(
    request: Request, timeline: Timeline, period: int, first: int, last: int, report: Report
) -> list[dict]:
    assert request.times is not None
    count = float(request.tokens[last] - request.tokens[first])
    seconds = float(request.times[last] - request.times[first])
    decoding = timeline.decoding[period]
    if count and seconds / count < BUNCH * float(np.median(np.diff(request.times))):
        report.left_out["decode steps whose tokens came in a bunch"] += int(count)
        return []
    if seconds <= 0 or any(not timeline.requests[index].known for index in decoding):
        report.left_out["decode steps without a duration, or beside requests of unknown length"] += int(count)
        return []
    return [
        _row(
            DECODE,
            seconds / count,
            request.name,
            ("period", period),
            iterations=1.0,
            weight=count / min(len(decoding), OBSERVERS),
            decodes=len(decoding),
            context_tokens=timeline.context(decoding, request.times[first], request.times[last]),
        )
    ]


def _mean_step(request: Request, timeline: Timeline, report: Report) -> list[dict]:
    """The mean step of a request of which only first and last token are known, if its batch was steady."""
    assert request.first is not None and request.finished is not None
    steps = request.output - 1
    period, share = timeline.longest_period(request.first, request.finished)
    seconds = (request.finished - request.first) / steps
    decoding = timeline.decoding[period]
    steady = share >= 0.95 and not timeline.has_prompt[period] and seconds > 0
    if not steady or any(not timeline.requests[index].known for index in decoding):
        report.left_out["decode steps without times of their tokens, in a batch that changed"] += steps
        return []
    return [
        _row(
            DECODE,
            seconds,
            request.name,
            ("period", period),
            iterations=1.0,
            weight=steps / len(decoding),
            decodes=len(decoding),
            context_tokens=timeline.context(decoding, request.first, request.finished),
        )
    ]
