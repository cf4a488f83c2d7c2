"""Energy and cost of runs, from their totals: an estimate from board power and list prices, not a
measurement.

Pure functions that take one run or a stack of runs: `busy_ns` has the replicas on its last axis, everything
else one number a run, as in the engine's outcome. Power and prices are those of one GPU.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from agentjax.errors import complaint
from agentjax.performance.hardware import Device

MEMORY_J_PER_BYTE = 40e-12
"""Energy of memory traffic (J per byte): 5 pJ a bit for memory and interface. An assumption: published
figures go from 4 pJ a bit for HBM2 to 8 for GDDR6."""

_SECOND_NS = 1e9
_HOUR_NS = 3600e9

ENERGY = {
    "energy_j": ("energy of all GPUs, estimated from board power", "J"),
    "energy_per_program_j": ("energy over completed programs", "J"),
    "energy_per_token_j": ("energy over output tokens of completed calls", "J"),
    "cost_usd": ("list price of all GPUs for the makespan", "USD"),
    "cost_per_program_usd": ("cost over completed programs", "USD"),
}
"""Energy and cost of a run: what each is, and its unit."""

Runs = Float[np.ndarray, "*runs"]


@dataclass(frozen=True)
class Power:
    """Power of one GPU: idle, or active while an iteration runs, and on top of that what memory traffic
    takes.

    Args:
        idle_w: without an iteration (W).
        active_w: during an iteration, memory traffic aside (W).
        memory_j_per_byte: per byte read from or written to memory (J).
    """

    idle_w: float
    active_w: float
    memory_j_per_byte: float = MEMORY_J_PER_BYTE

    def __post_init__(self) -> None:
        for name in ("idle_w", "active_w", "memory_j_per_byte"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise complaint(f"power.{name}", repr(value), "a finite number >= 0")

    @classmethod
    def of(cls, device: Device, memory_j_per_byte: float = MEMORY_J_PER_BYTE) -> Self:
        """The power of a GPU of the catalogue, such that it draws its board limit during an iteration that
        uses the whole memory bandwidth. An upper estimate: boards that decode stay below their limit.
        """
        active_w = device.tdp_w - memory_j_per_byte * device.memory_bytes_per_s
        return cls(device.idle_w, max(active_w, device.idle_w), memory_j_per_byte)


def energy_j(
    power: Power,
    busy_ns: ArrayLike,
    makespan_ns: ArrayLike,
    *,
    replicas: ArrayLike,
    gpus_per_replica: ArrayLike = 1,
    memory_bytes: ArrayLike = 0.0,
) -> Runs:
    """Energy of runs (J), of all GPUs.

    gpus · (replicas · idle_w · makespan + (active_w − idle_w) · sum of busy) + memory_j_per_byte ·
    memory_bytes.

    Args:
        power: of one GPU.
        busy_ns: time in iterations, by replica (last axis).
        makespan_ns: duration of each run.
        replicas: in use; the last axis of `busy_ns` may have more.
        gpus_per_replica: tensor parallelism.
        memory_bytes: traffic of all GPUs, as from `memory_traffic_bytes`.
    """
    busy_s = np.sum(np.asarray(busy_ns, dtype=np.float64), axis=-1) / _SECOND_NS
    makespan_s = np.asarray(makespan_ns, dtype=np.float64) / _SECOND_NS
    idle = power.idle_w * np.asarray(replicas) * makespan_s
    active = (power.active_w - power.idle_w) * busy_s
    traffic = power.memory_j_per_byte * np.asarray(memory_bytes, dtype=np.float64)
    return np.asarray(np.asarray(gpus_per_replica) * (idle + active) + traffic)


def run_energy(
    device: Device,
    *,
    busy_s: float,
    makespan_s: float,
    replicas: int,
    gpus_per_replica: int,
    programs: int,
    output_tokens: int,
) -> dict[str, float]:
    """Energy and cost of one run, by the names of `ENERGY`; NaN where nothing completed.

    Every GPU draws its board limit while its replica is in an iteration, and its idle power otherwise: an
    upper estimate that needs no numbers of the model.

    Args:
        device: the GPU, its power and price.
        busy_s: time in iterations, summed over the replicas.
        makespan_s: from the first arrival to the last completion.
        replicas: in use.
        gpus_per_replica: tensor parallelism.
        programs: completed ones.
        output_tokens: of completed calls.
    """
    makespan_ns = makespan_s * _SECOND_NS
    power = Power.of(device, memory_j_per_byte=0.0)
    energy = energy_j(
        power,
        [busy_s * _SECOND_NS],
        makespan_ns,
        replicas=replicas,
        gpus_per_replica=gpus_per_replica,
    )
    cost = cost_usd(device.price_usd_per_gpu_hour, replicas * gpus_per_replica, makespan_ns)
    values = (energy, per(energy, programs), per(energy, output_tokens), cost, per(cost, programs))
    return {name: float(value) for name, value in zip(ENERGY, values, strict=True)}


def decode_context_tokens(prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> Runs:
    """Tokens of context that the decodes of calls read, summed over the last axis.

    The first output token comes from the prompt, so a call with p prompt and n output tokens decodes n − 1
    times, over p + 1, ..., p + n − 1 tokens: (n − 1) · p + n · (n − 1) / 2.
    """
    prompt = np.asarray(prompt_tokens, dtype=np.float64)
    output = np.asarray(output_tokens, dtype=np.float64)
    return np.asarray(np.sum((output - 1) * prompt + output * (output - 1) / 2, axis=-1))


def memory_traffic_bytes(
    weight_bytes: float, iterations: ArrayLike, kv_bytes_per_token: float, context_tokens: ArrayLike
) -> Runs:
    """Memory traffic of runs (bytes): the weights once an iteration, and the context of every decode.

    Without activations, the contexts of prompts and what preempted calls compute again; with all experts,
    where a small batch reads only some.

    Args:
        weight_bytes: of the model, over all GPUs of a replica.
        iterations: of each run.
        kv_bytes_per_token: of the model, in all layers.
        context_tokens: from `decode_context_tokens`.
    """
    weights = weight_bytes * np.asarray(iterations, dtype=np.float64)
    return np.asarray(weights + kv_bytes_per_token * np.asarray(context_tokens, dtype=np.float64))


def cost_usd(price_usd_per_gpu_hour: float, gpus: ArrayLike, makespan_ns: ArrayLike) -> Runs:
    """Cost of runs (US dollars) where all GPUs are rented for the whole duration.

    Args:
        price_usd_per_gpu_hour: of one GPU.
        gpus: replicas times GPUs of a replica.
        makespan_ns: duration of each run.
    """
    hours = np.asarray(makespan_ns, dtype=np.float64) / _HOUR_NS
    return np.asarray(price_usd_per_gpu_hour * np.asarray(gpus) * hours)


def busy_cost_usd(price_usd_per_gpu_hour: float, busy_ns: ArrayLike, gpus_per_replica: ArrayLike = 1) -> Runs:
    """Cost of runs (US dollars) where only the time in iterations is paid: what the runs would cost on GPUs
    that others use in the meantime.

    Args:
        price_usd_per_gpu_hour: of one GPU.
        busy_ns: time in iterations, by replica (last axis).
        gpus_per_replica: tensor parallelism.
    """
    hours = np.sum(np.asarray(busy_ns, dtype=np.float64), axis=-1) / _HOUR_NS
    return np.asarray(price_usd_per_gpu_hour * np.asarray(gpus_per_replica) * hours)


def per(total: ArrayLike, count: ArrayLike) -> Runs:
    """A total of runs per program, call or token; NaN where there are none."""
    total, count = np.asarray(total, dtype=np.float64), np.asarray(count, dtype=np.float64)
    return np.asarray(
        np.divide(total, count, out=np.full(np.broadcast(total, count).shape, np.nan), where=count > 0)
    )
