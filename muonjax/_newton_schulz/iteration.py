r"""The iteration in full precision, and the entry `newton_schulz`: matrix -> nearly orthogonal matrix, by products.

Everything happens on the small side: x is [m, n] with m <= n (else its transpose). With A = X X^H,

1. scale x by a power of two, so that no product over- or underflows (exact);
2. shrink the dominant directions of A (see `deflation`);
3. divide by an upper bound of the largest singular value that the products give for free;
4. run the polynomials on R = A / s^2, gathering their product in Q; x <- Q x at each restart and at the end.

The *standard* form restarts after every step: R is made anew from x, at 2 m^2 n multiply-adds more each
time. The *Gram* form restarts seldom or never and works on m x m matrices throughout: cheaper where n > 1.5
m, but rounding makes R slightly indefinite, which the polynomials amplify until the next restart. Both are
one piece of code here.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from muonjax._cost_model import BYTES_A_SECOND, flops_a_second
from muonjax._linalg import MatrixProduct, at_least_float32, on_diagonal, scaled
from muonjax._newton_schulz import half_precision
from muonjax._newton_schulz.coefficients import Coefficients
from muonjax._newton_schulz.deflation import ROUNDING, pre_deflate, shrink_dominant
from muonjax._newton_schulz.normalization import normalize
from muonjax._newton_schulz.products import SymmetricProduct
from muonjax._newton_schulz.scaling import largest_entry, scale_of_largest
from muonjax._newton_schulz.settings import NewtonSchulz
from muonjax._policy import Policy, policy_of
from pallas_kernels._xla_workarounds import materialize

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Inexact

# How large the rounding errors of R may grow in the Gram form.
_TOLERATED = 1e-2

# Directions that the Gram form shaves off x before A is made. Four do nearly as well on recorded momentum.
_PRE_DEFLATED = 8


def gram_restarts(steps: Coefficients, dtype: jax.typing.DTypeLike) -> tuple[int, ...]:
    """Where the Gram form restarts by default: before rounding can have grown to `_TOLERATED`.

    An error in R of the size of its rounding, on a direction where R is next to nothing, is multiplied by p(0)^2 = a^2
    at each update of R. In half precision that allows no step at all: there the Gram form becomes the standard one.
    """
    cuts, error = [], ROUNDING * float(jnp.finfo(dtype).eps)
    grown = error
    for t in range(1, len(steps)):
        grown *= steps[t - 1][0] ** 2
        if grown > _TOLERATED:
            cuts.append(t)
            grown = error
    return tuple(cuts)


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
    settings = NewtonSchulz() if settings is None else settings
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
    x: Inexact[Array, "*batch m n"], settings: NewtonSchulz, policy: Policy, axis_name: tuple[str, ...] = ()
) -> Inexact[Array, "*batch m n"]:
    """`newton_schulz` of checked arguments."""
    tall = not axis_name and x.shape[-2] > x.shape[-1]
    y = _iterate(x.mT if tall else x, settings, policy, axis_name)
    return (y.mT if tall else y).astype(x.dtype)


def _segments(settings: NewtonSchulz, shape: tuple[int, ...], dtype: jnp.dtype) -> list[Coefficients]:
    """The steps, cut where the Gram matrix is made anew. This is the one rule behind form="auto"."""
    steps = settings.steps
    m, n = shape[-2:]
    wide = n > 1.5 * m
    exact_enough = jnp.finfo(dtype).eps <= jnp.finfo(jnp.float32).eps
    gram = settings.form == "gram" or (settings.form == "auto" and wide and exact_enough)
    if gram:
        cuts = gram_restarts(steps, dtype) if settings.restarts is None else settings.restarts
    else:
        cuts = tuple(range(1, len(steps)))
    ends = [0, *cuts, len(steps)]
    return [steps[i:j] for i, j in itertools.pairwise(ends)]


def _worth_sharing(settings: NewtonSchulz, m: int, dtype: jnp.dtype) -> bool:
    """Whether devices that hold the same m x m matrices save time by each making a part of their products.

    Of p devices each saves (1 - 1/p) m^3 flops at least (where "reference" makes both triangles, m^3 more), and sends
    (1 - 1/p) m^2 / 2 numbers. No latency is counted, so the larger saving is no reason to share smaller matrices.
    """
    return (
        settings.implementation is None and 2 * m * BYTES_A_SECOND >= flops_a_second(dtype) * dtype.itemsize
    )


def _runs_in_half_precision(settings: NewtonSchulz, policy: Policy, dtype: jnp.dtype) -> bool:
    """Whether `half_precision` has all that is asked for. float16 lacks the range, a Gram form the digits.

    On a CPU half precision saves no time, and who asks for it there gets the more accurate iteration below.
    """
    return (
        not policy.is_cpu
        and dtype == jnp.bfloat16
        and settings.form != "gram"
        and settings.restarts is None
        and settings.normalization == "schatten"
        and all(a != 0 and b != 0 for a, b, _ in settings.steps)
    )


def _iterate(
    x: Inexact[Array, "*batch m n"],
    settings: NewtonSchulz,
    policy: Policy,
    axis_name: tuple[str, ...],
) -> Inexact[Array, "*batch m n"]:
    """x with m <= n, n counted over `axis_name` -> its orthogonalization, in the dtype of the sums."""
    dtype = policy.compute_dtype(x.dtype, settings.compute_dtype)
    columns = x.shape[-1] * math.prod(map(jax.lax.axis_size, axis_name))
    if _runs_in_half_precision(settings, policy, dtype):
        together = axis_name if _worth_sharing(settings, x.shape[-2], dtype) else ()
        return half_precision.iterate(x, settings, policy, dtype, columns, axis_name, together)
    sum_dtype = at_least_float32(dtype)
    half = dtype != sum_dtype
    apply = MatrixProduct(dtype.name, None if half else "highest")
    product = SymmetricProduct(policy.platform, dtype, settings.implementation)

    def over_columns(gram):
        return jax.lax.psum(gram, axis_name) if axis_name else gram

    x, nonzero = _scaled(x.astype(sum_dtype), axis_name)
    segments = _segments(settings, (*x.shape[:-1], columns), dtype)
    together = axis_name if _worth_sharing(settings, x.shape[-2], dtype) else ()
    small_product = product._replace(together=together)
    rank = min(settings.deflation, x.shape[-2] // 8)
    if rank and not half and len(segments[0]) > 1:
        # The Gram form won't look at x again before the end.
        x = materialize(lambda x: pre_deflate(x, min(_PRE_DEFLATED, rank), over_columns), x, policy.platform)
    gram = over_columns(apply(x, x.mT) if half else product(x))  # deflation wants all digits of the sums
    deflation, other_fourth_powers = None, 0.0
    if rank:
        deflation = shrink_dominant(gram, rank, policy.platform)
        gram, other_fourth_powers = deflation.gram, deflation.other_fourth_powers
    if deflation is not None and (half or settings.normalization == "aol"):
        # x is rounded to half precision only now: before, the error would be as large as the tail. And once its rows
        # are rescaled, its dominant directions are no longer those of the Gram matrix.
        x, deflation = deflation.apply(x), None
        if half and len(segments[0]) > 1:
            gram = over_columns(product(x))  # of what was rounded

    x, r, r2, inverse_bound, root = normalize(
        x, gram, other_fourth_powers, settings.normalization, small_product
    )
    root = jnp.where(nonzero, root, 0)
    for index, rows in enumerate(segments):
        if index > 0:
            r, r2, inverse_bound, root = over_columns(product(x)), None, 1.0, 1.0
        # x itself is divided by the bound and, where that was left to do, deflated only here, on the small side.
        a, q = _polynomials(rows, r, r2, inverse_bound, root, small_product, split=half)
        if index == 0 and deflation is not None:
            q = deflation.apply_right(q)
        x = apply(q, x) if a is None else scaled(x, a) + apply(q, x)
    return x


def _scaled(
    x: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...]
) -> tuple[Inexact[Array, "*batch m n"], Bool[Array, "*batch 1 1"]]:
    """x with entries below 1, and whether it is not zero.

    A zero matrix passes as the identity, for its result is to be multiplied by zero: derivatives at zero overflow. The
    identity is added, for XLA's maximum on a CPU can lose a NaN among zeros, which must stay.
    """
    largest = largest_entry(x, axis_name)
    nonzero = largest != 0
    other = jnp.expand_dims(jnp.eye(*x.shape[-2:], dtype=x.dtype), tuple(range(x.ndim - 2)))
    return jnp.where(nonzero, scaled(x, scale_of_largest(largest)), x + other), nonzero


def _polynomials(
    rows: Coefficients,
    r: Inexact[Array, "*batch m m"],
    r2: Inexact[Array, "*batch m m"] | None,
    inverse_bound: Float[Array, "*batch 1 1"] | float,
    scale: Float[Array, "*batch 1 1"] | float,
    product: SymmetricProduct,
    *,
    split: bool,
) -> tuple[Float[Array, "*batch 1 1"] | float | None, Inexact[Array, "*batch m m"]]:
    """The composition of `rows`, times `scale`, as a map on x: None and Q for x -> Q x, or a and Q for a x + Q x.

    Args:
      r: X X^H, normalized and divided by `inverse_bound`.
      r2: Its square, where that is already made.
      split: Keep the identity's share of each polynomial apart; in half precision it would cost the rest its digits.
    """
    diagonal = on_diagonal(r)

    def plus_identity(r, a):
        """R + a I, by a mask: XLA would compute a I outside of a loop over matrices, and keep one for each a."""
        return jnp.where(diagonal, r + (a.astype(r.dtype) if isinstance(a, jax.Array) else a), r)

    def quadratic(row, inverse_bound, scale: Any = 1.0):
        """P = a I + b R + c R^2, times `scale`; without a I if `split`."""
        a, b, c = row
        linear = scaled(r, scale * b * inverse_bound)
        linear = linear if split else plus_identity(linear, scale * a)
        if c == 0:
            return linear
        c = scale * c * inverse_bound**2
        if split and r2 is None:
            return product(r, c=linear, alpha=c, beta=1.0)  # added before the sum is rounded
        return linear + (product(r, alpha=c) if r2 is None else scaled(r2, c))

    def times(y, p, a, alpha: Any = 1.0):
        """alpha Y P, for Y that commutes with P = a I + b R + c R^2."""
        return product(y, p, c=y, alpha=alpha, beta=alpha * a) if split else product(y, p, alpha=alpha)

    if len(rows) == 1:
        return (scale * rows[0][0] if split else None), quadratic(rows[0], inverse_bound, scale)
    q: Any = None
    for step, row in enumerate(rows):
        a, last = row[0], step == len(rows) - 1
        p = quadratic(row, inverse_bound)
        first = plus_identity(p, a) if split else p
        q = first if step == 0 else times(q, p, a, scale if last else 1.0)
        if not last:
            r, r2, inverse_bound = times(times(r, p, a, inverse_bound), p, a), None, 1.0
    return None, q
