r"""The iteration: matrix -> nearly orthogonal matrix, by products alone.

Everything happens on the small side: x is [m, n] with m <= n (else its transpose). With A = X X^H,

1. scale x by a power of two, so that no product over- or underflows (exact);
2. shrink the dominant directions of A (see _deflation);
3. divide by an upper bound of the largest singular value that the products give for free;
4. run the polynomials on R = A / s^2, gathering their product in Q; x <- Q x at each restart and at the end.

The *standard* form restarts after every step: R is made anew from x, at 2 m^2 n multiply-adds more each
time. The *Gram* form restarts seldom or never and works on m x m matrices throughout: cheaper where n > 1.5
m, but rounding makes R slightly indefinite, which the polynomials amplify until the next restart. Both are
one piece of code here.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from muonjax._cost_model import BYTES_A_SECOND, flops_a_second
from muonjax._linalg import MatrixProduct
from muonjax._newton_schulz.coefficients import Coefficients, checked_rows, polar_express, take_steps
from muonjax._newton_schulz.deflation import ROUNDING, shave, shrink_dominant
from muonjax._newton_schulz.normalization import Normalization, normalize
from muonjax._newton_schulz.scaling import power_of_two_scale
from muonjax._policy import Policy, policy_of
from pallas_kernels._api import symmetric_product_on
from pallas_kernels._xla_workarounds import materialize

Form = Literal["auto", "standard", "gram"]


# The lower ends measured best on recorded momentum whose dominant directions are shrunk.
_FAST = polar_express(3, lower=2e-2)
_BALANCED = polar_express(4, lower=1e-2, degrees=(5, 5, 5, 3))
_ACCURATE = polar_express(12, lower=1e-5)

# How large the rounding errors of R may grow in the Gram form.
_TOLERATED = 1e-2

# Directions that the Gram form shaves off x before A is made. Four do nearly as well on recorded momentum.
_SHAVED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """How to orthogonalize: a value, hashable, never part of an optimizer's state.

    Args:
      coefficients: Rows (a, b, c), one a step: `polar_express(...)`, `JORDAN`, `YOU`, or your own.
      num_steps: Steps to run; None runs each row once. A shorter table repeats its last row, a longer one is
        cut.
      deflation: How many dominant directions to shrink first, at most; never more than m / 8 (m: the matrix's
        shorter side). 0 turns it off.
      form: "standard", "gram", or "auto", which takes the Gram form in float32 and float64 for n > 1.5 m,
        and the standard form everywhere else (in half precision the Gram form can go wrong).
      restarts: Steps after which the Gram form, where it runs, makes its Gram matrix anew, such as (2,); None: before
        rounding can grow to 1 % (see `gram_restarts` in the source), in half precision after every step.
      normalization: The bound of the largest singular value: "schatten" (Schatten-8, free), "frobenius" (as
        most implementations; wastes a step or more), "aol" (rescales rows; changes the polar factor),
        "spectral" (exact; an eigenvalue problem).
      compute_dtype: Dtype of the products' operands; None is the input's own precision on a CPU (half types
        are widened to float32) and bfloat16 on accelerators. float32 means true float32 everywhere, never
        TF32. float64 and complex inputs keep their own.
      implementation: Which symmetric products to run; see `pallas_kernels.symmetric_product`. One that is named
        makes whole products: devices that share a matrix don't share these.

    Raises:
      ValueError, TypeError: On construction, naming the setting.

    Example:
      >>> import muonjax
      >>> six = muonjax.NewtonSchulz(coefficients=muonjax.polar_express(6, lower=3e-3))
      >>> len(six.steps), six.deflation, muonjax.NewtonSchulz() == muonjax.NewtonSchulz.balanced()
      (6, 64, True)
    """

    coefficients: Coefficients = _BALANCED
    num_steps: int | None = None
    deflation: int = 64
    form: Form = "auto"
    restarts: tuple[int, ...] | None = None
    normalization: Normalization = "schatten"
    compute_dtype: jax.typing.DTypeLike | None = None
    implementation: str | None = None

    def __post_init__(self):
        call = "NewtonSchulz"
        rows = checked_rows(call, self.coefficients)
        object.__setattr__(self, "coefficients", rows)
        if self.num_steps is not None and (not _is_whole(self.num_steps) or self.num_steps < 1):
            raise ValueError(
                f"{call}(num_steps={self.num_steps!r}) needs a whole number of steps, at least 1."
            )
        if not _is_whole(self.deflation) or self.deflation < 0:
            raise ValueError(
                f"{call}(deflation={self.deflation!r}) needs a whole number of directions; 0 turns it off."
            )
        for name, kind in (("form", Form), ("normalization", Normalization)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{call}({name}={getattr(self, name)!r}) is unknown; choose one of {get_args(kind)}."
                )
        if self.restarts is not None:
            restarts = tuple(self.restarts) if isinstance(self.restarts, Sequence) else (self.restarts,)
            inside = all(_is_whole(r) and 0 < r < len(self.steps) for r in restarts)
            if not inside or sorted(set(restarts)) != list(restarts):
                raise ValueError(
                    f"{call}(restarts={self.restarts!r}) must be whole numbers that rise and lie between the first and "
                    f"the last of {len(self.steps)} steps."
                )
            if self.form == "standard":
                raise ValueError(
                    f"{call}(restarts={self.restarts!r}, form='standard'): the standard form restarts after every "
                    f"step; leave restarts out, or give form='gram'."
                )
            object.__setattr__(self, "restarts", restarts)
        if self.compute_dtype is not None:
            try:
                dtype = jnp.dtype(self.compute_dtype)
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(f"{call}(compute_dtype={self.compute_dtype!r}) must be a float type.")
            object.__setattr__(self, "compute_dtype", dtype)

    @property
    def steps(self) -> Coefficients:
        """The rows that run, one a step."""
        return take_steps(self.coefficients, self.num_steps or len(self.coefficients))

    @classmethod
    def fast(cls) -> "NewtonSchulz":
        """Three steps: the cheapest, with about the error of Optax's five or less."""
        return cls(coefficients=_FAST)

    @classmethod
    def balanced(cls) -> "NewtonSchulz":
        """Three steps and a cubic, the default."""
        return cls()

    @classmethod
    def accurate(cls) -> "NewtonSchulz":
        """The polar factor to float32 precision, for condition numbers up to 1e5; computes in float32
        everywhere."""
        return cls(coefficients=_ACCURATE, deflation=0, form="standard", compute_dtype=jnp.float32)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
    x: jax.Array, settings: NewtonSchulz | None = None, *, axis_name: tuple[str, ...] = ()
) -> jax.Array:
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
    x: jax.Array, settings: NewtonSchulz, policy: Policy, axis_name: tuple[str, ...] = ()
) -> jax.Array:
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


