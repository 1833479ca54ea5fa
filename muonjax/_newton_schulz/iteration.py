r"""The Newton-Schulz iteration: a matrix becomes nearly orthogonal, by matrix products alone.

With m <= n (else of the transpose) and R = X X^H [m, m], a step is a polynomial of all singular values of X at once,

    X <- (a I + b R + c R^2) X,    each s <- a s + b s^3 + c s^5.

Before the first one X is scaled by a power of two, its dominant directions are shrunk (`deflation`), and it is divided
by an upper bound of its largest singular value (`normalization`). The standard form makes R anew for each step; the
Gram form follows it through several steps and multiplies X once at their end. That is cheaper where n > 1.5 m, but
rounding makes R slightly indefinite, and polynomials multiply that until R is made anew. Accelerators multiply in half
precision, and take the same steps in another order (`half_precision`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from muonjax._linalg import (
    MatrixProduct,
    SymmetricProduct,
    on_diagonal,
    scaled,
    sizes,
    sum_over,
)
from muonjax._newton_schulz import half_precision
from muonjax._newton_schulz.coefficients import Coefficients
from muonjax._newton_schulz.deflation import ROUNDING, pre_deflate, shrink_dominant
from muonjax._newton_schulz.normalization import Normalized, below_one, normalize
from muonjax._newton_schulz.settings import NewtonSchulz, settings_of
from muonjax._newton_schulz.thin_deflation import Shrinking
from muonjax._policy import Policy, policy_of
from pallas_kernels._platform import materialize

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Inexact

# How large the rounding errors of R may grow.
_TOLERATED = 1e-2


def newton_schulz(
    x: Inexact[Array, "*batch m n"], settings: NewtonSchulz | None = None, *, axis_name: tuple[str, ...] = ()
) -> Inexact[Array, "*batch m n"]:
    """The polar factor U V^H of x = U S V^H, approximately: every singular value is moved close to 1.

    Args:
      x: [*batch, m, n], float or complex, wide or tall, at any scale (1e-30 and 1e30 give the same).
      settings: Which polynomials, in which form and precision; `NewtonSchulz()` if None.
      axis_name: Mesh axes, inside of `jax.shard_map`, over which the columns of one matrix are cut: x is then
        this device's share of a wide matrix, and Gram matrices are summed over the axes.

    Returns:
      Same shape and dtype. A zero matrix gives zeros; a matrix with NaN or inf gives NaN in that matrix only.

    Raises:
      ValueError: If x is no matrix, or has an empty dimension.
      TypeError: If x holds integers.

    Example:
      >>> import jax, muonjax
      >>> x = jax.random.normal(jax.random.key(0), (32, 128))
      >>> y = muonjax.newton_schulz(x, muonjax.NewtonSchulz.accurate())
      >>> bool(abs(y @ y.T - jax.numpy.eye(32)).max() < 1e-5)
      True

    Source: Bernstein & Newhouse, "Old optimizer, new norm", 2024; Amsel et al., "The Polar Express", 2025.
    """
    settings = settings_of(settings, "newton_schulz", "x, settings")
    if not hasattr(x, "ndim"):
        raise TypeError(f"newton_schulz(x) needs an array, got {type(x).__name__}; give jnp.asarray(x).")
    if x.ndim < 2:
        raise ValueError(
            f"newton_schulz(x) needs a matrix, got shape {x.shape}; give a bias to Adam instead."
        )
    if 0 in x.shape:
        raise ValueError(f"newton_schulz(x) got shape {x.shape}: an empty matrix has no polar factor.")
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"newton_schulz(x) needs a float or complex matrix, got {x.dtype}.")
    return polar_factor(x, settings, policy_of(x), axis_name)


def polar_factor(
    x: Inexact[Array, "*batch m n"],
    settings: NewtonSchulz,
    policy: Policy,
    axis_name: tuple[str, ...] = (),
    shrinking: Shrinking | None = None,
) -> Inexact[Array, "*batch m n"]:
    """`newton_schulz` of checked arguments; `shrinking` is that of a wide x in half precision, where it is known."""
    dtype = policy.compute_dtype(x.dtype, settings.compute_dtype)
    tall = not axis_name and x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x
    if dtype == jnp.bfloat16:
        y = half_precision.iterate(wide, settings, policy, dtype, axis_name, shrinking)
    else:
        y = _iterate(wide, settings, policy, dtype, axis_name)
    if tall and policy.is_cpu and dtype == jnp.bfloat16:
        # XLA makes the transposition a part of the last product, and has none of bfloat16 with float32 sums.
        y = jax.lax.optimization_barrier(y)
    return (y.mT if tall else y).astype(x.dtype)


def _iterate(
    x: Inexact[Array, "*batch m n"],
    settings: NewtonSchulz,
    policy: Policy,
    dtype: jnp.dtype,
    axis_name: tuple[str, ...],
) -> Inexact[Array, "*batch m n"]:
    """X with m <= n, n counted over `axis_name` -> its orthogonalization, in `dtype`: float32 or wider."""
    m, n = sizes(x, axis_name)
    apply = MatrixProduct(dtype.name, "highest")
    product = SymmetricProduct(policy.platform, dtype, settings.implementation)
    small_product = product.shared_by(axis_name if policy.shares_products(m, dtype) else ())

    x, nonzero = below_one(x.astype(dtype), axis_name)
    first, *others = _segments(settings, m, n, dtype)
    rank = min(settings.deflation, m // 8)
    if rank and len(first) > 1:  # the Gram form won't look at X again before its end
        x = materialize(lambda x: pre_deflate(x, rank, axis_name), x, policy.platform)
    gram = sum_over(axis_name, product(x))
    deflation, other_fourth_powers = None, 0.0
    if rank:  # W X has the same polar factor, and smaller dominant singular values
        deflation = shrink_dominant(gram, rank, policy.platform)
        gram, other_fourth_powers = deflation.gram, deflation.other_fourth_powers
    normalized = normalize(gram, other_fourth_powers, settings.normalization, small_product)
    normalized = normalized._replace(scale=jnp.where(nonzero, normalized.scale, 0))
    q = _left_factor(first, normalized, small_product)
    x = apply(q if deflation is None else deflation.apply_right(q), x)
    for rows in others:
        x = apply(_left_factor(rows, Normalized(sum_over(axis_name, product(x))), small_product), x)
    return x


def _segments(settings: NewtonSchulz, m: int, n: int, dtype: jnp.dtype) -> list[Coefficients]:
    """The steps, cut where the Gram matrix is made anew; this is form="auto" from float32 on (see `half_precision`)."""
    steps = settings.steps
    if settings.form == "gram" or (settings.form == "auto" and n > 1.5 * m):
        cuts = gram_restarts(steps, dtype)
    else:
        cuts = range(1, len(steps))
    return [steps[i:j] for i, j in itertools.pairwise([0, *cuts, len(steps)])]


def gram_restarts(steps: Coefficients, dtype: jax.typing.DTypeLike) -> tuple[int, ...]:
    """Where the Gram form restarts by default: before rounding can have grown to `_TOLERATED`.

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


def _left_factor(
    rows: Coefficients, normalized: Normalized, product: SymmetricProduct
) -> Inexact[Array, "*batch m m"]:
    """Q with p_k(..p_1(X)) = Q X: after P = a I + b R + c R^2 comes Q <- Q P, R <- P R P."""
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
    row: tuple[float, float, float],
    normalized: Normalized,
    product: SymmetricProduct,
    diagonal: Bool[Array, "*batch m m"],
) -> Inexact[Array, "*batch m m"]:
    """P times the scale; I as the mask `diagonal`, for XLA would keep a I for each a, computed before a loop."""
    (a, b, c), (r, r2, inverse_bound, scale) = row, normalized
    p = scaled(r, scale * b * inverse_bound)
    own = scale * a
    p = jnp.where(diagonal, p + (own.astype(p.dtype) if isinstance(own, jax.Array) else own), p)
    if c == 0:
        return p
    c = scale * c * inverse_bound**2
    return p + (product(r, alpha=c) if r2 is None else scaled(r2, c))
