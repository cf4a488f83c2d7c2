"""Mode `requests`: the cells of a plan, each in closed loop with its number of streams."""

import asyncio
from collections.abc import Mapping
from typing import Any

from agentjax.bench.client import Outgoing
from agentjax.bench.plan import Cell, make_plan
from agentjax.bench.prompts import ids_prompt, text_prompt
from agentjax.bench.session import Listener, Session, run_blocking
from agentjax.bench.settings import Settings, check_settings
from agentjax.records import Recording

_ELSEWHERE = {"out", "resume", "max_concurrency"}


def run_requests(url: str, model: str, *, listener: Listener | None = None, **keys: Any) -> Recording:
    """Measures a server with streaming requests of a designed grid.

    Args:
        url: address of an OpenAI-compatible server, with or without `/v1`.
        model: name under which the server knows its model.
        listener: is told how the run goes on.
        keys: other keys of `conf/bench.yaml`, such as `prompt_tokens=[64, 256]`. With `out`, every request is
            written to that file as soon as it ends.

    Returns:
        All requests, also failed ones and those that warm up, and of a resumed run the earlier ones.

    Raises:
        InputError: a key or the server cannot be used.
    """
    settings = check_settings({"url": url, "model": model, **keys})
    return run_blocking(lambda: measure(settings, listener))[0]


async def measure(settings: Settings, listener: Listener | None = None) -> tuple[Recording, list[str]]:
    """Runs the plan of the settings; the recording, and notes on it."""
    plan = make_plan(settings)
    async with Session(settings, "requests", listener) as session:
        config = settings.model_dump(mode="json", exclude=_ELSEWHERE)
        if session.log.about:
            session.log.check(session.about(config))
        wanted = [
            (cell, [k for k in range(cell.requests) if not session.log.is_done(cell.request(k))])
            for cell in plan.cells
        ]
        missing = sum(len(indices) for _, indices in wanted)
        if missing:
            await session.check()
        session.listener.begin(str(plan), plan.requests, plan.requests - missing)
        if missing:
            await session.warm_up()
            session.start(session.about(config))
            for cell, indices in wanted:
                if indices and not session.is_lost:
                    await _measure_cell(session, cell, set(indices))
            session.refuse_lost()
        return session.log.recording(), session.notes()


async def _measure_cell(session: Session, cell: Cell, wanted: set[int]) -> None:
    """Fills the caches first, all at once, so that a server with a cache a slot keeps them apart."""
    streams = [stream for stream in cell.streams if wanted & set(cell.indices(stream))]
    if cell.prefix_tokens:
        await asyncio.gather(*(_fill(session, cell, stream) for stream in streams))
    await asyncio.gather(*(_stream(session, cell, stream, wanted) for stream in streams))


async def _fill(session: Session, cell: Cell, stream: int) -> None:
    prompt = _prompt(session, cell, stream, None)
    await session.send(Outgoing(f"{cell.name}-prefix{stream}", prompt, 1, warmup=True, asked=cell.asked))


async def _stream(session: Session, cell: Cell, stream: int, wanted: set[int]) -> None:
    for index in cell.indices(stream):
        if index not in wanted:
            continue
        if session.is_lost:
            return
        prompt = _prompt(session, cell, stream, index)
        await session.send(Outgoing(cell.request(index), prompt, cell.asked.output_tokens, asked=cell.asked))


def _prompt(session: Session, cell: Cell, stream: int, index: int | None) -> Mapping[str, Any]:
    """The stream's prefix, and what only this request has; without an index the prefix alone."""
    settings, source, asked = session.settings, session.source, cell.asked
    prefix_name, own_name = f"{cell.name} prefix {stream}", f"{cell.name} {index}"
    if settings.prompts == "ids":
        ids = source.ids(prefix_name, cell.prefix_tokens)
        if index is not None:
            ids += source.ids(own_name, asked.prompt_tokens - cell.prefix_tokens)
        return ids_prompt(ids)
    count = session.size.words(asked.prompt_tokens)
    shared = round(asked.cached_share * count)
    words = source.words(prefix_name, shared)
    if index is not None:
        words += source.words(own_name, count - shared)
    return text_prompt(words, settings.endpoint == "chat")
