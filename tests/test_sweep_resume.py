"""A killed sweep loses no finished tile, and its cube is that of an undisturbed run, byte for byte."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agentjax.sweep.cube import tree_digest
from agentjax.sweep.tiles import Tiles, cut, fingerprint

DRIVER = """
import sys, time
import agentjax.engine.run as engine
from tests.stub_engine import stub_run_lanes

log, pause = sys.argv[1], float(sys.argv[2])

def slow(workloads, lanes, **keywords):
    time.sleep(pause)
    outcome = stub_run_lanes(workloads, lanes, **keywords)
    with open(log, "a") as file:
        file.write(f"{len(lanes)}\\n")
    return outcome

engine.run_lanes = slow
from agentjax.sweep.__main__ import main
sys.exit(main(sys.argv[3:]))
"""
"""The command with an engine that takes its time and counts its lanes."""
ARGUMENTS = [
    "grid.axes.retention=[lru,ttl,pin]",
    "grid.axes.workload.seed=[0,1,2,3]",
    "workload.programs=3",
    "workload.calls_median=3",
    "workload.calls_max=4",
    "execution.lanes_per_tile=2",
    "figure=false",
    "out=out",
]


def start(folder: Path, *extra: str, pause: float = 0.0) -> subprocess.Popen:
    """The command in a folder of its own."""
    folder.mkdir(exist_ok=True)
    root = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder / "log"), str(pause), *ARGUMENTS, *extra],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": root, "AGENTJAX_CACHE_DIR": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    """What the command printed; it must end well."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def lanes(folder: Path) -> list[int]:
    """Lanes of each call of the engine."""
    log = folder / "log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(folder))
    assert sum(lanes(folder)) == 12
    return folder


def test_killed_and_run_again(tmp_path: Path, undisturbed: Path):
    process = start(tmp_path, pause=0.5)
    tiles = tmp_path / "out" / "tiles"
    deadline = time.monotonic() + 60
    while len(list(tiles.glob("*.npz"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    kept = {path.name: path.read_bytes() for path in tiles.glob("*.npz")}
    assert 2 <= len(kept) < 6
    assert not (tmp_path / "out" / "cube.zarr").exists()
    (tmp_path / "log").unlink()

    finish(start(tmp_path))
    assert sum(lanes(tmp_path)) == 12 - 2 * len(kept)
    assert {name: (tiles / name).read_bytes() for name in kept} == kept
    assert tree_digest(tmp_path / "out" / "cube.zarr") == tree_digest(undisturbed / "out" / "cube.zarr")


def test_a_finished_sweep_only_reads(undisturbed: Path):
    def state() -> dict[str, int]:
        paths = (undisturbed / "out").rglob("*")
        return {str(path): path.stat().st_mtime_ns for path in paths}

    before, count = state(), len(lanes(undisturbed))
    out = finish(start(undisturbed))
    assert state() == before
    assert len(lanes(undisturbed)) == count
    assert "were finished before" in out


def test_a_larger_grid_keeps_what_is_finished(tmp_path: Path):
    finish(start(tmp_path))
    finish(start(tmp_path, "grid.axes.workload.seed=[0,1,2,3,4]"))
    assert sum(lanes(tmp_path)) == 12 + 3


def test_another_configuration_is_another_result(tmp_path: Path):
    finish(start(tmp_path))
    finish(start(tmp_path, "cluster.kv_blocks=7000"))
    assert sum(lanes(tmp_path)) == 24


def test_damaged_tiles_are_computed_again(tmp_path: Path, undisturbed: Path):
    finish(start(tmp_path))
    tiles = sorted((tmp_path / "out" / "tiles").glob("*.npz"))
    tiles[0].write_bytes(tiles[0].read_bytes()[:100])
    (tmp_path / "out" / "tiles" / ".other.partial").write_bytes(b"left by a killed run")
    (tmp_path / "log").unlink()
    finish(start(tmp_path))
    assert lanes(tmp_path) == [2]
    assert tree_digest(tmp_path / "out" / "cube.zarr") == tree_digest(undisturbed / "out" / "cube.zarr")


def test_tiles_give_back_what_they_were_given(tmp_path: Path):
    records = {
        "a": {"jct": np.array([1.0, 2.0, 3.0]), "jct_mean": 2.0, "completed": 3, "load_regime": "stable"},
        "b": {"jct": np.array([4.0]), "jct_mean": float("nan"), "completed": 1, "load_regime": "overloaded"},
    }
    tiles = Tiles(tmp_path)
    path = tiles.save(records)
    content = path.read_bytes()
    back = tiles.load()
    assert back.keys() == records.keys()
    for key, record in records.items():
        np.testing.assert_array_equal(back[key]["jct"], record["jct"])
        np.testing.assert_equal({**back[key], "jct": 0}, {**record, "jct": 0})
    assert tiles.save(records).read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("count", "size", "sizes"), [(0, 4, []), (3, 4, [3]), (9, 4, [3, 3, 3]), (8, 4, [4, 4])]
)
def test_parts_are_even(count: int, size: int, sizes: list[int]):
    parts = cut(list(range(count)), size)
    assert [len(part) for part in parts] == sizes
    assert [item for part in parts for item in part] == list(range(count))


def test_fingerprints_depend_on_content_only():
    values = {"a": np.arange(3), "b": [1, 2.0, "x", None]}
    assert fingerprint(values) == fingerprint({"a": np.arange(3), "b": [1, 2.0, "x", None]})
    assert fingerprint(values) != fingerprint({"a": np.arange(3.0), "b": [1, 2.0, "x", None]})
    assert fingerprint("1") != fingerprint(1)
    assert fingerprint([1], [2]) != fingerprint([1, 2])
