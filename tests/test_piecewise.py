"""The piecewise model: its formula, its leaps, its errors, its file, and the engine with it."""

import json
import random
from unittest.mock import patch

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.errors import InputError
from agentjax.performance import Affine, Piecewise, build_performance, decode_batch, load
from agentjax.performance.valid import ranges_of
from tests import engine_cases
from tests.batches import iteration
from tests.engine_cases import common, first_difference, recorded
from tests.reference.simulator import Simulation, simulate
from tests.strategies import MS, random_case

jax.config.update("jax_enable_x64", True)

MODEL = Piecewise(
    knots=[1, 2, 4],
    decode_s=[6e-3, 11e-3, 13e-3],
    decode_context_s=[2e-6, 4e-6, 8e-6],
    prefill_s=5e-3,
    prefill_tok_s=1e-3,
    prefill_work_s=2e-6,
    prefill_context_s=3e-6,
    short_prefill_tokens=64,
    short_prefill_work_s=5e-6,
    shared_s=4e-3,
    overhead_s=1e-3,
    wakeup_s=2e-3,
)


@pytest.mark.parametrize(
    ("batch", "milliseconds"),
    [
        (iteration(decodes=1, context=1000), 1 + 6 + 2),
        (iteration(decodes=2, context=1000), 1 + 11 + 4),
        (iteration(decodes=3, context=1000), 1 + 12 + 6),
        (iteration(decodes=4, context=1000), 1 + 13 + 8),
        (iteration(decodes=9, context=1000), 1 + 18 + 18),  # straight on after the last knot
        (iteration(chunk=100), 1 + 5 + 100 + 10),
        (iteration(chunk=50, history=1000), 1 + 5 + 50 + 256.25 + 3),
        (iteration(chunk=100, history=1000), 1 + 5 + 100 + 210 + 3),
        (iteration(chunk=100, decodes=2, context=1000), 1 + 5 + 100 + 10 + 11 + 4 - 4),
        (iteration(), 1),
    ],
)  # fmt: skip
def test_durations(batch, milliseconds):
    assert float(MODEL.iteration_ns(batch)) == milliseconds * 1e6
    assert float(eqx.filter_jit(lambda model: model.iteration_ns(batch))(MODEL)) == milliseconds * 1e6


def test_one_knot_is_level():
    model = Piecewise(knots=[4], decode_s=[0.01], decode_context_s=[1e-6])
    assert [float(model.iteration_ns(iteration(decodes=d, context=1000))) for d in (1, 4, 9)] == [11e6] * 3


def test_a_mixed_iteration_is_never_shorter_than_its_parts():
    model = Piecewise(knots=[1], decode_s=[0.01], decode_context_s=[0], prefill_tok_s=1e-3, shared_s=0.01)
    assert float(model.iteration_ns(iteration(chunk=1, decodes=1, context=5))) == 10e6
    assert float(model.iteration_ns(iteration(chunk=30, decodes=1, context=5))) == 30e6


NS = st.integers(0, 10**8)
CURVES = st.lists(st.tuples(st.integers(1, 30), NS, st.integers(0, 10**4)), min_size=1, max_size=6)


@st.composite
def models(draw):
    rises = draw(CURVES)
    knots, decode, context = np.cumsum(np.asarray(rises), axis=0).T
    prefill = {f"prefill_{name}s": draw(NS) * 1e-9 for name in ("", "tok_", "work_", "context_")}
    shared = draw(st.integers(0, int(decode[0])))
    return Piecewise(knots, decode * 1e-9, context * 1e-9, **prefill, shared_s=shared * 1e-9)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 200), st.integers(1, 10**5), st.integers(1, 500))
def test_a_leap_is_the_iterations_one_by_one(model, decodes, context, count):
    first = decode_batch(np.float64(decodes), np.float64(decodes * context), np.float64(context))
    straight, growth = model.leap(first, np.float64(count))
    assert float(straight) == count
    at = np.arange(50)
    alone = np.asarray(model.iteration_ns(decode_batch(*np.broadcast_arrays(
        np.float64(decodes), np.float64(decodes) * (context + at), np.float64(context) + at))))  # fmt: skip
    line = float(model.iteration_ns(first)) + at * float(growth)
    np.testing.assert_allclose(line, alone, rtol=1e-13, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(0, 10**4), st.integers(0, 10**5), st.integers(0, 300), st.integers(1, 10**5))
