"""Files and folders that a command is asked to write."""

import os
from pathlib import Path
from typing import Any

from agentjax.errors import complaint, shown


def output_path(key: str, value: Any, expected: str) -> Path | None:
    """The path that a configuration key names; None where it names none.

    Raises:
        InputError: no text, or a place where nothing can be written.
    """
    if value is None or value is False or value == "":
        return None
    if not isinstance(value, str):
        raise complaint(key, shown(value), expected)
    path = Path(value)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise complaint(f"{key}={value}", f"the file {above}", "a folder there")
    if not os.access(above, os.W_OK):
        raise complaint(f"{key}={value}", f"no permission to write to {above}", "a folder to write to")
    return path
