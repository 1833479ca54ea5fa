"""Assign an owner to every matrix, so that the devices of a mesh have equal work.

The decision is from shapes alone, by "longest processing time first": the matrices that take
longest are assigned first, each to the owner with the least work so far. Work is summed over all
shapes, shardings and dtypes. The busiest device has at most 4/3 of the least possible work, and in
practice a few percent more than the mean (Graham, "Bounds on multiprocessing timing anomalies",
1969).

The result is a list of `Round`s, which `map_on_mesh` runs. `matrix_shards` explains the words:
block, owner, kind, group.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from muonjax._mesh.distribution import MeshShape, devices_along
from muonjax._mesh.matrix_shards import (
    ExchangeGroup,
    MatrixKind,
    MatrixLayout,
    ShardedLeaf,
    matrix_kind,
    view_of_block,
)


class Matrices(NamedTuple):
    """Consecutive matrices of one leaf: `count` of them,
    the first of which has the number `start`."""

    layout: MatrixLayout
    leaf: int
    start: int
    count: int

    @property
    def size(self) -> int:
        """Elements of their blocks on one device."""
        return self.count * self.layout.block_size


Owners = list[list[Matrices]]
"""For each owner, in the order of their coordinates, the matrices that it gets."""


def row_length(owner: list[Matrices]) -> int:
    """Elements that one device sends to an owner: its blocks of the owner's matrices."""
    return sum(matrices.size for matrices in owner)


class Round(NamedTuple):
    """One all-to-all to the owners of a group, and one back.

    Attributes:
      group: Whose leaves are exchanged.
      replicas: For each replica its owners. An owner's matrices of one layout follow each other.
    """

    group: ExchangeGroup
    replicas: list[Owners]

    @property
    def replica_sizes(self) -> list[int]:
        """For each replica, the elements that one device sends to the owner that gets most."""
        return [max(map(row_length, owners)) for owners in self.replicas]

    @property
    def row_size(self) -> int:
        """The largest of `replica_sizes`, to which all other rows of the all-to-all are padded."""
        return max(self.replica_sizes)

    @property
    def by_all_reduce(self) -> bool:
        """Whether results reach the other replicas by an all-reduce, and not by an all-gather.

        An all-gather pads the results of each replica to the largest. An all-reduce sends the
        results of all replicas twice and unpadded, as a sum with zeros, which is exact:
        less if few replicas own anything.
        """
        return 2 * sum(self.replica_sizes) < len(self.replicas) * self.row_size


def multiply_adds(layout: MatrixLayout) -> int:
    """What an owner multiplies for a matrix, in a measure that only compares unequal ones.

    The default settings take 2 m^2 n + 6 m^3 multiply-adds for each matrix in full precision, and 5
    m^2 n + 11 m^3 in half precision, both within a fifth for n = m to 4 m.
    This has a ratio between the two.
    """
    m, n = layout.shape
    return m**2 * (2 * n + 5 * m)


def assign_owners(leaves: Sequence[ShardedLeaf], mesh_shape: MeshShape) -> list[Round]:
    """Give each matrix to an owner: a round for each group of leaves that are exchanged together.

    Matrices of one kind, which have equal shapes and shardings, take equally long. The kinds that
    take longest come first, and each matrix goes to the owner that is least busy then.
    """
    # The matrices of each kind that wait for an owner, leaf by leaf.
    queues: dict[MatrixKind, list[Matrices]] = {}
    for i, leaf in enumerate(leaves):
        kind = matrix_kind(leaf, mesh_shape)
        # Stacked layers may be sharded: these are the ones of one shard,
        # since all shards are divided in the same way.
        count = view_of_block(leaf, mesh_shape).batch
        matrices = Matrices(kind.layout, leaf=i, start=0, count=count)
        queues.setdefault(kind, []).append(matrices)

    def longest_first(kind: MatrixKind) -> tuple:
        # Ties are broken by sizes, and not by the order of the leaves.
        layout = kind.layout
        return -multiply_adds(layout), -layout.block_size, layout.shape

    # The work of each device on the matrices that its owners have so far, of all groups.
    work_of_devices = np.zeros(math.prod(mesh_shape.values()))
    owners_of: dict[ExchangeGroup, Owners] = {}
    for kind in sorted(queues, key=longest_first):
        # [owners, devices of an owner]: one device for each shard of the layers, which works on the
        # layers of its shard.
        devices = _owner_devices(kind.group, mesh_shape)
        # For each owner a list of the matrices that it has so far
        owners = owners_of.setdefault(kind.group, [[] for _ in devices])
        work_of_one = multiply_adds(kind.layout)
        # An owner of several devices is as busy as the busiest of them.
        # One more matrix makes it busier by 1.
        busy = work_of_devices[devices].max(axis=1) / work_of_one
        # This adds to the lists of the owners.
        counts = _give(queues[kind], owners, busy)
        # Each device of an owner works on as many matrices, those of its own layers.
        work_of_devices[devices] += work_of_one * counts[:, None]
    return [_round(group, owners, mesh_shape) for group, owners in owners_of.items()]


