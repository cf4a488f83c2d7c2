"""Language models by their numbers: parameters, bytes and FLOPs, from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentjax.errors import among, complaint, shown
from agentjax.performance.catalogue import read_entry

WEIGHT_FORMATS = ("bf16", "fp8", "mxfp4")
KV_FORMATS = {"bf16": 2, "fp8": 1}
"""Formats of the KV cache, and bytes a value."""

MXFP4_BYTES = 0.5 + 1 / 32
"""Bytes a weight: 4 bits, and an 8-bit scale for each block of 32."""

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "gpt_oss",
)
"""Values of `model_type` that `read_config` knows."""
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""Those of them with multi-head latent attention."""
MOST, MOST_LAYERS = 10**9, 10_000
"""The largest numbers of a configuration: far beyond any model, and within reach of every sum."""


@dataclass(frozen=True)
class ModelSpec:
    """What durations and memory need to know of a decoder-only transformer. Parameters are those of all
    layers.

    Args:
        name: for messages and tables.
        layers: attention layers.
        sliding_layers: those of them that see only the last `window` tokens.
        window: tokens, 0 without sliding layers.
        hidden: width of the residual stream.
        vocabulary: rows of the output head.
        heads: query heads of a layer.
        kv_heads: heads of the KV cache, over which it can be split; 1 where all heads share a latent (MLA).
        kv_values: values that a token leaves in the KV cache of a layer.
        prefill_pair_flops: attention of one layer per pair of query and context token, in a prompt.
        decode_pair_flops: the same for a decoded token; more than in a prompt under MLA, which then works on
            latents.
        context_flops: of one layer per cached token that a prompt chunk sees; only under MLA, which expands
            the cached latents again.
        sharded_parameters: matrices that tensor parallelism splits: attention, dense and shared MLPs.
        replicated_parameters: matrices that every GPU holds: routers, down-projections of MLA.
        expert_parameters: one routed expert, in all layers that have experts.
        experts: routed experts a layer, 0 without.
        experts_per_token: of which a token uses so many.
        vector_parameters: norms and biases; all of them count as active.
        mlp_width: intermediate values of one token in the widest MLP, over all experts that it uses.
        tied: the output head is the embedding table.
        weights: format, one of `WEIGHT_FORMATS`.
        kv_format: format of the KV cache, one of `KV_FORMATS`.
        max_model_len: longest context (tokens), 0 where it is not stated.
    """

    name: str
    layers: int
    sliding_layers: int
    window: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    kv_values: int
    prefill_pair_flops: int
    decode_pair_flops: int
    context_flops: int
    sharded_parameters: int
    replicated_parameters: int
    expert_parameters: int
    experts: int
    experts_per_token: int
    vector_parameters: int
    mlp_width: int
    tied: bool
    weights: str
    kv_format: str
    max_model_len: int

    @property
    def embedding_parameters(self) -> int:
        """One of the two tables of the vocabulary: the embedding, or the output head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        tables = self.embedding_parameters * (1 if self.tied else 2)
        fixed = self.sharded_parameters + self.replicated_parameters + self.vector_parameters
        return tables + fixed + self.experts * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but the embedding table and the experts it is not routed to."""
        fixed = self.sharded_parameters + self.replicated_parameters + self.vector_parameters
        return self.embedding_parameters + fixed + self.experts_per_token * self.expert_parameters

    @property
    def linear_bytes_per_parameter(self) -> float:
        """Bytes of a weight of the matrices outside the experts."""
        return 1.0 if self.weights == "fp8" else 2.0

    @property
    def expert_bytes_per_parameter(self) -> float:
        """Bytes of a weight of the experts."""
        return {"bf16": 2.0, "fp8": 1.0, "mxfp4": MXFP4_BYTES}[self.weights]

    @property
    def weight_bytes(self) -> float:
        """All weights (bytes). fp8 leaves the vocabulary tables in bfloat16, mxfp4 all but the experts."""
        wide = self.embedding_parameters * (1 if self.tied else 2) + self.vector_parameters
        linear = self.sharded_parameters + self.replicated_parameters
        experts = self.experts * self.expert_parameters
        return (
            2.0 * wide + linear * self.linear_bytes_per_parameter + experts * self.expert_bytes_per_parameter
        )

    @property
    def kv_bytes_per_token_and_layer(self) -> int:
        """KV cache of one token in one layer (bytes)."""
        return self.kv_values * KV_FORMATS[self.kv_format]

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token in all layers (bytes)."""
        return self.layers * self.kv_bytes_per_token_and_layer

    def kv_bytes(self, context_tokens: int) -> int:
        """KV cache that a context needs (bytes): sliding layers need their window only."""
        full = (self.layers - self.sliding_layers) * context_tokens
        sliding = self.sliding_layers * min(context_tokens, self.window)
        return (full + sliding) * self.kv_bytes_per_token_and_layer

    @property
    def flops_per_token(self) -> int:
        """Matrix products of one token in all layers, without attention over the context and output head."""
        active = self.experts_per_token * self.expert_parameters
        return 2 * (self.sharded_parameters + self.replicated_parameters + active)

    @property
    def head_flops(self) -> int:
        """The output head for one sequence."""
        return 2 * self.embedding_parameters

    def attention_flops(self, context_tokens: int) -> int:
        """Attention of one decoded token over its context, in all layers."""
        full = (self.layers - self.sliding_layers) * context_tokens
        sliding = self.sliding_layers * min(context_tokens, self.window)
        return (full + sliding) * self.decode_pair_flops

    def with_formats(self, weights: str | None = None, kv: str | None = None) -> "ModelSpec":
        """The model with its weights or KV cache in another format; None leaves one as it is.

        Raises `InputError` for an unknown format, or mxfp4 for a model without experts.
        """
        if weights is not None:
            if weights not in WEIGHT_FORMATS:
                raise complaint("weights", shown(weights), among(weights, WEIGHT_FORMATS))
            if weights == "mxfp4" and not self.experts:
                raise complaint("weights", "mxfp4 for a model without experts", "bf16 or fp8")
        if kv is not None and kv not in KV_FORMATS:
            raise complaint("kv_format", shown(kv), among(kv, KV_FORMATS))
        return replace(self, weights=weights or self.weights, kv_format=kv or self.kv_format)


def read_config(path: str | Path, *, weights: str | None = None, kv_format: str | None = None) -> ModelSpec:
    """The numbers of a model from its `config.json`, or from an entry of the catalogue.

    **Arguments:**

    - `path`: a Hugging Face `config.json`, a YAML file with the same fields, or a name of the catalogue such
        as `llama_3_1_70b`.
    - `weights`: `bf16`, `fp8` or `mxfp4` instead of what the file states; float16 counts as `bf16`.
    - `kv_format`: `bf16` or `fp8`; `bf16` if it is not given.

    Raises `InputError` for an architecture that is not among `ARCHITECTURES`, and for fields that are missing
    or have values that are not supported.
    """
    where, content = read_entry("model", path)
    model = parse_config(content, where, explicit_weights=weights is not None)
    return model.with_formats(weights, kv_format)


def parse_config(content: Mapping[str, Any], where: str, explicit_weights: bool = False) -> ModelSpec:
    """The numbers of a model from the fields of its configuration.

    **Arguments:**

    - `content`: the fields.
    - `where`: the file they are from, for messages.
    - `explicit_weights`: the format of the weights is given elsewhere, so that the stated one is not read.

    Raises `InputError` as `read_config`.
    """
    fields = _Fields(content, where)
    architecture = content.get("model_type")
    if architecture is None and "text_config" in content:
        raise complaint(
            f"{where}, text_config", "a model of several parts", "the fields of its language model"
        )
    if architecture not in ARCHITECTURES:
        found = "nothing" if architecture is None else shown(architecture)
        raise complaint(f"{where}, model_type", found, among(architecture, ARCHITECTURES))
    layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    sliding_layers, window = _sliding(fields, architecture, layers)
    attention = _latent(fields) if architecture in LATENT else _grouped(fields)
    mlp = _mlp(fields, architecture, layers)
    hidden = fields.count("hidden_size")
    weights = "bf16" if explicit_weights else _weights(fields, mlp.experts)
    return ModelSpec(
        name=Path(where).parent.name if Path(where).stem == "config" else Path(where).stem,
        layers=layers,
        sliding_layers=sliding_layers,
        window=window,
        hidden=hidden,
        vocabulary=fields.count("vocab_size"),
        heads=fields.count("num_attention_heads"),
        kv_heads=attention.kv_heads,
        kv_values=attention.kv_values,
        prefill_pair_flops=attention.prefill_pair_flops,
        decode_pair_flops=attention.decode_pair_flops,
        context_flops=attention.context_flops,
        sharded_parameters=layers * attention.sharded + mlp.sharded,
        replicated_parameters=layers * attention.replicated + mlp.replicated,
        expert_parameters=mlp.expert,
        experts=mlp.experts,
        experts_per_token=mlp.experts_per_token,
        vector_parameters=layers * (attention.vectors + 2 * hidden) + hidden + mlp.vectors,
        mlp_width=mlp.width,
        tied=fields.flag("tie_word_embeddings", False),
        weights=weights,
        kv_format="bf16",
        max_model_len=fields.count("max_position_embeddings", 0),
    )


@dataclass(frozen=True)
class _Attention:
    """Attention of one layer."""

    kv_heads: int
    kv_values: int
    prefill_pair_flops: int
    decode_pair_flops: int
    context_flops: int
    sharded: int
    replicated: int
    vectors: int


@dataclass(frozen=True)
class _Mlp:
    """The MLPs of all layers."""

    sharded: int
    replicated: int
    expert: int
    experts: int
    experts_per_token: int
    vectors: int
    width: int


class _Fields:
    """Typed access to the fields of a configuration."""

    def __init__(self, content: Mapping[str, Any], where: str):
        self.content, self.where = content, where

    def __contains__(self, name: str) -> bool:
        return self.content.get(name) is not None

    def wrong(self, name: str, expected: str, found: str | None = None) -> Exception:
        value = self.content.get(name)
        return complaint(
            f"{self.where}, {name}", found or ("nothing" if value is None else shown(value)), expected
        )

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        value = self.content.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value


def _grouped(fields: _Fields) -> _Attention:
    """Attention whose query heads share KV heads in groups."""
    architecture = fields.content["model_type"]
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if "head_dim" not in fields and hidden % heads:
        raise fields.wrong("head_dim", f"this field, as {heads} heads do not divide {hidden}")
    size = fields.count("head_dim", hidden // heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of the {heads} heads")
    queries, keys = heads * size, kv_heads * size
    biases = 0
    if architecture == "qwen2":
        biases = queries + 2 * keys
    elif fields.flag("attention_bias", architecture == "gpt_oss"):
        biases = queries + 2 * keys + hidden
    norms = 2 * size if architecture in ("qwen3", "qwen3_moe") else 0
    sinks = heads if architecture == "gpt_oss" else 0
    pair = 4 * queries  # a multiplication and an addition, for scores and for values
    return _Attention(
        kv_heads=kv_heads,
        kv_values=2 * keys,
        prefill_pair_flops=pair,
        decode_pair_flops=pair,
        context_flops=0,
        sharded=2 * hidden * (queries + keys),
        replicated=0,
        vectors=biases + norms + sinks,
    )


def _latent(fields: _Fields) -> _Attention:
    """Multi-head latent attention (MLA): a latent and one rotary key a token are cached for all heads."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    latent, rotary = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    plain, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    query = plain + rotary
    rank = fields.count("q_lora_rank", 0)
    down = hidden * (rank + latent + rotary)
    up = (rank or hidden) * heads * query + latent * heads * (plain + value)
    return _Attention(
        kv_heads=1,
        kv_values=latent + rotary,
        prefill_pair_flops=2 * heads * (query + value),
        decode_pair_flops=2 * heads * (latent + rotary + latent),
        context_flops=2 * latent * heads * (plain + value),
        sharded=up + heads * value * hidden,
        replicated=down,
        vectors=rank + latent,
    )


