"""agentjax: simulate how retention, routing and scheduling policies serve LLM agent programs."""

from agentjax import metrics, performance, policies, workloads
from agentjax.cluster import Cluster
from agentjax.errors import InputError
from agentjax.policies import Policy
from agentjax.simulate import simulate
from agentjax.sweep import sweep
from agentjax.workloads import read_programs
from agentjax.workloads.pack import Workload, pack

__all__ = [
    "Cluster",
    "InputError",
    "Policy",
    "Workload",
    "metrics",
    "pack",
    "performance",
    "policies",
    "read_programs",
    "read_workload",
    "simulate",
    "sweep",
    "workloads",
]


def read_workload(path: str, format: str = "auto") -> Workload:
    """Read a workload file and pack it; every program needs an arrival time.

    Raises:
        InputError: names the file, line and field that cannot be used.
    """
    return pack(read_programs(path, format=format))
