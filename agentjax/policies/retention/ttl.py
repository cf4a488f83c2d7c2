"""Protect every context for a fixed time."""

import jax.numpy as jnp

from agentjax.policies.base import Observation, Retain, retention


@retention.register("ttl", bounds={"tau_s": (0, None)})
def ttl(obs: Observation, tau_s: float = 2.0) -> Retain:
    """Deadline = completion + `tau_s` (s); ends at the program's next release. AgentServeSim, section 5.1 (2
    s).
    """
    return Retain(jnp.asarray(True), tau_s + jnp.zeros_like(obs.now_s))