def _iterate(
    x: jax.Array, settings: NewtonSchulz, policy: Policy, axis_name: tuple[str, ...] = ()
) -> jax.Array:
    """x [*batch, m, n] with m <= n, n counted over `axis_name` -> its orthogonalization, in the dtype of the sums."""
    dtype = policy.compute_dtype(x.dtype, settings.compute_dtype)
    sum_dtype = jnp.promote_types(dtype, jnp.float32)
    half = dtype != sum_dtype
    apply = MatrixProduct(dtype.name, None if half else "highest")

    def product(r, y=None, c=None, alpha=1.0, beta=0.0, together=()):
        """alpha R Y^H + beta C, Hermitian: Y is R, or commutes with it. The devices of `together` share the work."""
        y, c = (None if a is None else a.astype(dtype) for a in (y, c))
        alpha, beta = (a[..., 0, 0] if isinstance(a, jax.Array) else a for a in (alpha, beta))
        return symmetric_product_on(
            policy.platform,
            r.astype(dtype),
            y=y,
            c=c,
            alpha=alpha,
            beta=beta,
            implementation=settings.implementation,
            axis_name=together,
        )

    def over_columns(gram):
        return jax.lax.psum(gram, axis_name) if axis_name else gram

    x = x.astype(sum_dtype)
    x = x * power_of_two_scale(x, axis_name)
    columns = x.shape[-1] * math.prod(map(jax.lax.axis_size, axis_name))
    segments = _segments(settings, (*x.shape[:-1], columns), dtype)
    together = axis_name if _worth_sharing(settings, x.shape[-2], dtype) else ()
    small_product = functools.partial(product, together=together)
    rank = min(settings.deflation, x.shape[-2] // 8)
    if rank and not half and len(segments[0]) > 1:
        # The Gram form won't look at x again before the end.
        x = materialize(lambda x: shave(x, min(_SHAVED, rank), over_columns), x, policy.platform)
    gram = over_columns(apply(x, x.mT) if half else product(x))  # deflation wants all digits of the sums
    deflation, others = None, 0.0
    if rank:
        deflation = shrink_dominant(gram, rank, policy.platform)
        gram, others = deflation.gram, deflation.others
    if deflation is not None and (half or settings.normalization == "aol"):
        # x is rounded to half precision only now: before, the error would be as large as the tail. And once its rows
        # are rescaled, its dominant directions are no longer those of the Gram matrix.
        x, deflation = deflation.apply(x), None
        if half and len(segments[0]) > 1:
            gram = over_columns(product(x))  # of what was rounded

    x, r, r2, unit, root = normalize(x, gram, others, settings.normalization, small_product)
    for index, rows in enumerate(segments):
        if index > 0:
            r, r2, unit, root = over_columns(product(x)), None, 1.0, 1.0
        # x itself is divided by the bound and, where that was left to do, deflated only here, on the small side.
        a, q = _polynomials(rows, r, r2, unit, root, small_product, split=half)
        if index == 0 and deflation is not None:
            q = deflation.apply_right(q)
        x = apply(q, x) if a is None else a * x + apply(q, x)
    return x


def _polynomials(
    rows: Coefficients, r: Any, r2: Any, unit: Any, scale: Any, product: Any, *, split: bool
) -> Any:
    """The composition of `rows`, times `scale`, as a map on x: None and Q for x -> Q x, or a and Q for a x + Q x.

    Args:
      r: X X^H, normalized and divided by `unit`.
      r2: Its square, where that is already made.
      split: Keep the identity's share of each polynomial apart; in half precision it would cost the rest its digits.
    """
    diagonal = jnp.eye(r.shape[-1], dtype=bool)

    def plus_identity(r, a):
        """R + a I, by a mask: XLA would compute a I outside of a loop over matrices, and keep one for each a."""
        return jnp.where(diagonal, r + a, r)

    def quadratic(row, unit, scale=1.0):
        """P = a I + b R + c R^2, times `scale`; without a I if `split`."""
        a, b, c = row
        linear = scale * b * unit * r
        linear = linear if split else plus_identity(linear, scale * a)
        if c == 0:
            return linear
        c = scale * c * unit**2
        if split and r2 is None:
            return product(r, c=linear, alpha=c, beta=1.0)  # added before the sum is rounded
        return linear + (product(r, alpha=c) if r2 is None else c * r2)

    def times(y, p, a, alpha=1.0):
        """alpha Y P, for Y that commutes with P = a I + b R + c R^2."""
        return product(y, p, c=y, alpha=alpha, beta=alpha * a) if split else product(y, p, alpha=alpha)

    if len(rows) == 1:
        return (scale * rows[0][0] if split else None), quadratic(rows[0], unit, scale)
    q: Any = None
    for step, row in enumerate(rows):
        a, last = row[0], step == len(rows) - 1
        p = quadratic(row, unit)
        first = plus_identity(p, a) if split else p
        q = first if step == 0 else times(q, p, a, scale if last else 1.0)
        if not last:
            r, r2, unit = times(times(r, p, a, unit), p, a), None, 1.0
    return None, q
