"""The engine with slots (section 11 of `docs/semantics.md`) on random cases: equal to the reference, and to
itself however it is run.
"""

import random
from unittest.mock import patch

import jax.numpy as jnp
import pytest

from agentjax.errors import InputError
from agentjax.policies import Observation, admission, routing
from tests import engine_cases
from tests.engine_cases import FREE, first_difference, recorded
from tests.strategies import MS, random_case, random_slot_case
from tests.test_engine_properties import batches, compare, compare_with_reference


def draw(seeds, **narrow):
    return [random_slot_case(random.Random(seed), **narrow) for seed in seeds]


@batches(20)
def test_equals_the_reference(seeds):
    cases = draw(seeds)
    compare_with_reference(seeds, cases, engine_cases.run(cases))


@batches(12)
def test_equals_the_reference_where_much_happens_at_one_instant(seeds):
    """Every iteration takes 1 ms, and programs arrive and tools return on whole milliseconds."""
    cases = draw(seeds)
    for programs, config in cases:
        config["cost"] = FREE | {"c0": MS}
        config["replicas"] = max(2, config["replicas"])
        for program in programs:
            program["arrival_ns"] = program["arrival_ns"] // MS % 20 * MS
            program["calls"] = [(*call, gap // MS % 60 * MS) for *call, gap in program["calls"]]
    compare_with_reference(seeds, cases, engine_cases.run(cases))


@batches(8)
def test_equals_the_reference_where_contexts_are_spread_and_compacted(seeds):
    """Replicas by turns, and calls that keep less and less: slots hold several contexts of a program."""
    cases = draw(seeds, routing=("round_robin",))
    for seed, (programs, config) in zip(seeds, cases, strict=True):
        rng = random.Random(seed)
        config["replicas"] = rng.choice((2, 3))
        for program in programs:
            least = 0 if program["prefix"] is None else config["prefix_tokens"][program["prefix"]]
            context = least
            for turn, (new, output, kept, gap) in enumerate(program["calls"]):
                most = context if kept is None else min(kept, context)
                kept = rng.randint(least, most) if turn and rng.random() < 0.6 else most
                context = kept + new + output
                program["calls"][turn] = (new, output, kept, gap)
    compare_with_reference(seeds, cases, engine_cases.run(cases))


def most_resident(obs: Observation):
    return jnp.argmax(jnp.where(obs.replicas.in_use, obs.call.cached_tokens, -1)).astype(jnp.int32)


def little_to_compute(obs: Observation):
    return obs.call.prompt_tokens - obs.call.cached_tokens[obs.here] <= 100


@batches(12)
def test_policies_see_what_idle_slots_have(seeds):
    """Routing sees it on every replica, priorities and admission on the call's own."""
    cases = draw(seeds)
    for seed, (_, config) in zip(seeds, cases, strict=True):
        rng = random.Random(seed)
        config["replicas"] = rng.choice((1, 2, 3))
        config["routing"] = rng.choice(("round_robin", "most_resident", "most_resident")), {}
        config["admission"] = rng.choice(("always", "little_to_compute", "little_to_compute")), {}
        config["scheduling"] = rng.choice(("fcfs", "sjf"))
    with patch.dict(routing.members), patch.dict(admission.members):
        routing.register("most_resident")(most_resident)
        admission.register("little_to_compute", gates=True)(little_to_compute)
        outcome = engine_cases.run(cases)
    compare_with_reference(seeds, cases, outcome)


@batches(5)
def test_leaps_change_nothing(seeds):
    cases = draw(seeds)
    compare(seeds, cases, engine_cases.run(cases), engine_cases.run(cases, leaps=False))


@batches(3)
def test_invariants_hold_after_every_step(seeds):
    cases = draw(seeds)
    compare_with_reference(seeds, cases, engine_cases.run(cases, checks=True))


def test_a_lane_alone_equals_the_lane_among_others():
    seed = 0
    case = draw([seed])[0]
    together = engine_cases.run([*draw(range(1, 6)), case])
    with engine_cases.priorities():
        packed, lane = engine_cases.workload(*case, prefixes=0), engine_cases.lane(0, case[1])
        alone = engine_cases.run_lanes([packed], [lane], gaps=True)
    assert first_difference(recorded(alone, 0, *case), recorded(together, 5, *case)) is None


def test_a_call_that_fits_into_no_slot_is_refused():
    """13 tokens do not fit into 25 // 2 = 12, though the last one is never computed."""
    programs, config = random_slot_case(random.Random(0))
    programs = [{"arrival_ns": 0, "prefix": None, "calls": [(8, 5, None, 0)]}]
    config |= {"max_num_seqs": 2, "prefix_tokens": [], "max_model_len": 1000}
    with pytest.raises(InputError, match=r"'p0', calls\[0\]"):
        engine_cases.run([(programs, config | {"kv_blocks": 25})])
    case = programs, config | {"kv_blocks": 26}
    compare_with_reference([0], [case], engine_cases.run([case]))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"block_size": 16}, "cluster.block_size: found 16"),
        ({"retention": ("pin", {})}, "retention: found 'pin'"),
    ],
)
def test_slots_go_with_nothing_that_blocks_have(changes, complaint):
    programs, config = random_slot_case(random.Random(0))
    with pytest.raises(InputError, match=complaint):
        engine_cases.run([(programs, config | changes)])


def test_lanes_with_and_without_slots_are_not_run_together():
    cases = [random_slot_case(random.Random(0)), random_case(random.Random(0))]
    with pytest.raises(InputError, match=r"cluster\.slots"):
        engine_cases.run(cases)
