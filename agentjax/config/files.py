"""Coefficient files that stand for an option of the group `performance`: `performance=my_server.json`."""

import re
from collections.abc import Sequence
from pathlib import Path

from agentjax.errors import complaint

_PERFORMANCE = re.compile(r"performance=(?P<quote>['\"]?)(?P<path>.*\.json)(?P=quote)")
FILE = "performance=file"
COEFFICIENTS = "performance.coefficients"


def with_performance_file(arguments: Sequence[str]) -> list[str]:
    """The arguments with `performance=PATH.json` as the option `file` of the group, which Hydra can compose.

    Raises:
        InputError: no such file.
    """
    out = []
    for argument in arguments:
        match = _PERFORMANCE.fullmatch(argument)
        if match is None:
            out.append(argument)
            continue
        out += file_overrides(match["path"])
    return out


def file_overrides(path: str) -> list[str]:
    """The overrides that make a file the model of performance: the option `file` with its path.

    Raises:
        InputError: no such file.
    """
    if not Path(path).is_file():
        raise complaint(
            f"performance={path}", "no such file", "a coefficient file, as agentjax.calibrate writes it"
        )
    quoted = path.replace("'", "\\'")
    return [FILE, f"{COEFFICIENTS}='{quoted}'"]
