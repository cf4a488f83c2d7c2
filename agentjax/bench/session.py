"""What the runs of both modes share: a server that is checked and warmed up, the log, and when to give up."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from agentjax.bench.client import Endpoint, Outgoing
from agentjax.bench.clock import Clock
from agentjax.bench.log import RecordLog
from agentjax.bench.prompts import Source, WordSize, ids_prompt, text_prompt
from agentjax.bench.reply import Reply
from agentjax.bench.settings import Settings
from agentjax.errors import InputError, among, complaint
from agentjax.records import RequestRecord
from agentjax.version import package_version

T = TypeVar("T")

_CHECK_TOKENS = 4
_CHECK_WORDS = (16, 256)
_WARMUP_TOKENS = 8
_LOST_AFTER = 10
_BUSY = 0.8


class Listener:
    """Is told how a run goes on; a progress bar overrides it."""

    def begin(self, plan: str, requests: int, done: int) -> None:
        """What is going to be sent, before it is: the plan in words, and how many requests are done."""

    def record(self, record: RequestRecord) -> None:
        """A request has ended."""


class Session:
    """One run: sends through `endpoint`, writes to `log`.

    Attributes:
        size: words that make a prompt of so many tokens, once the server is checked.
    """

    def __init__(self, settings: Settings, mode: str, listener: Listener | None = None) -> None:
        self.settings = settings
        self.log = RecordLog(settings.out, settings.resume)
        self.clock = Clock.start(self.log.started, self.log.ended_s)
        self.endpoint = Endpoint(settings, self.clock)
        self.size = WordSize()
        salt = settings.salt if settings.salt is not None else str(time.time_ns())
        self.source = Source(f"{settings.seed} {salt}", *settings.token_ids)
        self.listener = listener or Listener()
        self._mode = mode
        self._in_a_row = 0
        self._lost = asyncio.Event()
        self._before: list[RequestRecord] = []
        self._busy: tuple[float, float] = (0.0, 0.0)

    async def __aenter__(self) -> "Session":
        gc.freeze()  # a search for garbage in what is loaded by now would hold up all streams
        self._busy = (time.process_time(), time.perf_counter())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        self.log.close()
        await self.endpoint.close()

    def about(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The header of the run's file."""
        settings = self.settings
        return {
            "agentjax_bench": 1,
            "version": package_version(),
            "mode": self._mode,
            "url": settings.url,
            "model": settings.model,
            "server": self.endpoint.server,
            "started": self.clock.started.isoformat(),
            "seed": settings.seed,
            "config": {**config},
        }

    async def check(self) -> None:
        """Checks that the server answers, and measures its tokens per word.

        Raises:
            InputError: the server cannot be used, and why.
        """
        if self.settings.prompts == "ids":
            await self._check(0, self.source.ids("check 0", min(self.settings.prompt_tokens)))
        else:
            await self._measure_words()

    async def warm_up(self) -> None:
        """Sends requests that are not to be analysed, all at once."""
        settings = self.settings
        count = max(settings.concurrency) if settings.warmup_requests is None else settings.warmup_requests
        await asyncio.gather(*(self._warm_up(index) for index in range(count)))

    def start(self, about: Mapping[str, Any]) -> None:
        """Opens the log, and puts the requests so far into it: a run that cannot start leaves no file."""
        self.log.open(about)
        for record in self._before:
            self.log.append(record)
        self._before = []

    async def send(self, outgoing: Outgoing) -> tuple[RequestRecord, Reply]:
        """Sends a request and logs it; counts the requests in a row that got no connection."""
        outgoing = replace(outgoing, name=self.log.new_name(outgoing.name))
        record, reply = await self.endpoint.send(outgoing)
        self._in_a_row = self._in_a_row + 1 if record.error == "connection" and not record.gaps_s else 0
        if self._in_a_row >= _LOST_AFTER:
            self._lost.set()
        self.log.append(record)
        self.listener.record(record)
        return record, reply

    @property
    def is_lost(self) -> bool:
        """The server seems to be gone: many requests in a row got no connection. Nothing more is sent."""
        return self._lost.is_set()

    async def sleep_until(self, time_s: float) -> None:
        """Waits until a time on the clock of the run (s), or until the server is lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, time_s - self.clock.now_s())):
                await self._lost.wait()

    def refuse_lost(self) -> None:
        """Ends a run whose server is gone.

        Raises:
            InputError: says what to do.
        """
        if self.is_lost:
            kept = f"; resume=true goes on with {self.settings.out}" if self._mode == "requests" else ""
            kept = kept if self.settings.out else ""
            raise complaint(
                f"url {self.settings.url}",
                f"no connection for {_LOST_AFTER} requests in a row",
                f"a server that stays up{kept}",
            )

    def notes(self) -> list[str]:
        """What of the run is not as asked for, or limits what its times say; in sentences."""
        endpoint, notes = self.endpoint, list(self.endpoint.notes)
        if endpoint.without_usage:
            notes.append(
                f"the server does not tell the tokens of {endpoint.without_usage} requests: "
                "output tokens are counted events, prompt tokens are not known"
            )
        if endpoint.shared_out:
            notes.append(
                f"{endpoint.shared_out} outputs came with more than one token an event, the server does not "
                "say how many in which: shared out evenly"
            )
        good = [record for record in self.log.records if record.error is None]
        reused = any(record.place or (record.asked and record.asked.cached_share) for record in good)
        if reused and all(record.cached_tokens is None for record in good):
            notes.append(
                "the server does not tell what it found in its cache; vLLM does if started with "
                "--enable-prompt-tokens-details, SGLang with --enable-cache-report"
            )
        cpu_s, wall_s = time.process_time() - self._busy[0], time.perf_counter() - self._busy[1]
        if wall_s > 1 and cpu_s > _BUSY * wall_s:
            notes.append(
                f"this client was busy {100 * cpu_s / wall_s:.0f} % of the time: its own work may be in the "
                "times; use fewer streams or a faster machine"
            )
        return notes

    async def _measure_words(self) -> None:
        largest = max(16, max(self.settings.prompt_tokens) // 2)
        counts = (_CHECK_WORDS[0], max(2 * _CHECK_WORDS[0], min(_CHECK_WORDS[1], largest)))
        tokens: list[int] = []
        for index, count in enumerate(counts):
            record = await self._check(index, self.source.words(f"check {index}", count))
            if record.prompt_tokens is not None:
                tokens.append(record.prompt_tokens)
        if len(tokens) == 2:
            self.size = WordSize.measured(counts, tokens)
        else:
            self.endpoint.notes.append(
                f"the server does not tell the tokens of a prompt: {self.size.tokens_per_word} a word assumed"
            )

    async def _check(self, index: int, content: Any) -> RequestRecord:
        record = await self._before_start(f"check-{index}", content, _CHECK_TOKENS, once=True)
        if record.error is not None:
            raise await self._unusable(record)
        return record

    async def _warm_up(self, index: int) -> None:
        tokens, name = min(self.settings.prompt_tokens), f"warmup-{index}"
        if self.settings.prompts == "ids":
            content: Any = self.source.ids(name, tokens)
        else:
            content = self.source.words(name, self.size.words(tokens))
        await self._before_start(name, content, _WARMUP_TOKENS)

    async def _before_start(self, name: str, content: Any, tokens: int, once: bool = False) -> RequestRecord:
        if self.settings.prompts == "ids":
            prompt = ids_prompt(content)
        else:
            prompt = text_prompt(content, self.settings.endpoint == "chat")
        outgoing = Outgoing(self.log.new_name(name), prompt, tokens, warmup=True)
        record, _ = await self.endpoint.send(outgoing, once)
        self._before.append(record)
        return record

    async def _unusable(self, record: RequestRecord) -> InputError:
        settings, detail = self.settings, record.error_detail or ""
        where = f"url {settings.url}"
        match record.error:
            case "connection":
                return complaint(where, f"no server ({detail})", "an OpenAI-compatible server that runs")
            case "http_401" | "http_403":
                variable = settings.api_key_env
                if variable is None:
                    return complaint(
                        where, f"no access (HTTP {record.error[5:]})", "api_key_env, the variable of the key"
                    )
                state = "is not accepted" if self.endpoint.has_key else "is not set"
                return complaint(
                    where,
                    f"no access (HTTP {record.error[5:]}), the environment variable {variable} {state}",
                    "a valid key there",
                )
            case "http_404":
                names = await self.endpoint.models()
                if names and settings.model not in names:
                    return complaint("model", settings.model, among(settings.model, names[:20]))
                return complaint(where, f"HTTP 404 ({detail})", "the address and a model of the server")
            case "timeout":
                return complaint(where, f"no complete answer ({detail})", "a server that is ready")
            case "stream":
                return complaint(where, f"no streamed answer: {detail}", "an OpenAI-compatible server")
        status = (record.error or "").removeprefix("http_")
        return complaint(where, f"HTTP {status} ({detail})", "an answer to a first request")


def run_blocking(run: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine to its end, also where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(run())).result()
