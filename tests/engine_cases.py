"""Cases of the reference (`tests.strategies`, `tests.reference.golden`) as lanes of the engine.

All batches of `run` have the same shapes, so that one compilation serves them all.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import Cluster, Policy
from agentjax.engine import lanes as engine
from agentjax.engine.run import LaneSpec, Outcome, run_lanes
from agentjax.performance import Affine
from agentjax.policies import Observation, registered, scheduling
from agentjax.workloads.pack import Workload

LANES = 32
"""Lanes of a batch: 31 cases and one that sets the number of replicas."""
REPLICAS, PREFIXES = 3, 2
"""The most that `random_case` draws."""

CALL = {
    "released": "call_released_ns",
    "scheduled": "call_scheduled_ns",
    "first_token": "call_first_token_ns",
    "finished": "call_finished_ns",
    "service_ns": "call_service_ns",
    "cached_tokens": "call_cached_tokens",
    "resume_hit_tokens": "call_resumed_tokens",
    "preemptions": "call_preemptions",
    "replica": "call_replica",
    "longest_gap": "call_longest_gap_ns",
}
"""Fields of a call in the reference, and what the engine calls them."""
PROGRAM = {"finished": "program_finished_ns", "service": "program_service_ns"}
TOTALS = {
    "wasted_tokens": "wasted_tokens",
    "iterations": "iterations",
    "empty_schedules": "empty_schedules",
    "preemptions": "preemptions",
    "prompt_tokens": "prompt_tokens",
    "hit_tokens": "hit_tokens",
    "recompute_tokens": "recomputed_tokens",
    "evicted_blocks": "evicted_blocks",
    "makespan_ns": "makespan_ns",
}
FREE = {"c0": 0, "c_tok": 0, "c_seq": 0, "c_kv": 0, "c_prefill": 0.0, "wakeup": 0}
"""A cost model without cost."""

LIMITS = ("replicas", "kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
RULES = {
    "vllm": "0.33",
    "async_scheduling": False,
    "reserve_full_isl": True,
    "watermark": 0.0,
    "long_prefill_token_threshold": 0,
}
"""Rules of the scheduler, where a configuration of the reference does not have them."""


def call_index(obs: Observation):
    return obs.program.turn.astype(jnp.float64)


def reverse_arrival(obs: Observation):
    return -jnp.floor(obs.program.arrival_s * 1e6 + 5e-4)


def zero(obs: Observation):
    return jnp.zeros_like(obs.now_s)


@contextmanager
def priorities() -> Iterator[None]:
    """Registers the priorities that only tests use, as the same members each time: nothing compiles anew."""
    with patch.dict(scheduling.members):
        for function in (call_index, reverse_arrival, zero):
            scheduling.register(function.__name__)(function)
        yield


def compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within this test nothing compiled before it is used, and nothing compiled in it is used after it."""
    monkeypatch.setattr(engine, "compiled", lru_cache(engine.compiled.__wrapped__))


def workload(programs: Sequence[dict], config: dict, prefixes: int = PREFIXES) -> Workload:
    """The programs in the order given, with at least `prefixes` shared prefixes, if need be unused ones."""
    prefix_tokens = config.get("prefix_tokens", [])
    rows, lengths = [], [len(program["calls"]) for program in programs]
    for program in programs:
        context = 0 if program["prefix"] is None else prefix_tokens[program["prefix"]]
        for turn, (new, output, kept, gap) in enumerate(program["calls"]):
            # kept tokens of the first call, or more than there are, mean all of them
            kept = -1 if kept is None or turn == 0 or kept >= context else kept
            context = (context if kept < 0 else kept) + new + output
            rows.append((new, output, kept, gap))
    new, output, kept, gap = np.array(rows, np.int64).T
    finish = [
        each
        for program in programs
        for each in program.get("finish") or [config.get("finish", "eos")] * len(program["calls"])
    ]
    return Workload(
        names=tuple(f"p{index}" for index in range(len(programs))),
        arrival=np.array([program["arrival_ns"] for program in programs], np.int64),
        first_call=(np.cumsum(lengths) - lengths).astype(np.int32),
        calls=np.array(lengths, np.int32),
        prefix=np.array([-1 if p["prefix"] is None else p["prefix"] for p in programs], np.int32),
        prefix_tokens=np.array([*prefix_tokens, *[0] * (prefixes - len(prefix_tokens))], np.int32),
        new_tokens=new.astype(np.int32),
        output_tokens=output.astype(np.int32),
        kept_tokens=kept.astype(np.int32),
        gap=gap,
        eos=np.array(finish) == "eos",
    )


