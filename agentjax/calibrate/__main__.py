"""`python -m agentjax.calibrate data=bench.jsonl out=my_server.json`: coefficients from recorded requests."""

import sys
import time
from collections.abc import Sequence

from omegaconf import DictConfig

from agentjax.compilation import prepare
from agentjax.config import CommandLine, run_command
from agentjax.config.compose import plain, refuse_missing
from agentjax.errors import among, complaint, shown
from agentjax.report import make_console

METHODS = ("optax", "cma_es")


def run_calibration(config: DictConfig, line: CommandLine) -> None:
    """Runs the method that the configuration names."""
    start = time.perf_counter()
    resolved = plain(config, resolve=True)
    refuse_missing({key: resolved[key] for key in ("data", "method")})
    if resolved["method"] not in METHODS:
        raise complaint("method", shown(resolved["method"]), among(resolved["method"], METHODS))
    prepare(config.execution.devices)
    console = make_console()
    if resolved["method"] == "optax":
        from agentjax.calibrate.command import run_optax

        run_optax(resolved, console)
    else:
        from agentjax.calibrate.cma_command import run_cma

        run_cma(resolved, console)
    console.print(f"{time.perf_counter() - start:.1f} s in all")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(run_calibration, "calibrate", arguments)


if __name__ == "__main__":
    sys.exit(main())
