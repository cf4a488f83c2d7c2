"""One run: a workload, a cluster and a policy in, a dataset out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentjax.cluster import Cluster
from agentjax.policies import FAMILIES, Policy
from agentjax.workloads.pack import Workload, pack
from agentjax.workloads.program import Program

if TYPE_CHECKING:
    import xarray as xr

_CALLS = {
    "call_released_ns": ("released_s", "release of the call"),
    "call_scheduled_ns": ("scheduled_s", "first scheduling"),
    "call_first_token_ns": ("first_token_s", "first token"),
    "call_finished_ns": ("finished_s", "last token"),
    "call_service_ns": ("service_s", "iterations that scheduled the call"),
}
_TOTALS = {
    "iterations": ("1", "engine iterations"),
    "steps": ("1", "simulator steps"),
    "preemptions": ("1", "preemptions"),
    "prompt_tokens": ("tokens", "prompt tokens of all calls"),
    "hit_tokens": ("tokens", "prompt tokens found in the prefix cache at first scheduling"),
    "recomputed_tokens": ("tokens", "prefill tokens of preempted calls"),
    "evicted_blocks": ("blocks", "cached blocks reclaimed"),
}


def simulate(
    workload: Workload | Sequence[Program],
    cluster: Cluster,
    policy: Policy | None = None,
    *,
    leaps: bool = True,
    check: bool = False,
) -> "xr.Dataset":
    """Run one workload on one cluster to its end.

    Args:
        workload: programs, or packed ones.
        cluster: replicas and their limits.
        policy: the four policies; vLLM's own behaviour where absent.
        leaps: as in `run_lanes`; the results do not depend on it.
        check: verify the engine's invariants after every step (slow).

    Returns:
        A dataset over `program`, `call` (program by program) and `replica`: instants and durations in seconds, counts,
        and the totals of the run; units in the attributes. NaN where something did not happen.

    Raises:
        InputError: a workload that the cluster can never run.
    """
    import xarray as xr

    from agentjax.engine.run import STATUS, LaneSpec, run_lanes

    packed = workload if isinstance(workload, Workload) else pack(list(workload))
    outcome = run_lanes([packed], [LaneSpec(0, cluster, policy or Policy())], leaps=leaps, checks=check)
    calls, programs, replicas = len(packed.gap), len(packed.names), cluster.replicas
    variables: dict[str, tuple[str | tuple[()], np.ndarray, dict[str, str]]] = {}

    def seconds(values: np.ndarray) -> np.ndarray:
        return np.where(values >= 0, values / 1e9, np.nan)

    for column, (name, meaning) in _CALLS.items():
        variables[name] = ("call", seconds(getattr(outcome, column)[0, :calls]), {"units": "s", "long_name": meaning})
    variables |= {
        "program_of_call": ("call", packed.call_program, {"long_name": "index of the call's program"}),
        "turn": ("call", packed.call_turn, {"long_name": "place of the call in its program"}),
        "prompt_tokens_of_call": ("call", packed.prompt_tokens, {"units": "tokens", "long_name": "prompt of the call"}),
        "output_tokens_of_call": ("call", packed.output_tokens, {"units": "tokens", "long_name": "output of the call"}),
        "cached_tokens": (
            "call",
            outcome.call_cached_tokens[0, :calls],
            {"units": "tokens", "long_name": "prompt tokens found in the prefix cache at first scheduling"},
        ),
        "preemptions_of_call": ("call", outcome.call_preemptions[0, :calls], {"long_name": "preemptions of the call"}),
        "replica_of_call": ("call", outcome.call_replica[0, :calls], {"long_name": "replica that ran the call"}),
    }
    arrival = packed.arrival / 1e9
    finished = seconds(outcome.program_finished_ns[0, :programs])
    variables |= {
        "arrival_s": ("program", arrival, {"units": "s", "long_name": "arrival of the program"}),
        "program_finished_s": ("program", finished, {"units": "s", "long_name": "end of the program"}),
        "jct_s": ("program", finished - arrival, {"units": "s", "long_name": "job completion time"}),
        "attained_service_s": (
            "program",
            outcome.program_service_ns[0, :programs] / 1e9,
            {"units": "s", "long_name": "iterations that scheduled the program's calls"},
        ),
        "busy_s": ("replica", outcome.busy_ns[0, :replicas] / 1e9, {"units": "s", "long_name": "time in iterations"}),
        "makespan_s": ((), seconds(outcome.makespan_ns[0]), {"units": "s", "long_name": "end of the last program"}),
    }
    for name, (units, meaning) in _TOTALS.items():
        variables[name] = ((), np.asarray(getattr(outcome, name)[0]), {"units": units, "long_name": meaning})
    names = {
        family: list(registered.members)[int(getattr(policy or Policy(), family).index)]
        for family, registered in FAMILIES.items()
    }
    return xr.Dataset(
        variables,
        coords={"program": list(packed.names)},
        attrs={"status": STATUS[int(outcome.status[0])], **names},
    )
