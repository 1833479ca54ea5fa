"""msign, the polar factor of matrices, with a choice of three derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from muonjax._common.arguments import check_choice, errors_of, whole_number
from muonjax._msign.inputs import (
    CONVERGED,
    matrices,
    normalized,
    oriented_like,
    product_of,
    rows_beside,
)
from muonjax._msign.polar_gradient import polar_msign, polishing
from muonjax._msign.polynomial_gradient import iterate, polynomial_msign
from muonjax._newton_schulz.coefficients import Coefficients, checked_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Gradient = Literal["polynomial", "polar", "autodiff"]


def msign(
    x: Float[Array, "*batch m n"],
    *,
    coefficients: Coefficients | None = None,
    gradient: Gradient = "polynomial",
    polish: int = 0,
    precision: str | None = "highest",
) -> Float[Array, "*batch m n"]:
    r"""The matrix sign (polar factor) of each matrix, with a derivative for a model's backward pass.

    $$\operatorname{msign}(X) = U V^\top = (X X^\top)^{-1/2} X, \qquad X = U \Sigma V^\top,$$

    by Newton–Schulz steps $X \leftarrow aX + b(XX^\top)X + c(XX^\top)^2X$ on $X / \|X\|_F$. All of jvp, vjp,
    vmap, jacfwd, jacrev, Hessians and higher derivatives work, in every mode:

    - `"polynomial"`: the exact derivative of the polynomial that ran, for any coefficients, number of steps
      and rank. Its backward pass keeps X alone, and its memory does not grow with the steps.
    - `"polar"`: the derivative of the exact polar factor, for full rank: the cheapest for wide and tall
      matrices, and the one to use where a truncated polynomial replaces the polar factor. At a
      rank-deficient matrix the polar factor has no derivative; the result is then finite, but right only for
      cotangents in the range of X.
    - `"autodiff"`: JAX's own, through all steps; keeps every step's intermediates. The reference of the other
      two.

    Args:
      x: [*batch, m, n], real floating point, any shape and scale. Products of bfloat16 matrices round their
        factors to bfloat16 and are summed in float32; float16 is computed in float32.
      coefficients: Rows (a, b, c), one for each step, such as `polar_express(5)`. Default: converged, for singular
        values down to 1e-5 of the Frobenius norm.
      gradient: Which derivative; see above.
      polish: The number of steps that the polar mode adds to a truncated value, for its derivative only; 0 or
        more. Three Polar Express steps need 3 for an error of 0.1 %, five need 2.
      precision: That of the products, as in `jax.numpy.matmul`. The default holds float32 to float32 on
        accelerators that would otherwise round to TF32 or bfloat16.

    Returns:
      [*batch, m, n], the dtype of x. Zero for a zero matrix, with a zero gradient; NaN for a matrix with a
      NaN or an infinity.

    Raises:
      TypeError: If x is no array, or is complex or not floating point.
      ValueError: If x is no matrix, a setting is outside of its range, or the steps and the polish of the polar
        mode do not converge.

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
    with errors_of("msign"):
        x = matrices(x)
        rows = CONVERGED if coefficients is None else checked_rows(coefficients)
        check_choice("gradient", gradient, get_args(Gradient))
        polish = whole_number("polish", polish, 0, " of steps, at least 0.")
        if polish and gradient != "polar":
            raise ValueError(
                f"(polish={polish}) belongs to gradient='polar', got {gradient!r}: "
                "the others differentiate the steps that ran; "
                "append rows (15/8, -5/4, 3/8) to `coefficients` to run more."
            )
        polishing_rows = polishing(rows, polish) if gradient == "polar" else ()
        dot = product_of(x, precision)
    # An empty matrix has no norm, and one without rows or columns has nothing to change.
    if x.size == 0:
        return x

    if gradient == "polar":
        return polar_msign(x, rows, polishing_rows, dot)
    steps = rows_beside(x, rows)
    if gradient == "polynomial":
        return polynomial_msign(x, steps, dot)
    # "autodiff": JAX differentiates this line.
    return oriented_like(iterate(normalized(x), steps, dot), x)
