"""A recording served again in simulation, many candidates side by side, and how far each is from it.

Compared are times to first token, latencies of calls, and job completion times of programs of several calls,
as logarithms of simulated over recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from agentjax.cluster import Cluster
from agentjax.engine.run import LaneSpec, Outcome, run_lanes
from agentjax.policies import Policy
from agentjax.workloads.pack import SECOND, Workload, pack
from agentjax.workloads.recorded import Recorded

METRICS = ("ttft", "latency", "jct")
BEND = 0.1
"""Of the loss: errors up to this size (of the logarithm) count by their square, larger ones by their size."""
BLOCKS = 16
_SHORTEST_S = 1e-7
_FEWEST = 5
"""Programs from which on a part of them is held out."""


@dataclass(frozen=True)
class Replayed:
    """Recorded times and the workload that they are of. Observations: all TTFTs, all latencies, all JCTs.

    Attributes:
        workload: of all programs.
        recorded_s: the observations.
        metric: index into `METRICS`.
        unit: program of each observation.
        weight: of the training observations; every metric has the same sum; 0 where held out or warming up.
        held_out: observations that the loss does not see.
        calls: call of each observation of TTFT and latency.
        programs: program of each JCT.
    """

    workload: Workload
    recorded_s: Float[np.ndarray, " observations"]
    metric: Int[np.ndarray, " observations"]
    unit: Int[np.ndarray, " observations"]
    weight: Float[np.ndarray, " observations"]
    held_out: Bool[np.ndarray, " observations"]
    calls: Int[np.ndarray, " calls"]
    programs: Int[np.ndarray, " programs"]

    @cached_property
    def block(self) -> Int[np.ndarray, " observations"]:
        """Groups of observations that count as one in judging noise: neighbours in order of arrival, up to 16
        groups of programs.
        """
        trained = np.unique(self.unit[self.weight > 0])
        place = np.searchsorted(trained, self.unit)
        return np.minimum(place * min(BLOCKS, len(trained)) // max(1, len(trained)), BLOCKS - 1)

    def log_ratios(self, outcome: Outcome) -> Float[np.ndarray, "lanes observations"]:
        """Logarithm of simulated over recorded; NaN in lanes that did not complete."""
        released, first, finished = (
            np.asarray(getattr(outcome, f"call_{name}_ns"))[:, self.calls] / SECOND
            for name in ("released", "first_token", "finished")
        )
        jct = (outcome.program_finished_ns[:, self.programs] - self.workload.arrival[self.programs]) / SECOND
        simulated = np.concatenate([first - released, finished - released, jct], axis=1)
        made = np.log(np.maximum(simulated, _SHORTEST_S) / np.maximum(self.recorded_s, _SHORTEST_S))
        return np.where(np.asarray(outcome.status)[:, None] == 0, made, np.nan)


def replayed(schedule: Recorded, hold_out: float, seed: int) -> Replayed:
    """The observations of a schedule, a part of its programs held out.

    Args:
        schedule: the programs and their requests.
        hold_out: share of the programs that the loss does not see; none of fewer than five, never all.
        seed: chooses them.
    """
    workload = pack(schedule.programs)
    measured = np.asarray([name not in schedule.warmups for name in workload.names])
    rows = np.flatnonzero(measured)
    count = min(round(hold_out * len(rows)), len(rows) - 1) if len(rows) >= _FEWEST else 0
    held = np.zeros(len(workload.names), bool)
    held[np.random.default_rng(seed).permutation(rows)[:count]] = True
    calls = np.flatnonzero(measured[workload.call_program])
    several = np.flatnonzero(measured & (workload.calls > 1))
    records = [record for name in workload.names for record in schedule.records[name]]
    latency = np.asarray([record.latency_s or 0.0 for record in records])
    ttft = np.asarray([record.ttft_s or 0.0 for record in records])
    ends = np.cumsum(workload.calls)
    jct = np.asarray(
        [
            (records[ends[program] - 1].finished_s or 0.0) - records[workload.first_call[program]].sent_s
            for program in several
        ]
    )
    recorded = np.concatenate([ttft[calls], latency[calls], jct])
    metric = np.repeat(np.arange(3), [len(calls), len(calls), len(several)])
    unit = np.concatenate([workload.call_program[calls], workload.call_program[calls], several])
    weight = np.where(held[unit], 0.0, 1.0)
    totals = np.bincount(metric, weight, minlength=3)
    weight /= np.maximum(totals, 1.0)[metric] * np.count_nonzero(totals)
    return Replayed(workload, recorded, metric, unit, weight, held[unit], calls, several)


def losses(log_ratios: Float[np.ndarray, "*lanes observations"]) -> Float[np.ndarray, "*lanes observations"]:
    """Half the square of small errors, and about `BEND` times the size of large ones (pseudo-Huber)."""
    return BEND**2 * (np.sqrt(1 + (log_ratios / BEND) ** 2) - 1)


class Simulator:
    """Simulates candidates, always the same number side by side, so that one compilation serves all calls."""

    def __init__(self, replayed: Replayed, policy: Policy, lanes: int):
        self.replayed = replayed
        self.policy = policy
        self.lanes = lanes
        self.simulated = 0

    def log_ratios(
        self, clusters: Sequence[Cluster], progress: Callable[[float], None] | None = None
    ) -> Float[np.ndarray, "candidates observations"]:
        """Logarithms of simulated over recorded times; NaN for candidates with which the run does not end."""
        parts = []
        for start in range(0, len(clusters), self.lanes):
            some = list(clusters[start : start + self.lanes])
            specs = [LaneSpec(0, cluster, self.policy) for cluster in some]
            specs += [specs[-1]] * (self.lanes - len(specs))
            outcome = run_lanes([self.replayed.workload], specs, progress=progress)
            parts.append(self.replayed.log_ratios(outcome)[: len(some)])
            self.simulated += len(some)
        return np.concatenate(parts)

    def loss(self, log_ratios: Float[np.ndarray, "lanes observations"]) -> Float[np.ndarray, " lanes"]:
        """The root of twice the mean loss of the training observations: a typical error of the logarithm.

        Infinite for candidates with which the run does not end.
        """
        mean = np.where(self.replayed.weight > 0, losses(log_ratios), 0.0) @ self.replayed.weight
        return np.sqrt(2 * np.where(np.isnan(mean), np.inf, mean))
