"""Reading JSON from files: whole documents and lines, each with its place for a complaint."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agentjax.errors import InputError, complaint, from_validation, shown

Model = TypeVar("Model", bound=BaseModel)

WHOLE = "one whole JSON object"


class Part(BaseModel):
    """A part of another tool's file: the fields that are read, among others that are not."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def read_bytes(path: str | Path) -> bytes:
    """The content of a file, plain or gzip.

    Raises:
        InputError: a file that is absent, cannot be read, or holds damaged gzip data.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise complaint(str(path), "no such file", "a recording of a benchmark") from None
    except OSError as error:
        found = f"a file that cannot be read ({error.strerror or error})"
        raise complaint(str(path), found, "a recording of a benchmark") from None
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise complaint(str(path), "damaged gzip data", "a complete gzip file") from None


def lines(path: str | Path, *, may_break_off: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON Lines file with their places ("file, line 3"); blank lines are skipped.

    Args:
        path: the file.
        may_break_off: leave out a last line that has no end and is no JSON, as a killed writer leaves it.

    Raises:
        InputError: a line that is not one JSON object.
    """
    content = read_bytes(path).split(b"\n")
    for number, line in enumerate(content, 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", parse(line, f"{path}, line {number}")
            except _Broken:
                if not (may_break_off and number == len(content)):
                    raise


def parse(text: bytes, where: str, expected: str = WHOLE) -> dict[str, Any]:
    """The JSON object in a text, of which a complaint says that `expected` is expected.

    Raises:
        InputError: anything else, named with its place.
    """
    try:
        made = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise _Broken(str(complaint(where, "bytes that are not UTF-8", expected))) from None
    except json.JSONDecodeError as error:
        place = where if error.lineno == 1 else f"{where}, line {error.lineno}"
        raise _Broken(
            str(complaint(place, f"broken JSON at column {error.colno} ({error.msg})", expected))
        ) from None
    except _Repeated as error:
        found = f"the field {shown(str(error))} twice in one object"
        raise complaint(where, found, "each field once") from None
    except (ValueError, RecursionError) as error:
        raise complaint(where, f"JSON that cannot be read ({type(error).__name__})", expected) from None
    if not isinstance(made, dict):
        raise complaint(where, shown(made), "an object")
    return made


def validated(model: type[Model], value: Any, where: str) -> Model:
    """A value as a model.

    Raises:
        InputError: the first field that does not fit, with its place.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error, where, {}) from None


class _Broken(InputError):
    """Text that is no JSON, as opposed to JSON of another form."""


class _Repeated(ValueError):
    """A field that an object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(next(name for name in names if names.count(name) > 1))
    return made
