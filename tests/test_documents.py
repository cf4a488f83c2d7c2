# ruff: noqa: E501 (a command stands in one line, as a reader would look for it)
"""Every command and every snippet that a document, a benchmark or `--help` shows runs, in a small form.

`COMMANDS` has each of them to the letter: one that is added to a document, changed or taken out of it fails
here until the table says the same. A small form is the command itself with arguments added, which win over
its own, in a folder that has the files it names.
"""

import gzip
import importlib
import importlib.util
import json
import shlex
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

from agentjax.policies import FAMILIES
from tests import documents
from tests.documents import ROOT
from tests.mock_endpoint import MockEndpoint, completion
from tests.test_tables import write_profile
from tests.test_validate import blank_rows, write_run

LLAMA_CPP = ROOT / "calibration" / "llama_cpp"
DATA = ROOT.parent / "shared" / "data"


@dataclass(frozen=True)
class Small:
    """The command with more arguments, and names in it that stand for something replaced.

    Attributes:
        more: added at the end.
        instead: what is written in the command -> what stands for it here.
        writes: files that have to be there afterwards.
    """

    more: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)
    writes: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """A command that another test or the set-up of every checkout runs: `file` has the word `name` in it."""

    file: str
    name: str


@dataclass(frozen=True)
class Extra:
    """Installs optional dependencies, which have to exist under that name; nothing is installed here."""

    name: str


FEW = "workload.programs=3 workload.calls_median=3 workload.calls_max=5"
REQUESTS = "prompt_tokens=[8,24] output_tokens=[4] concurrency=[1,2] cached_share=[0,0.75] requests=2"
PLAYED = "workload.programs=2 workload.rate=50 workload.calls_max=3 workload.gap_max_s=0.01"
FIT = Small(writes="my_server.json fit.png")
SEARCH = "generations=1 population=4"
LISTS = {"[2,4,8]": "[2,4]", "range(8)": "[0]", "range(4)": "[0]"}
GRID = f"{FEW} grid.axes.retention=[lru,ttl] grid.axes.workload.seed=[0]"
SWEPT = "sweep/cube.zarr"
OUT = "out=sweep"

