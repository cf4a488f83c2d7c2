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
    return x.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False) if x.ndim == 1 else _row(x, i)


@jax.custom_batching.custom_vmap
def _row(x: Shaped[Array, "n ..."], i: Int[Array, ""]) -> Shaped[Array, " ..."]:
    """x[i] of an array of several axes; where lanes are batched, as a sum with one summand that is not 0.

    XLA (jaxlib 0.10.2) aborts when it compiles a gather of rows into a kernel of several results.
    """
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


@_row.def_vmap
def _rows(lanes: int, batched: list[bool], x: Array, i: Array) -> tuple[Array, bool]:
    x, i = _with_lanes(lanes, batched, x, i)
    return jnp.sum(jnp.where(_places(x, i), x, jnp.zeros((), x.dtype)), axis=1, dtype=x.dtype), True


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
    here = jax.lax.iota(jnp.int32, x.shape[-1]) == i
    return where_put(on[..., None] & here, jnp.asarray(value)[..., None], x)


def entry(tree: Tree, i: Int[Array, ""]) -> Tree:
    """The i-th of the things that a tree of arrays holds along its leading axis."""
    return jax.tree.map(lambda x: at(x, i), tree)


def with_entry(tree: Tree, i: Int[Array, ""], one: Tree) -> Tree:
    """The tree with its i-th thing replaced."""

    def put_one(x: Any, value: Any) -> Any:
        if x.shape[0] == 1:
            return value[None]
        return put(x, i, value) if x.ndim == 1 else _put_row(x, i, value)

    return jax.tree.map(put_one, tree, one)


@jax.custom_batching.custom_vmap
def _put_row(
    x: Shaped[Array, "n ..."], i: Int[Array, ""], value: Shaped[Array, " ..."]
) -> Shaped[Array, "n ..."]:
    """x with x[i] = value; where lanes are batched, by comparing places, for the reason of `_row`."""
    return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)


@_put_row.def_vmap
def _put_rows(lanes: int, batched: list[bool], x: Array, i: Array, value: Array) -> tuple[Array, bool]:
    x, i, value = _with_lanes(lanes, batched, x, i, value)
    return jnp.where(_places(x, i), value[:, None], x), True


def _with_lanes(lanes: int, batched: list[bool], *values: Array) -> list[Array]:
    """The values, all with a leading axis of lanes."""
    pairs = zip(values, batched, strict=True)
    return [value if has else jnp.broadcast_to(value, (lanes, *value.shape)) for value, has in pairs]


def _places(x: Shaped[Array, "lanes n ..."], i: Int[Array, " lanes"]) -> Bool[Array, "lanes n ..."]:
    """Where x[lane, i[lane]] is, with axes of length 1 for the rest."""
    here = jax.lax.iota(jnp.int32, x.shape[1]) == i[:, None]
    return here.reshape(*here.shape, *[1] * (x.ndim - 2))


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
