"""Fit the iteration times that measured operator tables give, for each GPU and model that has them in full.

    python calibration/fit_tables.py --data ../shared/data

reads LLMServingSim's operator tables (vLLM 0.19.0), computes with `agentjax.performance.load_table` how long
iterations of many batches take, fits the coefficients of `agentjax.performance.Affine` to them and writes,
under `--out` (default: this folder), one coefficient file for each pair, the residuals of all as
`fit_tables.csv` and a figure of them, `fit_tables.png`. The same inputs give the same bytes.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import _fit
import jax
import numpy as np
import yaml
from _fit import HERE, HUBER, SIMULATOR, STEPS, Point, batch, errors

from agentjax.performance import Affine, Table, kv_blocks, load_table, read_config, read_device

FITTED = "2026-11-30"
OVERHEAD_S = 3.53e-4
"""Host time an iteration, fitted to a run of Llama-3.1-8B on one RTX PRO 6000 (docs/validation.md)."""
TOKENS, CONTEXT, DECODES = 2048, 16_384, 128
"""Largest iteration and context in the tables, and most decodes fitted to (vLLM's usual `max_num_seqs`)."""

FAMILIES = {"decodes only": 0.30, "chunk alone": 0.10, "chunk beside decodes": 0.60}
"""Weight of each family of points, as in the fit to whole steps (`fit_llama70b.py`)."""
START = {
    "c0_s": 0.02,
    "c_tok_s": 5e-5,
    "c_seq_s": 5e-5,
    "c_prefill_s": 1e-9,
    "c_kv_s": 1e-7,
    "c_mixed_s": 1e-7,
}
CALLS = ((1, 8), (16, 32), (64, 128))
CHUNKS = ((32, 128), (256, 512), (1024, 2048))
"""Decodes and chunk sizes that a line of the residual table takes together."""


class Pair(NamedTuple):
    """A folder of operator tables, the name of its coefficients, its entries in conf/hardware and conf/model,
    and the fewest decodes (where there is no chunk) and the smallest chunk to fit to.
    """

    profile: str
    name: str
    hardware: str
    model: str
    calls: int = 1
    chunk: int = 32

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return int(self.name.rpartition("/tp")[2])


PAIRS = (
    Pair("RTXPRO6000__Llama-3.1-8B__tp1", "rtx-pro-6000/llama-3.1-8b/tp1", "rtx_pro_6000", "llama_3_1_8b"),
    Pair("RTXPRO6000__Llama-3.1-8B__tp2", "rtx-pro-6000/llama-3.1-8b/tp2", "rtx_pro_6000", "llama_3_1_8b"),
    Pair("RTXPRO6000__Qwen3-32B__tp1", "rtx-pro-6000/qwen3-32b/tp1", "rtx_pro_6000", "qwen3_32b"),
    Pair("RTXPRO6000__Qwen3-32B__tp2", "rtx-pro-6000/qwen3-32b/tp2", "rtx_pro_6000", "qwen3_32b"),
    Pair(
        "RTXPRO6000__Qwen3-30B-A3B-Instruct-2507__tp1",
        "rtx-pro-6000/qwen3-30b-a3b/tp1",
        "rtx_pro_6000",
        "qwen3_30b_a3b",
        calls=32,
        chunk=256,
    ),
    Pair("RTX4090__Llama-3.1-8B__tp1", "rtx-4090/llama-3.1-8b/tp1", "rtx_4090", "llama_3_1_8b"),
)


def points(table: Table, pair: Pair, pool_tokens: int) -> list[Point]:
    """Batches of a pair whose contexts fit into the KV pool, and how long they take by the tables (s).

    The longest context of several decodes is twice their mean, at most `CONTEXT`: unequal, as in use.
    """
    contexts = (512, 1024, 2048, 4096, 8192, CONTEXT)
    sizes = (1, 2, 4, 8, 16, 32, 64, DECODES)
    decodes = [(0, 0, size, context) for size in sizes for context in contexts]
    alone = [
        (chunk, history, 0, 0)
        for chunk in (32, 64, 128, 256, 512, 1024, TOKENS)
        for history in (0, 1024, 4096, 8192, CONTEXT)
    ]
    beside = [
        (min(chunk, TOKENS - size), history, size, context)
        for chunk in (64, 128, 256, 512, 1024, TOKENS)
        for history in (0, 4096, CONTEXT)
        for size in (1, 4, 8, 16, 32, 64, DECODES)
        for context in contexts[1:-1]
    ]
    found = [
        Point(family, *point, 0.0)
        for family, some in zip(FAMILIES, (decodes, alone, beside), strict=True)
        for point in some
        if point[0] + point[1] + point[2] * point[3] <= pool_tokens
        and (point[0] >= pair.chunk if point[0] else point[2] >= pair.calls)
    ]
    shape = batch(found)
    mean = np.asarray(shape.decode_context_max_tokens)
    longest = np.where(np.asarray(shape.decode_sequences) > 1, np.minimum(2 * mean, CONTEXT), mean)
    unequal = replace(shape, decode_context_max_tokens=longest)
    seconds = np.asarray(jax.jit(jax.vmap(Table.iteration_s, (None, 0)))(table, unequal))
    return [point._replace(seconds=float(value)) for point, value in zip(found, seconds, strict=True)]


def region_of(point: Point) -> str:
    """Where the residual table counts a point."""
    where = []
    if point.chunk:
        low, high = next(ends for ends in CHUNKS if point.chunk <= ends[1])
        where.append(f"chunk {low:,}-{high:,}")
    if point.decodes:
        low, high = next(ends for ends in CALLS if point.decodes <= ends[1])
        where.append(f"{low}-{high} decodes")
    return " beside ".join(where)


def content(pair: Pair, data: Path) -> tuple[dict[str, Any], list[Point], np.ndarray]:
    """A coefficient file, what it was fitted to, and the error (%) at every point."""
    folder = data / "profiles" / pair.profile
    meta: Mapping[str, Any] = yaml.safe_load((folder / "meta.yaml").read_text(encoding="utf-8"))
    blocks = kv_blocks(
        read_config(pair.model), read_device(pair.hardware), pair.gpus, max_num_batched_tokens=TOKENS
    )
    found = points(load_table(folder, overhead_s=OVERHEAD_S), pair, 16 * blocks)
    host = {"overhead_s": OVERHEAD_S}
    coefficients = _fit.fit(found, FAMILIES, START, host) | host
    _, error = errors(Affine(**coefficients), found)
    published = "/".join((meta["hardware"], meta["model"], meta["variant"]))
    measured = str(meta["profiled_at"])[:10]
    names = sorted(path.name for path in folder.glob("*.csv"))
    files = {
        f"profiles/{pair.profile}/{name}": (
            *SIMULATOR,
            measured,
            f"profiler/perf/{published}/{'' if name == 'meta.yaml' else f'tp{pair.gpus}/'}{name}",
        )
        for name in (*names, "meta.yaml")
    }
    notes = [
        "fitted to times computed from measured operators, not to whole iterations: calibration/README.md",
        f"contexts of a batch: at most {16 * blocks:,} tokens, an estimate of the KV pool",
        "overhead_s: fitted to a run of Llama-3.1-8B on one RTX PRO 6000 (docs/validation.md)",
        "wakeup_s is 0: not measured",
    ]
    if pair.calls > 1:
        notes.append(
            f"not for less than {pair.calls} decodes alone or {pair.chunk} prompt tokens: such iterations "
            "load few experts, and the fit is far too slow; use the tables"
        )
    if pair.gpus > 1:
        notes.append("all-reduces: 20 us and 16 GB/s, not measured (docs/validation.md)")
    return (
        {
            "gpu": meta["gpu"],
            "gpus": pair.gpus,
            "model": f"{meta['model']}, bfloat16",
            "tensor_parallel": pair.gpus,
            "engine": f"vLLM {meta['vllm_version']}, chunked prefill",
            "fitted": FITTED,
            "method": f"weighted Huber loss (delta {HUBER}) of the relative error over {len(found)} points "
            f"in {len(FAMILIES)} families, optax adam, {STEPS} steps, coefficients positive by exp; see "
            "calibration/README.md",
            "coefficients": coefficients | {"wakeup_s": 0.0},
            "valid": {
                "tokens": {"low": pair.calls, "high": TOKENS},
                "tokens of a chunk": {"low": pair.chunk, "high": TOKENS},
                "sequences": {"low": pair.calls, "high": max(point.decodes for point in found)},
                "context tokens of a decode": {"low": 512, "high": CONTEXT},
                "context tokens before a chunk": {"low": 0, "high": CONTEXT},
            },
            "residuals": _fit.summaries([region_of(point) for point in found], error),
            "inputs": _fit.sources(data, files),
            "notes": notes,
        },
        found,
        error,
    )


def draw(path: Path, results: Mapping[str, tuple[Sequence[str], np.ndarray]]) -> None:
    """Errors of every pair by region: all points, and their median."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    order = list(dict.fromkeys(region for regions, _ in results.values() for region in regions))
    figure, axes = plt.subplots(1, len(results), figsize=(15, 5.2), sharey=True, sharex=True)
    for axis, (name, (regions, error)) in zip(axes, results.items(), strict=True):
        for place, region in enumerate(order):
            here = error[np.asarray(regions) == region]
            if len(here):
                axis.plot(here, np.full(len(here), place), "|", ms=8, alpha=0.5, color="C0")
                axis.plot(np.median(here), place, "d", ms=5, color="black")
        axis.axvspan(-10, 10, color="grey", alpha=0.12, lw=0)
        axis.axvline(0, color="grey", lw=0.8)
        axis.grid(alpha=0.3)
        axis.set_title(name.replace("/", "\n", 1).replace("/", ", "), fontsize=9)
    axes[0].set_yticks(range(len(order)), order, fontsize=8)
    axes[0].invert_yaxis()
    figure.suptitle("Iteration time: error of the affine fit against the operator tables (diamond: median)")
    figure.supxlabel("fit / tables - 1 (%)", fontsize=9)
    figure.subplots_adjust(left=0.19, right=0.99, top=0.82, bottom=0.11, wspace=0.07)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def main(data: Path, out: Path, only: str | None = None) -> None:
    """Fit all pairs; write their coefficient files, the residual table and the figure. Or one file `only`."""
    jax.config.update("jax_enable_x64", True)
    if only:
        pair = next(pair for pair in PAIRS if pair.name == only)
        _fit.write_json(out / f"{only}.json", content(pair, data)[0])
        return
    lines: list[Sequence[Any]] = []
    results = {}
    for pair in PAIRS:
        file, found, error = content(pair, data)
        _fit.write_json(out / f"{pair.name}.json", file)
        results[pair.name] = [region_of(point) for point in found], error
        for region, residual in file["residuals"].items():
            lines.append((pair.name, region, *residual.values()))
    header = ("coefficients", "region", "points", "median_pct", "p10_pct", "p90_pct", "worst_pct")
    _fit.write_csv(out / "fit_tables.csv", header, lines)
    draw(out / "fit_tables.png", results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published measurements")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder to write under (default: calibration/)"
    )
    parser.add_argument(
        "--only", choices=[pair.name for pair in PAIRS], help="fit this pair and write its file"
    )
    arguments = parser.parse_args()
    main(arguments.data, arguments.out, arguments.only)