def lane(index: int, config: dict) -> LaneSpec:
    """The lane of a configuration, cut at its "until_s" if there is one; call it within `priorities`."""
    planes = {plane: config[plane] for plane in ("retention", "routing", "admission")}
    policy = Policy(
        scheduling=config["scheduling"],
        **{plane: name for plane, (name, _) in planes.items()},
        parameters={plane: parameters for plane, (_, parameters) in planes.items()},
    )
    performance = Affine(**{f"{name}_s": cost / 1e9 for name, cost in config["cost"].items()})
    slots = {"slots": True} if config.get("slots", False) else {}
    rules = {name: config.get(name, default) for name, default in RULES.items()}
    cluster = Cluster(**{name: config[name] for name in LIMITS}, **rules, **slots, performance=performance)
    return LaneSpec(index, cluster, policy, config.get("until_s"))


def filler(config: dict) -> tuple[list[dict], dict]:
    """Two short calls with everything that a batch may lack and that is compiled only where it is needed: as
    many replicas as there ever are, compaction, and chunks of prompts.
    """
    programs = [{"arrival_ns": 0, "prefix": None, "calls": [(1, 1, None, 0), (1, 1, 0, 0)]}]
    chunks = 0 if config.get("slots", False) else 1
    return programs, config | {
        "replicas": REPLICAS,
        "prefix_tokens": [],
        "max_model_len": 131_072,
        "long_prefill_token_threshold": chunks,
        "until_s": None,
    }


def run(cases: Sequence[tuple[list[dict], dict]], **options) -> Outcome:
    """Run up to `LANES` − 1 cases side by side; lane i of the outcome is case i."""
    assert len(cases) < LANES
    cases = [*cases, *[filler(cases[0][1])] * (LANES - len(cases))]
    with priorities():
        lanes = [lane(index, config) for index, (_, config) in enumerate(cases)]
        options = {"policies": registered(), "gaps": True, "width": LANES} | options
        return run_lanes([workload(*case) for case in cases], lanes, **options)


def recorded(outcome: Outcome, index: int, programs: Sequence[dict], config: dict) -> dict:
    """One lane in the form of `tests.reference.simulator.simulate`, as far as both sides record it."""
    calls = sum(len(program["calls"]) for program in programs)

    def table(names: dict[str, str], rows: int) -> list[dict]:
        columns = {name: getattr(outcome, column)[index, :rows].tolist() for name, column in names.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    totals = {name: int(getattr(outcome, column)[index]) for name, column in TOTALS.items()}
    busy = outcome.busy_ns[index].tolist()
    assert not any(busy[config["replicas"] :])
    return {
        "calls": table(CALL, calls),
        "programs": table(PROGRAM, len(programs)),
        "totals": totals | {"busy_ns": busy[: config["replicas"]], "token_gaps": gaps_of(outcome, index)},
    }


def gaps_of(outcome: Outcome, index: int) -> dict | None:
    """How often each time between two tokens occurred in a lane."""
    if outcome.token_gaps is None:
        return None
    values, counts = outcome.token_gaps[index]
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def common(result: dict) -> dict:
    """The part of a result of the reference that the engine records as well."""
    return {
        "calls": [{name: call[name] for name in CALL} for call in result["calls"]],
        "programs": [{name: program[name] for name in PROGRAM} for program in result["programs"]],
        "totals": {name: result["totals"][name] for name in (*TOTALS, "busy_ns")}
        | {"token_gaps": result["token_gaps"]},
    }


def first_difference(got: dict, want: dict) -> str | None:
    """Where two results differ first, in words; None if they are equal."""
    for kind in ("calls", "programs"):
        for index, (a, b) in enumerate(zip(got[kind], want[kind], strict=True)):
            for name in b:
                if a[name] != b[name]:
                    return f"{kind}[{index}].{name}: {a[name]}, expected {b[name]}"
    for name, value in want["totals"].items():
        if got["totals"][name] != value:
            return f"totals.{name}: {got['totals'][name]}, expected {value}"
    return None
