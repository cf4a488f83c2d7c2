"""Reports of guidellm 0.8 (schema version 2), JSON: benchmarks with requests and their timings.

A request has the instants of its first and last event with a token, but not the gaps between events, so that
`gaps_s` stays empty and only the mean gap is known. Several benchmarks of a file
(such as one a concurrency) are on one clock, the epoch.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentjax.errors import complaint, expecting, shown
from agentjax.readers.common import kind_of_error, recording, utc
from agentjax.readers.files import Part, parse, read_bytes, validated
from agentjax.records import Asked, Place, Recording, RequestRecord

VERSION = 2

_Instant = Annotated[float, Field(ge=0), expecting("null or seconds since 1970")] | None
_Count = Annotated[int, Field(ge=0), expecting("null or an integer from 0")] | None


class _Timings(Part):
    request_start: _Instant = None
    resolve_start: _Instant = None
    first_token_iteration: _Instant = None
    last_token_iteration: _Instant = None


class _Info(Part):
    timings: _Timings
    conversation_id: str | None = None
    agent_id: str | None = None
    turn_index: int = 0
    error: str | None = None


class _Request(Part):
    request_id: str
    request_args: str | None = None
    info: _Info
    prompt_tokens: _Count = None
    cached_tokens: _Count = None
    output_tokens: _Count = None


class _Requests(Part):
    successful: list[_Request] = Field(default_factory=list)
    errored: list[_Request] = Field(default_factory=list)
    incomplete: list[_Request] = Field(default_factory=list)


class _Strategy(Part):
    type_: str
    streams: Annotated[int, Field(ge=1), expecting("null or an integer from 1")] | None = None
    rate: float | None = None


class _Config(Part):
    strategy: _Strategy


class _Scheduler(Part):
    measure_start_time: _Instant = None


class _Benchmark(Part):
    config: _Config
    requests: _Requests
    scheduler_metrics: _Scheduler = _Scheduler()


class _Report(Part):
    metadata: dict[str, Any]
    benchmarks: Annotated[list[_Benchmark], Field(min_length=1)]


def read_guidellm(path: str | Path) -> Recording:
    """The recording in a report.

    Raises:
        InputError: names file and field of the first fault; another version; a report without its requests.
    """
    document = parse(read_bytes(path), str(path))
    metadata = document.get("metadata")
    version = metadata.get("version") if isinstance(metadata, dict) else None
    if version != VERSION:
        expected = f"{VERSION}, as guidellm 0.8 writes it"
        raise complaint(
            f"{path}, metadata.version", "nothing" if version is None else shown(version), expected
        )
    report = validated(_Report, document, str(path))
    several = any(request.info.turn_index > 0 for each in report.benchmarks for request, _ in _all(each))
    records: list[RequestRecord] = []
    runs: list[dict[str, Any]] = []
    for benchmark in report.benchmarks:
        streams = _concurrency(benchmark.config.strategy)
        made = [_record(request, error, benchmark, several) for request, error in _all(benchmark)]
        made = [record for record in made if record is not None]
        strategy = benchmark.config.strategy
        run = {"strategy": strategy.type_, "concurrency": streams, "requests": len(made)}
        runs.append(run | ({} if strategy.rate is None else {"request_rate": strategy.rate}))
        records += made
    if not records:
        raise complaint(str(path), "a report without its requests", "one with requests.successful filled")
    backend = _backend(document)
    about = {
        "tool": "guidellm",
        "version": report.metadata.get("guidellm_version"),
        "mode": "programs" if several else "requests",
        "model": backend.get("model"),
        "url": backend.get("target"),
        "started": utc(min(record.sent_s for record in records)),
        "runs": runs,
    }
    return recording(records, about, path)


def _all(benchmark: _Benchmark) -> list[tuple[_Request, str | None]]:
    """The requests and the kind of fault of each."""
    requests = benchmark.requests
    return [
        *((request, None) for request in requests.successful),
        *((request, kind_of_error(request.info.error or "")) for request in requests.errored),
        *((request, "cancelled") for request in requests.incomplete),
    ]


def _concurrency(strategy: _Strategy) -> int | None:
    return 1 if strategy.type_ == "synchronous" else strategy.streams


def _record(
    request: _Request, error: str | None, benchmark: _Benchmark, several: bool
) -> RequestRecord | None:
    """A request as a record; None for one that was never sent."""
    info, timings = request.info, request.info.timings
    sent = timings.resolve_start if timings.request_start is None else timings.request_start
    if sent is None:
        return None
    streams = _concurrency(benchmark.config.strategy)
    measured_from = benchmark.scheduler_metrics.measure_start_time or 0.0
    asked = None
    if streams and request.prompt_tokens and request.output_tokens:
        output = _most_tokens(request.request_args) or request.output_tokens
        asked = Asked(request.prompt_tokens, output, streams, 0.0, 0)
    place = None
    if several and info.conversation_id:
        agent = "" if info.agent_id in (None, "default") else f"/{info.agent_id}"
        place = Place(f"{info.conversation_id}{agent}", 0, 0, info.turn_index)
    return RequestRecord(
        request=request.request_id,
        sent_s=sent,
        first_token_s=timings.first_token_iteration,
        finished_s=timings.last_token_iteration,
        prompt_tokens=request.prompt_tokens or None,
        output_tokens=request.output_tokens,
        cached_tokens=request.cached_tokens,
        warmup=sent < measured_from,
        error=error,
        error_detail=info.error,
        asked=asked,
        place=place,
    )


def _most_tokens(request_args: str | None) -> int | None:
    """The output length that a request asked for, from its body."""
    try:
        body = json.loads(request_args or "{}").get("body") or {}
        found = body.get("max_completion_tokens") or body.get("max_tokens")
    except (ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


def _backend(document: dict[str, Any]) -> dict[str, Any]:
    """What a report says of the server; its place is no part of what must be there."""
    for path in (
        ("config", "spec", "backend"),
        ("config", "backend"),
        ("benchmarks", 0, "config", "backend"),
    ):
        found: Any = document
        try:
            for key in path:
                found = found[key]
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(found, dict):
            return found
    return {}
