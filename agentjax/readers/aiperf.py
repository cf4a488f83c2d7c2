"""Records of AIPerf, `profile_export.jsonl`: one request a line, with metrics that name their units.

Version, model, address and concurrency come from the summary beside it, `profile_export_aiperf.json`, where
there is one. The token counts are the server's own (`usage_...`) where the file has them, else AIPerf's.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentjax.errors import InputError, among, complaint, expecting, shown
from agentjax.readers.common import kind_of_error, recording, single_gaps, utc
from agentjax.readers.files import Part, lines, parse, read_bytes, validated
from agentjax.records import Asked, Place, Recording, RequestRecord

UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}

_Number = Annotated[float, Field(ge=0), expecting("a number >= 0")]
_Instant = Annotated[int, Field(ge=0), expecting("nanoseconds since 1970")]


class _Metadata(Part):
    request_start_ns: _Instant
    x_request_id: str | None = None
    x_correlation_id: str | None = None
    conversation_id: str | None = None
    turn_index: Annotated[int, Field(ge=0), expecting("null or an integer from 0")] | None = None
    benchmark_phase: str = "profiling"
    phase_kind: str | None = None
    was_cancelled: bool = False


class _Metric(Part):
    value: Any
    unit: str


class _Error(Part):
    message: str = ""
    type: str | None = None
    code: int | None = None


class _Line(Part):
    metadata: _Metadata
    metrics: dict[str, _Metric] = Field(default_factory=dict)
    error: _Error | None = None


def read_aiperf(path: str | Path) -> Recording:
    """The recording in a `profile_export.jsonl`.

    Raises:
        InputError: names file, line and field of the first fault.
    """
    found = [(where, validated(_Line, line, where)) for where, line in lines(path)]
    if not found:
        raise complaint(str(path), "no requests", "at least one")
    zero_ns = min(line.metadata.request_start_ns for _, line in found)
    several = any(line.metadata.turn_index for _, line in found)
    about = _summary(path)
    concurrency = about.get("concurrency")
    records = [_record(line, where, zero_ns, several, concurrency) for where, line in found]
    about |= {
        "tool": "aiperf",
        "mode": "programs" if several else "requests",
        "started": utc(zero_ns * 1e-9),
    }
    return recording(records, about, path)


def _record(line: _Line, where: str, zero_ns: int, several: bool, concurrency: int | None) -> RequestRecord:
    metadata, error = line.metadata, line.error
    sent = (metadata.request_start_ns - zero_ns) * 1e-9
    ttft = _seconds(line, "time_to_first_token", where)
    latency = _seconds(line, "request_latency", where)
    gaps = _gaps(line, where)
    prompt = _tokens(line, where, "usage_prompt_tokens", "input_sequence_length")
    output = _tokens(line, where, "usage_completion_tokens", "output_sequence_length")
    kind = detail = None
    if error:
        detail = ": ".join(part for part in (error.type, error.message) if part)
        kind = kind_of_error(detail, error.code)
    elif metadata.was_cancelled:
        kind = "cancelled"
    elif ttft is None:
        raise complaint(f"{where}, metrics.time_to_first_token", "nothing", "it: run aiperf with --streaming")
    place = None
    session = metadata.x_correlation_id or metadata.conversation_id
    if several and session:
        place = Place(session, 0, 0, metadata.turn_index or 0)
    first = None if ttft is None else sent + ttft
    last = None if latency is None else sent + latency
    if first is not None and gaps is not None:
        last = first + sum(gaps)
    asked = concurrency and prompt and output and not kind and Asked(prompt, output, concurrency, 0.0, 0)
    return RequestRecord(
        request=metadata.x_request_id or where.rpartition(", ")[2],
        sent_s=sent,
        first_token_s=first,
        finished_s=last,
        prompt_tokens=prompt or None,
        output_tokens=output,
        cached_tokens=_tokens(line, where, "usage_prompt_cache_read_tokens"),
        gaps_s=single_gaps(gaps or (), output),
        warmup="warmup" in (metadata.phase_kind, metadata.benchmark_phase),
        error=kind,
        error_detail=detail,
        asked=asked or None,
        place=place,
    )


def _seconds(line: _Line, name: str, where: str) -> float | None:
    metric = line.metrics.get(name)
    return (
        None
        if metric is None
        else _number(metric.value, f"{where}, metrics.{name}.value") * _unit(metric, name, where)
    )


def _gaps(line: _Line, where: str) -> tuple[float, ...] | None:
    metric = line.metrics.get("inter_chunk_latency")
    if metric is None:
        return None
    place = f"{where}, metrics.inter_chunk_latency.value"
    if not isinstance(metric.value, list):
        raise complaint(place, shown(metric.value), "a list of times")
    unit = _unit(metric, "inter_chunk_latency", where)
    return tuple(_number(value, f"{place}[{i}]") * unit for i, value in enumerate(metric.value))


def _tokens(line: _Line, where: str, *names: str) -> int | None:
    """The first of these metrics that the line has."""
    for name in names:
        if metric := line.metrics.get(name):
            return round(_number(metric.value, f"{where}, metrics.{name}.value"))
    return None


def _unit(metric: _Metric, name: str, where: str) -> float:
    if metric.unit not in UNITS_S:
        raise complaint(f"{where}, metrics.{name}.unit", shown(metric.unit), among(metric.unit, UNITS_S))
    return UNITS_S[metric.unit]


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise complaint(where, shown(value), "a number >= 0")
    return float(value)


def _summary(path: str | Path) -> dict[str, Any]:
    """What the summary of the run says about it; nothing where it is absent or of another form."""
    beside = Path(path).with_name(Path(path).stem.removesuffix(".jsonl") + "_aiperf.json")
    try:
        summary = parse(read_bytes(beside), str(beside))
        config = summary["input_config"]
        phases = [phase for phase in config["phases"] if phase.get("kind") == "profiling"]
        models = [item["name"] for item in config["models"]["items"]]
        urls = config["endpoint"]["urls"]
        return {
            "version": summary["aiperf_version"],
            "model": models[0] if len(models) == 1 else None,
            "url": urls[0] if len(urls) == 1 else None,
            "concurrency": phases[0].get("concurrency") if len(phases) == 1 else None,
        }
    except (InputError, KeyError, TypeError, AttributeError, IndexError):
        return {}
