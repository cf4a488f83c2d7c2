"""Answers of a policy, or durations of a model, that cannot be used and come only in the course of a run: it
ends with a sentence, and the others go on.
"""

from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import Cluster, InputError, Policy, pack, simulate, sweep
from agentjax.engine.run import LaneSpec, fault_of, run_lanes
from agentjax.performance import Affine
from agentjax.policies import Retain, retention, routing, scheduling
from agentjax.sweep.tiles import Tiles
from agentjax.workloads import Call, Program

CALLS = tuple(Call(20, 2, None, None, 0.01) for _ in range(3))
PROGRAMS = [Program(f"job {index}", 0.1 * index, ((CALLS,),)) for index in range(3)]
CLUSTER = Cluster(replicas=2, performance=Affine(0.01))


@pytest.fixture
def own_policies():
    """Policies that pass their trials, for those see no second call of a program."""
    with patch.dict(scheduling.members), patch.dict(routing.members), patch.dict(retention.members):

        @scheduling.register("no_number")
        def no_number(obs):
            return jnp.where(obs.program.turn == 1, jnp.nan, 0.0)

        @scheduling.register("no_end")
        def no_end(obs, limit=1.0):
            return jnp.where((obs.program.turn == 1) & (limit > 0), jnp.inf, 0.0)

        @routing.register("beyond")
        def beyond(obs):
            return jnp.where(obs.program.turn == 1, 2, 0).astype(jnp.int32)

        @routing.register("below")
        def below(obs):
            return jnp.where(obs.program.turn == 1, -1, 0).astype(jnp.int32)

        @retention.register("no_time")
        def no_time(obs):
            return Retain(jnp.asarray(True), jnp.where(obs.program.turn == 1, jnp.nan, 1.0))

        yield


PRIORITY = "found a priority that is NaN or infinite, expected a finite number"
REPLICA = "found a replica that there is not, expected a replica in use: obs.replicas.in_use"
TIME = "found a protect_s that is NaN, expected seconds, 0 or inf"
FAULTS = {
    "scheduling 'no_number': " + PRIORITY: {"scheduling": "no_number"},
    "scheduling 'no_end': " + PRIORITY: {"scheduling": "no_end"},
    "routing 'beyond': " + REPLICA: {"routing": "beyond"},
    "routing 'below': " + REPLICA: {"routing": "below"},
    "retention 'no_time': " + TIME: {"retention": "no_time"},
}


def test_lanes_at_fault_end_and_the_others_go_on(own_policies):
    lanes = [LaneSpec(0, CLUSTER, Policy(**policy)) for policy in (*FAULTS.values(), {})]
    endless = Cluster(replicas=2, performance=Affine(0.01, c_prefill_s=1e3))
    lanes.append(LaneSpec(1, endless, Policy()))
    workloads = [pack(PROGRAMS), pack([Program("long", 0.0, (((Call(100_000, 1, None, None, 0.0),),),))])]
    outcome = run_lanes(workloads, lanes)
    faults = [fault_of(int(status), lane) for status, lane in zip(outcome.status, lanes, strict=True)]
    said = [None if fault is None else str(fault) for fault in faults]
    too_long = "performance: found an iteration that ends later than 36 years, expected less time"
    assert said == [*FAULTS, None, too_long]
    first, second = outcome.call_finished_ns[:6, 0], outcome.call_finished_ns[:6, 1]
    assert (first > 0).all()
    # a bad protection is answered when the second call has ended, all else when it is released
    assert ((second > 0) == [False] * 4 + [True] * 2).all()
    assert (outcome.makespan_ns > 0).tolist() == [False] * 5 + [True, False]


def test_a_run_at_fault_names_the_policy(own_policies):
    with pytest.raises(InputError) as error:
        simulate(PROGRAMS, CLUSTER, Policy(scheduling="no_number"))
    assert str(error.value) == f"scheduling 'no_number': {PRIORITY}"


def test_a_sweep_finishes_and_saves_all_other_points_first(own_policies, tmp_path):
    policy = Policy(scheduling="no_end")
    grid = {"scheduling.limit": [0.0, 1.0], "cluster.max_num_seqs": [1, 2, 4]}
    with pytest.raises(InputError, match=f"^scheduling 'no_end': {PRIORITY}$"):
        sweep(PROGRAMS, CLUSTER, policy, grid=grid, out=tmp_path)
    assert len(Tiles(tmp_path / "tiles").load()) == 3
    assert not (tmp_path / "cube.zarr").exists()

    def nothing(*arguments, **options):
        raise AssertionError("simulated again")

    cube = sweep(
        PROGRAMS, CLUSTER, policy, grid=grid | {"scheduling.limit": [0.0]}, out=tmp_path, stream_lanes=nothing
    )
    assert (cube.completed == len(PROGRAMS)).all()
    assert np.isfinite(cube.makespan).all()
