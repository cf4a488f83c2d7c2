"""One run from a file: the function, and the command with its table, dataset and figure."""

from pathlib import Path

import numpy as np
import pytest

import agentjax as ajx
from agentjax.simulate.__main__ import main
from agentjax.sweep import open_cube

PROGRAMS = """\
{"program": "a", "arrival_s": 2.0, "prefix": {"name": "system", "tokens": 1000}, "calls": [\
{"new_tokens": 842, "output_tokens": 133, "tool": "bash", "tool_s": 0.5}, \
{"new_tokens": 512, "output_tokens": 77, "kept_tokens": 1975, "tool": null, "tool_s": 0}]}
{"program": "b", "arrival_s": 2.5, "prefix": {"name": "system", "tokens": 1000}, "calls": [\
{"new_tokens": 100, "output_tokens": 1, "tool": null, "tool_s": 0}]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "programs.jsonl"
    path.write_text(PROGRAMS)
    return path


def test_the_dataset_of_a_run(file: Path):
    run = ajx.simulate(ajx.read_workload(str(file)), ajx.Cluster())
    assert run.program.values.tolist() == ["a", "b"]
    assert run.program_of_call.values.tolist() == [0, 0, 1]
    order = np.stack([run[name] for name in ("released_s", "scheduled_s", "first_token_s", "finished_s")])
    assert (np.diff(order, axis=0) >= 0).all()
    assert run.released_s[0].item() == 2.0
    assert run.released_s[1].item() == pytest.approx(run.finished_s[0].item() + 0.5)
    assert run.cached_tokens.values.tolist() == [0, 1968, 992]
    assert run.makespan_s.item() == pytest.approx(run.program_finished_s.max().item() - 2.0)
    assert run.busy_s.item() == pytest.approx(run.utilization.item() * run.makespan_s.item())
    assert run.attrs["status"] == "completed"
    assert all(variable.attrs["long_name"] for variable in run.data_vars.values())


def test_the_command_writes_what_it_is_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(file.parent)
    workload = ["workload=file", "workload.path=programs.jsonl"]
    assert main([*workload, "cluster.max_num_batched_tokens=8192", "out=a.zarr", "figure=a.png"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "2 of 2 programs completed" in out
    assert "JCT (s)" in out
    assert sorted(path.name for path in file.parent.iterdir()) == ["a.png", "a.zarr", "programs.jsonl"]
    expected = ajx.simulate(ajx.read_workload(str(file)), ajx.Cluster())
    assert open_cube(file.parent / "a.zarr").identical(expected)
