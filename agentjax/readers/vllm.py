"""Results of `vllm bench serve --save-result --save-detailed`: one JSON object a run, with lists by request.

Read are `input_lens`, `output_lens`, `ttfts` (s), `itls` (s, one entry an event after the first),
`start_times` (s, of any origin) and `errors`. Several objects, one a line, as `--append-result` writes them,
are taken as runs one after the other, `PAUSE_S` apart, since their clocks may differ. What the server had
cached is not in the file. A chat server's first event may have no content yet; `ttfts` count it all the same.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentjax.errors import InputError, complaint, expecting
from agentjax.readers.common import kind_of_error, recording, single_gaps
from agentjax.readers.files import Part, lines, parse, read_bytes, validated
from agentjax.records import Asked, Recording, RequestRecord

MARKS = {"ttfts", "input_lens", "mean_ttft_ms", "median_ttft_ms", "output_throughput"}
"""Fields of which a result has some."""
PAUSE_S = 1.0

_DETAILS = ("input_lens", "output_lens", "ttfts", "itls")
_Seconds = Annotated[float, Field(ge=0), expecting("a number of seconds >= 0")]
_Tokens = Annotated[int, Field(ge=0), expecting("an integer from 0")]


class _Result(Part):
    input_lens: list[_Tokens]
    output_lens: list[_Tokens]
    ttfts: list[_Seconds]
    itls: list[list[_Seconds]]
    start_times: list[float]
    errors: list[str | None] | None = None
    model_id: str | None = None
    date: str | None = None
    request_rate: float | str | None = None
    max_concurrency: Annotated[int, Field(ge=1), expecting("null or an integer from 1")] | None = None


def read_vllm(path: str | Path) -> Recording:
    """The recording in a result file.

    Raises:
        InputError: names file, run and field of the first fault; a file without lists by request.
    """
    documents = list(_documents(path))
    requests: list[RequestRecord] = []
    runs: list[dict[str, Any]] = []
    begin_s = 0.0
    for index, (where, document) in enumerate(documents):
        result = _checked(document, where)
        name = f"{index}-" if len(documents) > 1 else ""
        records = _requests(result, name, begin_s)
        ends = [time for record in records for time in (record.sent_s, record.finished_s) if time is not None]
        begin_s = max(ends, default=begin_s) + PAUSE_S
        requests += records
        rate, most = result.request_rate, result.max_concurrency
        runs.append(
            {"requests": len(records), "request_rate": rate, "concurrency": most, "saved": result.date}
        )
    first = documents[0][1]
    about = {"tool": "vllm bench serve", "mode": "requests", "model": first.get("model_id"), "runs": runs}
    return recording(requests, about, path)


def _documents(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        return [(str(path), parse(read_bytes(path), str(path)))]
    except InputError:
        return list(lines(path))


def _checked(document: dict[str, Any], where: str) -> _Result:
    if missing := [name for name in _DETAILS if name not in document]:
        found = "aggregates only" if len(missing) == len(_DETAILS) else f"no {missing[0]}"
        raise complaint(where, found, "lists by request: run vllm bench serve with --save-detailed too")
    if "start_times" not in document:
        raise complaint(where, "no start_times", "them, as newer versions of vllm bench serve write them")
    result = validated(_Result, document, where)
    count = len(result.input_lens)
    for name in (*_DETAILS, "start_times", "errors"):
        values = getattr(result, name)
        if values is not None and len(values) != count:
            raise complaint(f"{where}, {name}", f"{len(values)} entries", f"{count} as in input_lens")
    return result


def _requests(result: _Result, name: str, begin_s: float) -> list[RequestRecord]:
    zero = min(result.start_times, default=0.0) - begin_s
    records = []
    for i, prompt in enumerate(result.input_lens):
        output, ttft, gaps = result.output_lens[i], result.ttfts[i], result.itls[i]
        detail = result.errors[i] if result.errors else None
        # a failed request has no first token; the tool may leave its reason empty
        failed = bool(detail) or not (ttft and output)
        sent = result.start_times[i] - zero
        first = sent + ttft if ttft else None
        most = result.max_concurrency
        asked = None if failed or most is None else Asked(prompt, output, most, 0.0, 0)
        records.append(
            RequestRecord(
                request=f"{name}{i}",
                sent_s=sent,
                first_token_s=first,
                finished_s=None if failed or first is None else first + sum(gaps),
                prompt_tokens=prompt or None,
                output_tokens=None if failed else output,
                cached_tokens=None,
                gaps_s=() if failed else single_gaps(gaps, output),
                error=kind_of_error(detail or "") if failed else None,
                error_detail=detail or None,
                asked=asked,
            )
        )
    return records
