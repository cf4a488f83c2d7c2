"""Keep nothing: the lower bound on reuse."""

import jax.numpy as jnp

from agentjax.policies.base import Observation, Retain, retention


@retention.register("evict", protects=False)
def evict(obs: Observation) -> Retain:
    """Every completed call gives its private blocks back without content; a shared prefix stays cached as
    under LRU.
    """
    return Retain(jnp.asarray(False), jnp.zeros_like(obs.now_s))
