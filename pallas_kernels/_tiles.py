"""The sizes of one launch of the Hopper kernel, and the one visible rule that picks them.

A cooperative thread array (CTA) owns a tile of ``rows·block`` by ``block`` entries of the result. Two
compute warpgroups halve its rows. Only tiles that touch the lower triangle are visited: a triangle of ``t``
block rows has ``t(t+1)/2`` of them instead of ``t²``, so the gain depends on how well that number fills the
chip's multiprocessors ("waves"), and the rule below counts just that.
"""

import dataclasses
import math

# Elements of k that one stage of the pipeline loads: 64 half-precision numbers fill the 128-byte swizzle.
DEPTH = 64
# The epilogue stores squares of this size: 64 rows are what one warpgroup's wgmma writes.
SQUARE = 64
# Shared memory that one CTA may use on compute capability 9.0, in bytes (CUDA programming guide, table of
# technical specifications), less a little for barriers and alignment.
SHARED_MEMORY = 227 * 1024 - 2048
# Streaming multiprocessors of an H100 SXM, where the device does not say.
CORES = 132


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of one launch.

    Attributes:
      block: columns of a CTA's tile, 64 or 128.
      rows: the tile's rows in units of `block`, 1 or 2; each warpgroup needs at least 64 rows.
      stages: how many k-slices of X and Y are in flight, at least 2.
      slots: how many 64-squares of the result, each with its mirror image, may wait for their store, 1 or 2.
      group: block columns that the schedule keeps together for the L2 cache.
    """

    block: int = 128
    rows: int = 1
    stages: int = 4
    slots: int = 2
    group: int = 8

    def __post_init__(self):
        if self.shared_memory(addend=False) > SHARED_MEMORY:
            raise ValueError(
                f"{self} needs {self.shared_memory(addend=False)} bytes of shared memory; a CTA on Hopper "
                f"has {SHARED_MEMORY}. Take fewer stages or slots."
            )

    @property
    def squares(self) -> int:
        """64-squares of the result that one warpgroup stores."""
        rows_of_warpgroup = self.rows * self.block // 2
        return (rows_of_warpgroup // SQUARE) * (self.block // SQUARE)

    def shared_memory(self, *, addend: bool) -> int:
        """Bytes of shared memory that one CTA needs; more with an addend C."""
        # Half-precision numbers have two bytes. A stage holds `rows` blocks of X and one of Y.
        square = 2 * SQUARE * SQUARE
        stage = 2 * (self.rows + 1) * self.block * DEPTH
        pipeline = self.stages * stage
        # Each of the two warpgroups has slots for squares of the result and for their mirror images.
        slots = min(self.slots, self.squares)
        results = 2 * slots * 2 * square
        squares_of_c = 2 * min(2, self.squares) * square
        return pipeline + results + (squares_of_c if addend else 0)

    def with_addend(self) -> "Tiles":
        """The same tiles with shared memory left for C: first slots are given up, then stages of the pipeline."""
        # Fewer slots delay stores; fewer stages would delay the products.
        tiles = self
        if tiles.shared_memory(addend=True) > SHARED_MEMORY and tiles.slots > 1:
            tiles = dataclasses.replace(tiles, slots=1)
        while tiles.shared_memory(addend=True) > SHARED_MEMORY:
            tiles = dataclasses.replace(tiles, stages=tiles.stages - 1)
        return tiles

    def count(self, m: int) -> int:
        """How many tiles of a CTA touch the lower triangle of an m×m result: t(t + 1)/2 squares of `rows` tiles."""
        # t rows of squares that are rows·block wide, and in each square `rows` tiles next to each other.
        t = math.ceil(m / (self.rows * self.block))
        return self.rows * t * (t + 1) // 2

    def waves(self, m: int, batch: int, cores: int = CORES) -> int:
        """Rounds in which every multiprocessor works on one tile."""
        return math.ceil(batch * self.count(m) / cores)


# What one round costs for each shape of tile, in units of a 128×128 tile's. From the bytes that a tile loads for each
# multiply-add: no tile was timed alone. Only the order of the candidates depends on it.
_COST = {(128, 1): 1.0, (128, 2): 1.85, (64, 2): 0.6}

SHAPES = (
    Tiles(block=128, rows=1, stages=5, slots=2),
    Tiles(block=128, rows=2, stages=4, slots=1),
    Tiles(block=64, rows=2, stages=7, slots=1),
)


def pick(m: int, batch: int, cores: int = CORES) -> Tiles:
    """The tiles with the fewest waves, weighed by what a wave of theirs costs."""

    def cost(tiles: Tiles) -> float:
        cost_of_wave = _COST[tiles.block, tiles.rows]
        return tiles.waves(m, batch, cores) * cost_of_wave

    return min(SHAPES, key=cost)
