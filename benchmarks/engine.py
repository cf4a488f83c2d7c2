"""Speed, compile time and memory of the engine on this machine: `python benchmarks/engine.py`.

Every figure is a median of repeats in this process; ratios are against `plain_python.py`, run in the same
process on the same recorded workload (tests/golden/f_swe_fcfs, 50 programs, 2,282 calls, 71,421 iterations).
Compile times come from fresh processes. `--quick` repeats less.
"""

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentjax.compilation import prepare

HERE = Path(__file__).resolve().parent
RECORDING = HERE.parent / "tests" / "golden" / "f_swe_fcfs.json.gz"
SECOND = 1_000_000_000


def recorded():
    """The recorded workload and cluster, as the engine takes them, and the recording itself."""
    from agentjax import Cluster, pack
    from agentjax.performance import Affine
    from agentjax.workloads import Call, Program

    document = json.loads(gzip.decompress(RECORDING.read_bytes()))
    programs = [
        Program(
            name=f"program-{i}",
            arrival_s=program["arrival_s"],
            prefix=None,
            stages=((tuple(Call(new, output, None, None, gap) for new, output, gap in program["calls"]),),),
        )
        for i, program in enumerate(document["programs"])
    ]
    config, cost = document["config"], document["cost"]
    cluster = Cluster(
        kv_blocks=config["num_gpu_blocks"] - 1,
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        performance=Affine(
            c0_s=cost["c0"], c_tok_s=cost["c_tok"], c_seq_s=cost["c_seq"], c_kv_s=cost["c_kv"]
        ),
    )
    return pack(programs), cluster, document


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call (s); what it returns is waited for."""
    import jax

    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def stepping(workload, cluster, lanes: int, records: bool, devices: int, replicas: int = 1):
    """Median seconds a step of lanes with mixed policies; bytes of state and of temporaries a lane."""
    import jax

    from agentjax import Policy
    from agentjax.engine import run
    from agentjax.engine.state import Shape
    from agentjax.policies import registered

    retention, scheduling = ("lru", "ttl", "pressure_ttl"), ("fcfs", "plas")
    specs = [
        run.LaneSpec(
            0,
            replace(cluster, kv_blocks=cluster.kv_blocks - 7 * (i % 256), replicas=replicas),
            Policy(retention=retention[i % 3], scheduling=scheduling[i % 2]),
        )
        for i in range(lanes)
    ]
    chosen = tuple(jax.local_devices()[:devices])
    with jax.enable_x64(True):
        traffic, stacked = run.stack_traffic([workload]), run.stack_lanes(specs)
        shape = Shape(
            programs=traffic.arrival.shape[1],
            threads_per_program=1,
            replicas=replicas,
            prefixes=0,
            calls=traffic.new_tokens.shape[1],
            policies=registered(),
            leaps=True,
            records=records,
            checks=False,
            series=False,
        )
        begin, advance = run.compiled(shape, chosen, lanes // len(chosen))
        state = begin(traffic, stacked)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / lanes
        temporary = advance.lower(state, traffic, stacked).compile().memory_analysis().temp_size_in_bytes
        times = []
        for repeat in range(4):
            start = time.perf_counter()
            state, *_ = jax.block_until_ready(advance(state, traffic, stacked))
            if repeat:  # the first one compiles
                times.append(time.perf_counter() - start)
    return statistics.median(times) / run.CHUNK, size, temporary * len(chosen) / lanes


def compile_s(cache: str) -> tuple[float, float]:
    """Seconds to the first result of one lane in a fresh process, and the seconds of its second call."""
    code = (
        "import time, sys; sys.path.insert(0, sys.argv[1]); import engine\n"
        "engine.prepare(); from agentjax import Policy; from agentjax.engine import run\n"
        "w, c, _ = engine.recorded()\n"
        "times = []\n"
        "for _ in range(2):\n"
        "    t = time.perf_counter(); run.run_lanes([w], [run.LaneSpec(0, c, Policy())], calls=False)\n"
        "    times.append(time.perf_counter() - t)\n"
        "print(*times)"
    )
    environment = {**os.environ, "AGENTJAX_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE)], env=environment, capture_output=True, text=True, check=True
    )
    first, second = map(float, done.stdout.split())
    return first, second


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no batch of 1,024 lanes")
    quick = parser.parse_args().quick
    prepare()
    import jax
    from plain_python import simulate as plain
    from rich.console import Console
    from rich.table import Table

    from agentjax import Policy
    from agentjax.engine.run import LaneSpec, run_lanes
    from agentjax.workloads import swebench
    from agentjax.workloads.pack import pack

    repeats = 2 if quick else 5
    devices = len(jax.local_devices())
    workload, cluster, document = recorded()
    padded = pack_to(workload, 64)
    rows: list[tuple[str, str]] = []

    def row(what: str, value: str) -> None:
        rows.append((what, value))
        Console(stderr=True).print(f"[dim]{what}: {value}")

    with tempfile.TemporaryDirectory() as cache:
        cold, once = compile_s(cache)
        warm, _ = compile_s(cache)
    row("first run of one lane, cold, less the run itself (compile)", f"{cold - once:.1f} s")
    row("the same with the compilation cache", f"{warm - once:.1f} s")

    for lanes in (1, 64, 256) if quick else (1, 64, 256, 1024):
        used = min(devices, lanes)
        seconds, size, temporary = stepping(padded, cluster, lanes, records=False, devices=used)
        if lanes == 1:
            row("one lane, 64 threads, 1 core: a step", f"{seconds * 1e6:.1f} µs")
            row("state of a lane, sums only", f"{size / 1024:.1f} KiB")
            _, size, _ = stepping(padded, cluster, 1, records=True, devices=1)
            row(f"state of a lane with {len(workload.gap):,} call records", f"{size / 1024:.0f} KiB")
        else:
            row(f"{lanes} lanes, {used} cores: a lane-step", f"{seconds / lanes * 1e6:.2f} µs")
            row(f"{lanes} lanes: state and temporaries a lane", f"{(size + temporary) / 1024:.1f} KiB")

    for programs in (16, 64, 256):
        many = pack(swebench(0, programs=programs, rate=0.02))
        seconds, _, _ = stepping(many, replace(cluster, max_model_len=131072), 64, False, devices)
        row(f"64 lanes of {programs} programs: a lane-step", f"{seconds / 64 * 1e6:.2f} µs")
    for replicas in (2, 4, 8):
        seconds, _, _ = stepping(padded, cluster, 64, False, devices, replicas)
        row(f"64 lanes of {replicas} replicas: a lane-step", f"{seconds / 64 * 1e6:.2f} µs")

    def run(lanes: int):
        specs = [
            LaneSpec(0, replace(cluster, kv_blocks=cluster.kv_blocks - i % 256), Policy())
            for i in range(lanes)
        ]
        return run_lanes([workload], specs, calls=False)

    baseline = median_s(lambda: plain(document) and 0, repeats=2 if quick else 3)
    row("plain Python, the recorded run", f"{baseline:.2f} s")
    steps = int(run(1).steps[0])
    row("steps a call on the recorded run", f"{steps / len(workload.gap):.2f}")
    for lanes in (1, 256):
        run(lanes)
        seconds = median_s(lambda lanes=lanes: run(lanes) and 0, repeats if lanes == 1 else 2) / lanes
        ratio = baseline / seconds
        row(f"a configuration, {lanes} lane(s)", f"{seconds * 1e3:.1f} ms, {ratio:.0f} times plain Python")

    table = Table(
        "figure",
        "value",
        title=f"{platform.processor() or platform.machine()}, {devices} cores, jax {jax.__version__}",
    )
    for what, value in rows:
        table.add_row(what, value)
    Console().print(table)


def pack_to(workload, programs: int):
    """The workload with programs that never arrive added, up to a number."""
    import numpy as np

    more = programs - len(workload.names)

    def extended(values, fill):
        return np.concatenate([values, np.full(more, fill, values.dtype)])

    return replace(
        workload,
        names=workload.names + tuple(f"none-{i}" for i in range(more)),
        arrival=extended(workload.arrival, 0),
        first_call=extended(workload.first_call, 0),
        calls=extended(workload.calls, 0),
        prefix=extended(workload.prefix, -1),
    )


if __name__ == "__main__":
    main()
