"""The native recording: it is read as written, also after a kill; every fault is one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentjax.errors import InputError
from agentjax.readers import read_recording
from agentjax.records import Asked, Place, Recording, RequestRecord, to_json, with_cache_misses

HEADER = {"agentjax_bench": 1, "version": "0.1.0", "mode": "requests", "model": "m", "seed": 3, "config": {}}
GOOD = {
    "request": "r0",
    "sent_s": 0.5,
    "first_token_s": 0.75,
    "finished_s": 1.0,
    "prompt_tokens": 100,
    "output_tokens": 3,
    "cached_tokens": None,
    "gaps_s": [0.125, 0.125],
}


def write(tmp_path: Path, *lines: Any, end: str = "\n") -> Path:
    path = tmp_path / "bench.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + end)
    return path


def read(tmp_path: Path, *lines: Any, end: str = "\n") -> Recording:
    return read_recording(write(tmp_path, *lines, end=end))


def test_reads_header_and_requests_in_order_of_sending(tmp_path: Path) -> None:
    found = read(tmp_path, HEADER, GOOD | {"request": "late", "sent_s": 0.625}, "", GOOD)
    assert [record.request for record in found.requests] == ["r0", "late"]
    first = found.requests[0]
    assert first == RequestRecord("r0", 0.5, 0.75, 1.0, 100, 3, None, (0.125, 0.125))
    assert (first.ttft_s, first.latency_s, first.mean_gap_s, first.is_complete) == (0.25, 0.5, 0.125, True)
    assert found.about["tool"] == "agentjax" and found.about["model"] == "m" and found.about["seed"] == 3
    assert "agentjax_bench" not in found.about


def test_defaults_are_left_out() -> None:
    record = RequestRecord("a", 0.0, None, None, None, None, None, error="timeout", attempts=2)
    assert list(to_json(record)) == [
        "request", "sent_s", "first_token_s", "finished_s", "prompt_tokens", "output_tokens", "cached_tokens",
        "error", "attempts",
    ]  # fmt: skip
    assert not record.is_complete and record.ttft_s is None and record.mean_gap_s is None


seconds = st.floats(0, 1e6)
counts = st.integers(0, 2**40)
positive = st.integers(1, 2**31)
texts = st.text(min_size=1, max_size=8)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    instants = sorted(draw(st.tuples(seconds, seconds, seconds)))
    gaps = tuple(draw(st.lists(seconds, max_size=4)))
    per_event = st.lists(counts, min_size=len(gaps) + 1, max_size=len(gaps) + 1).map(tuple)
    return RequestRecord(
        request=draw(texts),
        sent_s=instants[0],
        first_token_s=draw(st.none() | st.just(instants[1])),
        finished_s=draw(st.none() | st.just(instants[2])),
        prompt_tokens=draw(st.none() | positive),
        output_tokens=draw(st.none() | counts),
        cached_tokens=draw(st.none() | counts),
        gaps_s=gaps,
        event_tokens=draw(st.none() | per_event),
        warmup=draw(st.booleans()),
        error=draw(st.none() | texts),
        error_detail=draw(st.none() | st.text(max_size=8)),
        attempts=draw(positive),
        server_prefill_s=draw(st.none() | seconds),
        server_decode_s=draw(st.none() | seconds),
        asked=draw(st.none() | st.builds(Asked, positive, positive, positive, st.floats(0, 1), counts)),
        place=draw(st.none() | st.builds(Place, texts, counts, counts, counts)),
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(records(), max_size=5, unique_by=lambda record: record.request), st.integers(0, 200))
def test_round_trip_and_truncation(tmp_path: Path, written: list[RequestRecord], cut: int) -> None:
    written = sorted(written, key=lambda record: record.sent_s)
    path = write(tmp_path, HEADER, *(to_json(record) for record in written))
    assert read_recording(path).requests == with_cache_misses(written)
    assert read_recording(path, "native").requests == with_cache_misses(written)
    if written:  # a run killed inside its last line
        whole = path.read_bytes()
        last = whole[:-1].rindex(b"\n") + 1
        path.write_bytes(whole[: min(last + cut, len(whole) - 2)])
        assert read_recording(path).requests == with_cache_misses(written[:-1])


def test_cached_tokens_that_only_other_requests_tell_are_0(tmp_path: Path) -> None:
    told = GOOD | {"request": "told", "sent_s": 0.625, "cached_tokens": 7}
    failed = GOOD | {"request": "failed", "sent_s": 0.75, "error": "timeout"}
    found = read(tmp_path, HEADER, GOOD, told, failed)
    assert [record.cached_tokens for record in found.requests] == [0, 7, None]
    assert all(record.cached_tokens is None for record in read(tmp_path, HEADER, GOOD, failed).requests)


def test_a_last_line_without_its_end_counts_if_it_is_whole(tmp_path: Path) -> None:
    assert len(read(tmp_path, HEADER, GOOD, end="").requests) == 1


def test_a_header_alone_is_a_recording_without_requests(tmp_path: Path) -> None:
    assert read(tmp_path, HEADER).requests == ()


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([GOOD], 'line 1: found a request, expected a header {"agentjax_bench": 1, ...} on the first line'),
        (
            [HEADER | {"agentjax_bench": 2}],
            "line 1, agentjax_bench: found 2, expected 1, the format read here",
        ),
        ([HEADER, without("sent_s")], "line 2, sent_s: found nothing, expected this field"),
        ([HEADER, without("cached_tokens")], "line 2, cached_tokens: found nothing, expected this field"),
        (
            [HEADER, "", GOOD | {"sent_s": "1"}],
            'line 3, sent_s: found "1", expected a number of seconds >= 0',
        ),
        (
            [HEADER, GOOD | {"sent_s": float("nan")}],
            "line 2, sent_s: found NaN, expected a number of seconds",
        ),
        ([HEADER, GOOD | {"output_tokens": 1.5}], "output_tokens: found 1.5, expected an integer from 0"),
        ([HEADER, GOOD | {"first_token": 1}], "first_token: found an unknown field, expected first_token_s"),
        (
            [HEADER, GOOD | {"place": {"program": "a", "stage": 0, "thread": 0, "turns": 0}}],
            "line 2, place.turns: found an unknown field, expected turn",
        ),
        (
            [HEADER, GOOD | {"first_token_s": 0.25}],
            "first_token_s: found 0.25, expected at least sent_s, 0.5",
        ),
        (
            [HEADER, GOOD | {"finished_s": 0.5}],
            "finished_s: found 0.5, expected at least first_token_s, 0.75",
        ),
        (
            [HEADER, GOOD | {"event_tokens": [1, 2]}],
            "line 2, event_tokens: found 2 entries, expected 3, one more than gaps_s",
        ),
        ([HEADER, GOOD, GOOD], 'line 3, request: found "r0" as in '),
        ([HEADER, GOOD, '{"request": "a", "sent_s"'], "line 3: found broken JSON at column 26"),
        ([HEADER, "[1]", GOOD], "line 2: found a list, expected an object"),
        ([HEADER, '{"request": "a", "request": "b"}'], 'line 2: found the field "request" twice'),
    ],
)
def test_faults(tmp_path: Path, lines: list[Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, *lines)
    assert sentence in str(caught.value) and "bench.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_recording(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    with pytest.raises(InputError, match="found no such file, expected a recording of a benchmark"):
        read_recording(missing)
    with pytest.raises(InputError, match="found an empty file"):
        read(tmp_path, end="")
    with pytest.raises(InputError, match="found the fields a, b, expected a recording of a"):
        read(tmp_path, {"a": 1, "b": 2})
    with pytest.raises(InputError, match=r'format: found "vlm", expected one of auto.*closest: vllm'):
        read_recording(write(tmp_path, HEADER), "vlm")
    with pytest.raises(InputError, match="found no header"):
        read_recording(write(tmp_path, '{"agentjax_ben', end=""), "native")
    (tmp_path / "x.gz").write_bytes(b"\x1f\x8bno")
    with pytest.raises(InputError, match="damaged gzip data"):
        read_recording(tmp_path / "x.gz")
