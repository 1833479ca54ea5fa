"""The power of two that brings the largest entry of a matrix below 1,
so that its products don't overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact


def power_of_two_scale(
    x: Inexact[Array, "*batch m n"],
) -> Float[Array, "*batch 1 1"]:
    """The power of two that brings the largest entry of each matrix into [0.5, 1), by which
    multiplying is exact.

    The entries of complex matrices are their real and imaginary parts. A matrix whose largest entry
    is zero, subnormal (products take it for zero), inf or NaN gets 1/2. An entry above a quarter of
    the dtype's largest number comes to [1, 4) only, since the power that brings it lower is a
    subnormal number. The scale is a constant for differentiation (`largest_entry` stops the
    gradient): the callers' results do not depend on it, but for rounding.

    Args:
      x: Matrices in float32, float64 or complex; the callers cast half types to float32.
    """
    return scale_of_largest(largest_entry(x))


def scale_of_largest(
    largest: Float[Array, "*batch 1 1"],
) -> Float[Array, "*batch 1 1"]:
    """The power of two that brings a largest absolute entry into [0.5, 1).

    It is 1/2 for what is no normal number, and entries close to overflow end in [1, 4).
    """
    info = jnp.finfo(largest.dtype)
    # Zero, subnormal numbers, inf and NaN are taken for 1, which gives 1/2.
    is_normal = (largest >= info.tiny) & (largest < jnp.inf)
    largest = jnp.where(is_normal, largest, 1.0)
    # By bits alone: `ldexp` and `frexp` are a page of code, compiled into everything that reads x.
    bits = jax.lax.bitcast_convert_type(largest, f"int{info.bits}")
    # The bits of a positive number are those of an exponent e, and then `nmant` bits of fraction;
    # without a fraction it is 2^(e - bias). A number in [2^(e - bias), 2^(e - bias + 1)) times
    # 2^(bias - 1 - e) is in [0.5, 1). That power has the exponent 2 bias - 1 - e, in float32
    # 253 - e. Exponents of normal numbers begin at 1: for the two largest e, 253 and 254, the
    # exponent is 1 too, and their entries end in [1, 2) and [2, 4).
    bias = info.maxexp - 1  # 127 in float32
    exponent = jnp.maximum(2 * bias - 1 - (bits >> info.nmant), 1)
    return jax.lax.bitcast_convert_type(exponent << info.nmant, largest.dtype)


def largest_entry(
    x: Inexact[Array, "*batch m n"],
) -> Float[Array, "*batch 1 1"]:
    """The largest absolute value of each matrix (complex: of real and imaginary parts);
    a constant to derivatives."""
    x = jax.lax.stop_gradient(x)
    entries = jnp.abs(x.real)
    if jnp.iscomplexobj(x):
        # The larger part of a complex entry, because its absolute value can overflow.
        entries = jnp.maximum(entries, jnp.abs(x.imag))
    return jnp.max(entries, axis=(-2, -1), keepdims=True)
