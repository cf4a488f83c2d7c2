"""Measured requests as programs, to be served again by the simulator."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from agentjax.errors import among, complaint
from agentjax.validate.measured import Measured
from agentjax.workloads.program import Call, Prefix, Program

STARTS = ("queued", "arrival")
"""When a request is released to the engine: the instant its engine noted, or the one its client noted."""


@dataclass(frozen=True)
class Replay:
    """Programs of one call each, and which requests they are.

    Attributes:
        programs: in order of release.
        order: row of the measured request of each program.
        shared_tokens: prompt tokens that are prefix hits if nothing is evicted.
        substitutes: matching requests whose shared prefix is that of another earlier request than recorded.
        unmatched: matching requests for which no earlier request can lend its prefix; their hits are lost.
    """

    programs: tuple[Program, ...]
    order: Int[np.ndarray, " requests"]
    shared_tokens: int
    substitutes: int
    unmatched: int


def replay(measured: Measured, start: str = "queued", block_size: int = 16, prefixes: bool = True) -> Replay:
    """The requests of a measured run as programs.

    A program has at most one shared prefix, while recorded matches may be nested: a request that matches an
    earlier one may itself be matched further by a later one. Every matching request shares a prefix of
    exactly the recorded blocks, with the recorded request where that one is free; otherwise another request
    released before it, as close to it as possible, of a long enough prompt, lends that many blocks. So the
    number of hits is the recorded one as long as nothing is evicted.

    Args:
        measured: the run.
        start: one of `STARTS`.
        block_size: tokens a block, of the recorded matches.
        prefixes: whether recorded matches are simulated.

    Raises:
        InputError: an unknown start.
    """
    if start not in STARTS:
        raise complaint("start", repr(start), among(start, STARTS))
    released = getattr(measured, f"{start}_s")
    released = released - min(0.0, float(released.min()))
    order = np.argsort(released, kind="stable")
    prefix_of, substitutes, unmatched = _groups(measured, order, block_size) if prefixes else ({}, 0, 0)
    programs = []
    for row in order:
        prefix = prefix_of.get(int(row))
        new = int(measured.input_tokens[row]) - (prefix.tokens if prefix else 0)
        # The runs were made with fixed output lengths (`ignore_eos`, min_tokens = max_tokens).
        call = Call(new, int(measured.output_tokens[row]), None, None, 0.0, finish="max_tokens")
        programs.append(
            Program(f"request-{measured.index[row]}", float(released[row]), (((call,),),), prefix)
        )
    shared = sum(prefix.tokens for row, prefix in prefix_of.items() if measured.shared_blocks[row])
    return Replay(tuple(programs), order, shared, substitutes, unmatched)


def _groups(
    measured: Measured, order: Int[np.ndarray, " requests"], block_size: int
) -> tuple[dict[int, Prefix], int, int]:
    """Shared prefix by row; the number of substituted lenders, and of matches left out."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    matching = [int(row) for row in np.flatnonzero(measured.shared_blocks)]
    matching.sort(key=lambda row: (-measured.shared_blocks[row], place[row]))
    matching_rows = set(matching)
    found: dict[int, Prefix] = {}
    substitutes = unmatched = 0
    for row in matching:
        tokens = int(measured.shared_blocks[row]) * block_size

        def lends(other: int, row: int = row, tokens: int = tokens) -> bool:
            free = other not in matching_rows and (other not in found or found[other].tokens == tokens)
            return free and place[other] < place[row] and measured.input_tokens[other] > tokens

        recorded = int(measured.shared_with[row])
        earlier = (int(other) for other in order[: place[row]][::-1])
        lender = recorded if lends(recorded) else next((other for other in earlier if lends(other)), None)
        if lender is None or measured.input_tokens[row] <= tokens:
            unmatched += 1
            continue
        substitutes += lender != recorded
        found.setdefault(lender, Prefix(f"of-request-{measured.index[lender]}", tokens))
        found[row] = found[lender]
    return found, substitutes, unmatched
