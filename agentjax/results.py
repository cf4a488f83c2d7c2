"""The metrics of one finished run as a record, which `simulate`, `sweep` and their tables share."""

from typing import Any

import numpy as np

from agentjax.cluster import Cluster
from agentjax.energy import run_energy
from agentjax.metrics import CallTimes, run_metrics, summarize_counts
from agentjax.workloads.pack import SECOND, Workload

Record = dict[str, Any]
"""Results of one configuration: numbers, texts and arrays over programs, by name."""


def lane_record(outcome: Any, row: int, workload: Workload, cluster: Cluster) -> Record:
    """The metrics of one lane of an outcome."""
    calls, programs = len(workload.output_tokens), len(workload.arrival)

    def seconds(name: str, count: int) -> np.ndarray:
        nanoseconds = getattr(outcome, name)[row][:count]
        return np.where(nanoseconds >= 0, nanoseconds / SECOND, np.nan)

    times = CallTimes(
        released_s=seconds("call_released_ns", calls),
        scheduled_s=seconds("call_scheduled_ns", calls),
        first_token_s=seconds("call_first_token_ns", calls),
        finished_s=seconds("call_finished_ns", calls),
        output_tokens=workload.output_tokens,
    )
    replicas = cluster.replicas
    totals = {
        name: int(getattr(outcome, name)[row]) for name in ("prompt_tokens", "hit_tokens", "preemptions")
    }
    record = run_metrics(
        times,
        workload.arrival / SECOND,
        seconds("program_finished_ns", programs),
        float(outcome.busy_ns[row][:replicas].sum() / SECOND),
        replicas,
        totals,
    )
    record["status"] = int(outcome.status[row])
    if getattr(outcome, "token_gaps", None) is not None:
        values, counts = outcome.token_gaps[row]
        record |= summarize_counts("itl", values / SECOND, counts)
    return record


def cluster_energy(record: Record, cluster: Cluster) -> Record:
    """Energy and cost of a run from its metrics, by name; nothing where the hardware is unknown."""
    if cluster.hardware is None:
        return {}
    return run_energy(
        cluster.hardware,
        busy_s=record["busy"],
        makespan_s=record["makespan"],
        replicas=cluster.replicas,
        gpus_per_replica=cluster.gpus,
        programs=record["completed"],
        output_tokens=record["output_tokens"],
    )
