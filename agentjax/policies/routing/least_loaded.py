"""The replica with the fewest calls."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from agentjax.policies.base import Observation, routing


@routing.register("least_loaded")
def least_loaded(obs: Observation) -> Int[Array, ""]:
    """Fewest running + queued calls, the lowest index on a tie. The LOAD routing of LLMServingSim and
    AgentServeSim.
    """
    load = obs.replicas.running + obs.replicas.queued
    return jnp.argmin(jnp.where(obs.replicas.in_use, load, jnp.iinfo(jnp.int32).max)).astype(jnp.int32)
