"""The command: a recording in, a file that the simulator reads out; bad input is one sentence."""

import dataclasses
import hashlib
import json
from pathlib import Path

import jax
import pytest

from agentjax.calibrate.__main__ import main
from agentjax.calibrate.write import stated
from agentjax.config import run_command
from agentjax.config.compose import Groups, plain
from agentjax.config.files import with_performance_file
from agentjax.errors import InputError
from agentjax.performance import Piecewise, load
from agentjax.performance.load import read
from agentjax.performance.valid import ranges_of
from agentjax.records import Recording
from agentjax.simulate.__main__ import main as simulate
from agentjax.sweep.grid import expand
from tests.recordings import MODEL, record

jax.config.update("jax_enable_x64", True)


def write(path: Path, recording: Recording, **about) -> Path:
    header = {"agentjax_bench": 1, "version": "0.1.0", "mode": "requests", "url": "http://127.0.0.1:1"}
    header |= {"model": "a-model", "server": "a-server", "started": "2026-11-29T23:00:00+00:00", "seed": 0}
    lines = [{**header, "config": {}, **about}, *map(dataclasses.asdict, recording.requests)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Path:
    cells = [(n, 30, c, share) for n in (32, 512) for c in (1, 2, 4) for share in (0.0, 0.5)]
    recording = record(MODEL, cells, repeats=2, server_times=True, stagger_s=0.05)
    return write(tmp_path_factory.mktemp("bench") / "bench.jsonl", recording)


@pytest.fixture(scope="module")
def calibrated(bench: Path) -> Path:
    out = bench.with_name("my_server.json")
    arguments = [f"data={bench}", f"out={out}", f"figure={out.with_name('fit.png')}", "about.gpu=RTX 4090"]
    assert main(arguments) == 0
    return out


def test_the_file_says_where_it_comes_from(bench: Path, calibrated: Path):
    file = read(calibrated)
    assert (file.form, file.gpu, file.model, file.engine) == ("piecewise", "RTX 4090", "a-model", "a-server")
    (source,) = file.inputs
    assert source.sha256 == hashlib.sha256(bench.read_bytes()).hexdigest()
    assert (source.file, source.measured) == ("bench.jsonl", "2026-11-29")
    assert file.software is not None
    assert file.software.seed == 0
    assert [rung.chosen for rung in file.ladder].count(True) == 1
    assert file.valid["sequences"].high == 4
    assert file.valid["tokens"].high >= 512
    assert file.valid["context tokens before a chunk"].high == 512
    assert set(file.intervals) >= {"decode_s", "prefill_tok_s", "wakeup_s"}
    assert all(abs(row.median_pct) < 3 for row in file.residuals.values())
    assert [path.name for path in calibrated.parent.iterdir() if "partial" in path.name] == []
    assert calibrated.with_name("fit.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_given_goes_before_what_files_say():
    recording = Recording((), {"model": "a-model", "server": "a-server"})
    base = {"model": "another", "gpu": "A", "gpus": 2, "method": "by hand"}
    assert stated({"gpu": "B"}, [recording], base) == {
        "gpu": "B", "gpus": 2, "model": "another", "tensor_parallel": 1, "engine": "a-server",
    }  # fmt: skip


def test_the_model_is_the_server(calibrated: Path):
    model = load(calibrated)
    assert isinstance(model, Piecewise)
    assert ranges_of(model) is not None
    assert float(model.wakeup_s) == pytest.approx(3e-3, rel=0.01)
    assert float(model.prefill_tok_ns) == pytest.approx(1e6, rel=0.1)


def test_the_same_recording_gives_the_same_file(bench: Path, calibrated: Path, tmp_path: Path, capsys):
    again = tmp_path / "again.json"
    assert main([f"data=[{bench}]", f"out={again}", "about.gpu=RTX 4090"]) == 0
    one, other = (json.loads(path.read_text()) | {"fitted": "today"} for path in (again, calibrated))
    assert json.dumps(one) == json.dumps(other)
    printed = capsys.readouterr().out
    for part in (
        "observations:",
        "left out:",
        "held out",
        "decodes and prompts apart",
        "decode_s, 1",
        "95 %",
    ):
        assert part in printed


def test_a_file_stands_for_a_performance_option(calibrated: Path, tmp_path: Path, monkeypatch, capsys):
    odd = tmp_path / "it's my server.json"
    odd.write_bytes(calibrated.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert simulate(["--cfg", "job", f"performance={odd.name}"]) == 0
    printed = capsys.readouterr().out
    assert "performance:\n  coefficients: it's my server.json" in printed


def test_files_can_be_an_axis_of_a_grid(calibrated: Path, tmp_path: Path, capsys):
    other = tmp_path / "other.json"
    other.write_bytes(calibrated.read_bytes())
    known = "rtx_pro_6000_llama_70b_tp2"
    found: list[str] = []

    def task(config, line):
        grid = expand(plain(config), line.axes, Groups(line.overrides), lambda point: point)
        found.extend(config["performance"]["coefficients"] for config in grid.configs)

    axis = f"grid.axes.performance=['{calibrated}','{other}',{known}]"
    assert run_command(task, "sweep", [f"performance={other}", axis], has_grid=True) == 0
    assert found[:2] == [str(calibrated), str(other)]
    assert "rtx-pro-6000" in found[2]
    assert run_command(task, "sweep", ["grid.axes.performance=[none.json]"], has_grid=True) == 2
    assert "performance=none.json: found no such file" in capsys.readouterr().err


def test_only_a_path_is_taken_for_a_file(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text("{}")
    kept = ["performance=affine", "performance.coefficients=b.json", "workload.path=a.json", "-cd", "x"]
    assert with_performance_file([*kept, f"performance={path}"]) == [
        *kept, "performance=file", f"performance.coefficients='{path}'",
    ]  # fmt: skip
    with pytest.raises(
        InputError, match=r"^performance=none\.json: found no such file, expected a coefficient"
    ):
        with_performance_file(["performance=none.json"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "data: found no value"),
        (["data=none.jsonl"], "none.jsonl"),
        (["data=3"], "data: found 3, expected a file of recorded requests, or a list"),
        (["data=[]"], "data: found an empty list"),
        (["data=BENCH", "method=guess"], 'method: found "guess", expected one of optax, cma_es'),
        (["data=BENCH", "out=a.yaml"], "out=a.yaml: found the ending '.yaml', expected the name of"),
        (["data=BENCH", "figure=a.gif"], "expected one of .png, .svg, .pdf"),
        (["data=BENCH", "max_num_batched_tokens=0"], "max_num_batched_tokens: found 0"),
        (["data=BENCH", "overhead_s=-1"], "overhead_s: found -1, expected null or a number of seconds"),
        (["data=BENCH", "wakeup_s=soon"], 'wakeup_s: found "soon"'),
        (["data=BENCH", "seed=x"], 'seed: found "x", expected an integer from 0'),
        (["data=BENCH", "about.gpus=0"], "about.gpus: found 0, expected an integer from 1"),
        (["data=BENCH", "about.gpu=3"], "about.gpu: found 3, expected null or text"),
        (["data=BENCH", "about.gpo=3"], "(closest: gpu)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments, message, bench: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([argument.replace("BENCH", str(bench)) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_recording_without_single_prompts_says_so(tmp_path: Path, capsys):
    path = write(tmp_path / "bench.jsonl", record(MODEL, [(64, 20, 2, 0.0)], repeats=1))
    assert main([f"data={path}"]) == 2
    printed = capsys.readouterr()
    assert "expected requests sent one at a time" in printed.err
    assert "observations:" in printed.out
    assert "left out:" in printed.out
