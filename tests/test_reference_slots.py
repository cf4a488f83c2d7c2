"""The reference's slots of llama.cpp's server: what was seen of a real one, and small hand-worked cases."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests import strategies
from tests.reference.simulator import simulate
from tests.reference.slots import Slots, SlotSimulation, common_prefix
from tests.test_reference import field, program
from tests.test_reference import run as run_small

# 10 ns an iteration unless a case says otherwise, so that a call of output o that is alone takes 10·o ns;
# with an output of 1 token it leaves exactly its prompt in its slot.


def run(programs, slots, cost=None, log=None, **changes):
    """Simulate a small case with all invariants checked."""
    limits = {
        "slots": True,
        "kv_blocks": 1000 * slots,
        "block_size": 1,
        "max_num_seqs": slots,
        "max_num_batched_tokens": 10_000,
        "max_model_len": 10_000,
    }
    return run_small(programs, cost, log, **limits | changes)


def one_at_a_time(order, new, prefix=None):
    """Programs whose calls, of `new` prompt tokens and 1 of output, start 100 ns apart in this order."""
    starts = [[100 * place for place, each in enumerate(order) if each == p] for p in range(max(order) + 1)]
    return [
        program(
            times[0],
            *[
                (new, 1, 0 if k else None, after - time - 10)
                for k, (time, after) in enumerate(zip(times, [*times[1:], times[-1] + 10], strict=True))
            ],
            prefix=prefix,
        )
        for times in starts
    ]


def in_order(result, name):
    """One field of every call, in the order of their starts."""
    return [call[name] for call in sorted(result["calls"], key=lambda call: call["scheduled"])]


# Seen on a real server with 3 slots, one call at a time


def test_strangers_take_empty_slots_from_the_highest_number_and_then_the_least_recently_used():
    result = run(one_at_a_time([0, 1, 2, 3, 0, 1, 4, 2, 5], 300), 3)
    assert in_order(result, "slot") == [2, 1, 0, 2, 1, 0, 2, 1, 0]
    assert in_order(result, "cached_tokens") == [0] * 9


def test_programs_with_a_long_shared_prefix_follow_one_another_into_one_slot():
    strangers = one_at_a_time([0, 1, 2], 300)
    sharing = [program(1000 + 100 * p, (300, 1, 0), prefix=0) for p in range(5)]
    result = run(strangers + sharing, 3, prefix_tokens=[100])
    assert field(result, "slot") == [2, 1, 0, 2, 2, 2, 2, 2]
    assert field(result, "cached_tokens") == [0, 0, 0, 0, 100, 100, 100, 100]


# What is found in a slot


def test_tokens_are_compared_one_by_one():
    assert common_prefix((), (1, 2)) == 0
    assert common_prefix((1, 2, 3), (1, 2)) == 2
    assert common_prefix((1, 2, 3), (1, 4, 3)) == 1


def test_one_program():
    # Call 1: prompt 8, output 5: 12 tokens stay in the slot. Call 2: prompt 8 + 5 + 4 = 17, computes 5.
    log = []
    result = run([program(0, (8, 5, 100), (4, 1, 0))], 2, log=log)
    assert field(result, "slot") == [1, 1]
    assert field(result, "finished") == [50, 160]
    assert field(result, "cached_tokens") == [0, 12]
    assert [entry["batch"] for entry in log][-1] == [(0, 1, 5, 12)]
    totals = result["totals"]
    assert (totals["prompt_tokens"], totals["hit_tokens"], totals["evicted_blocks"]) == (25, 12, 0)
    assert (totals["prefill_tokens"], totals["decode_tokens"]) == (13, 4)
    assert result["final_slots"][0][0] == ()
    assert len(result["final_slots"][0][1]) == 17


def test_one_token_of_a_prompt_is_always_computed():
    # B is A's prefix and no more: the slot has all of its prompt, from A.
    slots = Slots(20, 2)
    slots.give_back(slots.slots[1], "abcdef")
    assert slots.choose("abc") == (slots.slots[1], 3)
    result = run([program(0, (4, 1, 0), prefix=0), program(20, (0, 1, 0), prefix=0)], 2, prefix_tokens=[8])
    assert field(result, "cached_tokens") == [0, 7]
    assert field(result, "slot") == [1, 1]


@pytest.mark.parametrize(("new", "slot", "cached"), [(89, 1, 10), (90, 0, 0), (91, 0, 0)])
def test_a_tenth_of_the_prompt_steals_no_slot(new, slot, cached):
    # The prefix has 10 tokens: of a prompt of 99 that is more than a tenth, of 100 it is not.
    programs = [program(0, (50, 1, 0), prefix=0), program(20, (new, 1, 0), prefix=0)]
    result = run(programs, 2, prefix_tokens=[10])
    assert field(result, "slot") == [1, slot]
    assert field(result, "cached_tokens") == [0, cached]


def test_what_the_least_recently_used_slot_has_is_found_however_little_it_is():
    # A and C, of 10 shared tokens, in slots 2 and 0, a stranger in 1. D's prompt of 100 shares 10: no more
    # than a tenth, so it takes the slot given back first, A's.
    programs = [program(0, (50, 1, 0), prefix=0), program(20, (50, 1, 0)), program(40, (90, 1, 0), prefix=0)]
    result = run([*programs, program(60, (90, 1, 0), prefix=0)], 3, prefix_tokens=[10])
    assert field(result, "slot") == [2, 1, 0, 2]
    assert field(result, "cached_tokens") == [0, 0, 0, 10]


def test_equal_slots_lowest_number_first():
    # A and B start together, in slots 2 and 1, with the same prefix. C finds it in both and takes 1; D,
    # just after it, takes 2.
    programs = [program(0, (8, 1, 0), prefix=0), program(0, (8, 1, 0), prefix=0)]
    late = [program(20, (8, 1, 0), prefix=0), program(20, (8, 1, 0), prefix=0)]
    result = run([*programs, *late], 3, prefix_tokens=[8])
    assert field(result, "slot") == [2, 1, 1, 2]
    assert field(result, "cached_tokens") == [0, 0, 8, 8]


def test_more_tokens_in_common_count_before_the_number():
    # A leaves its context in slot 1; B (slot 0) shares the prefix alone. A's next call returns to slot 1.
    programs = [program(0, (8, 5, 100), (4, 1, 0), prefix=0), program(0, (90, 1, 0), prefix=0)]
    result = run(programs, 2, prefix_tokens=[8])
    assert field(result, "slot") == [1, 1, 0]
    assert field(result, "cached_tokens") == [0, 20, 0]


def test_a_running_slot_is_neither_taken_nor_read():
    # B shares its whole prefix with A, which still runs.
    result = run([program(0, (8, 9, 0), prefix=0), program(20, (8, 1, 0), prefix=0)], 2, prefix_tokens=[8])
    assert field(result, "slot") == [1, 0]
    assert field(result, "cached_tokens") == [0, 0]


def test_a_stranger_takes_all_of_a_slot():
    # One slot: A's second call comes back after B.
    result = run([program(0, (8, 5, 100), (4, 1, 0)), program(60, (4, 1, 0))], 1)
    assert field(result, "cached_tokens") == [0, 0, 0]
    assert field(result, "slot") == [0, 0, 0]


def test_the_prefix_alone_is_found_in_a_slot_that_another_program_took():
    # A's context is in slot 1. B shares more than a tenth and steals it, though slot 0 is empty. A's second
    # call, 8 + 8 + 5 + 4 = 25 tokens, finds the prefix in it.
    programs = [program(0, (8, 5, 100), (4, 1, 0), prefix=0), program(60, (8, 1, 0), prefix=0)]
    result = run(programs, 2, prefix_tokens=[8])
    assert field(result, "slot") == [1, 1, 1]
    assert field(result, "cached_tokens") == [0, 8, 8]


def test_two_prefixes_have_nothing_in_common():
    result = run([program(0, (8, 1, 0), prefix=0), program(20, (8, 1, 0), prefix=1)], 2, prefix_tokens=[8, 8])
    assert field(result, "slot") == [1, 0]
    assert field(result, "cached_tokens") == [0, 0]


def test_slots_are_given_back_in_the_order_of_completions():
    # A and B start together; B ends first, then A, so that C and D, strangers, take B's slot and then A's.
    programs = [program(0, (8, 3, 0)), program(0, (8, 2, 0)), program(50, (8, 1, 0)), program(100, (8, 1, 0))]
    assert field(run(programs, 2), "slot") == [1, 0, 0, 1]


def test_calls_that_end_together_give_back_in_the_order_of_admission():
    programs = [program(0, (8, 2, 0)), program(0, (8, 2, 0)), program(50, (8, 1, 0)), program(100, (8, 1, 0))]
    assert field(run(programs, 2), "slot") == [1, 0, 1, 0]


def test_calls_admitted_together_take_one_slot_after_another():
    # Both share the prefix with what is in slot 2: the first steals it, and while it runs nobody else can
    # have it.
    programs = [program(0, (8, 1, 0), prefix=0), *[program(20, (8, 1, 0), prefix=0) for _ in range(2)]]
    result = run(programs, 3, prefix_tokens=[8])
    assert field(result, "slot") == [2, 2, 1]
    assert field(result, "cached_tokens") == [0, 8, 0]


# Compaction


@pytest.mark.parametrize(("kept", "cached"), [(None, 22), (22, 22), (12, 12), (5, 5), (0, 0)])
def test_compaction_keeps_the_kept_tokens(kept, cached):
    # Call 1 leaves 22 tokens (prompt 20, output 3).
    result = run([program(0, (20, 3, 100), (7, 1, kept, 0))], 1)
    assert field(result, "cached_tokens") == [0, cached]


def test_a_compacted_context_may_start_anew_in_another_slot():
    # Call 1 leaves 20 tokens in slot 1. Call 2 keeps 8 and brings 92: 8 are no more than a tenth of 100, so
    # it takes the empty slot 0. Call 3 finds there the 100 tokens that call 2 left.
    result = run([program(0, (20, 1, 20), (92, 1, 8, 50), (10, 1, None, 0))], 2)
    assert field(result, "slot") == [1, 0, 0]
    assert field(result, "cached_tokens") == [0, 0, 100]


def test_of_an_older_context_only_what_was_kept_is_found():
    # As above, A's calls 1 and 2 leave 40 tokens in slot 1 and 100 in slot 0, with the first 8, a shared
    # prefix, in common. B shares those, takes slot 0 (of equals the lowest) and runs on. A's call 3 keeps
    # 60 tokens of call 2's context; of those slot 1 has 8, though it holds 40 of A's.
    a = program(0, (32, 1, 20), (92, 1, 8, 50), (10, 1, 60, 0), prefix=0)
    result = run([a, program(50, (8, 90, 0), prefix=0)], 2, prefix_tokens=[8])
    assert field(result, "slot") == [1, 0, 1, 0]
    assert field(result, "cached_tokens") == [0, 0, 8, 8]


def test_a_second_compaction_cuts_below_the_first():
    # Slot 1 has 30 tokens of call 1, of which call 2 keeps 20; it runs in slot 1 too. Call 3 keeps 12, call
    # 4 all.
    result = run([program(0, (30, 1, 10), (5, 1, 20, 10), (5, 1, 12, 10), (5, 1, None, 0))], 2)
    assert field(result, "slot") == [1] * 4
    assert field(result, "cached_tokens") == [0, 20, 12, 17]


# Several replicas, and the policies


def test_every_replica_has_its_own_slots():
    # Round robin. A's call 1 is on replica 0. Its call 2 comes to replica 1 and keeps 8 tokens; nothing is
    # there. Call 3 keeps all, comes back to replica 0 and finds the 8 tokens of call 1's context that are
    # still its own.
    result = run([program(0, (40, 1, 20), (12, 1, 8, 50), (10, 1, None, 0))], 2, replicas=2)
    assert field(result, "replica") == [0, 1, 0]
    assert field(result, "slot") == [1, 1, 1]
    assert field(result, "cached_tokens") == [0, 0, 8]
    assert [[len(tokens) for tokens in slots] for slots in result["final_slots"]] == [[0, 31], [0, 20]]


def test_slots_are_least_recently_used_within_a_replica():
    programs = [program(10 * p, (8, 1, 0)) for p in range(8)]
    result = run(programs, 2, replicas=2)
    assert field(result, "replica") == [0, 1] * 4
    assert field(result, "slot") == [1, 1, 0, 0] * 2


@pytest.mark.parametrize(
    ("scheduling", "scheduled", "cached"), [("fcfs", [30, 40], [0, 0]), ("sjf", [40, 30], [0, 40])]
)
def test_shortest_job_first_sees_what_idle_slots_have(scheduling, scheduled, cached):
    # A leaves its prefix of 40 in slot 1; D runs in slot 0 from 20 on. While its first iteration runs B
    # comes, a stranger of 50 tokens, and then C, with 40 tokens on top of the prefix. At 30 one of them can
    # start.
    programs = [program(0, (1, 1, 0), prefix=0), program(20, (8, 30, 0))]
    programs += [program(25, (50, 1, 0)), program(26, (40, 1, 0), prefix=0)]
    result = run(programs, 2, prefix_tokens=[40], scheduling=scheduling)
    assert field(result, "scheduled") == [0, 20, *scheduled]
    assert field(result, "cached_tokens") == [0, 0, *cached]


def test_a_long_prompt_goes_in_parts_and_calls_wait_for_the_budget():
    # 10 tokens an iteration. A's 25 go as 10, 10 and 5; B starts with the other 5 of the third, and then
    # shares the budget with A's output.
    log = []
    result = run([program(0, (25, 3, 0)), program(0, (12, 1, 0))], 2, log=log, max_num_batched_tokens=10)
    assert [entry["batch"] for entry in log] == [
        [(0, 0, 10, 0)],
        [(0, 0, 10, 10)],
        [(0, 0, 5, 20), (1, 0, 5, 0)],
        [(0, 0, 1, 25), (1, 0, 7, 5)],
        [(0, 0, 1, 26)],
    ]
    assert field(result, "scheduled") == [0, 20]
    assert field(result, "finished") == [50, 40]


def test_as_many_calls_run_as_there_are_slots():
    result = run([program(0, (8, 2, 0)) for _ in range(5)], 2)
    assert field(result, "scheduled") == [0, 0, 20, 20, 40]
    assert field(result, "slot") == [1, 0, 1, 0, 1]


# Refusals, invariants, random cases


@pytest.mark.parametrize("changes", [{"kv_blocks": 25}, {"max_model_len": 12}])
def test_a_call_that_fits_into_no_slot_is_refused(changes):
    # 13 tokens do not fit into 25 // 2 = 12, though the last one is never computed.
    with pytest.raises(ValueError, match="program 0, call 0"):
        run([program(0, (8, 5, 0))], 2, **changes)
    assert run([program(0, (8, 5, 0))], 2, kv_blocks=26, max_model_len=13)["totals"]["makespan_ns"] == 50


@pytest.mark.parametrize("changes", [{"block_size": 16}, {"retention": ("pin", {})}])
def test_slots_go_with_nothing_that_blocks_have(changes):
    with pytest.raises(ValueError, match="slots go with"):
        run([program(0, (8, 5, 0))], 2, **changes)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(strategies.slot_cases(kept_below_prefix=True))
def test_invariants_hold_at_every_event(case):
    programs, config = case
    log = []
    result = simulate(programs, config | {"check": True}, log)
    totals, calls = result["totals"], iter(result["calls"])
    computed, service = Counter(), Counter()
    for entry in log:
        for p, k, n, _ in entry["batch"]:
            computed[p, k] += n
            service[p, k] += entry["duration_ns"]
    for p, each in enumerate(programs):
        released = each["arrival_ns"]
        for k, (_, output, _, gap) in enumerate(each["calls"]):
            call = next(calls)
            assert call["released"] == released
            assert released <= call["scheduled"] < call["first_token"] <= call["finished"]
            assert call["service_ns"] == service[p, k]
            assert computed[p, k] + call["cached_tokens"] == call["prompt"] + output - 1
            assert call["cached_tokens"] < call["prompt"]
            released = call["finished"] + gap
    assert totals["prefill_tokens"] + totals["hit_tokens"] == totals["prompt_tokens"]
    assert sum(totals["busy_ns"]) == sum(entry["duration_ns"] for entry in log)
    assert totals["preemptions"] == totals["empty_schedules"] == totals["evicted_blocks"] == 0


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(strategies.slot_cases(), strategies.slot_cases())
def test_the_admission_gate_never_closes(case, other):
    """While a slot is idle, the running calls leave more tokens than any prompt has."""
    for programs, config in (case, other):
        results = [
            simulate(programs, config | {"admission": admission})
            for admission in (("always", {}), ("kv_gate", {"threshold": 0.0}))
        ]
        assert results[0] == results[1]


def test_random_cases_reach_every_rule(monkeypatch):
    reached = Counter()
    choose = Slots.choose

    def seen(slots, prompt):
        taken, shared = choose(slots, prompt)
        unused = any(not slot.given_back for slot in slots.idle)
        most = [common_prefix(prompt, slot.tokens) for slot in slots.idle]
        reached["exactly a tenth"] += 10 * max(most) == len(prompt)
        if 10 * shared > len(prompt):
            reached["shared, though slots are empty"] += unused
            reached["several share as much"] += most.count(max(most)) > 1
        elif unused:
            reached["empty"] += 1
        else:
            reached["least recently used"] += 1
            reached["a little is found"] += shared > 0
            reached["more was elsewhere"] += max(most) > shared
        mine = [slot for slot in slots.idle if slot.tokens and slot.tokens[-1][0] == prompt[-1][0]]
        kept = sum(token[:2] != prompt[-1][:2] for token in prompt)
        reached["two contexts of a program"] += len(mine) > 1
        reached["an older context"] += any(
            common_prefix(prompt, slot.tokens) < min(kept, len(slot.tokens)) for slot in mine
        )
        return taken, shared

    monkeypatch.setattr(Slots, "choose", seen)
    for seed in range(300):
        programs, config = strategies.random_slot_case(random.Random(seed))
        log = []
        simulate(programs, config, log)
        reached["a long prompt in parts"] += any(
            n == config["max_num_batched_tokens"] for entry in log for _, _, n, _ in entry["batch"]
        )
        reached["waiting"] += any(entry["waiting"] for entry in log)
        for plane in ("routing", "admission"):
            reached[config[plane][0]] += 1
        reached[config["scheduling"]] += 1
        reached[config["max_num_seqs"], "slots"] += 1
        reached[config["replicas"], "replicas"] += 1
    assert len(reached) == 32
    assert min(reached.values()) > 15, reached


def test_checks_can_fail():
    programs, config = strategies.random_slot_case(random.Random(0))
    simulation = SlotSimulation(programs, config | {"check": True})
    simulation.check()
    simulation.replicas[0].pool.slots[0].tokens = ("a token",)
    with pytest.raises(AssertionError):
        simulation.check()
