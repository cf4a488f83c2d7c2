"""The native workload format: what is written is read back, and every fault is named in one sentence."""

import gzip
import json
import string
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentjax.errors import InputError
from agentjax.workloads import Call, Prefix, Program, read_programs, write_programs
from agentjax.workloads.pack import pack
from agentjax.workloads.program import FINISHES, context_tokens

CALL = '{"new_tokens": 10, "output_tokens": 5, "tool": "bash", "tool_s": 0.5}'
LAST = '{"new_tokens": 3, "output_tokens": 2, "tool": null, "tool_s": 0}'


def program(name: str = "a", calls: str = f"{CALL}, {LAST}", more: str = "") -> str:
    return f'{{"program": "{name}", {more}"calls": [{calls}]}}'


def read(tmp_path: Path, *lines: str) -> list[Program]:
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(lines))
    return read_programs(path, "native")


def test_reads_the_documented_example(tmp_path: Path) -> None:
    line = """{"program": "django-11099", "arrival_s": 12.5, "prefix": {"name": "system", "tokens": 1000},
        "stages": [[{"calls": [{"new_tokens": 1842, "output_tokens": 133, "tool": "bash", "tool_s": 0.41},
        {"new_tokens": 512, "output_tokens": 77, "kept_tokens": 1975, "tool": null, "tool_s": 0}]}]]}"""
    calls = (Call(1842, 133, None, "bash", 0.41), Call(512, 77, 1975, None, 0.0))
    expected = Program("django-11099", 12.5, ((calls,),), Prefix("system", 1000))
    assert read(tmp_path, line.replace("\n", " ")) == [expected]
    assert expected.calls == calls
    assert context_tokens(calls, expected.prefix) == [(2842, 2975), (2487, 2564)]


def test_short_form_and_blank_lines(tmp_path: Path) -> None:
    short, full = read(
        tmp_path, program("a"), "", program("b").replace('"calls"', '"stages": [[{"calls"')[:-1] + "}]]}", ""
    )
    assert short.stages == full.stages
    assert short.arrival_s is None and short.prefix is None


def test_how_calls_finish(tmp_path: Path) -> None:
    length = CALL.replace("}", ', "finish": "max_tokens"}')
    programs = read(tmp_path, program("a", calls=f"{CALL}, {length}", more='"arrival_s": 0, '))
    assert [call.finish for call in programs[0].calls] == ["eos", "max_tokens"]
    assert pack(programs).eos.tolist() == [True, False]
    write_programs(tmp_path / "again.jsonl", programs)
    first, second = json.loads((tmp_path / "again.jsonl").read_text())["calls"]
    assert "finish" not in first and second["finish"] == "max_tokens"
    with pytest.raises(InputError) as error:
        pack([Program("p", 0.0, (((Call(1, 1, None, None, 0.0, finish="stop"),),),))])
    assert str(error.value) == (
        "program 'p', calls[0].finish: found \"stop\", expected one of eos, max_tokens"
    )


