"""Bad input: one exception, one sentence that says where, what was found and what is expected."""

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError, WrapValidator
from pydantic_core import ErrorDetails, PydanticCustomError


class InputError(ValueError):
    """Input that cannot be used. The message is one sentence: place, what was found, what is expected."""


class OutsideRange(UserWarning):
    """Fitted coefficients are used beyond the range that they were fitted to."""


def complaint(where: str, found: str, expected: str) -> InputError:
    """The sentence every `InputError` is made of."""
    return InputError(f"{where}: found {found}, expected {expected}")


def expecting(phrase: str) -> WrapValidator:
    """Field validator that reports any failure of the type it annotates as "expected `phrase`"."""

    def validate(value: Any, inner: Any) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("expected", "{phrase}", {"phrase": phrase}) from None

    return WrapValidator(validate)


def from_validation(error: ValidationError, where: str, names: Mapping[str, Collection[str]]) -> InputError:
    """The first failure of a validation as an `InputError`; an unknown field goes before all others.

    `names` lists the fields that an object may have, by the name of the field that holds it ("" for the
    outermost).
    """
    failures = sorted(
        error.errors(include_url=False), key=lambda failure: failure["type"] != "extra_forbidden"
    )
    failure = failures[0]
    place = f"{where}, {path}" if (path := _path(failure["loc"])) else where
    match failure["type"]:
        case "extra_forbidden":
            *above, unknown = failure["loc"]
            holder = next((part for part in reversed(above) if isinstance(part, str)), "")
            return complaint(place, "an unknown field", closest(str(unknown), names[holder]))
        case "missing":
            return complaint(place, "nothing", "this field")
        case _:
            return complaint(place, shown(failure["input"]), _expected(failure))


def closest(name: str, known: Collection[str]) -> str:
    """What was probably meant by `name`, for long lists: the closest known name, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else "one of " + ", ".join(sorted(known))


def among(name: object, options: Collection[object]) -> str:
    """`one of a, b, c`, for short lists; with the option closest to what was found, if one is close."""
    texts = [str(option) for option in options]
    listed = f"one of {', '.join(texts)}" if texts else "nothing here"
    near = difflib.get_close_matches(str(name), texts, n=1)
    return f"{listed} (closest: {near[0]})" if near else listed


def shown(value: object) -> str:
    """A value as it would be written in JSON; containers by kind only, long text cut."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _path(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _expected(failure: ErrorDetails) -> str:
    match failure["type"]:
        case "expected":
            return failure["msg"]
        case "model_type" | "dict_type":
            return "an object"
        case "list_type" | "tuple_type":
            return "a list"
        case "too_short":
            return "at least one entry"
        case _:
            return failure["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
