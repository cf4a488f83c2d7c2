"""Speed, compile time and memory of the engine on this machine: `python benchmarks/engine.py`.

Core time is what a run uses of all cores together, the figure that other work on the machine moves least;
wall time stands beside it. Every figure is a median of repeats. Rows, all or those of `--rows`:

recording  tests/golden/f_swe_fcfs (50 programs, 2,282 calls, 71,421 iterations) in 1 and in 64 lanes, against
           `plain_python.py` in the same process and `floor.cpp`, compiled here; all have to agree with
           the recorded vLLM scheduler in every call
trace      time a call, and memory, for files of 1,000, 3,000 and 12,000 one-call programs on 8 replicas
replicas   time a step of 300 programs on 1 to 16 replicas
compile    the first run of one lane, less the run itself, cold and with the compilation cache

`--quick` repeats less and leaves the largest sizes out; `--tiny` takes seconds and only shows that it runs.
"""

import argparse
import gzip
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:  # also where it is imported, as by the tests
    sys.path.insert(0, str(HERE))

from plain_python import simulate as plain_python  # noqa: E402

from agentjax import Cluster, Policy  # noqa: E402
from agentjax.compilation import prepare  # noqa: E402
from agentjax.config.build import build_cluster  # noqa: E402
from agentjax.engine.run import LaneSpec, run_lanes  # noqa: E402
from agentjax.performance import Affine  # noqa: E402
from agentjax.workloads import Call, Program  # noqa: E402
from agentjax.workloads.pack import Workload, pack  # noqa: E402

RECORDING = HERE.parent / "tests" / "golden" / "f_swe_fcfs.json.gz"
NAMES = ("recording", "trace", "replicas", "compile")
COMPILERS = ("c++", "g++", "clang++")
LONGEST_S = 300
"""A size that takes longer is given up."""

Row = tuple[str, str, str]
"""What was measured, its core time and its wall time."""


@dataclass(frozen=True)
class Size:
    """How much is measured: the whole, `--quick` or `--tiny`."""

    repeats: int
    lanes: int
    trace_calls: Sequence[int]
    replicas: Sequence[int]
    programs: int | None = None
    """Of each workload; None: as many as the rows say."""
    is_alone: bool = True
    """Whether sizes have processes of their own, so that memory is theirs and slow ones can be given up."""


WHOLE = Size(repeats=5, lanes=64, trace_calls=(1000, 3000, 12_000), replicas=(1, 2, 4, 8, 16))
QUICK = Size(repeats=2, lanes=64, trace_calls=(1000, 3000), replicas=(1, 4, 16))
TINY = Size(repeats=1, lanes=2, trace_calls=(8,), replicas=(1,), programs=3, is_alone=False)


@dataclass(frozen=True)
class Time:
    """Seconds of all cores together, and of the clock on the wall."""

    core_s: float
    wall_s: float


def timed(call: Callable[[], object]) -> Time:
    """The time of a call, in all threads of this process."""
    core, wall = time.process_time(), time.perf_counter()
    call()
    return Time(time.process_time() - core, time.perf_counter() - wall)


