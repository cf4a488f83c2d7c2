"""A streamed reply: which events brought tokens, when, and what the server says about the request."""

import itertools
import json
import math
from typing import Any

from agentjax.bench.sse import Event


class Reply:
    """Collects a reply event by event.

    An event has content if it brings text (of the answer or of its reasoning), a tool call, or token ids.
    Events that only name the role, report the progress of the prompt or carry the usage have none.

    Attributes:
        times_s: when each event with content arrived, in seconds on the caller's clock.
        fault: what makes the reply unusable; None: nothing so far.
        text: the answer without its reasoning, if `keep`.
        token_ids: ids of the output, as far as the server sent them, if `keep`.
    """

    def __init__(self, keep: bool = False) -> None:
        self.times_s: list[float] = []
        self.usage: dict[str, Any] = {}
        self.timings: dict[str, Any] = {}
        self.finished = False
        self.done = False
        self.fault: str | None = None
        self.token_ids: list[int] = []
        self._keep = keep
        self._texts: list[str] = []
        self._told: list[int | None] = []

    @property
    def text(self) -> str:
        """The answer so far, if it was kept."""
        return "".join(self._texts)

    @property
    def is_complete(self) -> bool:
        """The server said that the reply is at its end."""
        return self.done or self.finished

    def read(self, event: Event, now_s: float) -> None:
        """Takes in one event that arrived at `now_s`."""
        if self.done or self.fault is not None:
            return
        data = event.data.strip()
        if not data:
            return
        if data == b"[DONE]":
            self.done = True
            return
        try:
            message = json.loads(data)
        except ValueError:
            self.fault = f"an event that is not JSON: {data.decode('utf-8', 'replace')}"
            return
        if not isinstance(message, dict):
            self.fault = f"an event that is no object: {json.dumps(message)}"
        elif message.get("error") or event.name == b"error":
            self.fault = error_text(message)
        else:
            self._message(message, now_s)

    def _message(self, message: dict[str, Any], now_s: float) -> None:
        usage, timings = message.get("usage"), message.get("timings")
        if isinstance(usage, dict):
            self.usage = usage
        if isinstance(timings, dict):
            self.timings = timings
        choices = message.get("choices")
        if not choices:
            return
        choice = choices[0] if isinstance(choices, list) else None
        if not isinstance(choice, dict):
            self.fault = f"choices that cannot be read: {json.dumps(choices)}"
            return
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        answer = delta.get("content") or choice.get("text")
        ids = choice.get("token_ids")
        if ids is None and isinstance(verbose := message.get("__verbose"), dict):
            ids = verbose.get("tokens")
        if not isinstance(ids, list):
            ids = None
        if (
            answer
            or ids
            or delta.get("reasoning_content")
            or delta.get("reasoning")
            or delta.get("tool_calls")
        ):
            self.times_s.append(now_s)
            self._told.append(len(ids) if ids else _logprobs(choice))
            if self._keep:
                if isinstance(answer, str):
                    self._texts.append(answer)
                self.token_ids += ids or ()
        if choice.get("finish_reason"):
            self.finished = True

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt as the server counted them."""
        return _count(self.usage.get("prompt_tokens")) or None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that the server says it found in its cache."""
        details = self.usage.get("prompt_tokens_details")
        told = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        return _count(self.timings.get("cache_n")) if told is None else told

    @property
    def output_tokens(self) -> int:
        """Tokens of the output as the server counted them; else as its events tell; else events."""
        told = _count(self.usage.get("completion_tokens"))
        return told or sum(1 if tokens is None else tokens for tokens in self._told)

    def event_tokens(self) -> tuple[tuple[int, ...] | None, bool]:
        """Tokens of each event with content (None: one each), and whether they are shared out.

        They are what the server tells, by ids or log probabilities of each event. Where it does not tell,
        each event brought one if the server counts no more tokens than events, or one more (an end token has
        no text). Otherwise the tokens are shared out over the events as evenly as whole numbers go.
        """
        events = len(self._told)
        told = [tokens for tokens in self._told if tokens is not None]
        if len(told) == events:
            return (None if all(tokens == 1 for tokens in told) else tuple(told)), False
        output = self.output_tokens
        if output <= events + 1:
            return None, False
        marks = [output * event // events for event in range(events + 1)]
        return tuple(after - before for before, after in itertools.pairwise(marks)), True

    def server_s(self, key: str) -> float | None:
        """A time that the server reports in milliseconds, in seconds."""
        value = self.timings.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return round(value / 1000, 6)
        return None


def error_text(content: Any) -> str:
    """What a server says is wrong, from the JSON of its answer or event."""
    error = content.get("error", content) if isinstance(content, dict) else content
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return error if isinstance(error, str) else json.dumps(error)


def _logprobs(choice: dict[str, Any]) -> int | None:
    """Tokens of an event by its log probabilities, if it has some."""
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        for key in ("tokens", "content"):
            if isinstance(listed := logprobs.get(key), list) and listed:
                return len(listed)
    return None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
