"""Why the level of the SWE-bench cell differs from the published one: draws, inputs one at a time, load.

    python sweeps/retention_x_sched/study.py [--data ../shared/data] [--seeds 16] [--devices 1]

Prints the tables of README.md and writes sensitivity.csv and sensitivity.png beside itself. All draws are
seeded; the same seed gives the same programs in every variant, so that changes are paired. The replay of
measured programs needs the folder of measured data and is left out, with a note, where that is missing.
"""

import argparse
import csv
import functools
import gzip
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import agentjax as ajx
from agentjax.compilation import prepare
from agentjax.engine.run import LaneSpec, run_lanes
from agentjax.metrics import LOAD_REGIMES, CallTimes, run_metrics
from agentjax.performance.affine import Affine
from agentjax.plotting import save_figure
from agentjax.statistics import Interval, change_percent, mean_interval
from agentjax.workloads import arrivals
from agentjax.workloads.program import Call, Program

HERE = Path(__file__).parent
RATES = (0.02, 0.1)
PERFORMANCE = ajx.performance.load("rtx-pro-6000/llama-3.1-70b/tp2")
POOL_BLOCKS = 7173
RULES = {"vllm": "0.19", "async_scheduling": False}  # those of the time of the published figures
CONTEXT_TOKENS_PER_CALL = 13_470.0

Programs = list[Program]

# Mean, median and p99 JCT (s), LRU + FCFS: AgentServeSim artifact 5a73df77, evolve/baselines.json.
PUBLISHED = {
    (50, 0.02): (3725.6, 2627.8, 10993.3),
    (50, 0.1): (5360.7, 4346.5, 12371.3),
    (30, 0.02): (1141.9, 284.1, 4385.2),
    (30, 0.1): (2539.6, 2086.9, 6182.3),
}
PUBLISHED_HALF_POOL = 3517.5  # same source, first 30 programs at 0.1 programs/s, half the pool: mean JCT (s)
PUBLISHED_LIGHT = {(10, 0.02): (171.1, 173.3, 283.1), (20, 0.06): (234.0, 219.2, 738.1)}
LIGHT_CALLS = 797  # of the 20 programs of the second entry
# Change of mean JCT (%): Table 1 of the paper at 0.02; cards of the artifact at 0.1 (older engine version).
PUBLISHED_CHANGES = {
    0.02: {
        "ttl+fcfs": 0.4,
        "pressure_ttl+fcfs": 0.4,
        "lru+plas": -3.9,
        "ttl+plas": -3.0,
        "pressure_ttl+plas": -5.0,
    },
    0.1: {"pressure_ttl+fcfs": -0.3, "pressure_ttl+plas": 2.0},
}


# ---- programs ----------------------------------------------------------------------------------------------


def published_arrivals(programs: Sequence[Program], rate: float, count: int | None = None) -> Programs:
    """The arrivals of the published cells for the first `count` programs.

    Its generator (workloads/generators/agentic_traces.py) adds `random.Random(42).expovariate(rate)` for each
    program in file order, with the seed set anew for every rate.
    """
    draw, at, out = random.Random(42), 0.0, []
    for program in programs[:count]:
        at += draw.expovariate(rate)
        out.append(replace(program, arrival_s=at))
    return out


def swebench(**parameters: Any) -> Callable[[int], Programs]:
    """The generator with some parameters changed, as a function of the seed."""
    return lambda seed: ajx.workloads.swebench(seed, **parameters)


@functools.cache
def baseline(seed: int) -> Programs:
    """The programs of the shipped generator."""
    return ajx.workloads.swebench(seed)


def rebuilt(program: Program, change: Callable[[int, Call], Call]) -> Program:
    """The program with every call replaced by `change(place, call)`."""
    return replace(program, stages=((tuple(change(k, call) for k, call in enumerate(program.calls)),),))


def gaps_times(factor: float) -> Callable[[int], Programs]:
    """Every tool gap multiplied."""

    def make(seed: int) -> Programs:
        return [rebuilt(p, lambda k, c: replace(c, tool_s=c.tool_s * factor)) for p in baseline(seed)]

    return make


def observations_times(programs: Sequence[Program], factors: Sequence[float]) -> Programs:
    """New tokens of every call but the first, multiplied by a factor per program."""

    def scaled(program: Program, factor: float) -> Program:
        def change(k: int, call: Call) -> Call:
            return replace(call, new_tokens=max(1, round(call.new_tokens * factor))) if k else call

        return rebuilt(program, change)

    return [scaled(p, f) for p, f in zip(programs, factors, strict=True)]


