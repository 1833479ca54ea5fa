"""Cut the exchange of each group into all-to-all rounds, in which every owner gets some of its units."""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from muonjax._mesh.shards import ExchangeGroup, LeafLayout, UnitLayout, size_of

# Elements that one device sends to one owner in a round, at most: half of what an index of 32 bits reaches, for rounds
# are cut between matrices.
_LARGEST = 2**30

Kind = tuple[ExchangeGroup, UnitLayout]  # of units (`layout`)


class OwnedUnits(NamedTuple):
    """Consecutive units of one leaf with the same owner."""

    layout: UnitLayout
    leaf: int
    start: int
    count: int


class Round(NamedTuple):
    """One all-to-all to the owners of a group, and one back.

    Attributes:
      group: Whose leaves are exchanged.
      owned: For each owner, in the order of its coordinates, what it gets; equal shapes follow each other.
    """

    group: ExchangeGroup
    owned: tuple[tuple[OwnedUnits, ...], ...]

    @property
    def size(self) -> int:
        """Elements that one device sends to the owner that gets most; the others' parts are padded to it."""
        return max(map(_size, self.owned))

    def sizes(self, replicas: int) -> list[int]:
        """Of each of so many replicas, the elements that one device sends to its owner that gets most."""
        owners = len(self.owned) // replicas
        return [max(map(_size, self.owned[r * owners : (r + 1) * owners])) for r in range(replicas)]

    def sums(self, replicas: int) -> bool:
        """Whether results reach all replicas by an all-reduce, unpadded, and not by an all-gather.

        A sum with zeros is exact and sends everything twice; a gather pads every replica's part to the largest, which
        is more where few replicas own anything.
        """
        return 2 * sum(self.sizes(replicas)) < replicas * self.size

    def sent(self, mesh_shape: Mapping[str, int]) -> float:
        """Bytes that one device sends: to the owners, back, and to the other replicas."""
        replicas = size_of(mesh_shape, self.group.replicas)
        exchanged = size_of(mesh_shape, self.group.exchange)
        row = exchanged * self.group.dtype.itemsize
        both_ways = 2.0 * row * self.size * (exchanged - 1) / exchanged
        if self.sums(replicas):
            return both_ways + 2.0 * row * sum(self.sizes(replicas)) * (replicas - 1) / replicas
        return both_ways + 1.0 * row * self.size * (replicas - 1)


def _size(owned: Sequence[OwnedUnits]) -> int:
    return sum(units.count * units.layout.share_size for units in owned)


def make_rounds(layouts: Sequence[LeafLayout], counts: Mapping[Kind, np.ndarray]) -> tuple[Round, ...]:
    """Which units go to which owner: units of a kind are interchangeable, so each owner gets consecutive ones."""
    queues: dict[Kind, list[tuple[int, int]]] = collections.defaultdict(list)
    for leaf, (group, unit, num_units) in enumerate(layouts):
        queues[group, unit] += [(leaf, index) for index in range(num_units)]
    owned: dict[ExchangeGroup, list[list[tuple[UnitLayout, int, int]]]] = {}
    for kind in sorted(queues, key=lambda kind: kind[1].matrices):
        group, layout = kind
        queue = iter(queues[kind])
        lists = owned.setdefault(group, [[] for _ in counts[kind]])
        for units, count in zip(lists, counts[kind], strict=True):
            units += [(layout, *one) for one in itertools.islice(queue, int(count))]
    rounds = []
    for group, lists in owned.items():
        largest = max(sum(layout.share_size for layout, _, _ in units) for units in lists)
        count = max(1, -(-largest // _LARGEST))
        for i in range(count):
            cut = [units[len(units) * i // count : len(units) * (i + 1) // count] for units in lists]
            rounds.append(Round(group, tuple(map(_consecutive, cut))))
    return tuple(rounds)


def _consecutive(units: Sequence[tuple[UnitLayout, int, int]]) -> tuple[OwnedUnits, ...]:
    found: list[OwnedUnits] = []
    for layout, leaf, index in units:
        last = found[-1] if found else None
        if last and (last.layout, last.leaf, last.start + last.count) == (layout, leaf, index):
            found[-1] = last._replace(count=last.count + 1)
        else:
            found.append(OwnedUnits(layout, leaf, index, 1))
    return tuple(found)
