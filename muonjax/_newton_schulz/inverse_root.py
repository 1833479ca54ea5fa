"""Inverse square roots of small positive semidefinite matrices, by products alone.

Neither result exceeds the inverse root: Q h Q has no eigenvalue above 1. For eigenvalues of h below the lower end of
the approximation interval the result is too small, so that noise is not amplified.
"""

import functools

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


@functools.cache
def _cubics(steps: int) -> Coefficients:
    return _never_above_one(polar_express(steps, lower=1e-2, safety=1.0, degrees=(3,) * steps))


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


def bounded_inverse_root(h: jax.Array, steps: int) -> tuple[jax.Array, jax.Array]:
    """Q and a number s [*batch, 1, 1]: s Q = h^(-1/2) of positive semidefinite h [*batch, k, k], in few products.

    It is right for eigenvalues above 1e-4 |h|_F, where `steps` is 7, and never above 219 |h|_F^(-1/2): what is shrunk
    by it is not shrunk below the rounding errors of bfloat16. Each step is a cubic, x (I - b R), whose factor a is
    gathered in s, so that all products have the form R - b R R, which libraries make in one launch.
    """
    rows = _cubics(steps)
    unit = inverse_norm(h)
    r, q, gain = scaled(h, unit), identity_like(h), 1.0
    for step, (a, b, _) in enumerate(rows):
        b *= -(gain**2) / a
        q = q - b * (r if step == 0 else dot(q, r))
        if step < steps - 1:
            u = r - b * dot(r, r)
            r = u - b * dot(u, r)
        gain *= a
    return q, gain * jnp.sqrt(unit)
