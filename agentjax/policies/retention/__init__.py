"""The built-in retention policies, one a file."""

from agentjax.policies.retention import lru, evict, ttl, pressure_ttl, pin

__all__ = ["lru", "evict", "ttl", "pressure_ttl", "pin"]
