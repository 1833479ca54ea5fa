r"""Polar Express in float32: a matrix becomes nearly orthogonal, by matrix products alone.

With m <= n and R = X X^H [m, m], a step is a polynomial of all singular values of X at once,

    X <- (a I + b R + c R^2) X,    each s <- a s + b s^3 + c s^5.

The standard form makes R anew for each step. The Gram form follows R through several steps and multiplies X once at
their end: cheaper where n > 1.5 m, but rounding makes R slightly indefinite, and polynomials multiply that until R is
made anew.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from muonjax._common.linalg import MatrixProduct, SymmetricProduct, on_diagonal, scaled, sizes, sum_over
from muonjax._common.platform import Policy
from muonjax._newton_schulz.coefficients import Coefficients
from muonjax._newton_schulz.deflation import ROUNDING, pre_deflate, shrink_dominant
from muonjax._newton_schulz.normalization import Normalized, below_one, normalize
from muonjax._newton_schulz.settings import NewtonSchulz, takes_gram_form
from pallas_kernels._platform import materialize

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Inexact

# How large the rounding errors of R may grow.
_TOLERATED = 1e-2


def iterate(
    x: Inexact[Array, "*batch m n"],
    settings: NewtonSchulz,
    policy: Policy,
    dtype: jnp.dtype,
    axis_name: tuple[str, ...] = (),
) -> Inexact[Array, "*batch m n"]:
    """X with m <= n, n counted over `axis_name` -> its orthogonalization, in `dtype`: float32 or wider."""
    m, n = sizes(x, axis_name)
    multiply = MatrixProduct(dtype.name, "highest")
    symmetric = SymmetricProduct(policy.platform, dtype, settings.implementation)
    small = symmetric.shared_by(axis_name if policy.shares_products(m, dtype) else ())
    first, *others = _segments(settings, m, n, dtype)
    rank = min(settings.deflation, m // 8)

    x, nonzero = below_one(x.astype(dtype), axis_name)
    if rank and len(first) > 1:  # the Gram form won't look at X again before its end
        x = materialize(lambda x: pre_deflate(x, rank, axis_name), x, policy.platform)
    gram, other_fourth_powers, deflation = sum_over(axis_name, symmetric(x)), 0.0, None
    if rank:  # W X has the same polar factor, and smaller dominant singular values
        deflation = shrink_dominant(gram, rank, policy.platform)
        gram, other_fourth_powers = deflation.gram, deflation.other_fourth_powers
    normalized = normalize(gram, other_fourth_powers, settings.normalization, small)
    normalized = normalized._replace(scale=jnp.where(nonzero, normalized.scale, 0))
    q = _composed(first, normalized, small)
    x = multiply(q if deflation is None else deflation.apply_right(q), x)
    for rows in others:
        x = multiply(_composed(rows, Normalized(sum_over(axis_name, symmetric(x))), small), x)
    return x


def _composed(
    rows: Coefficients, normalized: Normalized, product: SymmetricProduct
) -> Inexact[Array, "*batch m m"]:
    """Q with p_k(..p_1(X)) = Q X: after P = a I + b R + c R^2 comes Q <- Q P, R <- P R P."""
    diagonal = on_diagonal(normalized.r)
    if len(rows) == 1:
        return _polynomial(rows[0], normalized, product, diagonal)
    now = normalized._replace(scale=1.0)  # which goes into the last product
    q = p = _polynomial(rows[0], now, product, diagonal)
    for step, row in enumerate(rows[1:], 2):
        now = Normalized(product(product(now.r, p, alpha=now.inverse_bound), p))
        p = _polynomial(row, now, product, diagonal)
        q = product(q, p, alpha=normalized.scale if step == len(rows) else 1.0)
    return q


def _polynomial(
    row: tuple[float, float, float],
    normalized: Normalized,
    product: SymmetricProduct,
    diagonal: Bool[Array, "*batch m m"],
) -> Inexact[Array, "*batch m m"]:
    """P times the scale. I is the mask `diagonal`, since XLA would keep a I for each a, computed before a loop."""
    (a, b, c), (r, r2, inverse_bound, scale) = row, normalized
    p = scaled(r, scale * b * inverse_bound)
    own = scale * a
    p = jnp.where(diagonal, p + (own.astype(p.dtype) if isinstance(own, jax.Array) else own), p)
    if c == 0:
        return p
    c = scale * c * inverse_bound**2
    return p + (product(r, alpha=c) if r2 is None else scaled(r2, c))


def _segments(settings: NewtonSchulz, m: int, n: int, dtype: jnp.dtype) -> list[Coefficients]:
    """The steps, cut where the Gram matrix is made anew."""
    steps = settings.coefficients
    cuts = gram_restarts(steps, dtype) if takes_gram_form(settings, m, n) else range(1, len(steps))
    return [steps[i:j] for i, j in itertools.pairwise([0, *cuts, len(steps)])]


def gram_restarts(steps: Coefficients, dtype: jax.typing.DTypeLike) -> tuple[int, ...]:
    """Where the Gram form restarts: before rounding can have grown to `_TOLERATED`.

    An error in R of the size of its rounding, on a direction where R is next to nothing, is multiplied by p(0)^2 = a^2
    at each update of R.
    """
    cuts, error = [], ROUNDING * float(jnp.finfo(dtype).eps)
    grown = error
    for t in range(1, len(steps)):
        grown *= steps[t - 1][0] ** 2
        if grown > _TOLERATED:
            cuts.append(t)
            grown = error
    return tuple(cuts)
