"""Performance models: exact arithmetic, coefficient files, configurations, and the shipped calibration."""

import json
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from agentjax.errors import InputError
from agentjax.performance import (
    AbstractPerformance,
    Affine,
    BatchShape,
    build_performance,
    decode_batch,
    load,
)
from agentjax.performance.load import available, read
from tests.batches import iteration

jax.config.update("jax_enable_x64", True)

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
NAME = "rtx-pro-6000/llama-3.1-70b/tp2"
RECORDED = Affine(c0_s=0.04, c_tok_s=1e-4, c_seq_s=1e-4, c_kv_s=5e-8)
"""The cost model of the recorded scheduler runs."""


@pytest.mark.parametrize("chunk", [0, 1, 511, 8191])
@pytest.mark.parametrize("decodes", [0, 1, 7, 128])
@pytest.mark.parametrize("context", [1, 13_337, 131_071])
def test_whole_nanoseconds_stay_exact(chunk, decodes, context):
    batch = iteration(chunk, 4097, decodes, context)
    total = (chunk > 0) * (chunk + 4097) + decodes * context
    expected = 40_000_000 + 100_000 * (chunk + decodes) + 100_000 * ((chunk > 0) + decodes) + 50 * total
    assert float(RECORDED.iteration_ns(batch)) == expected
    assert float(eqx.filter_jit(RECORDED.iteration_ns)(batch)) == expected


def test_prefill_terms_are_exact():
    model = Affine(c0_s=1e-3, c_prefill_s=2e-9, c_mixed_s=3e-7, overhead_s=5e-9, wakeup_s=0.06)
    assert float(model.iteration_ns(iteration(chunk=3, history=10))) == 1_000_000 + 2 * 34.5 + 5
    beside = iteration(chunk=3, history=10, decodes=7, context=131_071)
    assert float(model.iteration_ns(beside)) == 1_000_000 + 2 * 34.5 + 300 * 7 * 131_071 + 5
    assert float(model.iteration_ns(iteration(decodes=3, context=10))) == 1_000_000 + 5
    assert float(model.iteration_s(iteration(decodes=3, context=10))) == pytest.approx(1.000005e-3, rel=1e-15)
    assert (float(model.overhead_s), float(model.wakeup_s)) == pytest.approx((5e-9, 0.06))


@pytest.mark.parametrize("decodes", [1, 5, 128])
@pytest.mark.parametrize("context", [1, 20_000])
@pytest.mark.parametrize("c_mixed_s", [0.0, 3e-7])
def test_a_leap_is_the_iterations_one_by_one(decodes, context, c_mixed_s):
    model = Affine(c0_s=0.04, c_tok_s=1e-4, c_seq_s=1e-4, c_kv_s=5e-8, c_mixed_s=c_mixed_s)
    steps = [iteration(decodes=decodes, context=context + k) for k in range(10)]
    alone = [float(model.iteration_ns(step)) for step in steps]
    first = decode_batch(np.float64(decodes), np.float64(decodes * context), np.float64(context))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, steps[0]))
    straight, growth = model.leap(first, np.float64(10))
    assert (float(straight), float(growth)) == (10, 50 * decodes)
    assert [float(model.iteration_ns(first) + k * growth) for k in range(10)] == alone


def test_a_batch_adds_up():
    batch = iteration(chunk=300, history=13_000, decodes=7, context=13_500)
    assert (float(batch.tokens), float(batch.context_tokens)) == (307, 300 + 13_000 + 7 * 13_500)


def test_leaves_are_float64_and_decimal_seconds_become_whole_nanoseconds():
    model = Affine.from_seconds(c0_s=0.04, c_tok_s=1e-4, c_kv_s=5e-8, c_prefill_s=4.336e-9)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(model))
    assert (float(model.c_tok_ns), float(model.c_kv_ns), float(model.c_prefill_ns)) == (100_000, 50, 4.336)


def test_stacked_coefficients_vmap_with_one_trace():
    traces = []

    @eqx.filter_jit
    def durations(model: AbstractPerformance, batch: BatchShape) -> jax.Array:
        traces.append(1)
        return jax.vmap(lambda lane: lane.iteration_ns(batch))(model)

    batch = iteration(100, 50, 3, 1000)
    for scale in (1, 2, 3):
        lanes = [Affine(c0_s=scale * c0, c_tok_s=1e-4, c_kv_s=5e-8) for c0 in (0.04, 0.05)]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *lanes)
        alone = [float(lane.iteration_ns(batch)) for lane in lanes]
        assert durations(stacked, batch).tolist() == alone
    arrays = Affine(c0_s=np.asarray([0.12, 0.15]), c_tok_s=[1e-4] * 2, c_kv_s=[5e-8] * 2)
    assert arrays.c0_ns.tolist() == [120_000_000, 150_000_000]
    assert len(traces) == 1


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), "fast"])
def test_a_coefficient_must_be_finite_and_not_negative(value):
    with pytest.raises(InputError, match=r"^c_kv_s: found .*, expected a .*number of seconds"):
        Affine(c0_s=0.04, c_kv_s=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "colour: found an unknown field"),
        ({"gpu": None}, "gpu: found null, expected a string that is not empty"),
        ({"fitted": "yesterday"}, 'fitted: found "yesterday", expected a date as YYYY-MM-DD'),
        ({"coefficients": {"c0_s": 0.04}}, "coefficients.c_tok_s: found nothing, expected this field"),
        ({"coefficients": {"c0_s": -1.0}}, "coefficients.c0_s: found -1.0, expected a number of seconds"),
        ({"coefficients": {"c0_s": "40 ms"}}, 'coefficients.c0_s: found "40 ms", expected a number'),
        ({"coefficients": {"c_kvs": 1.0}}, "coefficients.c_kvs: found an unknown field, expected c_kv_s"),
        ({"valid": {"tokens": {"low": 1, "hihg": 2}}}, "valid.tokens.hihg: found an unknown field"),
    ],
)  # fmt: skip
def test_a_bad_coefficient_file_is_one_sentence(tmp_path, change, message):
    content = {**read(NAME).model_dump(), **change}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}, ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_name_or_file_lists_what_there_is(tmp_path):
    for wrong in (
        "rtx-pro-6000/llama-3.1-70b/tp4",
        "../calibration/" + NAME,
        tmp_path / "none.json",
        tmp_path,
    ):
        with pytest.raises(InputError, match=NAME):
            load(wrong)


