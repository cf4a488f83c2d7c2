"""Values of `conf/calibrate.yaml`, checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentjax.config.paths import output_path
from agentjax.errors import complaint, shown

_TEXTS = ("gpu", "model", "engine")
_COUNTS = ("gpus", "tensor_parallel")


def coefficient_path(value: Any) -> Path | None:
    """Where the coefficients go; None: nowhere.

    Raises:
        InputError: no name of a JSON file, or a place where nothing can be written.
    """
    expected = "the name of a JSON file, such as my_server.json"
    out = output_path("out", value, expected)
    if out and out.suffix != ".json":
        raise complaint(f"out={out}", f"the ending {out.suffix!r}", expected)
    return out


def whole(key: str, value: Any, least: int) -> int:
    """An integer from `least`.

    Raises:
        InputError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise complaint(key, shown(value), f"an integer from {least}")
    return value


def seconds(key: str, value: Any) -> float | None:
    """A number of seconds, or null.

    Raises:
        InputError: anything else.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e3:
        raise complaint(key, shown(value), "null or a number of seconds from 0")
    return float(value)


def about(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of hardware, model and engine, without what is null.

    Raises:
        InputError: a number for a text, or the other way round.
    """
    stated = {key: given[key] for key in (*_TEXTS, *_COUNTS) if given[key] is not None}
    for key, value in stated.items():
        if key in _COUNTS:
            whole(f"about.{key}", value, 1)
        elif not isinstance(value, str) or not value:
            raise complaint(f"about.{key}", shown(value), "null or text")
    return stated
