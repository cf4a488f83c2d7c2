"""The roofline model: iteration times and memory from a model's and a GPU's numbers alone. An estimate."""

from typing import Self

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from agentjax.errors import complaint
from agentjax.performance.base import AbstractPerformance, BatchShape, Number, nanoseconds
from agentjax.performance.hardware import Device
from agentjax.performance.model import ModelSpec

COMPUTE_EFFICIENCY = 0.7
"""Share of the peak rate that large matrix products reach: 0.6 to 0.8 is usual."""
ATTENTION_EFFICIENCY = 0.6
"""Share of the peak rate that attention over a prompt reaches: 0.4 to 0.7 is usual."""
MEMORY_EFFICIENCY = 0.9
"""Share of the memory bandwidth that reading weights and KV cache reaches."""
LINK_EFFICIENCY = 0.7
"""Share of the links' bandwidth that an all-reduce reaches: 0.61 to 0.75 on 2 to 8 H100 (times published by
Vidur)."""
OVERHEAD_S = 0.002
"""Host time between two iterations (s): about what a decode of Llama-3.1-8B on one H100 takes (7.1 ms, vLLM
0.11) beyond reading the weights."""

RESERVE_BYTES = 1.25 * 2**30
"""Memory of one GPU for what is neither weights, KV cache nor activations: contexts, graphs, communication
(bytes). Chosen between two published pools of vLLM 0.19, both met within 3 %: 7,173 blocks for Llama-3.1-70B
on two RTX PRO 6000, and 2,588 for Llama-3.1-8B on an RTX 4090."""

NO_WINDOW = 1e15
"""Window of a model without sliding layers (tokens): longer than any context."""


