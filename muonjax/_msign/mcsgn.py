"""mcsgn: the sign of square matrices by their eigenvalues, with derivatives of every order."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax

from muonjax._common.arguments import errors_of
from muonjax._common.linalg import MatrixProduct, adjoint
from muonjax._msign.inputs import (
    CONVERGED,
    inner,
    matrices,
    normalized,
    product_of,
    rows_beside,
)
from muonjax._msign.polynomial_gradient import iterate, tangent_by_normalization
from muonjax._newton_schulz.coefficients import Coefficients, checked_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def mcsgn(
    x: Float[Array, "*batch n n"],
    *,
    coefficients: Coefficients | None = None,
    precision: str | None = "highest",
) -> Float[Array, "*batch n n"]:
    r"""The sign of each square matrix with a real spectrum, as a function of its eigenvalues.

    $$\operatorname{mcsgn}(X) = X (X^2)^{-1/2} = P \operatorname{sign}(\Lambda) P^{-1}, \qquad X = P \Lambda P^{-1},$$

    by the steps of `msign` with $X^2$ for $X X^\top$, on $X / \sqrt{\operatorname{tr}(X^2)}$. It equals
    `msign` on symmetric matrices. All of jvp, vjp, vmap, Hessians and higher derivatives are those of the
    polynomial that ran. The derivative's transpose at X is the derivative at $X^\top$, so a backward pass
    keeps X alone.

    Args:
      x: [*batch, n, n], real floating point. The eigenvalues must be real, and at least 1e-5 of
        $\sqrt{\operatorname{tr}(X^2)}$ in size for the default schedule. With complex ones the
        iteration diverges or converges to something else, which is noticed only if they make the trace negative.
      coefficients: Rows (a, b, c), one for each step. Default: converged, as in `msign`.
      precision: That of the products, as in `jax.numpy.matmul`.

    Returns:
      [*batch, n, n], the dtype of x. Zero for a zero matrix, with a zero gradient; NaN where tr(X²) <= 0,
      which no real spectrum but a nilpotent matrix's gives, and where x has a NaN or an infinity.

    Raises:
      TypeError: If x is no array, or is complex or not floating point.
      ValueError: If x is not square, or a setting is outside of its range.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> print(muonjax.mcsgn(jnp.array([[2.0, 3.0], [0.0, -1.0]])).round(4) + 0.0)
      [[ 1.  2.]
       [ 0. -1.]]

    Source: J. Su, "The derivative of msign", 2025, kexue.fm/archives/11025; N. Higham, "Functions of
    Matrices", 2008, chapter 5 (Theorem 5.3 for the derivative).
    """
    with errors_of("mcsgn"):
        x = matrices(x)
        if x.shape[-2] != x.shape[-1]:
            raise ValueError(
                f"(x) needs square matrices, got shape {x.shape}; msign takes others."
            )
        rows = CONVERGED if coefficients is None else checked_rows(coefficients)
        dot = product_of(x, precision)
    if x.size == 0:
        return x
    return polynomial_mcsgn(x, rows_beside(x, rows), dot)


def _unit(
    x: Float[Array, "*batch n n"],
) -> tuple[Float[Array, "*batch n n"], Float[Array, "*batch 1 1"]]:
    """x / r with r = sqrt(tr(x^2)), and 1 / r, in float32 or wider: 0 for a zero matrix, NaN for no real r."""
    # 1 / r is infinite for a nilpotent matrix, so the zero entries of x / r are NaN.
    return normalized(x, lambda x: inner(x, adjoint(x)))  # tr(X^2) = <X, X^T>


def _iterate(
    x: Float[Array, "*batch n n"], rows: Float[Array, "steps 3"], dot: MatrixProduct
) -> Float[Array, "*batch n n"]:
    """X <- (a I + b X^2 + c X^4) X, once for each row."""
    return iterate(x, rows, dot, square=lambda x, dot: dot(x, x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def polynomial_mcsgn(
    x: Float[Array, "*batch n n"], rows: Float[Array, "steps 3"], dot: MatrixProduct
) -> Float[Array, "*batch n n"]:
    """mcsgn by `rows`, which are constants; its derivative keeps x alone."""
    unit, _ = _unit(x)
    return _iterate(unit, rows, dot).astype(x.dtype)


@polynomial_mcsgn.defjvp
def _polynomial_mcsgn_jvp(dot, primals, tangents):
    # Nine products a step, in a rolled loop that keeps nothing.
    f = functools.partial(_iterate, dot=dot)
    tangent = tangent_by_normalization(_unit, adjoint, f, primals, tangents)
    return polynomial_mcsgn(*primals, dot), tangent
