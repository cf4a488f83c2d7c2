"""How policies are registered, chosen and asked.

A policy is a pure function of an observation. Its keyword arguments are its parameters; their defaults are
the published ones. All members that the lanes of a run use are evaluated at each decision and the chosen one
is kept, so that the choice and the parameters are traced values and one compilation serves a whole grid.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from agentjax.errors import among, complaint
from agentjax.policies.observation import CallView as CallView
from agentjax.policies.observation import Observation as Observation
from agentjax.policies.observation import ProgramView as ProgramView
from agentjax.policies.observation import ReplicaView as ReplicaView
from agentjax.policies.observation import Retain as Retain
from agentjax.policies.trial import try_out

Bounds = tuple[float | None, float | None]
"""The least and the most that a parameter may be; None: no bound."""


@dataclass(frozen=True)
class Member:
    """One registered policy: its function, default parameters, traits, and the bounds of parameters."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[tuple[str, float], ...]
    traits: tuple[tuple[str, bool], ...] = ()
    bounds: tuple[tuple[str, Bounds], ...] = ()

    def trait(self, name: str) -> bool:
        """Whether the policy has this trait."""
        return dict(self.traits).get(name, False)


class Chosen(eqx.Module):
    """A member of a family with the values of its parameters, in the order of `Member.parameters`."""

    member: Member = eqx.field(static=True)
    parameters: Float[np.ndarray, " parameters"]

    @property
    def values(self) -> dict[str, float]:
        """The parameters by name."""
        names = [key for key, _ in self.member.parameters]
        return dict(zip(names, map(float, self.parameters), strict=True))


class Choice(eqx.Module):
    """A traced choice among the members of a run: an index, and parameters padded to one width."""

    index: Int[Array, ""]
    parameters: Float[Array, " parameters"]


