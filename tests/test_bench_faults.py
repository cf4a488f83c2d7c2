"""Everything that goes wrong ends as a record with its kind, or as one sentence where nothing can go on."""

import json
import socket
import ssl
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentjax.bench import run_requests
from agentjax.bench.client import _reason
from agentjax.bench.faults import http_fault, refused_fields, retry_after_s, wants_other_limit
from agentjax.errors import InputError
from agentjax.readers import read_recording
from agentjax.records import Recording, RequestRecord
from tests.mock_endpoint import DROP, HANG, Answer, MockEndpoint, Piece, Request, completion, event, refusal

KEYS: dict[str, Any] = {
    "endpoint": "completions",
    "prompts": "ids",
    "prompt_tokens": [20],
    "output_tokens": [4],
    "concurrency": [1],
    "warmup_requests": 0,
    "backoff_s": 0.001,
    "api_key_env": "BENCH_TEST_KEY",
}
FIRST = 1
"""Number of the first request to measure, after the check."""


def run(script: Callable[[Request], Any], *, closes: bool = False, **keys: Any) -> list[RequestRecord]:
    with MockEndpoint(script, closes=closes) as server:
        recording = run_requests(server.url, "mock", **{**KEYS, **keys})
    return [record for record in recording.requests if not record.warmup]


def only_first(fault: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """The fault for the first measured request, complete answers for all others."""
    return lambda request: fault(request) if request.number == FIRST else completion(request)


def halfway(request: Request, *more: Piece) -> Sequence[Piece]:
    return [*completion(request, usage=False, done=False, finish=False)[:2], *more]


# ---- during the run: a record, and the run goes on ---------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "words", "events"),
    [
        (lambda r: halfway(r, DROP), "connection", "after 2 events", 2),
        (lambda r: halfway(r), "stream", "broke off after 2 events", 2),
        (lambda r: halfway(r, b'data: {"choices": [{"te'), "stream", "not JSON", 2),
        (lambda r: halfway(r, b"data: oops\n\n"), "stream", "not JSON: oops", 2),
        (lambda r: halfway(r, event({"error": {"message": "out of memory"}})), "stream", "out of memory", 2),
        (lambda r: halfway(r, event({"detail": "overload"}, "error")), "stream", "overload", 2),
        (lambda r: [], "stream", "no content", 0),
        (lambda r: [b"data: [DONE]\n\n"], "stream", "no content", 0),
        (lambda r: completion(r, output=0), "stream", "no content", 0),
        (
            lambda r: Answer([b'{"choices": []}'], 200, {"Content-Type": "application/json"}),
            "stream",
            "json",
            0,
        ),
        (lambda r: Answer([b"<html>"], 200, {"Content-Type": "text/html"}), "stream", "text/html", 0),
        (lambda r: halfway(r, HANG), "timeout", "nothing for 0.5 s after 2 events", 2),
        (lambda r: refusal(400, "prompt is too long"), "http_400", "prompt is too long", 0),
        (lambda r: refusal(418, "a teapot"), "http_418", "a teapot", 0),
        (lambda r: Answer([b"<h1>nginx</h1>"], 404, {}), "http_404", "nginx", 0),
        (lambda r: Answer([b""], 301, {"Location": "/elsewhere"}), "http_301", "", 0),
    ],
)
def test_a_fault_is_recorded_and_the_run_goes_on(
    fault: Callable[[Request], Any], kind: str, words: str, events: int
):
    records = run(only_first(fault), stall_timeout_s=0.5 if kind == "timeout" else 60.0)
    assert [record.error for record in records] == [kind, None, None, None]
    failed = records[0]
    assert words in (failed.error_detail or "")
    assert failed.attempts == 1
    assert len(failed.gaps_s) == max(0, events - 1)
    assert (failed.first_token_s is None) == (events == 0)
    assert (failed.output_tokens or 0) == events


def test_total_time_out():
    records = run(lambda r: completion(r, gap_s=0.5) if r.number == FIRST else completion(r), timeout_s=1.2)
    assert [record.error for record in records] == ["timeout", None, None, None]
    assert records[0].error_detail == "not complete after 1.2 s"
    assert records[0].first_token_s is not None


