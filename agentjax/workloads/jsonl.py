"""The native workload format: JSON Lines, one program a line, plain or gzip.

    {"program": "a", "arrival_s": 12.5, "prefix": {"name": "system", "tokens": 1000},
     "calls": [{"new_tokens": 1842, "output_tokens": 133, "tool": "bash", "tool_s": 0.41},
               {"new_tokens": 512, "output_tokens": 77, "kept_tokens": 1975, "tool": null, "tool_s": 0}]}

`calls` is short for one stage with one thread; in general `stages[i][j].calls[k]`. `arrival_s`, `prefix`,
`kept_tokens` and `tool` may be absent or null; a call may have `"finish": "max_tokens"` (absent: "eos"); all
else is required, and unknown fields are refused.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentjax.errors import complaint, expecting, from_validation, shown
from agentjax.readers.files import parse
from agentjax.workloads.program import MOST_S, MOST_TOKENS, Call, Prefix, Program, check_program

_Name = Annotated[str, Field(min_length=1), expecting("a string that is not empty")]
_Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS), expecting(f"an integer from 1 to {MOST_TOKENS}")]
_Kept = Annotated[
    Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None,
    expecting(f"null or an integer from 0 to {MOST_TOKENS}"),
]
_Seconds = Annotated[
    float,
    Field(ge=0, le=MOST_S, allow_inf_nan=False),
    expecting(f"a number of seconds from 0 to {MOST_S:.0e}"),
]


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Call(_Object):
    new_tokens: _Tokens
    output_tokens: _Tokens
    kept_tokens: _Kept = None
    tool: Annotated[str | None, expecting("a string or null")] = None
    tool_s: _Seconds
    finish: Annotated[Literal["eos", "max_tokens"], expecting("eos or max_tokens")] = "eos"


class _Thread(_Object):
    calls: Annotated[list[_Call], Field(min_length=1)]


class _Prefix(_Object):
    name: _Name
    tokens: _Tokens


class _Program(_Object):
    program: _Name
    arrival_s: _Seconds | None = None
    prefix: _Prefix | None = None
    calls: Annotated[list[_Call], Field(min_length=1)] | None = None
    stages: Annotated[list[Annotated[list[_Thread], Field(min_length=1)]], Field(min_length=1)] | None = None


_NAMES = {
    "": tuple(_Program.model_fields),
    "prefix": tuple(_Prefix.model_fields),
    "calls": tuple(_Call.model_fields),
    "stages": tuple(_Thread.model_fields),
}


def read_jsonl(path: str | Path) -> list[Program]:
    """Read and validate a workload file; the first fault raises `InputError` with file, line and field."""
    located = [(where, _program(record, where)) for where, record in records(path)]
    check_together(located)
    return [program for _, program in located]


def write_programs(path: str | Path, programs: Iterable[Program]) -> None:
    """Write programs, after the same checks as in reading; gzip where the name ends in `.gz`."""
    written = [_record(program) for program in programs]
    if not written:
        raise complaint(str(path), "no programs to write", "at least one")
    check_together(
        [(where := f"{path}, line {i}", _program(record, where)) for i, record in enumerate(written, 1)]
    )
    text = "".join(json.dumps(record) + "\n" for record in written).encode()
    Path(path).write_bytes(gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)


def records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON Lines file with their places ("file, line 3"); blank lines are skipped."""
    blank = True
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            blank = False
            where = f"{path}, line {number}"
            yield where, parse(line, where, "one whole JSON object on the line")
    if blank:
        raise complaint(str(path), "no programs", "one JSON object a line")


def check_together(located: Iterable[tuple[str, Program]], name_field: str = "program") -> None:
    """Check that names differ, equal prefixes have equal lengths, and all programs or none have arrivals."""
    places: dict[str, str] = {}
    prefixes: dict[str, tuple[int, str]] = {}
    first: tuple[str, Program] | None = None
    for where, program in located:
        first = first or (where, program)
        if (earlier := places.setdefault(program.name, where)) != where:
            raise complaint(
                f"{where}, {name_field}", f"{shown(program.name)} as in {earlier}", "a name of its own"
            )
        if (program.arrival_s is None) != (first[1].arrival_s is None):
            found, other = ("nothing", "a number") if program.arrival_s is None else ("a number", "nothing")
            raise complaint(f"{where}, arrival_s", found, f"{other} as in {first[0]}")
        if prefix := program.prefix:
            tokens, earlier = prefixes.setdefault(prefix.name, (prefix.tokens, where))
            if tokens != prefix.tokens:
                raise complaint(
                    f"{where}, prefix.tokens",
                    str(prefix.tokens),
                    f"{tokens} as for the prefix {shown(prefix.name)} in {earlier}",
                )


def _lines(path: str | Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else open(path, "rb") as file:
            yield from file
    except FileNotFoundError:
        raise complaint(str(path), "no such file", "a workload file") from None
    except EOFError:
        raise complaint(str(path), "gzip data that break off", "a complete gzip file") from None
    except (gzip.BadGzipFile, zlib.error):
        raise complaint(str(path), "damaged gzip data", "a complete gzip file") from None
    except OSError as error:
        raise complaint(
            str(path), f"a file that cannot be read ({error.strerror or error})", "a workload file"
        ) from None


def _program(record: dict[str, Any], where: str) -> Program:
    try:
        line = _Program.model_validate(record)
    except ValidationError as error:
        raise from_validation(error, where, _NAMES) from None
    if (line.calls is None) == (line.stages is None):
        raise complaint(
            where,
            "neither calls nor stages" if line.calls is None else "both calls and stages",
            "one of them",
        )
    prefix = line.prefix and Prefix(line.prefix.name, line.prefix.tokens)
    if line.stages is None:
        stages = ((_thread(line.calls or []),),)
    else:
        stages = tuple(tuple(_thread(thread.calls) for thread in stage) for stage in line.stages)
    program = Program(line.program, line.arrival_s, stages, prefix)
    check_program(program, where)
    return program


def _thread(calls: list[_Call]) -> tuple[Call, ...]:
    return tuple(
        Call(c.new_tokens, c.output_tokens, c.kept_tokens, c.tool, c.tool_s, c.finish) for c in calls
    )


def _record(program: Program) -> dict[str, Any]:
    record: dict[str, Any] = {"program": program.name}
    if program.arrival_s is not None:
        record["arrival_s"] = program.arrival_s
    if program.prefix:
        record["prefix"] = {"name": program.prefix.name, "tokens": program.prefix.tokens}
    stages = [[{"calls": [_call(call) for call in thread]} for thread in stage] for stage in program.stages]
    one = len(stages) == 1 and len(stages[0]) == 1
    return record | (stages[0][0] if one else {"stages": stages})


def _call(call: Call) -> dict[str, Any]:
    kept = {} if call.kept_tokens is None else {"kept_tokens": call.kept_tokens}
    tokens = {"new_tokens": call.new_tokens, "output_tokens": call.output_tokens}
    finish = {} if call.finish == "eos" else {"finish": call.finish}
    return tokens | kept | {"tool": call.tool, "tool_s": call.tool_s} | finish
