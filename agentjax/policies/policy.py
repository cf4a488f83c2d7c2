"""The four policies of a cluster, chosen by name, and the form in which the engine takes those of its
lanes."""

from collections.abc import Mapping, Sequence

import equinox as eqx
import numpy as np

from agentjax.errors import among, complaint, shown
from agentjax.policies.base import FAMILIES, Choice, Chosen, Member


class Policy(eqx.Module):
    """One choice a plane. Built from names, e.g. `Policy(retention="ttl", parameters={"retention": {"tau_s":
    5}})`; it stays as it is when policies are registered or taken out later.

    Args:
        retention, scheduling, routing, admission: names of registered policies.
        parameters: parameters per family, where they differ from the defaults.

    Raises:
        InputError: unknown policy, family or parameter, or a parameter outside its bounds.
    """

    retention: Chosen
    scheduling: Chosen
    routing: Chosen
    admission: Chosen

    def __init__(
        self,
        retention: str = "lru",
        scheduling: str = "fcfs",
        routing: str = "round_robin",
        admission: str = "always",
        parameters: Mapping[str, Mapping[str, float]] | None = None,
    ):
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, Mapping):
            raise complaint("policy parameters", shown(parameters), "a mapping by family")
        for family, values in parameters.items():
            if family not in FAMILIES:
                raise complaint("policy parameters", repr(family), among(family, FAMILIES))
            if not isinstance(values, Mapping):
                raise complaint(f"policy parameters, {family}", shown(values), "a mapping by name")
        self.retention = FAMILIES["retention"].choose(retention, parameters.get("retention"))
        self.scheduling = FAMILIES["scheduling"].choose(scheduling, parameters.get("scheduling"))
        self.routing = FAMILIES["routing"].choose(routing, parameters.get("routing"))
        self.admission = FAMILIES["admission"].choose(admission, parameters.get("admission"))

    def __repr__(self) -> str:
        chosen = {family: getattr(self, family) for family in FAMILIES}
        given = [f"{family}={choice.member.name!r}" for family, choice in chosen.items()]
        values = {family: choice.values for family, choice in chosen.items() if choice.values}
        return f"Policy({', '.join([*given, *([f'parameters={values}'] if values else [])])})"


class PolicySpace(eqx.Module):
    """The members of every family that are compiled together; static."""

    retention: tuple[Member, ...] = eqx.field(static=True)
    scheduling: tuple[Member, ...] = eqx.field(static=True)
    routing: tuple[Member, ...] = eqx.field(static=True)
    admission: tuple[Member, ...] = eqx.field(static=True)


class IndexedPolicy(eqx.Module):
    """A policy as traced values: one choice a plane among the members of a `PolicySpace`."""

    retention: Choice
    scheduling: Choice
    routing: Choice
    admission: Choice


def used(policies: Sequence[Policy]) -> PolicySpace:
    """The members that any of the policies has chosen, by name: their order does not depend on that of
    the policies, nor on what else is registered, so that equal sets share a compilation.
    """
    return PolicySpace(
        **{
            family: tuple(
                sorted(
                    dict.fromkeys(getattr(policy, family).member for policy in policies),
                    key=lambda member: member.name,
                )
            )
            for family in FAMILIES
        }
    )


def registered(policies: Sequence[Policy] = ()) -> PolicySpace:
    """All members that are registered, and those that the policies have chosen."""
    chosen = used(policies)
    return PolicySpace(
        **{
            name: tuple(dict.fromkeys([*family.members.values(), *getattr(chosen, name)]))
            for name, family in FAMILIES.items()
        }
    )


def indexed(policy: Policy, space: PolicySpace) -> IndexedPolicy:
    """A policy as numpy values for the engine: its members' places in `space`, and its parameters padded to
    the widest member of each family there.
    """
    choices: dict[str, Choice] = {}
    for family in FAMILIES:
        members: tuple[Member, ...] = getattr(space, family)
        chosen: Chosen = getattr(policy, family)
        padded = np.zeros(max(len(member.parameters) for member in members))
        padded[: len(chosen.parameters)] = chosen.parameters
        choices[family] = Choice(np.int32(members.index(chosen.member)), padded)  # pyright: ignore[reportArgumentType]
    return IndexedPolicy(**choices)
