"""What a policy sees and what a retention policy answers, and a sample of it to try policies on."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from agentjax.errors import among, complaint


class ProgramView(eqx.Module):
    """The program whose call is decided on; past only."""

    arrival_s: Float[Array, ""]
    turn: Int[Array, ""]  # calls completed before this one
    attained_service_s: Float[Array, ""]  # run time of its iterations so far
    context_tokens: Int[Array, ""]  # context accumulated so far
    replica: Int[Array, ""]  # replica of its previous call, -1 before the first
    is_protected: Bool[Array, ""]  # its context is under a protection now


class CallView(eqx.Module):
    """The call that is decided on; output length and tool duration are not part of it."""

    released_s: Float[Array, ""]
    prompt_tokens: Int[Array, ""]
    cached_tokens: Int[Array, " replicas"]  # tokens of the prompt resident on each replica
    was_preempted: Bool[Array, ""]


class ReplicaView(eqx.Module):
    """All replicas, as they were at their last iteration boundary at or before now."""

    in_use: Bool[Array, " replicas"]  # padding replicas are False
    running: Int[Array, " replicas"]  # calls
    queued: Int[Array, " replicas"]  # calls
    free_blocks: Int[Array, " replicas"]  # free or evictable, protected ones not counted
    kv_utilization: Float[Array, " replicas"]  # (in use + protected) / pool


class Observation(eqx.Module):
    """Everything a policy may read. `here` is the replica concerned (for routing: the program's previous
    one).
    """

    now_s: Float[Array, ""]
    releases: Int[Array, ""]  # calls released so far in the whole cluster
    here: Int[Array, ""]
    block_size: Int[Array, ""]
    program: ProgramView
    call: CallView
    replicas: ReplicaView


class Retain(eqx.Module):
    """Answer of a retention policy. `protect_s` > 0 protects the context for that long (inf: without end)."""

    keep: Bool[Array, ""] | bool
    protect_s: Float[Array, ""] | float


_SAMPLE: dict[str, Any] = {
    "now_s": 3.0,
    "releases": 7,
    "here": 1,
    "block_size": 16,
    "arrival_s": 1.5,
    "turn": 2,
    "attained_service_s": 0.25,
    "context_tokens": 80,
    "replica": 1,
    "is_protected": False,
    "released_s": 2.5,
    "prompt_tokens": 100,
    "cached_tokens": [0, 48, 0],
    "was_preempted": False,
    "in_use": [True, True, False],
    "running": [3, 2, 0],
    "queued": [0, 2, 0],
    "free_blocks": [9, 3, 0],
    "kv_utilization": [0.1, 0.8, 0.0],
}
FIRST_CALL: dict[str, Any] = {
    "releases": 0,
    "here": 0,
    "turn": 0,
    "attained_service_s": 0.0,
    "context_tokens": 0,
    "replica": -1,
    "cached_tokens": [0, 0, 0],
    "running": [0, 0, 0],
    "queued": [0, 0, 0],
    "kv_utilization": [0.0, 0.0, 0.0],
}
"""Changes that make the sample the first call of a run."""
CROWDED: dict[str, Any] = {
    "running": [128, 128, 0],
    "free_blocks": [0, 0, 0],
    "kv_utilization": [1.0, 1.0, 0.0],
}
"""Changes that make the sample one of a cluster without room."""


def sample_observation(**changes: Any) -> Observation:
    """An observation to try a policy on: a program's third call, at home on the second of three replicas, of
    which two are in use.

    Args:
        changes: other values of any fields, whichever view they are in, such as `turn=0`.

    Raises:
        InputError: no such field.
    """
    for name in changes:
        if name not in _SAMPLE:
            raise complaint("sample observation", f"an unknown field {name!r}", among(name, _SAMPLE))
    values = {name: _array(value) for name, value in (_SAMPLE | changes).items()}

    def view(kind: Any, **views: Any) -> Any:
        own = [name for name in kind.__dataclass_fields__ if name not in views]
        return kind(**{name: values[name] for name in own}, **views)

    return view(Observation, program=view(ProgramView), call=view(CallView), replicas=view(ReplicaView))


def _array(value: Any) -> Array:
    """Counts in 32 bits and times in 64, as the engine has them."""
    array = np.asarray(value)
    return jnp.asarray(array.astype(np.int32) if array.dtype.kind == "i" else array)
