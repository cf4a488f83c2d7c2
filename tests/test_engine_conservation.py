"""What the records of any run must add up to: calls, tokens, time and limits."""

import random

import pytest

from tests import engine_cases
from tests.engine_cases import FREE, LANES, recorded
from tests.strategies import MS, random_case

PER_ITERATION, PER_TOKEN = FREE | {"c0": MS}, FREE | {"c_tok": MS}
BATCHES = range(4)


def batch(number, **changes):
    """(programs, config, result) of a batch of random cases, with the same changes to every configuration."""
    seeds = range(number * 1000, number * 1000 + LANES - 1)
    cases = [random_case(random.Random(seed)) for seed in seeds]
    cases = [(programs, config | changes) for programs, config in cases]
    outcome = engine_cases.run(cases)
    assert not outcome.status.any()
    return [(*case, recorded(outcome, index, *case)) for index, case in enumerate(cases)]


def by_program(programs, calls):
    """Pairs (call of the workload, its record), program by program."""
    records = iter(calls)
    return [[(call, next(records)) for call in program["calls"]] for program in programs]


@pytest.mark.parametrize("number", BATCHES)
def test_every_call_is_released_once_and_completed_once_in_order(number):
    for programs, _, result in batch(number):
        chains = by_program(programs, result["calls"])
        for program, end, chain in zip(programs, result["programs"], chains, strict=True):
            due = program["arrival_ns"]
            for (_, output, _, gap), call in chain:
                assert call["released"] == due
                assert call["released"] <= call["scheduled"] < call["first_token"] <= call["finished"]
                assert (call["first_token"] == call["finished"]) == (output == 1)
                assert 0 < call["service_ns"] <= call["finished"] - call["scheduled"]
                due = call["finished"] + gap
            assert end["finished"] == chain[-1][1]["finished"]
            assert end["service"] == sum(call["service_ns"] for _, call in chain)
        assert result["totals"]["makespan_ns"] == max(end["finished"] for end in result["programs"])
        assert result["totals"]["preemptions"] == sum(call["preemptions"] for call in result["calls"])
        assert result["totals"]["hit_tokens"] == sum(call["cached_tokens"] for call in result["calls"])


@pytest.mark.parametrize("number", BATCHES)
def test_generated_tokens_are_the_output(number):
    """Where every iteration takes 1 ms and no prompt is split, the service of a call counts its tokens."""
    for programs, _, result in batch(number, cost=PER_ITERATION, max_num_batched_tokens=100_000):
        for chain in by_program(programs, result["calls"]):
            for (_, output, _, _), call in chain:
                assert call["service_ns"] == output * MS
                assert call["finished"] - call["first_token"] >= (output - 1) * MS
        assert sum(result["totals"]["busy_ns"]) == result["totals"]["iterations"] * MS


def test_hit_and_computed_tokens_are_prompt_and_recomputed_tokens():
    """Where a token takes 1 ms, busy time counts them; the last one of an output is never computed."""
    preempted = 0
    for programs, _, result in (row for number in BATCHES for row in batch(number, cost=PER_TOKEN)):
        totals = result["totals"]
        computed, rest = divmod(sum(totals["busy_ns"]), MS)
        assert rest == 0
        decoded = sum(output - 1 for program in programs for _, output, _, _ in program["calls"])
        again = totals["hit_tokens"] + computed - totals["prompt_tokens"] - decoded
        if totals["preemptions"]:
            preempted += 1
            assert 0 <= again <= totals["recompute_tokens"] <= computed
        else:
            assert again == totals["recompute_tokens"] == 0
    assert preempted > 5


@pytest.mark.parametrize("number", BATCHES)
def test_limits(number):
    for programs, config, result in batch(number, cost=PER_TOKEN):
        most = result["totals"]["iterations"] * config["max_num_batched_tokens"] * MS
        assert sum(result["totals"]["busy_ns"]) <= most
        for replica in range(config["replicas"]):
            running = []
            for call in result["calls"]:
                # a preempted call waits in between, nobody knows when
                if call["replica"] == replica and not call["preemptions"]:
                    running += [(call["scheduled"], 1), (call["finished"], -1)]
            level = 0
            for _, change in sorted(running):
                level += change
                assert level <= config["max_num_seqs"]
            assert result["totals"]["busy_ns"][replica] <= result["totals"]["makespan_ns"]
        for chain in by_program(programs, result["calls"]):
            for _, call in chain:
                assert 0 <= call["replica"] < config["replicas"]
                assert call["cached_tokens"] % config["block_size"] == 0