def median(call: Callable[[], object], repeats: int) -> Time:
    """The median time of a call, core and wall each."""
    times = [timed(call) for _ in range(repeats)]
    return Time(
        statistics.median(each.core_s for each in times), statistics.median(each.wall_s for each in times)
    )


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, in three digits."""
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"


def of_time(what: str, each: Time, share: float = 1.0) -> Row:
    """The row of a time, or of a share of it."""
    return what, milliseconds(each.core_s * share), milliseconds(each.wall_s * share)


# The recorded run


def recorded(programs: int | None = None) -> dict[str, Any]:
    """The recorded run, or its first programs, with the calls that plain Python makes of them."""
    document = json.loads(gzip.decompress(RECORDING.read_bytes()))
    if programs is not None:
        document["programs"] = document["programs"][:programs]
        document["results"] = plain_python(document)
    return document


def chain(name: str, arrival_s: float, calls: Sequence[Sequence[Any]]) -> Program:
    """A program of calls: new tokens, output tokens and gap (s)."""
    stage = tuple(Call(new, output, None, None, gap_s) for new, output, gap_s in calls)
    return Program(name=name, arrival_s=arrival_s, stages=((stage,),), prefix=None)


def recorded_lane(document: dict[str, Any]) -> tuple[Workload, Cluster]:
    """The workload and the cluster of the recorded run, as the engine takes them."""
    config, cost = document["config"], document["cost"]
    programs = [
        chain(f"program-{i}", program["arrival_s"], program["calls"])
        for i, program in enumerate(document["programs"])
    ]
    cluster = Cluster(
        kv_blocks=config["num_gpu_blocks"] - 1,
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        performance=Affine(
            c0_s=cost["c0"], c_tok_s=cost["c_tok"], c_seq_s=cost["c_seq"], c_kv_s=cost["c_kv"]
        ),
        vllm="0.19",  # the recorded scheduler, which the baselines follow
        async_scheduling=False,
    )
    return pack(programs), cluster


def nanoseconds(seconds: float) -> int:
    """Recorded seconds are whole nanoseconds written as floats."""
    return round(seconds * 1_000_000_000)


def recorded_calls(results: dict[str, Any]) -> np.ndarray:
    """Of every call: released, scheduled, first token, finished (ns), cached, preemptions, tokens resumed."""
    return np.array([[*map(nanoseconds, row[5:9]), *row[9:12]] for row in results["calls"]])


def engine_calls(outcome: Any, calls: int) -> np.ndarray:
    """The same columns of the first lane."""
    times = [f"{name}_ns" for name in ("released", "scheduled", "first_token", "finished")]
    columns = [*times, "cached_tokens", "preemptions", "resumed_tokens"]
    return np.stack([getattr(outcome, f"call_{name}")[0, :calls] for name in columns], axis=-1)


def recording_rows(size: Size) -> Iterator[Row]:
    """The engine, plain Python and the C++ floor on the recorded run."""
    document = recorded(size.programs)
    workload, cluster = recorded_lane(document)
    expected = recorded_calls(document["results"])
    results: list[Any] = []
    python = median(lambda: results.append(plain_python(document)), min(size.repeats, 3))
    yield of_time("plain Python, a configuration", python)
    agreeing = {"plain Python": recorded_calls(results[-1])}

    floor = run_floor(document, size.lanes, size.repeats)
    if floor is None:
        yield "C++ floor", "no compiler", ""
    else:
        for lanes, (core_s, calls) in floor.items():
            yield f"C++ floor, {lanes} lane(s), a configuration", milliseconds(core_s / lanes), ""
            agreeing["C++ floor"] = calls

    for lanes in (1, size.lanes):
        specs = [
            LaneSpec(0, replace(cluster, kv_blocks=cluster.kv_blocks - i), Policy()) for i in range(lanes)
        ]
        outcome = run_lanes([workload], specs)  # compiles
        each = median(partial(run_lanes, [workload], specs), size.repeats)
        core_s = each.core_s / lanes
        yield of_time(f"engine, {lanes} lane(s), a configuration", each, 1 / lanes)
        yield f"engine, {lanes} lane(s): plain Python takes", f"{python.core_s / core_s:.3g} times", ""
        if floor is not None:
            yield (
                f"engine, {lanes} lane(s): of the C++ floor",
                f"{core_s / floor[lanes][0] * lanes:.3g} times",
                "",
            )
        if lanes == 1:
            yield "engine: steps a call", f"{int(outcome.steps[0]) / len(expected):.2f}", ""
        agreeing[f"engine, {lanes} lane(s)"] = engine_calls(outcome, len(expected))
    for name, calls in agreeing.items():
        equal = int(np.all(calls == expected, axis=1).sum())
        yield f"{name}: calls as recorded", f"{equal:,} of {len(expected):,}", ""


def run_floor(
    document: dict[str, Any], lanes: int, repeats: int
) -> dict[int, tuple[float, np.ndarray]] | None:
    """By number of lanes, 1 and the given one: core time of all lanes (s) and the calls of the first lane.

    None where there is no compiler.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    config, cost = document["config"], document["cost"]
    limits = ("block_size", "max_num_seqs", "max_num_batched_tokens")
    numbers = [config["num_gpu_blocks"] - 1, *(config[name] for name in limits)]
    numbers += [nanoseconds(cost[name]) for name in ("c0", "c_tok", "c_seq", "c_kv")]
    numbers.append(len(document["programs"]))
    for program in document["programs"]:
        numbers += [nanoseconds(program["arrival_s"]), len(program["calls"])]
        for new, output, gap_s in program["calls"]:
            numbers += [new, output, nanoseconds(gap_s)]
    text = " ".join(map(str, numbers))
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "floor"
        options = ["-O3", "-march=native", "-std=c++17"]
        subprocess.run([compiler, *options, HERE / "floor.cpp", "-o", program], check=True)
        found = {}
        for count in (1, lanes):
            done = subprocess.run(
                [program, str(count), str(repeats)], input=text, capture_output=True, text=True, check=True
            )
            times, _, *calls = done.stdout.splitlines()
            core_s = statistics.median(map(int, times.split())) / 1e9
            found[count] = core_s, np.array([line.split() for line in calls], int)
    return found


# What is measured in a process of its own


def one_call_programs(count: int) -> list[Program]:
    """A trace of single requests, seeded: 3.4 a second, median prompt 7,300 tokens, median output 240."""
    draw = random.Random(0)

    def tokens(most: int, median: float, sigma: float) -> int:
        return int(min(most, draw.lognormvariate(median, sigma))) + 1

    return [
        chain(f"r{i}", round(i * 0.294, 3), [(tokens(120_000, 8.9, 1.0), tokens(2000, 5.5, 0.8), 0.0)])
        for i in range(count)
    ]


