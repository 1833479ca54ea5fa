"""Beside the way, for models that orthogonalize: products of matrices, their norms and their orientation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._newton_schulz.scaling import power_of_two_scale


class Arithmetic(NamedTuple):
    """How products are taken: hashable, so that it can ride along as a static argument."""

    operands: str
    """Dtype that the factors are rounded to; sums stay in the dtype of the arrays."""
    precision: str | None
    """`precision` of `jax.lax.dot_general`."""

    @classmethod
    def of(cls, x: jax.Array, precision: str | None) -> "Arithmetic":
        """That of x's own dtype; but float32 for float16, whose range can't hold the derivative's 1 / s."""
        return cls("float32" if x.dtype == jnp.float16 else x.dtype.name, precision)

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a @ b over leading batch axes."""
        return self._contract("...ik,...kj->...ij", a, b)

    def with_transpose(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a @ b^T, contracting last axes: XLA would materialise a swapped copy of a batch."""
        return self._contract("...ik,...jk->...ij", a, b)

    def _contract(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        rounded = a.astype(self.operands), b.astype(self.operands)
        return jnp.einsum(subscripts, *rounded, precision=self.precision, preferred_element_type=a.dtype)


def transpose(x: jax.Array) -> jax.Array:
    """Swaps the last two axes."""
    return jnp.swapaxes(x, -1, -2)


def twice_symmetric(x: jax.Array) -> jax.Array:
    """x + x^T."""
    return x + transpose(x)


def add_identity(x: jax.Array, a: jax.Array) -> jax.Array:
    """x + a I."""
    return x + a * jnp.eye(x.shape[-1], dtype=x.dtype)


def inner(x: jax.Array, y: jax.Array) -> jax.Array:
    """Frobenius inner product of each matrix, as [*batch, 1, 1]."""
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


@jax.custom_jvp
def unit_norm(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x / |x|_F and 1 / |x|_F, both 0 where x is 0, so that value and gradient are 0 there."""
    square = inner(x, x)
    # Not `square > 0`: a NaN must take the branch that keeps it.
    inverse = jnp.where(square == 0, jnp.zeros_like(square), lax.rsqrt(jnp.where(square == 0, 1.0, square)))
    return x * inverse, inverse


@unit_norm.defjvp
def _unit_norm_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    unit, inverse = unit_norm(x)
    radial = inner(unit, dx)
    # In terms of `unit` alone, so that x itself is no residual.
    return (unit, inverse), (inverse * (dx - unit * radial), -inverse * inverse * radial)


def widened(x: jax.Array) -> jax.Array:
    """x as wide matrices, in float32 or wider."""
    wide = transpose(x) if x.shape[-2] > x.shape[-1] else x
    return wide.astype(jnp.promote_types(x.dtype, jnp.float32))


def normalized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`widened` x over its Frobenius norm, and the inverse of that norm."""
    wide = widened(x)
    scale = power_of_two_scale(wide)
    unit, inverse = unit_norm(wide * scale)
    return unit, scale * inverse


def oriented_like(wide: jax.Array, x: jax.Array) -> jax.Array:
    """Undoes `widened`: `wide` in the orientation and dtype of x."""
    return (wide if wide.shape == x.shape else transpose(wide)).astype(x.dtype)
