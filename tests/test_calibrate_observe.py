"""What is read out of a recording: decode steps, prompts, and prompts beside decodes."""

from pathlib import Path

import jax
import numpy as np
import pytest

from agentjax.calibrate.observations import DECODE, MIXED, PREFILL
from agentjax.calibrate.observe import observe
from agentjax.readers import read_recording
from agentjax.records import Asked, Place, Recording, RequestRecord
from tests.recordings import MODEL, record

jax.config.update("jax_enable_x64", True)

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "bench_outputs"


def request(name, sent, first, gaps, prompt=10, **more) -> RequestRecord:
    return RequestRecord(
        request=name,
        sent_s=sent,
        first_token_s=first,
        finished_s=first + sum(gaps),
        prompt_tokens=prompt,
        output_tokens=more.pop("output", len(gaps) + 1),
        cached_tokens=more.pop("cached", 0),
        gaps_s=tuple(gaps),
        **more,
    )


@pytest.mark.parametrize("server_times", [False, True])
@pytest.mark.parametrize("budget", [100_000, 96])
def test_every_observation_is_what_the_server_did(server_times, budget):
    """Without noise the model that made a recording explains each observation exactly."""
    cells = [(n, 20, c, share) for n in (64, 300) for c in (1, 2, 4) for share in (0.0, 0.5)]
    recording = record(
        MODEL, cells, repeats=1, noise=0, budget=budget, server_times=server_times, stagger_s=0.09
    )
    found, report = observe(recording, budget)
    predicted = found.predicted_s(MODEL)
    sure = found.kind != MIXED
    np.testing.assert_allclose(predicted[sure], found.duration_s[sure], rtol=1e-4)
    # between two tokens of another request a prompt's first chunk may find fewer decodes
    np.testing.assert_allclose(predicted[~sure], found.duration_s[~sure], rtol=0.02)
    assert all(report.kept.values())
    assert set(found.decodes[found.kind == DECODE]) == {1, 2, 3, 4}
    assert len(report.latency_s) == (report.kept["prefill"] if server_times else 0)
    assert np.allclose(report.latency_s, 3e-3)
    assert np.all(
        found.chunks[found.kind == PREFILL] == np.ceil(found.tokens / budget)[found.kind == PREFILL]
    )
    assert {"decode steps right after a first token"} <= set(report.left_out)


def test_cached_tokens_shorten_the_prompt_and_are_its_context():
    recording = Recording((request("a", 0.0, 1.0, [0.1] * 5, prompt=100, cached=60),))
    found, _ = observe(recording, 30)
    prompt = found.take(found.kind == PREFILL)
    assert (prompt.tokens[0], prompt.chunks[0], prompt.history_tokens[0]) == (40, 2, 60 + 90)
    assert prompt.work_tokens2[0] == 40 * (60 + 20)
    assert prompt.before_tokens()[0] == 60


def test_contexts_grow_with_the_tokens_that_came():
    recording = Recording((request("a", 0.0, 1.0, [0.1] * 21, prompt=100),))
    found, _ = observe(recording)
    steps = found.take(found.kind == DECODE)
    assert np.all(steps.decodes == 1)
    # 20 steps after the first, with 102 to 121 tokens each
    assert np.average(steps.context_tokens, weights=steps.weight) == pytest.approx(111.5)
    assert steps.weight.sum() == 20


def test_a_bunch_of_tokens_is_taken_together():
    """The client was held up: five tokens at once, after five steps."""
    gaps = [0.1] * 6 + [0.5, 1e-4, 1e-4, 1e-4, 1e-4] + [0.1] * 6
    found, report = observe(Recording((request("a", 0.0, 1.0, gaps),)))
    assert np.all(np.abs(found.duration_s[found.kind == DECODE] - 0.1) < 0.01)
    assert report.left_out["decode steps whose tokens came in a bunch"] == 0


def test_events_of_several_tokens_are_several_steps():
    whole = request("a", 0.0, 1.0, [0.1, 0.3, 0.1, 0.2], event_tokens=(1, 1, 3, 1, 2), output=8)
    found, _ = observe(Recording((whole,)))
    steps = found.take(found.kind == DECODE)
    assert np.average(steps.duration_s, weights=steps.weight) == pytest.approx(0.1)
    assert steps.weight.sum() == 6


