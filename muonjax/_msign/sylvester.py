"""sylvester: solve A X + X B = C by matrix products, with derivatives of every order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from muonjax._common.arguments import errors_of
from muonjax._common.linalg import adjoint, at_least_float32
from muonjax._common.power_of_two_scale import power_of_two_scale
from muonjax._msign.inputs import CONVERGED, matrices, product_of, rows_beside
from muonjax._msign.mcsgn import polynomial_mcsgn

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def sylvester(
    a: Float[Array, "*#batch m m"],
    b: Float[Array, "*#batch n n"],
    c: Float[Array, "*#batch m n"],
    *,
    precision: str | None = "highest",
) -> Float[Array, "*batch m n"]:
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
      precision: That of the products, as in `jax.numpy.matmul`.

    Returns:
      X, [*batch, m, n]. Wrong, without notice, where a or b has an eigenvalue that is not positive.

    Raises:
      TypeError: If an argument is no array, or is complex or not floating point.
      ValueError: If the shapes do not fit, or the precision is unknown.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> x = muonjax.sylvester(2 * jnp.eye(2), jnp.eye(3), jnp.ones((2, 3)))
      >>> print(x.round(4))
      [[0.3333 0.3333 0.3333]
       [0.3333 0.3333 0.3333]]

    Source: J. Su, "The derivative of msign", 2025, kexue.fm/archives/11025; Y. Song, N. Sebe, W. Wang, "Fast
    Differentiable Matrix Square Root", 2022.
    """
    with errors_of("sylvester"):
        a = matrices(a, "a")
        b = matrices(b, "b")
        c = matrices(c, "c")
    # A is m x m, B n x n, and C and X are m x n.
    m, n = c.shape[-2:]
    shapes = f"{a.shape}, {b.shape}, {c.shape}"
    if a.shape[-2:] != (m, m) or b.shape[-2:] != (n, n):
        raise ValueError(f"sylvester of {shapes}: swap a and b, or transpose c.")
    try:
        batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2], c.shape[:-2])
    except ValueError as error:
        raise ValueError(
            f"sylvester of {shapes}: give them equal batch axes, or none."
        ) from error
    dtype = jnp.result_type(a, b, c)
    wide = at_least_float32(dtype)
    # Inside `jax.shard_map` all three vary over the mesh axes of any: `lax.custom_linear_solve` needs that.
    varying_zero = jnp.zeros((), wide)
    for x in (a, b, c):
        varying_zero += jnp.zeros_like(x, wide, shape=())

    def like_the_others(x):
        x = x.astype(wide) + varying_zero
        return jnp.broadcast_to(x, batch + x.shape[-2:])

    a, b, c = like_the_others(a), like_the_others(b), like_the_others(c)
    with errors_of("sylvester"):
        dot = product_of(c, precision)
    rows = rows_beside(c, CONVERGED)

    def by_blocks(a, b, c):
        """X with A X + X B = C, from the sign of one matrix [m + n, m + n]."""
        # The solution is linear in c, so c is multiplied by `size`, a power of two [*batch, 1, 1] that brings it to
        # about the size of a. Otherwise a large c would set the scale of the block. `power_of_two_scale(c)` is about 1
        # / |c|.
        size = power_of_two_scale(c) / power_of_two_scale(a)
        # mcsgn [[A, -C], [0, -B]] = [[I, -2 X], [0, -I]]
        zeros = jnp.zeros_like(adjoint(c))
        upper = jnp.concatenate([a, -size * c], axis=-1)
        lower = jnp.concatenate([zeros, -b], axis=-1)
        matrix = jnp.concatenate([upper, lower], axis=-2)
        sign = polynomial_mcsgn(matrix, rows, dot)
        # The upper right block is -2 size X.
        return -0.5 * sign[..., :m, m:] / size

    x = lax.custom_linear_solve(
        lambda x: dot(a, x) + dot(x, b),
        c,
        lambda _, c: by_blocks(a, b, c),
        # The transpose of X -> A X + X B is X -> A^T X + X B^T.
        transpose_solve=lambda _, c: by_blocks(adjoint(a), adjoint(b), c),
    )
    return x.astype(dtype)
