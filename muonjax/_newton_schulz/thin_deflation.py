r"""Shrink the dominant directions of X in half precision, by products of X itself with thin matrices.

With random numbers R [m, k], the rows of B = R^H X span nearly the dominant right directions, and the columns of
Y = X B^H (B B^H)^(-1/2) the left ones: a step of subspace iteration. Half precision with float32 sums will do, for
rounding errors are spread over all directions and change the subspace very little. With G = Y^H Y, V = Y G^(-1/2) and
C = V^H X,

    W X = X - V D C,    D = I - t G^(-1/2)

brings the k largest singular values, which are about those of Y, to the target t, close to the smallest of them. X
itself is rounded only after that: before, the rounding error would be as large as the small singular values. Only the
iteration works on m x m matrices. X B^H is made in the same pass as B, before the root is known: what lies between the
two passes over X are thin matrices, and many stacks can share it.

Inverse roots come from products, whatever the rank of X: a Cholesky factorization fails where rounding makes an
eigenvalue negative, as in a matrix of rank one.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._common.linalg import (
    MatrixProduct,
    dot,
    identity_like,
    inverse_norm,
    on_diagonal,
    scaled,
    sum_over,
)
from muonjax._common.platform import zero_beside
from muonjax._newton_schulz.coefficients import never_above_one, polar_express
from muonjax._newton_schulz.deflation import random_start
from muonjax._newton_schulz.iteration import power_of_two_scale

# For the bounded root. One stage less raises the mean polar error on recorded spectra to the power 1.39 by 0.03.
_STAGES, _LOWER = 4, 2e-2

# What stays of each direction, at least. At exact low rank t is no more than 1 / 217 of the largest singular value. The
# errors of float16, 2^-11 at most of that value in each of P, C and X, must be a small part of what is left, or the
# steps lift them to 1: of 24 x 24 of rank one, 1 / 217 was too little. More costs accuracy where t is small.
_KEPT = 2**-9


class Sketch(NamedTuple):
    """What the dominant directions follow from.

    Attributes:
      scale: [*batch, 1, 1], a power of two.
      y: X B^H [*batch, m, k], float32.
      rounded: X times `scale`, in half precision; None: to be made again.
    """

    scale: jax.Array
    y: jax.Array
    rounded: jax.Array | None


class Shrinking(NamedTuple):
    """W = 1 - P V^H, with P = V D.

    Attributes:
      scale: As in `Sketch`.
      rounded: As in `Sketch`.
      v: V [*batch, m, k] in half precision; no combination of its columns is longer than its coefficients.
      p: P [*batch, m, k], float32: rounded before, V's errors would leave the space of X's columns.
    """

    scale: jax.Array
    rounded: jax.Array | None
    v: jax.Array
    p: jax.Array


def sketch(x: jax.Array, rank: int, dtype: jnp.dtype, axis_name: tuple[str, ...] = ()) -> Sketch:
    """The first pass over x [*batch, m, n], float32.

    Args:
      x: The matrices.
      rank: How many directions; half as many more are shrunk, which makes up for a second step of subspace iteration.
      dtype: Half precision with the most digits: of a matrix of rank one its rounding errors stay, and for bfloat16
        `shrink` multiplies what they are as well.
      axis_name: Mesh axes that shard the columns.
    """
    k = rank + rank // 2
    # In memory, for the second pass to read what the first one reads: one kernel less to compile.
    scale = jax.lax.optimization_barrier(power_of_two_scale(x, axis_name))
    rounded = _rounded(x, scale, dtype)
    start = _start(x, k, dtype)
    # B's rows are not orthonormal yet, and what a root of B B^H takes them apart by multiplies their rounding.
    b = _with_rest(_product(dtype).of_adjoint(start, rounded), dtype, (0, 1), -2)
    y = sum_over(axis_name, _sums(dtype).with_adjoint(rounded, b))
    if b.shape[-2] > k:
        y = y[..., :k] + y[..., k:]
    return Sketch(scale, y, rounded)


def shrinkings(sketches: Sequence[Sketch], dtype: jnp.dtype) -> list[Shrinking]:
    """W of each, with thin matrices of one size in one batch: an operation is a launch, and a product to compile."""
    products, apart = _in_batches([s.y for s in sketches])
    # B B^H is R^H X B^H. R is made again, for it would take as much memory as all X B^H.
    h = [dot.of_adjoint(_start(xb, xb.shape[-1], dtype).astype(xb.dtype), xb) for xb in products]
    ys = [dot(xb, root) for xb, (root, _) in zip(products, _roots(h), strict=True)]
    found = []
    for y, (root, shrunk) in zip(ys, _roots([dot.of_adjoint(y, y) for y in ys]), strict=True):
        exact = dot(y, root)
        v = exact.astype(dtype)
        # 2 - V^H V is the inverse of V^H V up to the square of what rounding and the root leave it off from 1.
        d = 2 * identity_like(root, small=True) - dot.of_adjoint(v.astype(exact.dtype), exact) - shrunk
        found.append((v, dot(exact, _in_memory((1 - _KEPT) * d, dtype))))
    return [Shrinking(s.scale, s.rounded, *vp) for s, vp in zip(sketches, apart(found), strict=True)]


def shrink(x: jax.Array, w: Shrinking, dtype: jnp.dtype) -> jax.Array:
    """The second pass over x: W x in `dtype`, half precision with the range of float32."""
    thin = w.v.dtype
    rounded = _rounded(x, w.scale, thin) if w.rounded is None else w.rounded
    c = _product(thin).of_adjoint(w.v, rounded)
    if thin != jnp.float16:  # X's rounding to bfloat16 would be a third of what is left of exact low rank
        c += _sums(thin).of_adjoint(w.v, (w.scale * x - rounded.astype(x.dtype)).astype(thin))
    p, c = _with_rest(w.p, thin, (0, 1, 0), -1), _with_rest(c, thin, (0, 0, 1), -2)
    return jax.lax.optimization_barrier((w.scale * x - _sums(thin)(p, c)).astype(dtype))


def _sums(dtype: jnp.dtype) -> MatrixProduct:
    """The product of rounded operands, in float32."""
    return MatrixProduct(dtype.name, None)


def _product(dtype: jnp.dtype) -> MatrixProduct:
    """The product of rounded operands; in float16 rounded as well, which saves a pass over it."""
    return MatrixProduct(dtype.name, None, dtype.name if dtype == jnp.float16 else None)


def _rounded(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Once for all thin products.

    A TPU takes two thirds of the time if rounding is part of a fusion and not an instruction of its own.
    """
    return jax.lax.optimization_barrier((scale * x).astype(dtype))


