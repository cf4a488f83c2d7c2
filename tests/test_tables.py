"""Measured tables: reading, interpolation by hand, the in-engine form against it, leaps, recorded runs."""

import csv
import itertools
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from agentjax.errors import InputError
from agentjax.performance import BatchShape, Table, build_performance, decode_batch, load_table
from agentjax.performance.profile import LAYERS, Profile, read_profile
from agentjax.performance.tables import aligned

jax.config.update("jax_enable_x64", True)

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PROFILES = DATA / "profiles"
RUNS = DATA / "vllm_ground_truth"
measured = pytest.mark.skipif(not PROFILES.is_dir(), reason="no measured profiles (../shared/data/profiles)")

META = """
architecture: llama
model: example/model
gpu: example
tp_degrees: [1, 2]
skew_fit:
  enabled: true
  bucket_axes:
    n_bins: [0, 4, 1000]
    n_labels: [few, many]
    skew_rate_bins: [-0.01, 0.5, 1.01]
    skew_rate_labels: [low, high]
    kv_big_bins: [0, 200, 1000000]
    kv_big_labels: [short, long]
    kp_bins: [-1, 0, 1000000]
    kp_labels: [none, some]
  per_tp:
    1: {alpha_default: 0.25}
    2: {alpha_default: 0.25}
"""


def shape(prompts=(), contexts=()) -> BatchShape:
    values = (
        len(prompts) + len(contexts),
        len(contexts),
        sum(contexts),
        max(contexts, default=0),
        sum(n for n, _ in prompts),
        sum(c for _, c in prompts),
        sum(n * (c + n / 2) for n, c in prompts),
    )
    return BatchShape(*map(np.float64, values))


def attention_us(chunk, history, decodes, context):
    """Linear along every axis, so straight lines are exact; a mixed iteration pays 8 µs more."""
    return (10 if chunk and decodes else 2) + chunk * (1 + 0.01 * history) + 0.001 * decodes * context


def write_profile(folder: Path, rows=None, skew=("0,few,low,short,none,0.5,3",), meta=META) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = (*dict.fromkeys(LAYERS["llama"]), "embedding", "final_layernorm")
    lines = [f"{name},{n},{10 + i + n}" for i, name in enumerate(names) for n in (1, 10, 100)]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *lines]) + "\n")
    lines = [f"{name},{n},{1 + n}" for name in ("lm_head", "sampler") for n in (1, 8)]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *lines]) + "\n")
    if rows is None:
        axes = itertools.product((0, 16, 32), (0, 64), (0, 1, 4, 8), (0, 100, 200))
        rows = [p for p in axes if (p[0] or not p[1]) and bool(p[2]) == bool(p[3]) and (p[0] or p[2])]
    lines = [",".join(map(str, (*p, attention_us(*p)))) for p in rows]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (folder / "attention.csv").write_text("\n".join([header, *lines]) + "\n")
    header = "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples"
    (folder / "skew_fit.csv").write_text("\n".join([header, *skew]) + "\n")
    (folder / "meta.yaml").write_text(meta)
    return folder


@pytest.fixture
def tiny(tmp_path) -> Path:
    return write_profile(tmp_path / "tp1")


def rest_ns(tokens, sequences, layers=3):
    names = list(dict.fromkeys(LAYERS["llama"]))
    layer = sum(10 + names.index(name) + tokens for name in LAYERS["llama"])
    ends = sum(10 + len(names) + i + tokens for i in (0, 1))
    return 1e3 * (layers * layer + ends + 2 * (1 + sequences))


@pytest.mark.parametrize(
    ("prompts", "contexts"),
    [
        ([(20, 30)], []),
        ([(32, 64)], []),
        ([(100, 300)], []),  # beyond the measured prompts
        ([], [150] * 3),
        ([], [900] * 50),  # beyond the measured decodes
        ([(24, 10)], [120] * 5),
        ([(24, 10)], [120]),
    ],
)
def test_operators_add_up(tiny, prompts, contexts):
    table = load_table(tiny, layers=3, overhead_s=1e-3, wakeup_s=0.06)
    (chunk, history), context = (prompts or [(0, 0)])[0], (contexts or [0])[0]
    tokens, sequences = chunk + len(contexts), len(prompts) + len(contexts)
    expected = 1e6 + rest_ns(tokens, sequences) + 3e3 * attention_us(chunk, history, len(contexts), context)
    assert float(table.iteration_ns(shape(prompts, contexts))) == pytest.approx(expected, rel=1e-12)
    assert float(table.wakeup_ns) == 0.06e9


