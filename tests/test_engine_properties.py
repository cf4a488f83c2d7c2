"""Properties of the engine on random cases: equal to the reference, and to itself however it is run.

A hypothesis example is a batch of seeds of `tests.strategies.random_case`, run side by side.
"""

import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import count, islice
from math import inf

import equinox as eqx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentjax.engine import lanes as engine
from agentjax.engine.lanes import Compiled
from agentjax.engine.run import Outcome
from agentjax.policies import registered
from tests import engine_cases
from tests.engine_cases import FREE, LANES, common, first_difference, priorities, recorded
from tests.reference.simulator import Simulation, simulate
from tests.strategies import MS, random_case

SEEDS = st.lists(st.integers(0, 2**32 - 1), min_size=LANES - 1, max_size=LANES - 1, unique=True)
MOMENTS = ("released", "scheduled", "first_token", "finished")
TIMES = {*MOMENTS, "service_ns", "service", "makespan_ns", "longest_gap"}

both_modes = pytest.mark.parametrize(
    "asynchronous", [pytest.param(False, id="synchronous"), pytest.param(True, id="asynchronous")]
)


def batches(count):
    """Decorator: the test for so many batches, the same ones in every run."""
    options = settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),  # the message names the seed; fewer or smaller seeds tell no more
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: options(given(SEEDS)(test))


def draw(seeds, asynchronous, **narrow):
    return [random_case(random.Random(seed), async_scheduling=(asynchronous,), **narrow) for seed in seeds]


def compare(seeds, cases, got: Outcome, want: Outcome):
    """All that two runs record of the same cases is equal."""
    for index, (seed, case) in enumerate(zip(seeds, cases, strict=True)):
        difference = first_difference(recorded(got, index, *case), recorded(want, index, *case))
        assert difference is None, f"seed {seed}: {difference}"


def compare_with_reference(seeds, cases, outcome: Outcome):
    assert not outcome.status.any()
    for index, (seed, case) in enumerate(zip(seeds, cases, strict=True)):
        difference = first_difference(recorded(outcome, index, *case), common(simulate(*case)))
        assert difference is None, f"seed {seed}: {difference}"


@both_modes
@batches(16)
def test_equals_the_reference(asynchronous, seeds):
    cases = draw(seeds, asynchronous)
    compare_with_reference(seeds, cases, engine_cases.run(cases))


def compact_more(programs, config, rng):
    """Six calls in ten keep any part of what they kept before, but all of a shared prefix."""
    for program in programs:
        prefix = program["prefix"]
        context = shared = 0 if prefix is None else config["prefix_tokens"][prefix]
        for turn, (new, output, kept, gap) in enumerate(program["calls"]):
            most = context if kept is None else min(kept, context)
            kept = rng.randint(shared, most) if turn and rng.random() < 0.6 else most
            context = kept + new + output
            program["calls"][turn] = (new, output, kept, gap)


@both_modes
@batches(8)
def test_equals_the_reference_where_protected_contexts_are_cut_and_broken(asynchronous, seeds):
    """Several replicas and much compaction: what a leap has taken is neither counted twice nor forgotten."""
    cases = draw(seeds, asynchronous, retention=("pin", "pin", "ttl", "pressure_ttl"))
    for seed, (programs, config) in zip(seeds, cases, strict=True):
        config["replicas"] = max(2, config["replicas"])
        compact_more(programs, config, random.Random(seed))
    compare_with_reference(seeds, cases, engine_cases.run(cases))


