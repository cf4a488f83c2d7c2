"""Back to the replica that holds the context, unless it is too busy."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from agentjax.policies.base import Observation, routing
from agentjax.policies.routing.least_loaded import least_loaded


@routing.register("session_affinity", bounds={"capacity_limit": (0, None)})
def session_affinity(obs: Observation, capacity_limit: float = 64.0) -> Int[Array, ""]:
    """Home is the replica of the program's previous call. With `capacity_limit` calls or more in flight
    there, or before the first call, the least loaded replica is taken and becomes home. AgentServeSim's
    session affinity."""
    home = obs.program.replica
    load = obs.replicas.running[home] + obs.replicas.queued[home]
    return jnp.where((home >= 0) & (load < capacity_limit), home, least_loaded(obs))