def test_small_chunks_and_contexts_cost_what_the_smallest_measured_do(tiny):
    table = load_table(tiny, layers=3)
    got = float(table.iteration_ns(shape([(2, 0)], [7] * 4)))
    assert got == pytest.approx(rest_ns(6, 5) + 3e3 * attention_us(16, 0, 4, 100), rel=1e-12)


def test_several_prompts_count_by_their_work(tiny):
    table = load_table(tiny, layers=3)
    # 16·(64 + 8) twice is 32·(56 + 16): one chunk of 32 after 56
    got = float(table.iteration_ns(shape([(16, 64), (16, 64)])))
    assert got == pytest.approx(rest_ns(32, 2) + 3e3 * attention_us(32, 56, 0, 0), rel=1e-12)


def test_unequal_contexts_lie_between_mean_and_longest(tmp_path):
    skew = ("0,few,low,short,none,0.5,3", "0,few,high,short,none,0.1,3", "16,few,low,short,none,0.5,3",
            "16,few,high,short,none,-4.0,3", "0,many,low,short,none,2.5,1")  # fmt: skip
    folder = write_profile(tmp_path / "tp1", skew=skew)
    table, profile = load_table(folder, layers=3), read_profile(folder)

    def expected(chunk, n, mean, longest, alpha):
        low, high = (attention_us(chunk, 0, n, context) for context in (mean, longest))
        return rest_ns(chunk + n, n + (chunk > 0)) + 3e3 * (low + alpha * (high - low))

    # shortest as a quarter of the mean: rate 90/(200 − 30) > 0.5, 90/(290 − 30) < 0.5
    assert float(table.iteration_ns(decode_batch(*map(np.float64, (4, 480, 200))))) == pytest.approx(
        expected(0, 4, 120, 200, 0.1), rel=1e-12
    )
    # no fit for long contexts: those of short ones; of 2.5: 1
    assert float(table.iteration_ns(decode_batch(*map(np.float64, (4, 480, 290))))) == pytest.approx(
        expected(0, 4, 120, 290, 0.5), rel=1e-12
    )
    assert float(table.iteration_ns(decode_batch(*map(np.float64, (8, 960, 290))))) == pytest.approx(
        expected(0, 8, 120, 290, 1.0), rel=1e-12
    )
    # with a prompt, between the middles 0.25 and 0.75 of the bins; −4 is 0
    batch = shape([(16, 0)], [30, 100, 150, 200])
    rate = 0.75 * 120 / (200 - 0.25 * 120)
    assert float(table.iteration_ns(batch)) == pytest.approx(
        expected(16, 4, 120, 200, 0.5 * (0.75 - rate) / 0.5), rel=1e-12
    )
    got = profile.attention_us([(16, 0)], [30, 100, 150, 200])  # the shortest is a quarter of the mean
    assert rest_ns(20, 5) + 3e3 * got == pytest.approx(float(table.iteration_ns(batch)), rel=1e-12)


def test_gaps_of_the_grid_are_filled(tmp_path):
    axes = itertools.product((0, 16, 24, 32), (0, 32, 64), (0, 1, 4, 8), (0, 100, 150, 200))
    rows = [p for p in axes if (p[0] or not p[1]) and bool(p[2]) == bool(p[3]) and (p[0] or p[2])]
    rows = [p for p in rows if not (p[0] == 24 and p[3] == 100) and not (p[0] and p[2] == 8)]
    rows = [p for p in rows if not (p[0] == 16 and p[1] == 32) and (p[3] != 150 or p[0] == 24)]
    table = load_table(write_profile(tmp_path / "tp1", rows=rows), layers=3)
    for chunk, history, decodes, context in ((24, 20, 8, 110), (18, 40, 6, 180), (32, 32, 8, 150)):
        got = float(table.iteration_ns(shape([(chunk, history)], [context] * decodes)))
        expected = rest_ns(chunk + decodes, 1 + decodes) + 3e3 * attention_us(
            chunk, history, decodes, context
        )
        assert got == pytest.approx(expected, rel=1e-12)


