"""The built-in admission policies, one a file."""

from agentjax.policies.admission import always, kv_gate

__all__ = ["always", "kv_gate"]