def _start(like: jax.Array, k: int, dtype: jnp.dtype) -> jax.Array:
    """R [*batch, m, k] for `like` [*batch, m, _], of moderate length: no entry of B is out of float16's range."""
    m = like.shape[-2]
    zeros = zero_beside(like, (like.ndim - 2, like.ndim - 1))  # with the sharding of the batch
    start = jnp.expand_dims((random_start(m, k) * m**-0.5).astype(dtype), range(like.ndim - 2))
    return _in_memory(start + zeros.astype(dtype), dtype)


def _in_memory(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """X, made before its products on a GPU (where `dtype` is float16): its compiler tries out each kind of product.

    One with a scaled or repeated factor would be a kind of its own.
    """
    return jax.lax.optimization_barrier(x) if dtype == jnp.float16 else x


def _roots(matrices: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
    """G^(-1/2) and t G^(-1/2) of each G [*batch, k, k]."""
    batches, apart = _in_batches(matrices)
    roots = map(bounded_inverse_root, batches)
    return apart([(number * root, _target(root) * root) for root, number in roots])


def _in_batches(
    arrays: Sequence[jax.Array],
) -> tuple[list[jax.Array], Callable[..., list[tuple[jax.Array, ...]]]]:
    """Arrays [*batch, m, k] of equal m and k as one, [count, m, k]; and what takes such results apart again."""
    together: dict[tuple[int, ...], list[int]] = {}
    for i, a in enumerate(arrays):
        together.setdefault(a.shape[-2:], []).append(i)
    batches = [
        jnp.concatenate([arrays[i].reshape(-1, *size) for i in same]) if len(same) > 1 else arrays[same[0]]
        for size, same in together.items()
    ]

    def apart(results: Sequence[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
        found = {}
        for same, result in zip(together.values(), results, strict=True):
            if len(same) == 1:
                found[same[0]] = result
                continue
            counts = [math.prod(arrays[i].shape[:-2]) for i in same]
            parts = [_cut(x, counts) for x in result]
            for i, *part in zip(same, *parts, strict=True):
                found[i] = tuple(x.reshape(*arrays[i].shape[:-2], *x.shape[1:]) for x in part)
        return [found[i] for i in range(len(arrays))]

    return batches, apart


def _cut(x: jax.Array, counts: Sequence[int]) -> list[jax.Array]:
    """So many entries each. XLA does not know where, so that one kernel cuts all.

    In memory, which takes less of it: a product with a cut in it would keep the whole, and be one kind more to compile.
    """
    starts = jax.lax.optimization_barrier(jnp.asarray(np.cumsum([0, *counts[:-1]]), jnp.int32))
    parts = [jax.lax.dynamic_slice_in_dim(x, starts[j], n) for j, n in enumerate(counts)]
    return jax.lax.optimization_barrier(parts)


def bounded_inverse_root(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Q and a number s [*batch, 1, 1]: s Q = h^(-1/2) of positive semidefinite h [*batch, k, k], in few launches.

    Right for eigenvalues above `_LOWER`^2 |h|_F, and bounded below: what is shrunk by it is
    not shrunk below the rounding errors of bfloat16.
    """
    inverse_bound = inverse_norm(h)
    r, eye = scaled(h, inverse_bound), identity_like(h, small=True)
    q: Any = None
    for stage, (c0, c1, c2, c3, c4) in enumerate(_quartics()):
        r2 = dot(r, r)
        p = dot(r2, c3 * r + c4 * r2) + (c0 * eye + c1 * r + c2 * r2)
        # P on the right here and on the left below: XLA would join products that share an operand, and copy the others.
        q = p if q is None else dot(q, p)
        if stage < _STAGES - 1:
            r = dot(p, dot(p, r))
    return q, jnp.sqrt(inverse_bound)


@functools.cache
def _quartics() -> tuple[np.ndarray, ...]:
    """p of each stage, which is two cubics, s p(s^2) = f2(f1(s)), as coefficients of 1, r, .., r^4."""
    rows = never_above_one(polar_express(2 * _STAGES, lower=_LOWER, safety=1.0, degrees=(3, 3) * _STAGES))
    r, found = np.polynomial.Polynomial([0.0, 1.0]), []
    for (a1, b1, _), (a2, b2, _) in zip(rows[::2], rows[1::2], strict=True):
        first = a1 + b1 * r
        found.append((first * (a2 + b2 * r * first**2)).coef)
    return tuple(found)


def _with_rest(a: jax.Array, dtype: jnp.dtype, parts: tuple[int, ...], axis: int) -> jax.Array:
    """A rounded (part 0) and the rest of it (part 1), side by side; float16 alone, whose rest is small enough.

    Rounded to bfloat16 alone, p and c would leave 1/256 of the largest singular value, of either sign.
    """
    if dtype == jnp.float16:
        return a
    rounded = a.astype(dtype)
    both = rounded, (a - rounded.astype(a.dtype)).astype(dtype)
    return jnp.concatenate([both[part] for part in parts], axis)


def _target(root: jax.Array) -> jax.Array:
    """t from h^(-1/2): 1 / t^2 is the mean of the eigenvalues of h^-1, each weighted with itself."""
    inverse = dot(root, root)
    trace = jnp.sum(jnp.where(on_diagonal(inverse), inverse, 0), (-2, -1), keepdims=True)
    return jnp.sqrt(trace * inverse_norm(inverse) ** 2)