class Roofline(AbstractPerformance):
    """An estimate without measurement: each part of an iteration takes as long as its arithmetic at the GPU's
    peak rate or its traffic at the memory's bandwidth, whichever is longer, each divided by an efficiency.

    The parts, one after the other: matrices outside the experts, experts, output head, attention of prompts,
    attention of decodes; then all-reduces between the GPUs, and the overhead. `docs/performance.md` has the
    formulas. All of it is for one GPU of `tensor_parallel` equal ones; the `*_ns` leaves are at peak rates.
    """

    linear_token_ns: Number  # arithmetic of the matrices outside the experts, a token
    linear_weights_ns: Number  # reading them, once an iteration
    expert_token_ns: Number  # arithmetic of the experts that a token is routed to
    expert_weights_ns: Number  # reading one expert in all layers
    experts: Number  # of a layer, 1 if there are none
    experts_per_token: Number
    head_sequence_ns: Number  # arithmetic of the output head, a sequence
    head_weights_ns: Number
    prefill_pair_ns: Number  # arithmetic of a layer's attention, a query and a context token, in a prompt
    prefill_context_ns: Number  # one layer's expansion of a cached latent
    decode_pair_ns: Number
    kv_ns: Number  # reading one token of one layer's KV cache
    full_layers: Number
    sliding_layers: Number
    window_tokens: Number
    reduce_token_ns: Number  # bandwidth part of all all-reduces, a token
    reduce_ns: Number  # latency part of them, an iteration
    compute_efficiency: Number
    attention_efficiency: Number
    memory_efficiency: Number
    link_efficiency: Number
    overhead_ns: Number
    wakeup_ns: Number

    @classmethod
    def build(
        cls,
        model: ModelSpec,
        device: Device,
        tensor_parallel: int = 1,
        *,
        compute_efficiency: ArrayLike = COMPUTE_EFFICIENCY,
        attention_efficiency: ArrayLike = ATTENTION_EFFICIENCY,
        memory_efficiency: ArrayLike = MEMORY_EFFICIENCY,
        link_efficiency: ArrayLike = LINK_EFFICIENCY,
        overhead_s: ArrayLike = OVERHEAD_S,
        wakeup_s: ArrayLike = 0.0,
    ) -> Self:
        """The estimate for a model on GPUs of one kind.

        **Arguments:**

        - `model`, `device`: from `read_config` and `read_device`.
        - `tensor_parallel`: GPUs of one replica; divides the attention heads.
        - `compute_efficiency`, `attention_efficiency`, `memory_efficiency`, `link_efficiency`: shares of the
          peak rates, above 0 and at most 1; a number, or an array of one number per lane.
        - `overhead_s`: host time per iteration.
        - `wakeup_s`: per iteration that starts on an idle replica.

        Raises `InputError` for values that these cannot have.
        """
        gpus = check_tensor_parallel(model, tensor_parallel)
        per_second = 1e9 / device.memory_bytes_per_s  # ns per byte
        wide, narrow = 1e9 / device.flops_per_s(), 1e9 / device.flops_per_s(model.weights)  # ns per FLOP
        linear = model.sharded_parameters / gpus + model.replicated_parameters
        expert = model.expert_parameters / gpus
        table = model.embedding_parameters / gpus
        kv_share = max(1.0, model.kv_heads / gpus) / model.kv_heads
        reduces, hops = 2 * model.layers, 2 * (gpus - 1)
        activations = reduces * 2 * model.hidden
        return cls(
            linear_token_ns=_number(2 * linear * narrow),
            linear_weights_ns=_number(linear * model.linear_bytes_per_parameter * per_second),
            expert_token_ns=_number(2 * model.experts_per_token * expert * narrow),
            expert_weights_ns=_number(expert * model.expert_bytes_per_parameter * per_second),
            experts=_number(max(model.experts, 1)),
            experts_per_token=_number(max(model.experts_per_token, 1)),
            head_sequence_ns=_number(2 * table * wide),
            head_weights_ns=_number(2 * table * per_second),
            prefill_pair_ns=_number(model.prefill_pair_flops / gpus * wide),
            prefill_context_ns=_number(model.context_flops / gpus * wide),
            decode_pair_ns=_number(model.decode_pair_flops / gpus * wide),
            kv_ns=_number(model.kv_bytes_per_token_and_layer * kv_share * per_second),
            full_layers=_number(model.layers - model.sliding_layers),
            sliding_layers=_number(model.sliding_layers),
            window_tokens=_number(model.window if model.sliding_layers else NO_WINDOW),
            reduce_token_ns=_number(activations * hops / gpus * 1e9 / device.link_bytes_per_s),
            reduce_ns=_number(reduces * hops * device.link_latency_us * 1e3),
            compute_efficiency=_share("compute_efficiency", compute_efficiency),
            attention_efficiency=_share("attention_efficiency", attention_efficiency),
            memory_efficiency=_share("memory_efficiency", memory_efficiency),
            link_efficiency=_share("link_efficiency", link_efficiency),
            overhead_ns=nanoseconds("overhead_s", overhead_s),
            wakeup_ns=nanoseconds("wakeup_s", wakeup_s),
        )

    def iteration_ns(self, batch: BatchShape) -> Number:
        """Duration of an iteration (ns), not rounded: the sum of `parts_ns`."""
        return sum(self.parts_ns(batch).values(), start=self.overhead_ns)

    def parts_ns(self, batch: BatchShape) -> dict[str, Number]:
        """The parts of an iteration (ns) by name, without the overhead."""
        read = self.memory_efficiency
        missed = jnp.power(1.0 - self.experts_per_token / self.experts, batch.tokens)
        distinct = self.experts * (1.0 - missed)
        return {
            "linear": jnp.maximum(
                self.linear_token_ns * batch.tokens / self.compute_efficiency, self.linear_weights_ns / read
            ),
            "experts": jnp.maximum(
                self.expert_token_ns * batch.tokens / self.compute_efficiency,
                self.expert_weights_ns * distinct / read,
            ),
            "head": jnp.maximum(
                self.head_sequence_ns * batch.sequences / self.compute_efficiency, self.head_weights_ns / read
            ),
            "prefill_attention": self._prefill_attention_ns(batch),
            "decode_attention": self._context_ns() * self._decode_layers_tokens(batch),
            "all_reduce": self.reduce_token_ns * batch.tokens / self.link_efficiency + self.reduce_ns,
        }

    def leap(self, batch: BatchShape, iterations: Number) -> tuple[Number, Number]:
        """Up to where the mean context reaches the window of the sliding layers: the time bends only there.

        A decode's attention grows in proportion to its context, so the iterations are a line exactly, before
        the bend and after it.
        """
        left = self.window_tokens - batch.decode_context_tokens / jnp.maximum(batch.decode_sequences, 1.0)
        bends = (left > 0) & (self.sliding_layers > 0)
        straight = jnp.where(bends, jnp.minimum(iterations, 1.0 + jnp.floor(left)), iterations)
        growing = self.full_layers + jnp.where(bends, self.sliding_layers, 0.0)
        return straight, self._context_ns() * growing * batch.decode_sequences

    def _prefill_attention_ns(self, batch: BatchShape) -> Number:
        chunks = batch.sequences - batch.decode_sequences
        seen = batch.prefill_context_tokens + batch.prefill_tokens
        pairs = self.full_layers * batch.prefill_work_tokens2 + self.sliding_layers * jnp.minimum(
            batch.prefill_work_tokens2, batch.prefill_tokens * self.window_tokens
        )
        read = self.full_layers * seen + self.sliding_layers * jnp.minimum(
            seen, batch.prefill_tokens + chunks * self.window_tokens
        )
        layers = self.full_layers + self.sliding_layers
        expanding = self.prefill_context_ns * layers * batch.prefill_context_tokens / self.compute_efficiency
        return expanding + jnp.maximum(
            self.prefill_pair_ns * pairs / self.attention_efficiency,
            self.kv_ns * read / self.memory_efficiency,
        )

    def _decode_layers_tokens(self, batch: BatchShape) -> Number:
        """Context tokens of the decodes, summed over layers. A window cuts the mean context."""
        within = jnp.minimum(batch.decode_context_tokens, batch.decode_sequences * self.window_tokens)
        return self.full_layers * batch.decode_context_tokens + self.sliding_layers * within

    def _context_ns(self) -> Number:
        """A decode's attention over one token of context in one layer."""
        return jnp.maximum(
            self.decode_pair_ns / self.attention_efficiency, self.kv_ns / self.memory_efficiency
        )


