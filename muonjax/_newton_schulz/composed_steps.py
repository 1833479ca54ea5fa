"""Several Newton-Schulz steps as one product with X, from its Gram matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from muonjax._common.linalg import at_least_float32, on_diagonal
from muonjax._newton_schulz.coefficients import Coefficients

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact


def composed(
    rows: Coefficients,
    r: Inexact[Array, "*batch m m"],
    r2: Inexact[Array, "*batch m m"] | None,
    product: Callable[..., jax.Array],
    u: float | Float[Array, "*batch 1 1"] = 1.0,
) -> Inexact[Array, "*batch m m"]:
    """Q with p_k(...p_1(X)) = Q X for the polynomials of all rows, from X's Gram matrix R = u r.

    The rows are a part of a schedule (`parts_of`): a single row in the standard form, and mostly
    several in the Gram form. Each polynomial is P = a I + b R + c R^2, summed in float32 or wider
    and rounded once.

    Args:
      rows: The coefficients (a, b, c) of each step.
      r: No eigenvalue of u r is above 1, up to rounding.
      r2: r^2 if that is already made.
      product: (A, Y) -> A Y^H for matrices that are Hermitian and commute, but for rounding; Y is
        A by default.
      u: A number, or one for each matrix. It is apart from r, as u r would be rounded once more in
        half precision.
    """
    # a I is added through a mask of the diagonal. The caller may loop over the matrices of a stack.
    # An array a I is the same in each pass, so XLA would make one m x m array for each of these
    # polynomials before the loop, and keep them all.
    diagonal = on_diagonal(r)
    wide = at_least_float32(r.dtype)
    q: Any = None
    p: Any = None
    for a, b, c in rows:
        if p is not None:
            # R <- P R P and Q <- P Q. In this order R stays the Gram matrix of Q X, up to the
            # rounding of each product, even if the rounded P and R do not commute. With R P P and
            # Q P in float16, which are the same in exact arithmetic, a matrix of rank three got a
            # singular value of 1.95.
            r = product(product(p, r), p)
            r2 = None
        p = b * u * r.astype(wide)
        if c != 0:
            r2 = product(r) if r2 is None else r2
            p += c * u**2 * r2.astype(wide)
        p = jnp.where(diagonal, p + a, p).astype(r.dtype)
        # XLA for GPUs would join the products of P with R and with Q, and copy R and Q side by
        # side: so this one gets P from a barrier.
        q = p if q is None else product(jax.lax.optimization_barrier(p), q)
    return q
