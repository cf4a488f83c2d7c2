"""The policies: protocol of every registered member, values, a user's own, and what choosing refuses."""

import inspect
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import Cluster, InputError, Policy, simulate
from agentjax.performance import Affine
from agentjax.policies import (
    FAMILIES,
    Observation,
    Retain,
    admission,
    retention,
    routing,
    sample_observation,
    scheduling,
)
from agentjax.policies.base import decide, promise
from agentjax.policies.policy import PolicySpace, indexed, used
from agentjax.policies.trial import try_out
from agentjax.workloads import Call, Program

MEMBERS = [(family, name) for family in FAMILIES for name in FAMILIES[family].members]
KINDS = {"scheduling": jnp.floating, "routing": jnp.integer, "admission": jnp.bool_}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def answer(family, name, parameters=None, **changes):
    """The answer of one policy, as Python numbers."""
    found = FAMILIES[family].find(name).function(sample_observation(**changes), **(parameters or {}))
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
    batch = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[sample_observation(turn=turn) for turn in range(4)]
    )
    one = jax.jit(decision)(sample_observation(), parameters)
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
    choices: list[dict[str, Any]] = [{family: name} for name in FAMILIES[family].members]
    policies = [Policy(**choice) for choice in choices]
    space = used(policies)
    members = getattr(space, family)
    assert {member.name for member in members} == FAMILIES[family].members.keys()
    traced = jax.jit(lambda choice, obs: decide(members, choice, obs))
    for policy in policies:
        member = getattr(policy, family).member
        got = traced(getattr(indexed(policy, space), family), sample_observation())
        want = member.function(sample_observation(), **dict(member.parameters))
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


def test_a_policy_holds_members_and_parameters():
    given = {"retention": {"high": 1, "tau_s": np.float32(4)}}
    policy = Policy(retention="pressure_ttl", parameters=given)
    assert policy.retention.member is retention.members["pressure_ttl"]
    assert policy.retention.values == {"tau_s": 4.0, "low": 0.7, "high": 1.0}
    assert repr(Policy()) == (
        "Policy(retention='lru', scheduling='fcfs', routing='round_robin', admission='always')"
    )
    assert repr(policy).endswith("parameters={'retention': {'tau_s': 4.0, 'low': 0.7, 'high': 1.0}})")


def test_only_the_members_that_are_used_are_compiled():
    policies = [Policy("ttl", parameters={"retention": {"tau_s": 5}}), Policy("lru"), Policy("pressure_ttl")]
    space = used(policies)
    assert [member.name for member in space.retention] == ["lru", "pressure_ttl", "ttl"]
    assert [member.name for member in space.routing] == ["round_robin"]
    assert space == used(policies[::-1])
    choices = [indexed(policy, space).retention for policy in policies]
    assert [int(choice.index) for choice in choices] == [2, 0, 1]
    assert [choice.parameters.tolist() for choice in choices] == [[5, 0, 0], [0, 0, 0], [2, 0.7, 0.9]]
    assert indexed(policies[0], used(policies[:1])).retention.parameters.tolist() == [5]


