"""What a symmetric product means, in plain `jnp`: the definition, the fallback, and the oracle's neighbour.

The result of ``alpha·X Yᴴ + beta·C`` is known to be symmetric (Hermitian for complex numbers), so only its
lower triangle is *read*; the upper one is its mirror image. That is the definition, not an optimization: every
implementation returns ``mirror(lower triangle)``, symmetric bit for bit, whatever rounding did to the halves.
"""

import jax
import jax.numpy as jnp
from jax import lax


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that products are summed in: float32 for half types, otherwise the dtype itself."""
    return jnp.promote_types(dtype, jnp.float32)


def precision(dtype: jnp.dtype) -> lax.Precision | None:
    """The precision that a product of this dtype asks of XLA.

    A float32 array means float32 here. XLA's own default on an accelerator is less (TF32 on an NVIDIA GPU,
    one bfloat16 pass on a TPU); whoever wants speed gets more of it by passing bfloat16. Where a user has set
    `jax.default_matmul_precision`, that decides.
    """
    if (
        jnp.dtype(dtype).itemsize <= 2
        or getattr(jax.config, "jax_default_matmul_precision", None) is not None
    ):
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
    p = alpha[..., None, None] * p
    return p if c is None else p + beta[..., None, None] * c.astype(p.dtype)


def mirror(p: jax.Array) -> jax.Array:
    """The Hermitian matrix [*batch, m, m] whose lower triangle is P's."""
    m = p.shape[-1]
    row, column = (lax.broadcasted_iota(jnp.int32, (m, m), axis) for axis in (0, 1))
    upper = p.mT
    if jnp.iscomplexobj(p):
        upper = jnp.where(row == column, p.real.astype(p.dtype), upper.conj())
        return jnp.where(row > column, p, upper)
    return jnp.where(row >= column, p, upper)


def symmetric_product(
    x: jax.Array, y: jax.Array | None, c: jax.Array | None, alpha: jax.Array, beta: jax.Array
) -> jax.Array:
    """``alpha·X Yᴴ + beta·C`` with one full product; the arguments are checked by the public op."""
    p = product(x, x if y is None else y)
    return mirror(epilogue(p, c, alpha, beta).astype(x.dtype))