COMMANDS: dict[str, Small | Elsewhere | Extra] = {
    # README.md
    "python3 -m venv .venv": Elsewhere(".ci/run", "python3 -m venv .venv"),
    ".venv/bin/pip install -e .": Elsewhere(".ci/run", ".venv/bin/pip install"),
    ".venv/bin/pip install -e '.[dev]'": Elsewhere(".ci/run", "-e '.[dev]'"),
    ".venv/bin/python -m pytest -n 2": Elsewhere(".ci/run", ".venv/bin/python -m pytest -n 2"),
    ".venv/bin/python -m agentjax.sweep +grid=retention_x_sched": Small(
        GRID, writes="outputs/retention_x_sched/cube.zarr outputs/retention_x_sched/figure.png"
    ),
    "python -m agentjax.sweep grid.axes.cluster.kv_blocks=[5380,7173,14346] grid.axes.retention=[lru,ttl,pin] grid.axes.seed=range(4)": Small(
        f"{FEW} {OUT}", {"[5380,7173,14346]": "[5380,7173]", "[lru,ttl,pin]": "[lru,pin]", **LISTS}, SWEPT
    ),
    "python -m agentjax.sweep grid.axes.cluster.replicas=[1,2,4] grid.axes.routing=[round_robin,least_loaded,session_affinity] workload.rate=0.06": Small(
        f"{FEW} {OUT}", {"[1,2,4]": "[1,2]", "least_loaded,": ""}, SWEPT
    ),
    "python -m agentjax.sweep \"grid.axes.cluster.vllm=['0.19','0.24','0.33']\" grid.axes.cluster.async_scheduling=[false,true] workload.rate=0.05": Small(
        f"{FEW} {OUT}", {"'0.19',": ""}, SWEPT
    ),
    "python -m agentjax.simulate workload=file workload.path=programs.jsonl retention=ttl retention.tau_s=5 until_s=3600": (
        Small(instead={"programs.jsonl": "my.jsonl"})
    ),
    "python -m agentjax.bench url=http://127.0.0.1:8080 model=NAME cached_share=[0,0.75,0.95] out=bench.jsonl": (
        Small(REQUESTS, {"bench.jsonl": "new.jsonl"}, "new.jsonl")
    ),
    "python -m agentjax.calibrate data=bench.jsonl out=my_server.json figure=fit.png": FIT,
    "python -m agentjax.simulate workload=small_agents cluster=llama_cpp performance=my_server.json": Small(
        FEW
    ),
    "python benchmarks/engine.py": Elsewhere("tests/test_benchmarks.py", 'engine.main(["--tiny"])'),
    # docs, calibration, sweeps
    "python -m agentjax.bench url=http://127.0.0.1:8080 model=NAME out=bench.jsonl": Small(
        REQUESTS, {"bench.jsonl": "new.jsonl"}, "new.jsonl"
    ),
    "python -m agentjax.simulate performance=my_server.json": Small(FEW),
    "python -m agentjax.sweep grid.axes.performance=[my_server.json,other_server.json]": Small(
        f"{FEW} {OUT}", writes=SWEPT
    ),
    "python calibration/fit_llama70b.py --data ../shared/data": Elsewhere(
        "tests/test_documents.py", "test_the_fit_of_llama_70b_gives_the_same_files"
    ),
    "python calibration/fit_tables.py --data ../shared/data": Elsewhere(
        "tests/test_calibration.py", '"fit_tables.py"'
    ),
    "python -m agentjax.calibrate data=[calibration/llama_cpp/bench-1.jsonl.gz,calibration/llama_cpp/bench-2.jsonl.gz] out=mid.json max_num_batched_tokens=2048": Elsewhere(
        "tests/test_llama_cpp_study.py", "test_the_fit_comes_out_again"
    ),
    "pip install -e '.[llama-cpp]'": Extra("llama-cpp"),
    "pip install -e '.[search]'": Extra("search"),
    "python calibration/llama_cpp/make_model.py --size mid --layers 4 --out model.gguf": Elsewhere(
        "tests/test_closed_loop.py", '"make_model.py"'
    ),
    "python calibration/llama_cpp/serve.py --model model.gguf --port 8080": Elsewhere(
        "tests/test_closed_loop.py", '"serve.py"'
    ),
    "python -m agentjax.bench url=http://127.0.0.1:8080 model=random-llama endpoint=completions prompts=ids prompt_tokens=[64,256,1024] concurrency=[1,2,3,4] cached_share=[0,0.75,0.95] out=bench.jsonl": Small(
        REQUESTS, {"bench.jsonl": "new.jsonl"}, "new.jsonl"
    ),
    "python -m agentjax.calibrate data=bench.jsonl out=my_server.json figure=fit.png max_num_batched_tokens=2048": (
        FIT
    ),
    "python -m agentjax.bench mode=programs workload=small_agents url=http://127.0.0.1:8080 model=random-llama endpoint=completions prompts=ids out=programs.jsonl": Small(
        PLAYED, {"programs.jsonl": "new.jsonl"}, "new.jsonl"
    ),
    "python -m agentjax.validate data=programs.jsonl cluster=llama_cpp performance=my_server.json figure=programs.png": Small(
        writes="programs.png"
    ),
    "python -m agentjax.calibrate method=cma_es data=programs.jsonl performance=my_server.json cluster=llama_cpp parameters=[wakeup_s,overhead_s] out=fitted.json": Small(
        SEARCH, writes="fitted.json"
    ),
    "python -m agentjax.sweep workload=small_agents cluster=llama_cpp performance=my_server.json grid.axes.cluster.max_num_seqs=[2,4,8] grid.axes.scheduling=[fcfs,plas] grid.axes.seed=range(8)": Small(
        f"{FEW} {OUT}", LISTS, SWEPT
    ),
    "python -m agentjax.simulate performance=roofline performance.model=qwen3_32b performance.hardware=h200 performance.tensor_parallel=1 cluster.kv_blocks=auto": Small(
        FEW
    ),
    "python -m agentjax.validate data=RUN performance=table performance.profile=PROFILE/tp1 performance.overhead_s=3.97e-4 cluster.kv_blocks=36578 figure=validation.png out=validation.json": Small(
        "performance.layers=3", {"RUN": "my_run", "PROFILE": "my_gpu"}, "validation.png validation.json"
    ),
    "python -m agentjax.validate data=RUN performance=table performance.profile=PROFILE/tp1 performance.expert_parallel=2 performance.collective_bytes_per_s=3.2e10 performance.overhead_s=3.97e-4 cluster.kv_blocks=38590 in_step=true": Elsewhere(
        "tests/test_validate.py", "in_step"
    ),
    "python sweeps/retention_x_sched/study.py": Elsewhere(
        "tests/test_documents.py", "test_the_study_in_a_small_form"
    ),
    "python benchmarks/roofline_error.py": Elsewhere("tests/test_roofline_error.py", "report(DATA)"),
    # --help
    "python -m agentjax.bench url=http://127.0.0.1:8080 model=my-model out=bench.jsonl": Small(
        REQUESTS, {"bench.jsonl": "new.jsonl"}, "new.jsonl"
    ),
    "python -m agentjax.bench url=http://127.0.0.1:8000 model=my-model out=bench.jsonl endpoint=completions prompts=ids concurrency=[1,8,32,128]": Small(
        REQUESTS, {"bench.jsonl": "new.jsonl"}, "new.jsonl"
    ),
    "python -m agentjax.bench mode=programs workload=file workload.path=my.jsonl url=http://127.0.0.1:8080 model=my-model out=programs.jsonl": Small(
        instead={"programs.jsonl": "new.jsonl"}, writes="new.jsonl"
    ),
    'python -m agentjax.calibrate data=[grid.jsonl,more.jsonl] out=my_server.json max_num_batched_tokens=2048 about.gpu="RTX 4090"': Small(
        writes="my_server.json"
    ),
    "python -m agentjax.simulate workload=swebench retention=ttl retention.tau_s=5": Small(FEW),
    "python -m agentjax.simulate workload=file workload.path=my.jsonl scheduling=plas figure=jct.png out=result.zarr": Small(
        writes="jct.png result.zarr"
    ),
    "python -m agentjax.sweep grid=retention_x_sched": Small(
        GRID, writes="outputs/retention_x_sched/cube.zarr"
    ),
    "python -m agentjax.sweep grid=retention_x_sched grid.axes.workload.seed=range(4) out=study": Small(
        GRID, writes="study/cube.zarr"
    ),
    "python -m agentjax.sweep grid.axes.cluster.kv_blocks=[3586,7173] grid.axes.retention=[lru,ttl]": Small(
        f"{FEW} {OUT}", writes=SWEPT
    ),
    "python -m agentjax.sweep --config-dir my_conf workload=mine grid.axes.scheduling=[fcfs,plas]": Small(
        OUT, writes=SWEPT
    ),
    "python -m agentjax.validate data=my_run performance=table performance.profile=my_gpu/tp1 figure=validation.png": Small(
        "performance.layers=3", writes="validation.png"
    ),
    "python -m agentjax.validate data=my_run cluster.kv_blocks=36578 fit_overhead=true out=validation.json": Small(
        "performance.c0_s=0.01", writes="validation.json"
    ),
    "python -m agentjax.validate data=[day1.jsonl,day2.jsonl] cluster=llama_cpp performance=my_server.json figure=jct.png": Small(
        writes="jct.png"
    ),
}

