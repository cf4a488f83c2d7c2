"""The four policies of a cluster, chosen by name."""

from collections.abc import Mapping

import equinox as eqx

from agentjax.errors import among, complaint
from agentjax.policies.base import FAMILIES, Choice, Member


class Policy(eqx.Module):
    """One choice a plane. Built from names, e.g. `Policy(retention="ttl", parameters={"retention": {"tau_s":
    5}})`.

    Args:
        retention, scheduling, routing, admission: names of registered policies.
        parameters: parameters per family, where they differ from the defaults.

    Raises:
        InputError: unknown policy, family or parameter.
    """

    retention: Choice
    scheduling: Choice
    routing: Choice
    admission: Choice

    def __init__(
        self,
        retention: str = "lru",
        scheduling: str = "fcfs",
        routing: str = "round_robin",
        admission: str = "always",
        parameters: Mapping[str, Mapping[str, float]] | None = None,
    ):
        parameters = dict(parameters or {})
        for family in parameters:
            if family not in FAMILIES:
                raise complaint("policy parameters", repr(family), among(family, FAMILIES))
        self.retention = FAMILIES["retention"].choose(retention, parameters.get("retention"))
        self.scheduling = FAMILIES["scheduling"].choose(scheduling, parameters.get("scheduling"))
        self.routing = FAMILIES["routing"].choose(routing, parameters.get("routing"))
        self.admission = FAMILIES["admission"].choose(admission, parameters.get("admission"))


class PolicySpace(eqx.Module):
    """The members of every family at the time of compilation; static."""

    retention: tuple[Member, ...] = eqx.field(static=True)
    scheduling: tuple[Member, ...] = eqx.field(static=True)
    routing: tuple[Member, ...] = eqx.field(static=True)
    admission: tuple[Member, ...] = eqx.field(static=True)


def registered() -> PolicySpace:
    """All policies registered so far."""
    return PolicySpace(
        *(
            tuple(FAMILIES[name].members.values())
            for name in ("retention", "scheduling", "routing", "admission")
        )
    )
