"""The policies: protocol of every registered member, values, a user's own, and what choosing refuses."""

import inspect
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import Cluster, InputError, Policy, simulate
from agentjax.performance import Affine
from agentjax.policies import FAMILIES, Observation, Retain, admission, retention, routing, scheduling
from agentjax.policies.base import CallView, Choice, ProgramView, ReplicaView, decide
from agentjax.workloads import Call, Program

MEMBERS = [(family, name) for family in FAMILIES for name in FAMILIES[family].members]
KINDS = {"scheduling": jnp.floating, "routing": jnp.integer, "admission": jnp.bool_}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def observation(**changes) -> Observation:
    """A call of a program with home 1, on a cluster of three replicas, two of them in use."""
    values = {
        "now_s": 3.0,
        "releases": 7,
        "here": 1,
        "block_size": 16,
        "arrival_s": 1.5,
        "turn": 2,
        "attained_service_s": 0.25,
        "context_tokens": 80,
        "replica": 1,
        "is_protected": False,
        "released_s": 2.5,
        "prompt_tokens": 100,
        "cached_tokens": [0, 48, 0],
        "was_preempted": False,
        "in_use": [True, True, False],
        "running": [3, 2, 0],
        "queued": [0, 2, 0],
        "free_blocks": [9, 3, 0],
        "kv_utilization": [0.1, 0.8, 0.0],
    }
    assert changes.keys() <= values.keys()
    arrays = {name: jnp.asarray(value) for name, value in (values | changes).items()}

    def view(kind, **views):
        own = [field for field in kind.__dataclass_fields__ if field not in views]
        return kind(**{name: arrays[name] for name in own}, **views)

    return view(Observation, program=view(ProgramView), call=view(CallView), replicas=view(ReplicaView))


def answer(family, name, parameters=None, **changes):
    """The answer of one policy, as Python numbers."""
    found = FAMILIES[family].find(name).function(observation(**changes), **(parameters or {}))
    return jax.tree.map(lambda leaf: leaf.item(), found)


# Protocol


@pytest.mark.parametrize(("family", "name"), MEMBERS)
def test_protocol(family, name):
    member = FAMILIES[family].find(name)
    first, *rest = inspect.signature(member.function).parameters.values()
    assert first.name == "obs"
    assert first.annotation is Observation
    assert [(each.name, each.default) for each in rest] == list(member.parameters)
    assert inspect.getdoc(member.function)

    def decision(obs, parameters):
        return member.function(obs, **parameters)

    parameters = {key: jnp.asarray(value) for key, value in member.parameters}
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[observation(turn=turn) for turn in range(4)])
    one = jax.jit(decision)(observation(), parameters)
    four = jax.jit(jax.vmap(decision, in_axes=(0, None)))(batch, parameters)
    assert isinstance(one, Retain) == (family == "retention")
    kinds = (jnp.bool_, jnp.floating) if family == "retention" else (KINDS[family],)
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(four), kinds, strict=True)
    for alone, together, kind in leaves:
        assert jnp.issubdtype(alone.dtype, kind)
        assert alone.shape == ()
        assert together.shape == (4,)
        assert (together == alone).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_traced_choice_is_the_chosen_member(family):
    members = tuple(FAMILIES[family].members.values())
    traced = jax.jit(lambda choice, obs: decide(members, choice, obs))
    for member in members:
        got = traced(FAMILIES[family].choose(member.name), observation())
        want = member.function(observation(), **dict(member.parameters))
        assert jax.tree.all(jax.tree.map(jnp.array_equal, got, want))


# Values


@pytest.mark.parametrize(
    ("name", "parameters", "utilization", "keep", "protect_s"),
    [
        ("lru", {}, 0.8, True, 0.0),
        ("evict", {}, 0.8, False, 0.0),
        ("pin", {}, 0.8, True, np.inf),
        ("ttl", {}, 0.8, True, 2.0),
        ("ttl", {"tau_s": 5.0}, 0.8, True, 5.0),
        ("pressure_ttl", {}, 0.6, True, 2.0),
        ("pressure_ttl", {}, 0.8, True, 1.5),
        ("pressure_ttl", {}, 1.0, True, 1.0),
        ("pressure_ttl", {"tau_s": 4.0, "low": 0.5, "high": 1.0}, 0.75, True, 3.0),
    ],
)
def test_retention(name, parameters, utilization, keep, protect_s):
    got = answer("retention", name, parameters, kv_utilization=[0.0, utilization, 0.0])
    assert (got.keep, got.protect_s) == (keep, pytest.approx(protect_s))


@pytest.mark.parametrize(
    ("name", "changes", "priority"),
    [
        ("fcfs", {}, 0.0),
        ("program_fcfs", {}, 1_500_000),
        ("program_fcfs", {"arrival_s": 7_999e-9}, 7),
        ("plas", {}, 250_000),
        ("plas", {"attained_service_s": 5_000e-9}, 5),
        ("plas", {"attained_service_s": 5_999e-9}, 5),
        ("sjf", {}, 52),
        ("sjf", {"here": 0}, 100),
    ],
)
def test_scheduling(name, changes, priority):
    assert answer("scheduling", name, **changes) == priority


@pytest.mark.parametrize(
    ("name", "parameters", "changes", "replica"),
    [
        ("round_robin", {}, {}, 1),
        ("round_robin", {}, {"releases": 8}, 0),
        ("least_loaded", {}, {}, 0),
        ("least_loaded", {}, {"running": [3, 0, 0]}, 1),
        ("least_loaded", {}, {"running": [2, 0, 0]}, 0),
        ("session_affinity", {}, {}, 1),
        ("session_affinity", {"capacity_limit": 5.0}, {}, 1),
        ("session_affinity", {"capacity_limit": 4.0}, {}, 0),
        ("session_affinity", {}, {"replica": -1}, 0),
    ],
)
def test_routing(name, parameters, changes, replica):
    assert answer("routing", name, parameters, **changes) == replica


