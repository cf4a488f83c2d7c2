"""Errors of Hydra and OmegaConf as one sentence: where, what was found, what is expected."""

from collections.abc import Callable, Mapping
from typing import Any

import yaml
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from agentjax.errors import InputError, among, complaint

FOREIGN = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""What composing a configuration raises when the configuration, not the program, is at fault."""


def no_value(key: str) -> InputError:
    """The sentence for a key without a value."""
    return complaint(key, "no value", f"one on the command line ({key}=VALUE) or in the configuration")


def translate(error: Exception, without: Callable[[str], Mapping[str, Any] | None]) -> InputError:
    """The sentence for an error raised while composing.

    Args:
        error: an instance of `FOREIGN`.
        without: composes again without the overrides of the given key; None where that fails too. It tells
            which keys the configuration has.
    """
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, OverrideParseException):
        problem = error.message.splitlines()[1] if len(error.message.splitlines()) > 1 else error.message
        return complaint(
            f"argument {error.override!r}",
            f"a form that cannot be read ({problem})",
            "KEY=VALUE or GROUP=OPTION",
        )
    if isinstance(error, yaml.YAMLError):
        return _malformed(error)
    if isinstance(error, MissingMandatoryValue):
        key = str(error.full_key) or str(error).rsplit(" ", 1)[-1]
        return no_value(key)
    text = str(error)
    if text.startswith("Ambiguous value for argument"):
        argument = text.splitlines()[0].split("'")[1]
        key, _, values = argument.partition("=")
        return complaint(
            f"argument {argument!r}", "several values", f"one; to sweep over them: grid.axes.{key}=[{values}]"
        )
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        return _unknown_key(str(cause.full_key), without)
    if "No match in the defaults list" in text:
        group = text.split("'")[1]
        return complaint(f"argument {group!r}", "a group that has no default", f"+{group}=OPTION to add it")
    key = getattr(cause, "full_key", None)
    problem = str(cause if isinstance(cause, OmegaConfBaseException) else error).strip().splitlines()[0]
    return InputError(f"configuration{f' {key}' if key else ''}: {problem}")


def unknown_key(key: str, config: Mapping[str, Any]) -> InputError:
    """The sentence for a dotted key that a configuration does not have."""
    parent, parts = config, key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(parent, Mapping):
            where = ".".join(parts[:depth])
            return complaint(where, f"a value, which has no key {part!r}", f"{where}=VALUE")
        if part not in parent:
            where = f"key {key!r}"
            place = f" under {'.'.join(parts[:depth])}" if depth else ""
            name = parent.get("name")
            option = f" ({parts[0]}={name})" if depth and isinstance(name, str) else ""
            expected = among(part, parent.keys())
            if option and len(parent) == 1:
                expected = f"another option of {parts[0]}, as {name} has no parameters"
            return complaint(where, f"no {part!r}{place}{option}", expected)
        parent = parent[part]
    return complaint(f"key {key!r}", "a value that cannot be set", "another key")


def _unknown_key(key: str, without: Callable[[str], Mapping[str, Any] | None]) -> InputError:
    config = without(key)
    if config is None:
        return complaint(
            f"key {key!r}", "nothing of that name in the configuration", "a key that --cfg job prints"
        )
    return unknown_key(key, config)


def _missing(error: MissingConfigException) -> InputError:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if group and error.options:
        return complaint(group, repr(option), among(option, error.options))
    return InputError(f"configuration: {str(error).strip().splitlines()[0]}")


def _malformed(error: yaml.YAMLError) -> InputError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    place = f"{mark.name}, line {mark.line + 1}" if mark else "configuration"
    return complaint(place, f"no valid YAML ({problem})", "keys and values")
