r"""Polar Express in float32: a matrix becomes nearly orthogonal, by matrix products alone.

With m <= n and R = X X^H [m, m], a step is a polynomial of all singular values of X at once,

    X <- (a I + b R + c R^2) X,    each s <- a s + b s^3 + c s^5,

or one with R^3 and R^4 too. The standard form makes R anew for each step. The Gram form follows R through several steps
and multiplies X once at their end: cheaper where n > 1.5 m, but rounding makes R slightly indefinite, and polynomials
multiply that until R is made anew.

Before the first step the singular values are brought into (0, 1], by products that are needed anyway. First X is scaled
exactly, by a power of two, so that no product of it overflows or underflows; then it is divided by an upper bound of
its largest singular value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from muonjax._common.linalg import (
    MatrixProduct,
    SymmetricProduct,
    map_columns,
    on_diagonal,
    or_one,
    scaled,
    sizes,
    square_norm,
    sum_columns,
)
from muonjax._common.platform import Policy
from muonjax._matrices.columns import Blocks
from muonjax._newton_schulz.coefficients import Coefficients
from muonjax._newton_schulz.deflation import ROUNDING, pre_deflate, shrink_dominant
from muonjax._newton_schulz.settings import NewtonSchulz, Normalization
from pallas_kernels._platform import materialize

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Inexact


# How large the rounding errors of R may grow.
_TOLERATED = 1e-2


def iterate(
    x: Any,
    settings: NewtonSchulz,
    policy: Policy,
    dtype: jnp.dtype,
    axis_name: tuple[str, ...] = (),
) -> Any:
    """X with m <= n, n counted over `axis_name` -> its orthogonalization, in `dtype`: float32 or wider.

    X is an array [*batch, m, n], or `Blocks` [size, m] in `dtype`, of columns of one device.
    """
    m, n = (x.shape[1], x.columns) if isinstance(x, Blocks) else sizes(x, axis_name)
    steps, rank = settings.in_full_precision(m)
    multiply = MatrixProduct(dtype.name, "highest")
    symmetric = SymmetricProduct(policy.platform, dtype, settings.implementation)
    small = symmetric.shared_by(axis_name if policy.shares_products(m, dtype) else ())
    first, *others = _segments(steps, settings.takes_gram_form(m, n), dtype)

    if isinstance(x, Blocks):
        largest = x.sum(_largest_entry, jnp.maximum)
        x, nonzero = x.transposed(lambda x: scaled(x, _scale_of_largest(largest))), largest != 0
    else:
        x, nonzero = below_one(x.astype(dtype), axis_name)
    if rank and len(first) > 1:  # the Gram form won't look at X again before its end
        shrunk = functools.partial(pre_deflate, rank=rank, axis_name=axis_name)
        x = shrunk(x) if isinstance(x, Blocks) else materialize(shrunk, x, policy.platform)
    gram, other_fourth_powers, deflation = sum_columns(symmetric, x, axis_name), 0.0, None
    if rank:  # W X has the same polar factor, and smaller dominant singular values
        deflation = shrink_dominant(gram, rank, policy.platform)
        gram, other_fourth_powers = deflation.gram, deflation.other_fourth_powers
    normalized = normalize(gram, other_fourth_powers, settings.normalization, small)
    normalized = normalized._replace(scale=jnp.where(nonzero, normalized.scale, 0))
    q = _composed(first, normalized, small)
    q = q if deflation is None else deflation.apply_right(q)
    x = map_columns(functools.partial(multiply, q), x)
    for rows in others:
        q = _composed(rows, Normalized(sum_columns(symmetric, x, axis_name)), small)
        x = map_columns(functools.partial(multiply, q), x)
    return x.transposed() if isinstance(x, Blocks) else x


def _composed(
    rows: Coefficients, normalized: Normalized, product: SymmetricProduct
) -> Inexact[Array, "*batch m m"]:
    """Q with p_k(..p_1(X)) = Q X: after a step's P = a I + b R + ... comes Q <- Q P, R <- P R P."""
    diagonal = on_diagonal(normalized.r)
    if len(rows) == 1:
        return _polynomial(rows[0], normalized, product, diagonal)
    now = normalized._replace(scale=1.0)  # which goes into the last product
    q = p = _polynomial(rows[0], now, product, diagonal)
    for step, row in enumerate(rows[1:], 2):
        now = Normalized(product(product(now.r, p, alpha=now.inverse_bound), p))
        p = _polynomial(row, now, product, diagonal)
        q = product(q, p, alpha=normalized.scale if step == len(rows) else 1.0)
    return q


