import dataclasses

import pytest

from pallas_kernels._tiles import SHAPES, SHARED_MEMORY, Tiles, pick


@pytest.mark.parametrize("tiles", SHAPES, ids=str)
def test_every_shape_leaves_room_for_c(tiles):
    assert tiles.with_addend().shared_memory(addend=True) <= SHARED_MEMORY
    assert tiles.with_addend().stages >= 2


@pytest.mark.parametrize("tiles", SHAPES, ids=str)
def test_more_stages_than_fit_are_refused(tiles):
    with pytest.raises(ValueError, match="shared memory"):
        dataclasses.replace(tiles, stages=tiles.stages + 2)


@pytest.mark.parametrize(
    "tiles", [Tiles(), Tiles(rows=2, slots=1), Tiles(block=64, rows=2)], ids=str
)
@pytest.mark.parametrize("m", [1, 64, 128, 129, 1000, 4096])
def test_count_is_the_number_of_tiles_that_touch_the_lower_triangle(tiles, m):
    height, width = tiles.rows * tiles.block, tiles.block
    rows = -(-m // height)
    touching = sum(
        j * width < (i + 1) * height
        for i in range(rows)
        for j in range(rows * tiles.rows)
    )
    assert tiles.count(m) == touching


def test_waves():
    """132 multiprocessors: 4096 in 128² tiles is 528 tiles, four full waves."""
    assert Tiles().waves(4096, 1) == 4
    assert Tiles(rows=2, slots=1).waves(8192, 1) == 8
    assert Tiles(rows=2, slots=1).waves(4096, 1) == 3


def test_pick_counts_waves():
    assert (
        pick(4096, 1).rows == 1
    )  # four full waves of small tiles beat 2.06 of large ones
    assert pick(8192, 1).rows == 2  # eight full waves of large tiles
    assert pick(8192, 1, cores=1).rows == 2
    assert pick(64, 1).block == 64
