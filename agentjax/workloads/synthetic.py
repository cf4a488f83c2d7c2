"""What all generators share: checked parameters, seeded streams, distributions, and chains of calls.

Each purpose (arrivals, call counts, growth, ...) and each program draws from a stream of its own, so that a
change of one parameter leaves the other draws as they are, and runs with the same seed stay paired.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, PlainValidator, ValidationError, create_model
from pydantic_core import PydanticCustomError

from agentjax.errors import complaint, expecting, from_validation
from agentjax.workloads.program import Call, Prefix, Program

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# ---- parameters --------------------------------------------------------------------------------------------


def _seed(seed: Any) -> Any:
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool) and seed >= 0
    if not whole and not getattr(seed, "size", 0):
        raise PydanticCustomError("expected", "an integer of at least 0, or a jax.random key")
    return seed


MOST = 1e15
"""The largest parameter and draw: more than any workload takes, and little enough for 64-bit integers."""
Seed = Annotated[Any, PlainValidator(_seed)]
Count = Annotated[int, Field(ge=1, le=10**6), expecting("an integer from 1 to 1000000")]
Tokens = Annotated[int, Field(ge=0, le=10**9), expecting("an integer of at least 0")]
Positive = Annotated[float, Field(gt=0, le=MOST), expecting("a number greater than 0, at most 1e15")]
Spread = Annotated[float, Field(ge=0, le=10), expecting("a number from 0 to 10")]
Correlation = Annotated[float, Field(ge=-1, le=1), expecting("a number from -1 to 1")]
Share = Annotated[float, Field(ge=0, le=1), expecting("a number from 0 to 1")]
Target = Annotated[
    Annotated[float, Field(gt=0, le=MOST)] | None, expecting("null or a number greater than 0, at most 1e15")
]

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a function against its annotations, and raise `InputError` where they fail."""
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in signature.parameters.items()
    }
    strict = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
    model = create_model(function.__name__, __config__=strict, **fields)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind_partial(*args).arguments | kwargs
        try:
            values = model.model_validate(given)
        except ValidationError as error:
            raise from_validation(error, function.__name__, {"": fields}) from None
        return function(**{name: getattr(values, name) for name in fields})  # pyright: ignore[reportCallIssue]

    return wrapper


# ---- draws -------------------------------------------------------------------------------------------------

_STREAMS = {"arrival": 0, "order": 1, "first": 2, "growth": 3, "output": 4, "gap": 5, "kind": 6}


def stream(seed: Any, purpose: str, program: int = 0) -> np.random.Generator:
    """The random numbers of one purpose (and program) under a seed: an integer or a `jax.random` key."""
    if isinstance(seed, int | np.integer):
        entropy = [int(seed)]
    else:
        import jax

        entropy = [int(word) for word in np.ravel(jax.random.key_data(seed))]
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=(_STREAMS[purpose], program)))


def normal(seed: Any, purpose: str, program: int, size: int) -> Floats:
    """Standard normal draws of one purpose and program."""
    return stream(seed, purpose, program).standard_normal(size)


def lognormal(median: float, sigma: float, z: Floats) -> Floats:
    """Lognormal draws from standard normal ones; `sigma` is the standard deviation of their logarithm."""
    return np.minimum(median * np.exp(sigma * z), MOST)


def refuse_disorder(low_name: str, low: float, high_name: str, high: float) -> None:
    """Refuse the two ends of a range in the wrong order.

    Raises:
        InputError: names both.
    """
    if low > high:
        raise complaint(low_name, f"{low:g}", f"at most {high:g}, which is {high_name}")


def stratified_counts(seed: Any, count: int, median: float, sigma: float, low: int, high: int) -> Ints:
    """Lognormal counts of calls with next to no sampling error, in random order.

    The distribution is cut into `count` strata of equal probability; each gives the mean of its values,
    rounded and cut to [`low`, `high`]. All seeds have the same counts and differ in which program gets which:
    they have the median and mean of the distribution, where independent draws of 50 programs would miss the
    mean by 10 %.
    """
    refuse_disorder("calls_min", low, "calls_max", high)
    standard = NormalDist()
    # The share of the mean that lies below the q-quantile of a lognormal.
    below = [0.0, *(standard.cdf(standard.inv_cdf(i / count) - sigma) for i in range(1, count)), 1.0]
    means = median * math.exp(sigma**2 / 2) * count * np.diff(below)
    counts = np.clip(np.rint(means), low, high).astype(np.int64)
    return stream(seed, "order").permutation(counts)


# ---- chains ------------------------------------------------------------------------------------------------


def growth_scales(
    firsts: Ints, growths: Sequence[Floats], max_context_tokens: int, context_tokens_per_call: float | None
) -> Floats:
    """Factor on the growth of each program, for a given mean prompt and a largest context.

    One factor is common to all programs: the one that makes the sum of all prompts `context_tokens_per_call`
    times the number of calls (None: 1). A program whose context would then exceed `max_context_tokens` has a
    smaller one.
    """
    calls = np.array([len(growth) for growth in growths])
    room = max_context_tokens - firsts - 2 * calls
    if room.min() <= 0:
        fault = f"at least {max_context_tokens - room.min() + 1} for these first prompts and calls"
        raise complaint("max_context_tokens", str(max_context_tokens), fault)
    largest = room / np.array([growth.sum() for growth in growths])
    if context_tokens_per_call is None:
        return np.minimum(1.0, largest)

    # A growth counts in the prompts of all later calls of its program.
    weight = np.array([growth @ np.arange(len(growth) - 1, -1, -1) for growth in growths])

    def mean_prompt(scale: float) -> float:
        return float((firsts * calls + np.minimum(scale, largest) * weight).sum() / calls.sum())

    low, high = 0.0, float(largest.max())
    if not mean_prompt(low) < context_tokens_per_call <= mean_prompt(high):
        fault = f"null, or more than {mean_prompt(low):.0f} and at most {mean_prompt(high):.0f}"
        raise complaint(
            "context_tokens_per_call", f"{context_tokens_per_call:g}", f"{fault} for these parameters"
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_prompt(middle) < context_tokens_per_call else (low, middle)
    return np.minimum(high, largest)


def chain(
    name: str,
    new: Ints,
    output: Ints,
    gap_s: Floats,
    tools: Sequence[str],
    *,
    kept: Sequence[int | None] | None = None,
    prefix: Prefix | None = None,
) -> Program:
    """A program of one thread from the tokens, gaps (rounded to 1 us) and tools of its calls.

    `new` includes the shared prefix in its first entry. No tool and no gap follow the last call.
    """
    new = new.copy()
    new[0] = max(1, new[0] - (prefix.tokens if prefix else 0))
    gap_s = np.round(gap_s, 6)
    last = len(new) - 1
    calls = tuple(
        Call(
            new_tokens=int(new[k]),
            output_tokens=int(output[k]),
            kept_tokens=kept[k] if kept else None,
            tool=tools[k] if k < last else None,
            tool_s=float(gap_s[k]) if k < last else 0.0,
        )
        for k in range(len(new))
    )
    return Program(name, None, ((calls,),), prefix)