def test_a_group_of_gpus_pays_two_collectives_a_layer(tmp_path, tiny):
    alone = load_table(tiny, layers=3)
    group = load_table(
        write_profile(tmp_path / "tp2"), layers=3, hidden_size=100,
        collective_latency_s=2e-6, collective_bytes_per_s=1e9,
    )  # fmt: skip
    batch = shape([(20, 0)], [100] * 4)
    assert float(group.iteration_ns(batch) - alone.iteration_ns(batch)) == pytest.approx(
        3 * 2 * (2000 + 24 * 100 * 2)
    )


def test_meta_may_lie_above_and_the_folder_may_hold_the_degrees(tmp_path, tiny):
    model = tmp_path / "model"
    write_profile(model / "tp2")
    (model / "tp2" / "meta.yaml").rename(model / "meta.yaml")
    assert read_profile(model, tp=2).tensor_parallel == read_profile(model / "tp2").tensor_parallel == 2


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("dense.csv", "layer,tokens,time_us", "layer,token,time_us",
         "dense.csv, line 1: found layer,token,time_us, expected layer,tokens,time_us"),
        ("dense.csv", "qkv_proj,10,", "qkv_proj,ten,",
         'dense.csv, line 6, tokens: found "ten", expected an integer from 1'),
        ("dense.csv", "qkv_proj,10,21", "qkv_proj,10,-1",
         'dense.csv, line 6, time_us: found "-1", expected a number > 0'),
        ("dense.csv", "qkv_proj,10,21", "qkv_proj,10,nan", 'time_us: found "nan", expected a number'),
        ("dense.csv", "qkv_proj,10,21", "qkv_proj,10", "dense.csv, line 6: found 2 values, expected 3"),
        ("dense.csv", "qkv_proj,10,21", "qkv_proj,1,21", "line 6: found the same point as in line 5"),
        ("per_sequence.csv", "sampler", "sampling", "layer: found 1 rows of sampler, expected at least 2"),
        ("attention.csv", "0,0,1,100,", "0,5,1,100,", "kv_prefill: found 5, expected 0, as prefill_chunk"),
        ("attention.csv", "0,0,1,100,", "0,0,1,0,", "kv_decode: found 0, expected an integer from 1, as"),
        ("attention.csv", "0,0,1,100,", "0,0,1.5,100,", 'n_decode: found "1.5", expected an integer from 0'),
        ("skew_fit.csv", "few", "fewer", 'n_label: found "fewer", expected one of few, many (closest: few)'),
        ("meta.yaml", "architecture: llama", "architecture: lama",
         'architecture: found "lama", expected one of llama, qwen3, qwen3_moe (closest: llama)'),
        ("meta.yaml", "model: example/model", "model: 3", "model: found 3, expected a string"),
        ("meta.yaml", "[1, 2]", "[2]", "tp_degrees: found no 1, expected the degree"),
        ("meta.yaml", "alpha_default: 0.25", "alpha: 0.25", "alpha_default: found null, expected a number"),
        ("meta.yaml", "n_bins: [0, 4, 1000]", "n_bins: [0, 4]", "n_bins: found 2 edges, expected one more"),
        ("meta.yaml", "gpu: example", "gpu: [", "meta.yaml, line 6: found text that is not YAML"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(tiny, file, old, new, message):
    replace(tiny / file, old, new)
    with pytest.raises(InputError) as error:
        load_table(tiny, layers=3)
    assert message in str(error.value)
    assert str(tiny) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "file", ["dense.csv", "per_sequence.csv", "attention.csv", "skew_fit.csv", "meta.yaml"]
)
def test_a_missing_or_empty_file_is_named(tiny, file):
    (tiny / file).write_text("")
    with pytest.raises(InputError, match=file):
        load_table(tiny, layers=3)
    (tiny / file).unlink()
    with pytest.raises(InputError, match=f"{file}: found no such file"):
        load_table(tiny, layers=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "layers: found nothing, expected a number, as conf/model has no entry for example/model"),
        ({"layers": 0}, "layers: found 0, expected an integer from 1"),
        ({"layers": 3, "tp": 2}, "tp: found 2, expected 1"),
        (
            {"layers": 3, "overhead_s": -1.0},
            "overhead_s: found -1.0, expected a number of seconds from 0 to 1000",
        ),
        (
            {"layers": 3, "collective_bytes_per_s": 0},
            "collective_bytes_per_s: found 0, expected a number > 0",
        ),
        (
            {"layers": 3, "expert_parallel": 2},
            "expert_parallel: found 2, expected 1, as example/model has no",
        ),
    ],
)
def test_a_bad_argument_is_one_sentence(tiny, arguments, message):
    with pytest.raises(InputError) as error:
        load_table(tiny, **arguments)
    assert message in str(error.value)