def test_text_that_is_not_json_names_the_line(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{\n"gpu": ,\n}')
    with pytest.raises(InputError, match=r"mine\.json, line 2: found text that is not JSON"):
        load(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="expected"):
        load(path)


def test_a_path_loads_what_the_name_loads():
    by_name, by_path = load(NAME), load(str(ROOT / "calibration" / f"{NAME}.json"))
    assert jax.tree.all(jax.tree.map(np.array_equal, by_name, by_path))
    assert NAME in available()


def test_build_from_configuration():
    explicit = build_performance({"c0_s": 0.04, "c_tok_s": 1e-4, "c_seq_s": 1e-4, "c_kv_s": 5e-8})
    assert jax.tree.all(jax.tree.map(np.array_equal, explicit, RECORDED))
    named = build_performance({"coefficients": NAME, "wakeup_s": 0})
    assert float(named.wakeup_ns) == 0
    assert float(load(NAME).wakeup_ns) > 0
    assert float(named.iteration_ns(iteration(10))) == float(load(NAME).iteration_ns(iteration(10)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"c0_s": 0.04, "c_kvs": 1e-8}, "performance.c_kvs: found an unknown field, expected c_kv_s"),
        ({"c0_s": -0.04}, "performance.c0_s: found -0.04, expected a number of seconds from 0 to 1000"),
        ({"c0_s": 1e18}, "performance.c0_s: found 1e+18, expected a number of seconds from 0 to 1000"),
        ({"c0_s": "40 ms"}, 'performance.c0_s: found "40 ms", expected a number of seconds from 0 to 1000'),
        ({"coefficients": NAME, "c0_s": 0.04}, "performance.c0_s: found a coefficient beside the"),
        ({"coefficients": 3}, "performance.coefficients: found 3, expected the name or path"),
        ({"c_kv_s": 1e-8}, "performance: found neither coefficients nor c0_s, expected one of the two"),
        ({"coefficients": "h200"}, "coefficients: found 'h200', expected a path ending in .json or one of"),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_one_sentence(config, message):
    with pytest.raises(InputError) as error:
        build_performance(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["affine", "rtx_pro_6000_llama_70b_tp2"])
def test_shipped_configurations_build(name):
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / "conf" / "performance" / f"{name}.yaml").read_text())
    assert isinstance(build_performance(config), Affine)


@pytest.mark.parametrize(
    ("batch", "measured_s", "within"),
    [
        # AgentServeSim artifact, commit 5a73df77: step_overhead.csv; contexts: calibration/README.md
        (iteration(decodes=4, context=16_384), 0.0570, 0.02),
        (iteration(decodes=8, context=8_192), 0.0578, 0.02),
        (iteration(decodes=12, context=7_100), 0.0603, 0.02),
        (iteration(256, 8064, 8, 8192), 0.153, 0.07),
        (iteration(2048, 7168, 8, 8192), 0.709, 0.07),
        (iteration(16_384, 0, 8, 8192), 4.67, 0.05),
        (iteration(16_384, 16_384, 8, 8192), 5.78, 0.05),
        # the same, infercept_profile_rtx6000_70B_tp2.json: one pass over a prompt
        (iteration(2048), 0.593, 0.02),
        (iteration(4096), 1.197, 0.06),
        (iteration(16_384), 4.975, 0.05),
        (iteration(256), 0.106, 0.09),
    ],
)  # fmt: skip
def test_calibration_reproduces_published_anchors(batch, measured_s, within):
    assert float(load(NAME).iteration_s(batch)) == pytest.approx(measured_s, rel=within)


def test_calibration_states_where_it_comes_from():
    file = read(NAME)
    assert file.inputs
    assert file.valid["tokens"].high == 16_384
    assert file.residuals
    assert all(abs(residual.worst_pct) < 12 for residual in file.residuals.values())


@pytest.mark.skipif(not DATA.is_dir(), reason="the published measurements (../shared/data) are not here")
def test_the_fit_gives_the_same_bytes(tmp_path):
    script = ROOT / "calibration" / "fit_llama70b.py"
    command = [sys.executable, str(script), "--data", str(DATA), "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=True, timeout=120)
    for name in ("tp2.json", "residuals.csv"):
        shipped = ROOT / "calibration" / "rtx-pro-6000" / "llama-3.1-70b" / name
        assert (tmp_path / "rtx-pro-6000" / "llama-3.1-70b" / name).read_bytes() == shipped.read_bytes()
