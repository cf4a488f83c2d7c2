"""Programs as flat arrays, the form in which the engine reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int

from agentjax.errors import complaint
from agentjax.workloads.program import Program, check_program

SECOND = 1_000_000_000
"""Nanoseconds."""


@dataclass(frozen=True)
class Workload:
    """Programs as arrays: P programs, T threads (thread t belongs to program t), G shared prefixes, C calls.
    Times in ns.
    """

    names: tuple[str, ...]
    arrival: Int[np.ndarray, " programs"]
    first_call: Int[np.ndarray, " threads"]
    calls: Int[np.ndarray, " threads"]
    prefix: Int[np.ndarray, " threads"]  # -1: none
    prefix_tokens: Int[np.ndarray, " prefixes"]
    new_tokens: Int[np.ndarray, " calls"]
    output_tokens: Int[np.ndarray, " calls"]
    kept_tokens: Int[np.ndarray, " calls"]  # of the context before the call; -1: all of it
    gap: Int[np.ndarray, " calls"]  # tool gap after the call
    eos: Bool[np.ndarray, " calls"] = None  # pyright: ignore[reportAssignmentType]
    """Whether the server learns of the call's end from its last token only; default: of all calls."""

    def __post_init__(self) -> None:
        if self.eos is None:
            object.__setattr__(self, "eos", np.ones(len(self.gap), bool))

    @cached_property
    def prompt_tokens(self) -> Int[np.ndarray, " calls"]:
        """Prompt of every call, on the assumption that calls of a program follow each other in the arrays."""
        prompts = np.zeros_like(self.new_tokens)
        for thread, (first, calls) in enumerate(zip(self.first_call, self.calls, strict=True)):
            context = self.prefix_tokens[self.prefix[thread]] if self.prefix[thread] >= 0 else 0
            for call in range(first, first + calls):
                kept = self.kept_tokens[call]
                prompts[call] = (context if kept < 0 else min(kept, context)) + self.new_tokens[call]
                context = prompts[call] + self.output_tokens[call]
        return prompts

    @cached_property
    def call_program(self) -> Int[np.ndarray, " calls"]:
        """Program of every call."""
        return np.repeat(np.arange(len(self.calls)), self.calls)

    @cached_property
    def call_turn(self) -> Int[np.ndarray, " calls"]:
        """Place of every call in its program, from 0."""
        return np.concatenate([np.arange(n) for n in self.calls])


def pack(programs: Sequence[Program]) -> Workload:
    """Programs in order of arrival (ties: as given) as a `Workload`.

    Raises:
        InputError: no programs; a program without an arrival time; a value that cannot be or that is larger
            than the engine counts; more than one stage or thread (fan-out is not simulated yet); a compaction
            that cuts into the shared prefix.
    """
    if not programs:
        raise complaint("workload", "no programs", "at least one")
    for program in programs:
        if program.arrival_s is None:
            raise complaint(
                f"program {program.name!r}, arrival_s", "nothing", "a time; draw arrivals or give them all"
            )
        check_program(program, f"program {program.name!r}")
        if len(program.stages) != 1 or len(program.stages[0]) != 1:
            raise complaint(
                f"program {program.name!r}, stages",
                "fan-out",
                "one stage of one thread (fan-out is not simulated yet)",
            )
    ordered = sorted(programs, key=lambda program: program.arrival_s or 0.0)
    prefixes = {p.prefix.name: p.prefix.tokens for p in ordered if p.prefix is not None}
    names = list(prefixes)
    columns: list[tuple[int, int, int, int]] = []
    for program in ordered:
        below = program.prefix.tokens if program.prefix else 0
        for k, call in enumerate(program.calls):
            if call.kept_tokens is not None and call.kept_tokens < below:
                raise complaint(
                    f"program {program.name!r}, calls[{k}].kept_tokens",
                    str(call.kept_tokens),
                    f"at least the {below} tokens of its prefix",
                )
            kept = -1 if call.kept_tokens is None else call.kept_tokens
            columns.append((call.new_tokens, call.output_tokens, kept, round(call.tool_s * SECOND)))
    table = np.asarray(columns, np.int64).T
    lengths = np.asarray([len(program.calls) for program in ordered], np.int32)
    return Workload(
        names=tuple(program.name for program in ordered),
        arrival=np.asarray([round((program.arrival_s or 0.0) * SECOND) for program in ordered], np.int64),
        first_call=(np.cumsum(lengths) - lengths).astype(np.int32),
        calls=lengths,
        prefix=np.asarray([names.index(p.prefix.name) if p.prefix else -1 for p in ordered], np.int32),
        prefix_tokens=np.asarray(list(prefixes.values()), np.int32),
        new_tokens=table[0].astype(np.int32),
        output_tokens=table[1].astype(np.int32),
        kept_tokens=table[2].astype(np.int32),
        gap=table[3],
        eos=np.asarray([call.finish == "eos" for program in ordered for call in program.calls], bool),
    )


def refuse_unfit(workload: Workload, kv_blocks: int, block_size: int, max_context_tokens: int) -> None:
    """Refuse a workload with a call that can never run on a replica.

    Raises:
        InputError: names the program and call, and what it needs.
    """
    prompts, outputs = workload.prompt_tokens, workload.output_tokens
    needed = -(-(prompts + outputs - 1) // block_size)
    for limit, need, unit in (
        (kv_blocks, needed, "KV blocks"),
        (max_context_tokens, prompts + outputs, "tokens of context"),
    ):
        unfit = np.flatnonzero(need > limit)
        if len(unfit):
            call = int(unfit[0])
            program, turn = workload.names[workload.call_program[call]], int(workload.call_turn[call])
            raise complaint(
                f"program {program!r}, calls[{turn}]",
                f"a prompt of {prompts[call]} and an output of {outputs[call]} tokens, "
                f"{need[call]} {unit} in all",
                f"at most {limit}, all that a replica has",
            )