def _mlp(fields: _Fields, architecture: str, layers: int) -> _Mlp:
    """Gated MLPs, dense or of experts; three matrices each."""
    hidden = fields.count("hidden_size")
    if architecture in ("llama", "mistral", "qwen2", "qwen3"):
        width = fields.count("intermediate_size")
        biases = layers * (2 * width + hidden) if fields.flag("mlp_bias", False) else 0
        return _Mlp(layers * 3 * hidden * width, 0, 0, 0, 0, biases, width)
    shared, gate_bias, expert_bias = 0, 0, 0  # shared experts of a layer; biases of a layer
    if architecture in ("mixtral", "gpt_oss"):
        experts, width = fields.count("num_local_experts"), fields.count("intermediate_size")
        sparse = layers
        if architecture == "gpt_oss":
            gate_bias, expert_bias = experts, experts * (2 * width + hidden)
    elif architecture == "qwen3_moe":
        experts, width = fields.count("num_experts"), fields.count("moe_intermediate_size")
        step, dense = fields.count("decoder_sparse_step", 1), fields.content.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise fields.wrong("mlp_only_layers", "a list of layers")
        sparse = sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    else:
        experts, width = fields.count("n_routed_experts"), fields.count("moe_intermediate_size")
        first, every = fields.count("first_k_dense_replace", 0, least=0), fields.count("moe_layer_freq", 1)
        sparse = sum(layer >= first and layer % every == 0 for layer in range(layers))
        shared = fields.count("n_shared_experts", 0, least=0)
        gate_bias = experts if architecture != "deepseek_v2" else 0
    routed = fields.count("num_experts_per_tok")
    if routed > experts:
        raise fields.wrong("num_experts_per_tok", f"at most the {experts} experts")
    dense_layers = layers - sparse
    dense_width = fields.count("intermediate_size") if dense_layers else 0
    return _Mlp(
        sharded=3 * hidden * (dense_layers * dense_width + sparse * shared * width),
        replicated=sparse * hidden * experts,
        expert=sparse * 3 * hidden * width,
        experts=experts,
        experts_per_token=routed,
        vectors=sparse * (gate_bias + expert_bias),
        width=max(dense_width, (routed + shared) * width if sparse else 0),
    )


