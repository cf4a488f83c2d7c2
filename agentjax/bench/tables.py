"""What a run measured, as tables on the terminal."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from agentjax.records import Recording, RequestRecord, job_completion_times

_TOGETHER = 0.1
"""Part of a request's mean gap, below which two events came together."""

_MOST_TOGETHER = 0.1
"""Part of the events that may come so before it is said."""


def cell_table(recording: Recording) -> Table:
    """One line a cell of the grid, over its repeats, in the order of the grid."""
    labels = ["prompt\ntokens", "output\ntokens", "streams", "cached\nshare", "n"]
    measures = ["TTFT\nms", "ITL\nms", "p90\nms", "tokens\n/s", "cached\n%", "errors"]
    table = _table("requests by cell; medians", [*labels, *measures])
    cells: dict[tuple[Any, ...], list[RequestRecord]] = {}
    for record in _last_tries(recording):
        if record.asked is not None and not record.warmup:
            a = record.asked
            key = (a.prompt_tokens, a.output_tokens, a.concurrency, a.cached_share)
            cells.setdefault(key, []).append(record)
    for (prompt, output, streams, share), records in sorted(cells.items()):
        good = [record for record in records if record.error is None]
        labels = [f"{prompt:,}", f"{output:,}", str(streams), f"{share:g}", str(len(good))]
        failed = len(records) - len(good)
        table.add_row(*labels, *_times(good), _rate(good), _cached(good), str(failed) if failed else "")
    return table


def program_table(recording: Recording) -> Table:
    """Job completion times, and the times of the calls."""
    jobs = ["programs", "mean\nJCT, s", "median\ns", "p95\ns", "failed"]
    table = _table(
        "programs; of calls medians", [*jobs, "calls", "TTFT\nms", "ITL\nms", "p90\nms", "cached\n%"]
    )
    calls = [record for record in recording.requests if record.place is not None]
    good = [record for record in calls if record.error is None]
    jct = np.array(list(job_completion_times(recording).values()))
    names = {record.place.program for record in calls if record.place is not None}
    failed = len(recording.about.get("arrivals_s", names)) - len(jct)
    times = (jct.mean(), *np.percentile(jct, (50, 95))) if len(jct) else (np.nan,) * 3
    completion = [_number(value) for value in times]
    ended = [str(len(jct)), *completion, str(failed) if failed else ""]
    table.add_row(*ended, f"{len(good):,}", *_times(good), _cached(good))
    return table


def faults(recording: Recording) -> list[str]:
    """What went wrong, by kind, with one example; and what the times may suffer from."""
    kinds: dict[str, list[RequestRecord]] = {}
    for record in _last_tries(recording):
        if record.error is not None:
            kinds.setdefault(record.error, []).append(record)
    lines = [
        f"{len(records)} requests failed: {kind} (such as {records[0].request}: {records[0].error_detail})"
        for kind, records in sorted(kinds.items())
    ]
    retried = sum(record.attempts > 1 for record in recording.requests)
    if retried:
        lines.append(f"{retried} requests were sent more than once")
    good = [record for record in recording.requests if record.error is None and not record.warmup]
    short = sum(1 for r in good if r.asked and (r.output_tokens or 0) < r.asked.output_tokens)
    if short:
        lines.append(f"{short} outputs are shorter than asked for")
    gaps = [np.array(record.gaps_s) for record in good if record.gaps_s]
    together = sum(int((own <= _TOGETHER * own.mean()).sum()) for own in gaps)
    share = together / sum(map(len, gaps)) if gaps else 0.0
    if share > _MOST_TOGETHER:
        lines.append(
            f"{100 * share:.0f} % of the events came together with the one before: the server sends them so, "
            "or the network or this client was late; means are surer than single gaps"
        )
    return lines


def _last_tries(recording: Recording) -> list[RequestRecord]:
    """Without those that a resumed run has sent again, as `~2`, `~3`, ..."""
    last = {re.sub(r"~\d+$", "", record.request): record for record in recording.requests}
    kept = {id(record) for record in last.values()}
    return [record for record in recording.requests if id(record) in kept]


def _table(title: str, headers: Sequence[str]) -> Table:
    style = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", **style)
    for header in headers:
        table.add_column(header, justify="right")
    return table


def _times(records: Iterable[RequestRecord]) -> tuple[str, str, str]:
    """Median TTFT, and median and 90th percentile of the time between tokens, ms."""
    ttft = [1000 * (r.first_token_s - r.sent_s) for r in records if r.first_token_s is not None]
    gaps = 1000 * np.concatenate([np.zeros(0), *(record.token_gaps_s for record in records)])
    itl = np.percentile(gaps, (50, 90)) if len(gaps) else (np.nan, np.nan)
    return _number(np.median(ttft) if ttft else np.nan), _number(itl[0]), _number(itl[1])


def _rate(records: Sequence[RequestRecord]) -> str:
    """Output tokens per second, over the time in which at least one of the requests was on its way."""
    tokens, time_s, until_s = 0, 0.0, 0.0
    for record in sorted(records, key=lambda record: record.sent_s):
        end_s = record.finished_s or record.sent_s
        tokens += record.output_tokens or 0
        time_s += max(0.0, end_s - max(record.sent_s, until_s))
        until_s = max(until_s, end_s)
    return _number(tokens / time_s if time_s > 0 else np.nan)


def _cached(records: Iterable[RequestRecord]) -> str:
    """Share of the prompt tokens that the server found in its cache, %; empty where it does not tell."""
    told = [r for r in records if r.cached_tokens is not None and r.prompt_tokens]
    prompt = sum(r.prompt_tokens or 0 for r in told)
    return f"{100 * sum(r.cached_tokens or 0 for r in told) / prompt:.1f}" if prompt else ""


def _number(value: float) -> str:
    """Three significant digits or more."""
    if np.isnan(value):
        return "-"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"
