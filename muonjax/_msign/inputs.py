"""Check the matrices of msign, and bring them to unit norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from muonjax._common.arguments import check_precision, shown
from muonjax._common.linalg import MatrixProduct, at_least_float32, square_norm
from muonjax._common.power_of_two_scale import power_of_two_scale
from muonjax._newton_schulz.coefficients import Coefficients, polar_express

if TYPE_CHECKING:
    from jaxtyping import Array, Float

CONVERGED: Coefficients = polar_express(11, lower=1e-5)
"""Within 2e-12 of 1 on [1e-5, 1]. A matrix of m rows with condition number 1e3 has its smallest singular
value at 1e-3 / sqrt(m) of its Frobenius norm or above: inside for every m up to 10,000."""


def matrices(x: Any) -> Float[Array, "*batch m n"]:
    """`x` as an array, if it is a stack of real floating-point matrices."""
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"(x={shown(x)}) must be an array [*batch, m, n].") from error
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"(x) needs a real floating-point matrix, got dtype {x.dtype}; "
            "cast it, or take the real form [[re, -im], [im, re]] of a complex one."
        )
    if x.ndim < 2:
        raise ValueError(f"(x) needs a matrix [*batch, m, n], got shape {x.shape}.")
    return x


def product_of(x: Float[Array, "*batch m n"], precision: str | None) -> MatrixProduct:
    """Products in the dtype of x; for float16, whose range can't hold the derivative's 1 / s, in float32."""
    check_precision(precision)
    operands = "float32" if x.dtype == jnp.float16 else x.dtype.name
    return MatrixProduct(operands, precision)


def rows_beside(
    x: Float[Array, "*batch m n"], coefficients: Coefficients
) -> Float[Array, "steps 3"]:
    """The coefficients (a, b, c) of all steps as an array, float32 or wider, to iterate on x.

    Inside `jax.shard_map` it varies over the same mesh axes as x. `lax.custom_linear_solve` needs that: it makes all
    arrays that its functions close over vary in the same way, after tracing these functions with what each was before.
    """
    dtype = at_least_float32(x.dtype)
    # A scalar that varies over the mesh axes of x.
    varying_zero = jnp.zeros_like(x, dtype, shape=())
    return jnp.asarray(coefficients, dtype) + varying_zero


def normalized(
    x: Float[Array, "*batch m n"],
) -> Float[Array, "*batch m n"]:
    """x with Frobenius norm 1, in float32 or wider; zero matrices stay zero."""
    x = x.astype(at_least_float32(x.dtype))
    # The square of an entry beyond 1e19 would overflow, so x becomes about 1 first, without rounding.
    x = x * power_of_two_scale(x)
    return x * _inverse_norm(x)


def _inverse_norm(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch 1 1"]:
    """1 / |x|_F of each matrix; 0 for a zero matrix, as is its gradient."""
    # `square > 0` would also hide a NaN, which has to stay in the result.
    is_zero = jnp.all(x == 0, axis=(-2, -1), keepdims=True)
    # The square of a zero matrix is replaced before the root, whose gradient at 0 is a NaN even where it is not chosen.
    nonzero_square = jnp.where(is_zero, 1.0, square_norm(x))
    return jnp.where(is_zero, 0.0, lax.rsqrt(nonzero_square))