def test_the_rest_of_a_model_without_the_rows_of_a_kernel(tmp_path):
    rows = [(0, 0, n, c) for n in (1, 8) for c in (100, 200)]
    with pytest.raises(InputError, match=r"found no row with prefill_chunk > 0, expected a sweep"):
        load_table(write_profile(tmp_path / "tp1", rows=rows), layers=3)


def test_build_from_configuration(tiny):
    config = {"profile": str(tiny), "layers": 3, "tp": None, "overhead_s": 1e-3}
    table = build_performance(config)
    assert isinstance(table, Table)
    assert float(table.overhead_ns) == 1e6
    with pytest.raises(InputError, match=r"performance.layer: found an unknown field, expected layers"):
        build_performance({"profile": str(tiny), "layer": 3})
    with pytest.raises(InputError, match=r"performance.profile: found 3, expected the path"):
        build_performance({"profile": 3})


@pytest.mark.parametrize(("n", "mean", "longest"), [(4, 101.25, 170.0), (4, 140.5, 199.0), (8, 50.0, 60.0)])
def test_leaps_are_exact(tiny, n, mean, longest):
    table = load_table(tiny, layers=3)
    for limit in (1.0, 7.0, 1e4):
        check_leap(table, n, mean, longest, limit)


def check_leap(table: Table, n: float, mean: float, longest: float, limit: float) -> int:
    batch = decode_batch(np.float64(n), np.float64(n * mean), np.float64(longest))
    straight, growth = (float(x) for x in table.leap(batch, np.float64(limit)))
    assert 1 <= straight <= limit
    assert straight == int(straight)
    first = float(table.iteration_ns(batch))
    for i in {1, int(straight) // 2, int(straight) - 1}:
        if i < straight:
            after = decode_batch(np.float64(n), np.float64(n * (mean + i)), np.float64(longest + i))
            assert float(table.iteration_ns(after)) == pytest.approx(first + i * growth, rel=1e-9)
    return int(straight)


# Measured profiles


@pytest.fixture(scope="module")
def llama() -> tuple[Profile, Table]:
    folder = PROFILES / "RTXPRO6000__Llama-3.1-8B__tp1"
    return read_profile(folder), load_table(folder)


def batches(rng: np.random.Generator, count: int):
    """Iterations as an engine forms them: up to 128 decodes of unequal contexts, with and without prompts."""
    for _ in range(count):
        decodes = int(rng.integers(0, 129))
        mean = rng.choice([400, 900, 4000])
        contexts = np.minimum(rng.lognormal(np.log(mean), 0.6, decodes), 16_384).astype(int) + 1
        prompts, budget = [], 2048 - decodes
        for n in rng.lognormal(5.5, 1.2, int(rng.choice([0, 1, 2, 3])) if decodes else 1):
            n = min(int(n) + 1, budget)
            budget -= n
            if n:
                prompts.append((n, int(rng.choice([0, 1024, 6000]))))
        yield prompts, [int(c) for c in contexts]


@measured
def test_every_measured_point_is_reproduced(llama):
    profile, table = llama
    with (profile.folder / "attention.csv").open() as file:
        rows = [[float(x) for x in row] for row in list(csv.reader(file))[1:]]
    for chunk, history, decodes, context, time_us in rows[::7]:
        assert profile.attention(chunk, history, decodes, context) == pytest.approx(time_us, rel=1e-12)
    assert table.attention_ns.shape == (20, 20, 10, 19)
    assert np.min(table.attention_ns) > 0


@measured
def test_the_in_engine_form_agrees_with_full_interpolation(llama):
    profile, table = llama
    duration = eqx.filter_jit(lambda model, batch: (model.iteration_ns(batch), model._rest_ns(batch)))
    errors, equal = [], []
    for prompts, contexts in batches(np.random.default_rng(0), 300):
        got, rest = (float(x) for x in duration(table, shape(prompts, contexts)))
        errors.append(abs(got / (rest + 32e3 * profile.attention_us(prompts, contexts)) - 1))
        if contexts:
            same = [contexts[0]] * len(contexts)
            got, rest = (float(x) for x in duration(table, shape(prompts, same)))
            equal.append(abs(got / (rest + 32e3 * profile.attention_us(prompts, same)) - 1))
    assert np.median(errors) <= 0.005
    assert np.percentile(errors, 90) <= 0.03
    assert np.max(equal) <= 1e-12  # all that is lost is the shortest context


@measured
@pytest.mark.parametrize(("n", "mean", "longest"), [(128, 1190.3, 3800), (8, 9000.0, 30_000), (1, 40.0, 40)])
def test_leaps_are_exact_and_long(llama, n, mean, longest):
    straight = check_leap(llama[1], n, mean, longest, 400.0)
    assert straight > 20


@measured
def test_lanes_may_have_different_tables(llama):
    tables = [llama[1], load_table(PROFILES / "RTX4090__Llama-3.1-8B__tp1")]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *aligned(tables))
    durations = eqx.filter_jit(jax.vmap(lambda table, batch: table.iteration_ns(batch), in_axes=(0, None)))
    leaps = eqx.filter_jit(jax.vmap(lambda table, batch: table.leap(batch, 300.0), in_axes=(0, None)))
    for prompts, contexts in batches(np.random.default_rng(1), 30):
        batch = shape(prompts, contexts)
        alone = [float(table.iteration_ns(batch)) for table in tables]
        assert durations(stacked, batch).tolist() == pytest.approx(alone, rel=1e-12)
        assert np.all(np.asarray(leaps(stacked, batch)[0]) >= 1)
    leaves = jax.tree.leaves(tables[0])
    assert all(leaf.dtype == np.float64 for leaf in leaves)


