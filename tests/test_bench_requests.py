"""The grid of requests against a server: what is sent, and what is recorded."""

import asyncio
import gzip
import json
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentjax.bench import run_requests
from agentjax.bench.clock import Clock
from agentjax.bench.plan import make_plan
from agentjax.bench.session import Listener
from agentjax.bench.settings import Settings, check_settings
from agentjax.errors import InputError
from agentjax.readers import read_recording
from agentjax.records import Recording, RequestRecord
from tests.mock_endpoint import MockEndpoint, Piece, Request, completion, event

IDS: dict[str, Any] = {"endpoint": "completions", "prompts": "ids"}
SMALL: dict[str, Any] = {
    "prompt_tokens": [40],
    "output_tokens": [5],
    "concurrency": [2],
    "backoff_s": 0.001,
}


def measured(recording: Recording) -> list[RequestRecord]:
    return [record for record in recording.requests if not record.warmup]


def test_every_cell_is_measured_with_its_streams():
    def script(request: Request) -> list[Piece]:
        return completion(request, gap_s=0.005)

    lists = {"prompt_tokens": [8, 40], "output_tokens": [3, 5], "concurrency": [1, 3], "repeats": 2}
    with MockEndpoint(script) as server:
        recording = run_requests(server.url, "mock", **IDS, **lists, warmup_requests=1)
    records = measured(recording)
    assert len(records) == 2 * 2 * 2 * (4 + 6)
    assert len({record.request for record in records}) == len(records)
    assert server.most_active == 3
    for record in records:
        assert record.asked is not None
        assert record.error is None
        assert record.attempts == 1
        assert record.prompt_tokens == record.asked.prompt_tokens
        assert record.output_tokens == record.asked.output_tokens
        assert len(record.gaps_s) == record.asked.output_tokens - 1
        assert record.event_tokens is None
        assert record.first_token_s is not None
        assert record.finished_s is not None
        assert record.sent_s < record.first_token_s < record.finished_s
        assert sum(record.gaps_s) == pytest.approx(record.finished_s - record.first_token_s, abs=1e-5)
        assert min(record.gaps_s) >= 0
    assert [record.request for record in recording.requests if record.warmup] == ["check-0", "warmup-0"]


def test_streams_of_a_cell_are_in_closed_loop():
    def script(request: Request) -> list[Piece]:
        return completion(request, gap_s=0.002)

    with MockEndpoint(script) as server:
        recording = run_requests(server.url, "mock", **IDS, **{**SMALL, "concurrency": [3]}, requests=9)
    streams: dict[int, list[RequestRecord]] = {}
    for record in measured(recording):
        streams.setdefault(int(record.request.rpartition("-")[2]) % 3, []).append(record)
    assert [len(records) for records in streams.values()] == [3, 3, 3]
    for records in streams.values():
        for before, after in pairwise(records):
            assert before.finished_s is not None
            assert after.sent_s >= before.finished_s


def test_the_order_of_cells_is_drawn_from_the_seed():
    keys = {"url": "http://x", "model": "m", "prompt_tokens": list(range(1, 20)), "repeats": 2}
    plan, same, other = (make_plan(check_settings({**keys, "seed": seed})) for seed in (1, 1, 2))
    assert plan == same
    assert plan != other
    orders = [[cell.asked for cell in plan.cells if cell.asked.repeat == repeat] for repeat in (0, 1)]
    assert [asked.prompt_tokens for asked in orders[0]] != [asked.prompt_tokens for asked in orders[1]]
    assert sorted(asked.prompt_tokens for asked in orders[0]) == sorted(
        asked.prompt_tokens for asked in orders[1]
    )
    assert {cell.name for cell in plan.cells} == {cell.name for cell in other.cells}


