"""Mode `programs`: agent programs played against a server, each call when its tool would be done."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.bench.client import Outgoing
from agentjax.bench.conversation import AbstractConversation, IdsConversation, TextConversation
from agentjax.bench.session import Listener, Session, run_blocking
from agentjax.bench.settings import Settings, check_settings
from agentjax.errors import complaint
from agentjax.records import Place, Recording
from agentjax.workloads import Call, Program, fixed
from agentjax.workloads.program import context_tokens

_GRID = {"prompt_tokens", "output_tokens", "concurrency", "cached_share", "repeats", "requests"}
_ELSEWHERE = {"out", "resume", *_GRID}
_LEAD_S = 0.05
"""From the header to the first arrival."""


def play_programs(
    programs: Sequence[Program], url: str, model: str, *, listener: Listener | None = None, **keys: Any
) -> Recording:
    """Plays agent programs against a server: arrivals, tool gaps and growing contexts as they say.

    Args:
        programs: with arrivals; their time 0 is the start of play, after the server has been checked.
        url: address of an OpenAI-compatible server, with or without `/v1`.
        model: name under which the server knows its model.
        listener: is told how the run goes on.
        keys: other keys of `conf/bench.yaml`, such as `prompts="ids"`.

    Returns:
        A record a call. Its `about` has the programs, and `arrivals_s` on the clock of the records.

    Raises:
        InputError: a key, a program or the server cannot be used.
    """
    settings = check_settings({"url": url, "model": model, **keys})
    return run_blocking(lambda: play(programs, settings, {}, listener))[0]


async def play(
    programs: Sequence[Program],
    settings: Settings,
    workload: Mapping[str, Any],
    listener: Listener | None = None,
) -> tuple[Recording, list[str]]:
    """Plays programs; the recording, and notes on it. `workload` is the configuration that they are from."""
    if settings.resume:
        raise complaint("resume", "true", "false: programs that were cut off cannot be taken up again")
    programs = fixed(programs)
    if not programs:
        raise complaint("workload", "no programs", "at least one")
    async with Session(settings, "programs", listener) as session:
        calls = sum(len(thread) for p in programs for stage in p.stages for thread in stage)
        await session.check()
        session.listener.begin(describe(programs), calls, 0)
        await session.warm_up()
        player = _Player(session)
        begin_s = session.clock.now_s() + _LEAD_S
        config = settings.model_dump(mode="json", exclude=_ELSEWHERE)
        if workload:
            config["workload"] = dict(workload)
        about = session.about(config)
        arrivals_s = {p.name: round(begin_s + (p.arrival_s or 0.0), 6) for p in programs}
        about["arrivals_s"] = arrivals_s
        about["programs"] = [dataclasses.asdict(program) for program in programs]
        session.start(about)
        await asyncio.gather(*(player.play(program, arrivals_s[program.name]) for program in programs))
        session.refuse_lost()
        notes = session.notes()
        if player.made_up:
            notes.append(
                f"the server did not tell the token ids of {player.made_up} outputs: made-up ids of the same "
                "number are in the contexts, which it cannot have cached"
            )
        return session.log.recording(), notes


class _Player:
    """Plays programs over one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._failed: set[str] = set()
        self._conversations: list[IdsConversation] = []
        most = session.settings.max_concurrency
        self._slots = asyncio.Semaphore(most) if most else contextlib.nullcontext()

    @property
    def made_up(self) -> int:
        """Outputs whose ids the server did not send, though a later prompt has them."""
        return sum(conversation.made_up for conversation in self._conversations)

    async def play(self, program: Program, arrival_s: float) -> None:
        """Plays the stages of a program, one after the other, until a call fails."""
        await self._session.sleep_until(arrival_s)
        for stage, threads in enumerate(program.stages):
            is_last = stage == len(program.stages) - 1
            await asyncio.gather(
                *(
                    self._thread(program, stage, thread, calls, is_last)
                    for thread, calls in enumerate(threads)
                )
            )
            if self._is_over(program):
                return

    async def _thread(
        self, program: Program, stage: int, thread: int, calls: tuple[Call, ...], is_last: bool
    ) -> None:
        conversation = self._converse(program)
        released_s = 0.0
        for turn, call in enumerate(calls):
            name = f"{program.name}/{stage}.{thread}.{turn}"
            outgoing = Outgoing(
                name,
                conversation.ask(call, name),
                call.output_tokens,
                place=Place(program.name, stage, thread, turn),
                keep=True,
            )
            await self._session.sleep_until(released_s)
            async with self._slots:
                if self._is_over(program):
                    return
                record, reply = await self._session.send(outgoing)
            if record.error is not None:
                self._failed.add(program.name)
                return
            if turn < len(calls) - 1:
                conversation.answer(call, record, reply)
            released_s = (record.finished_s or self._session.clock.now_s()) + call.tool_s
        if not is_last:
            await self._session.sleep_until(released_s)

    def _is_over(self, program: Program) -> bool:
        return program.name in self._failed or self._session.is_lost

    def _converse(self, program: Program) -> AbstractConversation:
        session = self._session
        if session.settings.prompts == "ids":
            self._conversations.append(IdsConversation(session.source, program.prefix))
            return self._conversations[-1]
        is_chat = session.settings.endpoint == "chat"
        return TextConversation(session.source, session.size, program.prefix, is_chat)


def describe(programs: Sequence[Program]) -> str:
    """What is going to be sent, in words."""
    prompts = outputs = calls = 0
    for program in programs:
        for thread in (thread for stage in program.stages for thread in stage):
            sizes = context_tokens(thread, program.prefix)
            calls += len(sizes)
            prompts += sum(prompt for prompt, _ in sizes)
            outputs += sum(call.output_tokens for call in thread)
    last_s = max(program.arrival_s or 0.0 for program in programs)
    return (
        f"{len(programs):,} programs of {calls:,} calls, the last arriving after {last_s:,.1f} s: about "
        f"{prompts:,} prompt tokens, most of them sent before, and {outputs:,} output tokens"
    )
