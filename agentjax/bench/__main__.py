"""`python -m agentjax.bench url=URL model=NAME out=FILE.jsonl`: measures a server."""

import asyncio
import re
import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentjax.bench.grid import measure
from agentjax.bench.plan import make_plan
from agentjax.bench.programs import describe, play
from agentjax.bench.session import Listener
from agentjax.bench.settings import check_settings
from agentjax.bench.tables import cell_table, faults, program_table
from agentjax.config import CommandLine, run_command
from agentjax.config.compose import plain, refuse_missing
from agentjax.config.paths import output_path
from agentjax.errors import InputError, among, complaint, shown
from agentjax.records import Recording
from agentjax.report import make_console
from agentjax.workloads import build_programs

_OF_COMMAND = ("mode", "workload", "dry_run")


def run_bench(config: DictConfig, line: CommandLine) -> None:
    """Measures a server as the configuration says, prints what was measured and writes every request."""
    resolved = plain(config, resolve=True)
    mode = resolved["mode"]
    if mode not in ("requests", "programs"):
        raise complaint("mode", shown(mode), among(mode, ("requests", "programs")))
    refuse_missing({key: value for key, value in resolved.items() if key != "workload" or mode == "programs"})
    out = output_path("out", config.out, "the name of a file, such as bench.jsonl")
    if not isinstance(resolved["dry_run"], bool):
        raise complaint("dry_run", shown(resolved["dry_run"]), "true or false")
    keys = {key: value for key, value in resolved.items() if key not in _OF_COMMAND}
    settings = check_settings({"model": keys.pop("model_name"), **keys})
    console = make_console()
    programs = build_programs(resolved["workload"]) if mode == "programs" else []
    if resolved["dry_run"]:
        console.print(describe(programs) if mode == "programs" else str(make_plan(settings)), highlight=False)
        return
    with _Bar(console, str(out)) as bar:
        if mode == "programs":
            recording, notes = asyncio.run(play(programs, settings, resolved["workload"], bar))
        else:
            recording, notes = asyncio.run(measure(settings, bar))
    console.print(program_table(recording) if mode == "programs" else cell_table(recording))
    for note in (*faults(recording), *notes):
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(f"records {out}", highlight=False, soft_wrap=True)
    _refuse_failed(recording)


class _Bar(Listener):
    """The plan on stdout, and a progress bar on stderr where that is a terminal."""

    def __init__(self, console: Console, out: str) -> None:
        self._console = console
        self._out = out
        terminal = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[failed]}"),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
            refresh_per_second=2,
        )
        self._task = self._progress.add_task("requests", total=None, failed="")
        self._total = self._done = self._failed = 0

    def begin(self, plan: str, requests: int, done: int) -> None:
        """See `Listener`."""
        self._console.print(plan, highlight=False)
        if done:
            self._console.print(f"{done:,} of them are done", highlight=False)
        self._total, self._done = requests, done
        self._progress.update(self._task, total=requests, completed=done)

    def record(self, record: Any) -> None:
        """See `Listener`."""
        if record.warmup:
            return
        self._done += 1
        self._failed += record.error is not None
        failed = f"{self._failed} failed" if self._failed else ""
        self._progress.update(self._task, completed=self._done, failed=failed)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._progress.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._done:
            print(f"{self._done} of {self._total} requests are in {self._out}", file=sys.stderr)


def _refuse_failed(recording: Recording) -> None:
    """Ends with an error where nothing was measured."""
    measured = [record for record in recording.requests if not record.warmup]
    if measured and all(record.error is not None for record in measured):
        first = measured[0]
        raise InputError(
            f"url {recording.about['url']}: all {len(measured)} requests failed, the first with "
            f"{first.error} ({first.error_detail})"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    `model` is also a config group, where Hydra would look for an option; so here `model=NAME` stands for
    `model_name=NAME`.
    """
    given = sys.argv[1:] if arguments is None else arguments
    renamed = [re.sub(r"^model=", "model_name=", argument) for argument in given]
    return run_command(run_bench, "bench", renamed)


if __name__ == "__main__":
    sys.exit(main())
