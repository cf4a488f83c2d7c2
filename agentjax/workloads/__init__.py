"""Workloads: programs read from files or drawn by generators."""

from agentjax.workloads.arrivals import fixed as fixed
from agentjax.workloads.arrivals import gamma as gamma
from agentjax.workloads.arrivals import poisson as poisson
from agentjax.workloads.bfcl import bfcl as bfcl
from agentjax.workloads.build import build_programs as build_programs
from agentjax.workloads.jsonl import write_programs as write_programs
from agentjax.workloads.production import production as production
from agentjax.workloads.program import Call as Call
from agentjax.workloads.program import Prefix as Prefix
from agentjax.workloads.program import Program as Program
from agentjax.workloads.reader import read_programs as read_programs
from agentjax.workloads.swebench import swebench as swebench
