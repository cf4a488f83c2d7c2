"""The built-in routing policies, one a file."""

from agentjax.policies.routing import round_robin, least_loaded, session_affinity

__all__ = ["round_robin", "least_loaded", "session_affinity"]
