"""One step of one lane: the clock, then at most one event of each kind. See docs/semantics.md, section 2,
for their order."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from agentjax.engine import pool
from agentjax.engine.arrays import at, count, first_where, replace
from agentjax.engine.complete import end_leap, finishers, leave
from agentjax.engine.release import release_one
from agentjax.engine.schedule import schedule
from agentjax.engine.state import BUSY, COMPLETING, DECIDING, NEVER, Lane, Shape, State, Traffic


def step(state: State, traffic: Traffic, lane: Lane, shape: Shape) -> State:
    """Advance a lane by one step; a lane with nothing left to do stays as it is.

    The step works on one replica, its actor: the first with an iteration that ends now or with calls left to
    complete, else the first with a decision to take.
    """
    thread = jnp.argmin(state.threads.wake).astype(jnp.int32)
    wake = at(state.threads.wake, thread)
    state, ending, active = _advance_clock(state, wake)
    replicas = state.replicas
    completing = ending | (replicas.phase == COMPLETING)
    actor = jnp.argmax(jnp.where(jnp.any(completing), completing, replicas.phase == DECIDING)).astype(
        jnp.int32
    )
    on = active & (jnp.arange(shape.replicas) == actor)

    with jax.named_scope("end_leap"):
        state = end_leap(state, lane, actor, on & ending)
    with jax.named_scope("pay"):
        state = pool.pay(state, shape, traffic.prefix[lane.workload], actor, on)
    with jax.named_scope("leave"):
        state, closed = _leave_one(state, traffic, lane, shape, actor, on & completing)
    with jax.named_scope("release"):
        none_completing = count(completing) == count(on & completing & closed)
        threads = jnp.arange(shape.threads)
        waiting = state.threads.wake <= state.now
        due = active & none_completing & (wake <= state.now) & ~jnp.any(waiting & (threads < thread))
        clear = active & none_completing & ~jnp.any(waiting & ~(due & (threads == thread)))
        state = release_one(state, traffic, lane, shape, thread, due)
    with jax.named_scope("schedule"):
        # The release may have ended a leap at this very instant: its replica is in line again.
        clear = clear & ~jnp.any((state.replicas.phase == BUSY) & (state.replicas.end <= state.now))
        deciding = state.replicas.phase == DECIDING
        first = jnp.argmax(deciding) == actor
        state = schedule(state, traffic, lane, shape, actor, clear & first & at(deciding, actor))
    return replace(state, totals=replace(state.totals, steps=state.totals.steps + active))


def _advance_clock(
    state: State, wake: Int[Array, ""]
) -> tuple[State, Bool[Array, " replicas"], Bool[Array, ""]]:
    """To the next instant with something to do. Returns the state, which leaps end at it, and whether there
    is one.
    """
    replicas = state.replicas
    end = jnp.where(replicas.phase == BUSY, replicas.end, NEVER)
    at_boundary = jnp.any((replicas.phase == DECIDING) | (replicas.phase == COMPLETING))
    now = jnp.where(at_boundary, state.now, jnp.minimum(wake, jnp.min(end)))
    active = (now < NEVER) & ~state.stuck
    now = jnp.where(active, now, state.now)
    return replace(state, now=now), active & (end <= now), active


def _leave_one(
    state: State,
    traffic: Traffic,
    lane: Lane,
    shape: Shape,
    actor: Int[Array, ""],
    completing: Bool[Array, " replicas"],
) -> tuple[State, Bool[Array, ""]]:
    """One call leaves the actor: the next complete one in order of admission, or the one noted for
    preemption.

    Returns the state and whether the actor has no further call to complete.
    """
    done = finishers(state, actor)
    left = count(done)
    is_completing = jnp.any(completing)
    finishes = is_completing & (left > 0)
    victim = at(state.replicas.preempting, actor)
    preempted = ~is_completing & (at(state.replicas.phase, actor) == DECIDING) & (victim >= 0) & ~state.stuck
    thread = jnp.where(preempted, jnp.maximum(victim, 0), first_where(done, state.threads.admitted))
    state = leave(state, traffic, lane, shape, actor, thread, finishes, preempted)
    closed = left <= 1
    phase = jnp.where(completing & closed, DECIDING, state.replicas.phase)
    return replace(state, replicas=replace(state.replicas, phase=phase)), closed