def test_more_of_anything_never_takes_less(model, chunk, history, decodes, context):
    base = float(model.iteration_ns(iteration(chunk, history, decodes, context)))
    more = [
        iteration(chunk + 1, history, decodes, context),
        iteration(chunk, history + 1, decodes, context),
        iteration(chunk, history, decodes, context + 1),
        iteration(chunk, history, decodes + 1, context),
    ]
    assert base >= 0
    assert all(float(model.iteration_ns(batch)) >= base * (1 - 1e-12) for batch in more)


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(0, 10**7)] * 4), st.sampled_from([0, 1, 77, 4096]), st.integers(0, 40))
def test_agrees_with_an_equivalent_affine_model(coefficients, chunk, decodes):
    c0, c_tok, c_kv, c_prefill = (value * 1e-9 for value in coefficients)
    affine = Affine(c0_s=c0, c_tok_s=c_tok, c_kv_s=c_kv, c_prefill_s=c_prefill)
    piecewise = Piecewise(
        knots=[1, 3, 10],
        decode_s=[c0 + c_tok * d for d in (1, 3, 10)],
        decode_context_s=[c_kv * d for d in (1, 3, 10)],
        prefill_s=c0,
        prefill_tok_s=c_tok + c_kv,
        prefill_work_s=c_prefill,
        prefill_context_s=c_kv,
        shared_s=c0,
    )
    batch = iteration(chunk, 900, decodes, 1234)
    if chunk or decodes:
        np.testing.assert_allclose(piecewise.iteration_ns(batch), affine.iteration_ns(batch), rtol=1e-13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"knots": [2, 1, 3]}, "knots: found [2, 1, 3], expected a list of numbers of decodes that rises"),
        ({"knots": [0, 1, 3]}, "knots: found [0, 1, 3]"),
        ({"knots": []}, "knots: found []"),
        ({"knots": "many"}, "knots: found 'many', expected a list of numbers of decodes"),
        ({"decode_s": [1, 2]}, "decode_s: found 2 numbers, expected one for each of the 3 knots"),
        ({"decode_s": [3, 2, 4]}, "decode_s: found [3, 2, 4], expected times that do not fall"),
        ({"decode_context_s": [0, -1, 0]}, "decode_context_s: found [0, -1, 0], expected a number"),
        ({"prefill_tok_s": float("nan")}, "prefill_tok_s: found nan, expected a number of seconds from 0"),
        ({"shared_s": 1.5}, "shared_s: found 1.5, expected at most the first of decode_s"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(change, message):
    fine = {"knots": [1, 2, 3], "decode_s": [1, 2, 3], "decode_context_s": [0, 0, 0]}
    with pytest.raises(InputError) as error:
        Piecewise(**fine | change)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_iterations_of_few_prompt_tokens_have_their_own_prefill_work():
    coefficients = {"knots": [1], "decode_s": [0.01], "decode_context_s": [0], "prefill_work_s": 1e-6}
    model = Piecewise(**coefficients, short_prefill_tokens=64, short_prefill_work_s=4e-6)
    for chunk, work_s in ((16, 4e-6), (63, 4e-6), (64, 1e-6), (500, 1e-6)):
        expected = work_s * chunk * (1000 + chunk / 2)
        assert float(model.iteration_s(iteration(chunk, 1000))) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(InputError, match=r"short_prefill_tokens: found -1, expected a number of tokens >= 0"):
        Piecewise(**coefficients, short_prefill_tokens=-1)


def test_stacked_coefficients_vmap():
    batch = iteration(100, 50, 3, 1000)
    lanes = [Piecewise([1, 4], [scale * 0.01, 0.1], [0, 1e-6], 0.001) for scale in (1, 2, 3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *lanes)
    durations = eqx.filter_jit(jax.vmap(lambda lane: lane.iteration_ns(batch)))(stacked)
    assert durations.tolist() == [float(lane.iteration_ns(batch)) for lane in lanes]
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(MODEL))


# Files

CONTENT = {
    "form": "piecewise",
    "gpu": "any",
    "gpus": 1,
    "model": "any",
    "tensor_parallel": 1,
    "engine": "any",
    "fitted": "2026-11-30",
    "method": "by hand",
    "coefficients": {
        "knots": [1.0, 2.0, 4.0],
        "decode_s": [6e-3, 11e-3, 13e-3],
        "decode_context_s": [2e-6, 4e-6, 8e-6],
        "prefill_s": 5e-3,
        "prefill_tok_s": 1e-3,
        "prefill_work_s": 2e-6,
        "prefill_context_s": 3e-6,
        "short_prefill_tokens": 64.0,
        "short_prefill_work_s": 5e-6,
        "shared_s": 4e-3,
        "overhead_s": 1e-3,
        "wakeup_s": 2e-3,
    },
    "valid": {"tokens": {"low": 1, "high": 100}},
    "intervals": {"prefill_s": {"low": 4e-3, "high": 6e-3}, "decode_s": {"low": [1.0], "high": [2.0]}},
    "inputs": [{"file": "bench.jsonl", "sha256": "0" * 64, "measured": "2026-11-30", "use": "all"}],
}


def written(tmp_path, **change):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CONTENT | change))
    return path