def test_waiting_for_the_first_token_is_no_stall():
    records = run(lambda r: [0.6, *completion(r)], stall_timeout_s=0.4, requests=1)
    assert records[0].error is None


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (lambda r: refusal(429, "slow down"), "http_429"),
        (lambda r: refusal(500, "oh"), "http_500"),
        (lambda r: refusal(503, "loading"), "http_503"),
        (lambda r: [DROP], "connection"),
    ],
)
def test_what_may_pass_is_tried_again_up_to_a_limit(fault: Callable[[Request], Any], kind: str):
    def twice(request: Request) -> Any:
        return fault(request) if FIRST <= request.number < FIRST + 2 else completion(request)

    # a cut connection that was used before is tried again at once, which is not counted
    records = run(twice)
    assert [record.error for record in records] == [None] * 4
    assert records[0].attempts == (2 if kind == "connection" else 3)

    def always(request: Request) -> Any:
        return fault(request) if request.number >= FIRST else completion(request)

    records = run(always, max_attempts=3, requests=2)
    assert [record.error for record in records] == [kind, kind]
    assert [record.attempts for record in records] == [3, 3]


def test_times_are_those_of_the_last_attempt():
    def script(request: Request) -> Any:
        return refusal(429, Retry_After="0.3") if request.number == FIRST else completion(request)

    with MockEndpoint(script) as server:
        check, record = run_requests(server.url, "mock", **KEYS, requests=1).requests
    assert record.attempts == 2
    assert record.sent_s >= (check.finished_s or 0.0) + 0.3


@pytest.mark.parametrize(
    ("value", "least_s", "most_s"), [("0.2", 0.19, 5), ("1000", 0.29, 5), ("-3", 0, 5), ("soon", 0, 5)]
)
def test_retry_after_is_kept_up_to_the_longest_wait(value: str, least_s: float, most_s: float):
    def script(request: Request) -> Any:
        return refusal(429, Retry_After=value) if request.number == FIRST else completion(request)

    with MockEndpoint(script) as server:
        run_requests(server.url, "mock", **KEYS, requests=1, longest_wait_s=0.3)
    assert least_s <= server.requests[FIRST + 1].at_s - server.requests[FIRST].at_s <= most_s


def test_retry_after_as_seconds_or_date():
    assert retry_after_s(None) is None
    assert retry_after_s("7") == 7.0
    assert retry_after_s("-7") == 0.0
    assert retry_after_s("soon") is None
    assert retry_after_s("nan") is None
    assert retry_after_s("inf") is None
    later = datetime.now(UTC) + timedelta(seconds=100)
    assert retry_after_s(format_datetime(later, usegmt=True)) == pytest.approx(100, abs=2)
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert http_fault(400, "", {"retry-after": "7"}).wait_s is None


def test_a_server_that_closes_connections_is_no_fault():
    with MockEndpoint(closes=True) as server:
        recording = run_requests(server.url, "mock", **KEYS, requests=6)
    assert all(record.error is None and record.attempts == 1 for record in recording.requests)
    assert server.connections == 7


def test_connections_are_used_again_where_they_last():
    with MockEndpoint() as server:
        run_requests(server.url, "mock", **KEYS, requests=6)
    assert server.connections == 1


def test_a_missing_done_is_no_fault():
    records = run(lambda r: completion(r, done=False))
    assert all(record.error is None for record in records)


def test_a_connection_that_hangs_after_done_is_no_fault():
    records = run(lambda r: [*completion(r), *([HANG] if r.number == FIRST else [])], requests=2)
    assert [record.error for record in records] == [None, None]


def test_a_connection_cut_after_done_is_no_fault():
    records = run(lambda r: [*completion(r), *([DROP] if r.number == FIRST else [])], requests=2)
    assert [record.error for record in records] == [None, None]


def test_without_usage_events_are_counted():
    records = run(lambda r: completion(r, usage=False))
    assert all(record.error is None for record in records)
    assert {record.prompt_tokens for record in records} == {None}
    assert {record.output_tokens for record in records} == {4}


def test_a_server_that_stays_away_ends_the_run(tmp_path: Path):
    out = tmp_path / "bench.jsonl"

    def script(request: Request) -> Any:
        return [DROP] if request.number > FIRST + 3 else completion(request)

    with MockEndpoint(script, closes=True) as server:
        keys = {**KEYS, "out": str(out), "requests": 50, "max_attempts": 1, "concurrency": [2]}
        with pytest.raises(InputError, match=r"no connection for 1\d requests in a row.*resume=true goes on"):
            run_requests(server.url, "mock", **keys)
    records = [record for record in read_recording(out).requests if not record.warmup]
    assert sum(record.error is None for record in records) == 4
    assert len(records) < 20


# ---- fields that a server does not take --------------------------------------------------------------------


