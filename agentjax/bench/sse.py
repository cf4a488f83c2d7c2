"""Server-sent events, as the bytes of a response bring them in."""

from typing import NamedTuple

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its name ("" where it has none) and its data, lines joined by a newline."""

    name: bytes
    data: bytes


class EventParser:
    """Splits a stream of bytes into events, however the network cut it.

    Lines end in LF, CRLF or CR; an empty line ends an event; comments and other fields are left out, and so
    are events without data.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []
        self._first = True

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that these bytes complete."""
        text = self._rest + chunk
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # a newline may follow in the next bytes
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = text.split(b"\n")
        self._rest = lines.pop() + held
        return self._events(lines)

    def finish(self) -> list[Event]:
        """What is left when the stream ends: an event that only lacks its empty line counts."""
        rest, self._rest = self._rest, b""
        return self._events([*rest.split(b"\r"), b""])

    def _events(self, lines: list[bytes]) -> list[Event]:
        events: list[Event] = []
        for line in lines:
            if self._first:
                self._first = False
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line:
                if self._data:
                    events.append(Event(self._name, b"\n".join(self._data)))
                    self._data = []
                self._name = b""
                continue
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif field == b"event":
                self._name = value.removeprefix(b" ")
        return events
