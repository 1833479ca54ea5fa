"""Scale a matrix exactly, by a power of two, so that no product of it overflows or underflows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from muonjax._linalg import scaled

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Inexact


def below_one(
    x: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...] = ()
) -> tuple[Inexact[Array, "*batch m n"], Bool[Array, "*batch 1 1"]]:
    """x with entries below 1, and whether it is not zero.

    A zero matrix passes as the identity, for its result is to be multiplied by zero: derivatives at zero overflow. The
    identity is added, for XLA's maximum on a CPU can lose a NaN among zeros, which must stay.
    """
    largest = largest_entry(x, axis_name)
    nonzero = largest != 0
    other = jnp.expand_dims(jnp.eye(*x.shape[-2:], dtype=x.dtype), tuple(range(x.ndim - 2)))
    return jnp.where(nonzero, scaled(x, scale_of_largest(largest)), x + other), nonzero


def power_of_two_scale(
    x: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...] = ()
) -> Float[Array, "*batch 1 1"]:
    """The power of two that brings the largest entry of each matrix into [0.5, 1).

    Multiplying by it is exact. Zero (and what counts as zero in every product: subnormal numbers), inf and NaN take
    the scale of 1. The two largest binades of the dtype end below 4, for what would bring them lower is no normal
    number. A constant for differentiation: what follows is invariant to positive scaling.

    Args:
      x: Of float32, float64 or complex.
      axis_name: Mesh axes over which each matrix is cut.
    """
    return scale_of_largest(largest_entry(x, axis_name))


def scale_of_largest(largest: Float[Array, "*batch 1 1"]) -> Float[Array, "*batch 1 1"]:
    """The power of two that brings a matrix's largest entry into [0.5, 1); see `power_of_two_scale`."""
    info = jnp.finfo(largest.dtype)
    largest = jnp.where((largest >= info.tiny) & (largest < jnp.inf), largest, jnp.ones_like(largest))
    bits = lax.bitcast_convert_type(largest, jnp.int32 if info.bits == 32 else jnp.int64)
    # Of bits alone: `ldexp` and `frexp` are a page of code, compiled into everything that reads x.
    bias = info.maxexp - 1
    exponent = jnp.maximum(2 * bias - 1 - (bits >> info.nmant), 1)
    return lax.bitcast_convert_type(exponent << info.nmant, largest.dtype)


def largest_entry(
    x: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...] = ()
) -> Float[Array, "*batch 1 1"]:
    """The largest absolute value of each matrix (complex: of real and imaginary parts); a constant to derivatives."""
    x = lax.stop_gradient(x)
    # Of a complex entry the larger part, for its absolute value can overflow.
    entries = jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)) if jnp.iscomplexobj(x) else jnp.abs(x)
    largest = jnp.max(entries, axis=(-2, -1), keepdims=True)
    return lax.pmax(largest, axis_name) if axis_name else largest
