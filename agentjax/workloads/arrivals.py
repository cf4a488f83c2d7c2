"""When programs arrive: Poisson, gamma, or as the file says.

The draw of a seed has unit rate and is divided by the rate: two rates with one seed differ by a factor only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentjax.errors import complaint
from agentjax.workloads.program import Program
from agentjax.workloads.synthetic import Positive, Seed, checked, stream


def poisson(programs: Sequence[Program], *, rate: float, seed: Any) -> list[Program]:
    """Independent arrivals, `rate` programs per second on average, in the order of `programs`."""
    return gamma(programs, rate=rate, cv=1.0, seed=seed)


@checked
def gamma(programs: Sequence[Program], *, rate: Positive, cv: Positive, seed: Seed) -> list[Program]:
    """Gamma interarrival times of mean 1 / `rate` (programs per second) and coefficient of variation `cv`.

    `cv` 1 is the Poisson process, with the same draws; more than 1 is burstier.
    """
    shape = cv**-2
    gaps = stream(seed, "arrival").standard_gamma(shape, len(programs)) / shape
    with np.errstate(over="ignore"):  # an arrival that never comes is refused with its program
        arrivals = np.cumsum(gaps) / rate
    return [replace(program, arrival_s=float(at)) for program, at in zip(programs, arrivals, strict=True)]


def fixed(programs: Sequence[Program]) -> list[Program]:
    """The arrivals that the programs have."""
    for program in programs:
        if program.arrival_s is None:
            raise complaint(
                f"program {program.name}, arrival_s", "nothing", "a number, or a rate to draw it with"
            )
    return list(programs)