@pytest.mark.parametrize(
    ("name", "parameters", "changes", "admitted"),
    [
        ("always", {}, {"kv_utilization": [1.0, 1.0, 1.0], "free_blocks": [0, 0, 0]}, True),
        ("kv_gate", {}, {}, True),  # 0.8 is not over 0.9
        ("kv_gate", {"threshold": 0.7}, {}, False),  # 52 tokens do not fit into 48
        ("kv_gate", {"threshold": 0.8}, {}, True),
        ("kv_gate", {"threshold": 0.7}, {"prompt_tokens": 96}, True),
        ("kv_gate", {"threshold": 0.7}, {"is_protected": True}, True),
        ("kv_gate", {"threshold": 0.7}, {"here": 0}, True),
    ],
)
def test_admission(name, parameters, changes, admitted):
    assert answer("admission", name, parameters, **changes) is admitted


# Choosing


def test_a_choice_holds_index_and_parameters():
    policy = Policy(retention="pressure_ttl", parameters={"retention": {"high": 1, "tau_s": 4.0}})
    assert isinstance(policy.retention, Choice)
    assert list(FAMILIES["retention"].members)[policy.retention.index] == "pressure_ttl"
    assert policy.retention.parameters.tolist() == [4.0, 0.7, 1.0]
    default = Policy()
    chosen = [list(FAMILIES[family].members)[getattr(default, family).index] for family in FAMILIES]
    assert chosen == ["lru", "fcfs", "round_robin", "always"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"retention": "tlt"},
            "retention: found 'tlt', expected one of evict, lru, pin, pressure_ttl, ttl (closest: ttl)",
        ),
        ({"admission": "xyz"}, "admission: found 'xyz', expected one of always, kv_gate"),
        (
            {"retention": "pressure_ttl", "parameters": {"retention": {"tau": 1.0}}},
            "retention 'pressure_ttl': found an unknown parameter 'tau', "
            "expected one of tau_s, low, high (closest: tau_s)",
        ),
        (
            {"parameters": {"retention": {"tau_s": 1.0}}},
            "retention 'lru': found an unknown parameter 'tau_s', expected nothing here",
        ),
        (
            {"retention": "ttl", "parameters": {"retention": {"tau_s": "2"}}},
            "retention 'ttl', tau_s: found '2', expected a finite number",
        ),
        (
            {"retention": "ttl", "parameters": {"retention": {"tau_s": np.inf}}},
            "retention 'ttl', tau_s: found inf, expected a finite number",
        ),
        (
            {"parameters": {"schedulin": {}}},
            "policy parameters: found 'schedulin', "
            "expected one of retention, scheduling, routing, admission (closest: scheduling)",
        ),
    ],
)
def test_choosing_refuses(arguments, message):
    with pytest.raises(InputError) as error:
        Policy(**arguments)
    assert str(error.value) == message


def test_registering_refuses():
    with pytest.raises(InputError) as error:
        scheduling.register("mine", fcfs=True)
    assert str(error.value) == (
        "scheduling 'mine': found an unknown trait 'fcfs', expected one of fcfs_queue"
    )
    with pytest.raises(InputError) as error:
        retention.register("mine")(lambda obs, tau_s=None: Retain(jnp.asarray(True), tau_s))
    assert str(error.value) == "retention 'mine', tau_s: found None, expected a number as its default"
    assert "mine" not in {*scheduling.members, *retention.members}


# A user's own


@pytest.fixture
def own_policies():
    """One policy in each family, called `own`."""
    with (
        patch.dict(retention.members),
        patch.dict(scheduling.members),
        patch.dict(routing.members),
        patch.dict(admission.members),
    ):

        @retention.register("own")
        def keep_short_contexts(obs, most_tokens=100):
            return Retain(obs.program.context_tokens <= most_tokens, jnp.zeros_like(obs.now_s))

        @scheduling.register("own")
        def by_prompt(obs, sign=1.0):
            return sign * obs.call.prompt_tokens

        @routing.register("own")
        def last(obs):
            return jnp.sum(obs.replicas.in_use) - 1

        @admission.register("own", gates=True)
        def one_at_a_time(obs, most=100):
            return obs.replicas.running[obs.here] < most

        yield


def test_a_policy_of_ones_own(own_policies):
    # Three programs at once on the last of two replicas; an iteration takes 1 s, a call one iteration.
    programs = [
        Program(f"{new} tokens", 0.0, ((tuple(Call(new, 1, None, None, 100.0) for _ in range(2)),),))
        for new in (32, 16, 48)
    ]
    cluster = Cluster(replicas=2, kv_blocks=100, performance=Affine(1.0))

    def run(**parameters):
        given = {family: parameters.get(family, {}) for family in FAMILIES}
        result = simulate(programs, cluster, Policy("own", "own", "own", "own", given), check=True)
        assert (result["replica_of_call"] == 1).all()
        assert (result.attrs["retention"], result.attrs["admission"]) == ("own", "own")
        return result["scheduled_s"].values[::2].tolist(), result["cached_tokens"].values[1::2].tolist()

    assert run() == ([0, 0, 0], [32, 16, 48])
    assert run(admission={"most": 1}) == ([1, 0, 2], [32, 16, 48])
    assert run(admission={"most": 1}, scheduling={"sign": -1}) == ([1, 2, 0], [32, 16, 48])
    assert run(retention={"most_tokens": 40}) == ([0, 0, 0], [32, 16, 0])