def at_context(programs: Sequence[Program], factors: Sequence[float], per_call: float) -> Programs:
    """`observations_times` with one more factor, common to all, that gives the mean prompt `per_call`."""
    fixed = scaled = calls = 0.0
    for program, factor in zip(programs, factors, strict=True):
        new, output = np.array([(call.new_tokens, call.output_tokens) for call in program.calls]).T
        later = np.arange(len(new) - 1, 0, -1)  # prompts of the program in which an entry counts
        fixed += new[0] * len(new) + output[:-1] @ later
        scaled += factor * (new[1:] @ later)
        calls += len(new)
    common = (per_call * calls - fixed) / scaled
    return observations_times(programs, [common * f for f in factors])


def spread_growth(sigma: float, slope: float = 0.0) -> Callable[[int], Programs]:
    """Growth that differs between programs by a lognormal factor, and by calls^slope; total context kept."""

    def make(seed: int) -> Programs:
        programs = baseline(seed)
        z = np.random.default_rng([seed, 1]).standard_normal(len(programs))
        calls = np.array([len(p.calls) for p in programs])
        factors = np.exp(sigma * z) * (calls / 47) ** slope
        return at_context(programs, factors.tolist(), CONTEXT_TOKENS_PER_CALL)

    return make


def counted(draw: Callable[[np.random.Generator], np.ndarray]) -> Callable[[int], Programs]:
    """Other numbers of calls: longer programs are drawn and cut to them; context per call kept."""

    def make(seed: int) -> Programs:
        counts = np.clip(draw(np.random.default_rng([seed, 2])), 2, 250).astype(int)
        flat = {"calls_median": 250.0, "calls_sigma": 0.0, "calls_min": 250, "context_tokens_per_call": None}
        longest = ajx.workloads.swebench(seed, programs=len(counts), **flat)
        cut = [
            replace(p, stages=(((*p.calls[: n - 1], replace(p.calls[n - 1], tool=None, tool_s=0.0)),),))
            for p, n in zip(longest, counts.tolist(), strict=True)
        ]
        return at_context(cut, [1.0] * len(cut), CONTEXT_TOKENS_PER_CALL)

    return make


def free_counts(rng: np.random.Generator) -> np.ndarray:
    """Independent lognormal calls of 50 programs."""
    return np.rint(47 * np.exp(0.634 * rng.standard_normal(50)))


def tail(shape: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.random.Generator], np.ndarray]:
    """The shipped counts with the 25 longest programs reshaped: median and total stay, the tail changes."""
    shipped = np.sort([len(p.calls) for p in baseline(0)])
    counts = np.concatenate([shipped[:25], np.rint(shape(shipped[25:]))])
    return lambda rng: rng.permutation(counts)


def short_tail(upper: np.ndarray) -> np.ndarray:
    """Evenly spaced from 47, with the same sum: the longest program has 122 calls."""
    return np.linspace(47, 2 * upper.mean() - 47, 25)


def middle_tail(upper: np.ndarray) -> np.ndarray:
    """Half way between the short tail and the shipped lognormal one."""
    return (upper + short_tail(upper)) / 2


def long_tail(upper: np.ndarray) -> np.ndarray:
    """Four programs of 225 calls, near the step limit of 250; the rest evenly spaced from 47."""
    return np.append(np.linspace(47, 2 * (upper.sum() - 900) / 21 - 47, 21), [225.0] * 4)


def ordered(by: Callable[[Program], float]) -> Callable[[int], Programs]:
    """The programs of a draw in another order of arrival."""
    return lambda seed: sorted(baseline(seed), key=by)


