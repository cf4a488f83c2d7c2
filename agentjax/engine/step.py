"""One step of one lane: a release, then the next event of one replica. See docs/semantics.md, section 2, for
the order of events.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine import pool
from agentjax.engine.arrays import at, count, entry, first_where, put, replace, with_entry
from agentjax.engine.complete import Leap, end_leap, finishers, leave
from agentjax.engine.release import make_room, next_release, next_time, release_one
from agentjax.engine.schedule import row_prefixes, schedule
from agentjax.engine.state import (
    BUSY,
    COMPLETING,
    DECIDING,
    FINE,
    NEVER,
    Lane,
    Replica,
    Shape,
    State,
    Traffic,
)


class Told(eqx.Module):
    """What a step tells of the times between tokens."""

    leap: Leap
    gap: Int[Array, ""]  # one that is no duration of an iteration (ns); 0: none


def step(state: State, traffic: Traffic, lane: Lane, shape: Shape) -> tuple[State, Told | None]:
    """Advance a lane by one step; a lane with nothing left to do stays as it is.

    At most one call is released. Then one replica acts: the first with an iteration that ends now or with
    calls left to complete, else the first with a decision to take.
    """
    active = is_active(state, traffic, lane, shape)
    with jax.named_scope("release"):
        state, active = _release_next(state, traffic, lane, shape, active)

    wake, end = next_time(state, traffic, lane, shape), _next_end(state.replicas)
    jumps = active & ~_at_boundary(state.replicas) & (end <= wake) & (end <= lane.limits.until)
    state = replace(state, now=jnp.where(jumps, end, state.now))
    phase = state.replicas.phase
    ending = active & (phase == BUSY) & (state.replicas.end <= state.now)
    completing = ending | (active & (phase == COMPLETING))
    actor = jnp.argmax(jnp.where(jnp.any(completing), completing, phase == DECIDING)).astype(jnp.int32)
    completes = at(completing, actor)
    one = entry(state.replicas, actor)

    with jax.named_scope("end_leap"):
        state, one, told = end_leap(state, one, lane, actor, at(ending, actor))
    with jax.named_scope("pay"):
        prefixes = row_prefixes(state, traffic, lane, shape)
        one = replace(one, pool=pool.pay(one.pool, shape, prefixes, lane.limits.blanks_first, active))
    with jax.named_scope("leave"):
        state, one, closed = _leave_one(state, one, traffic, lane, shape, actor, completes, active)
    with jax.named_scope("schedule"):
        # Calls that have completed now and come back at once are released first.
        clear = active & (next_time(state, traffic, lane, shape) > state.now)
        clear = clear & (count(completing) == (completes & closed))
        # A release may have ended a leap at this very instant: its replica is in line again.
        clear = clear & ~jnp.any((phase == BUSY) & ~ending & (state.replicas.end <= state.now))
        deciding = (phase == DECIDING) & (jnp.arange(shape.replicas) < actor)
        clear = clear & ~jnp.any(deciding) & (one.phase == DECIDING)
        state, one = schedule(state, one, traffic, lane, shape, actor, clear)
    state = replace(state, replicas=with_entry(state.replicas, actor, one))
    state = replace(state, totals=replace(state.totals, steps=state.totals.steps + active))
    if told is None:
        return state, None
    return _tell_gap(state, told)


def is_active(state: State, traffic: Traffic, lane: Lane, shape: Shape) -> Bool[Array, ""]:
    """Whether a lane has anything to do, now or later, before its horizon."""
    event = jnp.minimum(next_time(state, traffic, lane, shape), _next_end(state.replicas))
    event = jnp.where(_at_boundary(state.replicas), state.now, event)
    return (event < NEVER) & (event <= lane.limits.until) & (state.fault == FINE) & ~state.crowded


def _at_boundary(replicas: Replica) -> Bool[Array, ""]:
    return jnp.any((replicas.phase == DECIDING) | (replicas.phase == COMPLETING))


def _next_end(replicas: Replica) -> Int[Array, ""]:
    """The first end of a leap; NEVER if none runs."""
    return jnp.min(jnp.where(replicas.phase == BUSY, replicas.end, NEVER))


def _release_next(
    state: State, traffic: Traffic, lane: Lane, shape: Shape, active: Bool[Array, ""]
) -> tuple[State, Bool[Array, ""]]:
    """Release the next call if it is due before anything else; the clock goes there if no replica has
    anything to do now. Returns whether the step may go on.
    """
    coming, end, replicas = (
        next_release(state, traffic, lane, shape),
        _next_end(state.replicas),
        state.replicas,
    )
    goes = active & ~_at_boundary(replicas) & (coming.time < end) & (coming.time <= lane.limits.until)
    now = jnp.where(goes, coming.time, state.now)
    due = active & (coming.time <= now) & (end > now) & ~jnp.any(replicas.phase == COMPLETING)
    state = replace(state, now=now)
    if shape.reuses:
        state, vacant = make_room(state, lane, shape, due & coming.arrives)
        waits = due & coming.arrives & ~vacant
        due, active = due & ~waits, active & ~waits
    return release_one(state, traffic, lane, shape, coming, due), active


def _leave_one(
    state: State,
    one: Replica,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    actor: Int[Array, ""],
    completing: Bool[Array, ""],
    active: Bool[Array, ""],
) -> tuple[State, Replica, Bool[Array, ""]]:
    """One call leaves the actor: the next complete one in order of admission, or the one noted for
    preemption.

    Returns the state and whether the actor has no further call to complete.
    """
    done = finishers(state.threads, actor)
    left = count(done)
    finishes = completing & (left > 0)
    preempted = active & ~completing & (one.phase == DECIDING) & (one.preempting >= 0)
    thread = jnp.where(preempted, jnp.maximum(one.preempting, 0), first_where(done, state.threads.admitted))
    state, one = leave(state, one, traffic, lane, shape, actor, thread, finishes, preempted)
    closed = left <= 1
    one = replace(one, phase=jnp.where(completing & closed, DECIDING, one.phase))
    return state, one, closed


def _tell_gap(state: State, leap: Leap) -> tuple[State, Told]:
    """Tell the step's leap and one of the gaps that are no duration of an iteration."""
    gaps = state.threads.gaps
    assert gaps is not None
    thread = jnp.argmax(gaps.pending).astype(jnp.int32)
    told = Told(leap, at(gaps.pending, thread))
    gaps = replace(gaps, pending=put(gaps.pending, thread, 0))
    return replace(state, threads=replace(state.threads, gaps=gaps)), told
