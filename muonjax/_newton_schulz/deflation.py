r"""Shrink the few dominant directions of a Gram matrix,
so that the other singular values start closer to 1.

The momentum of a transformer has a few dominant directions and many small singular values (median
sigma/sigma_1 about 1e-2). After a division by the largest singular value nearly all of them are
therefore tiny, and Newton-Schulz needs its first steps to enlarge them. If A = X X^H is already
computed, a thin basis V of the dominant subspace costs three thin products with A, and

    W = I - V D V^H,    D = I - g(V^H A V),    g(h) ~ target * h^(-1/2)

brings the top k singular values of W X to one target. Where V spans an invariant subspace of A, W
is a positive definite function of A; it commutes with A, and W X has exactly X's polar factor.
Where V does not, the polar factor moves; a first-order bound of that follows from the residual
A V - V (V^H A V), and D is shrunk until the bound is below `_TOLERANCE`.

Where the iteration uses only A and not X (the Gram form), the rounding of A matters: eigenvalues
smaller than the rounding error of the largest one are lost, and can even become negative. There a
few directions are shrunk in X before A is computed (see `pre_deflate`), at the cost of some passes
over X, and a bound of the remaining rounding error is added to the diagonal of A.

Only products are used: a factorization would not run on the matrix units,
and on a CPU it would start further threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from muonjax._common.linalg import (
    adjoint,
    dot,
    hermitian_part,
    identity_like,
    inverse_norm,
    on_diagonal,
    scaled,
    square_norm,
)
from muonjax._newton_schulz.coefficients import never_above_one, polar_express
from pallas_kernels._symmetric_product import SymmetricProduct

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact

# Number of products with A, from the random start. After one, the error of the subspace adds up to
# 0.05 to the polar error on real momentum; after two, nothing.
_SUBSPACE_STEPS = 2

# Number of orthonormalizations after each product. More than one is needed because the condition
# number of Y^H Y is the square of that of Y: singular values of Y below 1e-3 of the largest are
# lost in its rounding.
_ORTHONORMALIZATIONS = 2

# Rounding errors of a Gram matrix's entries in units of the least possible:
# sums of many terms lose more.
ROUNDING = 4

# Directions that the Gram form shrinks in X before A is made, at most.
# Four do nearly as well on recorded momentum.
_PRE_DEFLATED = 8

# The root mean square polar error that an inexact subspace may cause each time that it is shrunk,
# to first order.
_TOLERANCE = 0.05

# Added to k x k matrices in units of their norm: no direction is then below 1e-3 of the largest.
# Smaller ones would be rounding errors of A = X X^H in float32.
_RIDGE = 1e-6

# Steps whose product is about R^(-1/2), for eigenvalues of R from 1e-4 to 1.
_POLYNOMIALS = never_above_one(polar_express(5, lower=1e-2))


class Deflation(NamedTuple):
    """The map W = I - P V^H that shrinks k dominant directions of A = X X^H,
    and what it makes of A.

    Attributes:
      p: V D, where D says by how much each direction is shrunk.
      v: The directions, nearly orthonormal columns.
      gram: W A W, the Gram matrix of W X.
      dominant: V^H W A W V, what is left of the k directions.
    """

    p: Inexact[Array, "*batch m k"]
    v: Inexact[Array, "*batch m k"]
    gram: Inexact[Array, "*batch m m"]
    dominant: Inexact[Array, "*batch k k"]

    def apply_right(
        self, q: Inexact[Array, "*batch m m"]
    ) -> Inexact[Array, "*batch m m"]:
        """q W."""
        return q - dot(dot(q, self.p), adjoint(self.v))


def pre_deflate(
    x: Inexact[Array, "*batch m n"], rank: int
) -> Inexact[Array, "*batch m n"]:
    """X - V D V^H X: X with a few dominant directions V [*batch, m, k] shrunk; the polar factor
    stays, nearly.

    The Gram form takes its first steps from A = X X^H alone. The rounding error of A is in
    proportion to its largest eigenvalue, and smaller eigenvalues than the error are lost. So the
    largest are shrunk before A is made. Here k is at most eight, since these products are with X,
    which is larger than A. `shrink_dominant` then shrinks `rank` directions in A.
    """

    def multiply(v):
        # X X^H V as X (V^H X)^H: X^H V would transpose X, which takes longer than the rest.
        return dot.with_adjoint(x, dot(adjoint(v), x))

    start = _random_start(x, min(rank, _PRE_DEFLATED))
    v = _dominant_subspace(multiply, start, num_steps=1)
    # D [*batch, k, k] brings the singular values of the k directions to about the smallest of
    # them. After one step V is inexact, so that this moves the polar factor too: D is held so small
    # that the movement is at most `_TOLERANCE`.
    _, d = _projection_and_shrinkage(v, multiply(v))
    # X - V D V^H X
    return x - dot(dot(v, d), dot(adjoint(v), x))


@functools.partial(jax.jit, static_argnames=("rank", "platform"))
def shrink_dominant(
    gram: Inexact[Array, "*batch m m"],
    squares: Float[Array, "*batch m"],
    rank: int,
    platform: str,
) -> Deflation:
    """The map W = I - V D V^H, which shrinks the k = `rank` largest singular values of X to about
    the k-th; the Gram matrix W A W of W X; and V^H W A W V, what is left of the k directions.

    V [m, k] has nearly orthonormal columns that nearly span their directions; D [k, k], Hermitian,
    says by how much each is shrunk. `jit` traces this once for each m, whatever the longer side of
    X.

    Args:
      gram: A = X X^H, in float32 or wider, with entries of moderate size.
      squares: A's diagonal, the sums of |x|^2 of X's rows, not made by that product.
      rank: k, in 1..m.
      platform: The platform of the device.
    """
    # V spans the dominant directions.
    start = _random_start(gram, rank)
    v = _dominant_subspace(lambda v: dot(gram, v), start, num_steps=_SUBSPACE_STEPS)
    # A V, [*batch, m, k]
    av = dot(gram, v)
    # H = V^H A V, and D
    h, d = _projection_and_shrinkage(v, av)

    # W A W = A - P S^H - S P^H with P = V D and S = A V - P (V^H A V) / 2.
    p = dot(v, d)
    s = av - dot(p, h) / 2
    # One product [m, 2 k] [2 k, m] makes both terms: [P S] [S P]^H = P S^H + S P^H.
    ps = jnp.concatenate([p, s], axis=-1)
    sp = jnp.concatenate([s, p], axis=-1)
    removed = SymmetricProduct(platform)(ps, sp)
    # The difference keeps the rounding errors of A, which may be larger than what remains. So a
    # bound of them is added to the diagonal first.
    shrunk = _above_rounding(gram, squares) - removed

    # What is left of the k directions: from it `other_fourth_powers` makes a lower bound, so that
    # it may be too small, as here without what was just added to the diagonal, and never too large.
    # V^H V is not quite I: V^H W = w V^H with w = I - V^H V D, so V^H W A W V = w H w^H.
    w = identity_like(d, as_constant=True) - dot(dot(adjoint(v), v), d)
    dominant = dot(dot(w, h), adjoint(w))
    return Deflation(p, v, gram=shrunk, dominant=dominant)


def _projection_and_shrinkage(
    v: Inexact[Array, "*batch m k"], av: Inexact[Array, "*batch m k"]
) -> tuple[Inexact[Array, "*batch k k"], Inexact[Array, "*batch k k"]]:
    """H = V^H A V, and D with W = I - V D V^H, from nearly orthonormal V and A V.

    If V spans k eigenvectors of the Gram matrix A of X, W brings their singular values to one
    target in W X, about the smallest of them. Otherwise W also moves the polar factor, and D is
    multiplied by a number that brings a bound of this error down to `_TOLERANCE`.
    """
    h = dot(adjoint(v), av)
    # H^(-1/2) and H^(-1)
    inverse_sqrt = inverse_root(h)
    inverse = dot(inverse_sqrt, inverse_sqrt)
    # The target is the smallest singular value of the k directions, or a little below, as
    # `_largest_eigenvalue` is an upper bound. So none of them is then much larger than the rest.
    inverse_target = jnp.sqrt(_largest_eigenvalue(inverse))
    # D = I - target H^(-1/2)
    d = identity_like(inverse_sqrt, as_constant=True)
    d = d - scaled(inverse_sqrt, 1 / inverse_target)

    # A direction of V may be turned by a small angle theta, from a singular vector with the
    # singular value s toward another one with t. For these two, where D is a number and H^(-1/2) is
    # 1 / s, and to first order,
    #     A V - V H has the entry    sin(theta) (s^2 - t^2),
    #     the polar factor moves by  sin(theta) D (s - t) / (target + t),
    #                 which is <= sin(theta) (s^2 - t^2) D / (s target).
    # So no movement is larger than the entry of (A V - V H) D H^(-1/2) / target.
    residual = dot(av - dot(v, h), dot(d, inverse_sqrt))
    bounds = scaled(residual, inverse_target)
    # Each counts twice, for (s, t) and (t, s). So over m directions the root mean square is at most
    # sqrt(2 / m) |bounds|_F, and this share of D makes that `_TOLERANCE`.
    # `inverse_norm` is 1 / |bounds|_F.
    allowed_share = _TOLERANCE * math.sqrt(v.shape[-2] / 2) * inverse_norm(bounds)
    return h, scaled(d, jnp.minimum(1, allowed_share))


def _largest_eigenvalue(a: Inexact[Array, "*batch k k"]) -> Float[Array, "*batch 1 1"]:
    """An upper bound of the largest eigenvalue of positive semidefinite a: ||a^8||_F^(1/8)."""
    tiny = jnp.finfo(a.dtype).tiny  # a root has no derivative at zero
    # In units of its norm, since the eighth power of a may be no number.
    norm = jnp.sqrt(square_norm(a) + tiny)
    a = scaled(a, 1 / norm)
    a2 = dot(a, a)
    a4 = dot(a2, a2)
    a8 = dot(a4, a4)
    return norm * (square_norm(a8) + tiny) ** (1 / 16)


def other_fourth_powers(a: Inexact[Array, "*batch k k"]) -> Float[Array, "*batch 1 1"]:
    """A lower bound of the sum of the fourth powers of all but one eigenvalue of M,
    where a = V^H M V.

    No combination of V's columns is longer than its coefficients, so by interlacing the i-th
    eigenvalue of M is at least the i-th of a, and the sum over i >= 2 is at least ||a^2||_F^2 -
    ||a||_2^4.
    """
    return jnp.maximum(square_norm(dot(a, a)) - _largest_eigenvalue(a) ** 4, 0)


def _dominant_subspace(
    multiply: Callable[[jax.Array], jax.Array],
    start: Inexact[Array, "*batch m k"],
    num_steps: int,
) -> Inexact[Array, "*batch m k"]:
    """Columns V that nearly span the dominant directions of A,
    by steps of V <- orthonormalized A V.

    They are nearly orthonormal. No combination of them is longer than its coefficients, as
    `inverse_root` is never above the exact root: `other_fourth_powers` counts on that.

    Args:
      multiply: v -> A v, where A is positive semidefinite.
      start: V before the first step.
      num_steps: How many steps.
    """

    def orthonormalize(_, y):
        # Y (Y^H Y)^(-1/2)
        return dot(y, inverse_root(dot(adjoint(y), y)))

    def subspace_step(_, v):
        y = multiply(v)
        # More than one: Y^H Y has the square of Y's condition number, so that the first leaves the
        # directions too short in which Y is small.
        return jax.lax.fori_loop(0, _ORTHONORMALIZATIONS, orthonormalize, y)

    return jax.lax.fori_loop(0, num_steps, subspace_step, start)


@jax.jit
def inverse_root(h: jax.Array) -> jax.Array:
    """Q = h^(-1/2) of positive semidefinite h [*batch, k, k], by products alone.

    Eigenvalues of h below `_RIDGE` of its norm count as about that. No eigenvalue of Q is above
    that of the exact root, which `other_fourth_powers` counts on: where R has the eigenvalue s^2,
    the steps take s to a number of at most 1, which is s times what they multiply Q by. `jit`
    traces this once for each shape of h.
    """
    # A constant of the program: XLA's CPU compiler takes long for a comparison of rows and columns.
    eye = identity_like(h, as_constant=True)
    inverse = inverse_norm(h)
    # For eigenvalues of R from 1e-4 to 1; smaller ones, down to the ridge, leave Q too small.
    rows = jnp.asarray(_POLYNOMIALS, h.dtype)

    def step(r_and_q, row):
        r, q = r_and_q
        a, b, c = row
        # R tends to I and Q to h^(-1/2):
        # P = a I + b R + c R^2, R <- P R P, Q <- Q P
        # Rounding makes the products slightly asymmetric, which `hermitian_part` removes.
        p = a * eye + b * r + c * dot(r, r)
        r = hermitian_part(dot(dot(p, r), p))
        return (r, hermitian_part(dot(q, p))), None

    # R = h / |h|_F plus the ridge has eigenvalues from the ridge to about 1, and Q begins as
    # |h|_F^(-1/2) I.
    r = scaled(h, inverse) + _RIDGE * eye
    q = scaled(eye, jnp.sqrt(inverse))
    (_, q), _ = jax.lax.scan(step, (r, q), rows)
    return q


def _random_start(
    a: Inexact[Array, "*batch m n"], k: int
) -> Inexact[Array, "*batch m k"]:
    """Fixed random numbers in [-1, 1]: the start of the subspace iteration,
    the same for each matrix and device.

    Not signs: with few columns two rows of signs can be equal, and the start then has nothing in
    the direction of their difference.
    """
    *batch, m, _ = a.shape
    # The finalizer of MurmurHash3 on a counter: jax.random's generators take longer to compile than
    # all the rest. The counter begins at 1, since the finalizer maps 0 to 0.
    bits = jax.lax.iota(jnp.uint32, m * k) + jnp.uint32(1)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    # As signed integers the bits are evenly spread over -2^31 to 2^31.
    integers = jax.lax.bitcast_convert_type(bits ^ (bits >> 16), jnp.int32)
    numbers = (integers.astype(jnp.float32) * jnp.float32(2.0**-31)).reshape(m, k)
    numbers = jnp.broadcast_to(numbers.astype(a.dtype), (*batch, m, k))
    # Inside of `jax.shard_map` the start must vary over the mesh axes of `a`,
    # as what the loop makes of it does.
    return jnp.zeros_like(a[..., :1]) + numbers


def _above_rounding(
    gram: Inexact[Array, "*batch m m"], squares: Float[Array, "*batch m"]
) -> Inexact[Array, "*batch m m"]:
    """A + delta I for the Gram matrix A = X X^H, where delta is somewhat above the error that
    rounding left in A. `squares` has the sums of |x|^2 of X's rows, not made by that product.

    The caller subtracts the dominant part of A from it. The rounding error of A remains, may be
    larger than the remaining eigenvalues, and could make one of them negative, which polynomials
    can amplify without bound.

    At best the entries have errors of random sign and of the size (eps / 2) sqrt(a_ii a_jj). The
    norm of a symmetric matrix of such entries is about twice that of its largest row, so it is
    eps sqrt(max a_ii * tr A). Sums of many terms lose more: `ROUNDING` times that. Where the
    columns of X are equal, the errors of equal terms add up, to as much as 47 times (measured).
    The diagonal of A shows how much: `squares` is summed in another order, and in all measurements
    the largest relative difference, in units of eps, was above the factor that was needed.
    """
    info = jnp.finfo(gram.dtype)
    # A masked sum: a strided slice of the flattened matrix does not compile for a TPU.
    mask = on_diagonal(gram)
    diagonal = jnp.sum(jnp.where(mask, gram.real, 0), -1)
    largest = diagonal.max(-1)
    # `tiny`, since a square root has no derivative at zero
    norm = jnp.sqrt(largest * diagonal.sum(-1) + info.tiny)
    # A row next to zero has no meaningful relative error: its divisor is eps times the largest.
    sizes = diagonal + info.eps * largest[..., None] + info.tiny
    error = jnp.max(jnp.abs(diagonal - squares) / sizes, -1)
    delta = (jnp.maximum(ROUNDING * info.eps, error) * norm)[..., None, None]
    return jnp.where(mask, gram + delta.astype(gram.dtype), gram)