@measured
@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in PROFILES.glob("*/dense.csv")) if PROFILES.is_dir() else []
)
def test_every_profile_loads(folder):
    if folder.endswith("Instruct-2507__tp2"):
        with pytest.raises(InputError, match=r"moe.csv: found no such file"):
            load_table(PROFILES / folder)
        return
    table = load_table(PROFILES / folder)
    decode = float(table.iteration_s(shape([], [1000] * 64)))
    assert 0.003 < decode < 0.2
    assert float(table.iteration_s(shape([(2000, 0)], [1000] * 64))) > 1.5 * decode


@measured
def test_replicas_that_share_experts_read_half_of_them():
    folder = PROFILES / "RTXPRO6000__Qwen3-30B-A3B-Instruct-2507__tp1"
    alone, shared = load_table(folder), load_table(folder, expert_parallel=2, collective_latency_s=0.0)
    batch = shape([], [1000] * 64)
    assert 0.5 < float(shared.iteration_s(batch)) / float(alone.iteration_s(batch)) < 0.8


@measured
@pytest.mark.parametrize(
    ("run", "profile"),
    [
        ("RTXPRO6000__Llama-3.1-8B", "RTXPRO6000__Llama-3.1-8B__tp1"),
        ("RTXPRO6000__Qwen3-32B", "RTXPRO6000__Qwen3-32B__tp2"),
    ],
)
def test_iterations_of_a_saturated_engine_have_the_recorded_length(run, profile):
    with (RUNS / run / "requests.csv").open() as file:
        requests = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    prompt, output, first, last = (
        np.asarray([request[key] for request in requests])
        for key in ("input_tokens", "output_tokens", "first_token_s", "last_token_s")
    )
    done = np.sort(first)[127], np.sort(first)[-1]  # 128 calls run all the time, prompts come as others end
    begin, end = done[0] + 1.0, done[1]
    rate = (output - 1) / np.maximum(last - first, 1e-9)
    sampled = np.clip(np.minimum(end, last) - np.maximum(begin, first), 0, None) * rate
    new = (first > begin) & (first <= end)
    middle = 0.5 * (begin + end)
    running = (first <= middle) & (last > middle)
    contexts = (prompt + (middle - first) * rate)[running].astype(int).tolist()
    cached = 16 * np.asarray([request["shared_prefix_blocks"] for request in requests])
    chunk = int(np.mean((prompt - cached)[new]))
    table = load_table(PROFILES / profile, overhead_s=4e-4)
    iterations = float(sampled.sum()) / len(contexts)
    decode = float(table.iteration_s(shape([], contexts)))
    mixed = float(table.iteration_s(shape([(chunk, 0)], contexts)))
    predicted = (iterations - new.sum()) * decode + new.sum() * mixed
    assert predicted == pytest.approx(end - begin, rel=0.05)
