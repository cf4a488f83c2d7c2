"""Grids of configurations as labelled cubes."""

from agentjax.sweep.api import sweep as sweep
from agentjax.sweep.cube import open_cube as open_cube
