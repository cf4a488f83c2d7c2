"""Programs as a workload describes them: LLM calls that alternate with tool gaps."""

from dataclasses import dataclass

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
