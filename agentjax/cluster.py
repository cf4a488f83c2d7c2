"""The cluster: replicas of one model, their limits, and how long an iteration takes."""

from dataclasses import dataclass, field

from agentjax.errors import complaint
from agentjax.performance import AbstractPerformance, Device, load

LIMITS = (
    "replicas",
    "kv_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "slots",
)
"""Fields of a cluster that, with its performance model, decide what happens in it."""


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
        slots: contexts stay in `max_num_seqs` slots of equal size, as in llama.cpp's server, and not in a
            pool of blocks; `block_size` is then 1 and `kv_blocks` the tokens of all slots (its `n_ctx`).
        performance: iteration times; default: Llama-3.1-70B on two RTX PRO 6000.
        hardware: the GPU, for energy and cost only; None: unknown.
        gpus: GPUs a replica, for energy and cost only.

    Raises:
        InputError: a limit that is no integer of at least 1, or slots with blocks of more than one token or
            without a token each.
    """

    replicas: int = 1
    kv_blocks: int = 7173
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    slots: bool = False
    performance: AbstractPerformance = field(default_factory=lambda: load("rtx-pro-6000/llama-3.1-70b/tp2"))
    hardware: Device | None = None
    gpus: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.slots, bool):
            raise complaint("cluster.slots", repr(self.slots), "true or false")
        for name in (*(name for name in LIMITS if name != "slots"), "gpus"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise complaint(f"cluster.{name}", repr(value), "an integer from 1")
        if not isinstance(self.performance, AbstractPerformance):
            raise complaint("cluster.performance", repr(self.performance), "a performance model")
        if self.hardware is not None and not isinstance(self.hardware, Device):
            raise complaint("cluster.hardware", repr(self.hardware), "a GPU, as from read_device, or None")
        if self.slots and self.block_size != 1:
            raise complaint("cluster.block_size", str(self.block_size), "1, for contexts stay in slots")
        if self.slots and self.kv_blocks < self.max_num_seqs:
            raise complaint("cluster.kv_blocks", str(self.kv_blocks), "at least one token for every slot")

    @property
    def max_context_tokens(self) -> int:
        """Longest context that a replica takes: `max_model_len`, or what a slot holds if that is less."""
        return (
            min(self.max_model_len, self.kv_blocks // self.max_num_seqs) if self.slots else self.max_model_len
        )