def test_a_policy_that_is_taken_out_or_replaced_stays_as_it_was_chosen(own_policies):
    def kept(policy):
        space: PolicySpace = used([policy])
        return decide(space.retention, indexed(policy, space).retention, sample_observation()).keep.item()

    before = Policy("own")
    retention.register("own")(lambda obs: Retain(False, 0.0))
    after = Policy("own")
    retention.unregister("own")
    retention.unregister("lru")
    assert (kept(before), kept(after)) == (True, False)
    for name in ("own", "lru"):
        with pytest.raises(InputError) as error:
            retention.unregister(name)
        assert str(error.value) == f"retention: found {name!r}, expected one of evict, pin, pressure_ttl, ttl"


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
            {"retention": "ttl", "parameters": {"retention": {"tau_s": True}}},
            "retention 'ttl', tau_s: found True, expected a finite number",
        ),
        (
            {"retention": "ttl", "parameters": {"retention": {"tau_s": -5}}},
            "retention 'ttl', tau_s: found -5, expected a number of at least 0",
        ),
        (
            {"admission": "kv_gate", "parameters": {"admission": {"threshold": 7}}},
            "admission 'kv_gate', threshold: found 7, expected a number from 0 to 1",
        ),
        (
            {"routing": "session_affinity", "parameters": {"routing": {"capacity_limit": -1}}},
            "routing 'session_affinity', capacity_limit: found -1, expected a number of at least 0",
        ),
        (
            {"parameters": {"retention": 5}},
            "policy parameters, retention: found 5, expected a mapping by name",
        ),
        ({"parameters": 5}, "policy parameters: found 5, expected a mapping by family"),
        (
            {"routing": ["lru"]},
            "routing: found ['lru'], expected one of least_loaded, round_robin, session_affinity",
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


def branches(obs):
    return 1.0 if obs.call.was_preempted else 0.0


def reads_a_typo(obs):
    return obs.call.promt_tokens


NUMBER = "expected one finite number, smaller first"
REPLICA = "expected one integer, the index of a replica in use"
TRUTH = "expected one truth value, whether the call may be admitted"
RETAIN = "expected Retain(keep, protect_s): a truth value, and a number of seconds or inf"
SAMPLE = "on a sample observation"
UNCHECKED: Any = Retain
CONVERTED = (
    ": found an observed value turned into a Python number or a numpy array, before values are known, "
    "expected functions of jax.numpy and .astype"
)


@pytest.mark.parametrize(
    ("family", "function", "message"),
    [
        (
            "scheduling",
            branches,
            ": found an observed value in `if`, `while`, `and`, `or` or `not`, before values are known, "
            "expected jnp.where(condition, a, b), and &, | and ~ between conditions",
        ),
        (
            "scheduling",
            reads_a_typo,
            ": found no field obs.call.promt_tokens, expected one of released_s, prompt_tokens, "
            "cached_tokens, was_preempted (closest: prompt_tokens)",
        ),
        (
            "scheduling",
            lambda obs: float(obs.now_s),
            CONVERTED,
        ),
        (
            "scheduling",
            lambda obs: np.log(obs.now_s),
            CONVERTED,
        ),
        (
            "scheduling",
            lambda obs: {}["key"],
            ": found KeyError ('key'), expected a function of the observation that JAX can trace",
        ),
        ("scheduling", lambda obs: None, f": found None, {NUMBER}"),
        ("scheduling", lambda obs: "1", f": found an answer of type str, {NUMBER}"),
        ("scheduling", lambda obs: (obs.now_s, 1), f": found a tuple of 2, {NUMBER}"),
        ("scheduling", lambda obs: obs.now_s * 1j, f": found an answer of type complex128, {NUMBER}"),
        (
            "scheduling",
            lambda obs: obs.replicas.running,
            f": found an answer of type int32 of shape (3,), {NUMBER}",
        ),
        ("scheduling", lambda obs: 0 * obs.now_s / 0, f": found nan {SAMPLE}, {NUMBER}"),
        (
            "scheduling",
            lambda obs: obs.now_s / obs.program.turn,
            f": found inf for the first call of a run, {NUMBER}",
        ),
        ("routing", lambda obs: 99, f": found replica 99 of 2 (0 to 1) {SAMPLE}, {REPLICA}"),
        ("routing", lambda obs: 2, f": found replica 2 of 2 (0 to 1) {SAMPLE}, {REPLICA}"),
        ("routing", lambda obs: -1, f": found replica -1 of 2 (0 to 1) {SAMPLE}, {REPLICA}"),
        (
            "routing",
            lambda obs: obs.program.replica,
            f": found replica -1 of 2 (0 to 1) for the first call of a run, {REPLICA}",
        ),
        ("routing", lambda obs: 0.7, f": found an answer of type float64, {REPLICA}"),
        ("routing", lambda obs: True, f": found an answer of type bool, {REPLICA}"),
        ("admission", lambda obs: 1, f": found an answer of type int64, {TRUTH}"),
        ("retention", lambda obs: True, f": found an answer of type bool, {RETAIN}"),
        ("retention", lambda obs: (True, 2.0), f": found a tuple of 2, {RETAIN}"),
        ("retention", lambda obs: Retain(True, np.nan), f": found protect_s = nan {SAMPLE}, {RETAIN}"),
        ("retention", lambda obs: UNCHECKED(1, 2.0), f": found keep = an answer of type int64, {RETAIN}"),
        ("retention", lambda obs: UNCHECKED(True, None), f": found protect_s = None, {RETAIN}"),
        (
            "retention",
            lambda obs, tau_s=None: Retain(True, 1),
            ", tau_s: found None, expected a number as its default",
        ),
        (
            "retention",
            lambda obs, tau_s: Retain(True, 1),
            ", tau_s: found nothing, expected a number as its default",
        ),
        (
            "retention",
            lambda: Retain(True, 1),
            ": found a function without arguments, expected one of an observation, f(obs)",
        ),
        ("retention", 7, ": found 7, expected a function of an observation"),
    ],
)
def test_a_function_that_cannot_be_used_is_not_registered(family, function, message):
    with pytest.raises(InputError) as error:
        FAMILIES[family].register("mine")(function)
    assert str(error.value) == f"{family} 'mine'{message}"
    assert "mine" not in FAMILIES[family].members


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        (
            "scheduling",
            {"fcfs": True},
            "scheduling 'mine': found an unknown trait 'fcfs', expected one of fcfs_queue",
        ),
        ("scheduling", {"fcfs_queue": 1}, "scheduling 'mine', fcfs_queue: found 1, expected True or False"),
        (
            "admission",
            {"gates": False},
            "admission 'mine': found false on a cluster without room, "
            "expected true, as it is registered with gates=False",
        ),
        (
            "admission",
            {"bounds": {"mst": (0, None)}},
            "admission 'mine', bounds: found an unknown parameter 'mst', "
            "expected one of most (closest: most)",
        ),
        (
            "admission",
            {"bounds": {"most": 5}},
            "admission 'mine', bounds of most: found 5, expected (least, most), None for no bound",
        ),
        (
            "admission",
            {"bounds": {"most": (None, 50)}},
            "admission 'mine', most: found 100, expected a number of at most 50",
        ),
    ],
)
def test_registering_refuses(family, arguments, message):
    with pytest.raises(InputError) as error:
        FAMILIES[family].register("mine", **arguments)(
            lambda obs, most=100: obs.replicas.running[obs.here] < most
        )
    assert str(error.value) == message
    assert "mine" not in FAMILIES[family].members


