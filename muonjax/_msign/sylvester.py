"""sylvester, which solves A X + X B = C for positive definite A and B by a matrix sign, with derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from muonjax._common.linalg import adjoint, at_least_float32
from muonjax._msign.inputs import CONVERGED, matrices, product_of, rows_beside
from muonjax._msign.mcsgn import polynomial_mcsgn
from muonjax._newton_schulz.normalization import power_of_two_scale

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
    a, b, c = (matrices("sylvester", v) for v in (a, b, c))
    m, n = c.shape[-2:]
    if a.shape[-2:] != (m, m) or b.shape[-2:] != (n, n):
        raise ValueError(
            f"sylvester(a, b, c) needs [m, m], [n, n] and [m, n], got {a.shape}, {b.shape} and {c.shape}; "
            "swap a and b, or transpose c."
        )
    dtype = jnp.result_type(a, b, c)
    wide = at_least_float32(dtype)
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2], c.shape[:-2])
    # Inside `jax.shard_map` all three vary over the mesh axes of any: `lax.custom_linear_solve` needs that.
    zero = sum(jnp.zeros_like(v, wide, shape=()) for v in (a, b, c))
    a, b, c = (jnp.broadcast_to(v.astype(wide) + zero, batch + v.shape[-2:]) for v in (a, b, c))
    dot, rows = product_of(c, precision), rows_beside(c, CONVERGED)

    def by_blocks(a, b, c):
        # The solution is linear in c: bring c to the size of a, or a large c would set the scale of the block.
        size = power_of_two_scale(c) / power_of_two_scale(a)
        block = jnp.concatenate(
            [jnp.concatenate([a, -size * c], -1), jnp.concatenate([jnp.zeros_like(adjoint(c)), -b], -1)], -2
        )
        return -0.5 * polynomial_mcsgn(block, rows, dot)[..., :m, m:] / size

    return lax.custom_linear_solve(
        lambda x: dot(a, x) + dot(x, b),
        c,
        lambda _, c: by_blocks(a, b, c),
        transpose_solve=lambda _, c: by_blocks(adjoint(a), adjoint(b), c),
    ).astype(dtype)
