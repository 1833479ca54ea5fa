"""The sizes of the Hopper kernel: tiles of the result, and how much of them shared memory holds.

A cooperative thread array (CTA) computes a tile of ``BLOCK`` by ``BLOCK`` entries of the result. Two warpgroups halve
its rows. Only tiles that touch the lower triangle are computed: a triangle of ``t`` rows of tiles has ``t(t + 1)/2`` of
them instead of ``t²``.
"""

# Rows and columns of a tile.
BLOCK = 128
# Entries of k that one stage of the pipeline loads: 64 half-precision numbers fill the 128-byte swizzle.
DEPTH = 64
# The epilogue stores squares of this size: 64 rows are what one warpgroup's wgmma writes.
SQUARE = 64
# How many slices of X and Y, 32 KiB together, are in flight. With them a CTA's shared memory of 227 KiB holds two more
# times 32 KiB: each for a square and its mirror image, or for two squares of C, in both warpgroups.
STAGES = 5
# Columns of tiles that the schedule keeps together for the L2 cache.
GROUP = 8


def num_tiles(m: int) -> int:
    """How many tiles touch the lower triangle of an m × m result: 300 rows are three rows of tiles, and six tiles."""
    t = -(-m // BLOCK)
    return t * (t + 1) // 2
