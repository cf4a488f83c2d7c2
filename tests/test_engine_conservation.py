"""What the records of any run must add up to: calls, tokens, time and limits.

Asynchronous scheduling wastes tokens: the next batch is formed before the end of a call is seen, so that a
call may run in one more. That batch counts as its service, and may end after the last completion.
"""

import random

import pytest

from tests import engine_cases
from tests.engine_cases import FREE, LANES, recorded
from tests.strategies import MS, random_case

PER_ITERATION, PER_TOKEN = FREE | {"c0": MS}, FREE | {"c_tok": MS}
BATCHES = range(4)
MODES = [pytest.param(False, id="synchronous"), pytest.param(True, id="asynchronous")]

both_modes = pytest.mark.parametrize("asynchronous", MODES)
all_batches = pytest.mark.parametrize("number", BATCHES)


def batch(number, asynchronous, **changes):
    """(programs, config, result) of a batch of random cases, with the same changes to every configuration."""
    seeds = range(number * 1000, number * 1000 + LANES - 1)
    cases = [random_case(random.Random(seed), async_scheduling=(asynchronous,)) for seed in seeds]
    cases = [(programs, config | changes) for programs, config in cases]
    outcome = engine_cases.run(cases)
    assert not outcome.status.any()
    return [(*case, recorded(outcome, index, *case)) for index, case in enumerate(cases)]


def by_program(programs, calls):
    """Pairs (call of the workload, its record), program by program."""
    records = iter(calls)
    return [[(call, next(records)) for call in program["calls"]] for program in programs]


@both_modes
@all_batches
def test_every_call_is_released_once_and_completed_once_in_order(number, asynchronous):
    for programs, config, result in batch(number, asynchronous):
        totals = result["totals"]
        assert asynchronous or not totals["wasted_tokens"]
        for program, end, chain in zip(
            programs, result["programs"], by_program(programs, result["calls"]), strict=True
        ):
            due = program["arrival_ns"]
            finishes = program.get("finish", [config["finish"]] * len(chain))
            for ((_, output, _, gap), call), finish in zip(chain, finishes, strict=True):
                assert call["released"] == due
                assert call["released"] <= call["scheduled"] < call["first_token"] <= call["finished"]
                assert (call["first_token"] == call["finished"]) == (output == 1)
                assert (call["longest_gap"] == -1) == (output == 1)
                assert call["service_ns"] > 0
                if finish == "max_tokens" or not totals["wasted_tokens"]:
                    assert call["service_ns"] <= call["finished"] - call["scheduled"]
                due = call["finished"] + gap
            assert end["finished"] == chain[-1][1]["finished"]
            assert end["service"] == sum(call["service_ns"] for _, call in chain)
        last = max(end["finished"] for end in result["programs"])
        assert totals["makespan_ns"] >= last
        assert totals["makespan_ns"] == last or totals["wasted_tokens"]
        assert totals["preemptions"] == sum(call["preemptions"] for call in result["calls"])
        assert totals["hit_tokens"] == sum(call["cached_tokens"] for call in result["calls"])


@both_modes
@all_batches
def test_every_time_between_two_tokens_is_counted(number, asynchronous):
    for programs, _, result in batch(number, asynchronous):
        chains = by_program(programs, result["calls"])
        calls = [pair for chain in chains for pair in chain]
        gaps = result["totals"]["token_gaps"]
        assert sum(gaps.values()) == sum(output - 1 for (_, output, _, _), _ in calls)
        between = sum(call["finished"] - call["first_token"] for _, call in calls)
        assert sum(gap * times for gap, times in gaps.items()) == between
        assert max(gaps, default=-1) == max(call["longest_gap"] for _, call in calls)


@both_modes
def test_times_between_tokens_of_a_small_run(asynchronous):
    """An iteration takes 10 ms and 1 ms a token. Call A gets tokens at 11, 22, 38 and 49 ms: B is released at
    15 ms, and its 5 tokens make one iteration 16 ms long; the next one, where that was formed before.
    """
    _, config = random_case(random.Random(0), scheduling=("fcfs",), async_scheduling=(asynchronous,))
    programs = [
        {"arrival_ns": arrival, "prefix": None, "calls": [(new, output, None, 0)], "finish": ["eos"]}
        for arrival, new, output in ((0, 1, 4), (15 * MS, 5, 1))
    ]
    config |= {"cost": FREE | {"c0": 10 * MS, "c_tok": MS}, "replicas": 1, "kv_blocks": 100}
    config |= {"max_num_seqs": 8, "max_num_batched_tokens": 100, "max_model_len": 1000, "watermark": 0.0}
    config |= {"prefix_tokens": [], "long_prefill_token_threshold": 0, "admission": ("always", {})}
    outcome = engine_cases.run([(programs, config)])
    result = recorded(outcome, 0, programs, config)
    assert result["totals"]["token_gaps"] == {11 * MS: 2, 16 * MS: 1}
    assert [call["longest_gap"] for call in result["calls"]] == [16 * MS, -1]
    assert result["calls"][1]["finished"] == (49 if asynchronous else 38) * MS
    assert result["totals"]["wasted_tokens"] == (2 if asynchronous else 0)


@both_modes
@all_batches
def test_generated_tokens_are_the_output(number, asynchronous):
    """Where every iteration takes 1 ms and no prompt is split, the service of a call counts its tokens, the
    wasted one included.
    """
    changes = {"cost": PER_ITERATION, "max_num_batched_tokens": 100_000, "long_prefill_token_threshold": 0}
    for programs, _, result in batch(number, asynchronous, **changes):
        totals, wasted = result["totals"], 0
        for chain in by_program(programs, result["calls"]):
            for (_, output, _, _), call in chain:
                more = call["service_ns"] - output * MS
                assert more in ((0, MS) if asynchronous else (0,))
                wasted += more // MS
                assert call["finished"] - call["first_token"] >= (output - 1) * MS
        # a call that is preempted while it runs may waste tokens too
        assert wasted == totals["wasted_tokens"] or (
            wasted < totals["wasted_tokens"] and totals["preemptions"]
        )
        assert sum(totals["busy_ns"]) == totals["iterations"] * MS
        assert totals["makespan_ns"] <= max(end["finished"] for end in result["programs"]) + MS


@both_modes
def test_hit_and_computed_tokens_are_prompt_and_recomputed_tokens(asynchronous):
    """Where a token takes 1 ms, busy time counts them; the last one of an output is never of use."""
    preempted = 0
    for programs, _, result in (
        row for number in BATCHES for row in batch(number, asynchronous, cost=PER_TOKEN)
    ):
        totals = result["totals"]
        computed, rest = divmod(sum(totals["busy_ns"]), MS)
        assert rest == 0
        decoded = sum(output - 1 for program in programs for _, output, _, _ in program["calls"])
        again = totals["hit_tokens"] + computed - totals["prompt_tokens"] - decoded
        if totals["preemptions"]:
            preempted += 1
            assert 0 <= again <= totals["recompute_tokens"] + totals["wasted_tokens"] <= computed
        else:
            assert totals["recompute_tokens"] == 0
            assert again == totals["wasted_tokens"]
    assert preempted > 5


@both_modes
@all_batches
def test_limits(number, asynchronous):
    for programs, config, result in batch(number, asynchronous, cost=PER_TOKEN):
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
