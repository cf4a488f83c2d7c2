"""GPUs and models of the catalogue, and any `config.json`: counted by hand, and against published counts."""

import json

import pytest

from agentjax.errors import InputError
from agentjax.performance import read_config, read_device
from agentjax.performance.catalogue import available, folder
from tests.toy_model import TOY

LATENT = {
    **{key: TOY[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")},
    "model_type": "deepseek_v3",
    "intermediate_size": 8,
    "moe_intermediate_size": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 5,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}


def written(folder, **changes):
    """A `config.json` with changed fields; those set to ... are left out."""
    fields = {**TOY, **changes}
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))
    return path


# Published counts: the model cards, and README_WEIGHTS.md of DeepSeek-V3 (671B, 36.6B active). The active
# counts of Mixtral and Qwen include the embedding table; those of gpt-oss and DeepSeek do not.
@pytest.mark.parametrize(
    ("name", "total", "active", "with_embedding", "weights_gb"),
    [
        ("llama_3_1_8b", 8.03, 8.03, True, 16.06),
        ("llama_3_1_70b", 70.6, 70.6, True, 141.1),
        ("llama_3_1_405b", 405.9, 405.9, True, 811.7),
        ("qwen3_8b", 8.2, 8.2, True, 16.4),
        ("qwen3_32b", 32.8, 32.8, True, 65.5),
        ("qwen3_30b_a3b", 30.532122624, 3.3, True, 61.1),
        ("qwen3_235b_a22b", 235, 22, True, 470.2),
        ("mixtral_8x7b", 46.7, 12.9, True, 93.4),
        ("deepseek_v3", 671, 36.6, False, 673),  # fp8: 671 bytes for all, 1.9 more for the two tables
        ("gpt_oss_20b", 20.9, 3.6, False, 13.8),  # checkpoint of 12.8 GiB
        ("gpt_oss_120b", 116.8, 5.1, False, 65.2),  # checkpoint of 60.8 GiB
    ],
)
def test_published_parameter_counts(name, total, active, with_embedding, weights_gb):
    model = read_config(name)
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.005)
    used = model.active_parameters + with_embedding * model.embedding_parameters
    assert used / 1e9 == pytest.approx(active, rel=0.02)
    assert model.weight_bytes / 1e9 == pytest.approx(weights_gb, rel=0.005)
    assert model.name == name


def test_every_model_of_the_catalogue_is_tested():
    assert len(available("model")) == 11


def test_llama_8b_counted_by_hand():
    model = read_config("llama_3_1_8b")
    # attention of a layer: query and output 4096·4096 each, key and value 4096·1024 each: 41,943,040
    # MLP: 3·4096·14336 = 176,160,768; 32 layers of both: 6,979,321,856
    assert model.sharded_parameters == 32 * (41_943_040 + 176_160_768) == 6_979_321_856
    # norms: 2·4096 a layer and 4096 at the end; two tables of 128256·4096 = 525,336,576
    assert model.parameters == 6_979_321_856 + 65 * 4096 + 2 * 525_336_576 == 8_030_261_248
    assert model.weight_bytes == 2 * 8_030_261_248
    # KV of a token: key and value of 8 heads of 128 values of 2 bytes in 32 layers
    assert model.kv_bytes_per_token == 2 * 8 * 128 * 2 * 32 == 131_072
    assert model.flops_per_token == 2 * 6_979_321_856
    # scores and values: 2 FLOPs each per pair and value of the 32·128 of all query heads, in 32 layers
    assert model.attention_flops(1000) == 32 * 4 * 4096 * 1000
    assert model.head_flops == 2 * 525_336_576


