r"""Shrink the dominant directions of X in half precision, by products of X itself with thin matrices.

A basis V [m, k] of the dominant subspace comes from two steps of subspace iteration, Y = X (V^H X)^H, in half
precision with float32 sums; rounding there is spread over all directions, and the subspace hardly feels it. With
B = V^H X and H = B B^H,

    W X = X - V D B,    D = I - t H^(-1/2)

brings the top k singular values to the target t, near the least of them. X itself is rounded only after that: before,
the error would be as large as the tail. All m x m work is left to the iteration.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from muonjax._linalg import MatrixProduct, dot, identity_like, inverse_norm, on_diagonal
from muonjax._newton_schulz.deflation import random_signs
from muonjax._newton_schulz.inverse_root import cholesky, inverse_root, inverse_root_by_cholesky
from muonjax._policy import Policy

# Products with X X^H, each followed by one orthonormalization. Y^H Y has the squared condition of Y, so that weak
# directions stay short; a second factorization gains nothing on recorded momentum, and 0.02 of polar error on harder
# spectra.
_SUBSPACE_STEPS = 2

# Added to the diagonal of Y^H Y, relative to it: above the rounding of float32 sums, lest the factorization fail.
_RIDGE = 1e-5


class Deflated(NamedTuple):
    """W X, rounded, and what is known of its spectrum.

    Attributes:
      x: [*batch, m, n] in half precision, with the target singular value 1.
      others: A lower bound of the sum of the fourth powers of all eigenvalues of X X^H but the largest,
        [*batch, 1, 1].
    """

    x: jax.Array
    others: jax.Array


def deflate(
    x: jax.Array,
    scale: jax.Array,
    rank: int,
    dtype: jnp.dtype,
    policy: Policy,
    over_columns: Callable[[jax.Array], jax.Array] = lambda products: products,
) -> Deflated:
    """x [*batch, m, n], float32, with its `rank` dominant directions shrunk to about the size of the rank-th.

    `scale` brings the entries of x near 1; `over_columns` sums products over the devices that share the columns.
    """
    half = MatrixProduct(dtype.name, None)
    rounded = jax.lax.optimization_barrier(x.astype(dtype))  # once for all thin products

    def project(v):
        return half.of_adjoint(v, rounded)

    def lift(b):
        return over_columns(half.with_adjoint(rounded, scale * (scale * b)))

    # Times 1, which XLA does not know: it would join the products of several stacks with one start.
    v = jnp.broadcast_to(random_signs(x.shape[-2], rank), (*x.shape[:-1], rank)) * jnp.sign(scale)
    for _ in range(_SUBSPACE_STEPS):
        v = _orthonormalize(lift(project(v)), policy)
    b = project(v)
    h = over_columns(dot.with_adjoint(scale * b, scale * b))
    unit = inverse_norm(h)
    h = unit * h
    root = inverse_root_by_cholesky(h) if policy.fast_cholesky else inverse_root(h)
    inverse = dot(root, root)
    # The common target: 1 / t^2 is the mean of the eigenvalues of h^-1, each weighted with itself.
    trace = jnp.sum(jnp.where(on_diagonal(inverse), inverse, 0), (-2, -1), keepdims=True)
    target = jnp.sqrt(trace * inverse_norm(inverse) ** 2)
    minus_p = dot(v, target * root - identity_like(root))
    # A sum of x and one product: a library adds in place, without a second array of x's size.
    shrunk = (x + half(minus_p, b)) * scale * (jnp.sqrt(unit) / target)
    # V^H (W X)(W X)^H V = root h root in units of the target. No combination of V's columns is longer than 1: by
    # interlacing the eigenvalues of X X^H are at least those. At least 9/10 of their mean, whatever rounding did.
    mean = 0.97 * jnp.sum((inverse * h.mT).real, (-2, -1), keepdims=True) / rank
    return Deflated(shrunk.astype(dtype), jnp.maximum(rank * mean**4 - 1, 0))


def _orthonormalize(y: jax.Array, policy: Policy) -> jax.Array:
    """Nearly orthonormal columns with the span of y [*batch, m, k], no combination of them longer than 1."""
    if not policy.fast_cholesky:
        for _ in range(2):  # what one leaves short costs 0.02 to 0.04 of polar error
            y = dot(y, inverse_root(dot.of_adjoint(y, y)))
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
