"""The tiles of the Hopper kernel that are worth timing."""

import dataclasses
from collections.abc import Iterator

from pallas_kernels._tiles import SHAPES, Tiles


def candidates() -> Iterator[Tiles]:
    """Every choice worth timing: those that fit in shared memory with the most stages."""
    for shape in SHAPES:
        for slots in (1, 2):
            for group in (4, 8, 16):
                for stages in range(8, 2, -1):
                    try:
                        tiles = dataclasses.replace(
                            shape, slots=slots, group=group, stages=stages
                        )
                    except ValueError:
                        continue
                    yield tiles
                    break
