"""Number the blocks of a lower triangle without a table and without a square root.

Folding the lower right corner of a triangle of t block rows up gives a full rectangle: t × (t+1)/2 blocks for odd t,
(t+1) × t/2 for even t. Rows and columns of the rectangle follow from a number by a division.
"""

import jax
import jax.numpy as jnp

Index = int | jax.Array


def rectangle(t: int) -> tuple[int, int]:
    """Rows and columns of the folded triangle of t block rows."""
    return (t, (t + 1) // 2) if t % 2 else (t + 1, t // 2)


def unfold(row: Index, column: Index, t: int) -> tuple[jax.Array, jax.Array]:
    """The block (i, j) with ``0 <= j <= i < t`` at a place of the rectangle."""
    odd = t % 2
    _, width = rectangle(t)
    lower = row >= column if odd else row > column
    i = jnp.where(lower, row if odd else row - 1, width + column - odd)
    j = jnp.where(lower, column, width + row)
    return i, j
