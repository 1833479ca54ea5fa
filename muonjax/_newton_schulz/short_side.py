"""Orthogonalize matrices with a short side on a GPU: few passes over X, and polynomials of its Gram matrix.

Where m is small, passes over X and launches take the time, not products of m x m matrices. So `_OPENING`, more
polynomials before the steps, lifts small singular values instead of the deflation: four products with X in all. All
polynomials of a half together are a (1 + T), where a is the product of their first coefficients and T, m x m, comes
from one launch (`pallas_kernels/_composition`):

    Z = (1 + T) X,    T of X X^H by the opening,    result = a (1 + T') Z,    T' of Z Z^H by the steps

Z is made anew and not followed on m x m matrices, for the opening multiplies what float16 and float32 round. X is
added to T X in float32: of a matrix of low rank, next to nothing comes out in directions that it does not have.
"""

import functools
import math

import jax
import jax.numpy as jnp

from muonjax._linalg import MatrixProduct, on_diagonal, square_norm, sum_over
from muonjax._newton_schulz.coefficients import never_above_one, polar_express
from muonjax._newton_schulz.normalization import or_one, power_of_two_scale
from muonjax._newton_schulz.settings import NewtonSchulz
from muonjax._policy import Policy
from pallas_kernels._composition import LARGEST, composition

# Rounding errors of float16, which the opening multiplies by 247, may lift a singular value by as much as this safety
# between its steps, and after them by `_MARGIN`: above its interval a polynomial would multiply them without bound.
_OPENING = never_above_one(polar_express(4, lower=1e-3, safety=1.05))
_MARGIN = 1.15

# Added to R, whose largest eigenvalue is at most 1: sums of float32 leave no eigenvalue below zero.
_RIDGE = 4e-6

_SUMS = MatrixProduct("float16", None)


def takes(settings: NewtonSchulz, policy: Policy, m: int, n: int) -> bool:
    """Whether m x n matrices are made here: where the kernel is named. Jordan's steps, for one, would end at 1.28.

    No default takes this way: of a matrix of rank one or two, emulated, more comes out in directions that it does not
    have than with a deflation. Its bound of X X^H is Schatten's.
    """
    presets = NewtonSchulz.fast(), NewtonSchulz.balanced()
    return (
        (settings.implementation, policy.platform) == ("hopper", "gpu")
        and 8 <= m <= LARGEST
        and m <= n
        and settings.steps in [preset.steps for preset in presets]
        and settings.deflation > 0
        and (settings.form, settings.normalization) == ("auto", "schatten")
    )


def iterate(x: jax.Array, settings: NewtonSchulz, axis_name: tuple[str, ...] = ()) -> jax.Array:
    """x [*batch, m, n], m <= n, in float32 -> its orthogonalization; the columns may be sharded."""
    polynomials = functools.partial(composition, implementation=settings.implementation)
    scale = power_of_two_scale(x, axis_name)
    rounded = jax.lax.optimization_barrier((scale * x).astype(jnp.float16))
    gram = _gram(rounded, axis_name)
    bound = or_one(jnp.sqrt(square_norm(gram)))
    r = gram / bound
    t = polynomials(jnp.where(on_diagonal(r), r + _RIDGE, r), _OPENING, 1.0, 0.0)
    gain = math.prod(a for a, _, _ in _OPENING) / _MARGIN * jax.lax.rsqrt(bound)
    added = jax.lax.optimization_barrier(_SUMS(t, rounded))
    z = jax.lax.optimization_barrier((gain * (scale * x + added)).astype(jnp.float16))
    factor = math.prod(a for a, _, _ in settings.steps)
    return _SUMS(polynomials(_gram(z, axis_name), settings.steps, factor, factor), z)


def _gram(x: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    return sum_over(axis_name, _SUMS.with_adjoint(x, x))
