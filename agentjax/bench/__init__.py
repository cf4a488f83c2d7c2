"""Measures an OpenAI-compatible server: streaming requests of a designed grid, or agent programs."""

from agentjax.bench.grid import run_requests as run_requests
from agentjax.bench.programs import play_programs as play_programs
