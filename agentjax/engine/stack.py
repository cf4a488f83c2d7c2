"""Workloads and configurations as the stacked arrays that the engine reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from agentjax.cluster import Cluster
from agentjax.engine.state import LONGEST, NEVER, Lane, Limits, Traffic
from agentjax.errors import complaint, shown
from agentjax.policies.policy import Policy, PolicySpace, indexed
from agentjax.workloads.pack import SECOND, Workload


@dataclass(frozen=True)
class LaneSpec:
    """One configuration to simulate: an index into the workloads, a cluster and its policies.

    `until_s` is its horizon: nothing that would happen later than that many seconds happens.
    """

    workload: int
    cluster: Cluster
    policy: Policy
    until_s: float | None = None

    def __post_init__(self) -> None:
        until = self.until_s
        is_number = isinstance(until, int | float) and not isinstance(until, bool)
        if until is not None and not (is_number and 0 < until <= LONGEST / SECOND):
            raise complaint("until_s", shown(until), f"null or seconds up to {LONGEST / SECOND:.0e}")


def stack_traffic(workloads: Sequence[Workload]) -> Traffic:
    """The workloads padded and stacked; sizes are rounded up, so that similar workloads share a
    compilation.
    """

    def stacked(rows: Sequence[np.ndarray], fill: int, multiple: int) -> Any:
        width = -(-max(len(row) for row in rows) // multiple) * multiple
        out = np.full((1 << (len(rows) - 1).bit_length(), width), fill, rows[0].dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out

    def field(name: str, fill: int, multiple: int) -> Any:
        return stacked([getattr(workload, name) for workload in workloads], fill, multiple)

    orders = [np.argsort(workload.arrival, kind="stable").astype(np.int32) for workload in workloads]
    programs = np.zeros(1 << (len(workloads) - 1).bit_length(), np.int32)
    programs[: len(workloads)] = [len(order) for order in orders]
    return Traffic(
        programs=programs,  # pyright: ignore[reportArgumentType]
        order=stacked(orders, 0, 8),
        arrival=field("arrival", 0, 8),
        first_call=field("first_call", 0, 8),
        calls=field("calls", 0, 8),
        prefix=field("prefix", -1, 8),
        prefix_tokens=field("prefix_tokens", 0, 1),
        new_tokens=field("new_tokens", 1, 512),
        output_tokens=field("output_tokens", 1, 512),
        kept_tokens=field("kept_tokens", -1, 512),
        gap=field("gap", 0, 512),
        eos=field("eos", True, 512),
    )


def limits_of(cluster: Cluster, until_s: float | None) -> Limits:
    """The traced values of a cluster, as numpy scalars."""
    version = float(cluster.vllm)
    values = {
        "replicas": np.int32(cluster.replicas),
        "kv_blocks": np.int32(cluster.kv_blocks),
        "block_size": np.int32(cluster.block_size),
        "max_num_seqs": np.int32(cluster.max_num_seqs),
        "max_num_batched_tokens": np.int32(cluster.max_num_batched_tokens),
        "max_model_len": np.int32(cluster.max_model_len),
        "long_prefill_tokens": np.int32(cluster.long_prefill_token_threshold or np.iinfo(np.int32).max),
        "watermark_blocks": np.int32(cluster.watermark * (cluster.kv_blocks + 1)),
        "reserve_full_isl": np.bool_(cluster.reserve_full_isl),
        "blanks_first": np.bool_(version >= 0.24),
        "goes_on": np.bool_(version >= 0.33),
        "until": np.int64(NEVER if until_s is None else round(until_s * SECOND)),
    }
    return Limits(**values)  # pyright: ignore[reportArgumentType]


def stack_lanes(specs: Sequence[LaneSpec], policies: PolicySpace) -> Lane:
    """The lanes' traced values with a leading axis; their policies as places among `policies`."""
    lanes = [
        Lane(
            workload=np.int32(spec.workload),  # pyright: ignore[reportArgumentType]
            limits=limits_of(spec.cluster, spec.until_s),
            policy=indexed(spec.policy, policies),
            performance=spec.cluster.performance,
        )
        for spec in specs
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *lanes)
