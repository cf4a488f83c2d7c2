"""The built-in retention policies, one a file."""

from agentjax.policies.retention import evict, lru, pin, pressure_ttl, ttl

__all__ = ["evict", "lru", "pin", "pressure_ttl", "ttl"]
