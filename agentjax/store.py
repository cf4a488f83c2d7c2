"""Datasets on disk as Zarr stores."""

import hashlib
import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


def save_dataset(dataset: "xr.Dataset", path: Path) -> bool:
    """Writes a dataset as a Zarr store (format 3, consolidated metadata); the store at `path` is always
    whole.

    Returns:
        False where the store at `path` has the same bytes already, and was left alone.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
            dataset.to_zarr(partial, mode="w", zarr_format=3, consolidated=True)
        if path.exists() and tree_digest(path) == tree_digest(partial):
            return False
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        if path.exists():
            os.replace(path, old)
        os.replace(partial, path)
        shutil.rmtree(old, ignore_errors=True)
        return True
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
