"""Hold calls that would push other contexts out of a nearly full cache."""

from jaxtyping import Array, Bool

from agentjax.policies.base import Observation, admission


@admission.register("kv_gate", bounds={"threshold": (0, 1)}, monotone=True)
def kv_gate(obs: Observation, threshold: float = 0.9) -> Bool[Array, ""]:
    """Held while KV utilization > `threshold` and the uncached part of the prompt exceeds the free and
    evictable tokens.

    Held calls are skipped, so that calls whose context is cached run first. AgentServeSim's evolved gate
    (its admission rule alone; order and retention are other planes). Under retention that protects until
    release no waiting call is protected.
    """
    crowded = obs.replicas.kv_utilization[obs.here] > threshold
    uncached = obs.call.prompt_tokens - obs.call.cached_tokens[obs.here]
    return ~(
        crowded & (uncached > obs.replicas.free_blocks[obs.here] * obs.block_size) & ~obs.program.is_protected
    )
