"""Divide by an upper bound of the largest singular value, from products that are needed anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from muonjax._linalg import at_least_float32, scaled, square_norm

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact

Normalization = Literal["schatten", "frobenius", "aol", "spectral"]


def normalize(
    x: Inexact[Array, "*batch m n"],
    gram: Inexact[Array, "*batch m m"],
    other_fourth_powers: Float[Array, "*batch 1 1"] | float,
    normalization: Normalization,
    product: Callable[[jax.Array], jax.Array],
) -> tuple[
    Inexact[Array, "*batch m n"],
    Inexact[Array, "*batch m m"],
    Inexact[Array, "*batch m m"] | None,
    Any,
    Float[Array, "*batch 1 1"],
]:
    """Divide the Gram matrix by an upper bound of its largest eigenvalue.

    Args:
      other_fourth_powers: A lower bound of the sum of the fourth powers of all eigenvalues of `gram` except the
        largest; "schatten" subtracts it.

    Returns:
      x (which only "aol" changes), R, the square of R if it is already computed, the factor by which R must still be
      multiplied, and the factor by which x must still be multiplied.
    """

    def or_one(number):  # for the zero matrix, and before a root, which has no derivative at zero
        return jnp.where(number == 0, 1, number)

    def divide(a, bound):
        wide = at_least_float32(a.dtype)
        return (a.astype(wide) / bound.astype(wide)).astype(a.dtype)

    gram2, inverse_bound = None, 1.0
    if normalization == "schatten":
        # ||A||_F first, for a half type can't hold the square of an unscaled A; then ||A^2||_F of what is left.
        schatten4 = jnp.sqrt(or_one(square_norm(gram)))
        gram = divide(gram, schatten4)
        gram2 = product(gram)
        fourth = square_norm(gram2)
        # After deflation, a matrix of rank one is so small that the fourth power of its norm would not be a number.
        other_fourth_powers = jnp.where(
            other_fourth_powers == 0, 0, (jnp.sqrt(jnp.sqrt(or_one(other_fourth_powers))) / schatten4) ** 4
        )
        fourth = jnp.maximum(fourth - other_fourth_powers, fourth / gram.shape[-1])
        schatten8 = jnp.sqrt(jnp.sqrt(or_one(fourth)))
        inverse_bound, bound = 1 / schatten8, schatten4 * schatten8
    elif normalization == "aol":
        rows = jax.lax.rsqrt(or_one(jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)))
        x, gram = scaled(x, rows), scaled(scaled(gram, rows), rows.mT)
        bound = jnp.ones_like(rows[..., :1, :])
    elif normalization == "frobenius":
        bound = or_one(jnp.trace(gram, axis1=-2, axis2=-1).real[..., None, None])
        gram = divide(gram, bound)
    else:
        bound = or_one(jnp.linalg.eigvalsh(gram)[..., -1:, None])
        gram = divide(gram, bound)
    return x, gram, gram2, inverse_bound, jax.lax.rsqrt(bound)
