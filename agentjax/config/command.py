"""How a command runs: Hydra composes its configuration; whatever is wrong with it ends as one sentence."""

import contextlib
import errno
import io
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import RangeSweep
from omegaconf import DictConfig, OmegaConf

from agentjax.config.compose import MOST_POINTS, plain, refuse_unknown
from agentjax.config.files import with_performance_file
from agentjax.config.folders import config_folder
from agentjax.config.sentences import FOREIGN, translate
from agentjax.errors import InputError, OutsideRange, complaint

_AXIS = re.compile(r"(?P<sign>\+{0,2}|~)grid\.axes\.(?P<key>[^=]+?)(?:=(?P<values>.*))?", re.DOTALL)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk, which come without the name of a file where a file is written through its handle."""
_DIRECTORY_FLAGS = ("--config-dir", "-cd")


@dataclass
class CommandLine:
    """What a task gets beside its composed configuration.

    Attributes:
        overrides: the arguments that Hydra composed the configuration from.
        axes: grid axes from the command line, by dotted key; None removes the axis.
    """

    overrides: list[str]
    axes: dict[str, list[Any] | None] = field(default_factory=dict)


Task = Callable[[DictConfig, CommandLine], None]


def run_command(
    task: Task, config_name: str, arguments: Sequence[str] | None = None, has_grid: bool = False
) -> int:
    """Runs a task with the configuration composed from the command line.

    Args:
        task: called with the configuration and the command line.
        config_name: name of the root file in the configuration folder.
        arguments: the command line without the program's name; None: that of this process.
        has_grid: the command takes `grid=NAME` and `grid.axes.KEY=[...]`.

    Returns:
        The exit code: 0, 2 after bad input or a file that cannot be used (one line on stderr), 130 after an
        interruption. Anything else that is raised is a defect and is passed on.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(task, config_name, arguments, has_grid)
    except InputError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            raise
        place = "writing" if error.filename is None else error.filename
        print(f"error: {place}: {(error.strerror or 'an error').lower()}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _run(task: Task, config_name: str, arguments: list[str], has_grid: bool) -> None:
    if any(argument in ("-m", "--multirun") for argument in arguments):
        raise complaint(
            "argument --multirun", "a Hydra multirun", "axes of a grid: grid.axes.KEY=[V1,V2,...]"
        )
    folder, arguments = _folders(with_performance_file(arguments))
    axes: dict[str, list[Any] | None] = {}
    if has_grid:
        arguments, axes = _split_axes(arguments)
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    failure: list[BaseException] = []
    started: list[bool] = []
    terminal = sys.stderr
    messages = io.StringIO()

    def guarded(config: DictConfig) -> None:
        started.append(True)
        with contextlib.redirect_stderr(terminal), _warnings_as_lines():
            try:
                own = _own_overrides()
                refuse_unknown(plain(config), own, config_name)
                task(config, CommandLine(own, axes))
            except BaseException as error:  # Hydra would print a line of its own; raised again below
                failure.append(error)

    decorated = hydra.main(config_path=str(folder), config_name=config_name, version_base="1.3")(guarded)
    try:
        with _process_state(arguments), contextlib.redirect_stderr(messages):
            decorated()
    except FOREIGN as error:
        raise translate(
            error, lambda key: _compose_without(folder, config_name, arguments, overrides, key)
        ) from error
    except ValueError as error:
        if started:
            raise
        raise InputError(f"command line: {error}") from error
    except SystemExit as error:
        if error.code in (0, None):
            return
        lines = messages.getvalue().strip().splitlines() or ["unknown argument"]
        raise complaint(
            "command line", lines[-1].rpartition("error: ")[2], "the arguments that --help lists"
        ) from None
    if messages.getvalue():
        terminal.write(messages.getvalue())
    if failure:
        if isinstance(failure[0], FOREIGN):
            raise translate(failure[0], lambda key: None) from failure[0]
        raise failure[0]


def _folders(arguments: list[str]) -> tuple[Path, list[str]]:
    """The folder searched first, and the arguments with the packaged folder as the one searched second.

    Hydra searches `--config-dir` last, so that a file there could not replace a packaged one; here it comes
    first.
    """
    packaged = config_folder()
    kept: list[str] = []
    own: str | None = None
    pending = iter(arguments)
    for argument in pending:
        flag, equals, value = argument.partition("=")
        if flag in _DIRECTORY_FLAGS:
            own = value if equals else next(pending, None)
            if own is None:
                raise complaint(f"argument {flag}", "nothing after it", "a folder")
        else:
            kept.append(argument)
    if own is None:
        return packaged, kept
    if not Path(own).is_dir():
        raise complaint(
            f"--config-dir {own}", "no such folder", "an existing folder with configuration groups"
        )
    return Path(own).resolve(), [*kept, "--config-dir", str(packaged)]


def _split_axes(arguments: list[str]) -> tuple[list[str], dict[str, list[Any] | None]]:
    """Takes `grid.axes.KEY=VALUES` out of the arguments: KEY may hold dots, unlike Hydra's keys."""
    kept: list[str] = []
    axes: dict[str, list[Any] | None] = {}
    for argument in arguments:
        match = _AXIS.fullmatch(argument)
        if match is None:
            kept.append("+" + argument if argument.startswith("grid=") else argument)
        elif match["sign"] == "~":
            axes[match["key"]] = None
        else:
            axes[match["key"]] = _values(argument, match["values"])
    return kept, axes


def _values(argument: str, text: str | None) -> list[Any]:
    """The values of an axis: a list, `a,b`, `range(...)`, `choice(...)` or a single value."""
    if not text:
        raise complaint(f"argument {argument!r}", "no values", "a list such as [1,2,5]")
    try:
        override = OverridesParser.create().parse_override(f"values={text}")
    except FOREIGN as error:
        problem = str(error).strip().splitlines()
        raise complaint(
            f"argument {argument!r}", problem[1] if len(problem) > 1 else problem[0], "a list such as [1,2,5]"
        ) from error
    if override.is_sweep_override():
        if not override.is_discrete_sweep():
            raise complaint(f"argument {argument!r}", "an interval", "a list such as [1,2,5]")
        swept = override.value()
        if isinstance(swept, RangeSweep) and not _length(swept) <= MOST_POINTS:
            raise complaint(f"argument {argument!r}", "too long a range", f"at most {MOST_POINTS:,} values")
        return [getattr(value, "text", value) for value in override.sweep_iterator()]
    value = override.value()
    return value if isinstance(value, list) else [value]


def _length(swept: RangeSweep) -> float:
    """Values of a range; infinite without a step."""
    start, stop, step = float(swept.start or 0), float(swept.stop or 0), float(swept.step)
    return (stop - start) / step if step else math.inf


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Warnings of coefficients used beyond their range as single lines on stderr."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(message: Any, category: Any, *place: Any, **more: Any) -> None:
            if issubclass(category, OutsideRange):
                print("warning:", message, file=sys.stderr)
            else:
                show(message, category, *place, **more)

        warnings.filterwarnings("always", category=OutsideRange)
        warnings.showwarning = show_line
        yield


def _own_overrides() -> list[str]:
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


@contextlib.contextmanager
def _process_state(arguments: list[str]) -> Iterator[None]:
    """The process as Hydra needs it: its arguments, and errors raised instead of printed."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [before[0] if before else "agentjax", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _compose_without(
    folder: Path, config_name: str, arguments: list[str], overrides: list[str], key: str
) -> Mapping[str, Any] | None:
    """The configuration without the overrides of one key, to tell which keys there are."""
    keep = [item for item in overrides if item.lstrip("+~").partition("=")[0] != key]
    if "--config-dir" in arguments:
        second = arguments[arguments.index("--config-dir") + 1]
        keep = [item for item in keep if item != second] + [f"hydra.searchpath=[file://{second}]"]
    try:
        with hydra.initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            config = hydra.compose(config_name, overrides=keep)
        return OmegaConf.to_container(config, resolve=False)  # pyright: ignore[reportReturnType]
    except FOREIGN:
        return None
