"""Assign an owner to every matrix, so that the devices of a mesh have equal work. Needs shapes only, no arrays.

The rule is "longest processing time first": the matrices of highest cost are assigned first, each to the owner with the
least work so far. The load of a device is a sum over all shapes, shardings and dtypes. The device with the highest load
has at most 4/3 of the best possible load, and in practice a few percent more than the mean (Graham, "Bounds on
multiprocessing timing anomalies", 1969).

An owner is one device, or the devices along some of the mesh axes that shard a matrix: then the matrix stays sharded
over these, and they share its work. That pays where there are fewer matrices than devices.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from muonjax._common.platform import BYTES_A_SECOND
from muonjax._mesh.cost_model import Work
from muonjax._mesh.rounds import Kind, Round, make_rounds
from muonjax._mesh.shards import Axes, ExchangeGroup, LeafLayout, ShardedLeaf, leaf_layout, size_of

# (dtype, m, columns on this device, devices that share the columns) -> the work of that device on one matrix.
Cost = Callable[[Any, int, int, int], Work]


class Assignment(NamedTuple):
    """Which owner orthogonalizes which matrices.

    Attributes:
      mesh_shape: Sizes of the mesh's axes.
      leaves: All leaves.
      rounds: The rounds of all groups.
      seconds: Predicted for the busiest device, the exchange included: for an H100 and its links to the same node.
    """

    mesh_shape: Mapping[str, int]
    leaves: tuple[ShardedLeaf, ...]
    rounds: tuple[Round, ...]
    seconds: float


def assign_owners(leaves: Sequence[ShardedLeaf], mesh_shape: Mapping[str, int], cost: Cost) -> Assignment:
    """Assign an owner to every matrix.

    Over which mesh axes the matrices of a leaf stay sharded is what takes least time for all leaves that are sharded
    over the same mesh axes. Latency and slower links between nodes do not count.
    """
    by_sharding: dict[Axes, list[int]] = collections.defaultdict(list)
    for index, leaf in enumerate(leaves):
        by_sharding[leaf_layout(leaf, mesh_shape).group.exchange].append(index)
    layouts: dict[int, LeafLayout] = {}
    for sharding, members in by_sharding.items():
        own = [leaves[i] for i in members]
        choices = [[leaf_layout(leaf, mesh_shape, axes) for leaf in own] for axes in _tensor_axes(sharding)]
        if len(choices) > 1:  # on a tie whole matrices, which come first
            choices = [min(choices, key=lambda found: _assignment(own, found, mesh_shape, cost).seconds)]
        layouts |= zip(members, choices[0], strict=True)
    return _assignment(leaves, [layouts[i] for i in range(len(leaves))], mesh_shape, cost)


def _tensor_axes(sharding: Axes) -> list[Axes]:
    """Mesh axes over which matrices that `sharding` shards can stay sharded at their owners."""
    return [axes for count in range(len(sharding) + 1) for axes in itertools.combinations(sharding, count)]


def _assignment(
    leaves: Sequence[ShardedLeaf], layouts: Sequence[LeafLayout], mesh_shape: Mapping[str, int], cost: Cost
) -> Assignment:
    """What the owners do if the leaves are exchanged as `layouts` say."""
    works: dict[Kind, Work] = {}  # on one unit
    for group, unit, _ in layouts:
        matrices, m, columns = unit.matrices
        works[group, unit] = cost(group.dtype, m, columns, size_of(mesh_shape, group.tensor)).times(matrices)
    seconds, counts = _balance(layouts, works, mesh_shape)
    rounds = make_rounds(layouts, counts)
    sent = sum(works[kind].sent * int(of_owners.max()) for kind, of_owners in counts.items())
    sent += sum(round_.sent(mesh_shape) for round_ in rounds)
    return Assignment(mesh_shape, tuple(leaves), rounds, seconds + sent / BYTES_A_SECOND)


def _balance(
    layouts: Sequence[LeafLayout], works: Mapping[Kind, Work], mesh_shape: Mapping[str, int]
) -> tuple[float, dict[Kind, np.ndarray]]:
    """Seconds of the busiest device, and for each kind of units how many every owner gets."""
    num_units: dict[Kind, int] = collections.defaultdict(int)
    for group, unit, count in layouts:
        num_units[group, unit] += count
    devices = {group: _owner_devices(group, mesh_shape) for group, _ in num_units}
    stored = {group: np.zeros(len(own), int) for group, own in devices.items()}
    flops, seconds = np.zeros(math.prod(mesh_shape.values())), np.zeros(math.prod(mesh_shape.values()))

    def costliest_first(kind: Kind):
        return (-works[kind].flops, -kind[1].share_size, kind[1].matrices)

    counts = {}
    for kind in sorted(num_units, key=costliest_first):
        group, unit = kind
        own, cost = devices[group], works[kind]
        # Loads in units of this kind's cost, rounded so that sums in different orders compare as equal. Among owners of
        # equal load, the one that stores least comes first.
        busy = flops[own].max(axis=1) / max(cost.flops, 1.0)
        queue = [
            (round(load, 6), int(stored[group][owner]), owner) for owner, load in enumerate(busy.tolist())
        ]
        heapq.heapify(queue)
        counts[kind] = np.zeros(len(own), int)
        for _ in range(num_units[kind]):
            load, held, owner = queue[0]
            heapq.heapreplace(queue, (round(load + 1, 6), held + unit.share_size, owner))
            counts[kind][owner] += 1
        for owner, count in enumerate(counts[kind].tolist()):
            flops[own[owner]] += count * cost.flops
            seconds[own[owner]] += count * cost.seconds
        stored[group] += counts[kind] * unit.share_size
    return float(seconds.max()), counts


def _owner_devices(group: ExchangeGroup, mesh_shape: Mapping[str, int]) -> np.ndarray:
    """[owner, its devices]: more than one where matrices stay sharded."""
    names = list(mesh_shape)
    first = [names.index(axis) for axis in group.owner_axes]
    rest = [i for i in range(len(names)) if i not in first]
    devices = np.arange(math.prod(mesh_shape.values())).reshape(tuple(mesh_shape.values()))
    return devices.transpose(first + rest).reshape(size_of(mesh_shape, group.owner_axes), -1)
