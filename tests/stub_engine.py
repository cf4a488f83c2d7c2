"""A stand-in for the engine: deterministic instants that depend on workload, policy and pool, at no cost."""

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np


def stub_stream_lanes(
    workloads: Any, lanes: Any, width: int = 64, gaps: bool = False, progress: Any = None
) -> Any:
    """Outcomes of lanes as the engine would give them, from random but reproducible numbers: the last half of
    them first.
    """
    half = len(lanes) // 2
    for indices in (range(half, len(lanes)), range(half)):
        if indices:
            yield list(indices), _outcome(workloads, [lanes[index] for index in indices], progress)


def _outcome(workloads: Any, lanes: Any, progress: Any) -> Any:
    rows = [_lane(workloads[lane.workload], lane) for lane in lanes]
    names = rows[0].keys()
    outcome = SimpleNamespace(**{name: _padded([row[name] for row in rows]) for name in names})
    if progress is not None:
        progress(1.0)
    return outcome


def _padded(values: list[Any]) -> np.ndarray:
    arrays = [np.asarray(value) for value in values]
    if arrays[0].ndim == 0:
        return np.stack(arrays)
    out = np.full((len(arrays), max(len(array) for array in arrays)), -1, arrays[0].dtype)
    for row, array in enumerate(arrays):
        out[row, : len(array)] = array
    return out


def _lane(workload: Any, lane: Any) -> dict[str, Any]:
    chosen = [choice.member.name for choice in _choices(lane.policy)]
    text = f"{workload.arrival.tolist()}|{chosen}|{lane.cluster.kv_blocks}"
    draw = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))
    program = np.repeat(np.arange(len(workload.calls)), workload.calls)
    wait = draw.integers(10_000_000, 2_000_000_000, len(program))
    first = draw.integers(10_000_000, 200_000_000, len(program))
    rest = (workload.output_tokens.astype(np.int64) - 1) * 50_000_000
    released = np.zeros(len(program), np.int64)
    finished = np.zeros(len(program), np.int64)
    for call in range(len(program)):
        start = (
            workload.arrival[program[call]]
            if call == workload.first_call[program[call]]
            else finished[call - 1] + workload.gap[call - 1]
        )
        released[call], finished[call] = start, start + wait[call] + first[call] + rest[call]
    last = workload.first_call + workload.calls - 1
    prompt = int(workload.new_tokens.sum())
    return {
        "call_released_ns": released,
        "call_scheduled_ns": released + wait,
        "call_first_token_ns": released + wait + first,
        "call_finished_ns": finished,
        "program_finished_ns": finished[last],
        "prompt_tokens": prompt,
        "hit_tokens": prompt // 2,
        "preemptions": int(draw.integers(0, 20)),
        "busy_ns": np.full(lane.cluster.replicas, int(finished.max() * 0.9)),
        "status": 0,
    }


def _choices(policy: Any) -> list[Any]:
    return [policy.retention, policy.scheduling, policy.routing, policy.admission]