def _polynomial(
    row: tuple[float, ...],
    normalized: Normalized,
    product: SymmetricProduct,
    diagonal: Bool[Array, "*batch m m"],
) -> Inexact[Array, "*batch m m"]:
    """P times the scale: a I + b R + c R^2, or a I + b R + (c I + d R + e R^2) R^2."""
    (a, b, c, *more), (r, r2, inverse_bound, scale) = row, normalized
    if more:
        r2 = product(r) if r2 is None else r2
        d, e = more
        factor = scaled(r, d * inverse_bound) + scaled(r2, e * inverse_bound**2)
        r2, c = product(r2, _plus(c, factor, diagonal)), 1.0  # of it and of R^2
    p = _plus(scale * a, scaled(r, scale * b * inverse_bound), diagonal)
    if c == 0:
        return p
    c = scale * c * inverse_bound**2
    return p + (product(r, alpha=c) if r2 is None else scaled(r2, c))


def _plus(
    number: Any, matrix: Inexact[Array, "*batch m m"], diagonal: Bool[Array, "*batch m m"]
) -> Inexact[Array, "*batch m m"]:
    """a I + M. I is the mask `diagonal`, since XLA would keep a I for each a, computed before a loop."""
    number = number.astype(matrix.dtype) if isinstance(number, jax.Array) else number
    return jnp.where(diagonal, matrix + number, matrix)


def _segments(steps: Coefficients, gram: bool, dtype: jnp.dtype) -> list[Coefficients]:
    """The steps, cut where the Gram matrix is made anew: in the `gram` form where rounding asks for it."""
    cuts = gram_restarts(steps, dtype) if gram else range(1, len(steps))
    return [steps[i:j] for i, j in itertools.pairwise([0, *cuts, len(steps)])]


def gram_restarts(steps: Coefficients, dtype: jax.typing.DTypeLike) -> tuple[int, ...]:
    """Where the Gram form restarts: before rounding can have grown to `_TOLERATED`.

    An error in R of the size of its rounding, on a direction where R is next to nothing, is multiplied by p(0)^2 = a^2
    at each update of R.
    """
    cuts, error = [], ROUNDING * float(jnp.finfo(dtype).eps)
    grown = error
    for t in range(1, len(steps)):
        grown *= steps[t - 1][0] ** 2
        if grown > _TOLERATED:
            cuts.append(t)
            grown = error
    return tuple(cuts)


def below_one(
    x: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...] = ()
) -> tuple[Inexact[Array, "*batch m n"], Bool[Array, "*batch 1 1"]]:
    """x with entries below 1 (a zero matrix with ones), and whether it is not zero.

    A zero matrix becomes the identity, as its result is to be multiplied by zero: derivatives at zero overflow. It is
    added, because XLA's maximum on a CPU can lose a NaN among zeros, which must stay.
    """
    largest = _largest_entry(x, axis_name)
    nonzero = largest != 0
    other = jnp.expand_dims(jnp.eye(*x.shape[-2:], dtype=x.dtype), tuple(range(x.ndim - 2)))
    return jnp.where(nonzero, scaled(x, _scale_of_largest(largest)), x + other), nonzero


def power_of_two_scale(
    x: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...] = ()
) -> Float[Array, "*batch 1 1"]:
    """The power of two that brings the largest entry of each matrix into [0.5, 1).

    Multiplying by it is exact. Zero (and what counts as zero in every product: subnormal numbers), inf and NaN take
    the scale of 1. The two largest binades of the dtype end below 4, as what would bring them lower is no normal
    number. A constant for differentiation: what follows is invariant to positive scaling.

    Args:
      x: Matrices in float32, float64 or complex.
      axis_name: Mesh axes over which each matrix is cut.
    """
    return _scale_of_largest(_largest_entry(x, axis_name))


