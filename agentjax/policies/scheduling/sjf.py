"""Shortest job first, by the prefill that a call still needs."""

from jaxtyping import Array, Float

from agentjax.policies.base import Observation, scheduling


@scheduling.register("sjf")
def sjf(obs: Observation) -> Float[Array, ""]:
    """Prompt tokens that are not cached on the call's replica at release."""
    return (obs.call.prompt_tokens - obs.call.cached_tokens[obs.here]).astype(obs.now_s.dtype)
