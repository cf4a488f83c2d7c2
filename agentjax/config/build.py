"""From composed configuration to the objects that are simulated."""

from collections.abc import Mapping
from typing import Any

from agentjax.cluster import LIMITS, Cluster
from agentjax.errors import among, complaint, shown
from agentjax.performance import build_performance, read_device
from agentjax.performance.estimate import AUTO, estimate_kv_blocks
from agentjax.policies import FAMILIES, Policy
from agentjax.policies.base import Member
from agentjax.workloads import build_programs
from agentjax.workloads.pack import Workload, pack


def build_workload(config: Mapping[str, Any]) -> Workload:
    """The packed programs that a `workload` group describes."""
    return pack(build_programs(config))


def build_cluster(cluster: Mapping[str, Any], performance: Mapping[str, Any]) -> Cluster:
    """The cluster of a `cluster` group with the performance model of a `performance` group.

    `kv_blocks: auto` is the number that the model and GPUs of an estimate have room for. `hardware` is a name
    of the catalogue of GPUs or a path; where the performance model is an estimate, its GPUs count.

    Raises:
        InputError: a key that a cluster does not have, a value it cannot take, or hardware other than the
            estimate's.
    """
    fields = (*LIMITS, "hardware", "gpus")
    for key in cluster:
        if key not in fields:
            raise complaint("cluster", f"an unknown key {key!r}", among(key, fields))
    if cluster.get("kv_blocks", 1) in AUTO:
        cluster = {**cluster, "kv_blocks": estimate_kv_blocks(cluster, performance)}
    times = build_performance(performance)
    name = cluster.get("hardware")
    if name is not None and not isinstance(name, str):
        raise complaint("cluster.hardware", shown(name), "null, a name of the catalogue, or a path")
    if "model" in performance:
        own = performance["hardware"]
        if name not in (None, own):
            raise complaint("cluster.hardware", shown(name), f"null, or {shown(own)} as performance.hardware")
        name, cluster = own, {**cluster, "gpus": performance.get("tensor_parallel", 1)}
    hardware = None if name is None else read_device(name)
    return Cluster(**{**cluster, "hardware": hardware}, performance=times)


def build_policy(config: Mapping[str, Mapping[str, Any]]) -> Policy:
    """The policy of the groups `retention`, `scheduling`, `routing` and `admission`.

    Raises:
        InputError: a group without a name, an unknown policy or an unknown parameter.
    """
    names: dict[str, str] = {}
    parameters: dict[str, dict[str, float]] = {}
    for family in FAMILIES:
        values = dict(config[family])
        name = values.pop("name", None)
        if not isinstance(name, str):
            raise complaint(f"{family}.name", repr(name), "the name of a policy")
        names[family], parameters[family] = name, values
    return Policy(**names, parameters=parameters)


def chosen(policy: Policy) -> dict[str, tuple[Member, dict[str, float]]]:
    """What a policy has chosen in every family, and with which parameters."""
    choices = {family: getattr(policy, family) for family in FAMILIES}
    return {family: (choice.member, choice.values) for family, choice in choices.items()}
