"""The fit itself: least robust loss of relative errors, coefficients >= 0, for many weightings at once."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

WITHOUT_FUSION = {"xla_disable_hlo_passes": "cpu_multi_output_fusion"}
"""The pass that `compilation.prepare` turns on for the engine aborts the process here (jaxlib 0.10)."""
HUBER = 0.05
"""Relative errors beyond this count in proportion, not by their square."""
STEPS = 200
LANES = 32
"""Fits that run side by side."""
ROWS = 256
"""Observations are filled up to a multiple of this, so that recordings of like sizes share a compilation."""
ROUNDS, SWEEPS = 8, 40
"""Of the search for a start."""
LEAST = 1e-3
"""Smallest start of a coefficient, relative to its share."""
PULL = 1e-5
"""Pull of the logarithm of each coefficient to its start, which decides where the data do not."""


def minimise(
    columns: Float[np.ndarray, "designs n coefficients"],
    known_s: Float[np.ndarray, " n"],
    duration_s: Float[np.ndarray, " n"],
    which: np.ndarray,
    weights: Float[np.ndarray, "fits n"],
    lean: Float[np.ndarray, "designs coefficients"],
) -> Float[np.ndarray, "fits coefficients"]:
    """Coefficients of each fit.

    **Arguments:**

    - `columns`: what the coefficients of each design multiply; all zeros for coefficients a design lacks.
    - `known_s`: the part of each duration that is known (s).
    - `duration_s`: what was measured (s).
    - `which`: the design of each fit.
    - `weights`: of each observation in each fit; rows need not add up to 1.
    - `lean`: how much each coefficient explains, against others, where the data cannot tell.
    """
    # each coefficient starts where it explains an even share of the durations it has to do with
    present = columns > 0
    ratio = np.where(present, duration_s[:, None] / np.where(present, columns, 1.0), np.nan)
    used = np.any(present, axis=1)
    with np.errstate(all="ignore"):
        start = np.stack(
            [
                [np.nanmedian(column) if some else 0.0 for column, some in zip(design.T, has, strict=True)]
                for design, has in zip(ratio, used, strict=True)
            ]
        )
    start = start * lean / np.maximum(np.sum(lean * used, axis=1, keepdims=True), 1e-12)
    scaled = columns * start[:, None, :] / duration_s[:, None]
    known = known_s / duration_s
    weights = weights / weights.sum(axis=1, keepdims=True)
    more = -len(duration_s) % ROWS  # rows without weight, whose error is 0
    scaled = np.pad(scaled, ((0, 0), (0, more), (0, 0)))
    known = np.pad(known, (0, more), constant_values=1.0)
    weights = np.pad(weights, ((0, 0), (0, more)))
    fits = len(which)
    padded = np.pad(np.arange(fits), (0, -fits % LANES), mode="edge").reshape(-1, LANES)
    with jax.enable_x64(True):
        solve = _solver()
        logs = [
            np.asarray(solve(jnp.asarray(scaled), jnp.asarray(known), which[rows], weights[rows]))
            for rows in padded
        ]
    values = np.exp(np.concatenate(logs)[:fits]) * start[which]
    return np.where(used[which], values, 0.0)


@lru_cache
def _solver():
    """The compiled optimisation, of a fixed number of fits side by side."""

    @partial(jax.jit, compiler_options=WITHOUT_FUSION)
    def solve(scaled: jax.Array, known: jax.Array, which: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.vmap(lambda design, weight: _one(scaled[design], known, weight))(which, weights)

    return solve


def _near(design: jax.Array, known: jax.Array, weight: jax.Array) -> jax.Array:
    """A start near the best: Gauss-Newton steps, each a least-squares problem with its robust weights that is
    solved one coefficient after the other, none below 0. Logarithms alone could run off towards 0 and not
    come back.
    """
    size = design.shape[1]

    def step(_: int, values: jax.Array) -> jax.Array:
        predicted = jnp.maximum(design @ values + known, 1e-30)
        error = jnp.log(predicted)
        robust = weight * jnp.minimum(1.0, HUBER / jnp.maximum(jnp.abs(error), 1e-30))
        slopes = design / predicted[:, None]
        gram = slopes.T @ (robust[:, None] * slopes)
        right = slopes.T @ (robust * (slopes @ values - error))
        diagonal = jnp.maximum(jnp.diag(gram), 1e-30)

        def coefficient(at: int, values: jax.Array) -> jax.Array:
            j = at % size
            moved = values[j] + (right[j] - gram[j] @ values) / diagonal[j]
            return values.at[j].set(jnp.maximum(moved, 0.0))

        found = jax.lax.fori_loop(0, SWEEPS * size, coefficient, values)
        return jnp.where(jnp.any(design > 0, axis=0), found, 1.0)

    return jax.lax.fori_loop(0, ROUNDS, step, jnp.ones(size))


def _one(design: jax.Array, known: jax.Array, weight: jax.Array) -> jax.Array:
    def loss(logs: jax.Array) -> jax.Array:
        error = jnp.log(jnp.maximum(design @ jnp.exp(logs) + known, 1e-30))
        robust = jnp.sum(weight * optax.losses.huber_loss(error, delta=HUBER)) / HUBER**2
        return robust + PULL * jnp.sum(logs**2)

    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: tuple) -> tuple:
        logs, state, count, _ = carry
        value, grad = value_and_grad(logs, state=state)
        updates, state = solver.update(grad, state, logs, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(logs, updates), state, count + 1, jnp.max(jnp.abs(jnp.asarray(grad)))

    def going(carry: tuple) -> jax.Array:
        return (carry[2] < STEPS) & (carry[3] > 1e-6)

    start = jnp.log(jnp.maximum(_near(design, known, weight), LEAST))
    logs, *_ = jax.lax.while_loop(going, step, (start, solver.init(start), 0, jnp.inf))
    return logs
