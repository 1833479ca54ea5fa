"""Newton-Schulz iteration with the derivative of the exact polar factor, by a Lyapunov equation and no SVD.

Write the wide M = P O with P = (M M^T)^(1/2) and O O^T = I. Split dO = Z O + Y, Z skew and Y O^T = 0; then

    P Z + Z P = dM O^T - O dM^T,        P Y = dM (I - O^T O).

The first is a Lyapunov equation of the small side; both are symmetric, so that reverse mode is the same
solve.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muonjax._common.linalg import MatrixProduct, adjoint, hermitian_part, identity_like
from muonjax._common.power_of_two_scale import power_of_two_scale
from muonjax._msign.inputs import inverse_norm, oriented_like, rows_beside, widened
from muonjax._msign.polynomial_gradient import about_mean, iterate, plus_transpose
from muonjax._newton_schulz.coefficients import (
    Coefficients,
    evaluate,
    polar_express_rows,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# The largest relative error of the derivative that a schedule may leave: five Polar Express steps leave 0.15.
_MOST_ERROR = 0.2


def polishing(rows: Coefficients, polish: int) -> Coefficients:
    """Rows of the `polish` steps that take what `rows` leave of singular values on to 1, for the derivative alone.

    Raises:
      ValueError: If singular values between 1e-3 and 1 do not end near 1, as the derivative assumes.
    """
    more_rows = _polishing(rows, polish)
    low, high = _range(rows + more_rows)
    if max(1 - low, high - 1) > _MOST_ERROR:
        raise ValueError(
            f"msign(gradient='polar', polish={polish}) needs steps that converge to the polar factor, "
            f"but {len(rows)} steps and {polish} of polish take singular values between 1e-3 and 1 "
            f"to between {low:.2g} and {high:.2g}; give more polish, or other coefficients."
        )
    return more_rows


@functools.lru_cache
def _range(rows: Coefficients) -> tuple[float, float]:
    """The smallest and the largest value of the composition of `rows` on [1e-3, 1]."""
    with np.errstate(all="ignore"):
        values = evaluate(rows, np.geomspace(1e-3, 1, 4001))
    return float(np.min(values)), float(np.max(values))


@functools.lru_cache
def _polishing(rows: Coefficients, num_steps: int) -> Coefficients:
    """The best `num_steps` steps for singular values in the interval to which `rows` take [1e-3, 1].

    No steps, (), if the ends of that interval are not positive and finite.
    """
    low, high = _range(rows)
    if num_steps == 0 or not 0 < low <= high < np.inf:
        return ()
    # These steps are for singular values in [low / high, 1], so the first one divides them by `high`.
    first, *others = polar_express_rows((5,) * num_steps, low / high, safety=1.0)
    a, b, c = first
    # p(s / high) = (a / high) s + (b / high^3) s^3 + (c / high^5) s^5
    return ((a / high, b / high**3, c / high**5), *others)


def _skew(x: Float[Array, "*batch m m"]) -> Float[Array, "*batch m m"]:
    """(x - x^T) / 2."""
    return 0.5 * (x - adjoint(x))


def lyapunov(
    p: Float[Array, "*batch m m"],
    k: Float[Array, "*batch m m"],
    rows: Float[Array, "steps 3"],
    dot: MatrixProduct,
    *,
    with_inverse: bool,
) -> tuple[Float[Array, "*batch m m"], Float[Array, "*batch m m"] | None]:
    r"""Solves P Z + Z P = K for skew K, and approximates the inverse of P on the way.

    $$\operatorname{sign}\begin{bmatrix} P & K \\ 0 & -P \end{bmatrix}
      = \begin{bmatrix} I & 2Z \\ 0 & -I \end{bmatrix}$$

    by the same odd polynomials, on blocks: E skew and P symmetric, so that the 2m x 2m matrix is never formed.
    Its square is [[S, F], [0, S]] with S = P^2 and F = P E - E P; and since the next E is skew, so that any other
    part of it is rounding, all that it takes of F is W = P F - F P:

    $$E \leftarrow \operatorname{skew}(E\,(aI + bS + cS^2) + \tfrac b2 W + cSW).$$

    Eight products of m^3 a step (seven without the inverse).

    Args:
      p: Symmetric, eigenvalues in the rows' interval.
      k: Skew.
      rows: A schedule that converges to 1 on the eigenvalues of `p`: the relative error of Z is at
        most the schedule's largest distance from 1.
      dot: The matrix product.
      with_inverse: Whether to carry the product of the steps' factors, which tends to P^-1.

    Returns:
      Z, skew; and P^-1, or None.
    """

    def step(carry, row):
        """One step for the sign of [[P, E], [0, -P]], whose corner tends to 2 Z, and for Q, which tends to P^-1."""
        # The carry begins as P, K and I (None without the inverse).
        p, e, q = carry
        # aI + bS + cS^2 = alpha I + R with R = beta D + c D^2
        square = dot(p, p)
        alpha, rest, beta, distance = about_mean(square, row, dot)
        # F = P E - E P = P E + (P E)^T, as E is skew;  W = P F - F P = P F - (P F)^T, as F is symmetric
        f = plus_transpose(dot(p, e))
        w = 2 * _skew(dot(p, f))
        # E <- skew(E (alpha I + R) + b/2 W + c S W), and b/2 W + c S W = beta/2 W + c D W; E and W are skew already.
        c = row[2]
        products = dot(e, rest) + c * dot(distance, w)
        e = alpha * e + 0.5 * beta * w + _skew(products)
        # P <- P (alpha I + R), and Q <- Q (alpha I + R) is P^-1 in the end, where P is I.
        q = alpha * q + dot(q, rest) if with_inverse else None
        p = alpha * p + hermitian_part(dot(p, rest))
        return (p, e, q), None

    # Q begins as I. Inside of `jax.shard_map` it has to vary over the mesh axes of P.
    start = jnp.zeros_like(p) + identity_like(p) if with_inverse else None
    (_, e, q), _ = lax.scan(step, (p, k, start), rows)
    # E tends to 2 Z.
    return 0.5 * e, q


def _tangent(
    x: Float[Array, "*batch m n"],
    factor: Float[Array, "*batch m n"],
    dx: Float[Array, "*batch m n"],
    rows: Float[Array, "steps 3"],
    dot: MatrixProduct,
) -> Float[Array, "*batch m n"]:
    """The tangent dO of the polar factor O of M, which is x: dO = Z O + Y with P Z + Z P = K and P Y = dM (I - O^T O).

    The solves are symmetric linear ones, which JAX can transpose and differentiate. `rows` are the steps by which
    `lyapunov` solves them.
    """
    # P = M O^T
    p = hermitian_part(dot.with_adjoint(x, factor))
    # K = dM O^T - O dM^T
    along = dot.with_adjoint(dx, factor)
    k = along - adjoint(along)
    # dM (I - O^T O), which is zero for a square matrix
    is_square = x.shape[-2] == x.shape[-1]
    outside = None if is_square else dx - dot(along, factor)

    def systems(unknowns):
        # P Z + Z P and P Y, where Y is None for a square matrix
        z, y = unknowns
        p_y = None if y is None else dot(p, y)
        return dot(p, z) + dot(z, p), p_y

    # JAX calls it with `systems`, which it does not need, and in a backward pass with cotangents of Z and Y. All that
    # comes for K is skew up to rounding, and `lyapunov` needs it exactly so.
    def solve(_, right_hand_side):
        k, outside = right_hand_side
        z, inverse = lyapunov(p, _skew(k), rows, dot, with_inverse=outside is not None)
        return z, None if inverse is None else dot(inverse, outside)

    z, y = lax.custom_linear_solve(systems, (k, outside), solve, symmetric=True)
    # dO = Z O + Y, where `_skew` leaves Z as it is, and makes its cotangent skew.
    rotation = dot(_skew(z), factor)
    return rotation if y is None else rotation + y


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _iterate_implicitly(
    x: Float[Array, "*batch m n"],
    rows: Float[Array, "steps 3"],
    polish: Float[Array, "more 3"],
    dot: MatrixProduct,
) -> tuple[Float[Array, "*batch m n"], Float[Array, "*batch m n"]]:
    """`iterate`, and the same polished; both have the exact polar factor's derivative.

    Args:
      x: Wide, of full row rank, |x|_F about 1. Its scale is a constant: the polar factor has none.
      rows: The steps of the value.
      polish: More steps, from the value on to the polar factor; [0, 3] for none. The derivative solves a linear
        equation with that factor in it, by all steps: `rows`, then `polish`.
      dot: The matrix product.

    Returns:
      The value, and the polished factor (the value itself where there is no polish).
    """
    value = iterate(x, rows, dot)
    factor = iterate(value, polish, dot) if len(polish) else value
    return value, factor


@_iterate_implicitly.defjvp
def _iterate_implicitly_jvp(dot, primals, tangents):
    x, rows, polish = primals
    value, factor = _iterate_implicitly(x, rows, polish, dot)
    dx, _, _ = tangents
    # Both outputs take the factor's tangent: so derivatives of this rule are those of the exact factor too.
    tangent = _tangent(x, factor, dx, jnp.concatenate([rows, polish]), dot)
    return (value, factor), (tangent, tangent)


def polar_msign(
    x: Float[Array, "*batch m n"],
    rows: Coefficients,
    polish: Coefficients,
    dot: MatrixProduct,
) -> Float[Array, "*batch m n"]:
    """msign by the steps of `rows`, with the derivative of the exact polar factor.

    The steps of `polish` take the value on to that factor for the derivative alone; the value does not have them.
    """
    # By a power of two first, since the norm of x may be no number.
    wide = widened(x)
    wide = wide * power_of_two_scale(wide)
    # 1 / |x|_F. The polar factor has no scale, so the norm may be a constant, which saves its derivative.
    inverse = inverse_norm(lax.stop_gradient(wide))
    # As one array, because no polish alone would be an array [0], and not [0, 3].
    steps = rows_beside(x, rows + polish)
    num_rows = len(rows)
    # The second result is the polished factor, of which the derivative is made.
    value, _ = _iterate_implicitly(
        wide * inverse, steps[:num_rows], steps[num_rows:], dot
    )
    return oriented_like(value, x)
