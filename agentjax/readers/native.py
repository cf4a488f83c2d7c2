"""The recording that `python -m agentjax.bench` writes: JSON Lines, a header and then one request a line.

    {"agentjax_bench": 1, "version": "0.1.0", "mode": "requests", "url": ..., "model": ..., "started": ...}
    {"request": "0", "sent_s": 0.01, "first_token_s": 0.05, "finished_s": 0.4, "prompt_tokens": 128,
     "output_tokens": 32, "cached_tokens": 0, "gaps_s": [0.011, ...]}

Fields are those of `RequestRecord`; those equal to their default may be absent. Times count from `started`.
A last line that breaks off, as a killed run leaves it, is left out.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentjax.errors import complaint, expecting, from_validation, shown
from agentjax.readers.files import lines
from agentjax.records import Asked, Place, Recording, RequestRecord, with_cache_misses

HEADER = "agentjax_bench"
FORMAT = 1

_Text = Annotated[str, Field(min_length=1), expecting("a string that is not empty")]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), expecting("a number of seconds >= 0")]
_Count = Annotated[int, Field(ge=0), expecting("an integer from 0")]
_Positive = Annotated[int, Field(ge=1), expecting("an integer from 1")]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), expecting("a number from 0 to 1")]


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Asked(_Object):
    prompt_tokens: _Positive
    output_tokens: _Positive
    concurrency: _Positive
    cached_share: _Share
    repeat: _Count


class _Place(_Object):
    program: _Text
    stage: _Count
    thread: _Count
    turn: _Count


class _Line(_Object):
    request: _Text
    sent_s: _Seconds
    first_token_s: _Seconds | None
    finished_s: _Seconds | None
    prompt_tokens: _Positive | None
    output_tokens: _Count | None
    cached_tokens: _Count | None
    gaps_s: list[_Seconds] = []
    event_tokens: list[_Count] | None = None
    warmup: bool = False
    error: _Text | None = None
    error_detail: str | None = None
    attempts: _Positive = 1
    server_prefill_s: _Seconds | None = None
    server_decode_s: _Seconds | None = None
    asked: _Asked | None = None
    place: _Place | None = None


_NAMES = {
    "": tuple(_Line.model_fields),
    "asked": tuple(_Asked.model_fields),
    "place": tuple(_Place.model_fields),
}


def read_native(path: str | Path) -> Recording:
    """The recording in a file of `agentjax.bench`.

    Raises:
        InputError: names file, line and field of the first fault.
    """
    found = lines(path, may_break_off=True)
    expected = f'a header {{"{HEADER}": {FORMAT}, ...}} on the first line'
    where, header = next(found, (str(path), {}))
    if HEADER not in header:
        what = "a request" if "request" in header else "no header"
        raise complaint(where, what, expected)
    if header[HEADER] != FORMAT:
        raise complaint(f"{where}, {HEADER}", shown(header[HEADER]), f"{FORMAT}, the format read here")
    requests: list[RequestRecord] = []
    places: dict[str, str] = {}
    for where, line in found:
        record = _record(line, where)
        if (earlier := places.setdefault(record.request, where)) != where:
            as_in = f"{shown(record.request)} as in {earlier}"
            raise complaint(f"{where}, request", as_in, "a name of its own")
        requests.append(record)
    about = {"tool": "agentjax", "file": str(path)}
    about |= {key: value for key, value in header.items() if key != HEADER}
    return Recording(with_cache_misses(sorted(requests, key=lambda record: record.sent_s)), about)


def _record(line: dict[str, Any], where: str) -> RequestRecord:
    try:
        made = _Line.model_validate(line)
    except ValidationError as error:
        raise from_validation(error, where, _NAMES) from None
    for later, earlier in (("first_token_s", "sent_s"), ("finished_s", "first_token_s")):
        after, before = getattr(made, later), getattr(made, earlier)
        if after is not None and before is not None and after < before:
            raise complaint(f"{where}, {later}", str(after), f"at least {earlier}, {before}")
    if made.event_tokens is not None and len(made.event_tokens) != len(made.gaps_s) + 1:
        found = f"{len(made.event_tokens)} entries"
        raise complaint(f"{where}, event_tokens", found, f"{len(made.gaps_s) + 1}, one more than gaps_s")
    values = dict(made)
    return RequestRecord(
        **values
        | {
            "gaps_s": tuple(made.gaps_s),
            "event_tokens": None if made.event_tokens is None else tuple(made.event_tokens),
            "asked": made.asked and Asked(**dict(made.asked)),
            "place": made.place and Place(**dict(made.place)),
        }
    )
