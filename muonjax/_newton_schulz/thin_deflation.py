r"""Shrink the dominant directions of X in half precision, by products of X itself with thin matrices.

A basis V [m, k] of the dominant subspace comes from two steps of subspace iteration, Y = X (V^H X)^H, in half
precision with float32 sums; the rounding errors are spread over all directions and change the subspace very little.
With B = V^H X and H = B B^H,

    W X = X - V D B,    D = I - t H^(-1/2)

brings the k largest singular values to the target t, which is close to the smallest of them. X itself is rounded only
after that: before, the rounding error would be as large as the small singular values. Only the iteration
works on m x m matrices.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from muonjax._linalg import MatrixProduct, dot, identity_like, inverse_norm, on_diagonal
from muonjax._newton_schulz.deflation import random_signs
from muonjax._newton_schulz.inverse_root import cholesky, inverse_root_by_cholesky, inverse_root_on_tpu
from muonjax._newton_schulz.scaling import power_of_two_scale
from muonjax._policy import Policy

# Products with X X^H, each followed by one orthonormalization. The condition number of Y^H Y is the square of that of
# Y, so that columns for weak directions stay shorter than 1. A second factorization would not lower the polar error on
# recorded momentum, and would lower it by 0.02 on harder spectra.
_SUBSPACE_STEPS = 2

# Added to the diagonal of Y^H Y, relative to it. It exceeds the rounding of float32 sums; without it the factorization
# could fail.
_RIDGE = 1e-5


class Deflated(NamedTuple):
    """W X, rounded, and the basis of the directions that were shrunk.

    Attributes:
      x: [*batch, m, n] in half precision, with the target singular value 1.
      basis: V [*batch, m, k], float32; no combination of its columns is longer than its coefficients.
    """

    x: jax.Array
    basis: jax.Array


def deflate(
    x: jax.Array,
    rank: int,
    dtype: jnp.dtype,
    policy: Policy,
    over_columns: Callable[[jax.Array], jax.Array] = lambda products: products,
    scale_of: Callable[[jax.Array], jax.Array] = power_of_two_scale,
    *,
    tall: bool = False,
) -> Deflated:
    """x [*batch, m, n], float32, with its `rank` dominant directions shrunk to about the size of the rank-th.

    Args:
      dtype: Half precision.
      over_columns: Sums products over the devices that share the columns.
      scale_of: The scale that `scaling` gives, over these devices.
      tall: x is the transpose of what is stored.
    """
    half = MatrixProduct(dtype.name, None)

    def stored(a):
        """a in half precision, in memory, as x is stored."""
        a = a.astype(dtype)
        return jax.lax.optimization_barrier(a.mT).mT if tall else jax.lax.optimization_barrier(a)

    # A one that XLA can't see as a constant. A TPU takes two thirds of the time if rounding is part of a fusion and not
    # an instruction of its own; and XLA would join the products of several stacks that have the same start.
    one = jax.lax.optimization_barrier(jnp.ones((*x.shape[:-2], 1, 1), x.dtype))
    rounded = stored(one * x)  # once for all thin products

    def project(v):
        return half.of_adjoint(v, rounded)

    v = jnp.broadcast_to(random_signs(x.shape[-2], rank), (*x.shape[:-1], rank)) * one
    b = project(v)
    # The scale is that of the first projection, whose entries are usually about as large as the largest of x: this
    # needs no pass over x itself.
    scale = scale_of(b)
    for _ in range(_SUBSPACE_STEPS):
        v = _orthonormalize(over_columns(half.with_adjoint(rounded, scale * (scale * b))), policy)
        b = project(v)
    h = over_columns(dot.with_adjoint(scale * b, scale * b))
    unit = inverse_norm(h)
    h = unit * h
    root = inverse_root_by_cholesky(h) if policy.fast_cholesky else inverse_root_on_tpu(h)
    target = _target(root)
    minus_p = dot(v, target * root - identity_like(root))
    # Each term is multiplied by the factor separately. If they were added first, x would be an operand of a library's
    # product, for which it would have to be stacked.
    factor = scale * (jnp.sqrt(unit) / target)
    shrunk = factor * x + factor * half(minus_p, b)
    return Deflated(stored(shrunk), v)


def _target(root: jax.Array) -> jax.Array:
    """t from h^(-1/2): 1 / t^2 is the mean of the eigenvalues of h^-1, each weighted with itself."""
    inverse = dot(root, root)
    trace = jnp.sum(jnp.where(on_diagonal(inverse), inverse, 0), (-2, -1), keepdims=True)
    return jnp.sqrt(trace * inverse_norm(inverse) ** 2)


def _orthonormalize(y: jax.Array, policy: Policy) -> jax.Array:
    """Nearly orthonormal columns with the span of y [*batch, m, k], no combination of them longer than 1."""
    if not policy.fast_cholesky:
        for _ in range(2):  # after one alone, short columns would raise the polar error by 0.02 to 0.04
            y = dot(y, inverse_root_on_tpu(dot.of_adjoint(y, y)))
        return y
    gram = dot.of_adjoint(y, y)
    ridge = _RIDGE * gram + jnp.finfo(gram.dtype).eps ** 3  # for zero columns
    return jax.lax.linalg.triangular_solve(
        cholesky(gram + ridge * identity_like(gram)),
        y,
        left_side=False,
        lower=True,
        transpose_a=True,
        conjugate_a=True,
    )
