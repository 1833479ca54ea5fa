"""Bring matrices to wide orientation and unit Frobenius norm, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from muonjax._linalg import adjoint, at_least_float32, square_norm
from muonjax._newton_schulz.scaling import power_of_two_scale

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def widened(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch short long"]:
    """x as wide matrices, in float32 or wider."""
    wide = adjoint(x) if x.shape[-2] > x.shape[-1] else x
    return wide.astype(at_least_float32(x.dtype))


def normalized(
    x: Float[Array, "*batch m n"],
) -> tuple[Float[Array, "*batch short long"], Float[Array, "*batch 1 1"]]:
    """`widened(x)` over its Frobenius norm, and the inverse of that norm."""
    wide = widened(x)
    scale = power_of_two_scale(wide)
    unit, inverse = unit_norm(wide * scale)
    return unit, scale * inverse


def oriented_like(
    wide: Float[Array, "*batch short long"], x: Float[Array, "*batch m n"]
) -> Float[Array, "*batch m n"]:
    """Undoes `widened`: `wide` in the orientation and dtype of x."""
    return (wide if wide.shape == x.shape else adjoint(wide)).astype(x.dtype)


def inner(x: Float[Array, "*batch m n"], y: Float[Array, "*batch m n"]) -> Float[Array, "*batch 1 1"]:
    """Frobenius inner product of each matrix."""
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


def unit_norm(x: Float[Array, "*batch m n"]) -> tuple[Float[Array, "*batch m n"], Float[Array, "*batch 1 1"]]:
    """x / |x|_F and 1 / |x|_F, both 0 for a zero matrix, so that its value and its gradient are 0."""
    square = square_norm(x)
    # Not `square > 0`: a NaN must take the branch that keeps it.
    inverse = jnp.where(square == 0, jnp.zeros_like(square), lax.rsqrt(jnp.where(square == 0, 1.0, square)))
    return x * inverse, inverse
