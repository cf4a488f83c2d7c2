"""One run: a workload, a cluster and a policy in, a dataset out."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentjax.cluster import Cluster
from agentjax.config.build import chosen
from agentjax.energy import ENERGY
from agentjax.engine.run import STATUS, LaneSpec, Outcome, fault_of, run_lanes
from agentjax.performance.valid import Watch
from agentjax.policies import Policy
from agentjax.results import cluster_energy, lane_record
from agentjax.workloads.pack import SECOND, Workload, pack
from agentjax.workloads.program import Program

if TYPE_CHECKING:
    import xarray as xr

_CALL_TIMES = {
    "released": "release of the call",
    "scheduled": "first scheduling",
    "first_token": "first token",
    "finished": "last token",
    "service": "iterations that scheduled the call",
}
_CALL_COUNTS = {
    "call_cached_tokens": (
        "cached_tokens",
        "prompt tokens found in the prefix cache at first scheduling",
        {"units": "tokens"},
    ),
    "call_preemptions": ("preemptions_of_call", "preemptions of the call", {}),
    "call_replica": ("replica_of_call", "replica that ran the call", {}),
}
_TOTALS = {
    "iterations": ("1", "engine iterations"),
    "steps": ("1", "simulator steps"),
    "preemptions": ("1", "preemptions"),
    "prompt_tokens": ("tokens", "prompt tokens of all calls"),
    "hit_tokens": ("tokens", "prompt tokens found in the prefix cache at first scheduling"),
    "recomputed_tokens": ("tokens", "prefill tokens of preempted calls"),
    "wasted_tokens": ("tokens", "computed for calls that had ended or been preempted meanwhile"),
    "evicted_blocks": ("blocks", "cached blocks reclaimed"),
}
_ITL = {"mean": "mean", "p50": "median", "p95": "95th percentile", "p99": "99th percentile", "max": "longest"}

_SERIES = {
    "in_use_blocks": ("blocks", "KV blocks of running calls"),
    "protected_blocks": ("blocks", "KV blocks protected by retention"),
    "running": ("1", "running calls"),
    "queued": ("1", "waiting calls"),
}


def simulate(
    workload: Workload | Sequence[Program],
    cluster: Cluster,
    policy: Policy | None = None,
    *,
    leaps: bool = True,
    check: bool = False,
    series: bool = False,
    until_s: float | None = None,
) -> "xr.Dataset":
    """Run one workload on one cluster to its end.

    Args:
        workload: programs, or packed ones.
        cluster: replicas and their limits.
        policy: the four policies; vLLM's own behaviour where absent.
        leaps: as in `run_lanes`; the results do not depend on it.
        check: verify the engine's invariants after every step (slow).
        series: add the time series of KV blocks and calls over `time` (s), one value an event.
        until_s: horizon: nothing later than this happens (s). The attribute `status` says if that cut the
            run; what had not happened is NaN.

    Returns:
        A dataset over `program`, `call` (program by program) and `replica`: instants and durations in
        seconds, counts, and the totals of the run, with its energy and cost where `cluster.hardware` is
        known; units in the attributes. NaN where something did not happen.

    Raises:
        InputError: a workload that the cluster can never run, or a policy whose answers cannot be used.
    """
    packed = workload if isinstance(workload, Workload) else pack(list(workload))
    lane = LaneSpec(0, cluster, policy or Policy(), until_s)
    outcome = run_one(packed, lane, leaps=leaps, checks=check, series=series)
    watch = Watch()
    watch.see(packed, cluster, outcome)
    watch.warn()
    return run_dataset(outcome, packed, lane)


def run_one(
    workload: Workload, lane: LaneSpec, progress: Callable[[float], None] | None = None, **options: Any
) -> Outcome:
    """The outcome of one lane, with its call records and the times between its tokens; `options` as of
    `run_lanes`.

    Raises:
        InputError: as `simulate`.
    """
    outcome = run_lanes([workload], [lane], gaps=True, progress=progress, **options)
    fault = fault_of(int(outcome.status[0]), lane)
    if fault is not None:
        raise fault
    return outcome


def run_dataset(outcome: Outcome, workload: Workload, lane: LaneSpec) -> "xr.Dataset":
    """The dataset that `simulate` returns, of an outcome with one lane and its call records."""
    import xarray as xr

    calls, programs, replicas = len(workload.gap), len(workload.names), lane.cluster.replicas

    def seconds(values: np.ndarray) -> np.ndarray:
        return np.where(values >= 0, values / SECOND, np.nan)

    def of_call(values: np.ndarray, meaning: str, **units: str) -> tuple[str, np.ndarray, dict[str, str]]:
        return "call", values[:calls], {**units, "long_name": meaning}

    def of_program(values: np.ndarray, meaning: str) -> tuple[str, np.ndarray, dict[str, str]]:
        return "program", values, {"units": "s", "long_name": meaning}

    def of_run(value: Any, meaning: str, units: str) -> tuple[tuple[()], Any, dict[str, str]]:
        return (), value, {"units": units, "long_name": meaning}

    arrival = seconds(workload.arrival)
    finished = seconds(outcome.program_finished_ns[0, :programs])
    service = seconds(outcome.program_service_ns[0, :programs])
    busy = seconds(outcome.busy_ns[0, :replicas])
    record = lane_record(outcome, 0, workload, lane.cluster)
    variables: dict[str, tuple[Any, Any, dict[str, str]]] = {
        f"{event}_s": of_call(seconds(getattr(outcome, f"call_{event}_ns")[0]), meaning, units="s")
        for event, meaning in _CALL_TIMES.items()
    }
    variables |= {
        name: of_call(getattr(outcome, column)[0], meaning, **units)
        for column, (name, meaning, units) in _CALL_COUNTS.items()
    }
    variables |= {
        "program_of_call": of_call(workload.call_program, "index of the call's program"),
        "turn": of_call(workload.call_turn, "place of the call in its program"),
        "prompt_tokens_of_call": of_call(workload.prompt_tokens, "prompt of the call", units="tokens"),
        "output_tokens_of_call": of_call(workload.output_tokens, "output of the call", units="tokens"),
        "arrival_s": of_program(arrival, "arrival of the program"),
        "program_finished_s": of_program(finished, "end of the program"),
        "jct_s": of_program(finished - arrival, "job completion time"),
        "attained_service_s": of_program(service, "iterations that scheduled the program's calls"),
        "busy_s": ("replica", busy, {"units": "s", "long_name": "time in iterations"}),
        "makespan_s": of_run(record["makespan"], "first arrival to last completion", "s"),
        "utilization": of_run(record["utilization"], "share of the makespan spent in iterations", "1"),
    }
    for name, (units, meaning) in _TOTALS.items():
        variables[name] = of_run(getattr(outcome, name)[0], meaning, units)
    if outcome.call_longest_gap_ns is not None:
        longest = seconds(outcome.call_longest_gap_ns[0])
        variables["longest_itl_s"] = of_call(longest, "longest time between two tokens", units="s")
    for suffix, words in _ITL.items():
        if (name := f"itl_{suffix}") in record:
            variables[name] = of_run(record[name], f"{words} time between two tokens of a call", "s")
    for name, value in cluster_energy(record, lane.cluster).items():
        variables[name] = of_run(value, *ENERGY[name])
    coordinates: dict[str, Any] = {"program": np.array(workload.names, np.dtypes.StringDType())}
    if outcome.series is not None:
        coordinates["time"] = ("time", outcome.series.now / SECOND, {"units": "s"})
        for name, (units, meaning) in _SERIES.items():
            values = np.asarray(getattr(outcome.series, name))[:, :replicas]
            variables[f"{name}_over_time"] = (
                ("time", "replica"),
                values,
                {"units": units, "long_name": meaning},
            )
    policies = {family: member.name for family, (member, _) in chosen(lane.policy).items()}
    return xr.Dataset(
        variables,
        coords=coordinates,
        attrs={"status": STATUS[int(outcome.status[0])], **policies},
    )