def test_latent_attention_and_shared_experts_by_hand(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LATENT))
    model = read_config(path)
    # down: 4·5 (queries) + 4·(6 + 2) (latent and rotary key) = 52; router of the one sparse layer: 4·6 = 24
    assert model.replicated_parameters == 2 * 52 + 24
    # up: queries 5·2·(3 + 2) = 50, keys and values 6·2·(3 + 4) = 84, output 2·4·4 = 32: 166 a layer
    # dense MLP of layer 0: 3·4·8 = 96; shared expert of layer 1: 3·4·3 = 36
    assert model.sharded_parameters == 2 * 166 + 96 + 36
    assert (model.expert_parameters, model.experts, model.experts_per_token) == (36, 6, 2)
    # norms: 2·4 a layer, 5 + 6 for the two latents, 4 at the end; 6 biases of the router; tables of 40
    assert model.parameters == 2 * 40 + (2 * 52 + 24) + (2 * 166 + 96 + 36) + 6 * 36 + 2 * (8 + 11) + 4 + 6
    # cached: 6 + 2 values of 2 bytes in 2 layers, once for all heads
    assert (model.kv_bytes_per_token, model.kv_heads) == (2 * 8 * 2, 1)
    # in a prompt scores of 3 + 2 and values of 4, in a decode 6 + 2 and 6 on the latent; 2 heads, 2 FLOPs
    assert (model.prefill_pair_flops, model.decode_pair_flops) == (2 * 2 * 9, 2 * 2 * 14)
    assert model.context_flops == 2 * 84
    assert model.mlp_width == max(8, (2 + 1) * 3)


def test_sliding_windows_bound_the_cache_and_the_attention():
    model = read_config("gpt_oss_20b")
    # a layer: 2·8·64 values of 2 bytes = 2048; 12 layers see all of 4096 tokens, 12 see 128
    assert (model.layers, model.sliding_layers, model.window) == (24, 12, 128)
    assert model.kv_bytes(100) == 24 * 2048 * 100
    assert model.kv_bytes(4096) == 12 * 2048 * (4096 + 128)
    assert model.attention_flops(4096) == 12 * 4 * 64 * 64 * (4096 + 128)
    assert read_config("gpt_oss_20b", kv_format="fp8").kv_bytes(100) == 24 * 1024 * 100


def test_deepseek_caches_a_latent():
    assert read_config("deepseek_v3").kv_bytes_per_token == (512 + 64) * 2 * 61 == 70_272


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 2),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, 1),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, 1),
        ({"sliding_window": 4096}, 0),
    ],
)
def test_which_layers_slide(tmp_path, fields, layers):
    assert read_config(written(tmp_path, **fields)).sliding_layers == layers


def test_formats_given_explicitly(tmp_path):
    # 2·(48 + 96) = 288 weights in matrices, 20 in norms, two tables of 40
    path = written(tmp_path)
    assert read_config(path).weight_bytes == 2 * (288 + 20 + 80)
    assert read_config(path, weights="fp8").weight_bytes == 288 + 2 * (20 + 80)
    assert read_config(written(tmp_path, tie_word_embeddings=True)).weight_bytes == 2 * (288 + 20 + 40)
    mixtral = read_config("mixtral_8x7b", weights="mxfp4")
    # 8 experts of 3·4096·14336 in 32 layers, 4.25 bits a weight
    experts = 32 * 8 * 3 * 4096 * 14336
    assert mixtral.weight_bytes == pytest.approx(experts * 4.25 / 8 + 2 * (mixtral.parameters - experts))
    quantized = written(tmp_path, quantization_config={"quant_method": "awq"})
    assert read_config(quantized, weights="bf16").weights == "bf16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ...}, "model_type: found nothing, expected one of llama"),
        ({"model_type": "mamba"}, 'model_type: found "mamba", expected one of'),
        ({"model_type": ..., "text_config": {}}, "text_config: found a model of several parts"),
        ({"hidden_size": ...}, "hidden_size: found nothing, expected an integer from 1"),
        (
            {"num_hidden_layers": 10**30},
            "num_hidden_layers: found 1000000000000000000000000000000, expected an",
        ),
        ({"vocab_size": "many"}, 'vocab_size: found "many", expected an integer from 1'),
        ({"num_attention_heads": 3}, "head_dim: found nothing, expected this field"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads: found 3, expected a divisor",
        ),
        ({"attention_bias": 1}, "attention_bias: found 1, expected true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types: found a list, expected a list of 2 entries"),
        ({"layer_types": ["full_attention", "conv"]}, 'layer_types: found "conv", expected full_attention'),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window: found -1"),
        ({"model_type": "mixtral"}, "num_local_experts: found nothing"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok: found 3, expected at most the 2 experts",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            'quant_method: found "awq", expected fp8 or mxfp4',
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, 'quant_method: found "mxfp4"'),
    ],
)
def test_an_unusable_config_is_one_sentence(tmp_path, changes, message):
    with pytest.raises(InputError) as error:
        read_config(written(tmp_path, **changes))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}, ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama_3_1_8",), r"^model: found 'llama_3_1_8', expected .* \(closest: llama_3_1_8b\)"),
        (("nowhere/config.json",), r"^nowhere/config\.json: found no such file"),
        (("llama_3_1_8b", "int4"), r'^weights: found "int4", expected one of bf16, fp8, mxfp4'),
        (("llama_3_1_8b", "mxfp4"), r"^weights: found mxfp4 for a model without experts"),
        (("llama_3_1_8b", None, "fp4"), r'^kv_format: found "fp4", expected one of bf16, fp8'),
    ],
)
def test_unknown_names_and_formats(arguments, message):
    name, *formats = arguments
    with pytest.raises(InputError, match=message):
        read_config(name, **dict(zip(("weights", "kv_format"), formats, strict=False)))


