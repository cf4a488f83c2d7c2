"""What the readers of other tools' files share: kinds of fault, gaps that can be told, and one clock."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

from agentjax.errors import complaint
from agentjax.records import Recording, RequestRecord, with_cache_misses

_HTTP = {status.phrase.lower(): status.value for status in HTTPStatus if status >= 400}
_KINDS = {"timeout": ("timeout", "timed out"), "connection": ("connect", "disconnected", "reset by peer")}


def single_gaps(gaps_s: Sequence[float], output_tokens: int | None) -> tuple[float, ...]:
    """The gaps (s) if they are those between single tokens, else nothing.

    A tool that writes one gap an event does not say which tokens an event brought. Where there are as many
    events as tokens, it was one each; otherwise only the mean gap is known, from the first and last event.
    """
    return tuple(gaps_s) if output_tokens is None or len(gaps_s) + 1 == output_tokens else ()


def kind_of_error(text: str, code: int | None = None) -> str:
    """The kind of a fault, in the words of `RequestRecord.error`, from what a tool says of it."""
    lower = text.lower()
    found = re.search(r"\b(?:http|status|error)\W{0,12}([45]\d\d)\b", lower)
    code = code if code and 400 <= code < 600 else _HTTP.get(lower.strip(), int(found[1]) if found else None)
    if "cancel" in lower or code == 499:
        return "cancelled"
    if code is not None:
        return f"http_{code}"
    return next((kind for kind, marks in _KINDS.items() if any(mark in lower for mark in marks)), "other")


def recording(requests: Iterable[RequestRecord], about: dict[str, Any], path: str | Path) -> Recording:
    """Requests in order of sending, on a clock that is 0 when the first is sent.

    Args:
        requests: on one clock of any origin.
        about: what is known; None is left out.
        path: the file, for complaints.

    Raises:
        InputError: no requests.
    """
    ordered = sorted(requests, key=lambda record: record.sent_s)
    if not ordered:
        raise complaint(str(path), "no requests", "at least one")
    zero = ordered[0].sent_s
    shifted = [
        replace(
            record,
            sent_s=record.sent_s - zero,
            first_token_s=None if record.first_token_s is None else record.first_token_s - zero,
            finished_s=None if record.finished_s is None else record.finished_s - zero,
        )
        for record in ordered
    ]
    known = {key: value for key, value in about.items() if value is not None}
    return Recording(with_cache_misses(shifted), known | {"file": str(path)})


def utc(epoch_s: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(epoch_s, UTC).isoformat()
