"""An OpenAI-compatible server on the loopback device that does as a test says, faults included."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

DROP = "drop"
"""A piece of an answer: the connection is cut here."""

HANG = "hang"
"""A piece of an answer: nothing more comes."""

Piece = bytes | float | str


@dataclass
class Request:
    """What came in. `number` counts the requests for completions from 0."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int
    at_s: float = field(default_factory=time.perf_counter)

    @property
    def name(self) -> str:
        return json.dumps(self.body.get("prompt") or self.body.get("messages"))


@dataclass
class Answer:
    """What goes out: pieces are bytes to send, seconds to wait, `DROP` or `HANG`."""

    pieces: Sequence[Piece]
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream"})


def refusal(status: int, text: str = "refused", **headers: str) -> Answer:
    """An error as OpenAI's API gives it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    content = json.dumps({"error": {"message": text, "type": "error", "code": status}}).encode()
    return Answer([content], status, {"Content-Type": "application/json", **named})


def event(content: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    data = content if isinstance(content, str) else json.dumps(content)
    return f"{head}data: {data}\n\n".encode()


def prompt_length(body: dict[str, Any]) -> int:
    """Tokens of a prompt: its ids, or 3 a word and 7 a message."""
    if "messages" in body:
        return sum(7 + 3 * len(message["content"].split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else 3 * len(prompt.split())


def output_ids(request: Request, count: int) -> list[int]:
    """Ids of the output, which differ from request to request."""
    return [50_000 + 100 * request.number + index for index in range(count)]


def completion(
    request: Request,
    *,
    usage: bool = True,
    done: bool = True,
    finish: bool = True,
    per_event: int = 1,
    gap_s: float = 0.0,
    tell_ids: str | None = None,
    cached: int | None = None,
    output: int | None = None,
    text: str = " word",
    timings: bool = False,
) -> list[Piece]:
    """The pieces of a streamed completion, chat or plain, as long as it was asked for or `output`."""
    body = request.body
    is_chat = "messages" in body
    tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    tokens = tokens if output is None else output
    ids = output_ids(request, tokens)
    pieces: list[Piece] = []
    if is_chat:
        pieces.append(event(_chunk({"delta": {"role": "assistant", "content": None}})))
    for begin in range(0, tokens, per_event):
        if gap_s:
            pieces.append(gap_s)
        own = ids[begin : begin + per_event]
        words = text * len(own)
        choice = {"delta": {"content": words}} if is_chat else {"text": words}
        if tell_ids == "vllm":
            choice["token_ids"] = own
        chunk = _chunk(choice)
        if tell_ids == "llama.cpp":
            chunk["__verbose"] = {"tokens": own, "id_slot": 0}
        pieces.append(event(chunk))
    if finish:
        choice = {"delta": {}} if is_chat else {"text": ""}
        pieces.append(event(_chunk({**choice, "finish_reason": "length"})))
    if usage:
        told: dict[str, Any] = {"prompt_tokens": prompt_length(body), "completion_tokens": tokens}
        if cached is not None:
            told["prompt_tokens_details"] = {"cached_tokens": cached}
        last: dict[str, Any] = {"choices": [], "usage": told}
        if timings:
            last["timings"] = {"cache_n": 3, "prompt_ms": 12.5, "predicted_ms": 30.0}
        pieces.append(event(last))
    if done:
        pieces.append(b"data: [DONE]\n\n")
    return pieces


def _chunk(choice: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None, **choice}], "model": "mock"}


Script = Callable[[Request], Answer | Sequence[Piece]]


class MockEndpoint:
    """Serves in a thread of its own; a context that ends with the server.

    Attributes:
        requests: those for completions, as they came in.
        most_active: how many of them were being answered at once.
        connections: how many were made.
    """

    def __init__(
        self, script: Script = completion, *, models: Sequence[str] = ("mock",), closes: bool = False
    ) -> None:
        """`closes`: connections are closed after every answer, without a word about it."""
        self.script = script
        self.requests: list[Request] = []
        self.active = self.most_active = self.connections = 0
        self._models = models
        self._closes = closes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [request.body for request in self.requests]

    def __enter__(self) -> "MockEndpoint":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._exchange(reader, writer) and not self._closes:
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; False ends the connection."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = lines[0].split(" ")
        pairs = (line.partition(": ") for line in lines[1:] if line)
        headers = {name.lower(): value for name, _, value in pairs}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            listed = {"object": "list", "data": [{"id": name} for name in self._models]}
            return await self._send(writer, Answer([json.dumps(listed).encode()]))
        request = Request(path, headers, json.loads(content), len(self.requests))
        self.requests.append(request)
        answer = self.script(request)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._send(writer, answer if isinstance(answer, Answer) else Answer(answer))
        finally:
            self.active -= 1

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        if answer.pieces and answer.pieces[0] == DROP:
            writer.transport.abort()
            return False
        headers = {"Server": "mock", "Transfer-Encoding": "chunked", **answer.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {answer.status} So\r\n{head}\r\n".encode())
        for piece in answer.pieces:
            if piece == DROP:
                await writer.drain()
                await asyncio.sleep(0.02)
                writer.transport.abort()
                return False
            if piece == HANG:
                await self._stop.wait()
            elif isinstance(piece, bytes) and piece:  # an empty chunk would end the answer
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
            elif isinstance(piece, float):
                await asyncio.sleep(piece)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
