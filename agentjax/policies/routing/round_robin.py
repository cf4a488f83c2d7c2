"""Replicas in turn."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from agentjax.policies.base import Observation, routing


@routing.register("round_robin")
def round_robin(obs: Observation) -> Int[Array, ""]:
    """Number of releases so far, modulo the replicas in use."""
    return obs.releases % jnp.sum(obs.replicas.in_use, dtype=jnp.int32)
