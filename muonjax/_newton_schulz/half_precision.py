r"""The iteration on accelerators: half precision throughout.

    x = g z,    z <- z + Q z,    Q = (b / a) R + (c / a) R^2,    R = g^2 z z^H,    g <- a g

Each step p(x) = a x + (b R + c R^2) x with its factor a gathered in the scalar g. z is kept in half precision: its
own rounding is relative to z, and the identity's share of the polynomial never enters a rounded matrix, so that a step
multiplies errors no more than it multiplies x. Products are summed in float32 and rounded once. A full product is not
mirrored: where it is not quite symmetric, rounding moved it less than it moved its entries.

Of a wide matrix the last two steps are made on the small side, as one map (1 + Q)(1 + Q'), with the second step's R' =
(1 + Q) R (1 + Q): a Gram form without the first steps, whose large factors a would multiply the rounding of R. With
three steps that is already too much: joined, "fast" loses 0.04 of polar error where all singular values are equal.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muonjax._linalg import MatrixProduct, square_norm
from muonjax._newton_schulz.scaling import power_of_two_scale
from muonjax._newton_schulz.settings import NewtonSchulz
from muonjax._newton_schulz.thin_deflation import deflate
from muonjax._policy import Policy
from pallas_kernels._api import symmetric_product_on


class _Products(NamedTuple):
    """Products in half precision, on one device or over the mesh axes of a `jax.shard_map`.

    Attributes:
      axis_name: Mesh axes over which the columns of x are sharded.
      together: Mesh axes whose devices share the work on m x m matrices.
    """

    policy: Policy
    dtype: jnp.dtype
    implementation: str | None
    axis_name: tuple[str, ...]
    together: tuple[str, ...]

    @property
    def rounded(self) -> MatrixProduct:
        return MatrixProduct(self.dtype.name, None, result=self.dtype.name)

    def over_columns(self, products: jax.Array) -> jax.Array:
        return jax.lax.psum(products, self.axis_name) if self.axis_name else products

    def gram(self, z: jax.Array) -> jax.Array:
        """z z^H."""
        if self.axis_name and self.implementation is None:
            return self.over_columns(MatrixProduct(self.dtype.name, None).with_adjoint(z, z)).astype(
                self.dtype
            )
        return self.over_columns(self._replace(together=()).symmetric(z))

    def symmetric(self, a, y=None, c=None, alpha: Any = 1.0, beta: Any = 1.0) -> jax.Array:
        """alpha A Y^H + beta C, where Y is A, or commutes with it."""
        if self.implementation is None and not self.together:
            product = self.rounded.with_adjoint(a, a if y is None else y)
            return product if c is None else (alpha * product + beta * c).astype(self.dtype)
        alpha, beta = (s[..., 0, 0] if isinstance(s, jax.Array) else s for s in (alpha, beta))
        return symmetric_product_on(
            self.policy.platform,
            a,
            y=y,
            c=c,
            alpha=alpha,
            beta=beta,
            implementation=self.implementation,
            axis_name=self.together,
        )


def iterate(
    x: jax.Array,
    settings: NewtonSchulz,
    policy: Policy,
    dtype: jnp.dtype,
    columns: int,
    axis_name: tuple[str, ...] = (),
    together: tuple[str, ...] = (),
) -> jax.Array:
    """x [*batch, m, n] with m <= `columns` -> its orthogonalization, in float32.

    Args:
      dtype: bfloat16.
      columns: n, counted over `axis_name`, the mesh axes over which the columns are sharded.
      together: Mesh axes whose devices share the work on m x m matrices.
    """
    products = _Products(policy, dtype, settings.implementation, axis_name, together)
    x = x.astype(jnp.float32)
    scale = power_of_two_scale(x, axis_name)
    rank = min(settings.deflation, x.shape[-2] // 8)
    if rank:
        z, others = deflate(x, scale, rank, dtype, policy, products.over_columns)
    else:
        z, others = (scale * x).astype(dtype), 0.0

    r = products.gram(z)
    r2 = products.symmetric(r)
    # The bound of the largest singular value is that of Schatten-8, less what is known.
    fourth = square_norm(r2)
    fourth = jnp.maximum(fourth - others, fourth / r.shape[-1])
    fourth = jnp.where(fourth == 0, 1, fourth)
    g2 = fourth**-0.25
    joined = policy.joins_last_steps(x.shape[-2], columns) and len(settings.steps) > 3
    gain = 1.0  # of g, a number at trace time: on a device each scalar would be a launch
    for step, row in enumerate(settings.steps[:-2] if joined else settings.steps):
        r = products.gram(z) if step else r
        q = _map(products, r, row, gain * gain * g2, None if step else r2)
        z = z + products.rounded(q, z)  # a product with an addend, where a library has it
        gain = row[0] * gain
    if joined:
        q, last = _map_of_two(products, products.gram(z), settings.steps[-2:], gain, g2)
        z, gain = z + products.rounded(q, z), last * gain
    return gain * fourth**-0.125 * z


def _map(products: _Products, r: jax.Array, row: Any, g2: Any, r2: Any = None) -> jax.Array:
    """Q of the step a x + (b R + c R^2) x = a (1 + Q) x, from r with R = `g2` r, and its square where it is known."""
    a, b, c = row
    linear, quadratic = b / a * g2, c / a * g2 * g2
    if c == 0:
        return (linear * r).astype(r.dtype)
    if r2 is not None:
        return (linear * r + quadratic * r2).astype(r.dtype)
    return products.symmetric(r, c=r, alpha=quadratic, beta=linear)


def _map_of_two(
    products: _Products, r: jax.Array, rows: Any, gain: float, g2: Any
) -> tuple[jax.Array, float]:
    """Q of two steps a a' (1 + Q) x, and a a'."""
    first = _map(products, r, rows[0], gain * gain * g2)
    once = products.symmetric(first, y=r)
    r = products.symmetric(once, y=first, c=(r + 2 * once).astype(r.dtype))
    gain = rows[0][0] * gain
    second = _map(products, r, rows[1], gain * gain * g2)
    both = (first.astype(jnp.float32) + second).astype(r.dtype)
    return products.symmetric(second, y=first, c=both), rows[0][0] * rows[1][0]
