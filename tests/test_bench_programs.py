"""Agent programs against a server: growing contexts, tool gaps, stages, and job completion times."""

import time
from itertools import pairwise
from typing import Any

import pytest

from agentjax.bench import play_programs
from agentjax.errors import InputError
from agentjax.readers import read_recording
from agentjax.records import Recording, RequestRecord, job_completion_times
from agentjax.workloads import Call, Prefix, Program
from tests.mock_endpoint import DROP, MockEndpoint, Request, completion, output_ids, prompt_length, refusal

IDS: dict[str, Any] = {"endpoint": "completions", "prompts": "ids", "warmup_requests": 0, "backoff_s": 0.001}


def call(new: int, output: int, *, gap_s: float = 0.0, kept: int | None = None) -> Call:
    return Call(new, output, kept, None, gap_s)


def chain(name: str, *calls: Call, arrival_s: float = 0.0, prefix: Prefix | None = None) -> Program:
    return Program(name, arrival_s, ((calls,),), prefix)


def calls_of(recording: Recording, program: str) -> list[RequestRecord]:
    return [record for record in recording.requests if record.place and record.place.program == program]


@pytest.mark.parametrize("tell_ids", ["vllm", "llama.cpp"])
def test_a_context_is_what_was_said_and_answered(tell_ids: str):
    program = chain("a", call(20, 5), call(7, 6), call(3, 4, kept=28), call(2, 3))
    with MockEndpoint(lambda request: completion(request, tell_ids=tell_ids)) as server:
        recording = play_programs([program], server.url, "mock", **IDS)
    requests = server.requests[1:]
    prompts = [request.body["prompt"] for request in requests]
    answers = [output_ids(request, length) for request, length in zip(requests, (5, 6, 4, 3), strict=True)]
    assert [len(prompt) for prompt in prompts] == [20, 32, 31, 37]
    assert prompts[1][:25] == prompts[0] + answers[0]
    assert prompts[2][:28] == prompts[1][:28]
    assert prompts[3][:35] == prompts[2] + answers[2]
    assert [record.prompt_tokens for record in calls_of(recording, "a")] == [20, 32, 31, 37]
    assert [record.output_tokens for record in calls_of(recording, "a")] == [5, 6, 4, 3]
    assert [body["max_tokens"] for body in server.bodies[1:]] == [5, 6, 4, 3]
    assert all(body["verbose"] is True and body["return_token_ids"] is True for body in server.bodies[1:])


def test_outputs_whose_ids_are_not_told_are_made_up():
    program = chain("a", call(20, 5), call(7, 6))
    with MockEndpoint() as server:
        play_programs([program], server.url, "mock", **IDS)
    first, second = (body["prompt"] for body in server.bodies[1:])
    assert len(second) == 32
    assert second[:20] == first
    assert all(300 <= token < 4000 for token in second)


def test_shared_prefixes_are_the_same_tokens():
    system, other = Prefix("system", 12), Prefix("other", 12)
    programs = [
        chain("a", call(5, 2), prefix=system),
        chain("b", call(5, 2), prefix=system),
        chain("c", call(5, 2), prefix=other),
    ]
    with MockEndpoint() as server:
        recording = play_programs(programs, server.url, "mock", **IDS)
    fronts = [tuple(body["prompt"][:12]) for body in server.bodies[1:]]
    assert sorted(fronts.count(front) for front in set(fronts)) == [1, 2]
    assert [record.prompt_tokens for record in recording.requests[1:]] == [17] * 3


def test_gaps_and_arrivals_are_kept():
    programs = [
        chain("a", call(5, 3, gap_s=0.2), call(5, 3), arrival_s=0.1),
        chain("b", call(5, 3, gap_s=9.0), arrival_s=0.3),
    ]
    with MockEndpoint(lambda request: completion(request, gap_s=0.01)) as server:
        recording = play_programs(programs, server.url, "mock", **IDS)
    arrivals_s = recording.about["arrivals_s"]
    assert arrivals_s["b"] - arrivals_s["a"] == pytest.approx(0.2)
    first, second = calls_of(recording, "a")
    (other,) = calls_of(recording, "b")
    assert first.finished_s is not None
    assert second.finished_s is not None
    assert first.sent_s >= arrivals_s["a"]
    assert other.sent_s >= arrivals_s["b"]
    assert 0.2 <= second.sent_s - first.finished_s < 2
    times_s = job_completion_times(recording)
    assert times_s["a"] == pytest.approx(second.finished_s - arrivals_s["a"])
    assert times_s["b"] < 8  # no gap after the last call