def measured_programs(data: Path) -> list[list[tuple[int, int]]] | None:
    """Prompt and completion tokens of the calls of 500 mini-SWE-agent programs; None without the file."""
    path = data / "agent_traces/mini_swe_agent_traj_v1/turns_500_programs.csv.gz"
    if not path.exists():
        return None
    programs: dict[str, list[tuple[int, int]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            pair = int(row["prompt_tokens"]), int(row["completion_tokens"])
            programs.setdefault(row["program"], []).append(pair)
    return list(programs.values())


def replayed(measured: list[list[tuple[int, int]]], totals: bool) -> Callable[[int], Programs]:
    """50 measured programs: growth times 0.49, calls times 47/36, outputs and gaps as in the generator.

    A program is lengthened by repeating calls evenly. Outputs keep their order and are brought from a
    lognormal of median 89 and sigma 1.22 to median 52 and sigma 0.94. `totals`: the length factor is chosen
    so that there are 2,873 calls, and growth is scaled to 38.7 M prompt tokens; otherwise both come out as
    they do.
    """

    def make(seed: int) -> Programs:
        rng = np.random.default_rng([seed, 3])
        chosen = [measured[i] for i in rng.choice(len(measured), 50, replace=False)]
        stretch = 2873 / sum(len(rows) for rows in chosen) if totals else 47 / 36
        shipped = [c.tool_s for p in swebench(programs=200)(seed) for c in p.calls[:-1]]
        gaps = iter(shipped)
        programs = []
        for number, rows in enumerate(chosen):
            prompts, outputs = np.array(rows).T
            growth = np.append(np.maximum(np.diff(prompts), 31), 31) * 0.49
            at = (np.arange(round(len(rows) * stretch)) / stretch).astype(int).clip(max=len(rows) - 1)
            grown = np.maximum(np.rint(growth[at]).astype(int), 31)
            output = 52 * (np.maximum(outputs[at], 1) / 89) ** (0.94 / 1.22)
            output = np.clip(np.rint(output).astype(int), 1, grown - 30)
            new = np.append(prompts[0], (grown - output)[:-1])
            last = len(at) - 1
            calls = tuple(
                Call(int(n), int(o), None, None, next(gaps) if k < last else 0.0)
                for k, (n, o) in enumerate(zip(new, output, strict=True))
            )
            programs.append(Program(f"measured-{number:02d}", None, ((calls,),)))
        if not totals:
            return programs
        return at_context(programs, [1.0] * 50, CONTEXT_TOKENS_PER_CALL)

    return make


# ---- iteration times ---------------------------------------------------------------------------------------


COEFFICIENTS = ("c0", "c_tok", "c_seq", "c_prefill", "c_kv", "c_mixed", "overhead", "wakeup")


def coefficients(**factors: float) -> Affine:
    """The calibrated model with coefficients multiplied: c0=1.1 makes `c0_s` 10 % larger."""
    seconds = {name: float(getattr(PERFORMANCE, f"{name}_ns")) * 1e-9 for name in COEFFICIENTS}
    return Affine.from_seconds(
        **{f"{name}_s": value * factors.get(name, 1.0) for name, value in seconds.items()}
    )


# ---- runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One input changed: what the programs, the cluster and the policy are then."""

    group: str
    label: str
    programs: Callable[[int], Programs] = field(default=baseline)
    cluster: dict[str, Any] = field(default_factory=dict)
    policy: ajx.Policy = field(default_factory=ajx.Policy)
    first: int | None = None
    arrivals: str = "published"


def cluster(**changes: Any) -> ajx.Cluster:
    """The published cluster: 114,768 tokens of KV, 16,384 tokens an iteration."""
    limits = {"kv_blocks": POOL_BLOCKS, "max_num_batched_tokens": 16_384, "performance": PERFORMANCE}
    return ajx.Cluster(**(RULES | limits | changes))


def run(lanes: Sequence[tuple[Programs, ajx.Cluster, ajx.Policy]]) -> list[dict[str, Any]]:
    """Metrics of every lane, with its calls and workload."""
    workloads = [ajx.pack(programs) for programs, _, _ in lanes]
    outcome = run_lanes(workloads, [LaneSpec(i, c, p) for i, (_, c, p) in enumerate(lanes)])
    if outcome.status.any():
        raise RuntimeError(f"{np.count_nonzero(outcome.status)} runs did not complete")
    rows = []
    for lane, workload in enumerate(workloads):
        calls, programs = len(workload.new_tokens), len(workload.names)

        def seconds(name: str, lane: int = lane, calls: int = calls) -> np.ndarray:
            return getattr(outcome, f"call_{name}_ns")[lane, :calls] * 1e-9

        times = CallTimes(
            *(seconds(name) for name in ("released", "scheduled", "first_token", "finished")),
            workload.output_tokens,
        )
        totals = {
            name: int(getattr(outcome, name)[lane]) for name in ("prompt_tokens", "hit_tokens", "preemptions")
        }
        metrics = run_metrics(
            times,
            workload.arrival * 1e-9,
            outcome.program_finished_ns[lane, :programs] * 1e-9,
            float(outcome.busy_ns[lane].sum()) * 1e-9,
            1,
            totals,
        )
        extra = {
            "times": times,
            "cached": outcome.call_cached_tokens[lane, :calls],
            "recomputed": int(outcome.recomputed_tokens[lane]),
            "workload": workload,
            "calls": calls,
            "prompt_tokens": totals["prompt_tokens"],
            "output_tokens": int(workload.output_tokens.sum()),
        }
        rows.append(metrics | extra)
    return rows


def simulate(
    variant: Variant, seeds: Sequence[int], rates: Sequence[float] = RATES
) -> dict[float, list[dict[str, Any]]]:
    """One run a rate and seed."""
    drawn = [variant.programs(seed) for seed in seeds]
    lanes = []
    for rate in rates:
        for seed, programs in zip(seeds, drawn, strict=True):
            if variant.arrivals == "published":
                timed = published_arrivals(programs, rate, variant.first)
            else:
                timed = arrivals.poisson([replace(p, arrival_s=None) for p in programs], rate=rate, seed=seed)
            lanes.append((timed, cluster(**variant.cluster), variant.policy))
    rows = run(lanes)
    return {rate: rows[i * len(seeds) : (i + 1) * len(seeds)] for i, rate in enumerate(rates)}


def column(rows: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """One metric over seeds."""
    return np.array([row[name] for row in rows], float)


def variants(measured: list[list[tuple[int, int]]] | None) -> list[Variant]:
    """Every input, one at a time."""
    output = [
        Variant("output", f"median {m} tokens", swebench(output_median_tokens=float(m))) for m in (40, 65, 80)
    ]
    output.append(Variant("output", "not correlated with growth", swebench(output_growth_correlation=0.0)))
    context = [
        Variant(
            "context",
            f"{c:+d} % per call",
            swebench(context_tokens_per_call=CONTEXT_TOKENS_PER_CALL * (1 + c / 100)),
        )
        for c in (-10, 10, 20)
    ]
    context += [
        Variant("context", "not scaled to the total", swebench(context_tokens_per_call=None)),
        Variant("context", "growth sigma 0.6", swebench(growth_sigma=0.6)),
        Variant("context", "growth sigma 1.5", swebench(growth_sigma=1.5)),
        Variant("context", "programs differ, sigma 0.5", spread_growth(0.5)),
        Variant("context", "growth ~ calls^-0.3", spread_growth(0.0, -0.3)),
        Variant("context", "growth ~ calls^+0.3", spread_growth(0.0, 0.3)),
    ]
    gaps = [Variant("gaps", f"x {f}", gaps_times(f)) for f in (0, 4)]
    decode = {"c0", "c_kv", "c_seq", "c_mixed"}
    prefill = {"c_tok", "c_prefill"}
    times = [
        Variant(
            "step time",
            f"{name} {f - 1:+.0%}",
            cluster={"performance": coefficients(**dict.fromkeys(terms, f))},
        )
        for name, terms, factors in (("decode", decode, (0.9, 1.1)), ("prefill", prefill, (0.8, 1.1, 1.2)))
        for f in factors
    ]
    times += [
        Variant("step time", "no wake-up", cluster={"performance": coefficients(wakeup=0.0)}),
        Variant(
            "step time", "decodes beside a chunk as alone", cluster={"performance": coefficients(c_mixed=0.0)}
        ),
    ]
    pool = [
        Variant("pool", f"{p:+d} %", cluster={"kv_blocks": round(POOL_BLOCKS * (1 + p / 100))})
        for p in (-20, -10, 10, 20)
    ]
    engine = [
        Variant("engine", f"{n:,} tokens an iteration", cluster={"max_num_batched_tokens": n})
        for n in (2048, 8192)
    ]
    engine += [
        Variant("engine", "at most 4 calls run", cluster={"max_num_seqs": 4}),
        Variant("engine", "nothing is kept (evict)", policy=ajx.Policy(retention="evict")),
    ]
    calls = [
        Variant("calls", "independent draws", counted(free_counts)),
        Variant("calls", "same median and total, longest 122", counted(tail(short_tail))),
        Variant("calls", "same median and total, longest 173", counted(tail(middle_tail))),
        Variant("calls", "same median and total, 4 of 225", counted(tail(long_tail))),
        Variant("calls", "sigma 0.42 as measured, same total", swebench(calls_median=52.6, calls_sigma=0.42)),
    ]
    order = [
        Variant("order", "long programs first", ordered(lambda p: -len(p.calls))),
        Variant("order", "long programs last", ordered(lambda p: len(p.calls))),
    ]
    replay = []
    if measured:
        replay = [
            Variant("replay", "measured programs, thinned, lengthened", replayed(measured, False)),
            Variant("replay", "the same at 2,873 calls, 38.7 M", replayed(measured, True)),
        ]
    return [*output, *context, *gaps, *times, *pool, *engine, *calls, *order, *replay]


# ---- reports -----------------------------------------------------------------------------------------------


def text(interval: Interval, digits: int = 0) -> str:
    """Mean and interval."""
    return f"{interval.mean:,.{digits}f} [{interval.low:,.{digits}f}, {interval.high:,.{digits}f}]"


def regimes(rows: Sequence[dict[str, Any]]) -> str:
    """How many runs are in which load regime."""
    found = [row["load_regime"] for row in rows]
    return ", ".join(f"{found.count(r)} {r}" for r in LOAD_REGIMES if r in found)


def print_level(
    name: str, rows: Sequence[dict[str, Any]], published: tuple[float, float, float] | None
) -> None:
    """One configuration: level, load and where the published draw lies among ours."""
    mean = column(rows, "jct_mean")
    parts = [
        f"mean {text(mean_interval(mean))} sd {mean.std(ddof=1):,.0f}",
        f"range {mean.min():,.0f}-{mean.max():,.0f}",
    ]
    parts += [f"{n} {text(mean_interval(column(rows, f'jct_{n}')))}" for n in ("p50", "p99")]
    parts += [f"hit {column(rows, 'hit_rate').mean():.2f}", f"util {column(rows, 'utilization').mean():.2f}"]
    parts += [
        f"preempt {column(rows, 'preemptions').mean():.0f}",
        f"queue {column(rows, 'queue_delay_mean').mean():.1f} s",
    ]
    parts += [f"makespan {column(rows, 'makespan').mean():,.0f}", regimes(rows)]
    if published:
        below = [
            int((column(rows, f"jct_{n}") < p).sum())
            for n, p in zip(("mean", "p50", "p99"), published, strict=True)
        ]
        parts.append(f"published {published} below it {below} of {len(rows)}")
    print(f"{name}: " + "; ".join(parts), flush=True)


FOOTPRINTS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, np.inf)


def footprint_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Calls by the contexts of the programs in the system at their release, as a share of the pool."""
    found = []
    for row in rows:
        workload, times = row["workload"], row["times"]
        arrival = workload.arrival * 1e-9
        finished = arrival + row["jct"]
        contexts = np.zeros(row["calls"])
        for p in range(len(arrival)):
            own = slice(workload.first_call[p], workload.first_call[p] + workload.calls[p])
            latest = np.searchsorted(times.released_s[own], times.released_s, side="right") - 1
            present = (times.released_s >= arrival[p]) & (times.released_s < finished[p])
            contexts += np.where(present, workload.prompt_tokens[own][np.maximum(latest, 0)], 0)
        e2e = times.finished_s - times.released_s
        share = contexts / (POOL_BLOCKS * 16)
        found.append(np.stack([share, row["cached"], workload.prompt_tokens, e2e]))
    share, cached, prompt, e2e = np.concatenate(found, axis=1)
    out = []
    for low, high in itertools.pairwise(FOOTPRINTS):
        chosen = (share >= low) & (share < high)
        if chosen.any():
            out.append(
                {
                    "low": low,
                    "high": high,
                    "calls": chosen.mean(),
                    "hit": cached[chosen].sum() / prompt[chosen].sum(),
                    "e2e_s": e2e[chosen].mean(),
                }
            )
    return out


def prefill_s(row: dict[str, Any], hits: bool) -> float:
    """Time to prefill all prompts one by one without any hit, or with the hits of the run (s)."""
    prompt = row["workload"].prompt_tokens.astype(float)
    cached = row["cached"].astype(float) if hits else np.zeros_like(prompt)
    work = float(PERFORMANCE.c_prefill_ns) * (prompt**2 - cached**2) / 2
    return float((float(PERFORMANCE.c_tok_ns) * (prompt - cached) + work).sum() * 1e-9)


# ---- parts of the study ------------------------------------------------------------------------------------

Record = dict[str, Any]


def record(
    part: str, variant: Variant, rate: float, rows: Sequence[Record], base: Sequence[Record] | None
) -> Record:
    """A line of sensitivity.csv."""
    level = mean_interval(column(rows, "jct_mean"))
    change = Interval(0.0, 0.0, 0.0, len(rows))
    if base is not None:
        change = mean_interval(change_percent(column(rows, "jct_mean"), column(base, "jct_mean")))
    calls = column(rows, "calls")
    return {
        "part": part,
        "group": variant.group,
        "variant": variant.label,
        "programs": variant.first or 50,
        "arrivals": variant.arrivals,
        "rate_per_s": rate,
        "seeds": len(rows),
        "calls": calls.mean(),
        "prompt_tokens_per_call": (column(rows, "prompt_tokens") / calls).mean(),
        "output_tokens_per_call": (column(rows, "output_tokens") / calls).mean(),
        "jct_mean_s": level.mean,
        "jct_mean_low_s": level.low,
        "jct_mean_high_s": level.high,
        "jct_p50_s": column(rows, "jct_p50").mean(),
        "jct_p99_s": column(rows, "jct_p99").mean(),
        "change_percent": change.mean,
        "change_low_percent": change.low,
        "change_high_percent": change.high,
        "hit_rate": column(rows, "hit_rate").mean(),
        "queue_delay_s": column(rows, "queue_delay_mean").mean(),
        "preemptions": column(rows, "preemptions").mean(),
        "makespan_s": column(rows, "makespan").mean(),
        "regimes": regimes(rows),
    }


def largest_context(rows: Sequence[Record]) -> float:
    """Mean over runs of the largest context (tokens)."""
    return float(np.mean([(r["workload"].prompt_tokens + r["workload"].output_tokens).max() for r in rows]))


def level_part() -> dict[float, list[Record]]:
    """The baseline over 32 seeds, with the generator's arrivals and with the published ones."""
    print("\n## Level, LRU + FCFS, 32 seeds", flush=True)
    seeds = range(32)
    for where in ("shipped", "published"):
        found = simulate(Variant("baseline", "baseline", arrivals=where), seeds)
        for rate, rows in found.items():
            print_level(f"50 programs, {rate}/s, {where} arrivals", rows, PUBLISHED[50, rate])
    first = simulate(Variant("baseline", "first 30", first=30), seeds)
    for rate, rows in first.items():
        print_level(f"first 30 programs, {rate}/s, published arrivals", rows, PUBLISHED[30, rate])
    largest = [int((r["workload"].prompt_tokens + r["workload"].output_tokens).max()) for r in first[0.1]]
    fitting = [seed for seed, tokens in zip(seeds, largest, strict=True) if tokens <= POOL_BLOCKS // 2 * 16]
    print(
        f"largest context, all 50 programs: mean {largest_context(found[0.1]):,.0f} tokens; of the first 30: "
        f"{np.mean(largest):,.0f}; it fits into half the pool in {len(fitting)} of {len(seeds)} draws"
    )
    half = Variant("baseline", "first 30", first=30, cluster={"kv_blocks": POOL_BLOCKS // 2})
    print_level("  half the pool, the draws that fit", simulate(half, fitting, (0.1,))[0.1], None)
    whole = [r for r, tokens in zip(first[0.1], largest, strict=True) if tokens <= POOL_BLOCKS // 2 * 16]
    print_level("  whole pool, the same draws", whole, None)
    print(f"  published mean with half the pool: {PUBLISHED_HALF_POOL:,.0f} s")
    near = [r for r in found[0.02] if abs(r["jct_mean"] / PUBLISHED[50, 0.02][0] - 1) < 0.15]
    print_level("seeds with a mean within 15 % of the published at 0.02/s", near, PUBLISHED[50, 0.02])
    for rate, rows in found.items():
        print(
            f"correlation of mean JCT and hit rate over seeds, {rate}/s: "
            f"{np.corrcoef(column(rows, 'jct_mean'), column(rows, 'hit_rate'))[0, 1]:.2f}"
        )
    return found


def arrival_part() -> None:
    """Fixed programs: arrivals redrawn, and the order of programs under the published arrivals."""
    print("\n## Fixed programs, 0.02/s, 32 draws each", flush=True)
    for seed in range(3):
        programs = baseline(seed)
        bare = [replace(p, arrival_s=None) for p in programs]
        redrawn = [arrivals.poisson(bare, rate=0.02, seed=1000 + k) for k in range(32)]
        rng = np.random.default_rng(seed)
        mixed = [published_arrivals([programs[i] for i in rng.permutation(50)], 0.02) for _ in range(32)]
        for name, draws in (("arrivals redrawn", redrawn), ("order redrawn, published arrivals", mixed)):
            rows = run([(draw, cluster(), ajx.Policy()) for draw in draws])
            print_level(f"programs of seed {seed}, {name}", rows, PUBLISHED[50, 0.02])


def load_part(found: dict[float, list[Record]]) -> None:
    """Where the hits go: by the contexts in the system, and what the prefill of everything would take."""
    print("\n## Contexts in the system against the pool (published arrivals, 32 seeds)", flush=True)
    for rate, rows in found.items():
        for line in footprint_table(rows):
            print(
                f"{rate}/s  {line['low']:.2f}-{line['high']:.2f} pools: {line['calls']:6.1%} of calls, "
                f"hit {line['hit']:.3f}, {line['e2e_s']:6.1f} s a call"
            )
        without, done = (np.mean([prefill_s(r, hits) for r in rows]) for hits in (False, True))
        print(
            f"{rate}/s  prefill without any hit {without:,.0f} s, done {done:,.0f} s, "
            f"makespan {column(rows, 'makespan').mean():,.0f} s, recomputed "
            f"{column(rows, 'recomputed').mean():,.0f} tokens, JCT per call "
            f"{column(rows, 'jct_mean').mean() * 50 / 2872:.1f} s "
            f"(published {PUBLISHED[50, rate][0] * 50 / 2873:.1f})",
            flush=True,
        )


def sensitivity_part(seeds: Sequence[int], measured: list[list[tuple[int, int]]] | None) -> list[Record]:
    """Every input, one at a time, against the baseline of the same seed."""
    print(
        f"\n## One input at a time, published arrivals, {len(seeds)} seeds: change of mean JCT (%)",
        flush=True,
    )
    base = Variant("baseline", "baseline")
    found = simulate(base, seeds)
    out = [record("sensitivity", base, rate, rows, None) for rate, rows in found.items()]
    for variant in variants(measured):
        changed = simulate(variant, seeds)
        lines = [record("sensitivity", variant, rate, changed[rate], found[rate]) for rate in RATES]
        out += lines
        words = " | ".join(
            f"{x['jct_mean_s']:6,.0f} {x['change_percent']:+4.0f} [{x['change_low_percent']:+.0f}, "
            f"{x['change_high_percent']:+.0f}] {x['jct_p50_s']:,.0f} {x['jct_p99_s']:,.0f} "
            f"{x['hit_rate']:.2f}"
            for x in lines
        )
        print(
            f"{variant.group:9s} {variant.label:40s} {words} | calls {lines[0]['calls']:,.0f} "
            f"prompt {lines[0]['prompt_tokens_per_call']:,.0f} out {lines[0]['output_tokens_per_call']:.0f}",
            flush=True,
        )
    print("first 30 programs at 0.1/s, gaps multiplied (published x4 +5.3, x16 +14.1, x64 +44.5):")
    plain = simulate(Variant("gaps", "x 1", first=30), seeds, (0.1,))[0.1]
    for factor in (4, 16, 64):
        variant = Variant("gaps", f"x {factor}", gaps_times(factor), first=30)
        rows = simulate(variant, seeds, (0.1,))[0.1]
        out.append(record("first 30", variant, 0.1, rows, plain))
        print(
            f"  x{factor} {out[-1]['change_percent']:+.1f} [{out[-1]['change_low_percent']:+.1f}, "
            f"{out[-1]['change_high_percent']:+.1f}]",
            flush=True,
        )
    return out


def light_part(seeds: Sequence[int]) -> list[Record]:
    """The two cells without congestion: 20 programs with 797 calls, and the first 10 of them."""
    print("\n## Light load (no wake-up, as in the published simulator)", flush=True)
    few = {
        "programs": 20,
        "calls_median": LIGHT_CALLS / 20 / np.exp(0.634**2 / 2),
        "context_tokens_per_call": None,
    }
    cases: dict[str, tuple[dict[str, Any], float]] = {"shipped": ({}, 1.0)}
    cases |= {f"output median {m}": ({"output_median_tokens": float(m)}, 1.0) for m in (40, 45, 65, 80)}
    cases |= {f"gaps x {f}": ({}, float(f)) for f in (0, 4)}
    cases["growth mean 220"] = ({"growth_mean_tokens": 220.0}, 1.0)
    out = []
    quiet = cluster(performance=coefficients(wakeup=0.0))
    for name, (parameters, factor) in cases.items():
        lanes = []
        for count, rate in PUBLISHED_LIGHT:
            for seed in seeds:
                programs = ajx.workloads.swebench(seed, **(few | parameters))
                scaled = [
                    rebuilt(p, lambda k, c, f=factor: replace(c, tool_s=c.tool_s * f)) for p in programs
                ]
                lanes.append((published_arrivals(scaled, rate, count), quiet, ajx.Policy()))
        rows = run(lanes)
        for i, ((count, rate), published) in enumerate(PUBLISHED_LIGHT.items()):
            part = rows[i * len(seeds) : (i + 1) * len(seeds)]
            out.append(record("light", Variant("light", name, first=count), rate, part, None))
            per_call = mean_interval(column(part, "jct_mean") * count / column(part, "calls"))
            print(
                f"{count} programs, {rate}/s, {name}: mean {text(mean_interval(column(part, 'jct_mean')))} "
                f"p50 {column(part, 'jct_p50').mean():.0f} p99 {column(part, 'jct_p99').mean():.0f} "
                f"(published {published}); prompt {out[-1]['prompt_tokens_per_call']:,.0f}; "
                f"{text(per_call, 2)} s a call, {column(part, 'calls').mean():.0f} calls, hit "
                f"{column(part, 'hit_rate').mean():.2f}; {regimes(part)}",
                flush=True,
            )
    return out


def tail_part(seeds: Sequence[int]) -> list[Record]:
    """The other published cells, and the effect of PLAS, under other tails of the calls per program."""
    print(f"\n## Tail of the calls per program, published arrivals, {len(seeds)} seeds", flush=True)
    out = []
    shapes = {"122": short_tail, "173": middle_tail}
    cases = {"224 (shipped)": baseline} | {n: counted(tail(shape)) for n, shape in shapes.items()}
    plas = ajx.Policy(scheduling="plas")
    for name, programs in cases.items():
        first = simulate(Variant("tail", f"longest {name}", programs, first=30), seeds)
        for rate in RATES:
            print_level(f"longest {name}, first 30, {rate}/s", first[rate], PUBLISHED[30, rate])
        whole = simulate(Variant("tail", f"longest {name}", programs), seeds)
        ordered_by = simulate(Variant("tail", f"longest {name}, lru+plas", programs, policy=plas), seeds)
        for rate in RATES:
            out.append(record("tail", Variant("tail", f"longest {name}", first=30), rate, first[rate], None))
            out.append(record("tail", Variant("tail", f"longest {name}"), rate, whole[rate], None))
            variant = Variant("tail", f"longest {name}, lru+plas")
            out.append(record("tail", variant, rate, ordered_by[rate], whole[rate]))
            print_level(f"longest {name}, 50 programs, {rate}/s", whole[rate], PUBLISHED[50, rate])
            change = change_percent(column(ordered_by[rate], "jct_mean"), column(whole[rate], "jct_mean"))
            print(f"  lru+plas {text(mean_interval(change), 1)} %", flush=True)
    return out


def grid_part(seeds: Sequence[int]) -> list[Record]:
    """Retention x scheduling, paired by seed."""
    print(
        f"\n## Retention x scheduling, {len(seeds)} seeds: change of mean JCT (%) against LRU + FCFS",
        flush=True,
    )
    out = []
    names = [(r, s) for s in ("fcfs", "plas") for r in ("lru", "ttl", "pressure_ttl")]
    for where in ("shipped", "published"):
        found = {}
        for retention, scheduling in names:
            policy = ajx.Policy(retention=retention, scheduling=scheduling)
            variant = Variant("policy", f"{retention}+{scheduling}", policy=policy, arrivals=where)
            found[variant.label] = simulate(variant, seeds)
            for rate in RATES:
                rows, base = found[variant.label][rate], found["lru+fcfs"][rate]
                out.append(record("grid", variant, rate, rows, base))
                said = PUBLISHED_CHANGES[rate].get(variant.label, "-")
                change = change_percent(column(rows, "jct_mean"), column(base, "jct_mean"))
                print(
                    f"{where:9s} {rate}/s {variant.label:18s} {out[-1]['jct_mean_s']:6,.0f} s "
                    f"{text(mean_interval(change), 1)} published {said}; worse in "
                    f"{int((change > 0).sum())} of {len(change)}; hit {out[-1]['hit_rate']:.2f}",
                    flush=True,
                )
        for rate in RATES:
            base = found["lru+fcfs"][rate]
            plas = change_percent(column(found["lru+plas"][rate], "jct_mean"), column(base, "jct_mean"))
            deep = column(base, "jct_mean") > PUBLISHED[50, rate][0] * 0.85
            print(
                f"{where} {rate}/s lru+plas: correlation of its change with the baseline's hit rate "
                f"{np.corrcoef(plas, column(base, 'hit_rate'))[0, 1]:.2f}; in the {deep.sum()} seeds with a "
                f"level above 0.85 of the published: {text(mean_interval(plas[deep]), 1)}",
                flush=True,
            )
    return out


def figure(records: Sequence[Record], path: Path) -> None:
    """Change of the mean JCT for every input, at both rates, with the published level as a line."""
    from matplotlib.figure import Figure

    chosen = [r for r in records if r["part"] == "sensitivity" and r["group"] != "baseline"]
    names = list(dict.fromkeys((r["group"], r["variant"]) for r in chosen))
    drawing = Figure(figsize=(11, 1.6 + 0.225 * len(names)), layout="constrained")
    panels = drawing.subplots(1, 2, sharey=True)
    for axes, rate in zip(panels, reversed(RATES), strict=True):
        base = next(r for r in records if r["group"] == "baseline" and r["rate_per_s"] == rate)
        gap = 100 * (PUBLISHED[50, rate][0] / base["jct_mean_s"] - 1)
        axes.axvline(0, color="black", linewidth=0.8, label="baseline (shipped generator and coefficients)")
        axes.axvline(gap, color="#D55E00", linestyle="--", linewidth=1.2, label="published level (one draw)")
        for place, name in enumerate(names):
            r = next(r for r in chosen if (r["group"], r["variant"]) == name and r["rate_per_s"] == rate)
            span = [
                [r["change_percent"] - r["change_low_percent"]],
                [r["change_high_percent"] - r["change_percent"]],
            ]
            axes.errorbar(
                r["change_percent"],
                place,
                xerr=span,
                fmt="o",
                color="#0072B2",
                markersize=4,
                elinewidth=1.2,
                label="mean over seeds, 95 % interval" if place == 0 else None,
            )
            if place and names[place - 1][0] != name[0]:
                axes.axhline(place - 0.5, color="#cccccc", linewidth=0.6)
        axes.set_title(f"{rate} programs/s, baseline {base['jct_mean_s']:,.0f} s", fontsize=9, loc="left")
        axes.set_xlabel("change of mean JCT, same seed (%)")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), [f"{g}: {v}" for g, v in names], fontsize=7.5)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    save_figure(drawing, path)


def main() -> None:
    """The whole study."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--data", type=Path, default=HERE.parents[2] / "shared/data", help="folder of measured data"
    )
    options.add_argument("--seeds", type=int, default=16, help="seeds of the sensitivities and of the grid")
    options.add_argument("--devices", type=int, default=1, help="CPU devices")
    given = options.parse_args()
    prepare(given.devices)
    began = time.perf_counter()
    measured = measured_programs(given.data)
    if measured is None:
        print(f"{given.data}: no measured programs; the replay is left out", file=sys.stderr)
    seeds = range(given.seeds)
    load_part(level_part())
    arrival_part()
    records = sensitivity_part(seeds, measured)
    records += light_part(seeds)
    records += tail_part(seeds)
    records += grid_part(seeds)
    with open(HERE / "sensitivity.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        for r in records:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()})
    figure(records, HERE / "sensitivity.png")
    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