SNIPPETS: dict[str, Mapping[str, str]] = {
    "README.md": {"programs=20": "programs=3", '"seed": range(4)': '"seed": [0]'},
    "docs/performance.md": {"path/to/config.json": "llama_3_1_70b"},
}
"""Documents with Python snippets, and what is smaller in them, or stands for something."""

SMALL = [command for command, how in COMMANDS.items() if isinstance(how, Small)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read: recordings, coefficients, a workload, measured runs, and own configuration."""
    folder = tmp_path_factory.mktemp("files")
    for name, source in (("bench", "bench-1"), ("grid", "bench-1"), ("more", "bench-2")):
        (folder / f"{name}.jsonl").write_bytes(
            gzip.decompress((LLAMA_CPP / f"{source}.jsonl.gz").read_bytes())
        )
    for name, repeat in (("programs", 1), ("day1", 1), ("day2", 2)):
        content = gzip.decompress((LLAMA_CPP / f"calm-{repeat}.jsonl.gz").read_bytes())
        (folder / f"{name}.jsonl").write_bytes(content)
    for name in ("my_server", "other_server"):
        shutil.copy(LLAMA_CPP / "mid.json", folder / f"{name}.json")
    calls = [{"new_tokens": 20, "output_tokens": 3, "tool": "bash", "tool_s": 0.01}] * 2
    calls.append({"new_tokens": 9, "output_tokens": 3, "tool": None, "tool_s": 0})
    lines = [{"program": f"p{i}", "arrival_s": 0.01 * i, "calls": calls} for i in range(3)]
    (folder / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_run(folder / "my_run", blank_rows())
    write_profile(folder / "my_gpu" / "tp1")
    (folder / "my_conf" / "workload").mkdir(parents=True)
    (folder / "my_conf" / "workload" / "mine.yaml").write_text(f"path: {folder / 'my.jsonl'}\nformat: auto\n")
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a copy of the files."""
    folder = tmp_path / "here"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    return folder


def test_the_table_has_exactly_the_commands_that_are_shown():
    shown = documents.commands()
    assert [command for command in shown if command not in COMMANDS] == []
    assert [command for command in COMMANDS if command not in shown] == []


@pytest.mark.filterwarnings("ignore::agentjax.errors.OutsideRange")
@pytest.mark.parametrize("command", SMALL)
def test_a_command_in_a_small_form(command: str, here: Path, capsys: pytest.CaptureFixture[str]):
    small = COMMANDS[command]
    assert isinstance(small, Small)
    found, extra = command, small.more
    for old, new in small.instead.items():
        found = found.replace(old, new)
    program, flag, module, *arguments = shlex.split(found)
    assert (program.rpartition("/")[2], flag) == ("python", "-m")
    arguments += extra.split()
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    if module == "agentjax.bench":
        with MockEndpoint(lambda request: completion(request, timings=True, tell_ids="llama.cpp")) as server:
            code = run(module, [*arguments, f"url={server.url}"])
    else:
        code = run(module, arguments)
    assert code == 0, capsys.readouterr().err
    for name in small.writes.split():
        path = here / name
        assert path.exists()
        assert path.stat().st_mtime_ns != before.get(path), f"{name} was there before"


def run(module: str, arguments: Sequence[str]) -> int:
    """The exit code of `python -m MODULE ARGUMENTS`, run in this process."""
    return importlib.import_module(f"{module}.__main__").main(arguments)


@pytest.mark.parametrize("command", [each for each, how in COMMANDS.items() if isinstance(how, Elsewhere)])
def test_what_runs_elsewhere_does(command: str):
    how = COMMANDS[command]
    assert isinstance(how, Elsewhere)
    assert how.name in (ROOT / how.file).read_text("utf-8")


def test_optional_dependencies_have_the_names_that_are_shown():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for command, how in COMMANDS.items():
        if isinstance(how, Extra):
            assert f".[{how.name}]" in command
            assert how.name in known


def test_documents_with_snippets_are_known():
    shown = {str(path.relative_to(ROOT)) for path in documents.DOCUMENTS if documents.snippets(path)}
    assert shown == set(SNIPPETS)


@pytest.fixture
def no_policy_stays():
    before = {name: dict(family.members) for name, family in FAMILIES.items()}
    yield
    for name, family in FAMILIES.items():
        family.members.clear()
        family.members.update(before[name])


@pytest.mark.usefixtures("no_policy_stays")
@pytest.mark.parametrize("document", SNIPPETS)
def test_the_snippets_of_a_document_run_in_their_order(document: str, here: Path):
    smaller, names = dict(SNIPPETS[document]), {}
    text = "\n\n".join(documents.snippets(ROOT / document))
    for old, new in smaller.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    exec(compile(text, document, "exec"), names)  # as a reader would paste them


def script(path: str) -> ModuleType:
    """A script as a module, with its folder on the path as when it is run."""
    source = ROOT / path
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.stem] = module
    sys.path.insert(0, str(source.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(source.parent))
        del sys.modules[source.stem]
    return module


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of statistics over runs that are all the same
def test_the_study_in_a_small_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """All of it, but for the runs: one small run stands for each of them."""
    study = script("sweeps/retention_x_sched/study.py")
    real, stood_for = study.run, []

    def run_one(lanes):
        if not stood_for:
            programs, cluster, policy = lanes[0]
            stood_for.extend(real([(programs[:3], cluster, policy)]))
        return [
            stood_for[0] | {"jct_mean": 3400.0 + 40 * i, "hit_rate": 1 / (2 + i)} for i in range(len(lanes))
        ]

    monkeypatch.setattr(study, "run", run_one)
    monkeypatch.setattr(study, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["study.py", "--seeds", "2", "--data", str(tmp_path)])
    study.main()
    assert "## Light load" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"sensitivity.csv", "sensitivity.png"}


@pytest.mark.skipif(not DATA.is_dir(), reason="no measurements (../shared/data)")
def test_the_fit_of_llama_70b_gives_the_same_files(tmp_path: Path):
    script("calibration/fit_llama70b.py").main(DATA, tmp_path)
    for name in ("tp2.json", "residuals.csv"):
        again, kept = (
            folder / "rtx-pro-6000" / "llama-3.1-70b" / name for folder in (tmp_path, ROOT / "calibration")
        )
        assert again.read_text("utf-8") == kept.read_text("utf-8")
