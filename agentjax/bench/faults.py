"""What can go wrong with a request, and how long to wait before it is sent again."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_NOT_STANDARD = ("ignore_eos", "min_tokens", "verbose", "return_token_ids")
_UNKNOWN = re.compile(
    r"extra|unknown|unrecogni[sz]ed|unexpected|unsupported|invalid field|not (supported|permitted|allowed)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Fault:
    """Why an attempt failed.

    Attributes:
        kind: timeout, connection, http_429, http_500, ..., or stream.
        detail: in words, those of the server if it has some.
        again: whether to send the request once more.
        wait_s: how long the server asks to wait before that; None: it does not say.
    """

    kind: str
    detail: str
    again: bool = False
    wait_s: float | None = None

    @property
    def status(self) -> int | None:
        """The HTTP status, where there is one."""
        return int(self.kind[5:]) if self.kind.startswith("http_") else None


def http_fault(status: int, detail: str, headers: Mapping[str, str]) -> Fault:
    """The fault of an answer with a status other than 200; too many requests and 5xx are tried again."""
    again = status == 429 or status >= 500
    wait_s = retry_after_s(headers.get("retry-after")) if again else None
    return Fault(f"http_{status}", detail, again, wait_s)


def retry_after_s(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks to wait: a number of seconds, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if seconds < float("inf") else None


def named(detail: str, fields: Collection[str]) -> set[str]:
    """Those of the fields that a text names."""
    return {field for field in fields if re.search(rf"\b{re.escape(field)}\b", detail)}


def refused_fields(detail: str, sent: Collection[str]) -> set[str]:
    """Fields that a server says it does not take, of those that a request can do without.

    Args:
        detail: the text of its answer with status 400 or 422.
        sent: the fields that may be left out, of the request.
    """
    found = named(detail, sent)
    if found or not _UNKNOWN.search(detail):
        return found
    return set(sent) & set(_NOT_STANDARD)


def wants_other_limit(detail: str) -> bool:
    """The server takes `max_completion_tokens` in place of `max_tokens`."""
    return "max_completion_tokens" in detail and bool(re.search(r"instead|" + _UNKNOWN.pattern, detail, re.I))
