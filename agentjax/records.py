"""What a client sees of one request: the record that a benchmark writes and that calibration reads."""

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Asked:
    """What a request was sent to measure; one cell of the grid of a benchmark."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    cached_share: float
    repeat: int


@dataclass(frozen=True)
class Place:
    """Which call of a program a request is: `stages[stage][thread].calls[turn]`."""

    program: str
    stage: int
    thread: int
    turn: int


@dataclass(frozen=True)
class RequestRecord:
    """One streaming request. Times in seconds on one clock, 0 at the start of the run.

    None stands for what is not known, never 0.
    """

    request: str
    """Unique within its run."""
    sent_s: float
    """When the client began to send the request, of the last attempt."""
    first_token_s: float | None
    """When the first event with content came."""
    finished_s: float | None
    """When the last event with content came."""
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens that the server found in its KV cache, as it says itself."""
    gaps_s: tuple[float, ...] = ()
    """Time from each event with content to the next; empty where only their mean is known, `mean_gap_s`."""
    event_tokens: tuple[int, ...] | None = None
    """Tokens of each event with content, one entry more than `gaps_s`; None: one token each."""
    warmup: bool = False
    """Sent to warm the server up, or to fill its cache; not to be analysed."""
    error: str | None = None
    """Kind of fault: timeout, connection, http_429, http_500, ..., stream, and of other tools also cancelled
    and other; None: complete."""
    error_detail: str | None = None
    attempts: int = 1
    server_prefill_s: float | None = None
    """Time of the prompt as the server measured it."""
    server_decode_s: float | None = None
    """Time of the output after its first token as the server measured it."""
    asked: Asked | None = None
    place: Place | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the request ended well and its length and its first and last instants are known."""
        known = (self.first_token_s, self.finished_s, self.prompt_tokens, self.output_tokens)
        return self.error is None and None not in known

    @property
    def ttft_s(self) -> float | None:
        """Time from sending to the first token (s)."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def latency_s(self) -> float | None:
        """Time from sending to the last token (s)."""
        return None if self.finished_s is None else self.finished_s - self.sent_s

    @property
    def token_gaps_s(self) -> tuple[float, ...]:
        """Time from each token to the next (s): n tokens of one event share its gap in equal parts."""
        if self.event_tokens is None:
            return self.gaps_s
        events = zip(self.gaps_s, self.event_tokens[1:], strict=True)
        return tuple(gap_s / tokens for gap_s, tokens in events for _ in range(tokens))

    @property
    def mean_gap_s(self) -> float | None:
        """Mean time from a token to the next (s): known also where the single gaps are not."""
        first, last, tokens = self.first_token_s, self.finished_s, self.output_tokens
        if first is None or last is None or tokens is None or tokens < 2:
            return None
        return (last - first) / (tokens - 1)


@dataclass(frozen=True)
class Recording:
    """The requests of one run, in the order in which they were sent, and what is known about the run."""

    requests: tuple[RequestRecord, ...]
    about: dict[str, Any] = field(default_factory=dict)
    """Of the file's header: version, mode, url, model, server, started, seed, config."""


def with_cache_misses(requests: Sequence[RequestRecord]) -> tuple[RequestRecord, ...]:
    """The requests of one run, with 0 cached tokens where only other requests tell how many.

    vLLM and SGLang leave the number out of a reply where it is 0, and out of every reply where they are not
    set to tell it (`--enable-prompt-tokens-details`, `--enable-cache-report`).
    """
    if all(record.cached_tokens is None for record in requests):
        return tuple(requests)
    return tuple(
        replace(record, cached_tokens=0) if record.cached_tokens is None and record.is_complete else record
        for record in requests
    )


def to_json(record: RequestRecord) -> dict[str, Any]:
    """A record as it stands in a file: fields in their order, those equal to their default left out."""
    made: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if each.default is MISSING or value != each.default:
            made[each.name] = _plain(value)
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return asdict(value) if isinstance(value, Asked | Place) else value


def planned_calls(recording: Recording) -> dict[str, int]:
    """Calls of each program that was to be played, of the header's `programs`; empty where there are none."""
    return {
        program["name"]: sum(len(thread) for stage in program["stages"] for thread in stage)
        for program in recording.about.get("programs", ())
    }


def job_completion_times(recording: Recording) -> dict[str, float]:
    """Job completion time (s) of the programs that ended: from arrival to the last token of the last call.

    The arrival is the planned one, of the header's `arrivals_s`; where there is none, the sending of the
    first call. A program with a failed call is left out, and so is one with fewer calls than the header's
    `programs` say, since its run was cut off.
    """
    calls: dict[str, list[RequestRecord]] = {}
    for record in recording.requests:
        if record.place is not None:
            calls.setdefault(record.place.program, []).append(record)
    planned = planned_calls(recording)
    arrivals_s = recording.about.get("arrivals_s", {})
    times_s: dict[str, float] = {}
    for name, records in calls.items():
        ends_s = [record.finished_s for record in records if record.error is None]
        if len(ends_s) < max(len(records), planned.get(name, 0)) or None in ends_s:
            continue
        arrival_s = arrivals_s.get(name, min(record.sent_s for record in records))
        times_s[name] = max(end_s for end_s in ends_s if end_s is not None) - arrival_s
    return times_s
