"""One launch of a kernel for all matrices of a call: batch axes and `jax.vmap` are one axis.

The blocks of a lower triangle are numbered without a table and without a square root. Folding the lower right corner of
a triangle of t block rows up gives a full rectangle: t × (t+1)/2 blocks for odd t, (t+1) × t/2 for even t. Rows and
columns of the rectangle follow from a number by a division.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels._xla import Operands

Launch = Callable[..., jax.Array]
"""x and y [batch, m, k], c [batch, m, m], and alpha and beta as [batch, 2] in float32 -> [batch, m, m].

y and c may be None."""


def launch_batch(launch: Launch, o: Operands) -> jax.Array:
    """The product of operands [*batch, m, k] by one launch, which takes a single batch axis."""
    *batch, m, _ = o.x.shape
    size = math.prod(batch)
    # A scalar counts for every matrix.
    alpha = jnp.broadcast_to(o.alpha, (*batch, 1, 1)).reshape(size)
    beta = jnp.broadcast_to(o.beta, (*batch, 1, 1)).reshape(size)
    # [batch, 2], as the kernel reads them from the device's memory
    scale = jnp.stack([alpha, beta], axis=-1)

    # Y and C may be None, and stay so.
    x, y, c = jax.tree.map(lambda a: a.reshape(size, *a.shape[-2:]), (o.x, o.y, o.c))
    # [size, m, m] -> [*batch, m, m]
    return _launched_under_vmap(launch, x, y, c, scale).reshape(*batch, m, m)


def _launched_under_vmap(launch: Launch, *arguments: jax.Array | None) -> jax.Array:
    """The result of a launch on arrays [batch, ...], of which `jax.vmap` makes one longer launch.

    A kernel can't be vectorized by JAX: under `vmap` over an axis of 5, arrays [5, batch, ...] become
    [5·batch, ...], and the result [5·batch, m, m] becomes [5, batch, m, m]. None stays None.
    """
    run = jax.custom_batching.custom_vmap(launch)

    @run.def_vmap
    def _(size, batched, *arguments):
        """The result under `vmap`, and True: it has the axis of `vmap` in front."""

        def fold(argument, is_batched):
            """[size, batch, ...] -> [size·batch, ...]; an array without the axis of `vmap` is repeated."""
            if argument is None:
                return None
            if not is_batched:
                argument = jnp.broadcast_to(argument, (size, *argument.shape))
            return argument.reshape(-1, *argument.shape[2:])

        # Called anew, because another `vmap` may be around this one.
        out = _launched_under_vmap(launch, *map(fold, arguments, batched))
        return out.reshape(size, -1, *out.shape[1:]), True

    return run(*arguments)


Index = int | jax.Array


def rectangle(t: int) -> tuple[int, int]:
    """Rows and columns of the rectangle that a triangle of t block rows folds into.

    >>> rectangle(3), rectangle(4)  # 6 and 10 blocks
    ((3, 2), (5, 2))
    """
    # t(t + 1)/2 blocks, as (t + 1)/2 columns of t blocks or as t/2 columns of t + 1.
    if t % 2:
        return t, (t + 1) // 2
    return t + 1, t // 2


def unfold(row: Index, column: Index, t: int) -> tuple[jax.Array, jax.Array]:
    """The block (i, j), ``0 <= j <= i < t``, of the lower triangle that lies at a place of the folded rectangle.

    For t = 3 the rectangle has the blocks (0, 0) (2, 2) / (1, 0) (1, 1) / (2, 0) (2, 1). Only block (2, 2), the corner
    of the triangle, is folded up.
    """
    odd = t % 2
    _, width = rectangle(t)
    # For even t the rectangle has one more row than the triangle, so that everything moves down by one.
    if odd:
        is_in_place = row >= column
        row_in_place = row
    else:
        is_in_place = row > column
        row_in_place = row - 1
    # The other places hold the corner behind the first `width` columns, transposed.
    i = jnp.where(is_in_place, row_in_place, width + column - odd)
    j = jnp.where(is_in_place, column, width + row)
    return i, j
