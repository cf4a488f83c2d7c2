"""From configuration to a roofline model, and to the KV blocks that its model and GPUs have room for."""

from collections.abc import Mapping
from typing import Any

from agentjax.errors import closest, complaint, shown
from agentjax.performance.hardware import Device, read_device
from agentjax.performance.model import ModelSpec, read_config
from agentjax.performance.roofline import Roofline, kv_blocks

_NAMES = ("model", "hardware")
_FORMATS = ("weights", "kv_format")
_EFFICIENCIES = ("compute_efficiency", "attention_efficiency", "memory_efficiency", "link_efficiency")
_HOST = ("overhead_s", "wakeup_s")
_MEMORY = ("gpu_memory_utilization", "reserve_gib")
FIELDS = (*_NAMES, "tensor_parallel", *_FORMATS, *_EFFICIENCIES, *_HOST, *_MEMORY)
"""What a `performance` configuration of an estimate may say."""

AUTO = (None, "auto")
"""Values of `cluster.kv_blocks` that ask for an estimate."""


def build_roofline(config: Mapping[str, Any]) -> Roofline:
    """The roofline model that a `performance` configuration describes.

    **Arguments:**

    - `config`: `model` and `hardware`, names of the catalogues or paths; others of `FIELDS`, where absent
        as in `Roofline.build`.

    Raises `InputError` for anything else.
    """
    model, device, gpus = _read(config)
    given = {name: _positive(name, config[name]) for name in (*_EFFICIENCIES, *_HOST) if name in config}
    return Roofline.build(model, device, gpus, **given)


def estimate_kv_blocks(cluster: Mapping[str, Any], performance: Mapping[str, Any]) -> int:
    """The KV blocks of a replica for `cluster.kv_blocks=auto`.

    **Arguments:**

    - `cluster`: its limits `block_size`, `max_num_batched_tokens` and `max_num_seqs`, where given, count.
    - `performance`: the configuration of an estimate; `gpu_memory_utilization` and `reserve_gib` are for
        this number only.

    Raises `InputError` if the configuration names no model and GPU, or if the model does not fit.
    """
    if "model" not in performance:
        raise complaint(
            "cluster.kv_blocks",
            shown(cluster.get("kv_blocks")),
            "a number of blocks, as only performance=roofline names a model and a GPU",
        )
    model, device, gpus = _read(performance)
    limits = ("block_size", "max_num_batched_tokens", "max_num_seqs")
    given: dict[str, Any] = {
        name: _count(f"cluster.{name}", cluster[name]) for name in limits if name in cluster
    }
    if "gpu_memory_utilization" in performance:
        given["gpu_memory_utilization"] = _positive(
            "gpu_memory_utilization", performance["gpu_memory_utilization"]
        )
    if performance.get("reserve_gib") is not None:
        given["reserve_bytes"] = _positive("reserve_gib", performance["reserve_gib"]) * 2**30
    return kv_blocks(model, device, gpus, **given)


def _read(config: Mapping[str, Any]) -> tuple[ModelSpec, Device, int]:
    for key in config:
        if key not in FIELDS:
            raise complaint(f"performance.{key}", "an unknown field", closest(key, FIELDS))
    for name in _NAMES:
        if not isinstance(config.get(name), str):
            found = shown(config[name]) if name in config else "nothing"
            raise complaint(f"performance.{name}", found, "a name of the catalogue, or a path")
    model = read_config(config["model"], weights=config.get("weights"), kv_format=config.get("kv_format"))
    gpus = _count("performance.tensor_parallel", config.get("tensor_parallel", 1))
    return model, read_device(config["hardware"]), gpus


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise complaint(f"performance.{name}", shown(value), "a finite number >= 0")
    return float(value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise complaint(name, shown(value), "an integer from 1")
    return value