def picky(*refused: str, text: str = "Unrecognized request argument supplied: {}") -> Any:
    def script(request: Request) -> Any:
        for field in refused:
            if field in request.body:
                return refusal(400, text.format(field))
        return completion(request, usage="stream_options" in request.body)

    return script


@pytest.mark.parametrize(
    "refused",
    [["ignore_eos"], ["min_tokens"], ["ignore_eos", "min_tokens"], ["stream_options", "temperature"]],
)
def test_refused_fields_are_left_out_for_the_rest_of_the_run(refused: list[str]):
    with MockEndpoint(picky(*refused)) as server:
        recording = run_requests(server.url, "mock", **KEYS)
    assert all(record.error is None and record.attempts == 1 for record in recording.requests)
    assert len(server.requests) == 5 + len(refused)
    assert not set(refused) & server.bodies[-1].keys()
    assert {"ignore_eos", "min_tokens"} - set(refused) <= server.bodies[-1].keys()


def test_an_answer_without_names_drops_what_is_not_standard():
    with MockEndpoint(picky("ignore_eos", text="Extra inputs are not permitted")) as server:
        run_requests(server.url, "mock", **KEYS)
    assert not {"ignore_eos", "min_tokens"} & server.bodies[-1].keys()
    assert {"temperature", "stream_options"} <= server.bodies[-1].keys()


def test_a_server_may_want_the_other_limit():
    text = (
        "Unsupported parameter: '{}' is not supported with this model. Use 'max_completion_tokens' instead."
    )
    with MockEndpoint(picky("max_tokens", text=text)) as server:
        recording = run_requests(server.url, "mock", **KEYS)
    assert all(record.error is None and record.attempts == 1 for record in recording.requests)
    assert server.bodies[-1]["max_completion_tokens"] == 4
    assert "max_tokens" not in server.bodies[-1]


def test_fields_of_the_user_are_never_left_out():
    with MockEndpoint(picky("ignore_eos")) as server, pytest.raises(InputError, match="HTTP 400"):
        run_requests(server.url, "mock", **KEYS, extra_body={"ignore_eos": True})
    assert len(server.requests) == 1


def test_a_short_field_of_the_user_is_not_taken_for_a_part_of_another():
    with MockEndpoint(picky("ignore_eos")) as server:
        run_requests(server.url, "mock", **KEYS, extra_body={"n": 1})
    assert "ignore_eos" not in server.bodies[-1]


def test_many_requests_may_be_refused_at_once():
    def script(request: Request) -> Any:
        if request.number == 0 or "min_tokens" not in request.body:
            return completion(request)
        answer = refusal(400, "unknown field min_tokens")
        return Answer([0.05, *answer.pieces], 400, answer.headers)

    with MockEndpoint(script) as server:
        recording = run_requests(server.url, "mock", **{**KEYS, "concurrency": [6]})
    assert all(record.error is None for record in recording.requests)
    assert len(server.requests) > len(recording.requests)


def test_which_fields_a_text_refuses():
    sent = {"ignore_eos", "min_tokens", "temperature", "stream_options"}
    assert refused_fields("body.min_tokens: Extra inputs", sent) == {"min_tokens"}
    assert refused_fields("unknown field", sent) == {"ignore_eos", "min_tokens"}
    assert refused_fields("the prompt is too long", sent) == set()
    assert refused_fields("xmin_tokensx is bad", sent) == set()
    too_long = "'max_tokens' or 'max_completion_tokens' is too large: 8000"
    assert not wants_other_limit(too_long)
    assert wants_other_limit("max_tokens is not supported, use max_completion_tokens")


# ---- before the run: one sentence --------------------------------------------------------------------------


def refused(script: Callable[[Request], Any], **keys: Any) -> str:
    with MockEndpoint(script, models=("big-model", "small-model")) as server:
        with pytest.raises(InputError) as caught:
            run_requests(server.url, keys.pop("model", "mock"), **{**KEYS, **keys})
        assert server.url in str(caught.value) or "model" in str(caught.value)
    return str(caught.value)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_no_server(tmp_path: Path):
    url, out = f"http://127.0.0.1:{free_port()}", tmp_path / "bench.jsonl"
    with pytest.raises(InputError) as caught:
        run_requests(url, "mock", out=str(out), **KEYS)
    expected = "found no server (connection refused), expected an OpenAI-compatible server that runs"
    assert str(caught.value) == f"url {url}: {expected}"
    assert not out.exists()


