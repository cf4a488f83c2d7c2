"""Entries that come with the package, a YAML file each: GPUs in `conf/hardware`, models in `conf/model`."""

import json
from pathlib import Path
from typing import Any

import yaml

from agentjax.errors import among, complaint

PACKAGE = Path(__file__).resolve().parents[1]
_SUFFIXES = (".json", ".yaml", ".yml")


def folder(kind: str) -> Path:
    """Where the entries of a kind lie: inside the installed package, or beside it in a checkout."""
    inside = PACKAGE / "conf" / kind
    return inside if inside.is_dir() else PACKAGE.parent / "conf" / kind


def available(kind: str) -> tuple[str, ...]:
    """Names of the entries of a kind, `hardware` or `model`."""
    return tuple(sorted(path.stem for path in folder(kind).glob("*.yaml")))


def read_entry(kind: str, name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    """The fields of an entry, and the file they are from.

    **Arguments:**

    - `kind`: `hardware` or `model`.
    - `name_or_path`: a name of the catalogue such as `h100_sxm`, or a path that ends in .json, .yaml or .yml.

    Raises `InputError` for an unknown name, or a file that cannot be read or holds no fields.
    """
    text = str(name_or_path)
    path = Path(name_or_path)
    if path.suffix not in _SUFFIXES:
        if text not in available(kind):
            raise complaint(
                kind, repr(text), f"a path ending in .json or .yaml, or {among(text, available(kind))}"
            )
        path = folder(kind) / f"{text}.yaml"
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or "unreadable file"
        raise complaint(str(path), reason[0].lower() + reason[1:], f"a {kind} file") from None
    except UnicodeDecodeError:
        raise complaint(str(path), "bytes that are not UTF-8", f"a {kind} file") from None
    try:
        fields = json.loads(content) if path.suffix == ".json" else yaml.safe_load(content)
    except json.JSONDecodeError as error:
        raise complaint(f"{path}, line {error.lineno}", "text that is not JSON", error.msg) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise complaint(where, "text that is not YAML", "keys and values") from None
    if not isinstance(fields, dict):
        raise complaint(str(path), "no fields", "an object")
    return str(path), fields
