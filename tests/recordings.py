"""Recordings of a server whose iteration times are known: what a client would have seen of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from agentjax.performance import Piecewise
from agentjax.performance.base import AbstractPerformance, BatchShape
from agentjax.records import Asked, Recording, RequestRecord

MODEL = Piecewise(
    knots=[1, 2, 4],
    decode_s=[6e-3, 11e-3, 13e-3],
    decode_context_s=[2e-6, 4e-6, 8e-6],
    prefill_s=5e-3,
    prefill_tok_s=1e-3,
    prefill_work_s=7e-7,
    prefill_context_s=2e-7,
    shared_s=4e-3,
    wakeup_s=3e-3,
)
"""A server on which a batch of 1 is a case of its own."""

Cell = tuple[int, int, int, float]
"""Prompt tokens, output tokens, concurrency and cached share."""


@dataclass
class _Running:
    name: str
    cell: Cell
    repeat: int
    sent: float
    cached: int
    began: float | None = None
    done: int = 0
    times: list[float] = field(default_factory=list)


def iteration_times(model: AbstractPerformance) -> Callable[[list[tuple[int, int]], list[int]], float]:
    """Duration (s) of an iteration of chunks (tokens, context before) and decodes (contexts after)."""
    with jax.enable_x64(True):
        compiled = jax.jit(lambda batch: model.iteration_s(batch))

    def seconds(chunks: list[tuple[int, int]], contexts: list[int]) -> float:
        batch = BatchShape(
            sequences=np.float64(len(chunks) + len(contexts)),
            decode_sequences=np.float64(len(contexts)),
            decode_context_tokens=np.float64(sum(contexts)),
            decode_context_max_tokens=np.float64(max(contexts, default=0)),
            prefill_tokens=np.float64(sum(n for n, _ in chunks)),
            prefill_context_tokens=np.float64(sum(c for _, c in chunks)),
            prefill_work_tokens2=np.float64(sum(n * (c + n / 2) for n, c in chunks)),
        )
        with jax.enable_x64(True):
            return float(compiled(batch))

    return seconds


def record(
    model: AbstractPerformance,
    cells: Sequence[Cell],
    repeats: int = 3,
    noise: float = 0.02,
    seed: int = 0,
    budget: int = 100_000,
    server_times: bool = False,
    stagger_s: float = 0.0,
) -> Recording:
    """A grid of requests, cell after cell, in waves of the cell's concurrency.

    Args:
        model: iteration times; `wakeup_s` is the latency before an idle server begins.
        cells: what to send.
        repeats: waves of each cell.
        noise: standard deviation of the logarithm of every duration.
        budget: most tokens of an iteration.
        server_times: the server tells its own time of the prompt.
        stagger_s: time from one request of a wave to the next.
    """
    rng = np.random.default_rng(seed)
    seconds = iteration_times(model)
    requests: list[RequestRecord] = []
    now = 0.0
    for cell in cells:
        for repeat in range(repeats):
            prompt, _, concurrency, share = cell
            wave = [
                _Running(f"r{len(requests) + i}", cell, repeat, now + i * stagger_s, int(share * prompt))
                for i in range(concurrency)
            ]
            now = _serve(wave, now, seconds, float(model.wakeup_s), noise, budget, rng) + 0.05
            requests += [_finished(call, server_times) for call in wave]
    return Recording(tuple(requests), {"model": "known", "started": "2026-11-30T00:00:00Z"})


def _serve(
    wave: list[_Running],
    now: float,
    seconds: Callable[[list[tuple[int, int]], list[int]], float],
    latency: float,
    noise: float,
    budget: int,
    rng: np.random.Generator,
) -> float:
    """Serves the calls and returns when the last one ended (s)."""
    now += latency
    for call in wave:
        call.done = call.cached
    while any(len(call.times) < call.cell[1] for call in wave):
        here = [call for call in wave if call.sent <= now and len(call.times) < call.cell[1]]
        if not here:
            now = min(call.sent for call in wave if len(call.times) < call.cell[1]) + latency
            continue
        decoding = [call for call in here if call.times]
        left = budget - len(decoding)
        chunks = []
        for call in here:
            size = min(call.cell[0] - call.done, left) if not call.times else 0
            if size > 0:
                chunks.append((call, size))
                call.began = now if call.began is None else call.began
                left -= size
        contexts = [call.cell[0] + len(call.times) for call in decoding]
        duration = seconds([(size, call.done) for call, size in chunks], contexts)
        now += duration * float(np.exp(noise * rng.standard_normal()))
        for call, size in chunks:
            call.done += size
            if call.done == call.cell[0]:
                call.times.append(now)
        for call in decoding:
            call.times.append(now)
    return now


def _finished(call: _Running, server_times: bool) -> RequestRecord:
    prompt, output, concurrency, share = call.cell
    return RequestRecord(
        request=call.name,
        sent_s=call.sent,
        first_token_s=call.times[0],
        finished_s=call.times[-1],
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=call.cached,
        gaps_s=tuple(np.diff(call.times).tolist()),
        server_prefill_s=call.times[0] - (call.began or 0.0) if server_times else None,
        asked=Asked(prompt, output, concurrency, share, call.repeat),
    )
