"""Check the matrices of msign, and bring them to unit norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from muonjax._common.arguments import check_precision, shown
from muonjax._common.linalg import (
    MatrixProduct,
    at_least_float32,
    or_one,
    square_norm,
)
from muonjax._common.power_of_two_scale import power_of_two_scale
from muonjax._newton_schulz.coefficients import Coefficients, polar_express

if TYPE_CHECKING:
    from jaxtyping import Array, Float

CONVERGED: Coefficients = polar_express(11, lower=1e-5)
"""Within 2e-12 of 1 on [1e-5, 1]. A matrix of m rows with condition number 1e3 has its smallest
singular value at 1e-3 / sqrt(m) of its Frobenius norm or above: inside for every m up to 10,000."""


def checked_matrices(x: Any) -> Float[Array, "*batch m n"]:
    """`x` as an array; raises unless it is a stack of real floating-point matrices.

    `errors_of` puts the name of the call before each message: "msign(x) needs a matrix ...".
    """
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
    """Products in the dtype of x, for float16 in float32;
    raises for another precision than JAX has.

    The derivative has entries of size 1 / s for a small singular value s,
    which float16's range can't hold.
    """
    check_precision(precision)
    operands = "float32" if x.dtype == jnp.float16 else x.dtype.name
    return MatrixProduct(operands, precision)


def normalized(
    x: Float[Array, "*batch m n"],
) -> Float[Array, "*batch m n"]:
    """x / |x|_F in float32 or wider; zero for a zero matrix, as is its derivative."""
    x = x.astype(at_least_float32(x.dtype))
    # The square of an entry beyond 1e19 would overflow, so x becomes about 1 first,
    # without rounding.
    x = x * power_of_two_scale(x)
    square = square_norm(x)
    # A root's derivative at 0 would make NaN even where `where` does not choose the root, so
    # `or_one` puts 1 there. A NaN in x is not 0, and stays.
    inverse_norm = jnp.where(square == 0, 0.0, lax.rsqrt(or_one(square)))
    return x * inverse_norm