def test_threads_of_a_stage_run_together_and_are_joined():
    stages = (
        ((call(5, 6, gap_s=0.1), call(4, 6, gap_s=0.15)), (call(6, 6),)),
        ((call(8, 2),),),
    )
    with MockEndpoint(lambda request: completion(request, gap_s=0.01)) as server:
        recording = play_programs([Program("a", 0.0, stages, None)], server.url, "mock", **IDS)
    records = {record.request: record for record in calls_of(recording, "a")}
    assert set(records) == {"a/0.0.0", "a/0.0.1", "a/0.1.0", "a/1.0.0"}
    last = records["a/0.0.1"]
    assert last.finished_s is not None
    assert records["a/0.1.0"].sent_s < (records["a/0.0.0"].finished_s or 0)
    assert records["a/1.0.0"].sent_s >= last.finished_s + 0.15
    assert records["a/1.0.0"].prompt_tokens == 8
    place = records["a/0.0.1"].place
    assert place is not None
    assert (place.program, place.stage, place.thread, place.turn) == ("a", 0, 0, 1)


def test_a_failed_call_ends_its_program_only():
    def script(request: Request) -> Any:
        failed = isinstance(request.body["prompt"], list) and len(request.body["prompt"]) == 25
        return refusal(400, "too long") if failed else completion(request)

    programs = [chain("a", call(20, 2), call(3, 2), call(3, 2)), chain("b", call(10, 2), call(3, 2))]
    with MockEndpoint(script) as server:
        recording = play_programs(programs, server.url, "mock", **IDS)
    assert [record.error for record in calls_of(recording, "a")] == [None, "http_400"]
    assert [record.error for record in calls_of(recording, "b")] == [None, None]
    assert set(job_completion_times(recording)) == {"b"}


def test_a_failed_thread_ends_the_stages_after_it():
    def script(request: Request) -> Any:
        return refusal(400, "no") if len(request.body["prompt"]) == 6 else completion(request)

    stages = (((call(5, 2),), (call(6, 2),)), ((call(8, 2),),))
    with MockEndpoint(script) as server:
        recording = play_programs([Program("a", 0.0, stages, None)], server.url, "mock", **IDS)
    assert {record.request for record in calls_of(recording, "a")} == {"a/0.0.0", "a/0.1.0"}
    assert job_completion_times(recording) == {}


def test_a_server_that_stays_away_ends_the_run_at_once():
    programs = [chain(str(index), call(5, 3), arrival_s=0.0 if index < 10 else 60.0) for index in range(12)]
    begin_s = time.monotonic()
    with (
        MockEndpoint(lambda request: [DROP] if request.number else completion(request)) as server,
        pytest.raises(InputError, match="no connection for 10 requests in a row"),
    ):
        play_programs(programs, server.url, "mock", **IDS, max_attempts=1)
    assert time.monotonic() - begin_s < 55


def test_calls_at_once_may_be_limited():
    programs = [chain(str(index), call(5, 3)) for index in range(6)]
    with MockEndpoint(lambda request: completion(request, gap_s=0.01)) as server:
        play_programs(programs, server.url, "mock", **IDS, max_concurrency=2)
    assert server.most_active == 2


