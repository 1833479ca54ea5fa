"""Symmetric products of one call: which implementation, in which precision, on which devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._api import symmetric_product_on


class SymmetricProduct(NamedTuple):
    """alpha A Y^H + beta C, Hermitian: Y is A, or commutes with it.

    Attributes:
      platform: Of the devices.
      dtype: That A, Y and C are rounded to.
      implementation: See `pallas_kernels.symmetric_product`.
      together: Mesh axes whose devices share the work.
    """

    platform: str
    dtype: jnp.dtype
    implementation: str | None
    together: tuple[str, ...] = ()

    def __call__(
        self,
        a: jax.Array,
        y: jax.Array | None = None,
        c: jax.Array | None = None,
        alpha: Any = 1.0,
        beta: Any = 0.0,
    ) -> jax.Array:
        """`alpha` and `beta` are numbers, or [*batch, 1, 1]."""
        y, c = (None if matrix is None else matrix.astype(self.dtype) for matrix in (y, c))
        alpha, beta = (
            number[..., 0, 0] if isinstance(number, jax.Array) else number for number in (alpha, beta)
        )
        return symmetric_product_on(
            self.platform,
            a.astype(self.dtype),
            y=y,
            c=c,
            alpha=alpha,
            beta=beta,
            implementation=self.implementation,
            axis_name=self.together,
        )