def test_what_a_request_says():
    with MockEndpoint() as server:
        run_requests(server.url + "/v1/", "mock", **IDS, **SMALL, extra_body={"top_k": 1, "min_tokens": None})
    request = server.requests[-1]
    assert request.path == "/v1/completions"
    ids = request.body.pop("prompt")
    assert len(ids) == 40
    assert all(300 <= token < 4000 for token in ids)
    assert request.body == {
        "model": "mock",
        "max_tokens": 5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_k": 1,
    }


def test_prompts_share_nothing_unless_asked():
    with MockEndpoint() as server:
        run_requests(server.url, "mock", **IDS, **SMALL)
        run_requests(server.url, "mock", **IDS, **SMALL)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len({prompt[:4] for prompt in prompts}) == len(prompts)


def test_a_salt_makes_prompts_that_can_be_drawn_again():
    prompts = []
    for salt in ("a", "a", "b"):
        with MockEndpoint() as server:
            run_requests(server.url, "mock", **IDS, **SMALL, salt=salt)
        prompts.append(sorted(body["prompt"] for body in server.bodies))
    assert prompts[0] == prompts[1]
    assert prompts[0] != prompts[2]


@pytest.mark.parametrize("prompts", ["ids", "text"])
def test_a_cached_share_is_sent_before_by_its_stream(prompts: str):
    keys = {**SMALL, "cached_share": [0.75], "prompts": prompts, "endpoint": "completions"}
    with MockEndpoint(lambda request: completion(request, cached=2)) as server:
        recording = run_requests(server.url, "mock", **keys, warmup_requests=0)
    first = 1 if prompts == "ids" else 2  # checks
    sent = [body["prompt"] for body in server.bodies[first:]]
    sent = [prompt if prompts == "ids" else prompt.split() for prompt in sent]
    primes, others = sent[:2], sent[2:]
    length = {"ids": 40, "text": 13}[prompts]  # 3 tokens a word
    assert [len(prompt) for prompt in primes] == [round(0.75 * length)] * 2
    assert [len(prompt) for prompt in others] == [length] * 4
    for prime in primes:
        assert sum(prompt[: len(prime)] == prime for prompt in others) == 2
    assert all(record.cached_tokens == 2 for record in measured(recording))
    assert sum(record.warmup and record.asked is not None for record in recording.requests) == 2


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_text_prompts_get_their_length_from_two_checks(endpoint: str):
    keys = {**SMALL, "prompt_tokens": [30, 301], "endpoint": endpoint}
    with MockEndpoint() as server:
        recording = run_requests(server.url, "mock", **keys)
    for record in measured(recording):
        assert record.asked is not None
        assert record.prompt_tokens == pytest.approx(record.asked.prompt_tokens, abs=2)
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    assert {request.path for request in server.requests} == {path}


def test_server_times_and_cached_tokens_are_recorded():
    with MockEndpoint(lambda request: completion(request, timings=True)) as server:
        recording = run_requests(server.url, "mock", **IDS, **SMALL)
    record = measured(recording)[0]
    assert (record.cached_tokens, record.server_prefill_s, record.server_decode_s) == (3, 0.0125, 0.03)
    assert recording.about["server"] == "mock"


def test_a_server_that_leaves_out_cached_tokens_where_they_are_0():
    def script(request: Request) -> list[Piece]:
        return completion(request, cached=8 if request.number == 2 else None)

    with MockEndpoint(script) as server:
        recording = run_requests(server.url, "mock", **IDS, **SMALL, warmup_requests=0)
    assert sorted(record.cached_tokens or 0 for record in measured(recording)) == [0, 0, 0, 8]
    assert all(record.cached_tokens is not None for record in recording.requests)


def test_first_token_is_the_first_content():
    def script(request: Request) -> list[Piece]:
        role = {"choices": [{"delta": {"role": "assistant", "content": None}}]}
        progress = {**role, "prompt_progress": {"total": 9, "processed": 3}}
        return [event(role), 0.03, event(progress), b": keep\n\n", 0.03, *completion(request)]

    with MockEndpoint(script) as server:
        recording = run_requests(server.url, "mock", **SMALL)
    ttft_s = [record.ttft_s for record in measured(recording)]
    assert min(time_s for time_s in ttft_s if time_s is not None) >= 0.05


