"""Server-sent events: the same whatever the network makes of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.bench.sse import Event, EventParser

LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])
NOISE = st.sampled_from(["", ": a comment", "id: 7", "retry: 10", "nothing", ":"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Event]]:
    """The bytes of a stream with one kind of line end, and its events."""
    end = draw(ENDS)
    text, events = draw(st.sampled_from(["", "\ufeff"])), []
    for _ in range(draw(st.integers(0, 5))):
        name, data = draw(st.sampled_from(["", "message", "error"])), draw(st.lists(LINES, max_size=3))
        lines = [f"event: {name}"] if name else []
        for line in data:
            space = " " if line.startswith(" ") or draw(st.booleans()) else ""
            lines.append(f"data:{space}{line}")
            if noise := draw(NOISE):
                lines.append(noise)
        text += "".join(line + end for line in lines) + end
        if data:
            events.append(Event(name.encode(), "\n".join(data).encode()))
    return text.encode(), events


def parse(pieces: list[bytes]) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def cut(content: bytes, marks: list[int]) -> list[bytes]:
    ends = sorted({0, len(content), *(mark % (len(content) + 1) for mark in marks)})
    return [content[begin:end] for begin, end in pairwise(ends)]


@given(streams(), st.lists(st.integers(0, 10**6), max_size=12))
def test_any_cut_gives_the_events(stream: tuple[bytes, list[Event]], marks: list[int]):
    content, events = stream
    assert parse(cut(content, marks)) == events


@given(streams())
def test_byte_by_byte(stream: tuple[bytes, list[Event]]):
    content, events = stream
    assert parse([bytes([byte]) for byte in content]) == events


@given(st.binary(max_size=200), st.lists(st.integers(0, 10**6), max_size=12))
def test_any_bytes_parse_as_if_whole(content: bytes, marks: list[int]):
    assert parse(cut(content, marks)) == parse([content])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data\n\n", [b""]),
        (b": ping\n\ndata: a\n\n", [b"a"]),
        (b"event: x\n\ndata: a\n\n", [b"a"]),
        (b"data: a", [b"a"]),
        (b"data: a\n", [b"a"]),
        (b"\n\n\n", []),
        (b"", []),
    ],
)
def test_forms_of_events(content: bytes, expected: list[bytes]):
    assert [event.data for event in parse([content])] == expected


def test_an_event_is_given_out_as_soon_as_it_is_whole():
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\nda") == [Event(b"", b"a")]
    assert parser.feed(b"ta: b\r\n\r\n") == [Event(b"", b"b")]
