"""Generators: published figures, determinism, paired draws, and the configs that call them."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from omegaconf import OmegaConf

from agentjax.errors import InputError
from agentjax.workloads import (
    Call,
    Program,
    bfcl,
    build_programs,
    fixed,
    gamma,
    poisson,
    production,
    read_programs,
    swebench,
    write_programs,
)
from agentjax.workloads.build import file
from agentjax.workloads.program import context_tokens
from agentjax.workloads.synthetic import stratified_counts

CONF = Path(__file__).resolve().parents[1] / "conf" / "workload"
Generator = Callable[..., list[Program]]
GENERATORS = [swebench, bfcl, production]
SEEDS = range(5)


def counts(programs: list[Program]) -> np.ndarray:
    return np.array([len(program.calls) for program in programs])


def prompts(programs: list[Program]) -> np.ndarray:
    return np.array([prompt for p in programs for prompt, _ in context_tokens(p.calls, p.prefix)])


def largest_context(programs: list[Program]) -> int:
    return max(context for p in programs for _, context in context_tokens(p.calls, p.prefix))


def gaps(programs: list[Program]) -> np.ndarray:
    return np.array([call.tool_s for program in programs for call in program.calls[:-1]])


def outputs(programs: list[Program]) -> np.ndarray:
    return np.array([call.output_tokens for program in programs for call in program.calls])


def growths(programs: list[Program]) -> np.ndarray:
    pairs = [
        (a, b) for p in programs for a, b in zip(p.calls, p.calls[1:], strict=False) if b.kept_tokens is None
    ]
    return np.array([a.output_tokens + b.new_tokens for a, b in pairs])


# ---- published figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_swebench_has_the_published_totals_in_every_draw(seed: int) -> None:
    programs = swebench(seed)
    assert len(programs) == 50
    assert np.median(counts(programs)) == 47
    assert counts(programs).sum() == pytest.approx(2873, rel=0.005)
    assert prompts(programs).sum() == pytest.approx(38.7e6, rel=0.001)
    assert largest_context(programs) <= 120_000


def test_swebench_is_scaled_per_call_for_other_numbers_of_programs() -> None:
    programs = swebench(3, programs=30)
    assert counts(programs).sum() == pytest.approx(1674, rel=0.04)  # published for 30 of the 50
    assert prompts(programs).mean() == pytest.approx(13_470, rel=0.001)


def test_swebench_in_a_large_sample() -> None:
    programs = swebench(11, programs=2000, context_tokens_per_call=None)
    times = gaps(programs)
    assert times.mean() == pytest.approx(0.85, rel=0.05)
    assert times.std() == pytest.approx(4.3, rel=0.06)
    assert np.median(times) == pytest.approx(0.19, abs=0.01)
    assert times.max() == 60
    assert growths(programs).mean() == pytest.approx(287, rel=0.02)
    assert np.log(growths(programs)).std() == pytest.approx(1.06, rel=0.02)
    assert np.median(outputs(programs)) == pytest.approx(45, abs=1)
    first = np.array([program.calls[0].new_tokens for program in programs])
    assert np.median(first) == pytest.approx(1650, rel=0.02)


def test_swebench_outputs_leave_room_for_an_observation() -> None:
    pairs = [(a, b) for p in swebench(0) for a, b in zip(p.calls, p.calls[1:], strict=False)]
    assert all(b.new_tokens >= 30 or a.output_tokens == 1 for a, b in pairs)
    assert all(b.new_tokens >= 1 for _, b in pairs)


@pytest.mark.parametrize("most", [8_000, 30_000])
def test_no_context_exceeds_the_largest(most: int) -> None:
    assert largest_context(swebench(0, max_context_tokens=most, context_tokens_per_call=None)) <= most
    assert largest_context(bfcl(0, max_context_tokens=most, web_share=0.5)) <= most
    assert largest_context(production(0, max_context_tokens=most, first_median_tokens=5000)) <= most


@pytest.mark.parametrize("seed", SEEDS)
def test_bfcl_has_the_published_calls_in_every_draw(seed: int) -> None:
    programs = bfcl(seed)
    assert len(programs) == 100
    assert np.median(counts(programs)) == 5.5
    assert counts(programs).mean() == pytest.approx(7.05, rel=0.01)
    assert largest_context(programs) <= 20_000  # small against any pool


def test_bfcl_in_a_large_sample() -> None:
    programs = bfcl(1, programs=2000, web_share=0.5)
    turns = [p for p in programs if p.calls[0].new_tokens == 4700]
    web = [p for p in programs if p.calls[0].new_tokens == 1100]
    assert len(turns) == len(web) == 1000
    assert np.percentile(growths(turns), 1) >= 60 and np.percentile(growths(turns), 99) <= 300
    assert np.median(gaps(turns)) == pytest.approx(0.002, rel=0.05)
    assert np.mean(growths(web) > 16_000) == pytest.approx(0.2, abs=0.03)
    last = np.array([p.calls[-1].output_tokens for p in programs])
    other = np.array([c.output_tokens for p in programs for c in p.calls[:-1]])
    assert np.median(other) == pytest.approx(70, rel=0.03)
    assert np.median(last) == pytest.approx(210, rel=0.05)


def test_production_in_a_large_sample() -> None:
    programs = production(2, programs=2000)
    steps, times, grown = counts(programs), gaps(programs), growths(programs)
    assert np.percentile(steps, [25, 50, 90]) == pytest.approx([4, 15, 135], rel=0.15, abs=1)
    assert steps.mean() == pytest.approx(73.6, rel=0.15)
    assert np.percentile(times, [50, 90, 99]) == pytest.approx([0.3, 13.6, 216], rel=0.2)
    assert 0.03 < np.mean(times > 60) < 0.045
    assert times[times > 60].sum() / times.sum() == pytest.approx(0.85, abs=0.05)
    assert times.max() <= 4 * 3600
    assert np.median(grown) == pytest.approx(875, rel=0.01)
    assert np.mean(grown < 1000) > 0.9
    assert np.median(outputs(programs)) == pytest.approx(214, rel=0.02)
    assert largest_context(programs) <= 120_000


def test_production_appends_have_their_mass_in_large_ones_before_compaction() -> None:
    grown = growths(production(4, programs=500, max_context_tokens=10**6, calls_max=20))
    assert grown[grown >= 10_000].sum() / grown.sum() > 0.7


def test_production_compacts_to_its_first_prompt() -> None:
    kept = [c.kept_tokens for p in production(0) for c in p.calls if c.kept_tokens is not None]
    assert kept and set(kept) == {27_000}


def test_stratified_counts_stay_within_their_bounds() -> None:
    drawn = stratified_counts(0, 40, 5.0, 3.0, 2, 30)
    assert drawn.min() == 2 and drawn.max() == 30
    assert list(stratified_counts(0, 1, 5.0, 0.0, 2, 30)) == [5]


# ---- seeds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generate", GENERATORS)
def test_programs_are_well_formed_and_fixed_by_the_seed(tmp_path: Path, generate: Generator) -> None:
    name = generate.__name__
    for i, seed in enumerate([7, 7, 8]):
        write_programs(tmp_path / f"{i}.jsonl", generate(seed, programs=9))
    first, same, other = ((tmp_path / f"{i}.jsonl").read_bytes() for i in range(3))
    assert first == same != other
    programs = read_programs(tmp_path / "0.jsonl")
    assert programs == generate(7, programs=9)
    assert [p.name for p in programs] == [f"{name}-{i:04d}" for i in range(9)]
    assert all(p.calls[-1].tool is None and p.calls[-1].tool_s == 0 for p in programs)


@pytest.mark.parametrize("generate", GENERATORS)
def test_a_rate_only_rescales_the_arrivals(generate: Generator) -> None:
    slow, fast = generate(5, programs=20, rate=0.02), generate(5, programs=20, rate=0.1)
    assert [p.stages for p in slow] == [p.stages for p in fast]
    ratio = np.array([p.arrival_s for p in slow]) / np.array([p.arrival_s for p in fast])
    assert ratio == pytest.approx(5, rel=1e-12)


def test_purposes_draw_apart() -> None:
    base, bursty, talkative = swebench(1), swebench(1, arrival_cv=3.0), swebench(1, output_median_tokens=80.0)
    assert [p.stages for p in base] == [p.stages for p in bursty]
    assert [p.arrival_s for p in base] == [p.arrival_s for p in talkative]
    assert gaps(base).tolist() == gaps(talkative).tolist()
    assert prompts(base).tolist() == prompts(talkative).tolist()


def test_a_jax_key_is_a_seed() -> None:
    key = jax.random.key(3)
    assert swebench(key, programs=3) == swebench(jax.random.key(3), programs=3)
    assert swebench(key, programs=3) == swebench(jax.random.PRNGKey(3), programs=3)
    assert swebench(key, programs=3) != swebench(jax.random.key(4), programs=3)


@pytest.mark.parametrize("generate", GENERATORS)
def test_a_shared_prefix_leaves_the_prompts_as_they_are(generate: Generator) -> None:
    plain, shared = generate(2, programs=8), generate(2, programs=8, shared_prefix_tokens=1000)
    assert prompts(plain).tolist() == prompts(shared).tolist()
    assert all(p.prefix and p.prefix.tokens == 1000 for p in shared)


# ---- arrivals ----------------------------------------------------------------------------------------------


def chains(number: int) -> list[Program]:
    return [Program(f"p{i}", None, (((Call(1, 1, None, None, 0.0),),),)) for i in range(number)]


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_interarrival_times_have_the_mean_and_variation_asked_for(cv: float) -> None:
    arrivals = [p.arrival_s or 0.0 for p in gamma(chains(20_000), rate=4.0, cv=cv, seed=0)]
    between = np.diff([0.0, *arrivals])
    assert between.mean() == pytest.approx(0.25, rel=0.05)
    assert between.std() / between.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_is_gamma_of_variation_one() -> None:
    assert poisson(chains(5), rate=2.0, seed=3) == gamma(chains(5), rate=2.0, cv=1.0, seed=3)


def test_fixed_arrivals_must_be_there() -> None:
    drawn = poisson(chains(3), rate=1.0, seed=0)
    assert fixed(drawn) == drawn
    with pytest.raises(InputError) as error:
        fixed(chains(1))
    assert (
        str(error.value)
        == "program p0, arrival_s: found nothing, expected a number, or a rate to draw it with"
    )


# ---- configs -----------------------------------------------------------------------------------------------


def load(function: Generator) -> dict[str, Any]:
    config = OmegaConf.to_container(OmegaConf.load(CONF / f"{function.__name__}.yaml"))
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


@pytest.mark.parametrize("function", [*GENERATORS, file], ids=lambda f: f.__name__)
def test_a_config_lists_every_parameter_with_its_default(function: Generator) -> None:
    config = load(function)
    assert config.pop("generator", "file") == function.__name__
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    given = {"path": "???"} if function is file else {"seed": 0}
    assert config == defaults | given


@pytest.mark.parametrize("generate", GENERATORS)
def test_a_config_builds_programs(generate: Generator) -> None:
    config = OmegaConf.create(load(generate) | {"programs": 4, "seed": 6})
    assert build_programs(config) == generate(6, programs=4)  # pyright: ignore[reportArgumentType]


def test_a_file_keeps_its_arrivals_or_has_them_drawn(tmp_path: Path) -> None:
    path = str(tmp_path / "w.jsonl")
    programs = poisson(chains(3), rate=1.0, seed=0)
    write_programs(path, programs)
    assert build_programs({"path": path}) == programs
    assert build_programs({"path": path, "rate": 2, "seed": 9}) == poisson(chains(3), rate=2.0, seed=9)
    write_programs(path, chains(3))
    with pytest.raises(InputError, match="program p0, arrival_s: found nothing"):
        build_programs({"path": path})


SWE = {"generator": "swebench", "seed": 0}
POSITIVE = "expected a number greater than 0, at most 1e15"
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 0}, "workload: found neither generator nor path, expected one of them"),
    ({"generator": "swbench"}, 'workload, generator: found "swbench", expected swebench'),
    ({"generator": 5}, "workload, generator: found 5, expected one of bfcl, production, swebench"),
    ({"generator": "swebench"}, "swebench, seed: found nothing, expected this field"),
    (SWE | {"rat": 1.0}, "swebench, rat: found an unknown field, expected rate"),
    (SWE | {"path": "x"}, "workload: found both generator and path, expected one of them"),
    (SWE | {"rate": 0}, "swebench, rate: found 0, expected a number greater than 0, at most 1e15"),
    (SWE | {"rate": "fast"}, f'swebench, rate: found "fast", {POSITIVE}'),
    (SWE | {"rate": float("inf")}, f"swebench, rate: found Infinity, {POSITIVE}"),
    (SWE | {"arrival_cv": -1}, f"swebench, arrival_cv: found -1, {POSITIVE}"),
    (SWE | {"programs": 0}, "swebench, programs: found 0, expected an integer from 1 to 1000000"),
    (SWE | {"programs": 2.5}, "swebench, programs: found 2.5, expected an integer from 1 to 1000000"),
    (SWE | {"calls_min": 300}, "calls_min: found 300, expected at most 250, which is calls_max"),
    (SWE | {"first_median_tokens": 1e300}, f"swebench, first_median_tokens: found 1e+300, {POSITIVE}"),
    (
        {"generator": "bfcl", "seed": 0, "turns_growth_low_tokens": 300},
        "turns_growth_low_tokens: found 300, expected at most 280, which is turns_growth_high_tokens",
    ),
    (
        {"generator": "production", "seed": 0, "large_max_tokens": 5.0},
        "large_min_tokens: found 10000, expected at most 5, which is large_max_tokens",
    ),
    (SWE | {"seed": -1}, "swebench, seed: found -1, expected an integer of at least 0, or a jax.random key"),
    (
        SWE | {"seed": "a"},
        'swebench, seed: found "a", expected an integer of at least 0, or a jax.random key',
    ),
    (SWE | {"gap_python_share": 2}, "swebench, gap_python_share: found 2, expected a number from 0 to 1"),
    (SWE | {"calls_sigma": None}, "swebench, calls_sigma: found null, expected a number from 0 to 10"),
    (
        SWE | {"context_tokens_per_call": 0},
        "swebench, context_tokens_per_call: found 0, expected null or a number greater than 0, at most 1e15",
    ),
    ({"path": "???"}, "file, path: found nothing, expected the path of a workload file"),
    (
        {"path": "w", "format": "csv"},
        'file, format: found "csv", expected auto, native, llmservingsim or recording',
    ),
    (
        {"generator": "production", "seed": 0, "max_context_tokens": 1000},
        "max_context_tokens: found 1000, expected at least 27002, for a first prompt of 27000 tokens",
    ),
]


@pytest.mark.parametrize(("config", "sentence"), FAULTS, ids=[str(i) for i in range(len(FAULTS))])
def test_each_fault_of_a_config_is_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        build_programs(config)
    assert str(error.value) == sentence


@pytest.mark.parametrize("wanted", [100, 10**6])
def test_a_context_out_of_reach_is_refused_with_its_range(wanted: int) -> None:
    with pytest.raises(
        InputError, match=r"^context_tokens_per_call: found .* expected null, or more than \d+ and at most"
    ):
        swebench(0, context_tokens_per_call=wanted)


def test_contexts_that_cannot_fit_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"^max_context_tokens: found 1000, expected at least \d+ for these first prompts"
    ):
        swebench(0, max_context_tokens=1000)
