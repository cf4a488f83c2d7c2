"""First come, first served, by call."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.policies.base import Observation, scheduling


@scheduling.register("fcfs", fcfs_queue=True)
def fcfs(obs: Observation) -> Float[Array, ""]:
    """vLLM's default queue: order of release; a preempted call goes to the front."""
    return jnp.zeros_like(obs.now_s)
