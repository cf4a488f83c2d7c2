"""The built-in routing policies, one a file."""

from agentjax.policies.routing import least_loaded, round_robin, session_affinity

__all__ = ["least_loaded", "round_robin", "session_affinity"]