def test_gaps_are_those_of_the_server():
    with MockEndpoint(lambda request: completion(request, gap_s=0.02)) as server:
        recording = run_requests(server.url, "mock", **IDS, **SMALL)
    gaps_s = [gap for record in measured(recording) for gap in record.gaps_s]
    assert statistics.median(gaps_s) >= 0.01


def test_events_of_several_tokens():
    with MockEndpoint(lambda request: completion(request, per_event=2, tell_ids="vllm")) as server:
        recording = run_requests(server.url, "mock", **IDS, **SMALL)
    record = measured(recording)[0]
    assert record.event_tokens == (2, 2, 1)
    assert record.output_tokens == 5
    assert len(record.gaps_s) == 2


def test_the_file_holds_what_is_returned(tmp_path: Path):
    out = tmp_path / "folder" / "bench.jsonl"
    with MockEndpoint() as server:
        recording = run_requests(server.url, "mock", out=str(out), **IDS, **SMALL)
    read = read_recording(out)
    assert read.requests == recording.requests
    header = json.loads(out.read_text().splitlines()[0])
    assert header["agentjax_bench"] == 1
    assert header["mode"] == "requests"
    assert header["url"] == server.url
    assert header["config"]["prompt_tokens"] == [40]
    assert "workload" not in header["config"]
    assert read.about["model"] == "mock"


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path):
    out = tmp_path / "bench.jsonl"
    out.write_text("mine\n")
    with MockEndpoint() as server, pytest.raises(InputError, match="resume=true to go on with it"):
        run_requests(server.url, "mock", out=str(out), **IDS, **SMALL)
    with MockEndpoint() as server, pytest.raises(InputError, match=r"bench.jsonl, line 1"):
        run_requests(server.url, "mock", out=str(out), resume=True, **IDS, **SMALL)
    assert out.read_text() == "mine\n"


def test_runs_where_an_event_loop_runs_already():
    async def notebook(url: str) -> Recording:
        return run_requests(url, "mock", **IDS, **SMALL)

    with MockEndpoint() as server:
        assert len(measured(asyncio.run(notebook(server.url)))) == 4


def test_a_listener_is_told():
    class Told(Listener):
        def __init__(self) -> None:
            self.plans: list[tuple[str, int, int]] = []
            self.records: list[RequestRecord] = []

        def begin(self, plan: str, requests: int, done: int) -> None:
            self.plans.append((plan, requests, done))

        def record(self, record: RequestRecord) -> None:
            self.records.append(record)

    told = Told()
    with MockEndpoint() as server:
        recording = run_requests(server.url, "mock", listener=told, **IDS, **SMALL)
    expected = "4 requests in 1 cells, up to 2 at once: about 160 prompt tokens and 20 output tokens"
    assert told.plans == [(expected, 4, 0)]
    assert len(told.records) == len(measured(recording))


# ---- resuming ----------------------------------------------------------------------------------------------


def names(lines: Sequence[str]) -> list[str]:
    return [json.loads(line)["request"] for line in lines[1:]]


