r"""Shrink the dominant directions of X in half precision, by products of X itself with thin matrices.

With random numbers R [m, k], the rows of B = R^H X, made orthonormal, span nearly the dominant right directions, and
Y = X B^H the left ones: a step of subspace iteration. Half precision with float32 sums will do, for rounding errors are
spread over all directions and change the subspace very little. With G = Y^H Y, V = Y G^(-1/2) and C = V^H X,

    W X = X - V D C,    D = I - t G^(-1/2)

brings the k largest singular values, which are about those of Y, to the target t, close to the smallest of them. X
itself is rounded only after that: before, the rounding error would be as large as the small singular values. Only the
iteration works on m x m matrices.

Inverse roots come from products, whatever the rank of X: a Cholesky factorization fails where rounding makes an
eigenvalue negative, as in a matrix of rank one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from muonjax._linalg import MatrixProduct, dot, identity_like, inverse_norm, on_diagonal
from muonjax._newton_schulz.deflation import random_start
from muonjax._newton_schulz.inverse_root import bounded_inverse_root
from muonjax._newton_schulz.scaling import power_of_two_scale

# Stages and lower ends of the inverse roots. One stage less, of either, raises the mean polar error on recorded spectra
# to the power 1.39 by 0.03.
_FIRST, _SECOND = (3, 1e-2), (4, 2e-2)


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
    thin: jnp.dtype,
    dtype: jnp.dtype,
    over_columns: Callable[[jax.Array], jax.Array] = lambda products: products,
    scale_of: Callable[[jax.Array], jax.Array] = power_of_two_scale,
) -> Deflated:
    """x [*batch, m, n], float32, with its dominant directions shrunk to about the same size.

    Args:
      rank: How many directions; half as many more are shrunk, which makes up for a second step of subspace iteration.
      thin: Half precision of the thin products, that with the most digits: of a matrix of rank one its rounding errors
        stay, and in bfloat16 they would turn what is left of the one direction by 20 degrees.
      dtype: Of the result: half precision with the range of float32.
      over_columns: Sums products over the devices that share the columns.
      scale_of: The scale that `scaling` gives, over these devices.
    """
    half = MatrixProduct(thin.name, None)
    scale = scale_of(x)

    def in_memory(a, dtype):
        return jax.lax.optimization_barrier(a.astype(dtype))

    # Once for all thin products. A TPU takes two thirds of the time if rounding is part of a fusion and not an
    # instruction of its own.
    rounded = in_memory(scale * x, thin)

    def project(v):
        return half.of_adjoint(v, rounded)

    start = random_start(x.shape[-2], rank + rank // 2)
    b = project(jnp.broadcast_to(start, (*x.shape[:-2], *start.shape)))
    root, number = bounded_inverse_root(over_columns(dot.with_adjoint(b, b)), *_FIRST)
    y = over_columns(half.with_adjoint(rounded, number * dot(root, b)))
    root, number = bounded_inverse_root(dot.of_adjoint(y, y), *_SECOND)
    v = (number * dot(y, root)).astype(thin)
    target = _target(root)
    # 2 - V^H V is the inverse of V^H V up to the square of what rounding and the root leave it off from 1.
    d = 2 * identity_like(root) - half.of_adjoint(v, v) - target * root
    p, c = dot(v.astype(x.dtype), d), project(v)
    # Rounded, they would leave 1/256 of the largest singular value, of either sign: a half more for the rest of each.
    p, c = _with_rest(p, thin, (0, 1, 0), -1), _with_rest(c, thin, (0, 0, 1), -2)
    # Each term is multiplied by the factor separately. If they were added first, x would be an operand of a library's
    # product, for which it would have to be stacked.
    factor = number / target
    return Deflated(in_memory(factor * (scale * x) - factor * half(p, c), dtype), v.astype(x.dtype))


def _with_rest(a: jax.Array, dtype: jnp.dtype, parts: tuple[int, ...], axis: int) -> jax.Array:
    """A rounded (part 0) and the rest of it (part 1), side by side."""
    rounded = a.astype(dtype)
    both = rounded, (a - rounded.astype(a.dtype)).astype(dtype)
    return jnp.concatenate([both[part] for part in parts], axis)


def _target(root: jax.Array) -> jax.Array:
    """t from h^(-1/2): 1 / t^2 is the mean of the eigenvalues of h^-1, each weighted with itself."""
    inverse = dot(root, root)
    trace = jnp.sum(jnp.where(on_diagonal(inverse), inverse, 0), (-2, -1), keepdims=True)
    return jnp.sqrt(trace * inverse_norm(inverse) ** 2)