def test_a_file_gives_the_model_and_its_range(tmp_path):
    path = written(tmp_path)
    model = load(path)
    assert jax.tree.all(jax.tree.map(np.array_equal, model, MODEL))
    name, ranges = ranges_of(build_performance({"coefficients": str(path), "wakeup_s": 0.5}))
    assert (name, ranges["tokens"].high) == (str(path), 100)
    assert ranges_of(Piecewise([1], [0.01], [0])) is None


def coefficients(**change):
    return {"coefficients": CONTENT["coefficients"] | change}


def interval(**bounds):
    return {"intervals": {"prefill_s": bounds}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "cubic"}, 'form: found "cubic", expected one of affine, piecewise'),
        ({"form": 3}, "form: found 3, expected one of affine, piecewise"),
        ({"form": "affine"}, "coefficients.knots: found an unknown field"),
        (coefficients(knots=[0.5]), "coefficients.knots[0]: found 0.5, expected a number"),
        (coefficients(knots=[1.0, 2.0]), "coefficients.decode_s: found 3 numbers"),
        (coefficients(shared=0), "coefficients.shared: found an unknown field, expected shared_s"),
        (interval(low=-1, high=1), "intervals.prefill_s.low"),
        (interval(lo=1, high=1), "intervals.prefill_s.lo: found an unknown field"),
        ({"ladder": [{"terms": "a"}]}, "ladder[0].form: found nothing"),
        ({"software": {"agentjax": "1", "seed": -1}}, "software.seed: found -1, expected an integer"),
        ({"inputs": [{"file": "a"}]}, "inputs[0].sha256: found nothing"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(tmp_path, change, message):
    path = written(tmp_path, **change)
    with pytest.raises(InputError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}, {message}")
    assert "\n" not in str(error.value)


# The engine. Times are whole nanoseconds for every batch that can be: 840 can be divided by 1 to 8.

WHOLE = {
    "knots": [1, 2, 4],
    "decode": [6 * MS, 11 * MS, 13 * MS],
    "context": [840, 2 * 840, 6 * 840],
    "prefill": 5 * MS,
    "tok": 10_000,
    "before": 30,
    "shared": 4 * MS,
}


def _piecewise_of(cost: dict) -> Piecewise:
    return Piecewise(
        knots=WHOLE["knots"],
        decode_s=np.asarray(WHOLE["decode"]) / 1e9,
        decode_context_s=np.asarray(WHOLE["context"]) / 1e9,
        prefill_s=WHOLE["prefill"] / 1e9,
        prefill_tok_s=WHOLE["tok"] / 1e9,
        prefill_context_s=WHOLE["before"] / 1e9,
        shared_s=WHOLE["shared"] / 1e9,
        wakeup_s=cost["wakeup_s"],
    )


def _line(name: str, count: int) -> int:
    """The reference's own way to the value at a number of decodes: the segment it lies in."""
    knots, values = WHOLE["knots"], WHOLE[name]
    at = max(0, min(sum(knot <= count for knot in knots), len(knots) - 1) - 1)
    run = knots[at + 1] - knots[at]
    return values[at] + (values[at + 1] - values[at]) * (count - knots[at]) // run


def _reference_ns(self: Simulation, batch) -> int:
    decodes = [before + 1 for call, _, before in batch if self.is_decode(call, before)]
    chunks = [(tokens, before) for call, tokens, before in batch if not self.is_decode(call, before)]
    total = 0
    if decodes:
        count = len(decodes)
        total += _line("decode", count) + _line("context", count) // count * sum(decodes)
    if chunks:
        total += WHOLE["prefill"] + sum(WHOLE["tok"] * n + WHOLE["before"] * before for n, before in chunks)
    return total - (WHOLE["shared"] if decodes and chunks else 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_equals_the_reference(asynchronous):
    """Random cases, each with the same piecewise model on both sides."""
    seeds = range(engine_cases.LANES - 1)
    cases = [random_case(random.Random(seed), async_scheduling=(asynchronous,)) for seed in seeds]
    assert max(config["max_num_seqs"] for _, config in cases) <= 8
    with (
        patch.object(engine_cases, "Affine", lambda **cost: _piecewise_of(cost)),
        patch.object(Simulation, "iteration_ns", _reference_ns),
    ):
        outcome = engine_cases.run(cases)
        assert not outcome.status.any()
        for index, case in enumerate(cases):
            difference = first_difference(recorded(outcome, index, *case), common(simulate(*case)))
            assert difference is None, f"seed {index}: {difference}"
