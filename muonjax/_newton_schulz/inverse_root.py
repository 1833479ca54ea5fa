"""Inverse square roots of small positive semidefinite matrices, by products alone or by Cholesky factorizations.

Neither result exceeds the inverse root: Q h Q has no eigenvalue above 1. For eigenvalues of h below the lower end of
the approximation interval the result is too small, so that noise is not amplified.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._linalg import dot, hermitian_part, identity_like, inverse_norm, scaled
from muonjax._newton_schulz.coefficients import Coefficients, evaluate, polar_express

# Added to k x k matrices in units of their norm: no direction is then below 1e-3 of the largest. Smaller ones would be
# rounding errors of A = X X^H in float32.
_RIDGE = 1e-6


def _never_above_one(rows: Coefficients) -> Coefficients:
    top = float(evaluate(rows, np.linspace(0, 1.001, 10_001)).max())
    return (*rows[:-1], tuple(c / top for c in rows[-1]))  # pyright: ignore[reportReturnType]


_POLYNOMIALS = _never_above_one(polar_express(5, lower=1e-2))


@jax.jit  # one trace for its three uses
def inverse_root(h: jax.Array) -> jax.Array:
    """Q = h^(-1/2) of positive semidefinite h [*batch, k, k], by products, where h is well conditioned."""
    eye = identity_like(h)
    unit = inverse_norm(h)
    rows = jnp.asarray(_POLYNOMIALS, h.dtype)

    def step(t, carry):
        r, q = carry
        a, b, c = rows[t]
        p = a * eye + b * r + c * dot(r, r)
        return hermitian_part(dot(dot(p, r), p)), hermitian_part(dot(q, p))

    start = scaled(h, unit) + _RIDGE * eye, scaled(eye, jnp.sqrt(unit))
    return jax.lax.fori_loop(0, len(rows), step, start)[1]


@jax.jit  # one trace for its three uses
def inverse_root_on_tpu(h: jax.Array) -> jax.Array:
    """Q = h^(-1/2) of positive semidefinite h [*batch, k, k], by products, where h is well conditioned.

    On a TPU the transposes of `inverse_root` take as long as its products. This has none, but amplifies the rounding of
    directions below 1e-5 of the largest more.
    """
    eye = identity_like(h)
    unit = inverse_norm(h)
    rows = jnp.asarray(_POLYNOMIALS, h.dtype)
    h = scaled(h, unit) + _RIDGE * eye

    def step(t, q):
        # R = Q^H h Q is Hermitian, whatever rounding made of Q.
        a, b, c = rows[t]
        r = dot.of_adjoint(q, dot(h, q))
        return a * q + dot(q, b * r + c * dot(r, r))

    q = jax.lax.fori_loop(0, len(rows), step, jnp.zeros_like(h) + eye)
    return scaled(hermitian_part(q), jnp.sqrt(unit))


def zolotarev(num_poles: int, lower: float) -> tuple[np.ndarray, np.ndarray]:
    r"""Poles s and weights w: sum_j w_j / (h + s_j) is the rational function of its degree that is relatively
    closest to h^(-1/2) on [`lower`, 1], scaled to be nowhere above it.

    Source: Zolotarev, 1877; N. Higham, "Functions of Matrices", 2008, section 6.6. Poles and zeros are
    lower tan(am(u_i))^2 at the odd and even multiples u_i of K / (2 `num_poles`).
    """
    tangents = np.tan(_amplitude(np.arange(1, 2 * num_poles) / (2 * num_poles), 1 - lower))
    poles, zeros = (lower * tangents[start::2] ** 2 for start in (0, 1))
    h = np.geomspace(lower, 1, 10_001)
    value = np.sqrt(h) * np.prod([h + z for z in zeros], axis=0) / np.prod([h + s for s in poles], axis=0)
    weights = [np.prod(zeros - s) / np.prod(poles[poles != s] - s) for s in poles]
    return poles, np.array(weights) / value.max()


def _amplitude(fraction: np.ndarray, parameter: float) -> np.ndarray:
    """Jacobi's am(`fraction` K | `parameter`), by the arithmetic-geometric mean."""
    a, b, c = 1.0, math.sqrt(1 - parameter), [math.sqrt(parameter)]
    means = [a]
    while abs(c[-1]) > 1e-16:
        a, b, c = (a + b) / 2, math.sqrt(a * b), [*c, (a - b) / 2]
        means.append(a)
    phi = 2 ** (len(means) - 1) * fraction * math.pi / 2  # u a_N with u = fraction K and K = pi / (2 a_N)
    for mean, difference in zip(means[:0:-1], c[:0:-1], strict=True):
        phi = (phi + np.arcsin(np.clip(difference / mean * np.sin(phi), -1, 1))) / 2
    return phi


_POLES, _WEIGHTS = zolotarev(4, 1e-6)  # within 7 % of the inverse root on [1e-6, 1]


def inverse_root_by_cholesky(h: jax.Array) -> jax.Array:
    """Q = h^(-1/2) of positive semidefinite h [*batch, k, k] with norm at most 1: four Cholesky factorizations at once.

    With L L^H = h + s I, each term (h + s I)^(-1) is L^(-H) L^(-1), so that one product sums all of them.
    """
    k = h.shape[-1]
    h = jnp.repeat(h[..., None, :, :], len(_POLES), -3)
    eye = identity_like(h)
    shape = (*(1,) * (h.ndim - 3), -1, 1, 1)
    poles, weights = (jnp.asarray(a, h.real.dtype).reshape(shape) for a in (_POLES, _WEIGHTS))
    rows = jax.lax.linalg.triangular_solve(
        cholesky(h + poles * eye), jnp.zeros_like(h) + jnp.sqrt(weights) * eye, left_side=True, lower=True
    )
    rows = rows.reshape(*h.shape[:-3], -1, k)
    return dot.of_adjoint(rows, rows)


def cholesky(h: jax.Array) -> jax.Array:
    """The lower factor of positive definite h; only the lower triangle is read."""
    return jax.lax.linalg.cholesky(h, symmetrize_input=False)