def test_chat_contexts_are_messages():
    prefix = Prefix("system", 60)
    program = chain("a", call(61, 5), call(34, 6), call(31, 4), prefix=prefix)
    with MockEndpoint() as server:
        recording = play_programs([program], server.url, "mock", warmup_requests=0)
    talks = [body["messages"] for body in server.bodies[2:]]
    assert [[message["role"] for message in talk] for talk in talks] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    assert talks[2][:4] == talks[1]
    assert talks[1][2]["content"] == " word" * 5
    told = [record.prompt_tokens for record in calls_of(recording, "a")]
    assert told == pytest.approx([121, 160, 197], abs=24)  # the mock counts an answer of 5 tokens as 22


def test_chat_contexts_follow_what_the_server_counts():
    """A server whose answers are longer in a prompt than as output: later messages are made shorter."""
    program = chain("a", *(call(60, 10) for _ in range(6)))
    with MockEndpoint() as server:
        recording = play_programs([program], server.url, "mock", warmup_requests=0)
    planned = [60 + 70 * turn for turn in range(6)]
    told = [record.prompt_tokens for record in calls_of(recording, "a")]
    assert told == pytest.approx(planned, abs=35)
    assert told[-1] is not None
    assert abs(told[-1] - planned[-1]) <= 35


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_kept_text_is_the_front_of_the_context(endpoint: str):
    program = chain("a", call(100, 8), call(60, 8), call(30, 8, kept=70), call(30, 8, kept=0))
    with MockEndpoint() as server:
        recording = play_programs([program], server.url, "mock", endpoint=endpoint, warmup_requests=0)
    bodies = server.bodies[2:]
    if endpoint == "chat":
        for body in bodies:
            roles = [message["role"] for message in body["messages"]]
            assert all(before != after for before, after in pairwise(roles))
        texts = [" ".join(message["content"] for message in body["messages"]) for body in bodies]
    else:
        texts = [body["prompt"] for body in bodies]
    words = [text.split() for text in texts]
    shared = sum(1 for pair in zip(words[1], words[2], strict=False) if pair[0] == pair[1])
    assert 3 * shared == pytest.approx(70, abs=16)
    assert words[3][0] != words[2][0]
    told = [record.prompt_tokens for record in calls_of(recording, "a")]
    assert told == pytest.approx([100, 168, 100, 30], abs=24)


def test_the_file_has_programs_and_arrivals(tmp_path: Any):
    out = tmp_path / "programs.jsonl"
    programs = [chain("a", call(5, 3, gap_s=0.01), call(5, 3), prefix=Prefix("p", 9)), chain("b", call(5, 3))]
    with MockEndpoint() as server:
        recording = play_programs(programs, server.url, "mock", out=str(out), **IDS)
    read = read_recording(out)
    assert read.requests == recording.requests
    assert read.about["mode"] == "programs"
    assert read.about["arrivals_s"].keys() == {"a", "b"}
    assert [program["name"] for program in read.about["programs"]] == ["a", "b"]
    assert read.about["programs"][0]["stages"][0][0][0]["new_tokens"] == 5
    assert job_completion_times(read) == job_completion_times(recording)
    assert "prompt_tokens" not in read.about["config"]


def test_job_completion_times_without_a_header_and_of_a_cut_run():
    with MockEndpoint() as server:
        recording = play_programs([chain("a", call(5, 3), call(5, 3))], server.url, "mock", **IDS)
    first, second = calls_of(recording, "a")
    bare = job_completion_times(Recording(recording.requests))
    assert bare["a"] == pytest.approx((second.finished_s or 0) - first.sent_s)
    assert job_completion_times(Recording(recording.requests[:-1], recording.about)) == {}


def test_what_is_refused(tmp_path: Any):
    program = chain("a", call(5, 3))
    with pytest.raises(InputError, match="resume: found true, expected false"):
        play_programs([program], "http://127.0.0.1:1", "mock", resume=True)
    with pytest.raises(InputError, match="workload: found no programs"):
        play_programs([], "http://127.0.0.1:1", "mock")
    with pytest.raises(InputError, match="program a, arrival_s: found nothing"):
        play_programs([Program("a", None, program.stages)], "http://127.0.0.1:1", "mock")


def test_the_mock_counts_what_it_says():
    assert prompt_length({"messages": [{"content": "a b"}]}) == 13