def _owner_devices(group: ExchangeGroup, mesh_shape: MeshShape) -> np.ndarray:
    """The numbers of each owner's devices, [owners, devices of an owner].

    On a mesh {"fsdp": 2, "tensor": 2} with the owner axes ("tensor",) they are [[0, 2], [1, 3]].
    The other mesh axis, "fsdp", cuts an axis that counts matrices, such as layers. So each owner
    has two devices, which do the same, each for its own layers.
    """
    names = list(mesh_shape)
    sizes = list(mesh_shape.values())
    # As in `jax.sharding.Mesh`, the last mesh axis counts fastest.
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    # The coordinates along the owner's axes come first, and the others are put together.
    owner_axes = list(map(names.index, group.owner_axes))
    devices = np.moveaxis(devices, owner_axes, range(len(owner_axes)))
    return devices.reshape(devices_along(mesh_shape, group.owner_axes), -1)


def _give(queue: list[Matrices], owners: Owners, busy: np.ndarray) -> np.ndarray:
    """Give the matrices of one kind to the owners,
    each to the owner that is least busy at that point.

    Args:
      queue: The matrices, which are interchangeable. It is empty afterwards.
      owners: What each owner has already; these lists grow. On a tie the owner comes first to which
        each device sends least so far: the all-to-all pads what goes to each owner to the longest.
      busy: The work of each owner so far, as a number of these matrices: 2.5 is the work of two
        and a half.

    Returns:
      How many matrices each owner gets.
    """
    # (work, how much each device sends it, its number) of each owner: the least busy one is the
    # first of the heap. Each matrix makes it busier by one, and brings it one block more.
    heap = []
    for i, owner in enumerate(owners):
        # Rounded, so that sums of the same numbers in different orders are equal.
        heap.append((round(busy[i], 6), row_length(owner), i))
    heapq.heapify(heap)
    counts = np.zeros(len(owners), int)
    # All matrices of a kind have one layout.
    block_size = queue[0].layout.block_size
    for _ in range(sum(matrices.count for matrices in queue)):
        load, received, i = heap[0]
        heapq.heapreplace(heap, (round(load + 1, 6), received + block_size, i))
        counts[i] += 1
    # Each owner gets consecutive matrices, which are then few slices of the leaves; `+=` adds them
    # to the list in `owners`.
    for owner, count in zip(owners, counts.tolist(), strict=True):
        owner += _take(queue, count)
    return counts


def _take(queue: list[Matrices], count: int) -> list[Matrices]:
    """Remove the next `count` matrices from the queue, which has as many or more, and return them:
    5 of entries with counts 4 and 4 are entries with 4 and 1, and leave one with 3."""
    taken = []
    while count > 0:
        matrices = queue.pop(0)
        left = matrices.count - count
        if left > 0:
            # The next owner begins with the rest of these.
            rest = matrices._replace(start=matrices.start + count, count=left)
            queue.insert(0, rest)
            matrices = matrices._replace(count=count)
        taken.append(matrices)
        count -= matrices.count
    return taken


def _round(group: ExchangeGroup, owners: Owners, mesh_shape: MeshShape) -> Round:
    """The round of a group, with a list of owners for each replica:
    8 owners are two lists of 4 if replicas are 2."""
    per_replica = devices_along(mesh_shape, group.exchange_axes)
    # Owners are numbered by their coordinates along the replica axes first and the exchange axes
    # last. So the owners of one replica follow each other.
    firsts = range(0, len(owners), per_replica)
    round_ = Round(group, [owners[first : first + per_replica] for first in firsts])
    # The numbers that a device sends to each owner. XLA's indices have 32 bits.
    if round_.row_size >= 2**31:
        raise ValueError(
            f"one device would get {round_.row_size} numbers from another; use more devices."
        )
    return round_
