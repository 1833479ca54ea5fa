"""Define the symmetric product in plain `jnp`: the reference for the other implementations, and the fallback.

The result of ``alpha·X Yᴴ + beta·C`` is known to be symmetric (Hermitian for complex numbers), so only its
lower triangle is *read*; the upper one is its mirror image. This is a part of the definition: every implementation
returns ``mirror(lower triangle)``, symmetric bit for bit, also where rounding makes the two halves differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact


class Operands(NamedTuple):
    """What every implementation of ``alpha·X Yᴴ + beta·C`` takes, checked by the public op.

    Attributes:
      x: [*batch, m, k].
      y: The same shape and dtype; None: X itself.
      c: [*batch, m, m] in X's dtype; None: nothing is added.
      alpha: A scalar, or one number for each matrix, in the accumulator's real dtype.
      beta: As `alpha`.
    """

    x: jax.Array
    y: jax.Array | None
    c: jax.Array | None
    alpha: jax.Array
    beta: jax.Array

    @property
    def second(self) -> jax.Array:
        """Y, or X in its place."""
        return self.x if self.y is None else self.y


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


def product(x: Inexact[Array, "*batch m k"], y: Inexact[Array, "*batch n k"]) -> Inexact[Array, "*batch m n"]:
    """``X Yᴴ`` in the accumulator's dtype."""
    return jnp.einsum(
        "...ik,...jk->...ij",
        x,
        y.conj(),
        precision=precision(x.dtype),
        preferred_element_type=accumulator(x.dtype),
    )


def epilogue(
    p: Inexact[Array, "*batch m n"],
    c: Inexact[Array, "*batch m n"] | None,
    alpha: Float[Array, "*#batch"],
    beta: Float[Array, "*#batch"],
) -> Inexact[Array, "*batch m n"]:
    """``alpha·P + beta·C`` in P's dtype."""
    return scaled(alpha, p) if c is None else scaled(alpha, p) + scaled(beta, c.astype(p.dtype))


def scaled(number: jax.Array, p: Inexact[Array, "*batch m n"]) -> Inexact[Array, "*batch m n"]:
    """``number·P`` in P's dtype; a scalar, or one for each matrix of the last batch axes."""
    if number.ndim:
        number = lax.expand_dims(number, (*range(p.ndim - 2 - number.ndim), p.ndim - 2, p.ndim - 1))
    return number.astype(p.dtype) * p


def mirror(p: Inexact[Array, "*batch m m"]) -> Inexact[Array, "*batch m m"]:
    """The Hermitian matrix whose lower triangle is P's."""
    # Sums with zeros rather than one `where`: XLA's CPU compiler takes a minute over
    # `where(row >= column, p, p.mT)` at 1024 (jaxlib 0.10.2), and none over this.
    if jnp.iscomplexobj(p):
        strict = jnp.tril(p, -1)
        return strict + strict.mT.conj() + (jnp.tril(p) - strict).real.astype(p.dtype)
    return jnp.tril(p) + jnp.tril(p, -1).mT


def symmetric_product(o: Operands) -> Inexact[Array, "*batch m m"]:
    """The product with one full product of XLA's."""
    return mirror(epilogue(product(o.x, o.second), o.c, o.alpha, o.beta).astype(o.x.dtype))
