"""What a policy sees, what it answers, and how a user adds one.

A policy is a pure function of an observation. Its keyword arguments are its parameters; their defaults are
the published ones. Every registered member of a family is evaluated at each decision and the chosen one is
kept, so that the choice and the parameters are traced values and one compilation serves a whole grid.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from agentjax.errors import among, complaint


class ProgramView(eqx.Module):
    """The program whose call is decided on; past only."""

    arrival_s: Float[Array, ""]
    turn: Int[Array, ""]  # calls completed before this one
    attained_service_s: Float[Array, ""]  # run time of its iterations so far
    context_tokens: Int[Array, ""]  # context accumulated so far
    replica: Int[Array, ""]  # replica of its previous call, -1 before the first
    is_protected: Bool[Array, ""]  # its context is under a protection now


class CallView(eqx.Module):
    """The call that is decided on; output length and tool duration are not part of it."""

    released_s: Float[Array, ""]
    prompt_tokens: Int[Array, ""]
    cached_tokens: Int[Array, " replicas"]  # tokens of the prompt resident on each replica
    was_preempted: Bool[Array, ""]


class ReplicaView(eqx.Module):
    """All replicas, as they were at their last iteration boundary at or before now."""

    in_use: Bool[Array, " replicas"]  # padding replicas are False
    running: Int[Array, " replicas"]  # calls
    queued: Int[Array, " replicas"]  # calls
    free_blocks: Int[Array, " replicas"]  # free or evictable, protected ones not counted
    kv_utilization: Float[Array, " replicas"]  # (in use + protected) / pool


class Observation(eqx.Module):
    """Everything a policy may read. `here` is the replica concerned (for routing: the program's previous
    one).
    """

    now_s: Float[Array, ""]
    releases: Int[Array, ""]  # calls released so far in the whole cluster
    here: Int[Array, ""]
    block_size: Int[Array, ""]
    program: ProgramView
    call: CallView
    replicas: ReplicaView


class Retain(eqx.Module):
    """Answer of a retention policy. `protect_s` > 0 protects the context for that long (inf: without end)."""

    keep: Bool[Array, ""]
    protect_s: Float[Array, ""]


@dataclass(frozen=True)
class Member:
    """One registered policy: its function, default parameters and traits."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[tuple[str, float], ...]
    traits: tuple[tuple[str, bool], ...] = ()

    def trait(self, name: str) -> bool:
        """Whether the policy was registered with this trait set."""
        return dict(self.traits).get(name, False)


class Choice(eqx.Module):
    """A traced choice of one member of a family: its index and its parameters, padded."""

    index: Int[Array, ""]
    parameters: Float[Array, " parameters"]


@dataclass
class Family:
    """A named family of policies with one signature; `known_traits` are what `register` accepts beside the
    name.
    """

    name: str
    known_traits: tuple[str, ...] = ()
    members: dict[str, Member] = field(default_factory=dict)

    def register(self, name: str, **traits: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that adds a policy function `f(obs, *, parameter=default, ...)` under `name`.

        Raises:
            InputError: an unknown trait, or a parameter without a numeric default.
        """
        for trait in traits:
            if trait not in self.known_traits:
                raise complaint(
                    f"{self.name} {name!r}", f"an unknown trait {trait!r}", among(trait, self.known_traits)
                )

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            parameters = []
            for key, parameter in list(inspect.signature(function).parameters.items())[1:]:
                if isinstance(parameter.default, bool) or not isinstance(parameter.default, int | float):
                    raise complaint(
                        f"{self.name} {name!r}, {key}", repr(parameter.default), "a number as its default"
                    )
                parameters.append((key, float(parameter.default)))
            self.members[name] = Member(name, function, tuple(parameters), tuple(sorted(traits.items())))
            return function

        return add

    def find(self, name: str) -> Member:
        """The member of that name.

        Raises:
            InputError: no such policy; the sentence lists the registered ones.
        """
        if name not in self.members:
            raise complaint(self.name, repr(name), among(name, self.members))
        return self.members[name]

    def choose(self, name: str, parameters: Mapping[str, float] | None = None) -> Choice:
        """The choice of a member by name, with its parameters (defaults where absent), as numpy values.

        Raises:
            InputError: unknown name or parameter, or a parameter that is no finite number.
        """
        member = self.find(name)
        values = dict(member.parameters)
        for key, value in (parameters or {}).items():
            if key not in values:
                raise complaint(f"{self.name} {name!r}", f"an unknown parameter {key!r}", among(key, values))
            if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
                raise complaint(f"{self.name} {name!r}, {key}", repr(value), "a finite number")
            values[key] = float(value)
        width = max((len(m.parameters) for m in self.members.values()), default=0)
        padded = np.zeros(width)
        padded[: len(values)] = list(values.values())
        return Choice(np.asarray(list(self.members).index(name), np.int32), padded)  # pyright: ignore[reportArgumentType]


def decide(members: tuple[Member, ...], choice: Choice, observation: Observation) -> Any:
    """The answer of the chosen member; all are evaluated, which is cheap and keeps the choice traced."""
    answers = []
    for member in members:
        names = [key for key, _ in member.parameters]
        answers.append(member.function(observation, **dict(zip(names, choice.parameters, strict=False))))
    chosen = answers[0]
    for i, answer in enumerate(answers[1:], start=1):
        chosen = jax.tree.map(partial(jnp.where, choice.index == i), answer, chosen)
    return chosen


def has_trait(members: tuple[Member, ...], choice: Choice, trait: str) -> Bool[Array, ""]:
    """Whether the chosen member was registered with the trait."""
    return jnp.asarray([member.trait(trait) for member in members])[choice.index]


retention = Family("retention", ("until_admission",))
"""`f(obs) -> Retain` at completion of a call. Trait `until_admission`: a protection ends when the program's
next call is admitted instead of when it is released."""

scheduling = Family("scheduling", ("fcfs_queue",))
"""`f(obs) -> priority` at release of a call, smaller first, ties in order of release. Trait `fcfs_queue`:
vLLM's fcfs queue, where a preempted call goes to the front and the call admitted last is the victim; without
it, vLLM's priority queue."""

routing = Family("routing")
"""`f(obs) -> replica index` at release of a call."""

admission = Family("admission", ("gates", "monotone"))
"""`f(obs) -> bool`, whether a waiting call may be admitted now. Trait `gates`: it may answer no, and held
calls are skipped. Trait `monotone`: a held call stays held while nothing happens but that running calls take
more blocks (the clock does not matter); without it the policy is asked at every iteration while calls wait,
which costs steps."""
FAMILIES = {family.name: family for family in (retention, scheduling, routing, admission)}
