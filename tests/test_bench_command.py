"""`python -m agentjax.bench`: its tables, its exit codes, and what is left when it is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentjax.bench.__main__ import main
from agentjax.readers import read_recording
from tests.mock_endpoint import DROP, MockEndpoint, Request, completion, refusal

GRID = ["prompt_tokens=[20]", "output_tokens=[4]", "concurrency=[1,2]", "backoff_s=0.001"]
IDS = ["endpoint=completions", "prompts=ids"]
PROGRAMS = """\
{"program": "a", "arrival_s": 0, "calls": [{"new_tokens": 9, "output_tokens": 3, "tool_s": 0.01}, \
{"new_tokens": 5, "output_tokens": 2, "tool_s": 0}]}
{"program": "b", "arrival_s": 0.01, "calls": [{"new_tokens": 6, "output_tokens": 2, "tool_s": 0}]}
"""


def test_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    out = tmp_path / "bench.jsonl"
    with MockEndpoint(lambda request: completion(request, cached=2)) as server:
        code = main([f"url={server.url}", "model=org/mock-7B:q4", f"out={out}", *GRID, *IDS])
    said, err = capsys.readouterr()
    assert code == 0
    assert err == ""
    assert "8 requests in 2 cells, up to 2 at once" in said
    assert f"records {out}" in said
    cells = [line.split() for line in said.splitlines() if line.split()[:1] == ["20"]]
    assert [row[:5] for row in cells] == [["20", "4", "1", "0", "4"], ["20", "4", "2", "0", "4"]]
    assert [row[-1] for row in cells] == ["10.0"] * 2
    assert all(len(line) < 80 for line in said.splitlines() if "tokens" in line and "requests" not in line)
    assert "failed" not in said
    recording = read_recording(out)
    assert recording.about["model"] == "org/mock-7B:q4"
    assert "sk-secret" not in said + out.read_text()


def test_programs(tmp_path: Path, capsys: pytest.CaptureFixture):
    out, workload = tmp_path / "programs.jsonl", tmp_path / "workload.jsonl"
    workload.write_text(PROGRAMS)
    with MockEndpoint(lambda request: completion(request, tell_ids="vllm", cached=0)) as server:
        arguments = [f"url={server.url}", "model=mock", "mode=programs", f"workload.path={workload}", *IDS]
        code = main([*arguments, f"out={out}"])
    said, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert "2 programs of 3 calls" in said
    assert "token ids" not in said
    assert "does not tell" not in said
    recording = read_recording(out)
    assert recording.about["config"]["workload"]["path"] == str(workload)
    assert len([record for record in recording.requests if record.place]) == 3


def test_faults_are_in_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture):
    def script(request: Request) -> Any:
        match request.number:
            case 5:
                return refusal(400, "too [long]")
            case 6:
                return [*completion(request)[:2], DROP]
            case 7:
                return refusal(429, Retry_After="0")
        return completion(request, per_event=2, usage=request.number % 2 == 0)

    out = tmp_path / "bench.jsonl"
    with MockEndpoint(script) as server:
        arguments = [f"url={server.url}", "model=mock", f"out={out}", *GRID, *IDS, "warmup_requests=0"]
        assert main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 requests failed: connection (such as" in said
    assert "1 requests failed: http_400 (such as" in said
    assert "too [long]" in said
    assert "1 requests were sent more than once" in said
    assert "the server does not tell the tokens of" in said
    assert "came with more than one token an event" in said


def test_made_up_outputs_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture):
    out, workload = tmp_path / "programs.jsonl", tmp_path / "workload.jsonl"
    workload.write_text(PROGRAMS)
    with MockEndpoint() as server:
        arguments = [f"url={server.url}", "model=mock", "mode=programs", f"workload.path={workload}", *IDS]
        assert main([*arguments, f"out={out}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "note: the server did not tell the token ids of 1 outputs" in said
    assert "note: the server does not tell what it found in its cache" in said


def test_a_run_in_which_all_fails_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture):
    def script(request: Request) -> Any:
        return refusal(400, "too long") if len(request.body["prompt"]) > 20 else completion(request)

    out = tmp_path / "bench.jsonl"
    with MockEndpoint(script) as server:
        grid = [f"url={server.url}", "model=mock", f"out={out}", *IDS, "output_tokens=[4]"]
        assert main([*grid, "prompt_tokens=[30]", "token_ids=[1,9]"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "found HTTP 400 (too long)" in err
    assert not out.exists()

    def after_check(request: Request) -> Any:
        return refusal(400, "too long") if request.number else completion(request)

    with MockEndpoint(after_check) as server:
        grid = [f"url={server.url}", "model=mock", f"out={out}", *IDS, *GRID]
        assert main(grid) == 2
    err = capsys.readouterr().err
    assert err == f"error: url {server.url}: all 8 requests failed, the first with http_400 (too long)\n"
    assert len(read_recording(out).requests) == 1 + 2 + 8


def test_dry_run_sends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    workload = tmp_path / "workload.jsonl"
    workload.write_text(PROGRAMS)
    with MockEndpoint() as server:
        common = [f"url={server.url}", "model=mock", f"out={tmp_path / 'x.jsonl'}", "dry_run=true"]
        assert main([*common, *GRID]) == 0
        assert main([*common, "mode=programs", f"workload.path={workload}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "about 160 prompt tokens and 32 output tokens" in said
    assert "about 32 prompt tokens, most of them sent before, and 7 output tokens" in said
    assert server.requests == []
    assert sorted(tmp_path.iterdir()) == [workload]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "url: found no value"),
        (["url=http://127.0.0.1:1"], "model_name: found no value"),
        (["url=http://127.0.0.1:1", "model=m"], "out: found no value"),
        (["url=http://127.0.0.1:1", "model=m", "out=b.jsonl"], "found no server (connection refused)"),
        (["mode=nothing"], 'mode: found "nothing", expected one of requests, programs'),
        (["mode=programs", "url=http://a", "model=m", "out=b.jsonl"], "workload.path: found no value"),
        (["url=http://127.0.0.1:1", "model=m", "out=b.jsonl", "concurency=[1]"], "concurency"),
        (["url=http://127.0.0.1:1", "model=m", "out=b.jsonl", "concurrency=4"], "concurrency: found 4"),
        (["url=http://127.0.0.1:1", "model=m", "out=b.jsonl", "dry_run=5"], "dry_run: found 5"),
        (["url=http://127.0.0.1:1", "model=m", "out=5"], "out: found 5"),
        (["url=http://127.0.0.1:1", "model=m", "out=/dev/null/b.jsonl"], "out=/dev/null/b.jsonl"),
        (["url=http://127.0.0.1:1", "model=7", "out=b.jsonl"], "model: found 7, expected text"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_leaves_whole_lines_and_goes_on(stop: signal.Signals, tmp_path: Path):
    out = tmp_path / "bench.jsonl"
    slow = True
    with MockEndpoint(lambda request: completion(request, gap_s=0.02 if slow else 0.0)) as server:
        arguments = [f"url={server.url}", "model=mock", f"out={out}", *IDS, "prompt_tokens=[20]"]
        arguments += ["output_tokens=[20]", "concurrency=[3]", "requests=30", "resume=true"]
        process = subprocess.Popen(
            [sys.executable, "-m", "agentjax.bench", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OPENAI_API_KEY": "sk-secret"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(server.requests) < 12:
            time.sleep(0.02)
        process.send_signal(stop)
        said, err = process.communicate(timeout=30)
        before = out.read_bytes()
        assert before.endswith(b"\n")
        lines = [json.loads(line) for line in before.splitlines()]
        assert 1 < len(lines) < 34
        assert "Traceback" not in err
        if stop == signal.SIGINT:
            assert process.returncode == 130
            assert err.endswith("interrupted\n")
        assert "sk-secret" not in said + err
        slow = False
        assert main(arguments) == 0
    assert out.read_bytes().startswith(before)
    measured = {record.request for record in read_recording(out).requests if not record.warmup}
    assert measured == {f"p20-o20-c3-s0-r0-{index}" for index in range(30)}
