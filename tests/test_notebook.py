"""The notebooks run from top to bottom on a tiny cube."""

import functools
from pathlib import Path

import pytest

from agentjax.cluster import Cluster
from agentjax.policies import Policy
from agentjax.sweep import sweep
from agentjax.workloads import swebench

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]


def test_first_cube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweep(
        functools.partial(swebench, programs=4, calls_median=3.0, calls_max=5),
        Cluster(),
        Policy(),
        grid={"retention": ["lru", "ttl"], "scheduling": ["fcfs", "plas"], "seed": [0, 1, 2]},
        out=tmp_path,
        lanes_per_tile=4,
    )
    monkeypatch.setenv("AGENTJAX_CUBE", str(tmp_path / "cube.zarr"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "notebooks" / "01_first_cube.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert not [output for output in outputs if output.output_type == "error"]