def test_why_there_is_no_connection():
    encrypted = httpx.ConnectError("[SSL] wrong version number")
    encrypted.__cause__ = ssl.SSLError(1, "[SSL] wrong version number")
    assert _reason(encrypted) == "[ssl] wrong version number"
    assert _reason(httpx.ConnectTimeout("")) == "no connection within 10 s"


def test_an_environment_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    with pytest.raises(InputError, match="environment variables of proxies and certificates"):
        run_requests("http://127.0.0.1:1", "mock", **KEYS)


def test_wrong_model():
    found = refused(lambda r: refusal(404, "The model does not exist"), model="smal-model")
    assert found == "model: found smal-model, expected one of big-model, small-model (closest: small-model)"


def test_wrong_path():
    assert "HTTP 404 (nothing here)" in refused(lambda r: refusal(404, "nothing here"), model="big-model")


@pytest.mark.parametrize("status", [401, 403])
def test_no_access_names_the_variable(status: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BENCH_TEST_KEY", raising=False)
    found = refused(lambda r: refusal(status, "bad key"))
    assert f"no access (HTTP {status}), the environment variable BENCH_TEST_KEY is not set" in found
    monkeypatch.setenv("BENCH_TEST_KEY", "sk-secret")
    found = refused(lambda r: refusal(status, f"bad key {r.headers['authorization']}"))
    assert "the environment variable BENCH_TEST_KEY is not accepted" in found
    assert "sk-secret" not in found
    assert "api_key_env" in refused(lambda r: refusal(status), api_key_env=None)


def test_other_faults_of_the_first_request():
    assert "HTTP 503 (Loading model)" in refused(lambda r: refusal(503, "Loading model"))
    assert "HTTP 400 (too long)" in refused(lambda r: refusal(400, "too long"))
    assert "no streamed answer" in refused(lambda r: Answer([b"{}"], 200, {"Content-Type": "text/plain"}))
    assert "not complete after 0.2 s" in refused(lambda r: [HANG], timeout_s=0.2)
    assert "no server (" in refused(lambda r: [DROP])


# ---- the key -----------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = "sk-secret-123"
    monkeypatch.setenv("BENCH_TEST_KEY", f" {key}\n")
    out = tmp_path / "bench.jsonl"

    def script(request: Request) -> Any:
        told = request.headers["authorization"]
        match request.number:
            case 1:
                return refusal(400, f"you sent {told}", Server=told)
            case 2:
                return halfway(request, event({"error": {"message": f"you sent {told}"}}))
            case 3:
                return halfway(request, f"data: {told}\n\n".encode())
        return Answer(completion(request), headers={"Server": told, "Content-Type": "text/event-stream"})

    with MockEndpoint(script) as server:
        recording = run_requests(server.url, "mock", out=str(out), **KEYS)
    assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {key}"}
    assert sum("[key]" in (record.error_detail or "") for record in recording.requests) == 3
    assert key not in out.read_text()
    assert key not in repr(recording)
    assert "BENCH_TEST_KEY" in out.read_text()


def test_a_long_text_is_not_cut_inside_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCH_TEST_KEY", "sk-secret-123")
    records = run(only_first(lambda request: refusal(400, "x" * 290 + " sk-secret-123 " + "x" * 90)))
    assert records[0].error_detail is not None
    assert len(records[0].error_detail) == 300
    assert "sk-" not in records[0].error_detail


def test_no_key_no_header(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BENCH_TEST_KEY", raising=False)
    with MockEndpoint() as server:
        run_requests(server.url, "mock", **KEYS)
    assert "authorization" not in server.requests[0].headers


def test_a_key_that_cannot_be_sent_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCH_TEST_KEY", "sk-sécret")
    with pytest.raises(InputError, match="environment variable BENCH_TEST_KEY") as caught:
        run_requests("http://127.0.0.1:1", "mock", **KEYS)
    assert "cret" not in str(caught.value)


def test_every_line_is_whole_whatever_happens(tmp_path: Path):
    out = tmp_path / "bench.jsonl"
    faults = [lambda r: halfway(r, DROP), lambda r: refusal(400, "ü\n\u2028\ud83d"), lambda r: halfway(r)]

    def script(request: Request) -> Any:
        return faults[request.number % 3](request) if request.number % 4 else completion(request)

    with MockEndpoint(script) as server:
        recording: Recording = run_requests(
            server.url, "mock", out=str(out), **{**KEYS, "concurrency": [4]}, requests=20
        )
    lines = out.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert len([json.loads(line) for line in lines]) == 1 + len(recording.requests)
    assert read_recording(out).requests == recording.requests
