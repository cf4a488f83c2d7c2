"""Who computes a prompt and who decodes, at any moment of a recording."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from agentjax.records import Recording, RequestRecord

READING_S = 0.003
"""Tokens of one iteration reach a client within so many seconds."""
TIMEOUT_S = 600.0
"""How long a request that broke off may have kept the server busy, where the recording does not say."""


@dataclass(frozen=True)
class Request:
    """A request as far as calibration needs it; times in seconds from the start of the recording."""

    index: int
    name: str
    sent: float
    began: float
    """When the server began with its prompt; until then it waits."""
    first: float | None
    finished: float | None
    end: float
    """When it no longer kept the server busy."""
    prompt: int
    cached: int | None
    output: int
    known: bool
    """Whether the numbers of tokens are known."""
    warmup: bool
    times: Float[np.ndarray, " events"] | None
    """When each event with tokens came; None where only the first and last are known."""
    tokens: Int[np.ndarray, " events"]
    """Tokens that had come by then, that event's included."""
    server_prefill: float | None


@dataclass(frozen=True)
class Timeline:
    """Periods between the moments at which a prompt is begun, its first token comes, or a request ends."""

    requests: tuple[Request, ...]
    bounds: Float[np.ndarray, " periods+1"]
    decoding: tuple[tuple[int, ...], ...]
    """Indices of the requests that decode in each period."""
    prompting: tuple[tuple[int, ...], ...]
    """Indices of those whose prompt is computed."""
    has_prompt: Bool[np.ndarray, " periods"] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "has_prompt", np.asarray([bool(some) for some in self.prompting] or [True]))

    @property
    def longest_prompt(self) -> int:
        """Most prompt tokens that were computed for one request."""
        return max((one.prompt - (one.cached or 0) for one in self.requests), default=0)

    def may_share_a_chunk(self, request: Request, budget: int | None) -> bool:
        """Whether a part of a waiting prompt may have filled up the last chunk of the one before it, where
        the server does not say when it began with a prompt."""
        if budget is None or request.server_prefill is not None or request.first is None:
            return False
        left = budget - max((len(some) for some in self.decoding), default=0)

        def long(one: Request) -> bool:
            return one.prompt - (one.cached or 0) > left

        if long(request) and any(request.began < one.sent < request.first for one in self.requests):
            return True
        before = int(np.searchsorted(self.bounds, request.began, "left")) - 1
        waited = request.began > request.sent and before >= 0
        return waited and any(long(self.requests[index]) for index in self.prompting[before])

    def in_flight(self, moment: float) -> bool:
        """Whether any request was sent before a moment and ended after it."""
        return any(one.sent < moment < one.end for one in self.requests)

    def period(self, start: Float[np.ndarray, " n"], end: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """The period that each interval lies in; -1 for those that lie in several."""
        first = np.searchsorted(self.bounds, start, "right") - 1
        last = np.searchsorted(self.bounds, end, "left") - 1
        return np.where((first == last) & (end > start), first, -1)

    def longest_period(self, start: float, end: float) -> tuple[int, float]:
        """The period that takes most of an interval, and its share."""
        first = int(np.searchsorted(self.bounds, start, "right")) - 1
        last = max(first + 1, int(np.searchsorted(self.bounds, end, "left")))
        cuts = np.clip(self.bounds[first : last + 1], start, end)
        lengths = np.diff(cuts)
        best = int(np.argmax(lengths))
        return first + best, float(lengths[best] / max(end - start, 1e-12))

    def during(
        self, start: float, end: float, expected: Collection[float] = ()
    ) -> tuple[set[int], set[int], int]:
        """Who computed a prompt and who decoded at any time of an interval, and how many bounds other than
        the expected ones lie inside it."""
        first = int(np.searchsorted(self.bounds, start, "right")) - 1
        last = max(first + 1, int(np.searchsorted(self.bounds, end, "left")))
        inside = [bound for bound in self.bounds[first + 1 : last] if bound not in expected]
        prompting = set().union(*self.prompting[first:last])
        decoding = set().union(*self.decoding[first:last])
        return prompting, decoding, len(inside)

    def context(self, decoding: Sequence[int], start: float, end: float) -> float:
        """Mean over requests and over the steps of an interval of the context at the end of a step (tokens):
        the prompt and the tokens that had come before the step."""
        middle = 0.5 * (start + end)
        return float(np.mean([self._context(self.requests[index], middle) for index in decoding]))

    @staticmethod
    def _context(request: Request, middle: float) -> float:
        if request.times is not None:
            come = np.interp(middle, request.times, request.tokens)
        else:
            come = np.interp(middle, [request.first or 0.0, request.end], [1, max(1, request.output)])
        return request.prompt + max(1.0, float(come) - 0.5)


def read_timeline(recording: Recording, left_out: Counter[str], notes: list[str]) -> Timeline:
    """The periods of a recording; reasons and notes go into the last two arguments."""
    config = recording.about.get("config")
    timeout = config.get("timeout_s") if isinstance(config, dict) else None
    timeout = float(timeout) if isinstance(timeout, int | float) else TIMEOUT_S
    requests = []
    assumed = 0
    for record in recording.requests:
        if record.error is not None:
            left_out["requests that failed"] += 1
            if record.error.startswith("http_") or record.error == "connection":
                continue  # refused: it took none of the server's time
        request = _request(len(requests), record, timeout, left_out)
        requests.append(request)
        assumed += record.cached_tokens is None and request.cached == 0 and not record.warmup
    if assumed:
        notes.append(
            f"the server does not say what it found in its cache for {assumed} requests: taken as nothing"
        )
    requests = _begun(requests)
    moments = [
        moment
        for request in requests
        for moment in (request.began, request.first, request.end)
        if moment is not None
    ]
    bounds = np.unique(np.asarray(moments, float))
    decoding: list[list[int]] = [[] for _ in bounds[1:]]
    prompting: list[list[int]] = [[] for _ in bounds[1:]]
    for request in requests:
        first = request.end if request.first is None else request.first
        began, came, ended = (int(np.searchsorted(bounds, at)) for at in (request.began, first, request.end))
        for period in range(began, came):
            prompting[period].append(request.index)
        for period in range(came, ended):
            decoding[period].append(request.index)
    return Timeline(tuple(requests), bounds, tuple(map(tuple, decoding)), tuple(map(tuple, prompting)))


def _begun(requests: Sequence[Request]) -> list[Request]:
    """The requests with the time at which the server began with their prompts.

    That is when it says so itself; otherwise when the iteration that runs as a request is sent has ended,
    which shows in the tokens of others; on an idle server at once.
    """
    events = np.sort(np.concatenate([_seen(request) for request in requests] or [np.zeros(0)]))
    turns = np.sort([moment for one in requests for moment in (one.first, one.end) if moment is not None])
    blind = [(one.first, one.end) for one in requests if one.first is not None and one.times is None]
    out = []
    for request in requests:
        began = request.sent
        if request.first is not None and request.server_prefill is not None:
            began = min(max(began, request.first - request.server_prefill), request.first)
            # the tokens before it may have taken a little to arrive
            late = began + tolerance(began, request.first, 0.02)
            after = turns[np.searchsorted(turns, began, "right") : np.searchsorted(turns, late, "right")]
            began = float(after[-1]) if len(after) and after[-1] < request.first else began
        elif request.first is not None and not any(start <= began < end for start, end in blind):
            place = int(np.searchsorted(events, began, "right"))
            if place < len(events) and events[place] < request.first - tolerance(began, request.first, 0.02):
                began = float(events[place])
        out.append(replace(request, began=began))
    return out


def tolerance(start: float, end: float, share: float) -> float:
    """By how much times of one moment may differ for a client (s): a few ms, or a share of the interval."""
    return max(READING_S, share * (end - start))


def _seen(request: Request) -> Float[np.ndarray, " events"]:
    """When tokens of a request came, as far as is known."""
    if request.times is not None:
        return request.times
    return np.asarray([moment for moment in (request.first, request.finished) if moment is not None])


def _request(index: int, record: RequestRecord, timeout: float, left_out: Counter[str]) -> Request:
    end = record.finished_s
    if end is None or record.error is not None:
        end = max(record.sent_s + timeout, end or 0.0)
    first = record.first_token_s
    known = record.prompt_tokens is not None and record.output_tokens is not None
    whole = record.error is None and first is not None and record.finished_s is not None
    times, tokens = _events(record, left_out) if whole and known else (None, np.zeros(0, int))
    return Request(
        index=index,
        name=record.request,
        sent=record.sent_s,
        began=record.sent_s,
        first=first,
        finished=record.finished_s if whole else None,
        end=max(end, first or 0.0, record.sent_s),
        prompt=record.prompt_tokens or 0,
        cached=_cached(record) if whole and known else None,
        output=record.output_tokens or 0,
        known=known,
        warmup=record.warmup or not (whole and known),
        times=times,
        tokens=tokens,
        server_prefill=record.server_prefill_s,
    )


def _cached(record: RequestRecord) -> int | None:
    """Cached tokens of the prompt, of which the last token is always computed; None where nobody can tell."""
    assert record.prompt_tokens is not None
    if record.cached_tokens is not None:
        return min(record.cached_tokens, record.prompt_tokens - 1)
    shared = record.asked is not None and record.asked.cached_share > 0
    later = record.place is not None and (record.place.turn > 0 or record.place.stage > 0)
    return None if shared or later else 0


def _events(
    record: RequestRecord, left_out: Counter[str]
) -> tuple[Float[np.ndarray, " events"] | None, Int[np.ndarray, " events"]]:
    """When the events of a request came, and how many tokens had come by then."""
    none = None, np.zeros(0, int)
    assert record.first_token_s is not None and record.finished_s is not None
    assert record.output_tokens is not None
    gaps = np.asarray(record.gaps_s, float)
    if not len(gaps):
        return none
    each = np.asarray(record.event_tokens or [1] * (len(gaps) + 1))
    tokens = np.cumsum(each)
    span = record.finished_s - record.first_token_s
    if abs(int(tokens[-1]) - record.output_tokens) > max(1, 0.02 * record.output_tokens) or not np.isclose(
        gaps.sum(), span, rtol=0.02, atol=2e-3
    ):
        left_out[
            "requests whose events do not add up to their tokens and time: only their mean step counts"
        ] += 1
        return none
    times = record.first_token_s + np.concatenate([[0.0], np.cumsum(gaps) * (span / max(gaps.sum(), 1e-12))])
    times[-1] = record.finished_s
    return np.maximum.accumulate(times), tokens
