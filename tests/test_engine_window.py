"""No result depends on what is held at once: rows for programs in flight, and lanes side by side."""

import random

import pytest

from agentjax.engine import lanes as engine
from agentjax.policies import registered
from tests import engine_cases
from tests.engine_cases import LANES, common, first_difference, priorities, recorded
from tests.reference.simulator import simulate
from tests.strategies import MS
from tests.test_engine_properties import compare_with_reference, draw

SEEDS = range(LANES - 1)


@pytest.fixture
def shapes(monkeypatch):
    """The shapes that are asked for, one after another."""
    compiled, seen = engine.compiled, []

    def noted(shape, *rest):
        seen.append(shape)
        return compiled(shape, *rest)

    monkeypatch.setattr(engine, "compiled", noted)
    return seen


def few_programs(cases, most):
    return [(programs[:most], config) for programs, config in cases]


@pytest.mark.parametrize(
    ("asynchronous", "window", "programs", "rows"),
    [(False, 1, 4, [1, 2, 4]), (False, 2, 4, [2, 4]), (True, 3, 6, [3, 6])],
)
def test_the_first_size_of_the_window_changes_nothing(asynchronous, window, programs, rows, shapes):
    """One program after another uses a row. With the rules of vLLM 0.19 one that has ended keeps its row as
    long as anything of it is in the cache, and the window grows.
    """
    cases = few_programs(draw(SEEDS, asynchronous), programs)
    assert {config["vllm"] for _, config in cases} == {"0.19", "0.24", "0.33"}
    compare_with_reference(SEEDS, cases, engine_cases.run(cases, window=window))
    assert [shape.threads for shape in shapes] == rows
    assert all(shape.reuses for shape in shapes)


@pytest.mark.parametrize(("asynchronous", "width"), [(False, 8), (True, 4)])
def test_neighbours_and_order_change_nothing(asynchronous, width):
    """Few seats: a lane that ends makes room for one that waits, in the order given or backwards."""
    cases = draw(SEEDS, asynchronous)
    forwards = engine_cases.run(cases, width=width)
    compare_with_reference(SEEDS, cases, forwards)
    backwards = engine_cases.run(cases[::-1], width=width)
    compare_with_reference(SEEDS[::-1], cases[::-1], backwards)
    assert (backwards.steps[: len(cases)][::-1] == forwards.steps[: len(cases)]).all()


def test_state_does_not_grow_with_the_number_of_programs(shapes):
    """200 programs of one call, of which few are in flight at a time, need no more than the first window."""
    rng = random.Random(0)
    programs = [
        {
            "arrival_ns": 100 * MS * index + rng.randint(0, 50) * MS,
            "prefix": None,
            "calls": [(rng.randint(1, 300), rng.randint(1, 60), None, 0)],
        }
        for index in range(200)
    ]
    _, config = draw([0], True)[0]
    config |= {
        "kv_blocks": 500,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 1000,
        "vllm": "0.33",
        "prefix_tokens": [],
        "long_prefill_token_threshold": 0,
        "watermark": 0.0,
        "retention": ("lru", {}),
        "scheduling": "fcfs",
        "routing": ("round_robin", {}),
        "admission": ("always", {}),
        "replicas": 1,
        "cost": engine_cases.FREE | {"c0": 5 * MS, "c_tok": 10_000},
    }
    case = (programs, config)
    with priorities():
        workload, lane = engine_cases.workload(*case), engine_cases.lane(0, config)
        outcome = engine_cases.run_lanes([workload], [lane], gaps=True, policies=registered())
    assert [(shape.threads, shape.programs) for shape in shapes] == [(engine.FIRST_WINDOW, 200)]
    assert not outcome.status.any()
    assert first_difference(recorded(outcome, 0, *case), common(simulate(*case))) is None
