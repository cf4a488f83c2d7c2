"""Agent programs played on a real endpoint, and the same programs simulated: job completion times compared.

The programs of a recording are simulated with the arrivals, prompt and output lengths and tool gaps that were
recorded; queues, cache hits and durations are the simulator's own. Several recordings of one workload are
repeats: their spread says how much of an error can be noise.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from agentjax.cluster import LIMITS, Cluster
from agentjax.engine.run import STATUS, LaneSpec, run_lanes
from agentjax.errors import complaint
from agentjax.metrics import CallTimes, e2e_s, jct_s, ttft_s
from agentjax.performance.valid import Watch
from agentjax.policies import Policy
from agentjax.records import Recording
from agentjax.workloads.pack import SECOND, Workload, pack
from agentjax.workloads.recorded import Recorded, recorded_programs

METRICS = ("jct", "ttft", "itl", "e2e")
"""Of programs: job completion time. Of calls: time to first token, time between tokens, latency."""

STATISTICS: Mapping[str, float | None] = {"mean": None, "p50": 50.0, "p90": 90.0, "p99": 99.0}
"""Statistics of each; percentiles interpolate linearly between order statistics."""


@dataclass(frozen=True)
class Played:
    """What happened to the programs of one run, measured or simulated; in the order of the packed workload.

    Attributes:
        programs: their names.
        jct_s: from the release of a program's first call to the last token of its last.
        ttft_s, e2e_s: of every call.
        itl_s: every time between two tokens of a call, of all calls, in no order.
        cached_tokens: of every call; NaN where the endpoint did not tell.
    """

    programs: tuple[str, ...]
    jct_s: Float[np.ndarray, " programs"]
    ttft_s: Float[np.ndarray, " calls"]
    e2e_s: Float[np.ndarray, " calls"]
    itl_s: Float[np.ndarray, " gaps"]
    cached_tokens: Float[np.ndarray, " calls"]

    def values(self, metric: str) -> np.ndarray:
        """The values of one of `METRICS` (s)."""
        return getattr(self, f"{metric}_s")


@dataclass(frozen=True)
class Error:
    """A statistic on both sides, averaged over the repeats (s).

    Attributes:
        error_pct: of the simulated one, in per cent of the measured one; NaN where that is not known or 0.
        spread_pct: half the range of the measured one over the repeats, in per cent; None for one repeat.
    """

    measured_s: float
    simulated_s: float
    error_pct: float
    spread_pct: float | None


@dataclass(frozen=True)
class ProgramValidation:
    """Repeats of one workload, measured and simulated."""

    cluster: Cluster
    about: Mapping[str, Any]
    programs: int
    calls: int
    prompt_tokens_of_call: float
    left_out: Mapping[str, int]
    """Programs of all repeats that could not be simulated, by reason."""
    measured: tuple[Played, ...]
    simulated: tuple[Played, ...]
    errors: Mapping[str, Error]
    program_error_pct: float
    """Mean absolute error of the job completion time of a program."""

    @property
    def hit_rates(self) -> tuple[float, float]:
        """Cached share of all prompt tokens, (measured, simulated); NaN where not known."""
        measured, simulated = (
            float(np.mean([np.mean(played.cached_tokens) for played in side])) / self.prompt_tokens_of_call
            for side in (self.measured, self.simulated)
        )
        return measured, simulated

    def to_json(self) -> dict[str, Any]:
        """All but the calls, as plain values; times in s."""
        hit_rates = [_finite(rate) for rate in self.hit_rates]
        return {
            "endpoint": {key: self.about.get(key) for key in ("url", "model", "server", "started")},
            "repeats": len(self.measured),
            "programs": self.programs,
            "calls": self.calls,
            "left_out": dict(self.left_out),
            "cluster": {name: getattr(self.cluster, name) for name in LIMITS},
            "errors": {
                name: {key: _finite(value) for key, value in asdict(error).items()}
                for name, error in self.errors.items()
            },
            "program_error_pct": self.program_error_pct,
            "hit_rate": dict(zip(("measured", "simulated"), hit_rates, strict=True)),
            "jct_s": {
                side: [
                    dict(zip(played.programs, played.jct_s.tolist(), strict=True))
                    for played in getattr(self, side)
                ]
                for side in ("measured", "simulated")
            },
        }


def validate_programs(
    recordings: Sequence[Recording], cluster: Cluster, policy: Policy | None = None
) -> ProgramValidation:
    """Simulate the programs of recordings and compare.

    Args:
        recordings: repeats of one workload, as `python -m agentjax.bench mode=programs` writes them.
        cluster: what the endpoint is.
        policy: vLLM's own behaviour where absent.

    Raises:
        InputError: a recording without a complete program, recordings of different programs, or a simulation
            that does not end.
    """
    for recording in recordings:
        if all(record.place is None for record in recording.requests):
            file = recording.about.get("file", "data")
            raise complaint(
                str(file), "requests of no program", "programs, as of agentjax.bench mode=programs"
            )
    recorded = [recorded_programs(recording) for recording in recordings]
    workloads = [pack(found.programs) for found in recorded]
    for found, workload in zip(recorded[1:], workloads[1:], strict=True):
        if set(workload.names) != set(workloads[0].names):
            other = next(iter(set(workload.names) ^ set(workloads[0].names)))
            raise complaint(
                "data",
                f"program {other!r} in one recording but not in another",
                f"repeats of one workload{' (programs that failed are left out)' if found.left_out else ''}",
            )
    measured = tuple(_measured(found, workload) for found, workload in zip(recorded, workloads, strict=True))
    simulated = tuple(_simulated(workload, cluster, policy or Policy()) for workload in workloads)
    program_errors = [
        np.abs(ours.jct_s / theirs.jct_s - 1) for theirs, ours in zip(measured, simulated, strict=True)
    ]
    return ProgramValidation(
        cluster=cluster,
        about=recordings[0].about,
        programs=len(workloads[0].names),
        calls=len(workloads[0].gap),
        prompt_tokens_of_call=float(np.mean([np.mean(workload.prompt_tokens) for workload in workloads])),
        left_out=dict(sum((Counter(found.reasons) for found in recorded), Counter())),
        measured=measured,
        simulated=simulated,
        errors=_errors(measured, simulated),
        program_error_pct=float(100 * np.mean(np.concatenate(program_errors))),
    )


def _measured(found: Recorded, workload: Workload) -> Played:
    """The recorded run, its calls in the order of the packed workload."""
    calls = [record for name in workload.names for record in found.records[name]]
    ends = np.cumsum(workload.calls)
    sent = np.asarray([record.sent_s for record in calls])
    first = np.asarray([record.first_token_s for record in calls], float)
    finished = np.asarray([record.finished_s for record in calls], float)
    gaps = [record.token_gaps_s for record in calls]
    cached = [math.nan if record.cached_tokens is None else record.cached_tokens for record in calls]
    return Played(
        programs=workload.names,
        jct_s=jct_s(sent[workload.first_call], finished[ends - 1]),
        ttft_s=first - sent,
        e2e_s=finished - sent,
        itl_s=np.concatenate(gaps) if gaps else np.zeros(0),
        cached_tokens=np.asarray(cached, float),
    )


def _simulated(workload: Workload, cluster: Cluster, policy: Policy) -> Played:
    """The simulated run; iteration by iteration, since the time between tokens is that of iterations."""
    outcome = run_lanes([workload], [LaneSpec(0, cluster, policy)], leaps=False, series=True)
    status = int(outcome.status[0])
    if status:
        raise complaint("simulation", STATUS[status], "a run that completes; see the limits of the cluster")
    watch = Watch()
    watch.see(workload, cluster, outcome)
    watch.warn()
    calls, programs = len(workload.gap), len(workload.names)

    def column(name: str) -> np.ndarray:
        return getattr(outcome, f"call_{name}_ns")[0, :calls] / SECOND

    times = CallTimes(
        column("released"),
        column("scheduled"),
        column("first_token"),
        column("finished"),
        workload.output_tokens,
    )
    assert outcome.series is not None
    assert outcome.call_replica is not None
    assert outcome.call_cached_tokens is not None
    ends = [np.unique(column) for column in np.asarray(outcome.series.end).T]
    gaps = []
    for first, last, replica in zip(
        outcome.call_first_token_ns[0, :calls],  # pyright: ignore[reportOptionalSubscript]
        outcome.call_finished_ns[0, :calls],  # pyright: ignore[reportOptionalSubscript]
        outcome.call_replica[0, :calls],
        strict=True,
    ):
        low, high = np.searchsorted(ends[replica], (first, last))
        gaps.append(np.diff(ends[replica][low : high + 1]) / SECOND)
    return Played(
        programs=workload.names,
        jct_s=jct_s(workload.arrival / SECOND, outcome.program_finished_ns[0, :programs] / SECOND),
        ttft_s=ttft_s(times),
        e2e_s=e2e_s(times),
        itl_s=np.concatenate(gaps) if gaps else np.zeros(0),
        cached_tokens=outcome.call_cached_tokens[0, :calls].astype(float),
    )


def _errors(measured: Sequence[Played], simulated: Sequence[Played]) -> dict[str, Error]:
    out: dict[str, Error] = {}
    for metric in METRICS:
        for name, percentile in STATISTICS.items():
            theirs, ours = (
                np.asarray([_statistic(played.values(metric), percentile) for played in side])
                for side in (measured, simulated)
            )
            level = float(theirs.mean())
            pct = 100 / level if level else math.nan
            spread = pct * float(np.ptp(theirs)) / 2 if len(theirs) > 1 else None
            error = pct * (float(ours.mean()) - level)
            out[f"{metric}_{name}"] = Error(level, float(ours.mean()), error, spread)
    return out


def _finite(value: float | None) -> float | None:
    """A number that JSON has; None for NaN."""
    return value if value is not None and math.isfinite(value) else None


def _statistic(values: np.ndarray, percentile: float | None) -> float:
    if not len(values):
        return math.nan
    return float(np.mean(values) if percentile is None else np.percentile(values, percentile))
