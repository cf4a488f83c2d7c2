"""A recording as programs, to be served again by the simulator: when what was asked for, but not how it went.

Requests with a `place` are the calls of their programs: the first is released when it was sent, each further
one after the recorded gap, from the last token of the call before to the next sending. Any other request is a
program of one call.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentjax.errors import complaint, shown
from agentjax.records import Recording, RequestRecord, planned_calls
from agentjax.workloads.program import Call, Prefix, Program

LEAST_SHARED_TOKENS = 16
LEAST_SHARED_SHARE = 0.05
"""A first call with fewer cached tokens, or a smaller share of its prompt, counts as not cached: chat
templates have a few tokens in common."""
KEPT_SHARE = 0.5
"""A later call with at least this share of its context cached kept exactly that; with less, the server had
dropped the context, and the simulation decides by itself what is found."""

FAILED = "with a call that failed or whose length is not known"
FAN_OUT = "with calls side by side"
CUT_OFF = "that were cut off before their end"
OVERLAP = "with a call sent before the end of the one before"
NO_LENDER = "with a cached prompt that no earlier request computed"


@dataclass(frozen=True)
class Recorded:
    """Programs and the requests that they were.

    Attributes:
        programs: in order of arrival, the first at 0 s.
        records: requests of a program by its name, a request a call.
        warmups: names of the programs that were sent to warm up: load, but not to be looked at.
        reasons: programs left out, by reason.
    """

    programs: tuple[Program, ...]
    records: Mapping[str, tuple[RequestRecord, ...]]
    warmups: frozenset[str]
    reasons: Mapping[str, int]

    @property
    def left_out(self) -> int:
        """Programs left out."""
        return sum(self.reasons.values())


@dataclass
class _Chain:
    """The requests of one program."""

    name: str
    records: tuple[RequestRecord, ...]
    prefix: Prefix | None = None

    @property
    def first(self) -> RequestRecord:
        return self.records[0]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of the first call that were in the cache; 0 for too few to count."""
        cached = min(self.first.cached_tokens or 0, _prompt(self.first) - 1)
        least = max(LEAST_SHARED_TOKENS, LEAST_SHARED_SHARE * _prompt(self.first))
        return cached if cached >= least else 0


def recorded_programs(recording: Recording, *, warmups: bool = False) -> Recorded:
    """The programs of a recording.

    Prompts and outputs have their recorded lengths. A first call whose prompt was in part cached shares that
    part with an earlier request that computed it (a shared prefix); a program for which there is none is left
    out, and so is one with a failed call.

    Args:
        recording: what a client saw.
        warmups: whether requests to warm up are part of the load.

    Raises:
        InputError: two requests at the same place, or no complete program.
    """
    reasons: Counter[str] = Counter()
    chains = list(_chains(recording, warmups, reasons))
    kept = [chain for chain in _with_prefixes(chains) if chain.cached_tokens == 0 or chain.prefix]
    if len(kept) < len(chains):
        reasons[NO_LENDER] += len(chains) - len(kept)
    measured = [chain for chain in kept if not chain.first.warmup]
    if not measured:
        why = f" ({', '.join(f'{count} {reason}' for reason, count in reasons.items())})" if reasons else ""
        raise complaint(
            str(recording.about.get("file", "recording")), f"no complete program{why}", "at least one"
        )
    zero_s = min(chain.first.sent_s for chain in kept)
    return Recorded(
        tuple(_program(chain, zero_s) for chain in kept),
        {chain.name: chain.records for chain in kept},
        frozenset(chain.name for chain in kept if chain.first.warmup),
        dict(reasons),
    )


def _chains(recording: Recording, warmups: bool, reasons: Counter[str]) -> Iterable[_Chain]:
    """The programs that can be simulated, in order of their first sending."""
    programs: dict[tuple[bool, str], list[RequestRecord]] = {}
    for record in recording.requests:
        if warmups or not record.warmup:
            name = record.request if record.place is None else record.place.program
            programs.setdefault((record.place is not None, name), []).append(record)
    names = Counter(name for _, name in programs)
    planned = planned_calls(recording)
    missing = planned.keys() - {name for placed, name in programs if placed}
    if missing:
        reasons[CUT_OFF] += len(missing)
    for (placed, name), records in programs.items():
        if placed and any(record.place and (record.place.stage or record.place.thread) for record in records):
            reasons[FAN_OUT] += 1
            continue
        ordered = _by_turn(name, records) if placed else records
        if placed and all(record.error is None for record in ordered) and len(ordered) < planned.get(name, 0):
            reasons[CUT_OFF] += 1
        elif not all(record.is_complete and record.output_tokens for record in ordered):
            reasons[FAILED] += 1
        elif any(gap_s < 0 for gap_s in _gaps_s(ordered)):
            reasons[OVERLAP] += 1
        else:
            unique = name if names[name] == 1 or placed else f"request {name}"
            yield _Chain(unique, tuple(ordered))


def _by_turn(name: str, records: Sequence[RequestRecord]) -> list[RequestRecord]:
    ordered = sorted(records, key=lambda record: record.place.turn if record.place else 0)
    for before, after in pairwise(ordered):
        if before.place == after.place:
            raise complaint(
                f"request {shown(after.request)}, place",
                f"that of request {shown(before.request)}",
                f"another turn of program {shown(name)}",
            )
    return ordered


def _with_prefixes(chains: list[_Chain]) -> list[_Chain]:
    """Gives programs with a cached beginning a prefix in common with the nearest earlier one that has not."""
    groups: dict[int, Prefix] = {}
    for place, chain in enumerate(chains):
        tokens = chain.cached_tokens
        if not tokens:
            continue
        if tokens not in groups:
            lender = next((each for each in reversed(chains[:place]) if _lends(each, tokens, chain)), None)
            if lender is None:
                continue
            groups[tokens] = lender.prefix = Prefix(f"of {lender.name}", tokens)
        chain.prefix = groups[tokens]
    return chains


def _lends(lender: _Chain, tokens: int, borrower: _Chain) -> bool:
    """Whether a program can have computed a prompt's beginning before another program came."""
    first_token_s = lender.first.first_token_s
    return (
        lender.prefix is None
        and lender.cached_tokens == 0
        and _prompt(lender.first) > tokens
        and first_token_s is not None
        and first_token_s <= (borrower.first.first_token_s or 0.0)
    )


def _program(chain: _Chain, zero_s: float) -> Program:
    gaps_s = [*_gaps_s(chain.records), 0.0]
    below = chain.prefix.tokens if chain.prefix else 0
    calls: list[Call] = []
    context = below
    for index, (record, gap_s) in enumerate(zip(chain.records, gaps_s, strict=True)):
        prompt, output = _prompt(record), record.output_tokens or 1
        kept = context if index == 0 else max(below, _kept(record, context))
        kept = min(kept, prompt - 1)
        calls.append(Call(prompt - kept, output, None if kept == context else kept, None, gap_s))
        context = prompt + output
    return Program(chain.name, chain.first.sent_s - zero_s, ((tuple(calls),),), chain.prefix)


def _kept(record: RequestRecord, context: int) -> int:
    """Tokens of the context so far at the front of a later call's prompt."""
    cached = record.cached_tokens or 0
    return cached if KEPT_SHARE * context <= cached < context - LEAST_SHARED_TOKENS else context


def _gaps_s(records: Sequence[RequestRecord]) -> list[float]:
    """From the last token of each call to the next sending (s)."""
    return [after.sent_s - (before.finished_s or 0.0) for before, after in pairwise(records)]


def _prompt(record: RequestRecord) -> int:
    return record.prompt_tokens or 1