def test_a_request_without_times_of_its_tokens_gives_a_mean_step():
    plain = request("a", 0.0, 1.0, [2.0], output=21)
    found, report = observe(Recording((plain,)))
    steps = found.take(found.kind == DECODE)
    assert (len(steps), steps.duration_s[0], steps.decodes[0]) == (1, pytest.approx(0.1), 1)
    assert report.left_out[
        "requests whose events do not add up to their tokens and time: only their mean step counts"
    ]


def test_decode_steps_beside_requests_of_unknown_length_are_left_out():
    blind = RequestRecord("b", 0.0, 1.0, 9.0, None, None, None)
    found, report = observe(Recording((blind, request("a", 1.5, 2.0, [0.1] * 40))))
    assert not len(found)
    assert report.left_out["decode steps without a duration, or beside requests of unknown length"] == 39


def test_steps_beside_a_prompt_or_a_change_are_left_out():
    long = request("a", 0.0, 1.0, [0.1] * 40)
    other = request("b", 2.05, 2.55, [0.1] * 5)
    found, report = observe(Recording((long, other)))
    steps = found.take((found.kind == DECODE) & (found.request == "a"))
    assert set(steps.decodes) == {1, 2}
    assert report.left_out["decode steps beside a prompt, or while a request started or ended"] > 5
    mixed = found.take(found.kind == MIXED)
    assert (len(mixed), mixed.decodes[0], mixed.tokens[0], mixed.chunks[0]) == (1, 1, 10, 1)
    assert mixed.duration_s[0] == pytest.approx(0.1 * mixed.iterations[0])


def test_what_nobody_knows_is_left_out():
    cell = Asked(100, 5, 1, 0.5, 0)
    requests = (
        request("half cached", 0.0, 1.0, [0.1] * 4, cached=None, asked=cell),
        request("second turn", 5.0, 6.0, [0.1] * 4, cached=None, place=Place("p", 0, 0, 1)),
        request("warm-up", 10.0, 11.0, [0.1] * 4, warmup=True),
        request("refused", 15.0, 16.0, [0.1] * 4, error="http_429"),
        request("nothing cached", 20.0, 21.0, [0.1] * 4, cached=None),
    )
    found, report = observe(Recording(requests))
    assert list(found.request[found.kind == PREFILL]) == ["nothing cached"]
    assert report.left_out["prompts of which it is not known how much was cached"] == 2
    assert report.left_out["requests that failed"] == 1
    assert report.notes == [
        "the server does not say what it found in its cache for 1 requests: taken as nothing"
    ]
    assert "warm-up" not in found.request


def test_a_request_that_broke_off_keeps_its_neighbours_from_counting():
    broken = RequestRecord("a", 0.0, None, None, 10, None, None, error="timeout")
    fine = request("b", 3.0, 4.0, [0.1] * 9)
    later = request("c", 30.0, 31.0, [0.1] * 9)
    recording = Recording((broken, fine, later), {"config": {"timeout_s": 20.0}})
    found, _ = observe(recording)
    assert set(found.request) == {"c"}
    assert len(observe(Recording((broken,)))[0]) == 0


@pytest.mark.skipif(not DATA.is_dir(), reason="the recordings of other tools (../shared/data) are not here")
@pytest.mark.parametrize(
    ("file", "decodes", "batches"),
    [
        ("guidellm-0.8.1/guidellm-0.8.1-concurrent-1-4.json", 10, {1, 4}),
        ("aiperf-0.13.0/profile_export.jsonl", 20, {4}),
    ],
)
def test_recordings_of_other_tools(file, decodes, batches):
    found, report = observe(read_recording(DATA / file))
    assert report.kept["decode"] > decodes
    assert report.kept["prefill"] >= 1
    assert batches <= set(found.decodes[found.kind == DECODE].astype(int))
    assert np.all(found.duration_s > 0)
    assert np.all(found.duration_s[found.kind == DECODE] < 0.1)
