"""msign, the polar factor of matrices, with derivatives of every order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muonjax._common.arguments import errors_of
from muonjax._msign.inputs import CONVERGED, checked_matrices, product_of
from muonjax._msign.polynomial_gradient import polynomial_msign
from muonjax._newton_schulz.coefficients import Coefficients, checked_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def msign(
    x: Float[Array, "*batch m n"],
    *,
    coefficients: Coefficients | None = None,
    precision: str | None = "highest",
) -> Float[Array, "*batch m n"]:
    r"""The matrix sign (polar factor) of each matrix,
    with a derivative for a model's backward pass.

    $$\operatorname{msign}(X) = U V^\top = (X X^\top)^{-1/2} X, \qquad X = U \Sigma V^\top,$$

    by Newton–Schulz steps $X \leftarrow aX + b(XX^\top)X + c(XX^\top)^2X$ on $X / \|X\|_F$. The
    derivative is the exact one of the polynomial that ran, for any coefficients, number of steps
    and rank; with the default coefficients it is that of the polar factor. The backward pass keeps
    X alone, and its memory does not grow with the steps. All of jvp, vjp, vmap, jacfwd, jacrev,
    Hessians and higher derivatives work.

    Args:
      x: [*batch, m, n], real floating point, any shape and scale. Products of bfloat16 matrices
        round their factors to bfloat16 and are summed in float32; float16 is computed in float32.
      coefficients: Rows (a, b, c), one for each step, such as `polar_express(5)`. Default:
        converged, for singular values down to 1e-5 of the Frobenius norm.
      precision: That of the products, as in `jax.numpy.matmul`. The default holds float32 to
        float32 on accelerators that would otherwise round to TF32 or bfloat16.

    Returns:
      [*batch, m, n], the dtype of x. Zero for a zero matrix, with a zero gradient; NaN for a matrix
      with a NaN or an infinity.

    Raises:
      TypeError: If x is no array, or is complex or not floating point.
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
    with errors_of("msign"):
        x = checked_matrices(x)
        rows = CONVERGED if coefficients is None else checked_rows(coefficients)
        # This checks the precision too.
        dot = product_of(x, precision)
    # An array without entries has no largest one to scale by, and nothing to change.
    if x.size == 0:
        return x
    return polynomial_msign(x, rows, dot)
