"""Define the symmetric product in plain `jnp`: the reference for the other implementations, and the fallback.

The result of ``alpha·X Yᴴ + beta·C`` is known to be symmetric (Hermitian for complex numbers), so only its
lower triangle is *read*; the upper one is its mirror image. This is a part of the definition: every implementation
returns ``mirror(lower triangle)``, symmetric bit for bit, also where rounding makes the two halves differ.
"""

import jax
import jax.numpy as jnp
from jax import lax


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that products are summed in: float32 for half types, otherwise the dtype itself."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def precision(dtype: jnp.dtype) -> lax.Precision | None:
    """The precision that a product of this dtype asks of XLA.

    Products of float32 arrays have float32 precision here. XLA's own default on an accelerator is lower (TF32 on an
    NVIDIA GPU, one bfloat16 pass on a TPU); for more speed, pass bfloat16 arrays. If the user has set
    `jax.default_matmul_precision`, that setting is used.
    """
    wish = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if jnp.dtype(dtype).itemsize <= 2 or wish is not None:
        return None
    return lax.Precision.HIGHEST


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """``X Yᴴ`` in the accumulator's dtype: [*batch, m, k] and [*batch, n, k] give [*batch, m, n]."""
    return jnp.einsum(
        "...ik,...jk->...ij",
        x,
        y.conj(),
        precision=precision(x.dtype),
        preferred_element_type=accumulator(x.dtype),
    )


def epilogue(p: jax.Array, c: jax.Array | None, alpha: jax.Array, beta: jax.Array) -> jax.Array:
    """``alpha·P + beta·C`` in P's dtype; alpha and beta: scalars, or one for each matrix."""
    return scaled(alpha, p) if c is None else scaled(alpha, p) + scaled(beta, c.astype(p.dtype))


def scaled(number: jax.Array, p: jax.Array) -> jax.Array:
    """``number·P`` in P's dtype, [*batch, m, n]; a scalar, or one for each matrix of the last batch axes."""
    if number.ndim:
        number = lax.expand_dims(number, (*range(p.ndim - 2 - number.ndim), p.ndim - 2, p.ndim - 1))
    return number.astype(p.dtype) * p


def mirror(p: jax.Array) -> jax.Array:
    """The Hermitian matrix [*batch, m, m] whose lower triangle is P's."""
    # Sums with zeros rather than one `where`: XLA's CPU compiler takes a minute over
    # `where(row >= column, p, p.mT)` at 1024 (jaxlib 0.10.2), and none over this.
    if jnp.iscomplexobj(p):
        strict = jnp.tril(p, -1)
        return strict + strict.mT.conj() + (jnp.tril(p) - strict).real.astype(p.dtype)
    return jnp.tril(p) + jnp.tril(p, -1).mT


def symmetric_product(
    x: jax.Array, y: jax.Array | None, c: jax.Array | None, alpha: jax.Array, beta: jax.Array
) -> jax.Array:
    """``alpha·X Yᴴ + beta·C`` with one full product; the arguments are checked by the public op."""
    p = product(x, x if y is None else y)
    return mirror(epilogue(p, c, alpha, beta).astype(x.dtype))
