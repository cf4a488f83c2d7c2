"""How far the roofline estimate is off measured times, as Markdown: `python benchmarks/roofline_error.py`.

Every estimate has the default efficiencies and overhead. Measured times are from the operator tables in
`../shared/data/profiles` (`--data`), with the overhead and the collectives of `docs/validation.md`, at points
of the measured grid only. `docs/performance.md` has the output.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentjax.errors import InputError
from agentjax.performance import (
    AbstractPerformance,
    BatchShape,
    Roofline,
    load_table,
    read_config,
    read_device,
)
from agentjax.performance.tables import COLLECTIVE_BYTES_PER_S

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "profiles"
OVERHEAD_S = 3.53e-4
"""Host time per iteration (s) with the operator tables: what `docs/validation.md` found for vLLM 0.19."""

PAIRS = (
    ("RTXPRO6000__Llama-3.1-8B__tp1", "Llama-3.1-8B, RTX PRO 6000", "llama_3_1_8b", "rtx_pro_6000", 1),
    ("RTXPRO6000__Llama-3.1-8B__tp2", "Llama-3.1-8B, 2 RTX PRO 6000", "llama_3_1_8b", "rtx_pro_6000", 2),
    ("RTXPRO6000__Qwen3-32B__tp1", "Qwen3-32B, RTX PRO 6000", "qwen3_32b", "rtx_pro_6000", 1),
    ("RTXPRO6000__Qwen3-32B__tp2", "Qwen3-32B, 2 RTX PRO 6000", "qwen3_32b", "rtx_pro_6000", 2),
    (
        "RTXPRO6000__Qwen3-30B-A3B-Instruct-2507__tp1",
        "Qwen3-30B-A3B, RTX PRO 6000",
        "qwen3_30b_a3b",
        "rtx_pro_6000",
        1,
    ),
    ("RTX4090__Llama-3.1-8B__tp1", "Llama-3.1-8B, RTX 4090", "llama_3_1_8b", "rtx_4090", 1),
)
"""Profile folder, heading, model, GPU and tensor parallelism of the pairs that are measured in full."""

DECODES, CONTEXTS = (1, 8, 32, 128, 256), (512, 2048, 8192, 16_384)
CHUNKS, HISTORIES = (16, 64, 256, 1024, 2048), (0, 8192)
MIXED = ((64, 8), (256, 8), (1024, 8), (64, 128), (256, 128), (1024, 128))
"""Chunk (tokens) and decodes beside it."""
MIXED_CONTEXT = 2048
"""Context (tokens) of those decodes and of the prompt before the chunk."""

STEPS = (
    (0, 0, 4, 16_384, 0.0570),
    (0, 0, 12, 7_100, 0.0603),
    (256, 8064, 4, 16_384, 0.1619),
    (1024, 7680, 4, 16_384, 0.4075),
    (2048, 7168, 4, 16_384, 0.7158),
    (8192, 4096, 4, 16_384, 2.4084),
    (16_384, 0, 4, 16_384, 4.6643),
)
"""Steps of Llama-3.1-70B on two RTX PRO 6000: chunk, tokens before it, decodes, their context, time (s)."""


def batch(chunk: int = 0, history: int = 0, decodes: int = 0, context: int = 0) -> BatchShape:
    """An iteration with a chunk of one prompt and decodes of equal context (tokens)."""
    return BatchShape(
        sequences=np.float64(decodes + (chunk > 0)),
        decode_sequences=np.float64(decodes),
        decode_context_tokens=np.float64(decodes * context),
        decode_context_max_tokens=np.float64(context if decodes else 0),
        prefill_tokens=np.float64(chunk),
        prefill_context_tokens=np.float64(history),
        prefill_work_tokens2=np.float64(chunk * (history + chunk / 2)),
    )


def error_pct(estimate: AbstractPerformance, measured_s: float, shape: BatchShape) -> float:
    """Error of the estimate of one iteration (per cent); positive: estimated too slow."""
    return 100 * (float(estimate.iteration_s(shape)) / measured_s - 1)


def signed(value: float) -> str:
    """A number of per cent without decimals, with its sign."""
    return f"{round(value):+d}".replace("-", "−") if round(value) else "0"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def regions(estimate: AbstractPerformance, measured: AbstractPerformance) -> list[list[list[float]]]:
    """Errors (per cent): decodes by number and context, chunks by tokens before and size, and mixed."""

    def errors(shapes: list[BatchShape]) -> list[float]:
        return [error_pct(estimate, float(measured.iteration_s(shape)), shape) for shape in shapes]

    return [
        [errors([batch(decodes=n, context=context) for context in CONTEXTS]) for n in DECODES],
        [errors([batch(chunk, history) for chunk in CHUNKS]) for history in HISTORIES],
        [errors([batch(chunk, MIXED_CONTEXT, n, MIXED_CONTEXT) for chunk, n in MIXED])],
    ]


def report(data: Path) -> str:
    """All tables of errors, in per cent of the measured time."""
    summary, other_links, decode, prefill, mixed = [], [], [], [], []
    for folder, heading, model_name, gpu_name, gpus in PAIRS:
        model, gpu = read_config(model_name), read_device(gpu_name)
        measured = load_table(data / folder, tp=gpus, overhead_s=OVERHEAD_S)
        found = regions(Roofline.build(model, gpu, gpus), measured)
        summary.append([heading, *map(spread, found)])
        decode += [[heading, str(n), *map(signed, row)] for n, row in zip(DECODES, found[0], strict=True)]
        prefill += [
            [heading, f"{n:,}", *map(signed, row)] for n, row in zip(HISTORIES, found[1], strict=True)
        ]
        mixed += [[heading, *map(signed, row)] for row in found[2]]
        if gpus > 1:
            share = COLLECTIVE_BYTES_PER_S / gpu.link_bytes_per_s
            slower = Roofline.build(model, gpu, gpus, link_efficiency=share)
            other_links.append([heading, *map(spread, regions(slower, measured))])
    beside = [f"{chunk:,} beside {n}" for chunk, n in MIXED]
    return "\n\n".join(
        [
            "Median and range of each region (%):",
            table(["pair", "decode", "prefill", "mixed"], summary),
            f"Two GPUs, if the estimate takes the tables' {COLLECTIVE_BYTES_PER_S / 1e9:.0f} GB/s (%):",
            table(["pair", "decode", "prefill", "mixed"], other_links),
            "Decodes of equal context (%):",
            table(["pair", "decodes", *(f"at {context:,} tokens" for context in CONTEXTS)], decode),
            "One chunk of a prompt (%):",
            table(["pair", "tokens before it", *(f"chunk of {chunk:,}" for chunk in CHUNKS)], prefill),
            f"A chunk beside decodes, all at {MIXED_CONTEXT:,} tokens of context (%):",
            table(["pair", *beside], mixed),
            "Llama-3.1-70B on two RTX PRO 6000, whole steps:",
            table(["step", "measured (ms)", "estimate (ms)", "error (%)"], steps()),
        ]
    )


def steps() -> list[list[str]]:
    """The measured steps of Llama-3.1-70B and their estimates, row by row."""
    estimate = Roofline.build(read_config("llama_3_1_70b"), read_device("rtx_pro_6000"), 2)
    rows = []
    for chunk, history, decodes, context, measured_s in STEPS:
        shape = batch(chunk, history, decodes, context)
        name = f"{decodes} decodes at {context:,}"
        if chunk:
            name = f"chunk of {chunk:,} after {history:,}, beside {name}"
        estimated_ms, error = 1e3 * float(estimate.iteration_s(shape)), error_pct(estimate, measured_s, shape)
        rows.append([name, f"{1e3 * measured_s:,.1f}", f"{estimated_ms:,.1f}", signed(error)])
    return rows


def spread(rows: list[list[float]]) -> str:
    """Median, least and largest error (per cent)."""
    errors = [error for row in rows for error in row]
    return f"{signed(statistics.median(errors))} ({signed(min(errors))} to {signed(max(errors))})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables and returns the exit code: 2, after one sentence, where a profile cannot be read."""
    import jax

    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the profiles")
    try:
        print(report(parser.parse_args(arguments).data))
    except InputError as error:
        print("error:", error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