def activation_bytes(model: ModelSpec, tensor_parallel: int, max_num_batched_tokens: int) -> float:
    """Most activations of one GPU at one time (bytes), an estimate: the residual stream, an MLP's input and
    its three intermediate results, in bfloat16."""
    return 2.0 * max_num_batched_tokens * (2 * model.hidden + 3 * model.mlp_width / tensor_parallel)


def kv_blocks(
    model: ModelSpec,
    device: Device,
    tensor_parallel: int = 1,
    block_size: int = 16,
    *,
    gpu_memory_utilization: float = 0.9,
    reserve_bytes: float | None = None,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 128,
) -> int:
    """Usable KV blocks of one replica, an estimate: what weights and reserve leave of the memory.

    A block holds `block_size` tokens of all layers, or of the layers without sliding window if there are
    both: the windows of `max_num_seqs` sequences are then taken off the pool first. One block is left out, as
    vLLM keeps one empty.

    **Arguments:**

    - `model`, `device`, `tensor_parallel`: as for `Roofline.build`.
    - `block_size`: tokens a block.
    - `gpu_memory_utilization`: share of the memory that the engine may use.
    - `reserve_bytes`: of one GPU, for all but weights and KV cache; None: `RESERVE_BYTES` and
      `activation_bytes`.
    - `max_num_batched_tokens`, `max_num_seqs`: limits of the engine, for the reserve and the windows.

    Raises `InputError` if the weights do not fit.
    """
    gpus = check_tensor_parallel(model, tensor_parallel)
    if not 0 < gpu_memory_utilization <= 1:
        raise complaint(
            "gpu_memory_utilization", repr(gpu_memory_utilization), "a number above 0 and up to 1"
        )
    if reserve_bytes is None:
        reserve_bytes = RESERVE_BYTES + activation_bytes(model, gpus, max_num_batched_tokens)
    copies = model.replicated_parameters * model.linear_bytes_per_parameter * (gpus - 1) / gpus
    weights = model.weight_bytes / gpus + copies
    layer_token = model.kv_bytes_per_token_and_layer * max(1.0, model.kv_heads / gpus) / model.kv_heads
    full = model.layers - model.sliding_layers
    windows = model.sliding_layers * model.window * max_num_seqs * layer_token if full else 0.0
    pool = device.memory_bytes * gpu_memory_utilization - weights - reserve_bytes - windows
    blocks = int(pool // ((full or model.layers) * layer_token * block_size)) - 1
    if blocks < 1:
        raise complaint(
            "cluster.kv_blocks",
            f"no memory for KV blocks: {gpus} x {device.name} at {gpu_memory_utilization:g} of"
            f" {device.memory_bytes / 1e9:.1f} GB with {weights / 1e9:.1f} GB of weights each",
            "more or larger GPUs, or smaller weights",
        )
    return blocks


def check_tensor_parallel(model: ModelSpec, tensor_parallel: int) -> int:
    """The number of GPUs, if the model can be split over so many.

    Raises `InputError` otherwise.
    """
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int) or tensor_parallel < 1:
        raise complaint("tensor_parallel", repr(tensor_parallel), "an integer from 1")
    if model.heads % tensor_parallel:
        raise complaint(
            "tensor_parallel", str(tensor_parallel), f"a divisor of {model.heads}, the heads of {model.name}"
        )
    return tensor_parallel


def _number(value: float) -> np.ndarray:
    return np.asarray(value, dtype=np.float64)


def _share(name: str, value: ArrayLike) -> np.ndarray:
    try:
        share = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise complaint(name, repr(value), "a number above 0 and up to 1") from None
    if not np.all((share > 0) & (share <= 1)):
        raise complaint(name, str(value), "a number above 0 and up to 1")
    return share
