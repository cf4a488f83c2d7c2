"""Finished runs on disk: a tile holds the results of a few configurations and appears whole or not at all."""

import dataclasses
import functools
import hashlib
import inspect
import io
import marshal
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agentjax.errors import complaint
from agentjax.results import Record
from agentjax.store import replacing
from agentjax.version import package_version


@functools.cache
def source_digest() -> str:
    """Digest of the package's source: results of another checkout of the same version are other results."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(package_version().encode())
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint(*parts: Any) -> str:
    """Digest of everything that a result depends on: the source and the content of the given objects."""
    digest = hashlib.sha256(source_digest().encode())
    for part in parts:
        _feed(digest, part)
    return digest.hexdigest()


def _feed(digest: Any, part: Any) -> None:
    if isinstance(part, str | int | float | bool | None):
        digest.update(f"{type(part).__name__}:{part!r};".encode())
    elif isinstance(part, Mapping):
        digest.update(f"mapping {len(part)};".encode())
        for key, value in part.items():
            _feed(digest, key)
            _feed(digest, value)
    elif isinstance(part, tuple | list):
        digest.update(f"sequence {len(part)};".encode())
        for item in part:
            _feed(digest, item)
    elif dataclasses.is_dataclass(part):
        digest.update(f"{type(part).__module__}.{type(part).__qualname__};".encode())
        for field in dataclasses.fields(part):
            _feed(digest, field.name)
            _feed(digest, getattr(part, field.name))
    elif inspect.isfunction(part):
        digest.update(f"{part.__module__}.{part.__qualname__};".encode())
        digest.update(_code(part))
        _feed(digest, [cell.cell_contents for cell in part.__closure__ or ()])
    elif isinstance(part, functools.partial):
        _feed(digest, [part.func, part.args, part.keywords])
    else:
        array = np.asarray(part)
        if array.dtype.hasobject:
            raise TypeError(f"cannot take the digest of {type(part).__name__}")
        digest.update(f"{array.dtype.str}{array.shape};".encode())
        digest.update(np.ascontiguousarray(array).tobytes())


def _code(function: Any) -> bytes:
    """The source of a function, or its compiled form where there is no source, as after `exec`."""
    try:
        return inspect.getsource(function).encode()
    except OSError:
        return marshal.dumps(function.__code__)


class Tiles:
    """The tiles in one folder.

    A tile is written beside its place and moved there when complete, so that a run that is killed leaves
    whole tiles only; the file is named after the configurations in it.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def prepare(self) -> None:
        """Makes the folder.

        Raises:
            InputError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise complaint(
                f"output folder {self.folder.parent}",
                (error.strerror or "an error").lower(),
                "a folder to write to",
            ) from error

    def load(self) -> dict[str, Record]:
        """All finished results, by fingerprint; a file that cannot be read counts as not there."""
        records: dict[str, Record] = {}
        for path in sorted(self.folder.glob("*.npz")):
            try:
                with np.load(path, allow_pickle=False) as tile:
                    records |= _unstack({name: tile[name] for name in tile.files})
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
                continue
        return records

    def save(self, records: Mapping[str, Record]) -> Path:
        """Writes one tile.

        Raises:
            InputError: the disk is full, or the folder cannot be written to; the other tiles remain.
        """
        name = hashlib.sha256("".join(sorted(records)).encode()).hexdigest()[:16]
        path = self.folder / f"{name}.npz"
        with replacing(path) as partial, open(partial, "wb") as file:
            file.write(_archive(_stack(records)))
            file.flush()
            os.fsync(file.fileno())
        return path


def _stack(records: Mapping[str, Record]) -> dict[str, np.ndarray]:
    names: Iterable[str] = next(iter(records.values()))
    arrays = {"fingerprint": np.array(list(records))}
    for name in names:
        values = [np.asarray(record[name]) for record in records.values()]
        if values[0].ndim:
            arrays[f"length of {name}"] = np.array([len(value) for value in values])
            longest = max(len(value) for value in values)
            values = [
                np.concatenate([value, np.full(longest - len(value), value.dtype.type())]) for value in values
            ]
        arrays[name] = np.stack(values)
    return arrays


def _unstack(arrays: Mapping[str, np.ndarray]) -> dict[str, Record]:
    records: dict[str, Record] = {}
    for row, key in enumerate(arrays["fingerprint"]):
        record: Record = {}
        for name, values in arrays.items():
            if name == "fingerprint" or name.startswith("length of "):
                continue
            value = values[row]
            record[name] = value[: arrays[f"length of {name}"][row]] if value.ndim else value.item()
        records[str(key)] = record
    return records


def _archive(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An .npz archive without the time of writing, so that equal results are equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            archive.writestr(
                zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)),
                content.getvalue(),
                zipfile.ZIP_DEFLATED,
            )
    return buffer.getvalue()