TOKENS = "an integer from 1 to 1073741824"
SECONDS = "a number of seconds from 0 to 1e+09"
KEPT = "null or an integer from 0 to 1073741824"
GOOD = Call(10, 5, None, None, 0.5)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((GOOD, replace(GOOD, new_tokens=0)), f"calls[1].new_tokens: found 0, expected {TOKENS}"),
        ((replace(GOOD, output_tokens=2.0),), f"calls[0].output_tokens: found 2.0, expected {TOKENS}"),
        ((replace(GOOD, tool_s=-1.0),), f"calls[0].tool_s: found -1.0, expected {SECONDS}"),
        ((replace(GOOD, tool_s=np.nan),), f"calls[0].tool_s: found NaN, expected {SECONDS}"),
        (
            (GOOD, replace(GOOD, kept_tokens=16)),
            "calls[1].kept_tokens: found 16, expected at most 15, the context so far",
        ),
        (
            (replace(GOOD, new_tokens=2**30),),
            "calls[0]: found a context of 1073741829 tokens, expected at most 1073741824",
        ),
        (
            (replace(GOOD, tool_s=6e8),) * 2,
            "calls[1].tool_s: found 1.2e+09 s of arrival and gaps up to here, expected at most 1e+09 s",
        ),
        ((), "calls: found none, expected at least one in every thread"),
    ],
)
def test_programs_made_in_python_are_checked_too(calls: tuple[Call, ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        pack([Program("p", 0.0, ((calls,),))])
    assert str(error.value) == f"program 'p', {message}"


def test_arrivals_made_in_python_are_checked_too() -> None:
    for arrival_s, found in ((np.inf, "Infinity"), (-1.0, "-1.0"), (2e9, "2000000000.0")):
        with pytest.raises(InputError) as error:
            pack([Program("p", arrival_s, (((GOOD,),),))])
        assert str(error.value) == f"program 'p', arrival_s: found {found}, expected {SECONDS}"


def test_numbers_of_numpy_are_numbers() -> None:
    calls = (Call(np.int64(10), np.int32(5), None, None, np.float32(0.5)),)  # pyright: ignore[reportArgumentType]
    assert pack([Program("p", np.float64(1), ((calls,),))]).prompt_tokens.tolist() == [10]


def test_reads_gzip_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl.gz"
    write_programs(path, [Program("a", None, (((Call(1, 1, None, None, 0.0),),),))])
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    renamed = path.rename(tmp_path / "w.jsonl")
    assert [p.name for p in read_programs(renamed)] == ["a"]


seconds = st.floats(0, 1e7)
names = st.text(string.printable + "äß漢", min_size=1, max_size=8)


@st.composite
def threads(draw: st.DrawFn, prefix: Prefix | None) -> tuple[Call, ...]:
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, 4))):
        kept = None
        if calls:
            kept = draw(st.none() | st.integers(0, context_tokens(tuple(calls), prefix)[-1][1]))
        tokens = st.integers(1, 2000)
        tool = draw(st.none() | names)
        finish = draw(st.sampled_from(FINISHES))
        calls.append(Call(draw(tokens), draw(tokens), kept, tool, draw(seconds), finish))
    return tuple(calls)


@st.composite
def workloads(draw: st.DrawFn) -> list[Program]:
    arrivals = draw(st.booleans())
    tokens = draw(st.dictionaries(names, st.integers(1, 5000), max_size=2))
    programs = []
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        prefix = draw(st.sampled_from([None, *(Prefix(n, t) for n, t in tokens.items())]))
        stage = st.lists(threads(prefix), min_size=1, max_size=2).map(tuple)
        stages = tuple(draw(st.lists(stage, min_size=1, max_size=2)))
        programs.append(Program(name, draw(seconds) if arrivals else None, stages, prefix))
    return programs


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workloads(), st.sampled_from(["w.jsonl", "w.jsonl.gz"]))
def test_what_is_written_is_read_back(tmp_path: Path, programs: list[Program], name: str) -> None:
    write_programs(tmp_path / name, programs)
    assert read_programs(tmp_path / name) == programs


def call(**fields: object) -> str:
    return json.dumps(json.loads(LAST) | fields).replace("Infinity", "1e999")


def bad_call(**fields: object) -> str:
    return program(calls=f"{CALL}, {call(**fields)}")


