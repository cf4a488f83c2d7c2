"""Programs as a workload describes them: LLM calls that alternate with tool gaps."""

from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real

from agentjax.errors import among, complaint, shown

MOST_TOKENS = 2**30
"""Tokens of the longest context: the engine counts in 32 bits, with room for sums of two contexts."""
MOST_S = 1e9
"""The latest that a program may arrive, and that with its tool gaps alone it may end: 32 years. The engine
counts nanoseconds in 64 bits, with as much room for queues and iterations."""
FINISHES = ("eos", "max_tokens")
"""How a call ends: with a token that the model chooses, or at a length that the server knows in advance."""


@dataclass(frozen=True)
class Call:
    """One LLM call and the tool gap that follows it.

    Its prompt is the kept part of the context so far (prompt + output of the call before) + `new_tokens`.
    The prompt of a thread's first call is the shared prefix, if the program has one, + `new_tokens`.
    """

    new_tokens: int
    output_tokens: int
    kept_tokens: int | None
    """Tokens of the context so far that stay at its front; None: all of them."""
    tool: str | None
    """Name of the tool that runs after the call; None: no tool, or not known."""
    tool_s: float
    """Time from the completion of this call to the release of the next one."""
    finish: str = "eos"
    """One of `FINISHES`. A server that schedules ahead may do work in vain after an end that it did not know
    of."""


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a prompt, the same in every program that names the same prefix."""

    name: str
    tokens: int


@dataclass(frozen=True)
class Program:
    """Stages in sequence, each of threads in parallel, each a chain of calls: `stages[i][j][k]`."""

    name: str
    arrival_s: float | None
    """Time at which the first calls are released; None: to be drawn."""
    stages: tuple[tuple[tuple[Call, ...], ...], ...]
    prefix: Prefix | None = None

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of a program of one stage with one thread."""
        ((calls,),) = self.stages
        return calls


def context_tokens(calls: tuple[Call, ...], prefix: Prefix | None = None) -> list[tuple[int, int]]:
    """Tokens of the prompt of each call of a thread, and of the context (prompt + output) that it leaves."""
    sizes: list[tuple[int, int]] = []
    context = prefix.tokens if prefix else 0
    for call in calls:
        kept = context if call.kept_tokens is None else call.kept_tokens
        prompt = kept + call.new_tokens
        context = prompt + call.output_tokens
        sizes.append((prompt, context))
    return sizes


def check_program(program: Program, where: str) -> None:
    """Refuse a program that cannot be, or that the engine's integers do not hold.

    Raises:
        InputError: names the field; `where` is the place of the program.
    """
    arrival_s, prefix = program.arrival_s, program.prefix
    if arrival_s is not None and not _is_time(arrival_s):
        raise complaint(
            f"{where}, arrival_s", shown(arrival_s), f"a number of seconds from 0 to {MOST_S:.0e}"
        )
    if prefix and not _is_count(prefix.tokens, 1):
        raise complaint(
            f"{where}, prefix.tokens", shown(prefix.tokens), f"an integer from 1 to {MOST_TOKENS}"
        )
    if not program.stages or not all(stage and all(stage) for stage in program.stages):
        raise complaint(f"{where}, calls", "none", "at least one in every thread")
    is_chain = len(program.stages) == 1 and len(program.stages[0]) == 1
    begin_s = float(arrival_s or 0.0)
    for i, stage in enumerate(program.stages):
        ends_s = [
            _check_thread(
                thread, prefix, begin_s, f"{where}, " + ("calls" if is_chain else f"stages[{i}][{j}].calls")
            )
            for j, thread in enumerate(stage)
        ]
        begin_s = max(ends_s)


def _check_thread(calls: tuple[Call, ...], prefix: Prefix | None, begin_s: float, where: str) -> float:
    """Checks the calls of a thread; the time at which it ends if calls take none."""
    context, end_s = prefix.tokens if prefix else 0, begin_s
    for k, call in enumerate(calls):
        place = f"{where}[{k}]"
        for field in ("new_tokens", "output_tokens"):
            if not _is_count(getattr(call, field), 1):
                raise complaint(
                    f"{place}.{field}", shown(getattr(call, field)), f"an integer from 1 to {MOST_TOKENS}"
                )
        kept = call.kept_tokens
        if kept is not None:
            if not _is_count(kept, 0):
                expected = f"null or an integer from 0 to {MOST_TOKENS}"
                raise complaint(f"{place}.kept_tokens", shown(kept), expected)
            if k == 0:
                expected = "null, since a first call has no context to keep"
                raise complaint(f"{place}.kept_tokens", str(kept), expected)
            if kept > context:
                raise complaint(f"{place}.kept_tokens", str(kept), f"at most {context}, the context so far")
        if not _is_time(call.tool_s):
            expected = f"a number of seconds from 0 to {MOST_S:.0e}"
            raise complaint(f"{place}.tool_s", shown(call.tool_s), expected)
        if call.finish not in FINISHES:
            raise complaint(f"{place}.finish", shown(call.finish), among(call.finish, FINISHES))
        context = (context if kept is None else kept) + call.new_tokens + call.output_tokens
        if context > MOST_TOKENS:
            raise complaint(place, f"a context of {context} tokens", f"at most {MOST_TOKENS}")
        end_s += call.tool_s
        if end_s > MOST_S:
            found = f"{end_s:.6g} s of arrival and gaps up to here"
            raise complaint(f"{place}.tool_s", found, f"at most {MOST_S:.0e} s")
    return end_s


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= MOST_TOKENS


def _is_time(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return isfinite(float(value)) and 0 <= float(value) <= MOST_S
