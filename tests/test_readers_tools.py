"""Recordings of other tools: their own totals come out again, and what is missing is said in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentjax.errors import InputError
from agentjax.readers import read_recording
from agentjax.records import Asked, Place

OUTPUTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "bench_outputs"
GUIDELLM = OUTPUTS / "guidellm-0.8.1" / "guidellm-0.8.1-concurrent-1-4.json"
AIPERF = OUTPUTS / "aiperf-0.13.0" / "profile_export.jsonl"
real = pytest.mark.skipif(not OUTPUTS.is_dir(), reason="the tools' outputs are not in this checkout")


def write(path: Path, *documents: Any, indent: int | None = None) -> Path:
    path.write_text("\n".join(json.dumps(document, indent=indent) for document in documents))
    return path


def vllm_result(**changes: Any) -> dict[str, Any]:
    """A result in the form of `vllm bench serve --save-result --save-detailed`."""
    made = {
        "date": "20261130-064404",
        "backend": "vllm",
        "model_id": "meta-llama/Llama-3.1-8B",
        "request_rate": "inf",
        "max_concurrency": 2,
        "duration": 3.0,
        "completed": 3,
        "input_lens": [100, 200, 300, 400],
        "output_lens": [3, 1, 6, 0],
        "ttfts": [0.5, 0.25, 0.125, 0.0],
        "itls": [[0.25, 0.125], [], [0.5, 0.25], []],
        "start_times": [1000.5, 1000.0, 1001.0, 1001.5],
        "errors": ["", "", "", "Too Many Requests"],
        "mean_ttft_ms": 291.7,
    }
    return {key: value for key, value in (made | changes).items() if value is not ...}


@pytest.mark.parametrize("indent", [None, 1])
def test_vllm_detailed_result(tmp_path: Path, indent: int | None) -> None:
    found = read_recording(write(tmp_path / "r.json", vllm_result(), indent=indent))
    one, three, several, failed = found.requests
    assert found.about["tool"] == "vllm bench serve" and found.about["model"] == "meta-llama/Llama-3.1-8B"
    run = {"requests": 4, "request_rate": "inf", "concurrency": 2, "saved": "20261130-064404"}
    assert found.about["runs"] == [run]
    assert (one.request, one.sent_s, one.first_token_s, one.finished_s) == ("1", 0.0, 0.25, 0.25)
    assert (three.sent_s, three.first_token_s, three.finished_s) == (0.5, 1.0, 1.375)
    assert three.gaps_s == (0.25, 0.125) and three.asked == Asked(100, 3, 2, 0.0, 0)
    assert three.cached_tokens is None
    # three events for six tokens: which brought how many is not known, so only the mean gap is
    assert several.gaps_s == () and several.event_tokens is None
    assert several.mean_gap_s == pytest.approx(0.75 / 5)
    assert (failed.error, failed.error_detail) == ("http_429", "Too Many Requests")
    assert failed.first_token_s is failed.finished_s is failed.asked is None and not failed.is_complete


def test_vllm_results_appended(tmp_path: Path) -> None:
    later = vllm_result(start_times=[5.5, 5.0, 6.0, 6.5], max_concurrency=4)
    found = read_recording(write(tmp_path / "r.jsonl", vllm_result(), later))
    assert len({record.request for record in found.requests}) == 8
    first = [record for record in found.requests if record.request.startswith("0-")]
    second = [record for record in found.requests if record.request.startswith("1-")]
    last_s = max(record.finished_s or 0.0 for record in first)
    assert second[0].sent_s == last_s + 1.0
    assert [record.sent_s - second[0].sent_s for record in second] == [record.sent_s for record in first]
    assert [run["concurrency"] for run in found.about["runs"]] == [2, 4]


def test_vllm_failures_without_a_reason(tmp_path: Path) -> None:
    timeout = "Traceback ...\nasyncio.exceptions.TimeoutError"
    refused = "Traceback ...\naiohttp.ClientConnectorError: Cannot connect to host"
    found = read_recording(write(tmp_path / "r.json", vllm_result(errors=[timeout, refused, "", ""])))
    assert [record.error for record in found.requests] == ["connection", "timeout", None, "other"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            dict.fromkeys(("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors"), ...),
            "found aggregates only, expected lists by request: run vllm bench serve with --save-detailed too",
        ),
        ({"itls": ...}, "found no itls, expected lists by request"),
        ({"start_times": ...}, "found no start_times, expected them, as newer versions"),
        ({"ttfts": [0.5]}, "ttfts: found 1 entries, expected 4 as in input_lens"),
        ({"itls": [[0.1], [], [-1.0], []]}, "itls[2][0]: found -1.0, expected a number of seconds >= 0"),
        ({"output_lens": [3, 1, "6", 0]}, 'output_lens[2]: found "6", expected an integer from 0'),
    ],
)
def test_vllm_faults(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        read_recording(write(tmp_path / "r.json", vllm_result(**changes)))
    assert sentence in str(caught.value) and "r.json" in str(caught.value)


@real
def test_guidellm_totals() -> None:
    found = read_recording(GUIDELLM)
    report = json.loads(GUIDELLM.read_text())
    assert found.about["version"] == "0.8.1" and found.about["model"] == "random-llama"
    assert found.requests[0].sent_s == 0.0
    for benchmark, run, streams in zip(report["benchmarks"], found.about["runs"], (1, 4), strict=True):
        theirs = {name: metric["successful"] for name, metric in benchmark["metrics"].items()
                  if metric and "successful" in metric}  # fmt: skip
        ours = [record for record in found.requests if record.asked and record.asked.concurrency == streams]
        assert run == {"strategy": "concurrent", "concurrency": streams, "requests": 12}
        assert len(ours) == benchmark["metrics"]["request_totals"]["successful"] == 12
        assert all(record.is_complete and not record.warmup and record.gaps_s == () for record in ours)
        assert all(record.place is None for record in ours)
        checks = {
            "time_to_first_token_ms": [1e3 * (record.ttft_s or 0.0) for record in ours],
            "inter_token_latency_ms": [1e3 * (record.mean_gap_s or 0.0) for record in ours],
            "prompt_token_count": [record.prompt_tokens or 0 for record in ours],
            "output_token_count": [record.output_tokens or 0 for record in ours],
        }
        for name, values in checks.items():
            if name == "inter_token_latency_ms":  # theirs weighs by tokens, all lengths are equal here
                assert np.mean(values) == pytest.approx(theirs[name]["mean"], rel=1e-4)
            else:
                assert sum(values) == pytest.approx(theirs[name]["total_sum"], rel=1e-4)
        # their latency ends with the response, ours with the last token
        latency = 1e3 * np.mean([record.latency_s for record in ours])
        assert latency == pytest.approx(1e3 * theirs["request_latency"]["mean"], abs=2.0)
        assert latency < 1e3 * theirs["request_latency"]["mean"]


@real
def test_guidellm_report_without_requests() -> None:
    with pytest.raises(InputError, match="found a report without its requests, expected one with"):
        read_recording(OUTPUTS / "guidellm" / "guidellm_report_v2.json")


def guidellm_request(name: str, start: float | None, **info: Any) -> dict[str, Any]:
    timings = {"request_start": start, "first_token_iteration": None, "last_token_iteration": None}
    if start is not None:
        timings |= {"first_token_iteration": start + 0.25, "last_token_iteration": start + 1.25}
    timings |= info.pop("timings", {})
    counts = {"prompt_tokens": 100, "cached_tokens": 64, "output_tokens": 5}
    return {"request_id": name, "info": {"timings": timings, **info}, **counts}


def guidellm_report(**requests: list[dict[str, Any]]) -> dict[str, Any]:
    benchmark = {
        "config": {"strategy": {"type_": "poisson", "rate": 2.0}},
        "scheduler_metrics": {"measure_start_time": 1001.0},
        "requests": {"successful": [], "errored": [], "incomplete": []} | requests,
    }
    return {"metadata": {"version": 2, "guidellm_version": "0.8.1"}, "benchmarks": [benchmark]}


def test_guidellm_errors_warmup_and_conversations(tmp_path: Path) -> None:
    none = {"first_token_iteration": None, "last_token_iteration": None}
    report = guidellm_report(
        successful=[
            guidellm_request("b", 1002.0, conversation_id="c", turn_index=1),
            guidellm_request("a", 1000.0, conversation_id="c", turn_index=0, agent_id="default"),
            guidellm_request("s", 1003.0, conversation_id="c", turn_index=0, agent_id="sub"),
        ],
        errored=[
            guidellm_request(
                "e", 1004.0, error="Client error '503 Service Unavailable' status 503", timings=none
            ),
            guidellm_request("never", None, error="not sent"),
        ],
        incomplete=[guidellm_request("i", 1005.0, timings={"last_token_iteration": 1005.5})],
    )
    found = read_recording(write(tmp_path / "g.json", report, indent=1))
    assert [record.request for record in found.requests] == ["a", "b", "s", "e", "i"]
    a, b, s, e, i = found.requests
    assert found.about["mode"] == "programs" and a.cached_tokens == 64
    assert (a.place, b.place) == (Place("c", 0, 0, 0), Place("c", 0, 0, 1))
    assert s.place == Place("c/sub", 0, 0, 0)
    assert (a.warmup, b.warmup) == (True, False) and b.mean_gap_s == 0.25
    assert (e.error, e.first_token_s, i.error) == ("http_503", None, "cancelled")
    assert a.asked is None and found.about["runs"][0]["request_rate"] == 2.0


def changed(report: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    change(report)
    return report


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r["metadata"].update(version=1), "metadata.version: found 1, expected 2, as guidellm 0.8"),
        (lambda r: r.pop("metadata"), "metadata.version: found nothing, expected 2"),
        (
            lambda r: r["benchmarks"][0]["requests"]["successful"][0]["info"]["timings"].update(
                request_start="x"
            ),
            'benchmarks[0].requests.successful[0].info.timings.request_start: found "x", expected',
        ),
        (
            lambda r: r["benchmarks"][0]["requests"]["successful"][0].pop("info"),
            "benchmarks[0].requests.successful[0].info: found nothing, expected this field",
        ),
    ],
)
def test_guidellm_faults(tmp_path: Path, change: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    report = changed(guidellm_report(successful=[guidellm_request("a", 1000.0)]), change)
    with pytest.raises(InputError) as caught:
        read_recording(write(tmp_path / "g.json", report, indent=1))
    assert sentence in str(caught.value) and "g.json" in str(caught.value)


@real
def test_aiperf_totals() -> None:
    found = read_recording(AIPERF)
    summary = json.loads(AIPERF.with_name("profile_export_aiperf.json").read_text())
    ours = found.requests
    assert found.about["version"] == "0.13.0" and found.about["concurrency"] == 4
    assert len(ours) == summary["request_count"]["avg"] == 12 and ours[0].sent_s == 0.0
    assert all(record.is_complete and not record.warmup and record.place is None for record in ours)
    checks = {
        "time_to_first_token": [1e3 * (record.ttft_s or 0.0) for record in ours],
        "request_latency": [1e3 * (record.latency_s or 0.0) for record in ours],
        "inter_token_latency": [1e3 * (record.mean_gap_s or 0.0) for record in ours],
        "inter_chunk_latency": [1e3 * gap for record in ours for gap in record.gaps_s],
        "output_sequence_length": [record.output_tokens or 0 for record in ours],
        "input_sequence_length": [record.prompt_tokens or 0 for record in ours],
        "usage_prompt_cache_read_tokens": [record.cached_tokens or 0 for record in ours],
    }
    for name, values in checks.items():
        assert (len(values), sum(values)) == (summary[name]["count"], pytest.approx(summary[name]["sum"]))


def aiperf_line(start_ns: int = 10**18, unit: str = "ms", scale: float = 1.0, **more: Any) -> dict[str, Any]:
    metrics = {
        "time_to_first_token": {"value": 250 * scale, "unit": unit},
        "request_latency": {"value": 750 * scale, "unit": unit},
        "inter_chunk_latency": {"value": [250 * scale, 250 * scale], "unit": unit},
        "output_sequence_length": {"value": 3, "unit": "tokens"},
        "input_sequence_length": {"value": 100, "unit": "tokens"},
    }
    metadata = {"request_start_ns": start_ns, "x_request_id": str(start_ns), "benchmark_phase": "profiling"}
    error = {"error": more.pop("error")} if "error" in more else {}
    metrics = {name: value for name, value in (metrics | more.pop("metrics", {})).items() if value}
    return {"metadata": metadata | more, "metrics": metrics} | error


@pytest.mark.parametrize(
    ("unit", "scale"), [("ns", 1e6), ("us", 1e3), ("ms", 1.0), ("s", 1e-3), ("sec", 1e-3)]
)
def test_aiperf_units(tmp_path: Path, unit: str, scale: float) -> None:
    (record,) = read_recording(write(tmp_path / "p.jsonl", aiperf_line(unit=unit, scale=scale))).requests
    assert record.first_token_s == pytest.approx(0.25) and record.finished_s == pytest.approx(0.75)
    assert record.gaps_s == pytest.approx((0.25, 0.25)) and record.cached_tokens is None


def test_aiperf_warmup_errors_and_conversations(tmp_path: Path) -> None:
    start = 10**18
    turn = {"conversation_id": "t", "x_correlation_id": "c"}
    none = {"time_to_first_token": None, "inter_chunk_latency": None, "request_latency": None}
    usage = {"usage_completion_tokens": {"value": 6, "unit": "tokens"}}
    found = read_recording(
        write(
            tmp_path / "p.jsonl",
            aiperf_line(start + 2 * 10**9, **turn, turn_index=1, metrics=usage),
            aiperf_line(start, benchmark_phase="warmup", turn_index=0),
            aiperf_line(start + 10**9, **turn, turn_index=0),
            aiperf_line(start + 3 * 10**9, metrics=none, error={"code": 429, "type": "X", "message": "busy"}),
            aiperf_line(start + 4 * 10**9, metrics=none, error={"type": "TimeoutError", "message": ""}),
            aiperf_line(start + 5 * 10**9, metrics=none, was_cancelled=True),
        )
    )
    warm, first, second, busy, late, stopped = found.requests
    assert [record.sent_s for record in found.requests] == pytest.approx([0, 1, 2, 3, 4, 5])
    assert warm.warmup and warm.place is None and not first.warmup
    assert (first.place, second.place) == (Place("c", 0, 0, 0), Place("c", 0, 0, 1))
    assert second.output_tokens == 6 and second.gaps_s == () and second.mean_gap_s == pytest.approx(0.1)
    assert (busy.error, busy.error_detail) == ("http_429", "X: busy")
    assert (late.error, stopped.error) == ("timeout", "cancelled") and late.first_token_s is None


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            aiperf_line(unit="min"),
            'metrics.time_to_first_token.unit: found "min", expected one of ns, us, ms',
        ),
        (
            aiperf_line(metrics={"inter_chunk_latency": {"value": [1, -1], "unit": "ms"}}),
            "metrics.inter_chunk_latency.value[1]: found -1, expected a number >= 0",
        ),
        (
            aiperf_line(metrics={"inter_chunk_latency": {"value": 5, "unit": "ms"}}),
            "metrics.inter_chunk_latency.value: found 5, expected a list of times",
        ),
        (
            aiperf_line(metrics={"time_to_first_token": None}),
            "metrics.time_to_first_token: found nothing, expected it: run aiperf with --streaming",
        ),
        ({"metadata": {}, "metrics": {}}, "metadata.request_start_ns: found nothing, expected this field"),
    ],
)
def test_aiperf_faults(tmp_path: Path, line: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        read_recording(write(tmp_path / "p.jsonl", aiperf_line(), line))
    assert sentence in str(caught.value) and "p.jsonl, line 2, " in str(caught.value)


@real
def test_aiperf_summary_is_pointed_elsewhere() -> None:
    with pytest.raises(InputError, match=r"the summary of an AIPerf run, expected its profile_export\.jsonl"):
        read_recording(AIPERF.with_name("profile_export_aiperf.json"))
