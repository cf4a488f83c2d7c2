"""Admit whatever fits."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from agentjax.policies.base import Observation, admission


@admission.register("always", gates=False)
def always(obs: Observation) -> Bool[Array, ""]:
    """vLLM: the head of the queue is tried, and nothing behind it."""
    return jnp.ones_like(obs.now_s, dtype=bool)
