"""The tiles of the Hopper kernel: their sizes, how many shared memory holds,
and how a triangle of them is numbered.

A cooperative thread array (CTA) computes a tile of ``BLOCK`` by ``BLOCK`` entries of the result.
Two warpgroups halve its rows. Only tiles that touch the lower triangle are computed: a triangle of
``t`` rows of tiles has ``t(t + 1)/2`` of them instead of ``t²``.

They are numbered without a table and without a square root. Folding the lower right corner of the
triangle up gives a full rectangle: t × (t+1)/2 tiles for odd t, (t+1) × t/2 for even t. Rows and
columns of the rectangle follow from a number by a division.
"""

import jax
import jax.numpy as jnp

# Rows and columns of a tile.
BLOCK = 128
# Entries of k that one stage of the pipeline loads:
# 64 half-precision numbers fill the 128-byte swizzle.
DEPTH = 64
# The epilogue stores squares of this size: 64 rows are what one warpgroup's wgmma writes.
SQUARE = 64
# How many slices of X and Y, 32 KiB together, are in flight. With them a CTA's shared memory of 227
# KiB holds two more times 32 KiB: each for a square and its mirror image,
# or for two squares of C, in both warpgroups.
STAGES = 5
# Columns of tiles that the schedule keeps together for the L2 cache.
GROUP = 8


def num_tiles(m: int) -> int:
    """How many tiles touch the lower triangle of an m × m result:
    300 rows are three rows of tiles, and six tiles."""
    t = -(-m // BLOCK)
    return t * (t + 1) // 2


Index = int | jax.Array


def rectangle(t: int) -> tuple[int, int]:
    """Rows and columns of the rectangle that a triangle of t rows of tiles folds into.

    >>> rectangle(3), rectangle(4)  # 6 and 10 tiles
    ((3, 2), (5, 2))
    """
    # t(t + 1)/2 tiles, as (t + 1)/2 columns of t blocks or as t/2 columns of t + 1.
    if t % 2:
        return t, (t + 1) // 2
    return t + 1, t // 2


def unfold(row: Index, column: Index, t: int) -> tuple[jax.Array, jax.Array]:
    """The tile (i, j), ``0 <= j <= i < t``, of the lower triangle that lies at a place of the
    folded rectangle.

    Each line is a row of the rectangle. A * marks the tiles of the lower right corner of the
    triangle, which was folded up:

        t = 3:  (0, 0) (2, 2)*     t = 2:  (1, 1)*
                (1, 0) (1, 1)              (0, 0)
                (2, 0) (2, 1)              (1, 0)
    """
    odd = t % 2
    _, width = rectangle(t)
    # For even t the rectangle has one more row than the triangle,
    # so that everything moves down by one.
    if odd:
        is_in_place = row >= column
        row_in_place = row
    else:
        is_in_place = row > column
        row_in_place = row - 1
    # The other places hold the corner behind the first `width` columns, transposed: for t = 3, of
    # width 2, row 0 and column 1 have (2, 2).
    i = jnp.where(is_in_place, row_in_place, width + column - odd)
    j = jnp.where(is_in_place, column, width + row)
    return i, j
