"""Keep every context, protect none: the least recently freed block goes first."""

import jax.numpy as jnp

from agentjax.policies.base import Observation, Retain, retention


@retention.register("lru", protects=False)
def lru(obs: Observation) -> Retain:
    """vLLM 0.19: freed blocks stay cached and are evicted in the order of freeing."""
    return Retain(jnp.asarray(True), jnp.zeros_like(obs.now_s))
