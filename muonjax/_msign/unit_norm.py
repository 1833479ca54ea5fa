"""Bring matrices to wide orientation and unit norm, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._common.linalg import adjoint, at_least_float32, square_norm
from muonjax._newton_schulz.normalization import power_of_two_scale

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def widened(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch short long"]:
    """x as wide matrices, in float32 or wider."""
    wide = adjoint(x) if x.shape[-2] > x.shape[-1] else x
    return wide.astype(at_least_float32(x.dtype))


def normalized(
    x: Float[Array, "*batch m n"], square: Callable[[jax.Array], jax.Array] = square_norm
) -> tuple[Float[Array, "*batch short long"], Float[Array, "*batch 1 1"]]:
    """`widened(x)` over its norm, and the inverse of that norm, as `unit_norm`."""
    wide = widened(x)
    scale = power_of_two_scale(wide)
    unit, inverse = unit_norm(wide * scale, square)
    return unit, scale * inverse


def oriented_like(
    wide: Float[Array, "*batch short long"], x: Float[Array, "*batch m n"]
) -> Float[Array, "*batch m n"]:
    """Undoes `widened`: `wide` in the orientation and dtype of x."""
    return (wide if wide.shape == x.shape else adjoint(wide)).astype(x.dtype)


def inner(x: Float[Array, "*batch m n"], y: Float[Array, "*batch m n"]) -> Float[Array, "*batch 1 1"]:
    """Frobenius inner product of each matrix."""
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


def unit_norm(
    x: Float[Array, "*batch m n"], square: Callable[[jax.Array], jax.Array] = square_norm
) -> tuple[Float[Array, "*batch m n"], Float[Array, "*batch 1 1"]]:
    """x / r and 1 / r with r^2 = `square(x)`, |x|_F^2 by default; both 0 for a zero matrix, as are their gradients."""
    is_zero = jnp.all(x == 0, axis=(-2, -1), keepdims=True)
    # Not `square > 0`: a NaN must take the branch that keeps it, and a square that is none becomes one.
    inverse = jnp.where(is_zero, 0.0, lax.rsqrt(jnp.where(is_zero, 1.0, square(x))))
    return x * inverse, inverse
