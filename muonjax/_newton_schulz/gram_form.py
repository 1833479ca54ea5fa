"""The Gram form: several steps followed on m x m matrices, and where they begin anew from X.

Cheaper than the standard form where n > 1.5 m. But rounding makes R slightly indefinite, and polynomials multiply that
until R is made anew.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from muonjax._linalg import on_diagonal, scaled
from muonjax._newton_schulz.coefficients import Coefficients
from muonjax._newton_schulz.deflation import ROUNDING
from muonjax._newton_schulz.normalization import Normalized
from muonjax._newton_schulz.products import SymmetricProduct
from muonjax._newton_schulz.settings import NewtonSchulz

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact

# How large the rounding errors of R may grow.
_TOLERATED = 1e-2


def segments(settings: NewtonSchulz, m: int, n: int, dtype: jnp.dtype) -> list[Coefficients]:
    """The steps, cut where the Gram matrix is made anew. This is the one rule behind form="auto"."""
    steps = settings.steps
    if settings.form == "gram" or (settings.form == "auto" and n > 1.5 * m):
        cuts = gram_restarts(steps, dtype) if settings.restarts is None else settings.restarts
    else:
        cuts = range(1, len(steps))
    return [steps[i:j] for i, j in itertools.pairwise([0, *cuts, len(steps)])]


def gram_restarts(steps: Coefficients, dtype: jax.typing.DTypeLike) -> tuple[int, ...]:
    """Where the Gram form restarts by default: before rounding can have grown to `_TOLERATED`.

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


def composition(
    rows: Coefficients, normalized: Normalized, product: SymmetricProduct
) -> Inexact[Array, "*batch m m"]:
    """Q with p_k(..p_1(X)) = Q X: after P = a I + b R + c R^2 comes Q <- Q P, R <- P R P."""
    r, r2, inverse_bound, scale = normalized
    diagonal = on_diagonal(r)

    def polynomial(a, b, c, scale: Any = 1.0):
        """P, times `scale`; the identity by a mask: XLA would keep a I for each a, computed before a loop."""
        p = scaled(r, scale * b * inverse_bound)
        own = scale * a
        p = jnp.where(diagonal, p + (own.astype(p.dtype) if isinstance(own, jax.Array) else own), p)
        if c == 0:
            return p
        c = scale * c * inverse_bound**2
        return p + (product(r, alpha=c) if r2 is None else scaled(r2, c))

    if len(rows) == 1:
        return polynomial(*rows[0], scale)
    q = p = polynomial(*rows[0])
    for step, row in enumerate(rows[1:], 2):
        r, r2, inverse_bound = product(product(r, p, alpha=inverse_bound), p), None, 1.0
        p = polynomial(*row)
        q = product(q, p, alpha=scale if step == len(rows) else 1.0)
    return q
