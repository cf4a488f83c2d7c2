"""Lanes on their way: so many run side by side on all devices, and one that ends makes room for the next."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from agentjax.engine.arrays import replace
from agentjax.engine.check import check
from agentjax.engine.init import initial_state, widened
from agentjax.engine.observe import Sample, sample
from agentjax.engine.stack import LaneSpec, stack_lanes
from agentjax.engine.state import STALLED, Lane, Shape, State, Traffic
from agentjax.engine.step import Told, is_active, step

CHUNK = 1024
"""Steps of a lone lane between two looks at it from outside."""
BATCH_CHUNK = 256
"""Steps between two looks at lanes that run side by side: one that ends idles until then."""
FIRST_WINDOW = 64
"""Rows that a window of programs in flight has at first; it doubles when they do not suffice."""


class Look(eqx.Module):
    """What is seen of each lane from outside."""

    active: Bool[Array, " lanes"]
    crowded: Bool[Array, " lanes"]
    completions: Int[Array, " lanes"]
    mark: Int[Array, "lanes counters"]  # some of them change in any step that does something


class Ended(eqx.Module):
    """The final state of a lane, on the host, and what it told on its way."""

    index: int
    state: State
    samples: list[Sample]
    told: list[Told]


class Compiled(eqx.Module):
    """The functions of lanes split over devices, compiled at their first call."""

    begin: Callable = eqx.field(static=True)  # (traffic, lanes, which exist) -> states
    advance: Callable = eqx.field(static=True)  # (states, traffic, lanes) -> states after a chunk of steps
    refill: Callable = eqx.field(static=True)  # (states, traffic, lanes, which are new) -> states


@lru_cache(maxsize=32)
def compiled(shape: Shape, devices: tuple[Any, ...], lanes_per_device: int) -> Compiled:
    """The engine for one shape."""
    mesh = Mesh(np.asarray(devices), ("lanes",))
    split, whole = PartitionSpec("lanes"), PartitionSpec()
    length = CHUNK if lanes_per_device == 1 else BATCH_CHUNK

    def begin(traffic: Traffic, lanes: Lane, exists: Bool[Array, " lanes"]) -> State:
        return jax.vmap(lambda lane, exists: initial_state(traffic, lane, shape, exists))(lanes, exists)

    def refill(state: State, traffic: Traffic, lanes: Lane, new: Bool[Array, " lanes"]) -> State:
        fresh = begin(traffic, lanes, jnp.ones_like(new))
        return jax.tree.map(
            lambda old, first: jnp.where(new.reshape(-1, *[1] * (old.ndim - 1)), first, old), state, fresh
        )

    def one(state: State, traffic: Traffic, lane: Lane) -> tuple[State, tuple[Sample | None, Told | None]]:
        def body(state: State, _: None) -> tuple[State, tuple[Sample | None, Told | None]]:
            after, told = step(state, traffic, lane, shape)
            if shape.checks:
                after = check(after, state, traffic, lane, shape)
            return after, (sample(after, lane) if shape.series else None, told)

        return jax.lax.scan(body, state, None, length=length)

    def look(state: State, traffic: Traffic, lane: Lane) -> Look:
        return Look(
            is_active(state, traffic, lane, shape), state.crowded, state.totals.completions, _mark(state)
        )

    def advance(state: State, traffic: Traffic, lanes: Lane) -> tuple[State, Look, Any]:
        if lanes_per_device == 1:  # gathers of a lone lane are cheaper without a batch axis
            first = jax.tree.map(lambda x: x[0], (state, lanes))
            state, told = jax.tree.map(lambda x: x[None], one(first[0], traffic, first[1]))
        else:
            state, told = jax.vmap(one, in_axes=(0, None, 0))(state, traffic, lanes)
        return state, jax.vmap(look, in_axes=(0, None, 0))(state, traffic, lanes), told

    def shard(function: Callable, specs: tuple[PartitionSpec, ...], **options: Any) -> Callable:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
        return jax.jit(mapped, **options)

    return Compiled(
        shard(begin, (whole, split, split)),
        shard(advance, (split, whole, split), donate_argnums=0),
        shard(refill, (split, whole, split, split), donate_argnums=0),
    )


def _mark(state: State) -> Int[Array, " counters"]:
    totals = vars(state.totals).items()
    pools = state.replicas.pool
    counters = [state.now, jnp.sum(pools.free), jnp.sum(pools.owed), jnp.sum(pools.key, dtype=jnp.int64)]
    counters += [value for name, value in totals if name != "steps"]
    return jnp.stack([counter.astype(jnp.int64) for counter in counters])


def stream(
    specs: Sequence[LaneSpec],
    traffic: Traffic,
    shape: Shape,
    width: int,
    progress: Callable[[float], None],
) -> Iterator[list[Ended]]:
    """Run the lanes, at most `width` at once; those that end between two looks come together.

    The window of programs in flight grows as it must; no result depends on its size, on `width` or on which
    lanes run side by side.
    """
    devices = tuple(jax.local_devices())
    devices = devices[: max(1, min(len(devices), width, len(specs)))]
    each = -(-rounded(min(width, len(specs))) // len(devices))
    seats = each * len(devices)
    waiting = list(range(min(seats, len(specs)), len(specs)))
    seated = [index if index < len(specs) else -1 for index in range(seats)]
    lanes = stack_lanes([specs[max(index, 0)] for index in seated], shape.policies)
    queue = stack_lanes([specs[index] for index in waiting], shape.policies) if waiting else None
    engine = compiled(shape, devices, each)
    state = engine.begin(traffic, lanes, np.asarray(seated) >= 0)
    total = float(sum(int(np.sum(np.asarray(traffic.calls)[spec.workload])) for spec in specs))
    before: dict[int, np.ndarray] = {}
    told: dict[int, list[Any]] = {index: [] for index in seated}
    finished = taken = 0
    while any(index >= 0 for index in seated):
        state, look, steps = engine.advance(state, traffic, lanes)
        look = jax.tree.map(np.asarray, look)
        progress((finished + float(look.completions[np.asarray(seated) >= 0].sum())) / total)
        if shape.series or shape.gaps:
            steps = jax.tree.map(np.asarray, steps)
        stalled = [
            index >= 0
            and bool(look.active[seat])
            and index in before
            and bool((look.mark[seat] == before[index]).all())
            for seat, index in enumerate(seated)
        ]
        ended: list[Ended] = []
        new = np.zeros(seats, bool)
        for seat, index in enumerate(seated):
            if index < 0:
                continue
            before[index] = look.mark[seat]
            if shape.series or shape.gaps:
                told[index].append(jax.tree.map(lambda x, seat=seat: x[seat].copy(), steps))
            if (look.active[seat] and not stalled[seat]) or look.crowded[seat]:
                continue
            final = _lane(state, seat, each)
            if stalled[seat]:
                final = replace(final, fault=np.asarray(STALLED, np.int32))
            samples, gaps = zip(*told.pop(index), strict=True) if told.get(index) else ((), ())
            ended.append(Ended(index, final, list(samples), list(gaps)))
            finished += int(look.completions[seat])
            before.pop(index)
            seated[seat] = -1
            if taken < len(waiting):
                seated[seat] = waiting[taken]
                told[waiting[taken]] = []
                lanes = jax.tree.map(
                    lambda x, y, seat=seat, row=taken: _with_row(x, seat, y[row]), lanes, queue
                )
                new[seat] = True
                taken += 1
        if look.crowded.any():
            state, shape = _grown(state, shape, devices)
            engine = compiled(shape, devices, each)
        if new.any():
            state = engine.refill(state, traffic, lanes, new)
        if ended:
            yield ended


def rounded(lanes: int) -> int:
    """A number of seats for so many lanes, one of few, so that few different ones are compiled."""
    return next((seats for seats in (1, 2, 4) if lanes <= seats), -(-lanes // 8) * 8)


def _with_row(x: np.ndarray, row: int, value: np.ndarray) -> np.ndarray:
    x = np.array(x)
    x[row] = value
    return x


def _lane(state: State, seat: int, each: int) -> State:
    """The state of one lane as a copy on the host; on CPUs nothing else is copied."""

    def pick(x: Array) -> np.ndarray:
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        data = shards[seat // each].data
        on_host = data.device.platform == "cpu"
        return np.array(np.asarray(data)[seat % each] if on_host else data[seat % each])

    return jax.tree.map(pick, state)


def _grown(state: State, shape: Shape, devices: tuple[Any, ...]) -> tuple[State, Shape]:
    """The states with a window of twice as many rows, or of one for every program."""
    wider = replace(shape, threads=min(2 * shape.threads, shape.programs))
    state = widened(jax.tree.map(np.array, state), shape, wider)
    sharding = NamedSharding(Mesh(np.asarray(devices), ("lanes",)), PartitionSpec("lanes"))
    return jax.device_put(state, sharding), wider