FAULTS = [
    # numbers
    (bad_call(new_tokens=0), f", line 1, calls[1].new_tokens: found 0, expected {TOKENS}"),
    (bad_call(new_tokens=2**31), f", line 1, calls[1].new_tokens: found 2147483648, expected {TOKENS}"),
    (bad_call(new_tokens=2.0), f", line 1, calls[1].new_tokens: found 2.0, expected {TOKENS}"),
    (bad_call(new_tokens=True), f", line 1, calls[1].new_tokens: found true, expected {TOKENS}"),
    (bad_call(output_tokens=-4), f", line 1, calls[1].output_tokens: found -4, expected {TOKENS}"),
    (bad_call(output_tokens="7"), f', line 1, calls[1].output_tokens: found "7", expected {TOKENS}'),
    (bad_call(output_tokens=None), f", line 1, calls[1].output_tokens: found null, expected {TOKENS}"),
    (bad_call(tool_s=-0.5), f", line 1, calls[1].tool_s: found -0.5, expected {SECONDS}"),
    (bad_call(tool_s=float("nan")), f", line 1, calls[1].tool_s: found NaN, expected {SECONDS}"),
    (bad_call(tool_s=float("inf")), f", line 1, calls[1].tool_s: found Infinity, expected {SECONDS}"),
    (bad_call(tool_s=None), f", line 1, calls[1].tool_s: found null, expected {SECONDS}"),
    (program(more='"arrival_s": -1, '), f", line 1, arrival_s: found -1, expected {SECONDS}"),
    # context
    (
        bad_call(new_tokens=2**30 - 16),
        ", line 1, calls[1]: found a context of 1073741825 tokens, expected at most 1073741824",
    ),
    (
        program(more='"arrival_s": 9e8, ', calls=f"{CALL}, {CALL}".replace("0.5", "9e7")),
        ", line 1, calls[1].tool_s: found 1.08e+09 s of arrival and gaps up to here, "
        "expected at most 1e+09 s",
    ),
    (
        '{"program": "a", "stages": [[THREAD, THREAD], [THREAD]]}'.replace(
            "THREAD", f'{{"calls": [{CALL}]}}'.replace("0.5", "6e8")
        ),
        ", line 1, stages[1][0].calls[0].tool_s: found 1.2e+09 s of arrival and gaps up to here, "
        "expected at most 1e+09 s",
    ),
    (bad_call(kept_tokens=-1), f", line 1, calls[1].kept_tokens: found -1, expected {KEPT}"),
    (
        bad_call(kept_tokens=16),
        ", line 1, calls[1].kept_tokens: found 16, expected at most 15, the context so far",
    ),
    (
        program(calls=call(kept_tokens=0)),
        ", line 1, calls[0].kept_tokens: found 0, expected null, since a first call has no context to keep",
    ),
    # fields
    (
        bad_call(finish="length"),
        ', line 1, calls[1].finish: found "length", expected eos or max_tokens',
    ),
    (bad_call(tool=3), ", line 1, calls[1].tool: found 3, expected a string or null"),
    (
        bad_call(ouput_tokens=3),
        ", line 1, calls[1].ouput_tokens: found an unknown field, expected output_tokens",
    ),
    (
        bad_call(zzz=3),
        ", line 1, calls[1].zzz: found an unknown field, "
        "expected one of finish, kept_tokens, new_tokens, output_tokens, tool, tool_s",
    ),
    (program(more='"arival_s": 1, '), ", line 1, arival_s: found an unknown field, expected arrival_s"),
    (
        program(calls='{"new_tokens": 1, "tool_s": 0}'),
        ", line 1, calls[0].output_tokens: found nothing, expected this field",
    ),
    (program(name=""), ', line 1, program: found "", expected a string that is not empty'),
    (program(calls=""), ", line 1, calls: found an empty list, expected at least one entry"),
    (program(calls="7"), ", line 1, calls[0]: found 7, expected an object"),
    ('{"program": "a"}', ", line 1: found neither calls nor stages, expected one of them"),
    (
        program(more='"stages": [[{"calls": [' + LAST + "]}]], "),
        ", line 1: found both calls and stages, expected one of them",
    ),
    (
        '{"program": "a", "stages": [[]]}',
        ", line 1, stages[0]: found an empty list, expected at least one entry",
    ),
    ('{"program": "a", "stages": [5]}', ", line 1, stages[0]: found 5, expected a list"),
    (
        '{"program": "a", "stages": [[{"calls": [' + call(new_tokens=0) + "]}]]}",
        f", line 1, stages[0][0].calls[0].new_tokens: found 0, expected {TOKENS}",
    ),
    (
        '{"program": "a", "stages": [[{"call": []}]]}',
        ", line 1, stages[0][0].call: found an unknown field, expected calls",
    ),
    (
        program(more='"prefix": {"name": "s", "tokens": 0}, '),
        f", line 1, prefix.tokens: found 0, expected {TOKENS}",
    ),
    (
        program(more='"prefix": {"nam": "s", "tokens": 1}, '),
        ", line 1, prefix.nam: found an unknown field, expected name",
    ),
    # JSON
    ("[1]", ", line 1: found a list, expected an object"),
    ("\n3", ", line 2: found 3, expected an object"),
    (
        program("a") + "\n" + program("b")[:30],
        ", line 2: found broken JSON at column 29 (Unterminated string starting at), "
        "expected one whole JSON object on the line",
    ),
    (
        '{"program": "a", "program": "b"}',
        ', line 1: found the field "program" twice in one object, expected each field once',
    ),
    (
        "[" * 100_000,
        ", line 1: found JSON that cannot be read (RecursionError), "
        "expected one whole JSON object on the line",
    ),
    ("\n \n", ": found no programs, expected one JSON object a line"),
    # programs together
    (
        program("a") + "\n\n" + program("a"),
        ', line 3, program: found "a" as in {path}, line 1, expected a name of its own',
    ),
    (
        program("a", more='"arrival_s": 1, ') + "\n" + program("b"),
        ", line 2, arrival_s: found nothing, expected a number as in {path}, line 1",
    ),
    (
        program("a") + "\n" + program("b", more='"arrival_s": 1, '),
        ", line 2, arrival_s: found a number, expected nothing as in {path}, line 1",
    ),
    (
        "\n".join(
            program(n, more=f'"prefix": {{"name": "s", "tokens": {t}}}, ') for n, t in (("a", 8), ("b", 9))
        ),
        ', line 2, prefix.tokens: found 9, expected 8 as for the prefix "s" in {path}, line 1',
    ),
]


