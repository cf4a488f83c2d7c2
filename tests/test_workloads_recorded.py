"""Recordings as programs: what was asked for is kept, how it went is not, the rest is left out."""

from dataclasses import replace

import pytest

from agentjax.errors import InputError
from agentjax.records import Place, Recording, RequestRecord
from agentjax.workloads.pack import pack
from agentjax.workloads.program import Call, Prefix, context_tokens
from agentjax.workloads.recorded import FAILED, FAN_OUT, NO_LENDER, OVERLAP, recorded_programs


def request(
    name: str, sent: float, prompt: int = 100, output: int = 5, cached: int | None = 0, **more: object
) -> RequestRecord:
    return RequestRecord(name, sent, sent + 0.25, sent + 0.5, prompt, output, cached, **more)  # pyright: ignore[reportArgumentType]


def turn(
    program: str, index: int, sent: float, prompt: int, cached: int | None = None, **more: object
) -> RequestRecord:
    place = Place(program, 0, 0, index)
    return request(f"{program}-{index}", sent, prompt, 10, cached, place=place, **more)


def recording(*records: RequestRecord) -> Recording:
    return Recording(tuple(sorted(records, key=lambda record: record.sent_s)))


def test_requests_are_programs_of_one_call() -> None:
    found = recorded_programs(recording(request("b", 7.5, 200, 3), request("a", 5.0)))
    assert [(program.name, program.arrival_s) for program in found.programs] == [("a", 0.0), ("b", 2.5)]
    assert [program.calls for program in found.programs] == [
        (Call(100, 5, None, None, 0.0),),
        (Call(200, 3, None, None, 0.0),),
    ]
    assert found.left_out == 0 and found.records["b"][0].request == "b"


def test_programs_have_their_measured_gaps() -> None:
    turns = turn("p", 1, 2.0, 150, 100), turn("p", 0, 1.0, 100), turn("p", 2, 2.75, 170)
    (program,) = recorded_programs(recording(*turns, request("q", 3.0))).programs[:1]
    assert program.arrival_s == 0.0
    # contexts so far: 110 and 160 tokens, kept whole
    assert program.calls == (
        Call(100, 10, None, None, 0.5),
        Call(40, 10, None, None, 0.25),
        Call(10, 10, None, None, 0.0),
    )
    assert [prompt for prompt, _ in context_tokens(program.calls)] == [100, 150, 170]


@pytest.mark.parametrize(
    ("prompt", "cached", "kept"),
    [
        (500, None, None),  # not told
        (500, 0, None),  # the server dropped it all: whether that happens again is up to the simulation
        (500, 40, None),  # the template only
        (500, 205, None),  # all but a part of a block
        (500, 150, 150),  # the prompt leaves the context there
        (180, 0, 179),  # a shorter prompt than the context
    ],
)
def test_kept_context(prompt: int, cached: int | None, kept: int | None) -> None:
    first = request("p-0", 0.0, 200, 10, place=Place("p", 0, 0, 0))
    (program,) = recorded_programs(recording(first, turn("p", 1, 1.0, prompt, cached))).programs
    assert program.calls[1].kept_tokens == kept
    assert context_tokens(program.calls)[1][0] == prompt


def test_failed_overlapping_and_branching_programs_are_left_out() -> None:
    found = recorded_programs(
        recording(
            turn("good", 0, 0.0, 100),
            turn("bad", 0, 0.0, 100),
            turn("bad", 1, 1.0, 200, error="timeout"),
            turn("long", 0, 0.0, 100),
            turn("long", 1, 0.25, 200),
            request("side", 0.0, place=Place("fan", 0, 1, 0)),
            request("unknown", 0.0, prompt=None),  # pyright: ignore[reportArgumentType]
            request("empty", 0.0, output=0),
        )
    )
    assert [program.name for program in found.programs] == ["good"]
    assert found.reasons == {FAILED: 3, OVERLAP: 1, FAN_OUT: 1} and found.left_out == 5


def test_cached_first_prompts_share_a_prefix_with_a_request_that_computed_it() -> None:
    found = recorded_programs(
        recording(
            request("other", 0.0, prompt=300),
            request("lender", 1.0, prompt=400),
            request("short", 1.5, prompt=100),
            request("hit", 2.0, prompt=400, cached=256),
            request("again", 3.0, prompt=500, cached=256),
            request("template", 4.0, prompt=400, cached=4),
        )
    )
    prefixes = {program.name: program.prefix for program in found.programs}
    shared = Prefix("of lender", 256)
    assert prefixes == {
        "other": None, "lender": shared, "short": None, "hit": shared, "again": shared, "template": None,
    }  # fmt: skip
    assert found.programs[3].calls == (Call(144, 5, None, None, 0.0),)
    assert pack(found.programs).prompt_tokens.tolist() == [300, 400, 100, 400, 500, 400]


def test_cached_prompts_that_nobody_computed_are_left_out() -> None:
    warmup = request("fill", 0.0, prompt=400, warmup=True)
    records = recording(warmup, request("a", 1.0), request("hit", 2.0, prompt=400, cached=256))
    without = recorded_programs(records)
    assert [program.name for program in without.programs] == ["a"]
    assert without.reasons == {NO_LENDER: 1} and not without.warmups
    assert without.programs[0].arrival_s == 0.0
    included = recorded_programs(records, warmups=True)
    assert [program.name for program in included.programs] == ["fill", "a", "hit"]
    assert included.warmups == {"fill"} and included.left_out == 0


def test_a_prefix_stays_in_a_program_whose_context_is_cut() -> None:
    lender = turn("p", 0, 0.0, 400, 0), turn("p", 1, 1.0, 300, 0)
    found = recorded_programs(recording(*lender, request("hit", 2.0, prompt=400, cached=256)))
    assert found.programs[0].prefix == found.programs[1].prefix == Prefix("of p", 256)
    assert pack(found.programs).prompt_tokens.tolist() == [400, 300, 400]


def test_faults() -> None:
    with pytest.raises(
        InputError, match=r"no complete program \(1 with a call that failed.*expected at least"
    ):
        recorded_programs(recording(request("a", 0.0, error="timeout")))
    with pytest.raises(InputError, match='request "x", place: found that of request "p-0", expected another'):
        recorded_programs(recording(turn("p", 0, 0.0, 100), replace(turn("p", 0, 1.0, 100), request="x")))


def test_programs_that_were_cut_off_are_left_out():
    thread = [{"new_tokens": 10, "output_tokens": 5}, {"new_tokens": 10, "output_tokens": 5}]
    planned = [{"name": name, "stages": [[thread]]} for name in ("whole", "cut", "never")]
    calls = [("whole", 0, 0.0), ("whole", 1, 1.0), ("cut", 0, 0.5)]
    requests = tuple(
        RequestRecord(
            request=f"{name}/{turn}",
            sent_s=sent_s,
            first_token_s=sent_s + 0.1,
            finished_s=sent_s + 0.3,
            prompt_tokens=10 + 15 * turn,
            output_tokens=5,
            cached_tokens=0,
            place=Place(name, 0, 0, turn),
        )
        for name, turn, sent_s in calls
    )
    found = recorded_programs(Recording(requests, {"programs": planned}))
    assert [program.name for program in found.programs] == ["whole"]
    assert found.reasons == {"that were cut off before their end": 2}
