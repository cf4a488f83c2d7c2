"""What the fits in this folder share: points, the least-squares problem, and the files they write."""

import csv
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentjax.performance.affine import Affine
from agentjax.performance.base import BatchShape

HERE = Path(__file__).resolve().parent
SIMULATOR = "casys-kaist/LLMServingSim", "5daddb21a545658d5150b535712d0494584b5278"
"""Repository and commit of the operator tables."""
HUBER = 0.05
STEPS = 3_000


class Point(NamedTuple):
    """One iteration and how long it took: a prompt chunk over a history, beside decodes of equal context."""

    family: str
    chunk: int
    history: int
    decodes: int
    context: int
    seconds: float


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def batch(found: Sequence[Point]) -> BatchShape:
    """The points as one stacked batch."""
    _, chunk, history, decodes, context, _ = (np.asarray(column) for column in zip(*found, strict=True))
    return BatchShape(
        sequences=(chunk > 0) + decodes * 1.0,
        decode_sequences=decodes * 1.0,
        decode_context_tokens=decodes * context * 1.0,
        decode_context_max_tokens=(decodes > 0) * context * 1.0,
        prefill_tokens=chunk * 1.0,
        prefill_context_tokens=history * 1.0,
        prefill_work_tokens2=chunk * (history + chunk / 2),
    )


def columns(found: Sequence[Point], names: Iterable[str]) -> np.ndarray:
    """What each named coefficient multiplies, one row per point."""
    shape = batch(found)
    mixed = np.asarray(shape.prefill_tokens) > 0
    column = {
        "c0_s": np.ones(len(found)),
        "c_tok_s": np.asarray(shape.tokens),
        "c_seq_s": np.asarray(shape.sequences),
        "c_prefill_s": np.asarray(shape.prefill_work_tokens2),
        "c_kv_s": np.asarray(shape.context_tokens),
        "c_mixed_s": mixed * np.asarray(shape.decode_context_tokens),
        "overhead_s": np.ones(len(found)),
        "per chunk": mixed * 1.0,
    }
    return np.stack([column[name] for name in names], axis=1)


def weights(found: Sequence[Point], families: Mapping[str, float]) -> np.ndarray:
    """Weight of each point: its family's share."""
    size = {family: sum(point.family == family for point in found) for family in families}
    return np.asarray([families[point.family] / size[point.family] for point in found])


def fit(
    found: Sequence[Point],
    families: Mapping[str, float],
    start: Mapping[str, float],
    fixed: Mapping[str, float],
) -> dict[str, float]:
    """Coefficients (s, four digits) of least weighted Huber loss of the relative error, positive by exp.

    Args:
        found: what to fit to.
        families: weight of each family of points.
        start: the coefficients to fit, and where the fit begins.
        fixed: the coefficients that are known.
    """
    free = tuple(start)
    design = jnp.asarray(columns(found, free) * np.asarray(list(start.values())))
    known = jnp.asarray(columns(found, fixed) @ np.asarray(list(fixed.values())))
    seconds = jnp.asarray([point.seconds for point in found])
    weight = jnp.asarray(weights(found, families))

    def loss(logs: jax.Array) -> jax.Array:
        error = (design @ jnp.exp(logs) + known) / seconds - 1
        return jnp.sum(weight * optax.losses.huber_loss(error, delta=HUBER)) / HUBER**2

    optimiser = optax.adam(optax.cosine_decay_schedule(0.05, STEPS))

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        logs, state = carry
        updates, state = optimiser.update(jax.grad(loss)(logs), state)
        return (optax.apply_updates(logs, updates), state), None

    begin = jnp.zeros(len(free))
    (logs, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, None, STEPS))(
        (begin, optimiser.init(begin))
    )
    values = dict(zip(free, np.exp(np.asarray(logs)), strict=True))
    return {name: float(f"{start[name] * values[name]:.4g}") for name in free}


def errors(model: Affine, found: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Fitted time (s) and its error (%) at every point."""
    fitted = np.asarray(model.iteration_s(batch(found)))
    return fitted, 100 * (fitted / np.asarray([point.seconds for point in found]) - 1)


def summary(error: np.ndarray) -> dict[str, float]:
    """One line of the residual table."""
    low, middle, high = np.percentile(error, [10, 50, 90])
    worst = error[np.argmax(np.abs(error))]
    numbers = {"median_pct": middle, "p10_pct": low, "p90_pct": high, "worst_pct": worst}
    return {"points": len(error)} | {name: round(float(value), 1) + 0.0 for name, value in numbers.items()}


def summaries(regions: Sequence[str], error: np.ndarray) -> dict[str, dict[str, float]]:
    """The residual table: a line for each region, in the order of the points."""
    place = np.asarray(regions)
    return {region: summary(error[place == region]) for region in dict.fromkeys(regions)}


def sources(data: Path, files: Mapping[str, tuple[str, str, str | None, str]]) -> list[dict[str, str | None]]:
    """Where the input files are from (repository, commit, day of measurement, use), with checksums."""
    return [
        {
            "file": file,
            "sha256": hashlib.sha256((data / file).read_bytes()).hexdigest(),
            "repository": repository,
            "commit": commit,
            "measured": measured,
            "use": use,
        }
        for file, (repository, commit, measured, use) in files.items()
    ]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a coefficient file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, header: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Write a table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(lines)
