"""The built-in scheduling policies, one a file."""

from agentjax.policies.scheduling import fcfs, program_fcfs, plas, sjf

__all__ = ["fcfs", "program_fcfs", "plas", "sjf"]
