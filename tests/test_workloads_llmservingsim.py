"""LLMServingSim's workload files: whole prompts become new and kept tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentjax.errors import InputError
from agentjax.workloads import Call, Program, read_programs, write_programs
from agentjax.workloads.program import context_tokens

SAMPLES = Path(__file__).resolve().parents[2] / "shared/data/request_traces/llmservingsim"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"sample files are not at {SAMPLES}")


def session(*requests: dict[str, Any], **more: Any) -> str:
    return json.dumps({"session_id": "s", "arrival_time_ns": 1_500_000_000, "sub_requests": requests} | more)


def request(tokens: int, output: int, ns: int | None = 0, **more: Any) -> dict[str, Any]:
    return {"input_toks": tokens, "output_toks": output, "tool_duration_ns": ns} | more


def read(tmp_path: Path, *lines: str) -> list[Program]:
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(lines))
    return read_programs(path)


def kept(tmp_path: Path, *requests: dict[str, Any]) -> int | None:
    """Kept tokens of the last call; new and kept tokens always make the whole prompt."""
    calls = read(tmp_path, session(*requests))[0].calls
    assert [prompt for prompt, _ in context_tokens(calls)] == [r["input_toks"] for r in requests]
    return calls[-1].kept_tokens


def test_a_session_that_appends(tmp_path: Path) -> None:
    (program,) = read(tmp_path, session(request(100, 20, 127_348_767), request(150, 9)))
    assert program == Program(
        "s", 1.5, (((Call(100, 20, None, None, 0.127348767), Call(30, 9, None, None, 0.0)),),)
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(121, None), (120, 119), (119, 100), (101, 100), (100, 0), (60, 0)],
    ids=[
        "append",
        "same length",
        "output cut",
        "output dropped",
        "rewritten to the same length",
        "rewritten",
    ],
)
def test_what_a_prompt_keeps_without_token_ids(tmp_path: Path, prompt: int, expected: int | None) -> None:
    assert kept(tmp_path, request(100, 20), request(prompt, 5)) == expected


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], None),
        ([1, 2, 3, 4, 9, 6], 4),
        ([9, 2, 3, 4, 5, 6], 0),
        ([1, 2, 3], 2),
        ([1, 2, 3, 4, 5], 4),
    ],
)
def test_what_a_prompt_keeps_with_token_ids(tmp_path: Path, ids: list[int], expected: int | None) -> None:
    first = request(3, 2, input_tok_ids=[1, 2, 3], output_tok_ids=[4, 5])
    assert kept(tmp_path, first, request(len(ids), 1, input_tok_ids=ids)) == expected


@pytest.mark.parametrize(
    ("ids", "expected"), [([1, 2, 3, 4, 5, 6], None), ([1, 2, 3, 7], 3), ([1, 2, 9, 7, 7, 7], 2), ([1, 2], 1)]
)
def test_token_ids_of_prompts_only(tmp_path: Path, ids: list[int], expected: int | None) -> None:
    first = request(3, 2, input_tok_ids=[1, 2, 3])
    assert kept(tmp_path, first, request(len(ids), 1, input_tok_ids=ids)) == expected


def test_sessions_and_flat_requests_in_one_file(tmp_path: Path) -> None:
    flat = '{"input_toks": 3, "output_toks": 3, "arrival_time_ns": 2000000000, "input_tok_ids": [1, 2, 3]}'
    programs = read(tmp_path, session(request(4, 1)), "", flat)
    assert [p.name for p in programs] == ["s", "request-3"]
    assert programs[1] == Program("request-3", 2.0, (((Call(3, 3, None, None, 0.0),),),))


def test_the_gap_after_the_last_call_does_not_count(tmp_path: Path) -> None:
    last = {"input_toks": 9, "output_toks": 1}
    assert read(tmp_path, session(last))[0].calls[-1].tool_s == 0.0
    assert read(tmp_path, session(request(9, 1, 5_000_000)))[0].calls[-1].tool_s == 0.0


TOKENS = "an integer from 1 to 1073741824"
NS = "an integer of nanoseconds from 0 to 1e+18"
FLAT = {"input_toks": 7, "output_toks": 3, "arrival_time_ns": 0}
FAULTS = [
    (session(request(0, 1)), f", line 1, sub_requests[0].input_toks: found 0, expected {TOKENS}"),
    (session(request(1, -2)), f", line 1, sub_requests[0].output_toks: found -2, expected {TOKENS}"),
    (
        session(request(1, 2, -3)),
        f", line 1, sub_requests[0].tool_duration_ns: found -3, expected null or {NS}",
    ),
    (
        session({"input_toks": 1, "output_toks": 1}, request(3, 1)),
        ", line 1, sub_requests[0].tool_duration_ns: found nothing, "
        "expected an integer of nanoseconds before the last call",
    ),
    (session(), ", line 1, sub_requests: found an empty list, expected at least one entry"),
    (
        session(request(1, 1), session_id=4),
        ", line 1, session_id: found 4, expected a string that is not empty",
    ),
    (session(request(1, 1), arrival_time_ns=0.5), f", line 1, arrival_time_ns: found 0.5, expected {NS}"),
    (
        session(request(3, 1, input_tok_ids=[1])),
        ", line 1, sub_requests[0].input_tok_ids: found a list of length 1, expected length 3, an id a token",
    ),
    (
        session(request(3, 1, output_tok_ids=["x"])),
        ", line 1, sub_requests[0].output_tok_ids: found a list, expected a list of integers or null",
    ),
    (json.dumps(FLAT | {"output_toks": 0}), f", line 1, output_toks: found 0, expected {TOKENS}"),
    ('{"input_toks": 7, "output_toks": 3}', ", line 1, arrival_time_ns: found nothing, expected this field"),
    (
        session(request(1, 1)) + "\n" + session(request(1, 1)),
        ', line 2, session_id: found "s" as in {path}, line 1, expected a name of its own',
    ),
    (
        '{"prompt": 3}',
        ", line 1: found the fields prompt, "
        "expected program and calls (native), sub_requests (LLMServingSim) or a recording",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), FAULTS, ids=[str(i) for i in range(len(FAULTS))])
def test_each_fault_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, text)
    path = tmp_path / "w.jsonl"
    assert str(error.value) == f"{path}{sentence.replace('{path}', str(path))}"


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read_programs(tmp_path / "w.jsonl", "llmservingsym")
    assert str(error.value) == f'{tmp_path}/w.jsonl, format: found "llmservingsym", expected llmservingsim'


@needs_samples
@pytest.mark.parametrize("name", ["example_trace.jsonl", "workload_me2_01_mixed.jsonl"])
def test_samples_survive_the_native_format(tmp_path: Path, name: str) -> None:
    programs = read_programs(SAMPLES / name)
    lines = [json.loads(line) for line in (SAMPLES / name).read_text().splitlines() if line.strip()]
    assert [p.calls[0].new_tokens for p in programs] == [line["input_toks"] for line in lines]
    assert [p.calls[0].output_tokens for p in programs] == [line["output_toks"] for line in lines]
    assert [round((p.arrival_s or 0) * 1e9) for p in programs] == [line["arrival_time_ns"] for line in lines]
    write_programs(tmp_path / "w.jsonl", programs)
    assert read_programs(tmp_path / "w.jsonl") == programs
