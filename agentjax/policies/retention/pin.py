"""Protect every context until its program ends: the upper bound on reuse."""

import jax.numpy as jnp

from agentjax.policies.base import Observation, Retain, retention


@retention.register("pin", until_admission=True)
def pin(obs: Observation) -> Retain:
    """No deadline, held through the queue wait of the next call; only broken when nothing else is left to
    reclaim.
    """
    return Retain(jnp.asarray(True), jnp.full_like(obs.now_s, jnp.inf))
