"""Retention, scheduling, routing and admission policies; importing the package registers the built-in
ones."""

from agentjax.policies import admission as _admission
from agentjax.policies import retention as _retention
from agentjax.policies import routing as _routing
from agentjax.policies import scheduling as _scheduling
from agentjax.policies.base import FAMILIES, Observation, Retain, admission, retention, routing, scheduling
from agentjax.policies.observation import sample_observation
from agentjax.policies.policy import Policy, registered

__all__ = [
    "FAMILIES",
    "Observation",
    "Policy",
    "Retain",
    "admission",
    "registered",
    "retention",
    "routing",
    "sample_observation",
    "scheduling",
]
_ = _admission, _retention, _routing, _scheduling
