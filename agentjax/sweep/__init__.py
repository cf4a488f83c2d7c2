"""Grids of configurations as labelled cubes."""

from agentjax.store import open_dataset
from agentjax.sweep.api import sweep as sweep

open_cube = open_dataset
"""Reads a cube into memory."""
