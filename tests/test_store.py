"""What is written stands whole or not at all, also where the disk is full."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from agentjax import plotting, store
from agentjax.errors import InputError
from agentjax.simulate.__main__ import main as simulate
from agentjax.store import open_dataset, replacing, save_dataset
from agentjax.sweep import command
from agentjax.sweep.__main__ import main as sweep
from agentjax.sweep.tiles import Tiles

SMALL = ["workload.programs=2", "workload.calls_median=2", "workload.calls_max=2"]
GRID = ["grid.axes.scheduling=[fcfs,plas]", *SMALL, "execution.lanes_per_tile=1"]
FULL = "no space left on device, expected a place to write to, with room"


def no_room(*arguments: Any, **keywords: Any) -> None:
    """As the operating system reports a full disk while a file is written: without its name."""
    raise OSError(errno.ENOSPC, "No space left on device")


def break_off(place: Path, error: Exception) -> None:
    """Writes half of a file."""
    with replacing(place) as partial:
        partial.write_text("half")
        raise error


def test_what_stood_there_stays_when_something_fails(tmp_path: Path):
    place = tmp_path / "made" / "result.txt"
    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("a defect")):
        with pytest.raises((InputError, RuntimeError)) as raised:
            break_off(place, error)
        assert not list(tmp_path.iterdir())
        assert isinstance(raised.value, InputError) == isinstance(error, OSError)
    with replacing(place) as partial:
        partial.write_text("whole")
    with pytest.raises(InputError) as error:
        break_off(place, OSError(errno.ENOSPC, "No space left on device"))
    assert str(error.value) == f"{place}: found {FULL}"
    assert [path.read_text() for path in place.parent.iterdir()] == ["whole"]


def test_a_store_is_put_back_when_the_new_one_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "cube.zarr"
    assert save_dataset(xr.Dataset({"a": ("x", np.arange(3))}), path)
    move = store.os.replace

    def refuse(source: Path, target: Path) -> None:
        move(source, target) if ".partial" not in str(source) else no_room()

    monkeypatch.setattr(store.os, "replace", refuse)
    with pytest.raises(InputError):
        save_dataset(xr.Dataset({"a": ("x", np.arange(4))}), path)
    assert open_dataset(path)["a"].values.tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["cube.zarr"]


@pytest.mark.parametrize("kind", ["out=made/result.zarr", "figure=made/jct.png"])
def test_simulate_on_a_full_disk_has_printed_its_table(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(xr.Dataset, "to_zarr", no_room)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", no_room)
    assert simulate([kind, *SMALL]) == 2
    out, err = capsys.readouterr()
    assert "2 of 2 programs completed" in out
    assert err.splitlines()[-1] == f"error: {kind.partition('=')[2]}: found {FULL}"
    assert not list(tmp_path.iterdir())


def test_sweep_on_a_full_disk_keeps_its_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    save, calls = Tiles.save, []

    def second_fails(self: Tiles, records: Any) -> Any:
        calls.append(records)
        if len(calls) == 2:
            monkeypatch.setattr(os, "fsync", no_room)
        return save(self, records)

    with monkeypatch.context() as patch:
        patch.setattr(Tiles, "save", second_fails)
        assert sweep(["out=out", *GRID]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].endswith(f".npz: found {FULL}")
    assert len(list((tmp_path / "out" / "tiles").iterdir())) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiles"]

    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    for target, place in ((command, "cube.zarr"), (plotting, "figure.png")):
        with monkeypatch.context() as patch:
            if target is command:
                patch.setattr(xr.Dataset, "to_zarr", no_room)
            else:
                patch.setattr("matplotlib.figure.Figure.savefig", no_room)
            assert sweep(["out=out", *GRID]) == 2
        out, err = capsys.readouterr()
        assert "plas" in out  # the table comes first
        assert err.splitlines()[-1] == f"error: out/{place}: found {FULL}"
        assert not (tmp_path / "out" / place).exists()
    assert sweep(["out=out", *GRID]) == 0
    assert "all 2 configurations were finished before" in capsys.readouterr().out