@pytest.mark.parametrize("tail", ["", '{"request": "p40-', '{"request": "p40-o5-c2-s0-r0-3", "sent_s"'])
def test_a_run_that_was_cut_off_goes_on(tail: str, tmp_path: Path):
    out = tmp_path / "bench.jsonl"
    keys = {**IDS, **SMALL, "concurrency": [2, 3], "out": str(out)}
    with MockEndpoint() as server:
        whole = run_requests(server.url, "mock", **keys)
        lines = out.read_text().splitlines(keepends=True)
        out.write_text("".join(lines[:8]) + tail)
        kept = names(lines[:8])
        before = len(server.requests)
        resumed = run_requests(server.url, "mock", resume=True, **keys)
        sent = len(server.requests) - before
        after = out.read_text().splitlines()
        again = run_requests(server.url, "mock", resume=True, **keys, timeout_s=50.0, max_attempts=7)
    assert len(server.requests) == before + sent
    wanted = {record.request for record in measured(whole)}
    assert {record.request for record in measured(resumed)} == wanted
    assert sent == len(wanted - set(kept)) + 1 + 3  # check and warm-up
    assert [line + "\n" for line in after[:8]] == lines[:8]
    assert len(set(names(after))) == len(after) - 1
    assert again.requests == resumed.requests == read_recording(out).requests
    last_kept = max(record.finished_s or 0.0 for record in resumed.requests if record.request in kept)
    new = [record for record in resumed.requests if record.request not in kept]
    assert min(record.sent_s for record in new) > last_kept


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path: Path):
    out = tmp_path / "bench.jsonl"
    keys = {**IDS, **SMALL, "out": str(out), "warmup_requests": 0}
    with MockEndpoint() as server:
        run_requests(server.url, "mock", **keys)
        lines = out.read_text().splitlines()
        out.write_text("\n".join(lines[:4]))
        run_requests(server.url, "mock", resume=True, **keys)
    after = out.read_text().splitlines()
    assert after[:4] == lines[:4]
    assert sorted(names(after)) == sorted([*names(lines), "check-0~2"])


@pytest.mark.parametrize("content", ["", '{"agentja', '{"agentjax_bench": 1, "version": "0.'])
def test_a_file_cut_off_in_its_header_is_begun_again(content: str, tmp_path: Path):
    out = tmp_path / "bench.jsonl"
    out.write_text(content)
    with MockEndpoint() as server:
        recording = run_requests(server.url, "mock", out=str(out), resume=True, **IDS, **SMALL)
    assert read_recording(out).requests == recording.requests


def test_files_that_cannot_be_gone_on_with(tmp_path: Path):
    out = tmp_path / "bench.jsonl"
    keys = {**IDS, **SMALL, "out": str(out), "resume": True}
    for content, words in [
        (gzip.compress(b'{"agentjax_bench": 1}\n'), "found a gzip file"),
        (b'{"agentjax_bench": 1}\n', "line 1, started: found null"),
        (b'{"agentjax_bench": 1, "started": "2026-11-30T12:00:00"}\n', "started: found .*with its zone"),
        (b'{"agentjax_bench": 1, "started": 5}\n', "started: found 5"),
    ]:
        out.write_bytes(content)
        with pytest.raises(InputError, match=words):
            run_requests("http://127.0.0.1:1", "mock", **keys)
        assert out.read_bytes() == content


def test_resuming_with_other_settings_is_refused(tmp_path: Path):
    out = tmp_path / "bench.jsonl"
    keys = {**IDS, **SMALL, "out": str(out)}
    with MockEndpoint() as server:
        run_requests(server.url, "mock", **keys)
        before = out.read_bytes()
        for change, words in [
            ({"seed": 4}, "seed: found 4, expected 0 as in"),
            ({"prompt_tokens": [41]}, r"prompt_tokens: found \[41\], expected \[40\]"),
            ({"temperature": None}, "temperature: found null"),
        ]:
            with pytest.raises(InputError, match=words):
                run_requests(server.url, "mock", resume=True, **{**keys, **change})
        with pytest.raises(InputError, match='model: found "other"'):
            run_requests(server.url, "other", resume=True, **keys)
    assert out.read_bytes() == before


