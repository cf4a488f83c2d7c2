"""Program-level attained service: the program that has used least goes first."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.policies.base import Observation, scheduling


@scheduling.register("plas")
def plas(obs: Observation) -> Float[Array, ""]:
    """Run time of the program's completed calls in whole microseconds. Autellix, arXiv 2502.13965.

    Half a nanosecond is added before rounding down, so that the rounding is that of the integer clock.
    """
    return jnp.floor(obs.program.attained_service_s * 1e6 + 5e-4)
