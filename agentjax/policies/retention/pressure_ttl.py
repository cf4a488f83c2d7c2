"""Protect every context for a time that shrinks under memory pressure."""

import jax.numpy as jnp

from agentjax.policies.base import Observation, Retain, retention


@retention.register("pressure_ttl", bounds={"tau_s": (0, None), "low": (0, 1), "high": (0, 1)})
def pressure_ttl(obs: Observation, tau_s: float = 2.0, low: float = 0.7, high: float = 0.9) -> Retain:
    """Deadline = completion + tau·(1 − m/2), m = clip((u − low) / (high − low), 0, 1), u the KV utilization
    of the replica.

    `tau_s` in seconds, `low` and `high` as shares of the pool (a step at `low` if `high` is not above it).
    AgentServeSim, its pressure-aware TTL.
    """
    utilization = obs.replicas.kv_utilization[obs.here]
    pressure = jnp.clip((utilization - low) / jnp.maximum(high - low, 1e-12), 0.0, 1.0)
    return Retain(jnp.asarray(True), tau_s * (1.0 - 0.5 * pressure))