def measure_trace(calls: int) -> dict[str, float]:
    """Core and wall time (s) of a trace on 8 replicas, and the most memory that the process used (bytes)."""
    limits = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}
    estimate = {"model": "llama_3_1_70b", "weights": "fp8", "hardware": "h200", "tensor_parallel": 4}
    cluster = build_cluster({"replicas": 8, "kv_blocks": "auto", **limits}, estimate)
    workload = pack(one_call_programs(calls))
    run = partial(run_lanes, [workload], [LaneSpec(0, cluster, Policy(routing="least_loaded"))])
    first = timed(run)
    again = timed(run) if first.wall_s < LONGEST_S / 3 else first
    return {"core_s": again.core_s, "wall_s": again.wall_s, "bytes": peak_bytes()}


def peak_bytes() -> int:
    """Most memory that this process has used."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_replicas(replicas: int, programs: int = 300) -> dict[str, float]:
    """Core and wall time (s) and steps of programs of five calls, all about to run at once."""
    draw = random.Random(1)

    def calls() -> list[tuple[int, int, float]]:
        return [(draw.randint(64, 1024), draw.randint(16, 128), 1.0) for _ in range(5)]

    made = [chain(f"p{i}", draw.uniform(0, 60), calls()) for i in range(programs)]
    workload, cluster = pack(made), replace(recorded_lane(recorded(1))[1], replicas=replicas)
    run = partial(run_lanes, [workload], [LaneSpec(0, cluster, Policy())])
    outcome = run()  # compiles
    each = timed(run)
    return {"core_s": each.core_s, "wall_s": each.wall_s, "steps": int(outcome.steps[0])}


def measure_compile(programs: int | None = None) -> dict[str, float]:
    """Core and wall time (s) of the first run of one lane, less the run itself."""
    workload, cluster = recorded_lane(recorded(programs))
    run = partial(run_lanes, [workload], [LaneSpec(0, cluster, Policy())])
    first, second = timed(run), timed(run)
    return {"core_s": first.core_s - second.core_s, "wall_s": first.wall_s - second.wall_s}


MEASURES = {"trace": measure_trace, "replicas": measure_replicas, "compile": measure_compile}


def measured(name: str, size: Size, *arguments: int, cache: str | None = None) -> dict[str, float] | None:
    """What one of `MEASURES` returns, in a process of its own; None where it takes too long."""
    if not size.is_alone:
        return MEASURES[name](*arguments)
    environment = os.environ | ({} if cache is None else {"AGENTJAX_CACHE_DIR": cache})
    command = [sys.executable, str(HERE / "engine.py"), "--measure", name, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout)


def trace_rows(size: Size) -> Iterator[Row]:
    """Time a call, and memory, by number of calls."""
    for calls in size.trace_calls:
        what = f"{calls:,} one-call programs, 8 replicas: "
        found = measured("trace", size, calls)
        if found is None:
            yield f"{what}a call", "-", f"more than {LONGEST_S} s in all"
            continue
        yield of_time(f"{what}a call", Time(found["core_s"], found["wall_s"]), 1 / calls)
        yield f"{what}memory of the process", f"{found['bytes'] / 2**20:,.0f} MiB", ""


def replicas_rows(size: Size) -> Iterator[Row]:
    """Time a step, by number of replicas."""
    programs = size.programs or 300
    for replicas in size.replicas:
        what = f"{programs} programs, {replicas} replica(s): a step"
        found = measured("replicas", size, replicas, programs)
        if found is None:
            yield what, "-", f"more than {LONGEST_S} s in all"
        else:
            core_us, wall_us = (1e6 * found[name] / found["steps"] for name in ("core_s", "wall_s"))
            yield what, f"{core_us:,.3g} µs", f"{wall_us:,.3g} µs"


def compile_rows(size: Size) -> Iterator[Row]:
    """Compile time of the recorded run, without and with what was compiled before."""
    arguments = () if size.programs is None else (size.programs,)
    with tempfile.TemporaryDirectory() as cache:
        for what in ("cold", "with the compilation cache"):
            found = measured("compile", size, *arguments, cache=cache)
            if found is None:
                yield f"compiling one lane, {what}", "-", f"more than {LONGEST_S} s"
            else:
                yield of_time(f"compiling one lane, {what}", Time(found["core_s"], found["wall_s"]))


ROWS = {"recording": recording_rows, "trace": trace_rows, "replicas": replicas_rows, "compile": compile_rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument(
        "--rows", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES)
    )
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    prepare()
    if given.measure:
        name, *numbers = given.measure
        print(json.dumps(MEASURES[name](*map(int, numbers))))
        return 0
    import jax
    from rich.console import Console
    from rich.table import Table

    size = TINY if given.tiny else QUICK if given.quick else WHOLE
    progress = Console(stderr=True)
    machine = platform.processor() or platform.machine()
    table = Table(title=f"{machine}, {len(jax.local_devices())} cores, jax {jax.__version__}")
    for heading in ("figure", "core time", "wall time"):
        table.add_column(heading)
    for name in given.rows:
        for row in ROWS[name](size):
            progress.print("[dim]" + "; ".join(filter(None, row)))
            table.add_row(*row)
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
