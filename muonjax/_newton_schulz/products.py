"""Symmetric products of one call: which implementation, in which precision, on which devices; and in 2 x 2 blocks."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muonjax._cost_model import BYTES_A_SECOND, flops_a_second
from muonjax._linalg import MatrixProduct, adjoint
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


def sizes(x: jax.Array, axis_name: tuple[str, ...]) -> tuple[int, int]:
    """m and n of x [*batch, m, n], n counted over `axis_name`."""
    return x.shape[-2], x.shape[-1] * math.prod(map(jax.lax.axis_size, axis_name))


def shared(product: SymmetricProduct, m: int, axis_name: tuple[str, ...]) -> SymmetricProduct:
    """The product of m x m matrices that all devices of `axis_name` hold: each makes a part where that saves time.

    Of p devices each saves (1 - 1/p) m^3 flops at least (where "reference" makes both triangles, m^3 more), and sends
    (1 - 1/p) m^2 / 2 numbers. No latency is counted, so the larger saving is no reason to share smaller matrices.
    """
    saves = 2 * m * BYTES_A_SECOND >= flops_a_second(product.dtype) * product.dtype.itemsize
    return product._replace(together=axis_name if saves and product.implementation is None else ())


def in_blocks(product: MatrixProduct, a: jax.Array, y: jax.Array) -> jax.Array:
    """A Y^H, known to be Hermitian, by three products of half its size; the fourth block is a transpose.

    The diagonal blocks are not mirrored: their deviation from symmetry is smaller than the rounding of their entries.
    """
    half = a.shape[-2] // 2
    (a1, a2), (y1, y2) = ((x[..., :half, :], x[..., half:, :]) for x in (a, y))
    left = product.with_adjoint(a2, y1)
    # Without barriers XLA makes the transpose a part of the products, which take three times as long then.
    right = jax.lax.optimization_barrier(adjoint(jax.lax.optimization_barrier(left)))
    rows = [product.with_adjoint(a1, y1), right], [left, product.with_adjoint(a2, y2)]
    return jnp.concatenate([jnp.concatenate(row, -1) for row in rows], -2)
