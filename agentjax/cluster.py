"""The cluster: replicas of one model, their limits, and how long an iteration takes."""

from dataclasses import dataclass, field

from agentjax.errors import among, complaint
from agentjax.performance import AbstractPerformance, Device, load

LIMITS = (
    "replicas",
    "kv_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "slots",
    "vllm",
    "async_scheduling",
    "reserve_full_isl",
    "watermark",
    "long_prefill_token_threshold",
)
"""Fields of a cluster that, with its performance model, decide what happens in it."""

COUNTS = {
    "replicas": 4096,
    "kv_blocks": 2**30,
    "block_size": 2**20,
    "max_num_seqs": 2**20,
    "max_num_batched_tokens": 2**30,
    "max_model_len": 2**30,
    "gpus": 2**20,
}
"""The largest value of each limit that is a count: blocks and tokens are 32-bit integers in the engine."""

VERSIONS = ("0.19", "0.24", "0.33")
"""vLLM's versions that decide differently: each stands for those up to the next."""


@dataclass(frozen=True)
class Cluster:
    """`replicas` equal engines; the names and defaults of the limits are vLLM's.

    Args:
        replicas: engines, each with its own KV pool and clock.
        kv_blocks: usable KV blocks of one replica (vLLM's `num_gpu_blocks` less one).
        block_size: tokens a block.
        max_num_seqs: most running calls of a replica.
        max_num_batched_tokens: token budget of an iteration.
        max_model_len: longest context (tokens).
        vllm: whose rules: "0.19" (to 0.23), "0.24" (to 0.32: freed blocks without content are taken first) or
            "0.33" (and in priority order the rest of the batch goes on when a call preempts itself).
        async_scheduling: the next iteration is formed while one runs, as vLLM does by default; None: so, but
            not with slots.
        reserve_full_isl: a waiting call is admitted only if its whole prompt fits
            (`scheduler_reserve_full_isl`); otherwise its first chunk is enough.
        watermark: share of the blocks that admission leaves free while any call runs.
        long_prefill_token_threshold: most tokens of a prompt in one iteration; 0: no such limit.
        slots: contexts stay in `max_num_seqs` slots of equal size, as in llama.cpp's server, and not in a
            pool of blocks; `block_size` is then 1 and `kv_blocks` the tokens of all slots (its `n_ctx`).
        performance: iteration times; default: Llama-3.1-70B on two RTX PRO 6000.
        hardware: the GPU, for energy and cost only; None: unknown.
        gpus: GPUs a replica, for energy and cost only.

    Raises:
        InputError: a limit outside its range, slots with blocks of more than one token or without a token
            each or scheduled asynchronously, or fewer tokens an iteration than calls.
    """

    replicas: int = 1
    kv_blocks: int = 7173
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    vllm: str = "0.33"
    async_scheduling: bool | None = None
    reserve_full_isl: bool = True
    watermark: float = 0.0
    long_prefill_token_threshold: int = 0
    slots: bool = False
    performance: AbstractPerformance = field(default_factory=lambda: load("rtx-pro-6000/llama-3.1-70b/tp2"))
    hardware: Device | None = None
    gpus: int = 1

    def __post_init__(self) -> None:
        if self.async_scheduling is None:
            object.__setattr__(self, "async_scheduling", self.slots is False)
        for name in ("slots", "async_scheduling", "reserve_full_isl"):
            if not isinstance(getattr(self, name), bool):
                raise complaint(f"cluster.{name}", repr(getattr(self, name)), "true or false")
        for name, most in COUNTS.items():
            _refuse_count(name, getattr(self, name), 1, most)
        _refuse_count("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, 2**30)
        if str(self.vllm) not in VERSIONS:
            raise complaint("cluster.vllm", repr(self.vllm), among(self.vllm, VERSIONS))
        object.__setattr__(self, "vllm", str(self.vllm))
        if isinstance(self.watermark, bool) or not isinstance(self.watermark, int | float):
            raise complaint("cluster.watermark", repr(self.watermark), "a share from 0 to 1")
        if not 0 <= self.watermark < 1:
            raise complaint("cluster.watermark", repr(self.watermark), "a share from 0 to less than 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise complaint(
                "cluster.max_num_batched_tokens",
                str(self.max_num_batched_tokens),
                f"at least the {self.max_num_seqs} of max_num_seqs, a token for every running call",
            )
        if not isinstance(self.performance, AbstractPerformance):
            raise complaint("cluster.performance", repr(self.performance), "a performance model")
        if self.hardware is not None and not isinstance(self.hardware, Device):
            raise complaint("cluster.hardware", repr(self.hardware), "a GPU, as from read_device, or None")
        if self.slots and self.block_size != 1:
            raise complaint("cluster.block_size", str(self.block_size), "1, for contexts stay in slots")
        if self.slots and self.async_scheduling:
            raise complaint("cluster.async_scheduling", "true", "false, for contexts stay in slots")
        if self.slots and self.kv_blocks < self.max_num_seqs:
            raise complaint("cluster.kv_blocks", str(self.kv_blocks), "at least one token for every slot")

    @property
    def max_context_tokens(self) -> int:
        """Longest context that a replica takes: `max_model_len`, or what a slot holds if that is less."""
        return (
            min(self.max_model_len, self.kv_blocks // self.max_num_seqs) if self.slots else self.max_model_len
        )


def _refuse_count(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise complaint(f"cluster.{name}", repr(value), f"an integer from {least} to {most}")