def test_a_retention_policy_keeps_its_promise_not_to_protect():
    with pytest.raises(InputError) as error:
        retention.register("mine", protects=False)(lambda obs: Retain(True, obs.now_s))
    assert str(error.value) == (
        "retention 'mine': found protect_s = 3.0 on a sample observation, "
        "expected 0, as it is registered with protects=False"
    )
    protects = {name: member.trait("protects") for name, member in retention.members.items()}
    assert protects == {"lru": False, "evict": False, "ttl": True, "pressure_ttl": True, "pin": True}


def test_a_name_is_a_text():
    with pytest.raises(InputError) as error:
        routing.register("")
    assert str(error.value) == "name of a routing policy: found '', expected a text that is not empty"


def test_admission_gates_unless_it_promises_not_to(own_policies):
    gates = {name: member.trait("gates") for name, member in admission.members.items()}
    assert gates == {"always": False, "kv_gate": True, "own": True}


@pytest.mark.parametrize(("family", "name"), MEMBERS)
def test_built_in_policies_pass_the_trial(family, name):
    member = FAMILIES[family].find(name)
    try_out(family, name, member.function, member.parameters, promise(family, dict(member.traits)))


def test_the_sample_refuses_unknown_fields():
    assert sample_observation(turn=0).program.turn == 0
    with pytest.raises(InputError) as error:
        sample_observation(turns=0)
    assert str(error.value).startswith(
        "sample observation: found an unknown field 'turns', expected one of now_s"
    )


# A user's own

MOST_TOKENS = np.float32(100)


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
        def keep_short_contexts(obs, most_tokens=MOST_TOKENS):
            return Retain(obs.program.context_tokens <= most_tokens, jnp.zeros_like(obs.now_s))

        @scheduling.register("own")
        def by_prompt(obs, sign=1.0):
            return sign * obs.call.prompt_tokens

        @routing.register("own")
        def last(obs):
            return jnp.sum(obs.replicas.in_use) - 1

        @admission.register("own")
        def one_at_a_time(obs, most=100):
            return obs.replicas.running[obs.here] < most

        yield


def test_a_policy_of_ones_own(own_policies):
    # Three programs at once on the last of two replicas; an iteration takes 1 s, a call one iteration.
    # With asynchronous scheduling each would take part in a second one, before its end is seen.
    programs = [
        Program(f"{new} tokens", 0.0, ((tuple(Call(new, 1, None, None, 100.0) for _ in range(2)),),))
        for new in (32, 16, 48)
    ]
    cluster = Cluster(replicas=2, kv_blocks=100, async_scheduling=False, performance=Affine(1.0))

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
