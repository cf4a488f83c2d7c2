"""What a streamed reply says: content, tokens of its events, cached tokens, faults."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.bench.reply import Reply
from agentjax.bench.sse import Event


def read(*messages: Any, keep: bool = False, name: bytes = b"") -> Reply:
    reply = Reply(keep)
    for now_s, message in enumerate(messages):
        data = message if isinstance(message, str) else json.dumps(message)
        reply.read(Event(name, data.encode()), float(now_s))
    return reply


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": words, "finish_reason": None}], **more}


def delta(**content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": None}]}


def usage(output: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": output, **more}}


@pytest.mark.parametrize(
    ("message", "has_content"),
    [
        (delta(role="assistant", content=None), False),
        (delta(role="assistant", content=""), False),
        (delta(), False),
        (delta(content="a"), True),
        (delta(content=" "), True),
        (delta(reasoning_content="hm"), True),
        (delta(reasoning="hm"), True),
        (delta(tool_calls=[{"function": {"arguments": "{"}}]), True),
        (text("a"), True),
        (text(""), False),
        ({"choices": [{"text": "", "token_ids": [5]}]}, True),
        ({"choices": [{"text": "", "token_ids": []}]}, False),
        ({"choices": [{"text": "", "token_ids": None}]}, False),
        ({**text(""), "__verbose": {"tokens": [5]}}, True),
        ({**text(""), "__verbose": {"tokens": []}}, False),
        ({"prompt_progress": {"total": 10}, **delta(role="assistant", content=None)}, False),
        (usage(3), False),
        ({}, False),
        (" ", False),
    ],
)
def test_what_has_content(message: Any, has_content: bool):
    reply = read({}, message)
    assert reply.times_s == ([1.0] if has_content else [])
    assert reply.fault is None


@pytest.mark.parametrize(
    ("messages", "tokens", "shared_out"),
    [
        ([text("a"), text("b"), usage(2)], None, False),
        ([text("a"), text("b"), usage(3)], None, False),  # an end token without text
        ([text("a"), text("b"), usage(1)], None, False),
        ([text("a"), text("b")], None, False),
        ([text("a"), text("b"), usage(5)], (2, 3), True),
        ([text("a"), text("b"), text("c"), usage(9)], (3, 3, 3), True),
        ([{"choices": [{"text": "a", "token_ids": [1, 2]}]}, text("b"), usage(4)], (2, 2), True),
        ([{"choices": [{"text": "ab", "token_ids": [1, 2, 3]}]}, usage(3)], (3,), False),
        ([{**text("a"), "__verbose": {"tokens": [1]}}, usage(1)], None, False),
        ([{"choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"]}}]}, usage(2)], (2,), False),
        ([{"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{}, {}]}}]}], (2,), False),
        ([usage(0)], None, False),
    ],
)
def test_tokens_of_events(messages: list[Any], tokens: tuple[int, ...] | None, shared_out: bool):
    assert read(*messages).event_tokens() == (tokens, shared_out)


@given(st.integers(1, 40), st.integers(0, 400))
def test_tokens_that_are_shared_out_add_up(events: int, output: int):
    reply = read(*[text("a")] * events, usage(output))
    tokens, shared_out = reply.event_tokens()
    if shared_out:
        assert tokens is not None
        assert len(tokens) == events
        assert sum(tokens) == output
        assert max(tokens) - min(tokens) <= 1
        assert min(tokens) >= 1


def test_counts_of_the_server():
    reply = read(text("a"), usage(1, prompt_tokens_details={"cached_tokens": 4}))
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (9, 1, 4)
    reply = read(text("a"), {"choices": [], "timings": {"cache_n": 6, "prompt_ms": 1.5}})
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (None, 1, 6)
    assert reply.server_s("prompt_ms") == 0.0015
    assert reply.server_s("predicted_ms") is None
    assert read(text("a"), usage(1, prompt_tokens_details=None)).cached_tokens is None
    reply = read(text("a"), text("b"), {"usage": {"prompt_tokens": 0, "completion_tokens": 0}})
    assert (reply.prompt_tokens, reply.output_tokens) == (None, 2)


def test_text_and_ids_are_kept_if_wanted():
    messages = [{"choices": [{"text": "a", "token_ids": [7, 8]}]}, text(" b"), delta(reasoning_content="x")]
    reply = read(*messages, keep=True)
    assert (reply.text, reply.token_ids) == ("a b", [7, 8])
    assert (read(*messages).text, read(*messages).token_ids) == ("", [])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ('{"choices": [{"te', "not JSON"),
        ("hello", "not JSON"),
        ("[1]", "no object"),
        ("3", "no object"),
        ('{"choices": [3]}', "cannot be read"),
        ('{"choices": {"a": 1}}', "cannot be read"),
        ({"error": {"message": "out of memory", "code": 500}}, "out of memory"),
        ({"error": "out of memory"}, "out of memory"),
        ({"error": {"code": 7}}, '{"code": 7}'),
    ],
)
def test_faults(message: Any, words: str):
    reply = read(text("a"), message, text("b"))
    assert reply.fault is not None
    assert words in reply.fault
    assert reply.times_s == [0.0]


def test_an_event_named_error_is_a_fault():
    assert read({"detail": "overloaded"}, name=b"error").fault == "overloaded"


def test_an_error_that_is_null_is_none():
    assert read({**text("a"), "error": None}).fault is None


def test_nothing_counts_after_done():
    reply = read(text("a"), "[DONE]", text("b"), "broken")
    assert reply.done
    assert reply.is_complete
    assert reply.fault is None
    assert reply.times_s == [0.0]


def test_what_ends_a_reply():
    assert not read(text("a")).is_complete
    assert not read(text("a", usage={"completion_tokens": 1})).is_complete
    assert read(text("a"), {"choices": [{"text": "", "finish_reason": "stop"}]}).is_complete


FIELDS = """
choices delta content text usage timings error token_ids cache_n __verbose tokens logprobs completion_tokens
prompt_tokens_details prompt_ms finish_reason cached_tokens message
"""
NAMES = st.sampled_from(FIELDS.split())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=4), st.booleans())
def test_no_event_ends_the_client(messages: list[Any], keep: bool):
    reply = read(*messages, keep=keep)
    reply.event_tokens()
    reply.server_s("prompt_ms")
    assert reply.output_tokens >= 0
    assert (reply.cached_tokens or 0) >= 0
    assert isinstance(reply.text, str)
