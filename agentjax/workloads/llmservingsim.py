"""Reader for the workload files of LLMServingSim (casys-kaist/LLMServingSim, `workloads/README.md`).

JSON Lines of two kinds, which one file may mix: a session (`session_id`, `arrival_time_ns`, `sub_requests`,
each with `input_toks`, `output_toks`, `tool_duration_ns`) and a flat request, read as a program of one call.
Both may carry token ids. Fields beyond these are ignored: the format is not ours to close.

`input_toks` counts the whole prompt, so what a call keeps of the context before it has to be inferred:

- with token ids, exactly: the tokens that the prompt shares with that context from its start;
- a prompt as long as the context or longer appends to it;
- one between the previous prompt and the context keeps the previous prompt, and drops output (reasoning);
- a shorter one is a rewritten prompt, of which nothing is known to be kept.

At least one token of a prompt is always new. Token ids are not compared between programs: no prefix is
shared.
"""

from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentjax.errors import complaint, expecting, from_validation
from agentjax.workloads.jsonl import check_together, records
from agentjax.workloads.program import MOST_S, MOST_TOKENS, Call, Program, check_program

_MOST_NS = int(MOST_S * 1e9)
_Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS), expecting(f"an integer from 1 to {MOST_TOKENS}")]
_Ns = Annotated[
    int, Field(ge=0, le=_MOST_NS), expecting(f"an integer of nanoseconds from 0 to {_MOST_NS:.0e}")
]
_OptionalNs = Annotated[
    Annotated[int, Field(ge=0, le=_MOST_NS)] | None,
    expecting(f"null or an integer of nanoseconds from 0 to {_MOST_NS:.0e}"),
]
_Ids = Annotated[list[int] | None, expecting("a list of integers or null")]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    input_toks: _Tokens
    output_toks: _Tokens
    input_tok_ids: _Ids = None
    output_tok_ids: _Ids = None


class _SubRequest(_Request):
    tool_duration_ns: _OptionalNs = None


class _Flat(_Request):
    arrival_time_ns: _Ns


class _Session(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    session_id: Annotated[str, Field(min_length=1), expecting("a string that is not empty")]
    arrival_time_ns: _Ns
    sub_requests: Annotated[list[_SubRequest], Field(min_length=1)]


def read_llmservingsim(path: str | Path) -> list[Program]:
    """Read and validate a workload file; the first fault raises `InputError` with file, line and field.

    Sessions keep their name; the flat request of line n becomes `request-n`.
    """
    located = [(where, _program(record, where)) for where, record in records(path)]
    check_together(located, "session_id")
    for where, program in located:
        check_program(program, where)
    return [program for _, program in located]


def _program(record: dict[str, Any], where: str) -> Program:
    try:
        if "sub_requests" in record:
            session = _Session.model_validate(record)
            calls = _calls(session.sub_requests, where)
            return Program(session.session_id, session.arrival_time_ns / 1e9, ((calls,),))
        flat = _Flat.model_validate(record)
    except ValidationError as error:
        raise from_validation(error, where, {}) from None
    _check_ids(flat, f"{where}, ")
    call = Call(flat.input_toks, flat.output_toks, None, None, 0.0)
    return Program(f"request-{where.rsplit(' ', 1)[-1]}", flat.arrival_time_ns / 1e9, (((call,),),))


def _calls(requests: list[_SubRequest], where: str) -> tuple[Call, ...]:
    calls: list[Call] = []
    for k, request in enumerate(requests):
        place = f"{where}, sub_requests[{k}]"
        _check_ids(request, f"{place}.")
        last = k == len(requests) - 1
        if request.tool_duration_ns is None and not last:
            raise complaint(
                f"{place}.tool_duration_ns", "nothing", "an integer of nanoseconds before the last call"
            )
        kept = _kept(requests[k - 1], request) if k else 0
        whole = not k or kept == requests[k - 1].input_toks + requests[k - 1].output_toks
        gap_s = 0.0 if last else (request.tool_duration_ns or 0) / 1e9
        calls.append(
            Call(request.input_toks - kept, request.output_toks, None if whole else kept, None, gap_s)
        )
    return tuple(calls)


def _kept(before: _Request, request: _Request) -> int:
    """Tokens of the context after `before` that the prompt of `request` begins with."""
    context = before.input_toks + before.output_toks
    most = request.input_toks - 1
    known = (before.input_tok_ids or []) + (before.output_tok_ids or [])
    if before.input_tok_ids and request.input_tok_ids:
        pairs = zip(known, request.input_tok_ids, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if shared < len(known) or len(known) == context:
            return min(shared, most)
    if request.input_toks >= context:
        return min(context, most)
    return before.input_toks if request.input_toks > before.input_toks else 0


def _check_ids(request: _Request, where: str) -> None:
    """As many token ids as tokens, where there are ids."""
    for field, tokens, ids in (
        ("input_tok_ids", request.input_toks, request.input_tok_ids),
        ("output_tok_ids", request.output_toks, request.output_tok_ids),
    ):
        if ids and len(ids) != tokens:
            raise complaint(
                f"{where}{field}", f"a list of length {len(ids)}", f"length {tokens}, an id a token"
            )
