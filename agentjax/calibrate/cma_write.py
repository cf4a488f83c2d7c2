"""The coefficient file of a gradient-free fit: the one it started from, with what was fitted and how."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from agentjax.calibrate.cma import CmaFit
from agentjax.calibrate.parameters import LIMITS, coefficient_names, coefficient_s
from agentjax.version import package_version

METRICS = {"ttft": "TTFT of a call", "latency": "latency of a call", "jct": "JCT of a program"}
"""What is compared, in words."""
_KEPT = ("form", "valid")


def file_content(
    fit: CmaFit,
    base: Mapping[str, Any],
    sources: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """The fields of a coefficient file.

    Args:
        fit: what was fitted.
        base: the fields of the file that it started from; empty where there was none.
        sources: the measurements, as `source` describes them.
        about: gpu, gpus, tensor_parallel, model and engine.
        seed: of the search.
    """
    model = fit.cluster.performance
    fitted = [name for name in fit.values if name not in LIMITS]
    coefficients = {name: round(coefficient_s(model, name), 15) for name in coefficient_names(model)}
    intervals = {name: each for name, each in base.get("intervals", {}).items() if name not in fitted}
    for told in fit.determined:
        if told.name in fitted and told.low is not None and told.high is not None:
            intervals[told.name] = {"low": told.low, "high": told.high}
    method = (
        f"{', '.join(fit.values)} by CMA-ES over whole simulated runs, {len(fit.history)} generations; "
        "robust loss of the logarithms of simulated to recorded TTFT, latency and JCT"
    )
    if base:
        method += f"; the others before that by: {base['method']}"
    return {
        **about,
        **{key: base[key] for key in _KEPT if key in base},
        "fitted": datetime.now(UTC).date().isoformat(),
        "method": method,
        "coefficients": dict(base.get("coefficients", {})) | coefficients,
        "intervals": intervals,
        "undetermined": [
            f"{told.name}: {told.words}" for told in fit.determined if told.low is None and told.high is None
        ],
        "inputs": [*base.get("inputs", []), *sources],
        "notes": [*base.get("notes", []), *_notes(fit)],
        "software": {"agentjax": package_version(), "seed": seed},
    }


def _notes(fit: CmaFit) -> list[str]:
    limits = " ".join(f"cluster.{name}={getattr(fit.cluster, name)}" for name in LIMITS)
    errors = [
        f"{words} {fit.errors_pct[metric][0]:.1f} to {fit.errors_pct[metric][1]:.1f} %"
        for metric, words in METRICS.items()
        if not math.isnan(fit.errors_pct[metric][1])
    ]
    chosen = [f"cluster.{told.name} {told.words}" for told in fit.determined if told.name in LIMITS]
    return [
        f"CMA-ES ran with {limits}; the recording: {', '.join(chosen)}"
        if chosen
        else f"CMA-ES ran with {limits}",
        f"mean absolute errors before and after CMA-ES: {'; '.join(errors)}",
    ]
