r"""Polar Express in float32: a matrix becomes nearly orthogonal, by matrix products alone.

With m <= n and R = X X^H [m, m], a step is a polynomial of all singular values of X at once,

    X <- (a I + b R + c R^2) X,    each s <- a s + b s^3 + c s^5.

The standard form makes R anew for each step. The Gram form follows R through several steps
and multiplies X once at their end: cheaper where n > 1.5 m, but rounding makes R slightly
indefinite, and polynomials multiply that until R is made anew.

Before the first step the singular values are brought into (0, 1], by products that are needed
anyway. First X is scaled exactly, by a power of two, so that no product of it overflows or
underflows; then it is divided by an upper bound of its largest singular value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from muonjax._common.linalg import (
    MatrixProduct,
    or_one,
    scaled,
    square_norm,
)
from muonjax._common.platform_policy import Policy
from muonjax._common.power_of_two_scale import largest_entry, scale_of_largest
from muonjax._newton_schulz.coefficients import parts_of
from muonjax._newton_schulz.composed_steps import composed
from muonjax._newton_schulz.deflation import (
    ROUNDING,
    Deflation,
    other_fourth_powers,
    pre_deflate,
    shrink_dominant,
)
from muonjax._newton_schulz.settings import NewtonSchulz, Normalization
from pallas_kernels._symmetric_product import SymmetricProduct
from pallas_kernels._xla_workarounds import materialize

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Inexact


# Rounding leaves errors of `ROUNDING` eps in R, and the updates of R may bring them to 1e-2. So
# they may multiply an error by this number over eps.
GROWTH_TIMES_EPS = 1e-2 / ROUNDING


def iterate(
    x: Inexact[Array, "*batch m n"],
    settings: NewtonSchulz,
    policy: Policy,
    dtype: jnp.dtype,
) -> Inexact[Array, "*batch m n"]:
    """The polar factor of X, nearly, with products in `dtype`: float32 or wider.

    Args:
      x: m <= n, at any scale and of any float type.
      settings: The polynomials and their form.
      policy: The policy for the device.
      dtype: The dtype of the products.
    """
    m, n = x.shape[-2:]
    # `rank` directions are shrunk before the steps, none if it is 0.
    rows, rank = settings.in_full_precision(m)
    # R = X X^H is made anew before each step in the standard form, and in the Gram form only before
    # those where an error of R, `ROUNDING` eps in a new R, would grow beyond 1e-2.
    growth = GROWTH_TIMES_EPS / float(jnp.finfo(dtype).eps)
    first, *others = parts_of(rows, growth if settings.takes_gram_form(m, n) else 0)
    multiply = MatrixProduct(dtype.name)
    product = SymmetricProduct(policy.platform, settings.implementation)

    # Scaled by a power of two, so that no product overflows. A zero matrix becomes the identity,
    # and gets 0 below.
    x, nonzero = below_one(x, dtype)
    if rank and (len(first) > 1 or not others):
        # Unless R is made anew after the first step, as in the standard form, its rounding stays,
        # in which eigenvalues far below the largest are lost. So the largest are shrunk in X before
        # R is made: eight at most, for products with X take long. All `rank` of them are shrunk in
        # R, below. `materialize`, as XLA for a CPU would compute this X again for each reader.
        x = materialize(lambda x: pre_deflate(x, rank), x, policy.platform)

    # The first part of the steps maps s W X to Q s W X. W deflates, and s, a number for each
    # matrix, normalizes. R = X X^H [*batch, m, m]
    r = product(x)
    deflation = None
    if rank:
        # W X has the polar factor of X, nearly, and W R W is its Gram matrix.
        squares = jnp.sum(jnp.abs(x) ** 2, -1)
        deflation = shrink_dominant(r, squares, rank, policy.platform)
        r = deflation.gram
    # From here on R is the Gram matrix of s W X. R^2, if the bound needed it, also
    # serves the first step.
    r, r2, scale = normalize(r, deflation, settings.normalization, product)
    q = composed(first, r, r2, product)
    # Q s, and then Q s W: X itself was neither normalized nor deflated. A matrix that was zero
    # gets 0.
    q = scaled(q, jnp.where(nonzero, scale, 0))
    if deflation is not None:
        q = deflation.apply_right(q)
    x = multiply(q, x)
    # X <- Q X for the steps of each other part, which share the R that is made of this X.
    for part in others:
        x = multiply(composed(part, product(x), None, product), x)
    return x


def below_one(
    x: Inexact[Array, "*batch m n"], dtype: jnp.dtype
) -> tuple[Inexact[Array, "*batch m n"], Bool[Array, "*batch 1 1"]]:
    """x in `dtype`, each matrix times the power of two that brings its entries below 1; and which
    matrices are not zero, [*batch, 1, 1].

    A matrix of zeros becomes the identity, because derivatives at zero overflow; the caller
    multiplies the result by zero. The identity is added to it: XLA's maximum on a CPU can lose a
    NaN among zeros, so that such a matrix counts as zero, and the NaN must stay.
    """
    x = x.astype(dtype)
    # [*batch, 1, 1]; NaN is not equal to zero.
    largest = largest_entry(x)
    nonzero = largest != 0
    identity = jnp.broadcast_to(jnp.eye(*x.shape[-2:], dtype=dtype), x.shape)
    below = scaled(x, scale_of_largest(largest))
    return jnp.where(nonzero, below, x + identity), nonzero


def normalize(
    gram: Inexact[Array, "*batch m m"],
    deflation: Deflation | None,
    normalization: Normalization,
    product: SymmetricProduct,
) -> tuple[jax.Array, jax.Array | None, Float[Array, "*batch 1 1"]]:
    """R, R^2 and s for the Gram matrix A of X: R = s^2 A has no eigenvalue above 1, and s X no
    singular value. R^2 is None for "frobenius", which does not need it.

    1 / s^2 is an upper bound of A's largest eigenvalue: its trace ("frobenius"), or its Schatten-4
    norm. With B = A / ||A||_F, no eigenvalue of B is above ||B^2||_F^(1/2), and ||B^2||_F^2 is the
    sum of the fourth powers of B's eigenvalues.

    After a deflation A is `deflation.gram`, and X stands for W X: the directions are shrunk
    already. A part of the sum is then known to come from others than the largest eigenvalue, and is
    subtracted; at least 1/m of the sum belongs to the largest.
    """
    if normalization == "frobenius":
        # tr(A) = |X|_F^2. Only an X of subnormal numbers may have 0, for which `or_one` puts 1.
        trace = jnp.trace(gram, axis1=-2, axis2=-1).real[..., None, None]
        inverse_trace = 1 / or_one(trace)
        return scaled(gram, inverse_trace), None, jnp.sqrt(inverse_trace)
    # B = A / |A|_F, for the fourth power of A overflows where A is large, and is 0 where it is
    # small.
    inverse_norm = jax.lax.rsqrt(or_one(square_norm(gram)))
    b = scaled(gram, inverse_norm)
    b2 = product(b)
    # |B^2|_F^2, the sum of the fourth powers of B's eigenvalues
    fourth_powers = square_norm(b2)
    if deflation is not None:
        # A lower bound: what is left of the deflated directions, without its largest eigenvalue.
        others = other_fourth_powers(scaled(deflation.dominant, inverse_norm))
        fourth_powers = jnp.maximum(fourth_powers - others, fourth_powers / b.shape[-1])
    # R = B / bound with bound^4 = fourth_powers
    inverse_bound_squared = jax.lax.rsqrt(or_one(fourth_powers))
    inverse_bound = jnp.sqrt(inverse_bound_squared)
    r = scaled(b, inverse_bound)
    r2 = scaled(b2, inverse_bound_squared)
    # R = A / (|A|_F bound), so s^2 = 1 / (|A|_F bound)
    return r, r2, jnp.sqrt(inverse_norm * inverse_bound)
