"""The built-in scheduling policies, one a file."""

from agentjax.policies.scheduling import fcfs, plas, program_fcfs, sjf

__all__ = ["fcfs", "plas", "program_fcfs", "sjf"]
