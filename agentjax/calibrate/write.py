"""The coefficient file of a fit, with where it comes from."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from agentjax.calibrate.fit import FOLDS, RESAMPLES, Fit
from agentjax.calibrate.identify import Identification
from agentjax.calibrate.observations import DECODE, Observations
from agentjax.calibrate.optimise import HUBER
from agentjax.performance.load import check
from agentjax.performance.valid import CONTEXTS, SEQUENCES, TOKENS
from agentjax.records import Recording
from agentjax.version import package_version

METHOD = (
    f"optax L-BFGS; Huber loss (from {100 * HUBER:.0f} %) of the logarithm of fitted to measured time, "
    "regions of batch size and length alike; the simplest model that is as good as the best on prompts and "
    f"periods of decoding held out ({FOLDS} parts); 95 % intervals from {RESAMPLES} Bayesian bootstrap "
    "resamples of these"
)
UNSTATED = "not stated"


def file_content(
    fitted: Fit,
    found: Observations,
    residuals: Mapping[str, Mapping[str, float]],
    identified: Identification,
    sources: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    notes: Sequence[str],
    seed: int,
) -> dict[str, Any]:
    """The fields of a coefficient file.

    **Arguments:**

    - `sources`: the measurements, as `source` describes them.
    - `about`: gpu, gpus, tensor_parallel, model and engine.
    """
    return {
        "form": fitted.form.form,
        **about,
        "fitted": datetime.now(UTC).date().isoformat(),
        "method": METHOD,
        "coefficients": fitted.coefficients,
        "intervals": {
            name: {"low": low, "high": fitted.high[name]}
            for name, low in fitted.low.items()
            if np.any(np.asarray(fitted.high[name]) > 0)
        },
        "valid": valid_ranges(found),
        "residuals": dict(residuals),
        "ladder": [
            {
                "terms": rung.form.terms,
                "form": rung.form.form,
                "coefficients": len(rung.form.names),
                "error_pct": round(rung.error_pct, 3),
                "held_out_pct": round(rung.held_out_pct, 3),
                "standard_error_pct": round(rung.standard_error_pct, 3),
                "chosen": index == fitted.chosen,
            }
            for index, rung in enumerate(fitted.rungs)
        ],
        "undetermined": [one.sentence for one in identified.undetermined],
        "inputs": list(sources),
        "notes": list(notes),
        "software": {"agentjax": package_version(), "seed": seed},
    }


def valid_ranges(found: Observations) -> dict[str, dict[str, float]]:
    """What was measured: tokens and calls of an iteration, contexts of decodes, contexts before chunks."""
    decode = found.kind == DECODE
    chunked = found.chunks > 0
    chunk = found.tokens / np.maximum(found.chunks, 1.0) + found.decodes
    contexts = found.context_tokens[decode]
    ranges = {
        TOKENS: (1.0, float(max(chunk[chunked].max(initial=1.0), found.decodes[decode].max()))),
        SEQUENCES: (float(found.decodes[decode].min()), float(found.decodes[decode].max())),
        CONTEXTS[0]: (float(np.floor(contexts.min())), float(np.ceil(contexts.max()))),
    }
    if np.any(found.before_tokens() >= 1):
        ranges[CONTEXTS[1]] = (0.0, float(np.ceil((found.before_tokens() + found.tokens)[chunked].max())))
    return {name: {"low": low, "high": high} for name, (low, high) in ranges.items()}


def source(path: Path, recording: Recording) -> dict[str, Any]:
    """One file of measurements: its checksum, and when it was measured if it says so."""
    started = str(recording.about.get("started", ""))[:10]
    return {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "measured": started if re.fullmatch(r"\d{4}-\d\d-\d\d", started) else None,
        "use": f"{len(recording.requests)} requests as a client saw them",
    }


def stated(
    given: Mapping[str, Any], recordings: Sequence[Recording], base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the file says of hardware, model and engine: what is given, or else what `base` says (the file
    that the fit started from), or else the recordings."""
    known: dict[str, Any] = {
        "gpu": UNSTATED,
        "gpus": 1,
        "model": UNSTATED,
        "tensor_parallel": 1,
        "engine": UNSTATED,
    }
    for recording in reversed(recordings):
        for field, key in (("model", "model"), ("engine", "server")):
            value = recording.about.get(key)
            if isinstance(value, str) and value.strip():
                known[field] = value
    stronger = {**(base or {}), **given}
    return known | {field: stronger[field] for field in known if field in stronger}


def write_coefficients(path: Path, content: Mapping[str, Any]) -> None:
    """Write a coefficient file, whole or not at all.

    Raises:
        InputError: content that the simulator would not read.
    """
    check(str(path), content)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{os.getpid()}.partial.{path.name}")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
