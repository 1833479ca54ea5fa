"""Beside the way, for models that orthogonalize in their forward pass: msign, with all its derivatives."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from muonjax._msign.polar_gradient import polar_msign
from muonjax._msign.polynomial_gradient import iterate, polynomial_msign
from muonjax._msign.products import Arithmetic, normalized, oriented_like
from muonjax._newton_schulz.coefficients import Coefficients, checked_rows, polar_express, take_steps

Gradient: TypeAlias = Literal["polynomial", "polar", "autodiff"]

CONVERGED: Coefficients = polar_express(11, lower=1e-5)
"""Within 2e-12 of 1 on [1e-5, 1]. A matrix of m rows with condition number 1e3 has its smallest singular
value at 1e-3 / sqrt(m) of its Frobenius norm or above: inside for every m up to 10,000."""


def schedule(name: str, coefficients: Coefficients | None, num_steps: int | None) -> Coefficients:
    """The rows that will run: the converged default, `num_steps` of Polar Express, or of the given table."""
    if num_steps is not None and (not isinstance(num_steps, int) or num_steps < 1):
        raise ValueError(
            f"{name}(num_steps={num_steps!r}) needs a whole number of steps, at least 1, or None for all."
        )
    if coefficients is None:
        return CONVERGED if num_steps is None else polar_express(num_steps)
    rows = checked_rows(name, coefficients)
    return take_steps(rows, len(rows) if num_steps is None else num_steps)


def checked(name: str, x: jax.Array) -> jax.Array:
    """`x` as an array, if it is a stack of real floating-point matrices."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        cure = (
            "take its real form [[re, -im], [im, re]]" if jnp.iscomplexobj(x) else "cast it, x.astype(float)"
        )
        raise TypeError(f"{name}(x) needs a real floating-point matrix, got dtype {x.dtype}; {cure}.")
    if x.ndim < 2:
        raise ValueError(f"{name}(x) needs a matrix [*batch, m, n], got shape {x.shape}; reshape it first.")
    return x


def msign(
    x: jax.Array,
    *,
    coefficients: Coefficients | None = None,
    num_steps: int | None = None,
    gradient: Gradient = "polynomial",
    polish: int = 0,
    precision: str | None = "highest",
) -> jax.Array:
    r"""The matrix sign (polar factor) of each matrix, with a derivative made for a model's backward pass.

    $$\operatorname{msign}(X) = U V^\top = (X X^\top)^{-1/2} X, \qquad X = U \Sigma V^\top,$$

    by Newton–Schulz steps $X \leftarrow aX + b(XX^\top)X + c(XX^\top)^2X$ on $X / \|X\|_F$. All of jvp, vjp,
    vmap, jacfwd, jacrev, Hessians and higher derivatives work, in every mode:

    - `"polynomial"`: the exact derivative of the polynomial that ran, whatever the coefficients, the number
      of steps and the rank. Its backward pass keeps X alone and loops in constant memory.
    - `"polar"`: the derivative of the exact polar factor, for full rank: the cheapest for wide and tall
      matrices, and the right one where a truncated polynomial's ripple is not wanted. At a rank-deficient
      matrix the polar factor has no derivative, and this one is finite but means nothing in the directions
      that leave the range.
    - `"autodiff"`: JAX's own, through all steps; keeps every step's intermediates. The reference of the other
      two.

    Args:
      x: [*batch, m, n], real floating point, any shape and scale. bfloat16 matrices are multiplied as
        they are, with float32 sums; float16 is computed in float32.
      coefficients: Rows (a, b, c), one a step. Default: converged, for singular values down to 1e-5 of the
        Frobenius norm.
      num_steps: How many rows to run; a table that is too short repeats its last row. Without `coefficients`:
        that many steps of `polar_express`. Default: all rows.
      gradient: Which derivative; see above.
      polish: Steps of (15/8, -5/4, 3/8) that the polar mode adds to a truncated value, for its derivative
        only; 0 or more. Five Polar Express steps need 3.
      precision: Of the products, as in `jax.numpy.matmul`. The default holds float32 to float32 on
        accelerators that would otherwise round to TF32 or bfloat16.

    Returns:
      [*batch, m, n], the dtype of x. Zero for a zero matrix, with a zero gradient; NaN for a matrix with a
      NaN or an infinity.

    Raises:
      TypeError: If x is complex or not floating point.
      ValueError: If x is no matrix, or a setting is outside of its range.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> x = jnp.array([[3.0, 0.0, 0.0], [0.0, -4.0, 0.0]])
      >>> print(muonjax.msign(x).round(4) + 0.0)
      [[ 1.  0.  0.]
       [ 0. -1.  0.]]
      >>> toward = jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
      >>> print(jax.grad(lambda x: jnp.vdot(toward, muonjax.msign(x)))(x).round(4) + 0.0)
      [[0.     0.     0.3333]
       [0.     0.     0.    ]]

    Source: the derivative of msign is posed in J. Su, "The derivative of msign", 2025,
    kexue.fm/archives/11025; docs/differentiating_msign.md derives what is used here.
    """
    x = checked("msign", x)
    rows = schedule("msign", coefficients, num_steps)
    if gradient not in ("polynomial", "polar", "autodiff"):
        raise ValueError(f"msign(gradient={gradient!r}) must be 'polynomial', 'polar' or 'autodiff'.")
    if not isinstance(polish, int) or polish < 0:
        raise ValueError(f"msign(polish={polish!r}) needs a whole number of steps, at least 0.")
    if polish and gradient != "polar":
        raise ValueError(
            f"msign(polish={polish}) belongs to gradient='polar', got {gradient!r}: the others differentiate "
            "the steps that ran; append rows (15/8, -5/4, 3/8) to `coefficients` to run more."
        )
    if x.size == 0:
        return x
    arithmetic = Arithmetic.of(x, precision)
    if gradient == "polynomial":
        return polynomial_msign(x, rows, arithmetic)
    if gradient == "polar":
        return polar_msign(x, rows, polish, arithmetic)
    return oriented_like(iterate(normalized(x)[0], rows, arithmetic), x)
