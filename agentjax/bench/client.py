"""An OpenAI-compatible endpoint: sends streaming requests, times what comes back, and outlasts its faults."""

import asyncio
import itertools
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from agentjax.bench.clock import Clock
from agentjax.bench.faults import Fault, http_fault, named, refused_fields, wants_other_limit
from agentjax.bench.reply import Reply, error_text
from agentjax.bench.settings import Settings
from agentjax.bench.sse import EventParser
from agentjax.errors import complaint
from agentjax.records import Asked, Place, RequestRecord

_CAN_DO_WITHOUT = (
    "ignore_eos",
    "min_tokens",
    "temperature",
    "stream_options",
    "verbose",
    "return_token_ids",
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_AFTER_DONE_S = 1.0
_CONNECT_S = 10.0
_NO_CONNECTION = (httpx.ConnectError, httpx.ConnectTimeout)
_KEEP_S = 4.0
"""Idle time after which a connection is not used again; many servers close it after 5 s."""
_DIGITS = 7
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class Outgoing:
    """A request to send.

    Attributes:
        name: unique within the run.
        prompt: the part of the body that holds it: `prompt` or `messages`.
        keep: keep the text and the token ids of the output, and ask for these ids.
    """

    name: str
    prompt: Mapping[str, Any]
    output_tokens: int
    warmup: bool = False
    asked: Asked | None = None
    place: Place | None = None
    keep: bool = False


class Endpoint:
    """A server under test, and the connections to it, which are held open until `close`.

    Attributes:
        notes: what of the run is not as asked for, in sentences.
        server: what the server calls itself, once it has answered.
        shared_out: complete replies whose tokens had to be shared out over their events.
        without_usage: complete replies without the server's count of their tokens.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.notes: list[str] = []
        self.server: str | None = None
        self.shared_out = 0
        self.without_usage = 0
        self._settings = settings
        self._clock = clock
        self._key = os.environ.get(settings.api_key_env or "", "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise complaint(f"environment variable {settings.api_key_env}", "no key", "printable ASCII")
        self._limit_field = settings.max_tokens_field
        self._left_out: set[str] = set()
        path = "/chat/completions" if settings.endpoint == "chat" else "/completions"
        self._url = settings.base_url + path
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._reuses = True
        try:
            trusted = httpx.create_ssl_context()
            self._reusing, self._fresh = (
                httpx.AsyncClient(
                    headers=headers,
                    verify=trusted,
                    timeout=httpx.Timeout(None, connect=_CONNECT_S),
                    limits=httpx.Limits(max_keepalive_connections=kept, keepalive_expiry=_KEEP_S),
                    trust_env=urlsplit(settings.url).hostname not in _LOOPBACK,
                )
                for kept in (None, 0)
            )
        except (ImportError, OSError, ValueError) as error:
            where = "environment variables of proxies and certificates, such as ALL_PROXY and SSL_CERT_FILE"
            raise complaint(where, _reason(error), "none, or values that can be used") from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._reusing.aclose()
        await self._fresh.aclose()

    @property
    def has_key(self) -> bool:
        """A key was found in the environment."""
        return bool(self._key)

    async def models(self) -> list[str]:
        """Names of the server's models; empty where it lists none."""
        try:
            response = await self._fresh.get(self._settings.base_url + "/models", timeout=_CONNECT_S)
            listed = response.json().get("data") if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return []
        listed = listed if isinstance(listed, list) else []
        names = [model.get("id") for model in listed if isinstance(model, dict)]
        return [self._clean(name) for name in names if isinstance(name, str)]

    async def send(self, outgoing: Outgoing, once: bool = False) -> tuple[RequestRecord, Reply]:
        """Sends a request, again after faults that may pass (not if `once`), and records its last attempt."""
        settings = self._settings
        most = 1 if once else settings.max_attempts
        attempts = 0
        while True:
            attempts += 1
            body = self._body(outgoing)
            sent_s, reply, fault = await self._attempt(body, outgoing.keep)
            while fault is not None and self._adapt(fault, body):
                body = self._body(outgoing)
                sent_s, reply, fault = await self._attempt(body, outgoing.keep)
            if fault is None or not fault.again or attempts >= most:
                return self._record(outgoing, sent_s, reply, fault, attempts), reply
            doubled_s = settings.backoff_s * 2 ** min(attempts - 1, 30)
            wait_s = doubled_s if fault.wait_s is None else fault.wait_s
            await asyncio.sleep(min(wait_s, settings.longest_wait_s))

    def _body(self, outgoing: Outgoing) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {
            "model": settings.model,
            **outgoing.prompt,
            self._limit_field: outgoing.output_tokens,
            "min_tokens": outgoing.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        if outgoing.keep and settings.prompts == "ids":
            body |= {"verbose": True, "return_token_ids": True}
        body = {field: value for field, value in body.items() if field not in self._left_out}
        body |= settings.extra_body
        return {field: value for field, value in body.items() if value is not None}

    def _adapt(self, fault: Fault, body: Mapping[str, Any]) -> bool:
        """Leaves out what the server refuses of a body; False: nothing that can be left out."""
        if fault.status not in (400, 422):
            return False
        if "max_tokens" in body and wants_other_limit(fault.detail):
            if self._limit_field == "max_tokens":
                self.notes.append("the server takes max_completion_tokens in place of max_tokens")
            self._limit_field = "max_completion_tokens"
            return "max_tokens" not in self._settings.extra_body
        own = self._settings.extra_body.keys()
        if named(fault.detail, own):
            return False
        sent = set(_CAN_DO_WITHOUT) & body.keys() - own
        refused = refused_fields(fault.detail, sent)
        if new := refused - self._left_out:
            self._left_out |= new
            self.notes.append(f"the server refuses {', '.join(sorted(new))}; sent without")
        return bool(refused)

    async def _attempt(self, body: Mapping[str, Any], keep: bool) -> tuple[float, Reply, Fault | None]:
        """Sends once: when it was sent, the reply, and what went wrong.

        A kept connection may turn out to have been closed: then once more, from now on on new connections.
        """
        settings = self._settings
        reuses = self._reuses
        client = self._reusing if reuses else self._fresh
        request = client.build_request("POST", self._url, content=json.dumps(body).encode())
        reply = Reply(keep)
        response: httpx.Response | None = None
        now_s = asyncio.get_running_loop().time
        deadline = now_s() + settings.timeout_s
        sent_s = self._clock.now_s()
        try:
            async with asyncio.timeout_at(deadline) as limit:
                response = await client.send(request, stream=True)
                if response.status_code != 200:
                    return sent_s, reply, await self._refusal(response)
                parser, seen = EventParser(), 0
                encoded = "content-encoding" in response.headers
                async for piece in response.aiter_bytes() if encoded else response.aiter_raw():
                    arrived_s = self._clock.now_s()
                    for event in parser.feed(piece):
                        reply.read(event, arrived_s)
                    if reply.fault is not None:
                        break
                    if reply.done:
                        limit.reschedule(min(deadline, now_s() + _AFTER_DONE_S))
                    elif len(reply.times_s) > seen:
                        seen = len(reply.times_s)
                        limit.reschedule(min(deadline, now_s() + settings.stall_timeout_s))
                for event in parser.finish():
                    reply.read(event, self._clock.now_s())
        except TimeoutError:
            if not reply.done:
                return sent_s, reply, self._late(reply, now_s() >= deadline)
        except httpx.RequestError as error:
            detail = self._clean(_reason(error))
            if response is None and reuses and not isinstance(error, _NO_CONNECTION):
                self._reuses = False  # such as llama.cpp, which closes a connection after a streamed reply
                return await self._attempt(body, keep)
            if response is None:
                return sent_s, reply, Fault("connection", detail, again=True)
            if not reply.done:
                return sent_s, reply, Fault("connection", f"{detail} after {len(reply.times_s)} events")
        finally:
            if response is not None:
                await response.aclose()
        headers = {} if response is None else response.headers
        self.server = self.server or self._clean(headers.get("server", "")) or None
        return sent_s, reply, self._judge(reply, headers.get("content-type", ""))

    async def _refusal(self, response: httpx.Response) -> Fault:
        text = (await response.aread()).decode("utf-8", "replace")
        try:
            detail = error_text(json.loads(text))
        except ValueError:
            detail = error_text(text)
        if response.status_code in (401, 403):
            detail = "no access"  # such answers may quote the key
        return http_fault(response.status_code, self._clean(detail), response.headers)

    def _late(self, reply: Reply, is_total: bool) -> Fault:
        settings = self._settings
        if is_total:
            return Fault("timeout", f"not complete after {settings.timeout_s:g} s")
        return Fault(
            "timeout", f"nothing for {settings.stall_timeout_s:g} s after {len(reply.times_s)} events"
        )

    def _judge(self, reply: Reply, content_type: str) -> Fault | None:
        """Whether a reply that was read to its end is whole."""
        if reply.fault is not None:
            return Fault("stream", self._clean(reply.fault))
        if not reply.times_s:
            is_stream = "event-stream" in content_type
            return Fault("stream", "no content" if is_stream else f"no events ({content_type or 'no type'})")
        return None if reply.is_complete else Fault("stream", f"broke off after {len(reply.times_s)} events")

    def _clean(self, text: str) -> str:
        """A text on one line, not too long, and without the key, should it hold it."""
        text = " ".join(text.encode(errors="replace").decode().split())
        text = text.replace(self._key, "[key]") if self._key else text
        return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."

    def _record(
        self, outgoing: Outgoing, sent_s: float, reply: Reply, fault: Fault | None, attempts: int
    ) -> RequestRecord:
        times_s = [round(time_s, _DIGITS) for time_s in reply.times_s]
        event_tokens, shared_out = reply.event_tokens()
        if fault is None:
            self.shared_out += shared_out
            self.without_usage += not reply.usage.get("completion_tokens")
        return RequestRecord(
            request=outgoing.name,
            sent_s=round(sent_s, _DIGITS),
            first_token_s=times_s[0] if times_s else None,
            finished_s=times_s[-1] if times_s else None,
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens if times_s or reply.usage else None,
            cached_tokens=reply.cached_tokens,
            gaps_s=tuple(round(after - before, _DIGITS) for before, after in itertools.pairwise(times_s)),
            event_tokens=event_tokens,
            warmup=outgoing.warmup,
            error=fault.kind if fault else None,
            error_detail=fault.detail if fault else None,
            attempts=attempts,
            server_prefill_s=reply.server_s("prompt_ms"),
            server_decode_s=reply.server_s("predicted_ms"),
            asked=outgoing.asked,
            place=outgoing.place,
        )


def _reason(error: BaseException) -> str:
    """Why there is no connection: in the words of the operating system where it has some."""
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {_CONNECT_S:g} s"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and cause.errno is not None:
            return (os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)).lower()
        cause = cause.__cause__ or cause.__context__
    return str(error).rstrip(".").lower() or type(error).__name__
