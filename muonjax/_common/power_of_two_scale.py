"""The power of two that brings the largest entry of a matrix below 1, so that its products don't overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact


def power_of_two_scale(
    x: Inexact[Array, "*batch m n"],
) -> Float[Array, "*batch 1 1"]:
    """The power of two that brings the largest entry of each matrix into [0.5, 1).

    Multiplying by it is exact. Zero (and what counts as zero in every product: subnormal numbers), inf and NaN take
    1/2, as the number 1 does. An entry above a quarter of the dtype's largest number comes to [1, 4) only, since the
    power that brings it lower is a subnormal number. A constant for differentiation: what follows is invariant to
    positive scaling.

    Args:
      x: Matrices in float32, float64 or complex.
    """
    return scale_of_largest(largest_entry(x))


def scale_of_largest(
    largest: Float[Array, "*batch 1 1"],
) -> Float[Array, "*batch 1 1"]:
    """The power of two that brings a largest entry into [0.5, 1), with the exceptions of `power_of_two_scale`."""
    info = jnp.finfo(largest.dtype)
    # Zero, subnormal numbers, inf and NaN count as 1.
    is_normal = (largest >= info.tiny) & (largest < jnp.inf)
    largest = jnp.where(is_normal, largest, 1.0)
    # By bits alone: `ldexp` and `frexp` are a page of code, compiled into everything that reads x.
    bits = jax.lax.bitcast_convert_type(
        largest, jnp.int32 if info.bits == 32 else jnp.int64
    )
    # A number in [2^(e - bias), 2^(e - bias + 1)) has the bits of e before its `nmant` bits of fraction. The result
    # 2^(bias - 1 - e) has 2 bias - 1 - e there, and no fraction. It is a normal number, whose exponent is 1 or more, so
    # that entries of the two largest binades end below 2 and 4.
    bias = info.maxexp - 1
    exponent = jnp.maximum(2 * bias - 1 - (bits >> info.nmant), 1)
    return jax.lax.bitcast_convert_type(exponent << info.nmant, largest.dtype)


def largest_entry(
    x: Inexact[Array, "*batch m n"],
) -> Float[Array, "*batch 1 1"]:
    """The largest absolute value of each matrix (complex: of real and imaginary parts); a constant to derivatives."""
    x = jax.lax.stop_gradient(x)
    entries = jnp.abs(x.real)
    if jnp.iscomplexobj(x):
        # The larger part of a complex entry, because its absolute value can overflow.
        entries = jnp.maximum(entries, jnp.abs(x.imag))
    return jnp.max(entries, axis=(-2, -1), keepdims=True)
