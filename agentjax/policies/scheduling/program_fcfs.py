"""First come, first served, by program."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.policies.base import Observation, scheduling


@scheduling.register("program_fcfs")
def program_fcfs(obs: Observation) -> Float[Array, ""]:
    """Arrival of the program in whole microseconds. The order inside a class of Continuum, arXiv
    2511.02230.
    """
    return jnp.floor(obs.program.arrival_s * 1e6 + 5e-4)
