"""The iteration whose coefficients are an array that a program reads, as Optax keeps them in its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from muonjax._linalg import MatrixProduct, SymmetricProduct, at_least_float32, scaled, square_norm, sum_over
from muonjax._newton_schulz.normalization import power_of_two_scale
from muonjax._policy import Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact

Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]


def traced_iteration(
    coefficients: jax.Array,
    ns_steps: Any,
    preconditioning: Preconditioning,
    eps: jax.typing.ArrayLike,
    policy: Policy,
) -> Callable[..., jax.Array]:
    """The map of one matrix with m <= n that Optax computes. The coefficients are arrays: they come from the state."""

    def iterate(
        x: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...] = ()
    ) -> Inexact[Array, "*batch m n"]:
        # In JAX's own precision, as Optax; only that a CPU has no units for half types.
        dtype = at_least_float32(x.dtype) if policy.is_cpu else x.dtype
        apply = MatrixProduct(dtype.name, None)
        symmetric = SymmetricProduct(policy.platform, dtype, None)

        def square(a: jax.Array) -> jax.Array:
            return symmetric(a) if policy.is_cpu else apply.with_adjoint(a, a)

        def gram_of(x: jax.Array) -> jax.Array:
            return sum_over(axis_name, square(x))

        def step(row: jax.Array, x: jax.Array, gram: jax.Array) -> jax.Array:
            a, b, c = row
            return scaled(x, a) + apply(scaled(gram, b) + scaled(square(gram), c), x)

        original, x = x, x.astype(at_least_float32(x.dtype))
        scale = power_of_two_scale(x, axis_name)  # exact; Optax overflows at large scales
        x = scaled(x, scale)
        gram = gram_of(x)
        rows = _row_factors(gram, preconditioning, eps, scale)
        x, gram = scaled(x, rows), scaled(scaled(gram, rows), rows.mT)
        rows = coefficients if coefficients.ndim == 2 else coefficients[None]
        num_steps = ns_steps if coefficients.ndim == 1 else len(rows)
        last = len(rows) - 1
        x = step(rows[0], x, gram)
        x = jax.lax.fori_loop(1, num_steps, lambda i, x: step(rows[jnp.minimum(i, last)], x, gram_of(x)), x)
        return x.astype(original.dtype)

    return iterate


def _row_factors(
    gram: Inexact[Array, "*batch m m"],
    preconditioning: Preconditioning,
    eps: jax.typing.ArrayLike,
    scale: Float[Array, "*batch 1 1"],
) -> Float[Array, "*batch _m 1"]:
    """What Optax multiplies the rows by before its first step. `eps` counts at the scale of the unscaled matrix."""
    if preconditioning in ("aol", "schatten"):
        bound = (
            jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
            if preconditioning == "aol"
            else jnp.sqrt(square_norm(gram))
        )
        return jax.lax.rsqrt(jnp.maximum(bound, jnp.asarray(eps, scale.dtype) * scale * scale))
    square = (
        jnp.trace(gram, axis1=-2, axis2=-1).real[..., None, None]
        if preconditioning == "frobenius"
        else jnp.linalg.eigvalsh(gram)[..., -1:, None]
    )
    return 1 / (jnp.sqrt(square) + jnp.asarray(eps, scale.dtype) * scale)
