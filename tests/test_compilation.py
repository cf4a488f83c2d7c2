"""One compilation serves a grid: policies, parameters, limits, coefficients, workloads are traced values."""

import logging
from itertools import product

import jax
import numpy as np

from agentjax import Cluster, Policy, pack
from agentjax.engine import lanes as engine
from agentjax.engine.run import LaneSpec, run_lanes
from agentjax.performance import Affine
from agentjax.policies import FAMILIES
from agentjax.workloads import Call, Prefix, Program
from tests import engine_cases

PLANES = [[(name, value) for value in family.members] for name, family in FAMILIES.items()]


def programs(seed):
    rng = np.random.default_rng(seed)
    prefix = Prefix("system", int(rng.integers(1, 100)))
    for index in range(8):
        calls = [Call(*rng.integers(1, 60, 2).tolist(), None, None, rng.exponential()) for _ in range(4)]
        yield Program(f"program {index}", rng.exponential(), ((tuple(calls),),), prefix)


def grid(seed):
    """Two workloads, and a lane for every combination of policies, with limits and numbers drawn for each."""
    rng = np.random.default_rng(seed)
    lanes = []
    for index, combination in enumerate(product(*PLANES)):
        defaults = {plane: FAMILIES[plane].find(name).parameters for plane, name in combination}
        parameters = {
            plane: {key: value * rng.uniform(0.9, 1.1) for key, value in values}
            for plane, values in defaults.items()
        }
        cluster = Cluster(
            replicas=1 + index % 3,
            kv_blocks=int(rng.integers(60, 200)),
            block_size=int(rng.choice([8, 16])),
            max_num_seqs=int(rng.integers(1, 9)),
            max_num_batched_tokens=int(rng.integers(16, 512)),
            performance=Affine(*rng.uniform(1e-6, 1e-3, 8)),
        )
        lanes.append(LaneSpec(index % 2, cluster, Policy(**dict(combination), parameters=parameters)))
    return [pack(list(programs(seed + index))) for index in range(2)], lanes


def compilations(caplog):
    """Messages about compilations since the last call."""
    messages = [record.getMessage() for record in caplog.records if "ompil" in record.getMessage()]
    caplog.clear()
    return messages


def test_one_compilation_serves_a_grid(monkeypatch, caplog):
    engine_cases.compile_anew(monkeypatch)
    step, traces = engine.step, []

    def counted(*arguments):
        traces.append(arguments)
        return step(*arguments)

    monkeypatch.setattr(engine, "step", counted)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        outcome = run_lanes(*grid(0))
        assert any(message.startswith("Compiling jit(advance)") for message in compilations(caplog))
        other = run_lanes(*grid(1))
        assert not compilations(caplog)
    assert len(traces) == 1
    assert len(outcome.status) == 5 * 4 * 3 * 2
    assert not outcome.status.any()
    assert not other.status.any()
    assert (outcome.makespan_ns != other.makespan_ns).all()