@both_modes
@batches(8)
def test_equals_the_reference_where_much_happens_at_one_instant(asynchronous, seeds):
    """Every iteration takes 1 ms, and programs arrive and tools return on whole milliseconds."""
    cases = draw(seeds, asynchronous, retention=("lru", "ttl", "pressure_ttl", "pin", "pin"))
    for seed, (programs, config) in zip(seeds, cases, strict=True):
        config["cost"] = FREE | {"c0": MS}
        config["replicas"] = max(2, config["replicas"])
        compact_more(programs, config, random.Random(seed))
        for program in programs:
            program["arrival_ns"] = program["arrival_ns"] // MS % 20 * MS
            program["calls"] = [(*call, gap // MS % 60 * MS) for *call, gap in program["calls"]]
    compare_with_reference(seeds, cases, engine_cases.run(cases))


ONE = (1, 1, None, 0)
CUT_WHILE_BROKEN = (
    # While a leap of replica 0 breaks program 1's context, its next call is released, keeps 36 tokens and is
    # admitted elsewhere. Its last call comes back and finds 9 blocks of those, not what the leap has taken.
    {"kv_blocks": 52, "block_size": 4, "max_num_batched_tokens": 16, "replicas": 3, "c0": 49 * MS},
    (0, [(1, 7, None, 588 * MS), ONE, (1, 11, None, 0), (28, 4, None, 0)]),
    (0, [(49, 8, None, 0), (37, 1, None, 0), (49, 13, None, 115_250_000), (3, 1, 36, 0), ONE, ONE]),
    (0, [ONE]),
)
CUT_TO_THE_PREFIX_WHILE_BROKEN = (
    # Program 0 keeps its shared prefix alone while a leap breaks its own blocks: the prefix stays protected.
    {"kv_blocks": 118, "block_size": 4, "c0": 17 * MS, "admission": ("kv_gate", {"threshold": 0.7})},
    (427 * MS, [(7, 1, None, 118_500_000), (1, 1, 46, 0)], 45),
    (0, [(149, 1, None, 0), (114, 9, None, 389 * MS), ONE]),
    (235 * MS, [(130, 20, None, 0)]),
    (518 * MS, [ONE]),
)
RELEASE_AT_THE_END_OF_AN_ITERATION = (
    # At 19 ms a release cuts a leap of replica 0, which takes part in scheduling at once, before replica 1.
    {"kv_blocks": 39, "block_size": 4, "max_num_seqs": 2, "replicas": 2, "c0": MS},
    (0, [(1, 9, None, 12 * MS), ONE]),
    (0, [(1, 19, None, 0), ONE]),
    (0, [(1, 5, None, 0), ONE]),
    (0, [(1, 19, None, 0)]),
    (0, [(1, 15, None, 0), ONE], 110),
)
ADMISSION_AT_THE_END_OF_AN_ITERATION = (
    # Replica 1 admits a pinned program while an iteration of replica 0 begins: that one is not decided anew.
    {"kv_blocks": 33, "max_num_batched_tokens": 33, "replicas": 2, "c0": MS, "scheduling": "sjf"}
    | {"routing": ("least_loaded", {}), "admission": ("kv_gate", {"threshold": 0.7})},
    (0, [(174, 18, None, 0)]),
    (0, [(68, 4, None, 20 * MS), ONE]),
    (0, [(1, 20, None, 0), (88, 6, None, 0)]),
    (0, [(185, 13, None, 0)]),
    (0, [(163, 22, None, 0), ONE]),
    (0, [(37, 26, None, 0), (9, 1, None, 0)]),
    (0, [(1, 21, None, 0), (30, 1, 3, 0)]),
    (0, [(185, 7, None, 0)]),
)


@both_modes
@pytest.mark.parametrize(
    "case",
    [
        CUT_WHILE_BROKEN,
        CUT_TO_THE_PREFIX_WHILE_BROKEN,
        RELEASE_AT_THE_END_OF_AN_ITERATION,
        ADMISSION_AT_THE_END_OF_AN_ITERATION,
    ],
)
def test_equals_the_reference_where_leaps_and_pinned_contexts_meet(case, asynchronous):
    """Contexts are pinned. A program: arrival, calls, and the tokens of its shared prefix if it has one."""
    changes, *rows = case
    config = {
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 1000,
        "replicas": 1,
        "prefix_tokens": [tokens for row in rows for tokens in row[2:]],
        "cost": FREE | {"c0": changes["c0"]},
        "retention": ("pin", {}),
        "scheduling": "fcfs",
        "routing": ("round_robin", {}),
        "admission": ("always", {}),
        "async_scheduling": asynchronous,
    }
    config |= {key: value for key, value in changes.items() if key != "c0"}
    programs = [
        {"arrival_ns": arrival, "prefix": 0 if prefix else None, "calls": calls}
        for arrival, calls, *prefix in rows
    ]
    compare_with_reference([0], [(programs, config)], engine_cases.run([(programs, config)]))


@both_modes
@batches(5)
def test_leaps_change_nothing(asynchronous, seeds):
    cases = draw(seeds, asynchronous)
    compare(seeds, cases, engine_cases.run(cases), engine_cases.run(cases, leaps=False))


@both_modes
@batches(4)
def test_leaps_change_no_count_where_an_iteration_takes_no_whole_number_of_nanoseconds(asynchronous, seeds):
    cases = draw(seeds, asynchronous)
    for seed, (_, config) in zip(seeds, cases, strict=True):
        rng = random.Random(seed)
        for name in ("c0", "c_tok", "c_seq", "c_kv"):
            config["cost"][name] += rng.random()
    leaping, stepping = engine_cases.run(cases), engine_cases.run(cases, leaps=False)
    for index, (seed, case) in enumerate(zip(seeds, cases, strict=True)):
        got, want = recorded(leaping, index, *case), recorded(stepping, index, *case)
        tolerance = want["totals"]["iterations"]
        busy = np.subtract(got["totals"].pop("busy_ns"), want["totals"].pop("busy_ns"))
        assert np.abs(busy).max() <= tolerance
        gaps = [np.repeat(*outcome.token_gaps[index]) for outcome in (leaping, stepping)]
        assert len(gaps[0]) == len(gaps[1])
        assert np.abs(gaps[0] - gaps[1]).max(initial=0) <= tolerance
        del got["totals"]["token_gaps"], want["totals"]["token_gaps"]
        pairs = [(got["totals"], want["totals"])]
        pairs += [pair for kind in ("calls", "programs") for pair in zip(got[kind], want[kind], strict=True)]
        for a, b in pairs:
            for name in b:
                assert abs(a[name] - b[name]) <= tolerance * (name in TIMES), f"seed {seed}: {name}"


@both_modes
@batches(3)
def test_invariants_hold_after_every_step(asynchronous, seeds):
    cases = draw(seeds, asynchronous)
    compare_with_reference(seeds, cases, engine_cases.run(cases, checks=True))


def test_invariants_can_fail(monkeypatch):
    compiled = engine.compiled

    def with_a_block_lost(*key):
        whole = compiled(*key)

        def begin_leaky(*arguments):
            state = whole.begin(*arguments)
            return eqx.tree_at(lambda state: state.replicas.pool.fresh, state, state.replicas.pool.fresh - 1)

        return Compiled(begin_leaky, whole.advance, whole.refill)

    monkeypatch.setattr(engine, "compiled", with_a_block_lost)
    with pytest.raises(
        (RuntimeError, ValueError), match="invariant broken: the free queue is as long as its parts"
    ):
        engine_cases.run(draw([0], False), checks=True)


@pytest.mark.parametrize(("asynchronous", "replicas", "prefixes"), [(False, 1, 0), (True, 3, 2)])
def test_a_lane_alone_equals_the_lane_among_others(asynchronous, replicas, prefixes):
    """Also: padding replicas and shared prefixes that are not there change nothing."""

    def fits(case):
        programs, config = case
        return (
            config["replicas"] == replicas
            and len(config["prefix_tokens"]) <= prefixes
            and bool(config["long_prefill_token_threshold"]) == (prefixes == 0)
            and any(kept is not None for program in programs for *_, kept, _ in program["calls"][1:])
        )

    drawn = ((seed, *draw([seed], asynchronous)) for seed in count())
    seeds, cases = zip(*islice(((seed, case) for seed, case in drawn if fits(case)), 8), strict=True)
    together = engine_cases.run(cases)
    for index, (seed, case) in enumerate(zip(seeds, cases, strict=True)):
        with priorities():
            packed, lane = engine_cases.workload(*case, prefixes=prefixes), engine_cases.lane(0, case[1])
            alone = engine_cases.run_lanes([packed], [lane], gaps=True, policies=registered())
        difference = first_difference(recorded(alone, 0, *case), recorded(together, index, *case))
        assert difference is None, f"seed {seed}: {difference}"
        assert alone.steps[0] == together.steps[index]


PLAIN = {
    "retention": ("lru",),
    "scheduling": ("fcfs",),
    "routing": ("round_robin",),
    "admission": ("always",),
    "long_prefill_token_threshold": (0,),
}


def without_compaction(programs, config):
    """The programs with all of their contexts, and room for them; no shared prefixes."""
    programs = deepcopy(programs)
    most = 0
    for program in programs:
        program["prefix"] = None
        program["calls"] = [(new, output, None, gap) for new, output, _, gap in program["calls"]]
        most = max(most, sum(new + output for new, output, _, _ in program["calls"]))
    room = max(config["kv_blocks"], -(-most // config["block_size"]))
    return programs, config | {"prefix_tokens": [], "kv_blocks": room, "max_model_len": 131_072}


@both_modes
def test_what_no_lane_needs_and_is_not_compiled_changes_nothing(asynchronous):
    """The policies of plain vLLM only; no compaction, no chunks, no prefixes, no times between tokens."""
    seeds = range(2000, 2000 + LANES - 1)
    cases = [without_compaction(*case) for case in draw(seeds, asynchronous, **PLAIN)]
    with priorities():
        less = engine_cases.run_lanes(
            [engine_cases.workload(*case, prefixes=0) for case in cases],
            [engine_cases.lane(index, config) for index, (_, config) in enumerate(cases)],
        )
    whole = engine_cases.run(cases)
    assert less.token_gaps is None and less.call_longest_gap_ns is None
    gaps = {"token_gaps": whole.token_gaps, "call_longest_gap_ns": whole.call_longest_gap_ns}
    compare(seeds, cases, replace(less, **gaps), whole)


def test_padding_changes_nothing():
    """Lanes with more programs, calls, replicas and prefixes make all arrays of the others larger."""
    seeds = range(1000, 1000 + LANES - 1)
    cases = draw(seeds, False)
    config = cases[0][1] | {"replicas": 5, "kv_blocks": 100, "prefix_tokens": [16] * 4, "max_model_len": 1000}
    config["long_prefill_token_threshold"] = 0
    calls = [ONE] * 27
    large = ([{"arrival_ns": 0, "prefix": 3, "calls": calls} for _ in range(20)], config)
    everything = [large, *cases, *[large] * 8]
    with priorities():
        padded = engine_cases.run_lanes(
            [engine_cases.workload(*case) for case in everything],
            [engine_cases.lane(index, config) for index, (_, config) in enumerate(everything)],
            policies=registered(),
            gaps=True,
        )
    compact = engine_cases.run(cases)
    for index, (seed, case) in enumerate(zip(seeds, cases, strict=True)):
        difference = first_difference(recorded(padded, 1 + index, *case), recorded(compact, index, *case))
        assert difference is None, f"seed {seed}: {difference}"
    assert (padded.steps[1:LANES] == compact.steps[: LANES - 1]).all()


def sampled_before(log, programs, prompts, instant):
    """Tokens that each call has sampled before an instant, from the log of the reference."""
    sampled = Counter()
    for entry in log:
        if entry["start_ns"] + entry["duration_ns"] < instant:
            for p, k, tokens, before in entry["batch"]:
                sampled[p, k] += before + tokens == prompts[p, k] + sampled[p, k]
    return sampled


def with_another_future(programs, config, instant, rng):
    """The programs, changed in everything that has not happened before the instant; call counts stay.

    A call that is not complete then may end up with any output longer than what it has sampled so far.
    """
    log = []
    result = simulate(programs, config, log)
    keys = [(p, k) for p, program in enumerate(programs) for k in range(len(program["calls"]))]
    calls = dict(zip(keys, result["calls"], strict=True))
    prompts = {key: call["prompt"] for key, call in calls.items()}
    sampled = sampled_before(log, programs, prompts, instant)
    for growth in (1.5, 1.0, 0.5):  # until every call fits
        changed = deepcopy(programs)
        for p, k in keys:
            call, program = calls[p, k], changed[p]
            new, output, kept, gap = program["calls"][k]
            if call["released"] >= instant:
                if k == 0:
                    program["arrival_ns"] = instant + rng.randint(0, 2 * (program["arrival_ns"] - instant))
                new, kept = rng.randint(1, 1 + int(growth * new)), rng.choice((None, kept))
            if call["finished"] >= instant:
                output = sampled[p, k] + rng.randint(1, 1 + int(growth * (output - sampled[p, k])))
                gap = rng.randint(0, 2 * gap)
            elif call["finished"] + gap >= instant:
                gap = instant - call["finished"] + rng.randint(0, gap)
            program["calls"][k] = (new, output, kept, gap)
        try:
            Simulation(changed, config)
        except ValueError:
            continue
        return changed
    return programs


def decided_before(result, instant):
    """What has been decided strictly before an instant, call by call; `inf` stands for later."""
    decided = []
    for call in result["calls"]:
        row = {name: call[name] if 0 <= call[name] < instant else inf for name in MOMENTS}
        row |= {"replica": call["replica"]} if row["released"] < inf else {}
        row |= {"cached_tokens": call["cached_tokens"]} if row["scheduled"] < inf else {}
        decided.append(call if row["finished"] < inf else row)
    return decided


@both_modes
@batches(5)
def test_the_future_changes_no_earlier_decision(asynchronous, seeds):
    """Where the end of a call is not known in advance, as it is with max_tokens and the longest context."""
    cases = draw(seeds, asynchronous, finish=("eos",))
    for _, config in cases:
        config["max_model_len"] = 131_072
    base = engine_cases.run(cases)
    changed, instants = [], []
    for index, (seed, (programs, config)) in enumerate(zip(seeds, cases, strict=True)):
        rng = random.Random(seed)
        calls = recorded(base, index, programs, config)["calls"]
        instants.append(rng.choice([call[name] + rng.randint(0, 1) for call in calls for name in MOMENTS]))
        changed.append((with_another_future(programs, config, instants[-1], rng), config))
    other = engine_cases.run(changed)
    for index, (seed, case) in enumerate(zip(seeds, cases, strict=True)):
        got = decided_before(recorded(other, index, *case), instants[index])
        want = decided_before(recorded(base, index, *case), instants[index])
        assert got == want, f"seed {seed}, {instants[index]} ns"
    assert sum(a[0] != b[0] for a, b in zip(cases, changed, strict=True)) > LANES // 3
