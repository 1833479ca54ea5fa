r"""Run the Newton-Schulz iteration on accelerators,
with the operands of all products in half precision.

A step maps X to p(X) = a X + (b R + c R^2) X with R = X X^H, which is a (1 + Q) X with

    Q = (b / a) R + (c / a) R^2.

After Q is known there are two ways to the next step, here with X = sqrt(u) z and R = u r,
u being a number:

    restart:  z <- a (1 + Q) z,          r <- z z^H                   two products with z [m, n]
    update:   1 + T <- (1 + Q) (1 + T),  r <- a^2 (1 + Q) r (1 + Q)   three products of m x m

The standard form restarts at each step. Updates are cheaper where n > 1.5 m, but rounding makes r
slightly indefinite, and they multiply that. The identity is never added to a matrix before that is
rounded: the errors of Q and T are then relative to Q and T,
and a step multiplies them no more than it multiplies X.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from muonjax._common.linalg import (
    MatrixProduct,
    hermitian_part,
    on_diagonal,
    or_one,
    square_norm,
    square_of_any_size,
)
from muonjax._common.platform_policy import Policy
from muonjax._newton_schulz.coefficients import Coefficients, restarts_of
from muonjax._newton_schulz.settings import NewtonSchulz
from pallas_kernels._symmetric_product import SymmetricProduct, measured_kernel

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32

# Keeps XLA from fusing what is before it with what is after it.
_barrier = jax.lax.optimization_barrier

# |z|_F at the start. Entries of r are at most its square, and those of r^2 at most its fourth
# power, 4096: far enough from 65504, where float16 ends, and from 6e-5,
# below which float16 loses digits.
_NORM = 8.0

# The bound of the largest eigenvalue is too low by rounding where entries are equal, so that their
# errors do not average out, and for a matrix of rank one it has no other margin. The first
# polynomial multiplies an excess by 24. This multiplies the fourth power of the bound.
ABOVE_ROUNDING = 1.05

# Updates may multiply an error in r by this number; bfloat16 rounds r eight times as coarsely as
# float16. The last three steps of `balanced` multiply it by 76, the last step but one alone by 6.
# With 225 in float16 a singular value of 1.25 came out of a hostile matrix, and with 4000 one of
# 36; with 25 in bfloat16 one of 5.5.
LARGEST_GROWTH = {"float16": 200.0, "bfloat16": 10.0}


def iterate(
    x: Float[Array, "*batch m n"],
    settings: NewtonSchulz,
    policy: Policy,
    dtype: jnp.dtype,
) -> Float32[Array, "*batch m n"]:
    """The polar factor of x with m <= n, nearly, by products of operands in `dtype`:
    float16 or bfloat16.

    X is sqrt(u) z and its Gram matrix R is u r, with z and r in half precision and a number u. A
    step maps X to a X + (b R + c R^2) X = a (1 + Q) X. Between restarts only r becomes that of the
    new X (see the top of this file).
    """
    rows = settings.steps.half
    # Q is divided by a.
    if any(a == 0 for a, _, _ in rows):
        raise ValueError(
            "NewtonSchulz(coefficients=...): in half precision each step needs a linear term; "
            "give compute_dtype='float32'."
        )
    # A kernel that the settings name always runs, and otherwise one that was measured to be faster.
    # Without a kernel, XLA's product of rounded operands is all that is needed.
    platform = policy.platform
    name = settings.implementation or measured_kernel(platform, x, dtype)
    kernel = SymmetricProduct(platform, name) if name else None
    # Operands and results in `dtype`
    products = _Products(MatrixProduct(dtype.name, None, dtype.name), kernel)
    # Before each of these steps r is made anew from z, before each other one it is updated. The
    # standard form never updates it.
    restarts = range(1, len(rows))
    if settings.takes_gram_form(*x.shape[-2:]):
        restarts = restarts_of(rows, LARGEST_GROWTH[dtype.name])

    # z [*batch, m, n] is x times a number, so that |z|_F = _NORM, and in half precision from here
    # on. Zeros stay zeros.
    x = _wide(x)
    factor, square = square_of_any_size(x, square_norm)
    z = factor * x * (_NORM * jax.lax.rsqrt(or_one(square)))
    z = _barrier(z.astype(dtype))
    # An r that is not exactly symmetric is amplified by the first steps,
    # whose factors are the largest.
    r = hermitian_part(products.symmetric(z))
    # r^2 is made for `_bound`, which is above the largest eigenvalue of r,
    # and serves the first step.
    r2 = products.symmetric(r)
    # So no eigenvalue of R = u r, and no singular value of X = sqrt(u) z, is above 1.
    u = 1 / _bound(r2, settings)

    # The steps up to the first restart map z to gain (1 + T) z, where `total` is T;
    # then those up to the next one do.
    stops = [*restarts, len(rows)]
    gain, total = _composed(rows[: stops[0]], r, r2, u, products)
    for start, stop in itertools.pairwise(stops):
        # z <- gain (1 + T) z, and r <- z z^H
        z = (gain * (_wide(z) + _wide(products.rounded(total, z)))).astype(z.dtype)
        # Or XLA would keep all that z is made of for its later uses.
        z = _barrier(z)
        r = products.symmetric(z)
        gain, total = _composed(rows[start:stop], r, None, u, products)

    # After the last steps X = sqrt(u) gain (1 + T) z. No step follows that would multiply an error
    # of this map, so 1 + T may be rounded as a whole, with its numbers.
    total = _wide(total)
    # 1 + T
    total = jnp.where(on_diagonal(total), total + 1, total)
    last = (gain * jnp.sqrt(u) * total).astype(z.dtype)
    # A stack's result is cut into leaves, and in half precision that moves half as much.
    return _wide(products.rounded(last, z))


def _composed(
    rows: Coefficients,
    r: Float[Array, "*batch m m"],
    r2: Float[Array, "*batch m m"] | None,
    u: Float32[Array, "*batch 1 1"],
    products: _Products,
) -> tuple[float, Float[Array, "*batch m m"]]:
    """The number g and T with which the steps of all rows map z to g (1 + T) z, from r = z z^H,
    and r^2 if that is made.

    X is sqrt(u) z, and so its Gram matrix u r. A step is a (1 + Q) with
    Q = (b / a) u r + (c / a) u^2 r^2. The number u normalizes the first X, and stays. It is known
    only after the first z and r have been rounded, and is a factor of the coefficients, so that
    they are not rounded again. g is the product of all a, a Python number.
    """
    # `products.symmetric(A, Y, C)` is alpha A Y + beta C, where Y is A and both numbers are 1 by
    # default.
    gain = 1.0
    # T, None for 0
    total: Any = None
    for step, (a, b, c) in enumerate(rows, 1):
        if r2 is not None:
            # The same Q as below, from the r^2 that `_bound` needed and that is rounded already. In
            # float32 no order of the factors overflows.
            linear = b / a * u * _wide(r)
            quadratic = c / a * u * (u * _wide(r2))
            q = (linear + quadratic).astype(r.dtype)
        else:
            q = products.symmetric(r, c=r, alpha=c / a * u**2, beta=b / a * u)
        # Both r and T are multiplied by q below. XLA for GPUs would join products that share q, and
        # copy r and T side by side: so each product gets q from a barrier of its own.
        q = _barrier(q)
        if step < len(rows):
            # r <- a^2 (1 + Q) r (1 + Q), where `once` is (1 + Q) r
            once = products.symmetric(q, r, c=r)
            r = products.symmetric(once, q, c=once, alpha=a**2, beta=a**2)
            r2 = None
        # 1 + T <- (1 + Q) (1 + T), so T <- Q T + T + Q
        total = (
            q if total is None else products.symmetric(_barrier(q), total, total + q)
        )
        gain *= a
    return gain, total


def _bound(
    r2: Float[Array, "*batch m m"], settings: NewtonSchulz
) -> Float32[Array, "*batch 1 1"]:
    """At least the largest eigenvalue of r: its Schatten-4 norm |r^2|_F^(1/2), or its trace."""
    fourth_powers = or_one(square_norm(r2))
    if settings.normalization == "frobenius":
        # The trace of r is |z|_F^2, which is known.
        fourth_powers = jnp.full_like(fourth_powers, _NORM**8)
    return (ABOVE_ROUNDING * fourth_powers) ** 0.25


def _wide(a: jax.Array) -> jax.Array:
    """A in float32, as numbers multiply it."""
    return a.astype(jnp.float32)


class _Products(NamedTuple):
    """Products in half precision, each summed in float32 and rounded once.

    Attributes:
      rounded: Makes products that are rounded to half precision.
      by_kernel: Makes symmetric products, mirrored, if a kernel is named or chosen.
    """

    rounded: MatrixProduct
    by_kernel: SymmetricProduct | None

    def symmetric(
        self,
        a: jax.Array,
        y: jax.Array | None = None,
        c: jax.Array | None = None,
        alpha: float | jax.Array = 1.0,
        beta: float | jax.Array = 1.0,
    ) -> jax.Array:
        """alpha A Y^H + beta C, or A Y^H without C. By default Y is A, [*batch, m, n]; otherwise
        both are Hermitian, [*batch, m, m], and commute. So the product is Hermitian.

        Without a kernel the product is not mirrored: it is asymmetric by less than the rounding of
        its entries.

        `alpha` and `beta` are both numbers, or both [*batch, 1, 1]. Without C both have to be 1, as
        a product without a kernel does not take them.
        """
        # `by_kernel` makes the whole of it, with the numbers, and with C if there is one, and
        # mirrors it.
        if self.by_kernel is not None:
            return self.by_kernel(a, y, c, alpha, beta)
        # A Y^H, rounded to half precision
        product = self.rounded.with_adjoint(a, a if y is None else y)
        if c is None:
            return product
        # A library of matrix products adds C in the product itself,
        # if no number and no other dtype is between them.
        if isinstance(alpha, float) and alpha == beta == 1.0:
            return product + c
        # The sum is taken in float32, and rounded once more.
        return (alpha * _wide(product) + beta * _wide(c)).astype(product.dtype)
