"""A killed sweep loses no finished tile, and its cube is that of an undisturbed run, byte for byte."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agentjax.engine.lanes import rounded
from agentjax.policies import Policy, Retain, retention
from agentjax.store import tree_digest
from agentjax.sweep.run import _policy_content
from agentjax.sweep.tiles import Tiles, fingerprint

LANES = 3 * 4 * 3
ARGUMENTS = [
    "grid.axes.retention=[lru,ttl,pin]",
    "grid.axes.scheduling=[fcfs,plas,program_fcfs,sjf]",
    "grid.axes.workload.seed=[0,1,2]",
    "workload.programs=20",
    "workload.calls_median=10",
    "workload.calls_max=20",
    "execution.lanes_per_tile=1",
    "figure=false",
    "out=out",
]


def start(folder: Path, *extra: str) -> subprocess.Popen:
    """The command in a folder of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "agentjax.sweep", *ARGUMENTS, *extra],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> int:
    """Configurations that the command simulated; it must end well."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert re.fullmatch(r"(warning: \S+: durations are extrapolated, .*\n)?", err)  # once, by its contexts
    simulated = re.search(r"^(\d+) of \d+ configurations simulated", out, re.MULTILINE)
    assert simulated is not None or "were finished before" in out
    return int(simulated[1]) if simulated else 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert finish(start(folder)) == LANES
    return folder


@pytest.fixture
def finished(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of a finished sweep."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_killed_and_run_again(tmp_path: Path, undisturbed: Path):
    process = start(tmp_path)
    tiles = tmp_path / "out" / "tiles"
    while len(list(tiles.glob("*.npz"))) < 2 and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    kept = {path.name: path.read_bytes() for path in tiles.glob("*.npz")}
    assert 2 <= len(kept) < LANES
    assert not (tmp_path / "out" / "cube.zarr").exists()

    assert finish(start(tmp_path)) == LANES - len(kept)
    assert {name: (tiles / name).read_bytes() for name in kept} == kept
    assert tree_digest(tmp_path / "out" / "cube.zarr") == tree_digest(undisturbed / "out" / "cube.zarr")


def test_a_finished_sweep_only_reads(undisturbed: Path):
    def state() -> dict[str, int]:
        paths = (undisturbed / "out").rglob("*")
        return {str(path): path.stat().st_mtime_ns for path in paths}

    before = state()
    assert finish(start(undisturbed)) == 0
    assert state() == before


def test_a_larger_grid_keeps_what_is_finished(finished: Path):
    assert finish(start(finished, "grid.axes.workload.seed=[0,1,2,3]")) == 3 * 4


def test_another_configuration_is_another_result(finished: Path):
    assert finish(start(finished, "cluster.kv_blocks=7000")) == LANES


def test_damaged_tiles_are_computed_again(finished: Path, undisturbed: Path):
    tiles = sorted((finished / "out" / "tiles").glob("*.npz"))
    tiles[0].write_bytes(tiles[0].read_bytes()[:100])
    (finished / "out" / "tiles" / ".other.partial").write_bytes(b"left by a killed run")
    assert finish(start(finished)) == 1
    assert tree_digest(finished / "out" / "cube.zarr") == tree_digest(undisturbed / "out" / "cube.zarr")


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


def test_fingerprints_depend_on_content_only():
    values = {"a": np.arange(3), "b": [1, 2.0, "x", None]}
    assert fingerprint(values) == fingerprint({"a": np.arange(3), "b": [1, 2.0, "x", None]})
    assert fingerprint(values) != fingerprint({"a": np.arange(3.0), "b": [1, 2.0, "x", None]})
    assert fingerprint("1") != fingerprint(1)
    assert fingerprint([1], [2]) != fingerprint([1, 2])


def test_fingerprints_of_policies_depend_on_what_they_do(monkeypatch: pytest.MonkeyPatch):
    def keeping(seconds: float):
        def keep(obs, *, scale=1.0):
            return Retain(True, seconds * scale)

        return keep

    monkeypatch.setattr(retention, "members", dict(retention.members))
    digests = set()
    for seconds in (1.0, 2.0):
        retention.register("mine")(keeping(seconds))
        digests.add(fingerprint(_policy_content(Policy(retention="mine"))))
    for seconds in (3.0, 4.0):
        source = f"def f(obs, *, scale=1.0): return Retain(True, {seconds})"
        names: dict = {"Retain": Retain}
        exec(source, names)
        retention.register("mine")(names["f"])
        digests.add(fingerprint(_policy_content(Policy(retention="mine"))))
    assert len(digests) == 4


@pytest.mark.parametrize(("lanes", "count"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (43, 48), (64, 64)])
def test_few_lane_counts_are_compiled(lanes: int, count: int):
    assert rounded(lanes) == count