def _sliding(fields: _Fields, architecture: str, layers: int) -> tuple[int, int]:
    """Number of layers with a sliding window, and the window."""
    kinds = fields.content.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise fields.wrong("layer_types", f"a list of {layers} entries")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise fields.wrong("layer_types", "full_attention or sliding_attention", shown(kind))
        sliding = kinds.count("sliding_attention")
    elif architecture in ("mistral", "mixtral"):
        sliding = layers if "sliding_window" in fields else 0
    elif architecture in ("qwen2", "qwen3", "qwen3_moe"):
        used = fields.flag("use_sliding_window", False) and "sliding_window" in fields
        sliding = max(0, layers - fields.count("max_window_layers", layers, least=0)) if used else 0
    else:
        sliding = (layers + 1) // 2 if architecture == "gpt_oss" else 0
    return sliding, fields.count("sliding_window") if sliding else 0


def _weights(fields: _Fields, experts: int) -> str:
    """Format of the weights as the file states it."""
    stated = fields.content.get("quantization_config")
    if stated is None:
        return "bf16"
    method = stated.get("quant_method") if isinstance(stated, Mapping) else stated
    if method not in ("fp8", "mxfp4") or (method == "mxfp4" and not experts):
        raise fields.wrong(
            "quantization_config.quant_method", "fp8 or mxfp4, or a format given as weights", shown(method)
        )
    return method
