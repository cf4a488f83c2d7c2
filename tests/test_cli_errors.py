"""Bad input to the commands: exit code 2, one line on stderr, nothing written."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agentjax.simulate.__main__ import main as simulate
from agentjax.sweep import command
from agentjax.sweep.__main__ import main as sweep

Command = Callable[[Sequence[str] | None], int]
AXIS = "grid.axes.scheduling=[fcfs,plas]"
SWEEP = [
    ([], "found no axes, expected grid=NAME (retention_x_sched) or grid.axes.KEY=[V1,V2,...]"),
    (["grid=nope"], "grid: found 'nope', expected one of retention_x_sched"),
    (
        ["grid=retention_x_sched", "scheduling=flas"],
        "expected one of fcfs, plas, program_fcfs, sjf (closest: plas)",
    ),
    (
        ["grid=retention_x_sched", "grid.axes.retention=[lru,tll]"],
        "retention: found 'tll', expected one of evict, lru",
    ),
    (["grid.axes.retnetion=[lru]"], "grid axis 'retnetion': found neither a group nor a key"),
    (["grid.axes.retention.tau=[1,2]"], "no 'tau' under retention"),
    (["retention=ttl", "grid.axes.retention.tau=[1,2]"], "(closest: tau_s)"),
    (["grid.axes.nothing.tau=[1,2]"], "no config group 'nothing'"),
    (["grid.axes.execution.devices=[1]"], "no config group 'execution'"),
    (["grid.axes.retention=[]"], "grid axis 'retention': found an empty list"),
    (["grid.axes.retention=[lru,lru]"], 'found "lru" twice'),
    (["grid.axes.retention=[[lru]]"], "expected single values"),
    (["grid.axes.retention="], "found no values"),
    (["grid.axes.retention=[lru"], "expected a list such as [1,2,5]"),
    (["grid.axes.rate=interval(0,1)"], "found an interval"),
    (["grid.axes.cluster.kv_blocks=[many]"], "expected numbers, as cluster.kv_blocks=7173"),
    (["grid.axes.cluster.kv_blocks=[0]"], "cluster.kv_blocks"),
    (["grid.axes.workload.rate=[-1]"], "rate: found -1"),
    (["grid.axes=[1]"], "grid.axes"),
    ([AXIS, "~grid.axes.routing"], "found no axis 'routing', expected one of scheduling"),
    ([AXIS, "+grid.baseline.scheduling=sjf"], "grid.baseline.scheduling: found 'sjf'"),
    ([AXIS, "grid.baseline=plas"], "grid.baseline"),
    ([AXIS, "+grid.published.value=3"], "grid.published: found an unknown key 'value'"),
    ([AXIS, "execution.lanes_per_tile=0"], "execution.lanes_per_tile: found 0"),
    ([AXIS, "workload.seed=1", "grid.axes.workload.seed=[1,2]"], "expected grid.axes.workload.seed=[1]"),
    ([AXIS, "figure=out.gif"], "expected one of .png, .svg, .pdf"),
    ([AXIS, "cluster.kv_blocks=10"], "expected at most 10"),
    ([AXIS, "out=/proc/nothing/here"], "output folder /proc/nothing/here"),
    ([AXIS, "retention=lru,ttl"], "to sweep over them: grid.axes.retention=[lru,ttl]"),
    (["grid.axes.seed=range(1e9)"], "found too long a range, expected at most 1,000,000 values"),
    (["grid.axes.seed=range(1000000000)"], "found too long a range"),
    (["grid.axes.rate=range(0,1,0)"], "found too long a range"),
    (
        ["grid.axes.seed=range(2000)", "grid.axes.kv_blocks=range(1000,2000)"],
        "grid: found 2,000,000 points, expected at most 1,000,000",
    ),
    (
        ["workload=file", "workload.path=own.jsonl", "grid.axes.seed=range(4)"],
        "grid axis 'workload.seed': found a file with arrivals of its own",
    ),
    (
        ["retention=ttl", "grid.axes.tau_s=[-5,2]"],
        "retention 'ttl', tau_s: found -5, expected a number of at",
    ),
    ([AXIS, "--multirun"], "expected axes of a grid"),
]
BOTH = [
    (["workload=swebensh"], "workload: found 'swebensh', expected one of"),
    (["workload.rat=2"], "(closest: rate)"),
    (["retention.tau_s=2"], "lru has no parameters"),
    (["+foo=1"], "key 'foo': found no 'foo', expected one of workload, cluster"),
    (["++foo.bar=1"], "key 'foo.bar': found no 'foo'"),
    (["+execution.lanes=1"], "key 'execution.lanes': found no 'lanes' under execution"),
    (["+workload.foo=1"], "swebench, foo: found an unknown field"),
    (["+retention.foo=1"], "retention 'lru': found an unknown parameter 'foo'"),
    (
        ["~retention"],
        "argument '~retention': found a key without which there is no run, expected retention=VALUE",
    ),
    (["~execution"], "argument '~execution'"),
    (["~out"], "'out' does not exist"),
    (["~execution.devices"], "execution"),
    (["~cluster"], "argument '~cluster'"),
    (["execution.lanes_per_tile=0"], "execution.lanes_per_tile: found 0, expected a whole number >= 1"),
    (["workload.calls_min=300"], "calls_min: found 300, expected at most 250"),
    (
        ["retention=ttl", "retention.tau_s=-5"],
        "retention 'ttl', tau_s: found -5, expected a number of at least 0",
    ),
    (["admission=kv_gate", "admission.threshold=7"], "threshold: found 7, expected a number from 0 to 1"),
    (
        ["performance=affine", "performance.c0_s=1e18"],
        "performance.c0_s: found 1e+18, expected a number of",
    ),
    (["foo=1"], "key 'foo': found no 'foo', expected one of workload, cluster"),
    (["cluster.kv_blocks=many"], "cluster.kv_blocks: found"),
    (["cluster.kv_blocks=1]"], "expected KEY=VALUE or GROUP=OPTION"),
    (["retention.name=nope"], "nope"),
    (["workload=file"], "workload.path: found no value"),
    (["workload=file", "workload.path=missing.jsonl"], "missing.jsonl: found no such file"),
    (["--config-dir", "missing"], "--config-dir missing: found no such folder"),
    (["--config-dir"], "found nothing after it"),
    (["execution.devices=none"], 'execution.devices: found "none"'),
    (["execution.devices=1000000"], "the cores that may be used"),
    (["out=5"], "out: found 5"),
    (["figure=3"], "figure: found 3"),
    (["figure=/dev/null/x.png"], "figure=/dev/null/x.png: found the file /dev/null"),
    (["cluster.kv_blocks=-3"], "cluster.kv_blocks: found -3"),
    (["cluster.kv_blocks=100"], "program 'swebench-0000', calls[0]"),
    (["workload=file", "workload.path=broken.jsonl"], "broken.jsonl, line 1"),
    (["--nonsense"], "unrecognized arguments: --nonsense"),
    (["--config-name", "nope"], "nope"),
]
SIMULATE = [
    (["grid=retention_x_sched"], "found a group that has no default"),
    (["figure=jct.gif"], "expected one of .png, .svg, .pdf"),
    (["cluster.kv_blocks=10"], "expected at most 10"),
]
CASES = [
    *((sweep, arguments, words) for arguments, words in SWEEP),
    *((sweep, [AXIS, *arguments], words) for arguments, words in BOTH),
    *((simulate, arguments, words) for arguments, words in [*BOTH, *SIMULATE]),
]


@pytest.mark.parametrize(("main", "arguments", "words"), CASES)
def test_bad_input_is_one_sentence(
    main: Command,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    if "workload.path=broken.jsonl" in arguments:
        (tmp_path / "broken.jsonl").write_text('{"program": "a", "calls": [{"new_')
    if "workload.path=own.jsonl" in arguments:
        call = '{"new_tokens": 1, "output_tokens": 1, "tool_s": 0}'
        (tmp_path / "own.jsonl").write_text(f'{{"program": "a", "arrival_s": 0, "calls": [{call}]}}')
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert words in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("broken", "path: [oops\n", "broken.yaml, line 2: found no valid YAML"),
        ("dangling", "path: ${nowhere}\n", "workload.path"),
    ],
)
def test_bad_files_of_the_user_are_named(
    name: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload" / f"{name}.yaml").write_text(text)
    assert sweep(["--config-dir", str(tmp_path), f"workload={name}", AXIS]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_files_of_the_user_come_before_the_packaged_ones(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "rtx_pro_6000_pair.yaml").write_text("kv_blocks: 99\n")
    assert simulate(["--config-dir", str(tmp_path), "--cfg", "job", "--package", "cluster"]) == 0
    assert "kv_blocks: 99" in capsys.readouterr().out


@pytest.mark.parametrize("main", [sweep, simulate])
def test_help_shows_groups_and_keys(main: Command, capsys: pytest.CaptureFixture):
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert "retention: evict, lru, pin, pressure_ttl, ttl" in out
    assert "kv_blocks: 7173" in out
    assert "usage: python -m agentjax." in out
    assert err == ""


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(command, "expand", broken)
    with pytest.raises(ZeroDivisionError):
        sweep([AXIS])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("module", ["agentjax.sweep", "agentjax.simulate"])
def test_the_process_ends_with_code_2(module: str, tmp_path: Path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            module,
            AXIS if module.endswith("sweep") else "scheduling=sjf",
            "routing=nowhere",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: routing: found 'nowhere'")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