def test_failed_requests_are_sent_again_under_a_new_name(tmp_path: Path):
    out = tmp_path / "bench.jsonl"
    keys = {**IDS, **SMALL, "out": str(out), "warmup_requests": 0}
    broken = True

    def script(request: Request) -> list[Piece]:
        return completion(request, done=not (broken and request.number == 2), usage=False, finish=False)

    with MockEndpoint(script) as server:
        first = run_requests(server.url, "mock", **keys)
        broken = False
        second = run_requests(server.url, "mock", resume=True, **keys)
    (failed,) = [record for record in first.requests if record.error]
    assert failed.error == "stream"
    added = {record.request for record in second.requests} - {record.request for record in first.requests}
    assert added == {failed.request + "~2", "check-0~2"}
    assert failed in second.requests


def test_the_clock_of_a_resumed_run_never_goes_back():
    started = datetime.now(UTC) - timedelta(seconds=50)
    assert 50 <= Clock.start(started).now_s() < 60
    assert 80 <= Clock.start(started, 80.0).now_s() < 90
    assert Clock.start(started + timedelta(hours=1), 80.0).now_s() >= 80
    assert Clock.start().now_s() < 10


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"url": "localhost:8080"}, "url: found"),
        ({"url": "ftp://a"}, "expected an address such as http://127.0.0.1:8080"),
        ({"url": "http://"}, "url: found"),
        ({"url": "http://a:99999999"}, "url: found"),
        ({"url": "http://a\x01b"}, "url: found"),
        ({"url": "http://a/v1?api-version=2"}, "url: found"),
        ({"url": 5}, "url: found 5, expected text"),
        ({"model": 5}, "model: found 5"),
        ({"prompt_tokens": 5}, "prompt_tokens: found 5"),
        ({"prompt_tokens": []}, "prompt_tokens: found an empty list, expected at least one entry"),
        ({"prompt_tokens": [0]}, r"prompt_tokens\[0\]: found 0, expected an integer from 1"),
        ({"prompt_tokens": [5, 5]}, "prompt_tokens: found a list, expected values that differ"),
        ({"cached_share": [2]}, r"cached_share\[0\]: found 2"),
        ({"concurency": [2]}, r"concurency: found an unknown field, expected concurrency"),
        ({"token_ids": [5, 5]}, r"token_ids: found \[5, 5\]"),
        ({"token_ids": [5]}, "token_ids: found"),
        ({"prompts": "ids"}, "endpoint: found chat, expected completions"),
        ({"prompts": "id"}, 'prompts: found "id", expected text or ids'),
        ({"extra_body": 4}, "extra_body: found 4, expected an object"),
        ({"timeout_s": 0}, "timeout_s: found 0"),
        ({"resume": "yes"}, "resume: found"),
    ],
)
def test_settings_that_cannot_be_used(keys: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        check_settings({"url": "http://a", "model": "m", **keys})


def test_credentials_in_the_url_are_not_shown():
    for keys in (
        {"url": "https://me:sk-secret@a"},
        {"url": "https://sk-secret@a/v1"},
        {"url": "https://me:sk-secret@a:99999999"},
        {"url": "https://a", "api_key_env": "sk-secret"},
    ):
        with pytest.raises(InputError) as caught:
            check_settings({"model": "m", **keys})
        assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://a:1", "http://a:1/v1"),
        ("http://a:1/", "http://a:1/v1"),
        ("http://a:1/v1", "http://a:1/v1"),
        ("http://a:1/v1/", "http://a:1/v1"),
        ("https://a/openai/v1", "https://a/openai/v1"),
    ],
)
def test_addresses(url: str, base: str):
    assert check_settings({"url": url, "model": "m"}).base_url == base


def test_settings_are_those_of_the_configuration_file():
    import yaml

    from agentjax.config import config_folder

    content = yaml.safe_load((config_folder() / "bench.yaml").read_text())
    keys = set(content) - {"defaults", "hydra", "mode", "dry_run", "model_name", "workload"}
    assert keys | {"model"} == set(Settings.model_fields)
    for key in keys - {"url", "out"}:
        default = Settings.model_fields[key].default
        assert content[key] == (list(default) if isinstance(default, tuple) else default), key
