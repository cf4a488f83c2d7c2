"""Trying a policy on sample observations, so that a bad one is refused by name when it is registered."""

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.errors import InputError, among, complaint
from agentjax.policies.observation import (
    CROWDED,
    FIRST_CALL,
    CallView,
    Observation,
    ProgramView,
    ReplicaView,
    Retain,
    sample_observation,
)

EXPECTED = {
    "retention": "Retain(keep, protect_s): a truth value, and a number of seconds or inf",
    "scheduling": "one finite number, smaller first",
    "routing": "one integer, the index of a replica in use",
    "admission": "one truth value, whether the call may be admitted",
}
"""What a policy of each family answers."""

_NUMBER = (jnp.floating, jnp.integer, jnp.bool_)
_KINDS = {
    "retention": ((jnp.bool_,), _NUMBER),
    "scheduling": (_NUMBER,),
    "routing": ((jnp.integer,),),
    "admission": ((jnp.bool_,),),
}
"""Kinds of types that each part of an answer may have."""
_VIEWS = {Observation: "obs", ProgramView: "obs.program", CallView: "obs.call", ReplicaView: "obs.replicas"}
_SAMPLES = {
    "on a sample observation": {},
    "for the first call of a run": FIRST_CALL,
    "on a cluster without room": CROWDED,
}


@lru_cache(maxsize=256)  # the same function is registered again and again in notebooks and tests
def try_out(
    family: str,
    name: str,
    function: Callable[..., Any],
    parameters: tuple[tuple[str, float], ...],
    promise: str | None,
) -> None:
    """Evaluate a policy function with its default parameters, traced as in a simulation.

    Args:
        family: name of the family.
        name: name of the policy, for the sentence.
        function: the policy.
        parameters: names and defaults.
        promise: the trait that it is registered without: `gates`, it never answers no; `protects`, it never
            protects; or None.

    Raises:
        InputError: what JAX cannot trace, a field that does not exist, or an answer that cannot be used.
    """
    where = f"{family} {name!r}"

    def traced(observation: Observation, values: dict[str, Any]) -> list[Any]:
        return _parts(family, where, function(observation, **values))

    with jax.enable_x64(True):
        values = {key: jnp.asarray(value, jnp.float64) for key, value in parameters}
        compiled = jax.jit(traced)
        for place, changes in _SAMPLES.items():
            observation = sample_observation(**changes)
            try:
                answer = [np.asarray(part) for part in compiled(observation, values)]
            except InputError:
                raise
            except Exception as error:
                raise _sentence(where, error) from error
            in_use = int(np.sum(np.asarray(observation.replicas.in_use)))
            fault = _fault(family, answer, in_use)
            if fault is not None:
                raise complaint(where, f"{fault} {place}", EXPECTED[family])
            if promise is not None and (broken := _broken(promise, answer)) is not None:
                found, due = broken
                raise complaint(where, f"{found} {place}", f"{due}, as it is registered with {promise}=False")


def _parts(family: str, where: str, answer: Any) -> list[Any]:
    """The parts of an answer as arrays, once their types and shapes are right."""
    if family == "retention" and isinstance(answer, Retain):
        parts = {"keep": answer.keep, "protect_s": answer.protect_s}
    else:
        parts = {"": answer}
    if len(parts) != len(_KINDS[family]):
        raise complaint(where, _described(answer), EXPECTED[family])
    arrays = []
    for (part, value), kinds in zip(parts.items(), _KINDS[family], strict=True):
        of = f"{part} = " if part else ""
        if not isinstance(value, bool | int | float | complex | np.generic | np.ndarray | jax.Array):
            raise complaint(where, of + _described(value), EXPECTED[family])
        array = jnp.asarray(value)
        if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds) or array.shape != ():
            raise complaint(where, of + _described(array), EXPECTED[family])
        arrays.append(array)
    return arrays


def _described(value: Any) -> str:
    if value is None:
        return "None"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        shape = f" of shape {value.shape}" if value.shape else ""
        return f"an answer of type {value.dtype}{shape}"
    kind = type(value).__name__
    return f"an answer of type {kind}" if kind != "tuple" else f"a tuple of {len(value)}"


def _fault(family: str, answer: list[np.ndarray], in_use: int) -> str | None:
    """What is wrong with the values of an answer."""
    *_, value = answer
    if family == "retention" and np.isnan(value):
        return "protect_s = nan"
    if family == "scheduling" and not np.isfinite(value):
        return f"{value}"
    if family == "routing" and not 0 <= value < in_use:
        return f"replica {value} of {in_use} (0 to {in_use - 1})"
    return None


def _broken(promise: str, answer: list[np.ndarray]) -> tuple[str, str] | None:
    """What was found and what is expected, if an answer breaks the promise of its policy."""
    *_, value = answer
    if promise == "gates" and not value:
        return "false", "true"
    if promise == "protects" and value > 0:
        return f"protect_s = {value}", "0"
    return None


def _sentence(where: str, error: Exception) -> InputError:
    """The sentence for what a policy function raises while it is traced."""
    if isinstance(error, AttributeError) and type(error.obj) in _VIEWS:
        view: Any = error.obj
        found = f"no field {_VIEWS[type(view)]}.{error.name}"
        return complaint(where, found, among(error.name, [field.name for field in fields(view)]))
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return complaint(
            where,
            "an observed value in `if`, `while`, `and`, `or` or `not`, before values are known",
            "jnp.where(condition, a, b), and &, | and ~ between conditions",
        )
    if isinstance(
        error,
        jax.errors.ConcretizationTypeError
        | jax.errors.TracerArrayConversionError
        | jax.errors.TracerIntegerConversionError,
    ):
        return complaint(
            where,
            "an observed value turned into a Python number or a numpy array, before values are known",
            "functions of jax.numpy and .astype",
        )
    lines = str(error).strip().splitlines() or [""]
    return complaint(
        where, f"{type(error).__name__} ({lines[0]})", "a function of the observation that JAX can trace"
    )
