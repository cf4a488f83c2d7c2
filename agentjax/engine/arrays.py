"""Reading and writing single entries of small arrays, so that the same code is fast alone and under vmap."""

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

__all__ = [
    "argmin",
    "at",
    "column",
    "count",
    "entry",
    "first_where",
    "lexicographic_argmin",
    "put",
    "put_column",
    "quotient",
    "replace",
    "sortable",
    "where_put",
    "with_entry",
]

Tree = TypeVar("Tree")


def at(x: Shaped[Array, "n ..."], i: Int[Array, ""]) -> Shaped[Array, " ..."]:
    """x[i] for 0 <= i < n; the single entry where n is 1."""
    if x.shape[0] == 1:
        return x[0]
    return x.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)


def column(x: Shaped[Array, "*r n"], i: Int[Array, ""]) -> Shaped[Array, "*r"]:
    """x[..., i] for 0 <= i < n."""
    return x.at[..., i].get(mode="promise_in_bounds", wrap_negative_indices=False)


def where_put(mask: Bool[Array, "..."], value: Array | int, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`value` where the mask holds, else x, in the dtype of x."""
    return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)


def put(
    x: Shaped[Array, " n"], i: Int[Array, ""], value: Array | int, when: Array | bool = True
) -> Shaped[Array, " n"]:
    """x with x[i] = value, if `when`."""
    if x.shape[0] == 1:
        return where_put(jnp.asarray(when), value, x)
    return where_put((jax.lax.iota(jnp.int32, x.shape[0]) == i) & when, value, x)


def put_column(
    x: Shaped[Array, "*r n"], i: Int[Array, ""], value: Shaped[Array, "*r"] | int, on: Bool[Array, "*r"]
) -> Shaped[Array, "*r n"]:
    """x with x[..., i] = value where `on` holds."""
    if x.ndim == 1 or x.shape[0] == 1:
        here = jax.lax.iota(jnp.int32, x.shape[-1]) == i
        return where_put(on[..., None] & here, jnp.asarray(value)[..., None], x)
    new = where_put(on, value, column(x, i))
    return x.at[..., i].set(new, mode="promise_in_bounds", wrap_negative_indices=False)


def entry(tree: Tree, i: Int[Array, ""]) -> Tree:
    """The i-th of the things that a tree of arrays holds along its leading axis."""
    return jax.tree.map(lambda x: at(x, i), tree)


def with_entry(tree: Tree, i: Int[Array, ""], one: Tree) -> Tree:
    """The tree with its i-th thing replaced."""

    def put_one(x: Any, value: Any) -> Any:
        if x.shape[0] == 1:
            return value[None]
        if x.ndim == 1:
            return put(x, i, value)
        return x.at[i].set(value, mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.tree.map(put_one, tree, one)


def count(x: Shaped[Array, " n"]) -> Int[Array, ""]:
    """Sum as int32."""
    return jnp.sum(x, dtype=jnp.int32)


def first_where(mask: Bool[Array, " n"], key: Int[Array, " n"]) -> Int[Array, ""]:
    """Index of the smallest key under the mask, the lowest on a tie; 0 where the mask is empty.

    A short key and its index are compared as one number: on CPUs an argmin costs four times a minimum.
    """
    if key.dtype == jnp.int32:
        index = jax.lax.iota(jnp.int64, key.shape[0])
        packed = jnp.where(mask, (key.astype(jnp.int64) << 32) | index, jnp.iinfo(jnp.int32).max << 32)
        return jnp.min(packed).astype(jnp.int32)
    return argmin(jnp.where(mask, key, jnp.iinfo(key.dtype).max))


def argmin(x: Int[Array, " n"]) -> Int[Array, ""]:
    """Index of the smallest entry, the lowest on a tie, by two minima."""
    index = jax.lax.iota(jnp.int32, x.shape[0])
    return jnp.min(jnp.where(x == jnp.min(x), index, x.shape[0]))


def lexicographic_argmin(mask: Bool[Array, " n"], *keys: Int[Array, " n"]) -> Int[Array, ""]:
    """Index of the lexicographically smallest (key, key, ...) under the mask, the lowest index on a tie."""
    for key in keys[:-1]:
        masked = jnp.where(mask, key, jnp.iinfo(key.dtype).max)
        mask = mask & (masked == jnp.min(masked))
    return first_where(mask, keys[-1])


def sortable(x: Array) -> Int[Array, "..."]:
    """int64 in the order of the given finite or infinite numbers: comparing integers is several times
    faster.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float64) + 0.0, jnp.int64)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int64).max, bits)


def quotient(x: Int[Array, "..."], divisor: Int[Array, ""]) -> Int[Array, "..."]:
    """x // divisor for 0 <= x < 2^31 and a positive divisor, by a multiplication, which vectorizes.

    Exact: (x + 1/2) / divisor is at least 1 / (2·divisor) away from any integer, far more than the rounding
    error.
    """
    return jnp.floor((x.astype(jnp.float64) + 0.5) * (1.0 / divisor.astype(jnp.float64))).astype(x.dtype)
