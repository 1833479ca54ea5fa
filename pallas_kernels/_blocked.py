"""The lower triangle by panels of rows, in plain XLA: fewer multiply-adds on any platform.

Rows ``[s, e)`` of a symmetric result need only the columns ``[0, e)``. With ``p`` panels of equal height the
products cost ``(p + 1) / 2p`` of the full one: 3/4 with two panels, 5/8 with four, and the panels stay large
enough for XLA's matrix multiply to run at its usual rate.
"""

import jax
import jax.numpy as jnp

from pallas_kernels._reference import epilogue, mirror, product

PANELS = 4


def symmetric_product(
    x: jax.Array, y: jax.Array | None, c: jax.Array | None, alpha: jax.Array, beta: jax.Array
) -> jax.Array:
    """``alpha·X Yᴴ + beta·C``: the lower triangle, then its mirror image. The public op checks the arguments."""
    y = x if y is None else y
    m = x.shape[-2]
    height = max(1, -(-m // PANELS))
    panels = []
    for start in range(0, max(m, 1), height):
        end = min(start + height, m)
        panel = epilogue(
            product(x[..., start:end, :], y[..., :end, :]),
            None if c is None else c[..., start:end, :end],
            alpha,
            beta,
        )
        # Padding, concatenation and mirror image are one fused pass: no half is copied twice.
        padding = [(0, 0)] * (panel.ndim - 1) + [(0, m - end)]
        panels.append(jnp.pad(panel.astype(x.dtype), padding))
    return mirror(jnp.concatenate(panels, axis=-2))
