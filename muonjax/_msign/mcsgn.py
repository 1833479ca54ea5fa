"""Beside the way, for models that orthogonalize: the sign of a square matrix, by eigenvalues, and what it solves."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._msign.linear_call import linear_map_with_known_transpose
from muonjax._msign.msign import checked, schedule
from muonjax._msign.polynomial_gradient import about_mean
from muonjax._msign.products import Arithmetic, inner, transpose
from muonjax._newton_schulz.coefficients import Coefficients
from muonjax._newton_schulz.scaling import power_of_two_scale


def mcsgn(
    x: jax.Array,
    *,
    coefficients: Coefficients | None = None,
    num_steps: int | None = None,
    precision: str | None = "highest",
) -> jax.Array:
    r"""The sign of each square matrix with a real spectrum, as a function of its eigenvalues.

    $$\operatorname{mcsgn}(X) = X (X^2)^{-1/2} = P \operatorname{sign}(\Lambda) P^{-1}, \qquad X = P \Lambda P^{-1},$$

    by the steps of `msign` with $X^2$ for $X X^\top$, on $X / \sqrt{\operatorname{tr}(X^2)}$. It equals
    `msign` on symmetric matrices. All of jvp, vjp, vmap, Hessians and higher derivatives are those of the
    polynomial that ran; the derivative's transpose at X is the derivative at $X^\top$, so that a backward
    pass keeps X alone.

    Args:
      x: [*batch, n, n], real floating point. The eigenvalues must be real, and at least 1e-5 of
        $\sqrt{\operatorname{tr}(X^2)}$ in size for the default schedule. Complex ones diverge or converge to
        something else, and are not detected unless they make the trace negative.
      coefficients: Rows (a, b, c), one a step. Default: converged, as in `msign`.
      num_steps: How many rows to run, as in `msign`.
      precision: Of the products, as in `jax.numpy.matmul`.

    Returns:
      [*batch, n, n], the dtype of x. Zero for a zero matrix, with a zero gradient; NaN where tr(X²) <= 0,
      which no real spectrum but a nilpotent matrix's gives, and where x has a NaN or an infinity.

    Raises:
      TypeError: If x is complex or not floating point.
      ValueError: If x is not square, or a setting is outside of its range.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> print(muonjax.mcsgn(jnp.array([[2.0, 3.0], [0.0, -1.0]])).round(4) + 0.0)
      [[ 1.  2.]
       [ 0. -1.]]

    Source: J. Su, "The derivative of msign", 2025, kexue.fm/archives/11025; N. Higham, "Functions of
    Matrices", 2008, chapter 5 (Theorem 5.3 for the derivative).
    """
    x = checked("mcsgn", x)
    if x.shape[-2] != x.shape[-1]:
        raise ValueError(
            f"mcsgn(x) needs square matrices, got shape {x.shape}; msign takes rectangular ones."
        )
    rows = schedule("mcsgn", coefficients, num_steps)
    if x.size == 0:
        return x
    return _polynomial_mcsgn(x, rows, Arithmetic.of(x, precision))


def _normalized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x / r with r = sqrt(tr(x^2)), and 1 / r, in float32 or wider: 0 for a zero matrix, NaN for no real r."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = power_of_two_scale(x)
    x = x * scale
    square = inner(x, transpose(x))
    root = lax.rsqrt(jnp.where(square > 0, square, 1.0))
    is_zero = jnp.all(x == 0, axis=(-2, -1), keepdims=True)
    inverse = jnp.where(square > 0, root, jnp.where(is_zero, 0.0, jnp.nan))
    return x * inverse, scale * inverse


def _iterate(x: jax.Array, coefficients: Coefficients, arithmetic: Arithmetic) -> jax.Array:
    """X <- X (a I + b X^2 + c X^4), once a row, as a rolled loop."""

    def step(x, row):
        share, rest, _, _ = about_mean(arithmetic(x, x), row, arithmetic)
        return share * x + arithmetic(x, rest), None

    return lax.scan(step, x, jnp.asarray(coefficients, x.dtype))[0]


def _directional_derivative(
    x: jax.Array, direction: jax.Array, coefficients: Coefficients, arithmetic: Arithmetic
) -> jax.Array:
    """The derivative of `_iterate` at x in `direction`: nine products a step, in a rolled loop."""

    def step(carry, row):
        x, dx = carry
        share, rest, slope, distance = about_mean(arithmetic(x, x), row, arithmetic)
        dsquare = arithmetic(x, dx) + arithmetic(dx, x)
        drest = slope * dsquare + row[2] * (arithmetic(distance, dsquare) + arithmetic(dsquare, distance))
        dx = share * dx + arithmetic(dx, rest) + arithmetic(x, drest)
        return (share * x + arithmetic(x, rest), dx), None

    return lax.scan(step, (x, direction), jnp.asarray(coefficients, x.dtype))[0][1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _polynomial_mcsgn(x: jax.Array, coefficients: Coefficients, arithmetic: Arithmetic) -> jax.Array:
    return _iterate(_normalized(x)[0], coefficients, arithmetic).astype(x.dtype)


@_polynomial_mcsgn.defjvp
def _polynomial_mcsgn_jvp(coefficients, arithmetic, primals, tangents):
    (x,), (dx,) = primals, tangents

    # With u = x / sqrt(tr(x^2)), du = (dx - u tr(u dx)) / sqrt(tr(x^2)); for its transpose u^T takes the
    # place of u in the product and u that of u^T in the trace.
    def jacobian(x, v):
        unit, inverse = _normalized(x)
        v = v.astype(unit.dtype)
        v = inverse * (v - unit * inner(transpose(unit), v))
        return _directional_derivative(unit, v, coefficients, arithmetic).astype(x.dtype)

    def jacobian_transpose(x, v):
        unit, inverse = _normalized(x)
        unit_t = transpose(unit)
        v = _directional_derivative(unit_t, v.astype(unit.dtype), coefficients, arithmetic)
        return (inverse * (v - unit_t * inner(unit, v))).astype(x.dtype)

    value = _polynomial_mcsgn(x, coefficients, arithmetic)
    return value, linear_map_with_known_transpose(jacobian, jacobian_transpose, x, dx)


def sylvester(a: jax.Array, b: jax.Array, c: jax.Array, *, precision: str | None = "highest") -> jax.Array:
    r"""Solves A X + X B = C for positive definite A and B, by matrix products alone.

    $$\operatorname{mcsgn}\begin{bmatrix} A & -C \\ 0 & -B \end{bmatrix}
      = \begin{bmatrix} I & -2X \\ 0 & -I \end{bmatrix}$$

    The derivative, of any order, is that of the equation: another solve, which keeps A, B and X. `msign`'s
    polar mode solves its own equation more cheaply, without forming the block matrix.

    Args:
      a: [*batch, m, m], with real positive eigenvalues, the smallest at least 1e-5 of
        $(\operatorname{tr} A^2 + \operatorname{tr} B^2)^{1/2}$.
      b: [*batch, n, n], the same.
      c: [*batch, m, n].
      precision: Of the products, as in `jax.numpy.matmul`.

    Returns:
      X, [*batch, m, n]. Wrong, without notice, where a or b has an eigenvalue that is not positive.

    Raises:
      TypeError: If an array is complex or not floating point.
      ValueError: If the shapes do not fit.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> x = muonjax.sylvester(2 * jnp.eye(2), jnp.eye(3), jnp.ones((2, 3)))
      >>> print(x.round(4))
      [[0.3333 0.3333 0.3333]
       [0.3333 0.3333 0.3333]]

    Source: J. Su, "The derivative of msign", 2025, kexue.fm/archives/11025; Y. Song, N. Sebe, W. Wang, "Fast
    Differentiable Matrix Square Root", 2022.
    """
    a, b, c = (checked("sylvester", v) for v in (a, b, c))
    m, n = c.shape[-2:]
    if a.shape[-2:] != (m, m) or b.shape[-2:] != (n, n):
        raise ValueError(
            f"sylvester(a, b, c) needs [m, m], [n, n] and [m, n], got {a.shape}, {b.shape} and {c.shape}; "
            "swap a and b, or transpose c."
        )
    dtype = jnp.result_type(a, b, c)
    wide = jnp.promote_types(dtype, jnp.float32)
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2], c.shape[:-2])
    a, b, c = (jnp.broadcast_to(v.astype(wide), batch + v.shape[-2:]) for v in (a, b, c))

    def system(x):
        return jnp.matmul(a, x, precision=precision) + jnp.matmul(x, b, precision=precision)

    def solve(_, c):
        return _solve_by_blocks(a, b, c, precision)

    def solve_transpose(_, c):
        return _solve_by_blocks(transpose(a), transpose(b), c, precision)

    return lax.custom_linear_solve(system, c, solve, transpose_solve=solve_transpose).astype(dtype)


def _solve_by_blocks(a: jax.Array, b: jax.Array, c: jax.Array, precision: str | None) -> jax.Array:
    m = a.shape[-1]
    # The solution is linear in c: bring c to the size of a, or a large c would set the scale of the block.
    size = power_of_two_scale(c) / power_of_two_scale(a)
    block = jnp.concatenate(
        [jnp.concatenate([a, -size * c], -1), jnp.concatenate([jnp.zeros_like(transpose(c)), -b], -1)], -2
    )
    return -0.5 * mcsgn(block, precision=precision)[..., :m, m:] / size
