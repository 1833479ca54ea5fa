"""The two forms of x · (W + ΔW): ΔW a few rows at a time, or not at all, as a product of Kronecker factors.

Both are loops over blocks, and every block is computed again when its derivative is taken, so that only the
arguments are kept between the passes.

The cotangent of an array that a loop only reads is a sum that starts from zeros. XLA's CPU compiler writes these
zeros, as large as x, for every layer before the first layer runs. So x enters a loop twice: as an array that the
loop reads, whose value the derivative keeps, and as a part of the carry, which gets the cotangent. A carry's
cotangent starts from what comes after the loop, and `_zero_from_cotangent` makes that wait for the cotangent of y.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._adapters.hadamard import (
    Factors,
    accumulator,
    block_length,
    product,
    rows_of,
    rows_per_block,
    starts,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float

_KRONECKER_COLUMNS = 128  # of the m × r² factor, at a time


def dot_by_rows(
    x: Float[Array, "tokens m"],
    w: Float[Array, "m n"] | None,
    factors: Factors,
    scale: Float[Array, ""] | float,
    precision: lax.PrecisionLike,
    magnitude: Float[Array, " n"] | None = None,
) -> Float[Array, "tokens n"]:
    """x · (W + ΔW), as a sum over blocks of rows, in the dtype of the sums."""
    m, n = factors[0].shape[0], factors[1].shape[1]
    dtype = accumulator(x, *factors)

    def add(total: tuple[jax.Array, jax.Array, jax.Array], start: jax.Array | int, count: int):
        y, squares, carried = total
        block = product(rows_of(factors, start, count), scale, precision).astype(dtype)
        if w is not None:
            block += lax.dynamic_slice_in_dim(w, start, count).astype(dtype)
        if magnitude is not None:
            squares += jnp.sum(jnp.square(block), axis=0)
        columns = [lax.dynamic_slice_in_dim(each, start, count, axis=1) for each in (x, carried)]
        return y + _multiply(_value_of(*columns), block, dtype, precision), squares, carried

    operands = [v for v in (x, w, *factors, scale) if v is not None]
    total = (_zeros((x.shape[0], n), dtype, operands), _zeros((n,), dtype, operands), x)
    y, squares, carried = _over_blocks(add, total, m, rows_per_block(m))
    y = _zero_from_cotangent(y, carried)
    if magnitude is None:
        return y
    # A column of zeros has no direction: LyCORIS's epsilon keeps it finite.
    return y * (magnitude.astype(dtype) / (jnp.sqrt(squares) + jnp.finfo(dtype).eps))[None]


def dot_by_kronecker(
    x: Float[Array, "tokens m"],
    w: Float[Array, "m n"] | None,
    factors: Factors,
    scale: Float[Array, ""] | float,
    precision: lax.PrecisionLike,
) -> Float[Array, "tokens n"]:
    """x · W + scale · (x · (w1a ⊙ w2a)) · (w1b ⊛ w2b), a few ranks of the first pair at a time."""
    w1a, w1b, w2a, w2b = factors
    r = w1a.shape[1]
    dtype = accumulator(x, *factors)

    def add(total: tuple[jax.Array, jax.Array], start: jax.Array | int, count: int):
        y, carried = total
        a = lax.dynamic_slice_in_dim(w1a, start, count, axis=1)
        b = lax.dynamic_slice_in_dim(w1b, start, count)
        left = (a[:, :, None] * w2a[:, None, :]).reshape(len(a), -1)
        right = (b[:, None, :] * w2b[None, :, :]).reshape(-1, b.shape[1])
        inner = _multiply(_value_of(x, carried), left, dtype, precision).astype(x.dtype)
        return y + _multiply(inner, right, dtype, precision), carried

    total = (_zeros((x.shape[0], w1b.shape[1]), dtype, (x, *factors)), x)
    y, carried = _over_blocks(add, total, r, block_length(r, max(1, _KRONECKER_COLUMNS // r)))
    y = jnp.asarray(scale).astype(dtype) * _zero_from_cotangent(y, carried)
    return y if w is None else y + _multiply(x, w, dtype, precision)


def _over_blocks(add: Callable[..., Any], total: Any, length: int, count: int) -> Any:
    """`add(total, start, count)` for each whole block of `count`, and for what remains at the end."""
    add = jax.checkpoint(add, static_argnums=2)
    total, _ = lax.scan(lambda total, start: (add(total, start, count), None), total, starts(length, count))
    rest = length % count
    return add(total, length - rest, rest) if rest else total


def _zeros(shape: tuple[int, ...], dtype: Any, operands: Any) -> jax.Array:
    """Zeros to add products of `operands` to: inside `jax.shard_map` they vary over the mesh axes of all of them."""
    return sum((jnp.zeros_like(v, dtype, shape=()) for v in operands), jnp.zeros(shape, dtype))


def _multiply(
    x: Float[Array, "tokens k"], w: Float[Array, "k n"], dtype: Any, precision: lax.PrecisionLike
) -> Float[Array, "tokens n"]:
    """x · w in the precision of x, summed in that of `dtype`."""
    y = jnp.matmul(x, w.astype(x.dtype), precision=precision, preferred_element_type=dtype)
    return y.astype(dtype)


@jax.custom_jvp
def _value_of(x: Float[Array, "tokens k"], carried: Float[Array, "tokens k"]) -> Float[Array, "tokens k"]:
    """x, which the derivative keeps; its cotangent goes to `carried`, which equals x."""
    return x


@_value_of.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[1]


@jax.custom_jvp
def _zero_from_cotangent(
    y: Float[Array, "tokens n"], carried: Float[Array, "tokens m"]
) -> Float[Array, "tokens n"]:
    """y; the cotangent of `carried` becomes a zero that is computed from the cotangent of y."""
    return y


@_zero_from_cotangent.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    dy, dx = tangents
    return primals[0], dy.at[:1, :1].add(0 * dx[:1, :1].astype(dy.dtype))
