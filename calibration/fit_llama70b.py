"""Fit the iteration time of Llama-3.1-70B on two RTX PRO 6000 (tensor parallel 2, vLLM 0.19.0).

    python calibration/fit_llama70b.py --data ../shared/data

reads published measurements, fits the coefficients of `agentjax.performance.Affine` to them and writes,
under `--out` (default: this folder), `rtx-pro-6000/llama-3.1-70b/` `tp2.json`, `residuals.csv` and
`residuals.png`. The same inputs give the same bytes. What was measured and what is assumed: README.md.
With `--ladder` it also prints how well fits with fewer and more terms do, also at points held out.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _fit
import jax
import numpy as np
from _fit import HERE, HUBER, SIMULATOR, STEPS, Point, columns, errors, rows, weights

from agentjax.performance.affine import Affine

NAME = Path("rtx-pro-6000/llama-3.1-70b")
FITTED = "2026-11-30"

ARTIFACT = "rajibrhasan/agentservesim", "5a73df777a59314476678d0b3cf3390cf5610631"
PROFILE = "agentservesim/profiles/RTXPRO6000_llama31-70b_tp2"
PUBLISHED = "profiler/perf/RTXPRO6000/meta-llama/Llama-3.1-70B/bf16/tp2"
PUBLISHED_SIMILAR = "profiler/perf/RTXPRO6000/Qwen/Qwen3-32B/bf16/tp2"
INPUTS = {
    f"{PROFILE}/step_overhead.csv": (*ARTIFACT, None, f"whole engine steps; {PUBLISHED}/step_overhead.csv"),
    "agentservesim/infercept_profiles.json": (
        *ARTIFACT, "2026-09-14",
        "whole prompts; transcription of policies/profiles/infercept_profile_rtx6000_70B_tp2.json",
    ),
    f"{PROFILE}/attention_subset.csv": (
        *ARTIFACT, "2026-08-25", f"attention per layer; 456 rows of {PUBLISHED}/attention.csv",
    ),
    f"{PROFILE}/per_sequence.csv": (*ARTIFACT, "2026-08-25", f"output head; {PUBLISHED}/per_sequence.csv"),
    "profiles/RTXPRO6000__Qwen3-32B__tp2/attention.csv": (
        *SIMULATOR, "2026-04-24",
        f"attention per layer where the subset has no row, scaled; {PUBLISHED_SIMILAR}/attention.csv",
    ),
}  # fmt: skip

LAYERS = 80
DECODE_CONTEXT = {4: 16_384, 8: 8_192, 12: 7_100}
"""Context of each decode in the measured steps, by number of decodes (inferred, see README.md)."""
PROMPT = 16_384
"""Length of the prompt whose chunks the measured steps compute (inferred); the slower of the two
16,384-token chunks is the second half of a prompt twice as long."""
SLOW_BATCH_SAMPLES = 162

FAMILIES = {
    "steps, decodes only": 0.10,
    "prompts without history": 0.05,
    "steps, chunk and decodes": 0.25,
    "decode grid": 0.20,
    "chunk over history": 0.05,
    "chunk over history beside decodes": 0.35,
}
"""Weight of each family of points in the fit, most where a loaded replica spends its time. Steps and prompts
without history are whole measurements; the rest are these, moved to other contexts by attention times."""
FREE = ("c0_s", "c_tok_s", "c_prefill_s", "c_kv_s", "c_mixed_s")
START = {
    "c0_s": 0.05,
    "c_tok_s": 2.5e-4,
    "c_prefill_s": 5e-9,
    "c_kv_s": 1e-7,
    "c_mixed_s": 3e-7,
    "per chunk": 5e-3,
}
"""Where the fit begins. `per chunk`, once per iteration with prompt tokens, is only tried: `ladder`."""
LADDER = (FREE[:-1], (*FREE[:-1], "per chunk"), FREE, (*FREE, "per chunk"))


def region_of(point: Point) -> str:
    """Where the residual table counts a point."""
    match point.family:
        case "prompts without history":
            small = ", 32-192 tokens" if point.chunk < 256 else ", 256-1,024 tokens"
            return point.family + (small if point.chunk <= 1024 else ", 1,280-16,384 tokens")
        case "steps, chunk and decodes":
            return point.family + (", chunk 256-2,048" if point.chunk <= 2048 else ", chunk 4,096-16,384")
        case "decode grid":
            return point.family + (", 1-4 sequences" if point.decodes <= 4 else ", 8-16 sequences")
        case "chunk over history":
            return point.family + (", chunk 256-512" if point.chunk <= 512 else ", chunk 1,024-16,384")
        case "chunk over history beside decodes":
            return point.family.replace("decodes", f"{point.decodes} decode" + "s" * (point.decodes > 1))
    return point.family


class Attention:
    """Measured attention time of one layer (s) by (chunk, history, decodes, context of a decode)."""

    def __init__(self, own: Path, similar: Path):
        own_rows, similar_rows = _attention_rows(own), _attention_rows(similar)
        common = [key for key in own_rows if key in similar_rows and key[0] > 0]
        self.scale = float(np.median([own_rows[key] / similar_rows[key] for key in common]))
        self.common = len(common)
        self._table = {key: seconds * self.scale for key, seconds in similar_rows.items()} | own_rows

    def __call__(self, chunk: int, history: int, decodes: int, context: int) -> float:
        """The measured time, or the scaled one of the similar model."""
        return self._table[chunk, history, decodes, context if decodes else 0]

    def fresh(self, chunk: int) -> float:
        """A chunk without history; of a size measured only over histories, by a line through two of them."""
        if (chunk, 0, 0, 0) in self._table:
            return self(chunk, 0, 0, 0)
        return 2 * self(chunk, 4096, 0, 0) - self(chunk, 8192, 0, 0)

    def decode(self, decodes: int, context: int) -> float:
        """Decodes alone, linear between the measured numbers of decodes and contexts."""
        sizes, contexts = (1, 2, 4, 8, 16), (1024, 2048, 4096, 8192, 16384, 32768)
        by_size = [
            np.interp(context, contexts, [self(0, 0, size, length) for length in contexts]) for size in sizes
        ]
        return float(np.interp(decodes, sizes, by_size))


def _attention_rows(path: Path) -> dict[tuple[int, int, int, int], float]:
    axes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    return {tuple(int(row[axis]) for axis in axes): float(row["time_us"]) * 1e-6 for row in rows(path)}  # type: ignore[misc]


def points(data: Path, attention: Attention, *, known_contexts: bool = True) -> list[Point]:
    """All that the coefficients are fitted to. Without `known_contexts` the measured steps are taken to have
    no history and 3,000 tokens of context per decode."""
    decode_context = DECODE_CONTEXT if known_contexts else dict.fromkeys(DECODE_CONTEXT, 3_000)
    found = []
    for row in rows(data / PROFILE / "step_overhead.csv"):
        chunk, decodes, seconds = (
            int(row["prefill_chunk"]),
            int(row["n_decode"]),
            float(row["wall_us"]) * 1e-6,
        )
        slow = chunk == PROMPT and int(row["n_samples"]) == SLOW_BATCH_SAMPLES
        history = (PROMPT if slow else (PROMPT - chunk) // 2) if chunk and known_contexts else 0
        family = "steps, chunk and decodes" if chunk else "steps, decodes only"
        found.append(Point(family, chunk, history, decodes, decode_context[decodes], seconds))
    steps = [point for point in found if not point.chunk]
    sizes = [point.decodes for point in steps]
    rest = [point.seconds - LAYERS * attention.decode(point.decodes, point.context) for point in steps]

    profiles = json.loads((data / "agentservesim/infercept_profiles.json").read_text(encoding="utf-8"))[
        "profiles"
    ]
    raw = profiles["infercept_profile_rtx6000_70B_tp2.json"]["raw"]
    prompt = {row["num_tokens"]: row["t_fwd_ms_median"] * 1e-3 for row in raw}
    found += [
        Point("prompts without history", tokens, 0, 0, 0, seconds) for tokens, seconds in prompt.items()
    ]

    for decodes in (1, 2, 4, 8, 16):
        for context in (1024, 2048, 4096, 8192, 16384, 32768):
            seconds = float(np.interp(decodes, sizes, rest)) + LAYERS * attention(0, 0, decodes, context)
            found.append(Point("decode grid", 0, 0, decodes, context, seconds))

    def moved(family: str, chunk: int, history: int, decodes: int, context: int) -> Point:
        whole = float(np.interp(chunk + decodes, list(prompt), list(prompt.values())))
        more = attention(chunk, history, decodes, context) - attention.fresh(chunk)
        return Point(family, chunk, history, decodes, context, whole + LAYERS * more)

    histories = [
        (chunk, history)
        for chunk in (256, 512, 1024, 2048)
        for history in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    histories += [(1024, 32768)] + [(16384, history) for history in (4096, 8192, 16384, 32768)]
    found += [moved("chunk over history", chunk, history, 0, 0) for chunk, history in histories]
    found += [
        moved("chunk over history beside decodes", chunk, history, decodes, context)
        for chunk in (256, 512, 1024, 2048)
        for history in (4096, 8192, 16384)
        for decodes in (1, 4, 8)
        for context in (4096, 8192, 16384)
    ]
    return found


def per_sequence(data: Path) -> float:
    """Output head and sampler (s) per further sequence: slope over 1 to 16 sequences."""
    total = dict.fromkeys(range(1, 17), 0.0)
    for row in rows(data / PROFILE / "per_sequence.csv"):
        if int(row["sequences"]) in total:
            total[int(row["sequences"])] += float(row["time_us"]) * 1e-6
    return float(np.polyfit(list(total), list(total.values()), 1)[0])


def fit(found: Sequence[Point], c_seq_s: float, free: Sequence[str] = FREE) -> dict[str, float]:
    """Coefficients (s) of the terms `free`, and `c_seq_s`."""
    start = {name: START[name] for name in free}
    return _fit.fit(found, FAMILIES, start, {"c_seq_s": c_seq_s}) | {"c_seq_s": float(f"{c_seq_s:.2g}")}


def ladder(found: Sequence[Point], c_seq_s: float) -> Iterator[str]:
    """Fits with fewer and more terms as a table: error at the points fitted to, and at points held out."""
    share = weights(found, FAMILIES)
    region = np.asarray([region_of(point) for point in found])
    steps = np.asarray([point.family == "steps, chunk and decodes" for point in found])

    def error_pct(free: Sequence[str], held_out: np.ndarray) -> np.ndarray:
        kept = [point for point, out in zip(found, held_out, strict=True) if not out]
        values = fit(kept, c_seq_s, free)
        fitted = columns(found, values) @ np.asarray(list(values.values()))
        return 100 * (fitted / np.asarray([point.seconds for point in found]) - 1)

    def spread(error: np.ndarray, weight: np.ndarray) -> str:
        worst = error[np.argmax(np.abs(error))]
        return f"{np.sqrt(np.average(error**2, weights=weight)):.1f}, {worst:+.1f}"

    yield "| terms | all points | each region held out | measured steps with a chunk held out |"
    yield "|---|---|---|---|"
    for free in LADDER:
        by_region = np.empty(len(found))
        for name in np.unique(region):
            by_region[region == name] = error_pct(free, region == name)[region == name]
        everything = spread(error_pct(free, steps & False), share)
        unseen = spread(error_pct(free, steps)[steps], share[steps])
        yield f"| {', '.join(free)} | {everything} | {spread(by_region, share)} | {unseen} |"


def draw(path: Path, model: Affine, found: Sequence[Point], error: np.ndarray) -> None:
    """Points against fit: decode steps, prompt chunks, chunks beside decodes, and all relative errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13.5, 9.5))
    figure.suptitle(
        "Llama-3.1-70B, two RTX PRO 6000, vLLM 0.19.0: iteration time, data (points) and fit (lines)"
    )
    above = figure.add_gridspec(1, 3, left=0.05, right=0.99, bottom=0.56, top=0.91, wspace=0.2)
    decode, prompt, mixed = (figure.add_subplot(above[0, place]) for place in range(3))
    residual = figure.add_subplot(figure.add_gridspec(1, 1, left=0.23, right=0.99, bottom=0.06, top=0.46)[0])

    def fitted_ms(points: Iterable[tuple[int, int, int, int]]) -> np.ndarray:
        return 1e3 * errors(model, [Point("", *point, 1.0) for point in points])[0]

    def dots(axis: Any, chosen: Sequence[Point], color: str, label: str, marker: str = "o") -> None:
        x = [point.context / 1e3 for point in chosen]
        axis.plot(x, [1e3 * point.seconds for point in chosen], marker, color=color, label=label)

    lengths = np.linspace(500, 40_000, 80).astype(int)
    for size, color in ((1, "C0"), (4, "C1"), (8, "C2"), (16, "C3")):
        decode.plot(lengths / 1e3, fitted_ms((0, 0, size, int(length)) for length in lengths), color)
        chosen = [point for point in found if point.family == "decode grid" and point.decodes == size]
        dots(decode, chosen, color, f"{size} decoding")
    chosen = [point for point in found if point.family == "steps, decodes only"]
    dots(decode, chosen, "black", "whole steps: 4, 8, 12", "*")
    decode.set(title="Decodes only", xlabel="context of each (thousand tokens)", ylabel="iteration (ms)")

    sizes = np.geomspace(32, 16_384, 200).astype(int)
    for history, color, label in ((0, "C0", "without history"), (16_384, "C1", "over 16,384 tokens")):
        prompt.plot(sizes, fitted_ms((int(size), history, 0, 0) for size in sizes) / sizes, color)
        chosen = [point for point in found if point.chunk and not point.decodes and point.history == history]
        y = [1e3 * point.seconds / point.chunk for point in chosen]
        prompt.plot([point.chunk for point in chosen], y, "o", color=color, label=label)
    prompt.set(title="Prompt chunk alone", xlabel="chunk (tokens)", ylabel="ms per token", xscale="log")
    prompt.set_ylim(0, 1.2)

    lengths = np.linspace(1_000, 20_000, 40).astype(int)
    for size, color in ((1, "C0"), (4, "C1"), (8, "C2")):
        for chunk in (256, 1024):
            mixed.plot(
                lengths / 1e3, fitted_ms((chunk, 8192, size, int(length)) for length in lengths), color
            )
        beside = [point for point in found if "beside" in point.family and point.decodes == size]
        chosen = [point for point in beside if point.history == 8192 and point.chunk in (256, 1024)]
        dots(mixed, chosen, color, f"{size} decoding")
    mixed.annotate("chunk 256", (1, 170))
    mixed.annotate("chunk 1,024", (1, 425))
    mixed.set(title="Chunk over 8,192 tokens, and decodes", xlabel="context of each decode (thousand tokens)")
    mixed.set(ylabel="iteration (ms)", ylim=(80, 480))

    regions = list(dict.fromkeys(region_of(point) for point in found))
    for place, region in enumerate(regions):
        here = error[[region_of(point) == region for point in found]]
        residual.plot(here, np.full(len(here), place), "|", ms=9, color="C0")
        residual.plot(np.median(here), place, "d", color="black")
    residual.axvline(0, color="grey", lw=0.8)
    residual.set_yticks(range(len(regions)), regions, fontsize=8)
    residual.invert_yaxis()
    residual.set(title="Error by region (diamond: median)", xlabel="fit / data - 1 (%)")
    decode.legend(fontsize=8)
    prompt.legend(fontsize=8)
    mixed.legend(fontsize=8, loc="center right")
    for axis in (decode, prompt, mixed, residual):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(data: Path, out: Path, terms: bool = False) -> None:
    """Fit and write the coefficient file, residual table and figure; with `terms` print the ladder."""
    jax.config.update("jax_enable_x64", True)
    attention = Attention(data / PROFILE / "attention_subset.csv", data / list(INPUTS)[-1])
    found = points(data, attention)
    c_seq_s = per_sequence(data)
    coefficients = fit(found, c_seq_s)
    fitted, error = errors(Affine(**coefficients), found)
    sensitivity = {
        "without c_mixed_s": fit(found, c_seq_s, FREE[:-1]),
        "measured steps without history, decodes at 3,000 tokens": fit(
            points(data, attention, known_contexts=False), c_seq_s
        ),
    }
    regions = [region_of(point) for point in found]
    content = {
        "gpu": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "gpus": 2,
        "model": "meta-llama/Llama-3.1-70B, bfloat16",
        "tensor_parallel": 2,
        "engine": "vLLM 0.19.0, chunked prefill",
        "fitted": FITTED,
        "method": f"weighted Huber loss (delta {HUBER}) of the relative error over {len(found)} points in "
        f"{len(FAMILIES)} families, optax adam, {STEPS} steps, coefficients positive by exp; c_seq_s: slope "
        "of output head and sampler over 1 to 16 sequences; see calibration/README.md",
        "coefficients": coefficients | {"overhead_s": 0.0, "wakeup_s": 0.06},
        "valid": {
            "tokens": {"low": 1, "high": 16384},
            "sequences": {"low": 1, "high": 16},
            "context tokens of a decode": {"low": 1024, "high": 32768},
            "context tokens before a chunk": {"low": 0, "high": 32768},
        },
        "residuals": _fit.summaries(regions, error),
        "sensitivity": sensitivity,
        "inputs": _fit.sources(data, INPUTS),
        "notes": [
            "contexts of the measured steps are inferred, not published: calibration/README.md",
            f"attention of Qwen3-32B times {attention.scale:.3f}, median ratio of {attention.common} rows",
            "overhead_s is 0 because the wall times contain the host's share",
            "wakeup_s: the AgentServeSim paper states about 60 ms for the first call after idleness",
        ],
    }
    folder = out / NAME
    _fit.write_json(folder / "tp2.json", content)
    _fit.write_csv(
        folder / "residuals.csv",
        (
            "region",
            "chunk_tokens",
            "history_tokens",
            "decodes",
            "decode_context_tokens",
            "fitted_s",
            "error_pct",
        ),
        (
            (region, *point[1:5], f"{seconds:.4f}", f"{percent:.1f}")
            for region, point, seconds, percent in zip(regions, found, fitted, error, strict=True)
        ),
    )
    draw(folder / "residuals.png", Affine(**coefficients), found, error)
    if terms:
        print(*ladder(found, c_seq_s), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published measurements")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder to write under (default: calibration/)"
    )
    parser.add_argument("--ladder", action="store_true", help="compare fits with fewer and more terms")
    arguments = parser.parse_args()
    main(arguments.data, arguments.out, arguments.ladder)
