"""Beside the way, for models that orthogonalize: the derivative of the exact polar factor, without an SVD.

Write the wide M = P O with P = (M M^T)^(1/2) and O O^T = I. Split dO = Z O + Y, Z skew and Y O^T = 0; then

    P Z + Z P = dM O^T - O dM^T,        P Y = dM (I - O^T O).

The first is a Lyapunov equation of the small side; both are symmetric, so that reverse mode is the same
solve.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._msign.polynomial_gradient import about_mean, iterate
from muonjax._msign.products import (
    Arithmetic,
    oriented_like,
    transpose,
    twice_symmetric,
    unit_norm,
    widened,
)
from muonjax._newton_schulz.coefficients import NEWTON_SCHULZ, Coefficients
from muonjax._newton_schulz.scaling import power_of_two_scale


def _skew(x: jax.Array) -> jax.Array:
    """(x - x^T) / 2."""
    return 0.5 * (x - transpose(x))


def lyapunov(
    p: jax.Array,
    k: jax.Array,
    coefficients: Coefficients,
    arithmetic: Arithmetic,
    *,
    with_inverse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    r"""Solves P Z + Z P = K for skew K, and approximates the inverse of P on the way.

    $$\operatorname{sign}\begin{bmatrix} P & K \\ 0 & -P \end{bmatrix}
      = \begin{bmatrix} I & 2Z \\ 0 & -I \end{bmatrix}$$

    by the same odd polynomials, on blocks: E skew beside P symmetric, so that the 2m x 2m matrix is never formed.
    Its square is [[S, F], [0, S]] with S = P^2 and F = P E - E P; and since the next E is skew, so that any other
    part of it is rounding, all that it takes of F is W = P F - F P:

    $$E \leftarrow \operatorname{skew}(E\,(aI + bS + cS^2) + \tfrac b2 W + cSW).$$

    Eight products of m^3 a step (seven without the inverse).

    Args:
      p: [*batch, m, m], symmetric, eigenvalues in the coefficients' interval.
      k: [*batch, m, m], skew.
      coefficients: A schedule that converges to 1 on the eigenvalues of `p`: the relative error of Z is at
        most the schedule's largest distance from 1.
      arithmetic: How products are taken.
      with_inverse: Whether to carry the product of the steps' factors, which tends to P^-1.

    Returns:
      Z, [*batch, m, m], skew; and P^-1, or None.
    """

    def step(carry, row):
        p, e, q = carry
        square = arithmetic(p, p)
        share, rest, slope, distance = about_mean(square, row, arithmetic)
        w = 2 * _skew(arithmetic(p, twice_symmetric(arithmetic(p, e))))
        e = share * e + 0.5 * slope * w + _skew(arithmetic(e, rest) + row[2] * arithmetic(distance, w))
        q = share * q + arithmetic(q, rest) if with_inverse else None
        p = share * p + 0.5 * twice_symmetric(arithmetic(p, rest))
        return (p, e, q), None

    identity = jnp.broadcast_to(jnp.eye(p.shape[-1], dtype=p.dtype), p.shape) if with_inverse else None
    rows = jnp.asarray(coefficients, p.dtype)
    (_, e, q), _ = lax.scan(step, (p, k, identity), rows)
    return 0.5 * e, q


def _tangent(
    x: jax.Array, factor: jax.Array, dx: jax.Array, coefficients: Coefficients, arithmetic: Arithmetic
) -> jax.Array:
    """The polar factor's tangent, by symmetric linear solves, which JAX can transpose and differentiate."""
    p = 0.5 * twice_symmetric(arithmetic.with_transpose(x, factor))
    along = arithmetic.with_transpose(dx, factor)
    k = along - transpose(along)

    def solve_rotation(_, k):
        return lyapunov(p, _skew(k), coefficients, arithmetic, with_inverse=False)[0]

    def rotation_system(z):
        return arithmetic(p, z) + arithmetic(z, p)

    if x.shape[-2] == x.shape[-1]:
        z = lax.custom_linear_solve(rotation_system, k, solve_rotation, symmetric=True)
        return arithmetic(_skew(z), factor)

    def solve_both(_, right_hand_side):
        k, outside = right_hand_side
        z, inverse = lyapunov(p, _skew(k), coefficients, arithmetic, with_inverse=True)
        assert inverse is not None
        return z, arithmetic(inverse, outside)

    def both_systems(unknown):
        z, y = unknown
        return rotation_system(z), arithmetic(p, y)

    outside = dx - arithmetic(along, factor)
    z, y = lax.custom_linear_solve(both_systems, (k, outside), solve_both, symmetric=True)
    return arithmetic(_skew(z), factor) + y


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def iterate_implicitly(
    x: jax.Array,
    coefficients: Coefficients,
    polish: int,
    arithmetic: Arithmetic,
) -> tuple[jax.Array, jax.Array]:
    """`iterate`, and the same polished by `polish` classical steps; both have the exact polar factor's
    derivative.

    Args:
      x: [*batch, m, n], m <= n, full row rank, |x|_F about 1. Its scale is a constant: the polar factor has
        none.
      coefficients: Rows (a, b, c) of the value.
      polish: Steps of (15/8, -5/4, 3/8) that take a truncated value to the polar factor that the derivative
        needs. The solve runs the same rows, with the same accuracy.
      arithmetic: How products are taken.

    Returns:
      The value, and the polished factor (the value itself for polish = 0).
    """
    value = iterate(x, coefficients, arithmetic)
    return value, (iterate(value, NEWTON_SCHULZ * polish, arithmetic) if polish else value)


@iterate_implicitly.defjvp
def _iterate_implicitly_jvp(coefficients, polish, arithmetic, primals, tangents):
    (x,), (dx,) = primals, tangents
    value, factor = iterate_implicitly(x, coefficients, polish, arithmetic)
    # Both outputs take the factor's tangent: so derivatives of this rule are those of the exact factor too.
    tangent = _tangent(x, factor, dx, coefficients + NEWTON_SCHULZ * polish, arithmetic)
    return (value, factor), (tangent, tangent)


def polar_msign(x: jax.Array, coefficients: Coefficients, polish: int, arithmetic: Arithmetic) -> jax.Array:
    """msign with the polar factor's derivative."""
    wide = widened(x)
    wide = wide * power_of_two_scale(wide)
    # The polar factor knows no scale, so the norm may be a constant, which saves its derivative.
    _, inverse = unit_norm(lax.stop_gradient(wide))
    value, _ = iterate_implicitly(wide * inverse, coefficients, polish, arithmetic)
    return oriented_like(value, x)