def _scale_of_largest(largest: Float[Array, "*batch 1 1"]) -> Float[Array, "*batch 1 1"]:
    """The power of two that brings a matrix's largest entry into [0.5, 1); see `power_of_two_scale`."""
    info = jnp.finfo(largest.dtype)
    largest = jnp.where(
        (largest >= info.tiny) & (largest < jnp.inf), largest, jnp.ones_like(largest)
    )
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32 if info.bits == 32 else jnp.int64)
    # By bits alone: `ldexp` and `frexp` are a page of code, compiled into everything that reads x.
    bias = info.maxexp - 1
    exponent = jnp.maximum(2 * bias - 1 - (bits >> info.nmant), 1)
    return jax.lax.bitcast_convert_type(exponent << info.nmant, largest.dtype)


def _largest_entry(
    x: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...] = ()
) -> Float[Array, "*batch 1 1"]:
    """The largest absolute value of each matrix (complex: of real and imaginary parts); a constant to derivatives."""
    x = jax.lax.stop_gradient(x)
    # The larger part of a complex entry, because its absolute value can overflow.
    entries = jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)) if jnp.iscomplexobj(x) else jnp.abs(x)
    largest = jnp.max(entries, axis=(-2, -1), keepdims=True)
    return jax.lax.pmax(largest, axis_name) if axis_name else largest


class Normalized(NamedTuple):
    """R = X X^H as `inverse_bound` r, where X is `scale` x.

    Attributes:
      r2: The square of r, where that is already made.
    """

    r: Inexact[Array, "*batch m m"]
    r2: Inexact[Array, "*batch m m"] | None = None
    inverse_bound: Float[Array, "*batch 1 1"] | float = 1.0
    scale: Float[Array, "*batch 1 1"] | float = 1.0


def normalize(
    gram: Inexact[Array, "*batch m m"],
    other_fourth_powers: Float[Array, "*batch 1 1"] | float,
    normalization: Normalization,
    product: Callable[[jax.Array], jax.Array],
) -> Normalized:
    """The Gram matrix A divided by an upper bound of its largest eigenvalue: its trace or its Schatten norm.

    The Schatten-8 norm of X: with A = f B, f = ||A||_F, no eigenvalue of A is above f ||B^2||_F^(1/2). ||B^2||_F^2 is
    the sum of the fourth powers of B's eigenvalues. A part of it, of all but the largest, is known and subtracted:
    `other_fourth_powers` / f^4. What is left is that of the largest at least, and 1/m of the sum.

    Args:
      other_fourth_powers: A lower bound of the sum of the fourth powers of all eigenvalues of `gram` except the
        largest.
    """
    if normalization == "frobenius":
        bound = trace_or_one(gram)
        return Normalized(gram / bound.astype(gram.dtype), scale=jax.lax.rsqrt(bound))
    # B, for the fourth power of A is no number where A is large or small.
    inverse_frobenius = jax.lax.rsqrt(or_one(square_norm(gram)))
    gram = scaled(gram, inverse_frobenius)
    gram2 = product(gram)
    fourth = square_norm(gram2)
    # After deflation, a matrix of rank one is so small that the fourth power of its norm would not be a number.
    other_fourth_powers = jnp.where(
        other_fourth_powers == 0,
        0,
        (jnp.sqrt(jnp.sqrt(or_one(other_fourth_powers))) * inverse_frobenius) ** 4,
    )
    fourth = jnp.maximum(fourth - other_fourth_powers, fourth / gram.shape[-1])
    inverse_bound = jax.lax.rsqrt(jnp.sqrt(or_one(fourth)))
    return Normalized(gram, gram2, inverse_bound, jnp.sqrt(inverse_frobenius * inverse_bound))


def trace_or_one(gram: jax.Array) -> Float[Array, "*batch 1 1"]:
    """The trace, which is no smaller than the largest eigenvalue; of a zero matrix 1."""
    return or_one(jnp.trace(gram, axis1=-2, axis2=-1).real[..., None, None])
