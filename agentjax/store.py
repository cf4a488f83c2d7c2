"""Datasets on disk as Zarr stores."""

import contextlib
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from agentjax.errors import complaint

if TYPE_CHECKING:
    import xarray as xr


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside `path` for the file or folder that is to stand there; it is moved there when complete.

    Whatever fails, what stood at `path` stands there still, and nothing else is left.

    Raises:
        InputError: the disk is full, or something else that the operating system does not allow.
    """
    partial, old = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("partial", "old"))
    above = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        yield partial
        if partial.exists():
            if path.is_dir():
                os.replace(path, old)
            try:
                os.replace(partial, path)
            except OSError:
                if old.exists():
                    os.replace(old, path)
                raise
    except BaseException as error:
        _remove(partial)
        for folder in above:  # made for nothing
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            reason = (error.strerror or str(error) or "an error").lower()
            raise complaint(str(path), reason, "a place to write to, with room") from error
        raise
    finally:
        _remove(old)


def _remove(path: Path) -> None:
    """Takes a file or folder away, if there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def save_dataset(dataset: "xr.Dataset", path: Path) -> bool:
    """Writes a dataset as a Zarr store (format 3, consolidated metadata); the store at `path` is always
    whole.

    Returns:
        False where the store at `path` has the same bytes already, and was left alone.

    Raises:
        InputError: the disk is full, or the place cannot be written to; nothing is left there.
    """
    with replacing(path) as partial:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
            dataset.to_zarr(partial, mode="w", zarr_format=3, consolidated=True)
        same = path.exists() and tree_digest(path) == tree_digest(partial)
        if same:
            shutil.rmtree(partial)
    return not same


def tree_digest(path: Path) -> str:
    """Digest of all files below a folder: their relative names and bytes."""
    digest = hashlib.sha256()
    for file in sorted(
        (file for file in path.rglob("*") if file.is_file()),
        key=lambda file: file.relative_to(path).as_posix(),
    ):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(path).as_posix()} {len(content)};".encode())
        digest.update(content)
    return digest.hexdigest()


def open_dataset(path: Path) -> "xr.Dataset":
    """Reads a dataset into memory."""
    import xarray as xr

    return xr.open_zarr(path, consolidated=True).load()