@pytest.mark.parametrize(("text", "sentence"), FAULTS, ids=[str(i) for i in range(len(FAULTS))])
def test_each_fault_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, text)
    path = tmp_path / "w.jsonl"
    assert str(error.value) == f"{path}{sentence.replace('{path}', str(path))}"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read_programs(tmp_path / "none.jsonl")
    assert str(error.value) == f"{tmp_path}/none.jsonl: found no such file, expected a workload file"


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read_programs(tmp_path)
    assert (
        str(error.value)
        == f"{tmp_path}: found a file that cannot be read (Is a directory), expected a workload file"
    )


@pytest.mark.parametrize("cut", [5, -6])
def test_gzip_that_breaks_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "w.jsonl.gz"
    path.write_bytes(gzip.compress(program().encode())[:cut])
    with pytest.raises(InputError) as error:
        read_programs(path)
    assert str(error.value) == f"{path}: found gzip data that break off, expected a complete gzip file"


def test_gzip_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl.gz"
    data = bytearray(gzip.compress(program().encode()))
    data[12:20] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(InputError, match="found damaged gzip data, expected a complete gzip file"):
        read_programs(path)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'{"program": "\xff"}')
    with pytest.raises(InputError) as error:
        read_programs(path, "native")
    expected = "found bytes that are not UTF-8, expected one whole JSON object on the line"
    assert str(error.value) == f"{path}, line 1: {expected}"


def test_nothing_is_written_that_could_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    with pytest.raises(InputError) as error:
        write_programs(path, [Program("a", None, (((Call(0, 1, None, None, 0.0),),),))])
    assert str(error.value) == f"{path}, line 1, calls[0].new_tokens: found 0, expected {TOKENS}"
    with pytest.raises(InputError) as error:
        write_programs(path, [])
    assert str(error.value) == f"{path}: found no programs to write, expected at least one"
    assert not path.exists()