@dataclass
class Family:
    """A named family of policies with one signature; `traits` are what `register` accepts beside the name and
    the bounds, and their defaults.
    """

    name: str
    traits: Mapping[str, bool] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)

    def register(
        self, name: str, *, bounds: Mapping[str, Bounds] | None = None, **traits: bool
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that adds a policy function `f(obs, *, parameter=default, ...)` under `name`, in place of
        one of that name. The function is tried on sample observations at once; one that fails is not added.

        Args:
            name: the name to choose it by.
            bounds: the least and the most value of parameters, None for no bound: `{"tau_s": (0, None)}`.
            traits: traits of the family that differ from their defaults.

        Raises:
            InputError: an unknown trait, a parameter without a numeric default, a function that cannot be
                traced, or one with an answer that its family does not have; names the policy.
        """
        where = f"{self.name} {name!r}"
        if not isinstance(name, str) or not name:
            raise complaint(f"name of a {self.name} policy", repr(name), "a text that is not empty")
        for trait, value in traits.items():
            if trait not in self.traits:
                raise complaint(where, f"an unknown trait {trait!r}", among(trait, self.traits))
            if not isinstance(value, bool):
                raise complaint(f"{where}, {trait}", repr(value), "True or False")
        settled = {**self.traits, **traits}

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            defaults = _defaults(where, function)
            member = Member(
                name,
                function,
                tuple(defaults.items()),
                tuple(sorted(settled.items())),
                _checked_bounds(where, bounds or {}, defaults),
            )
            for key, value in defaults.items():
                _refuse_outside(where, member, key, value)
            # Trying starts JAX, which importing the package must not do: tests try the built-in policies.
            if not str(getattr(function, "__module__", "")).startswith("agentjax.policies."):
                try_out(self.name, name, function, member.parameters, promise(self.name, settled))
            self.members[name] = member
            return function

        return add

    def unregister(self, name: str) -> None:
        """Take a policy out, a built-in one too; a `Policy` that has chosen it keeps it.

        Raises:
            InputError: no such policy; the sentence lists the registered ones.
        """
        del self.members[self.find(name).name]

    def find(self, name: str) -> Member:
        """The member of that name.

        Raises:
            InputError: no such policy; the sentence lists the registered ones.
        """
        if not isinstance(name, str) or name not in self.members:
            raise complaint(self.name, repr(name), among(name, self.members))
        return self.members[name]

    def choose(self, name: str, parameters: Mapping[str, float] | None = None) -> Chosen:
        """A member by name, with its parameters (defaults where absent).

        Raises:
            InputError: unknown name or parameter, or a parameter that is no finite number within its bounds.
        """
        member = self.find(name)
        where = f"{self.name} {name!r}"
        values = dict(member.parameters)
        for key, value in (parameters or {}).items():
            if key not in values:
                raise complaint(where, f"an unknown parameter {key!r}", among(key, values))
            if not _is_number(value):
                raise complaint(f"{where}, {key}", repr(value), "a finite number")
            _refuse_outside(where, member, key, value)
            values[key] = float(value)
        return Chosen(member, np.asarray(list(values.values()), np.float64))


def _is_number(value: object) -> bool:
    """Whether a value is a finite number of Python or numpy, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(np.isfinite(float(value)))


def _defaults(where: str, function: Callable[..., Any]) -> dict[str, float]:
    """The parameters of a policy function and their defaults."""
    if not callable(function):
        raise complaint(where, repr(function), "a function of an observation")
    names = list(inspect.signature(function).parameters.items())
    if not names:
        raise complaint(where, "a function without arguments", "one of an observation, f(obs)")
    for key, parameter in names[1:]:
        if not _is_number(parameter.default):
            found = "nothing" if parameter.default is parameter.empty else repr(parameter.default)
            raise complaint(f"{where}, {key}", found, "a number as its default")
    return {key: float(parameter.default) for key, parameter in names[1:]}


def _checked_bounds(
    where: str, bounds: Mapping[str, Bounds], parameters: Mapping[str, float]
) -> tuple[tuple[str, Bounds], ...]:
    for key, pair in bounds.items():
        if key not in parameters:
            raise complaint(f"{where}, bounds", f"an unknown parameter {key!r}", among(key, parameters))
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(bound is None or _is_number(bound) for bound in pair):
            raise complaint(f"{where}, bounds of {key}", repr(pair), "(least, most), None for no bound")
    return tuple(sorted((key, (least, most)) for key, (least, most) in bounds.items()))


def _refuse_outside(where: str, member: Member, key: str, value: float) -> None:
    """Refuse a value of a parameter that is outside its bounds."""
    least, most = dict(member.bounds).get(key, (None, None))
    if (least is not None and value < least) or (most is not None and value > most):
        if least is None or most is None:
            expected = f"a number of at most {most:g}" if least is None else f"a number of at least {least:g}"
        else:
            expected = f"a number from {least:g} to {most:g}"
        raise complaint(f"{where}, {key}", f"{float(value):g}", expected)


def decide(members: tuple[Member, ...], choice: Choice, observation: Observation) -> Any:
    """The answer of the chosen member; all are evaluated, which is cheap and keeps the choice traced."""
    answers = []
    for member in members:
        names = [key for key, _ in member.parameters]
        answer = member.function(observation, **dict(zip(names, choice.parameters, strict=False)))
        answers.append(jax.tree.map(jnp.asarray, answer))  # an answer may be a Python number
    chosen = answers[0]
    for i, answer in enumerate(answers[1:], start=1):
        chosen = jax.tree.map(partial(jnp.where, choice.index == i), answer, chosen)
    return chosen


def promise(family: str, traits: Mapping[str, bool]) -> str | None:
    """The trait by which a policy promises never to answer what its family may."""
    trait = {"admission": "gates", "retention": "protects"}.get(family)
    return trait if trait is not None and not traits[trait] else None


def has_trait(members: tuple[Member, ...], choice: Choice, trait: str) -> Bool[Array, ""]:
    """Whether the chosen member has the trait."""
    return jnp.asarray([member.trait(trait) for member in members])[choice.index]


retention = Family("retention", {"until_admission": False, "protects": True})
"""`f(obs) -> Retain` at completion of a call. Trait `until_admission`: a protection ends when the program's
next call is admitted instead of when it is released. Any policy may protect, unless it is registered with
`protects=False`: a promise of `protect_s` = 0, which is tested when it is registered and saves time."""

scheduling = Family("scheduling", {"fcfs_queue": False})
"""`f(obs) -> priority` at release of a call, a finite number, smaller first, ties in order of release. Trait
`fcfs_queue`: vLLM's fcfs queue, where a preempted call goes to the front and the call admitted last is the
victim; without it, vLLM's priority queue."""

routing = Family("routing")
"""`f(obs) -> replica` at release of a call: an integer, the index of a replica in use."""

admission = Family("admission", {"gates": True, "monotone": False})
"""`f(obs) -> bool`, whether a waiting call may be admitted now; held calls are skipped. Any policy may answer
no, unless it is registered with `gates=False`: a promise to answer yes always, which is tested when it is
registered and saves steps. Trait `monotone`: a held call stays held while nothing happens but that running
calls take more blocks (the clock does not matter); without it the policy is asked at every iteration while
calls wait, which costs steps."""
FAMILIES = {family.name: family for family in (retention, scheduling, routing, admission)}
