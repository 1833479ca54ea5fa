r"""Run the Newton-Schulz iteration on accelerators,
with the operands of all products in half precision.

X is sqrt(u) z and its Gram matrix R = X X^H is u r, with z and r in half precision and a number u.
A step maps X to P X with P = a I + b R + c R^2. After P is known there are two ways to the next
step:

    restart:  z <- P z,   r <- z z^H    two products with z [m, n]
    update:   Q <- P Q,   r <- P r P    three products of m x m, and z <- Q z before a restart

The standard form restarts at each step. Updates are cheaper where n > 1.5 m, but rounding makes r
slightly indefinite, and they multiply that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from muonjax._common.linalg import (
    MatrixProduct,
    hermitian_part,
    or_one,
    square_norm,
    square_of_any_size,
)
from muonjax._common.platform_policy import Policy
from muonjax._newton_schulz.coefficients import parts_of
from muonjax._newton_schulz.composed_steps import composed
from muonjax._newton_schulz.settings import NewtonSchulz
from pallas_kernels._symmetric_product import SymmetricProduct, measured_kernel

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32

# |z|_F at the start. Entries of the first r are at most its square, and those of r^2 at most its
# fourth power, 4096: far enough from 65504, where float16 ends, and from 6e-5, below which float16
# loses digits. Polynomials that bring X far above 1 in between overflow it.
_NORM = 8.0

# The bound of the largest eigenvalue is too low by rounding where entries are equal, so that their
# errors do not average out, and for a matrix of rank one it has no other margin. The first
# polynomial multiplies an excess by 24. This multiplies the fourth power of the bound.
ABOVE_ROUNDING = 1.05

# Updates may multiply an error in r by this number; bfloat16 rounds r eight times as coarsely as
# float16. The third and fourth of the five steps of `balanced` multiply it by 75, the fourth alone
# by 6; after the last step no r is needed.
# With 1200 in float16 a singular value of 1.28 came out of a hostile matrix, and with 80 in
# bfloat16, which would leave `balanced` one restart of three, one of 78.
LARGEST_GROWTH = {"float16": 200.0, "bfloat16": 10.0}


def iterate(
    x: Float[Array, "*batch m n"],
    settings: NewtonSchulz,
    policy: Policy,
    dtype: jnp.dtype,
) -> Float32[Array, "*batch m n"]:
    """The polar factor of x with m <= n, nearly, by products of operands in `dtype`:
    float16 or bfloat16. The letters are those at the top of this file."""
    rows = settings.steps.half
    # Operands and results in `dtype`, sums in float32
    multiply = MatrixProduct(dtype.name, None, dtype.name)
    # (A, Y) -> A Y^H, known to be Hermitian; Y is A by default. A kernel that the settings name
    # always runs, and otherwise one that was measured to be faster. XLA's product is not mirrored:
    # it is asymmetric by less than the rounding of its entries.
    product = multiply.with_adjoint
    name = settings.implementation or measured_kernel(policy.platform, x, dtype)
    if name:
        product = SymmetricProduct(policy.platform, name)
    # In the standard form r is made anew before each step.
    m, n = x.shape[-2:]
    growth = LARGEST_GROWTH[dtype.name]
    first, *others = parts_of(rows, growth if settings.takes_gram_form(m, n) else 0)

    # z [*batch, m, n] is x times a number, so that |z|_F = _NORM. The factor, a power of two, comes
    # first: with it the sum of squares neither overflows nor underflows. Zeros stay zeros.
    x = x.astype(jnp.float32)
    factor, square = square_of_any_size(x, square_norm)
    z = factor * x * (_NORM * jax.lax.rsqrt(or_one(square)))
    # Without a barrier XLA would compute z again for each operation that reads it.
    z = jax.lax.optimization_barrier(z.astype(dtype))
    # The first steps have the largest factors, and amplify what makes r asymmetric. So this r is
    # made exactly symmetric; later ones meet smaller factors, and are not.
    r = hermitian_part(product(z))
    # r^2 is made for `_bound`, which is above the largest eigenvalue of r,
    # and serves the first step.
    r2 = product(r)
    # So no eigenvalue of R = u r, and no singular value of X = sqrt(u) z, is above 1.
    u = 1 / _bound(r2, settings)

    # z <- Q z for the steps of each part
    z = multiply(composed(first, r, r2, product, u), z)
    for part in others:
        z = multiply(composed(part, product(z), None, product, u), z)
    return jnp.sqrt(u) * z.astype(jnp.float32)


def _bound(
    r2: Float[Array, "*batch m m"], settings: NewtonSchulz
) -> Float32[Array, "*batch 1 1"]:
    """At least the largest eigenvalue of r: its Schatten-4 norm |r^2|_F^(1/2), or its trace."""
    fourth_powers = or_one(square_norm(r2))
    if settings.normalization == "frobenius":
        # The trace of r is |z|_F^2, which is known.
        fourth_powers = jnp.full_like(fourth_powers, _NORM**8)
    return (ABOVE_ROUNDING * fourth_powers) ** 0.25
