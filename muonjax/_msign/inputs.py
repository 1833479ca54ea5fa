"""Check the arguments that msign, mcsgn and sylvester share, and prepare them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from muonjax._common.arguments import whole_number
from muonjax._common.linalg import MatrixProduct, at_least_float32
from muonjax._newton_schulz.coefficients import Coefficients, checked_rows, polar_express, take_steps

if TYPE_CHECKING:
    from jaxtyping import Array, Float

CONVERGED: Coefficients = polar_express(11, lower=1e-5)
"""Within 2e-12 of 1 on [1e-5, 1]. A matrix of m rows with condition number 1e3 has its smallest singular
value at 1e-3 / sqrt(m) of its Frobenius norm or above: inside for every m up to 10,000."""


def matrices(call: str, x: Any) -> Float[Array, "*batch m n"]:
    """`x` as an array, if it is a stack of real floating-point matrices."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        fix = (
            "take its real form [[re, -im], [im, re]]" if jnp.iscomplexobj(x) else "cast it, x.astype(float)"
        )
        raise TypeError(f"{call}(x) needs a real floating-point matrix, got dtype {x.dtype}; {fix}.")
    if x.ndim < 2:
        raise ValueError(f"{call}(x) needs a matrix [*batch, m, n], got shape {x.shape}; reshape it first.")
    return x


def schedule(call: str, coefficients: Any, num_steps: int | None) -> Coefficients:
    """The rows that will run: all of the table or its first `num_steps`, by default the converged schedule."""
    if num_steps is not None:
        num_steps = whole_number(call, "num_steps", num_steps, 1, " of steps, at least 1.")
    if coefficients is None:
        return CONVERGED if num_steps is None else polar_express(num_steps)
    rows = checked_rows(call, coefficients)
    return take_steps(rows, num_steps or len(rows))


def product_of(x: Float[Array, "*batch m n"], precision: str | None) -> MatrixProduct:
    """Products in the dtype of x; for float16, whose range can't hold the derivative's 1 / s, in float32."""
    return MatrixProduct("float32" if x.dtype == jnp.float16 else x.dtype.name, precision)


def rows_beside(x: Float[Array, "*batch m n"], coefficients: Coefficients) -> Float[Array, "steps 3"]:
    """Rows as an array, float32 or wider, to iterate on x.

    Inside `jax.shard_map` it varies over the same mesh axes as x. `lax.custom_linear_solve` needs that: it makes all
    arrays that its functions close over vary alike, after tracing these functions with what each was before.
    """
    dtype = at_least_float32(x.dtype)
    return jnp.asarray(coefficients, dtype) + jnp.zeros_like(x, dtype, shape=())
