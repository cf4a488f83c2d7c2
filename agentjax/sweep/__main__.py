"""`python -m agentjax.sweep grid=NAME`."""

import sys
from collections.abc import Sequence

from agentjax.config import run_command
from agentjax.sweep.command import run_grid


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(run_grid, "sweep", arguments, has_grid=True)


if __name__ == "__main__":
    sys.exit(main())