def test_files_that_hold_no_fields(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{\n"hidden_size": ,\n}')
    with pytest.raises(InputError, match=r"config\.json, line 2: found text that is not JSON"):
        read_config(path)
    path.write_text("[]")
    with pytest.raises(InputError, match=r"found no fields, expected an object"):
        read_config(path)
    path = tmp_path / "gpu.yaml"
    path.write_text("name: [")
    with pytest.raises(InputError, match=r"gpu\.yaml, line 1: found text that is not YAML"):
        read_device(path)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match="bytes that are not UTF-8"):
        read_device(path)


@pytest.mark.parametrize("name", available("hardware"))
def test_gpus_are_complete_and_plausible(name):
    device = read_device(name)
    text = (folder("hardware") / f"{name}.yaml").read_text()
    assert "Source: " in text.splitlines()[0]
    assert "assumption" in text
    assert "default to override" in text
    assert device.fp8_tflops is None or device.fp8_tflops == pytest.approx(2 * device.bf16_tflops, rel=0.02)
    assert device.idle_w < 0.25 * device.tdp_w
    assert device.price_date
    assert 100 < device.flops_per_s() / device.memory_bytes_per_s < 450  # FLOPs per byte at the ridge


def test_gpus_in_base_units():
    device = read_device("h100_sxm")
    assert device.flops_per_s() == 989.4e12
    assert device.flops_per_s("fp8") == 1978.9e12
    assert device.flops_per_s("mxfp4") == 989.4e12
    assert device.memory_bytes_per_s == 3.35e12
    assert device.link_bytes_per_s == 450e9
    assert device.memory_bytes == 81_559 * 1_048_576
    assert read_device("a100_80gb").flops_per_s("fp8") == 312e12  # no units for fp8
    assert len(available("hardware")) == 10


def test_a_bad_gpu_is_one_sentence(tmp_path):
    path = tmp_path / "mine.yaml"
    good = read_device("l40s").model_dump()
    for change, message in (
        ({"tdp": 300}, "tdp: found an unknown field, expected tdp_w"),
        ({"memory_gb_s": -1}, "memory_gb_s: found -1, expected a number > 0"),
        ({"price_date": "today"}, 'price_date: found "today", expected a date as YYYY-MM-DD'),
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(InputError) as error:
            read_device(path)
        assert f"mine.yaml, {message}" in str(error.value)
    path.write_text(json.dumps(good))
    assert read_device(path) == read_device("l40s")
