"""Assign an owner to every matrix, so that the devices of a mesh have equal work. Needs shapes only, no arrays.

The rule is "longest processing time first": the matrices of highest cost are assigned first, each to the owner with the
least work so far. The load of a device is a sum over all shapes, shardings and dtypes. The device with the highest load
has at most 4/3 of the best possible load, and in practice a few percent more than the mean (Graham, "Bounds on
multiprocessing timing anomalies", 1969).
"""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from muonjax._mesh.cost_model import Work
from muonjax._mesh.layout import Axes, ExchangeGroup, LeafLayout, ShardedLeaf, leaf_layout, size_of
from muonjax._mesh.rounds import Kind, Round, make_rounds
from muonjax._policy import BYTES_A_SECOND

Mode = Literal["owner", "tensor_parallel", "hybrid", "auto"]
MODES = get_args(Mode)

# (dtype, m, columns on this device, devices that share the columns) -> the work of that device on one matrix.
Cost = Callable[[Any, int, int, int], Work]


class ModeCost(NamedTuple):
    """What one update costs the busiest device in one mode.

    Attributes:
      flops: Of matrix products, two per multiply-add.
      redundancy: These flops over an even share of the work of one device alone; 1 is perfect.
      imbalance: These flops over the mean of the devices.
      sent: Bytes.
      held: Bytes of the largest buffer that is sent.
      collectives: How many.
      seconds: Predicted for an H100 and its links to the same node: what "auto" makes least.
    """

    flops: float
    redundancy: float
    imbalance: float
    sent: float
    held: float
    collectives: int
    seconds: float = 0.0


class Assignment(NamedTuple):
    """Which owner orthogonalizes which matrices, and what that costs.

    Attributes:
      mesh_shape: Sizes of the mesh's axes.
      leaves: All leaves.
      rounds: The rounds of all groups.
      cost: Of the busiest device, the exchange included.
    """

    mesh_shape: Mapping[str, int]
    leaves: tuple[ShardedLeaf, ...]
    rounds: tuple[Round, ...]
    cost: ModeCost


def assign_owners(
    leaves: Sequence[ShardedLeaf],
    mesh_shape: Mapping[str, int],
    *,
    axes: Axes,
    mode: Mode,
    chunks: int,
    cost: Cost,
) -> Assignment:
    """Assign an owner to every matrix.

    Args:
      leaves: All of them.
      mesh_shape: Sizes of the mesh's axes.
      axes: Mesh axes over which replicas divide the work.
      mode: "owner": each matrix belongs to one device. "tensor_parallel": to all devices that store it. "hybrid": to
        the devices along some of the mesh axes that shard it. "auto": whichever of these takes least time by
        `ModeCost.seconds`, separately for leaves whose matrices are sharded over different mesh axes.
      chunks: Rounds of each group.
      cost: The work on a matrix.
    """
    by_sharding: dict[Axes, list[int]] = collections.defaultdict(list)
    for index, leaf in enumerate(leaves):
        by_sharding[leaf_layout(leaf, mesh_shape).group.exchange].append(index)
    layouts: dict[int, LeafLayout] = {}
    for sharding, members in by_sharding.items():
        own = [leaves[i] for i in members]
        choices = [
            [leaf_layout(leaf, mesh_shape, axes, tensor) for leaf in own]
            for tensor in _choices(sharding, mode)
        ]
        if len(choices) > 1:
            choices.sort(key=lambda found: _assignment(own, found, mesh_shape, chunks, cost).cost.seconds)
        layouts |= zip(members, choices[0], strict=True)
    return _assignment(leaves, [layouts[i] for i in range(len(leaves))], mesh_shape, chunks, cost)


def _choices(sharding: Axes, mode: Mode) -> list[Axes]:
    """Choices of tensor axes, the owner mode first: on a tie the first one wins."""
    subsets = [s for count in range(len(sharding) + 1) for s in itertools.combinations(sharding, count)]
    hybrids = subsets[1:-1] or [()]
    return {"owner": [()], "tensor_parallel": [sharding], "hybrid": hybrids, "auto": subsets}[mode]


def _assignment(
    leaves: Sequence[ShardedLeaf],
    layouts: Sequence[LeafLayout],
    mesh_shape: Mapping[str, int],
    chunks: int,
    cost: Cost,
) -> Assignment:
    """What the owners do if the leaves are exchanged as `layouts` say."""
    works: dict[Kind, Work] = {}  # on one unit
    alone = 0.0  # flops of one device that does everything
    for leaf, (group, unit, _) in zip(leaves, layouts, strict=True):
        tensor = size_of(mesh_shape, group.tensor)
        matrices, m, columns = unit.matrices
        works[group, unit] = cost(group.dtype, m, columns, tensor).times(matrices)
        alone += leaf.view.batch * cost(group.dtype, m, columns * tensor, 1).flops
    flops, seconds, counts = _balance(layouts, works, mesh_shape)
    rounds = make_rounds(layouts, counts, chunks)

    total = Work(flops=float(flops.max(initial=0.0)), seconds=float(seconds.max(initial=0.0)))
    for kind, of_owners in counts.items():
        total += works[kind]._replace(flops=0.0, seconds=0.0).times(int(of_owners.max()))
    largest = 0.0
    for round_ in rounds:
        replicas = size_of(mesh_shape, round_.group.replicas)
        exchanged = size_of(mesh_shape, round_.group.exchange)
        row = exchanged * round_.group.dtype.itemsize
        total += Work(0.0, 2.0 * row * round_.size * (exchanged - 1) / exchanged, 2 * (exchanged > 1))
        if round_.sums(replicas):
            summed = row * sum(round_.sizes(replicas))
            total += Work(0.0, 2.0 * summed * (replicas - 1) / replicas, 1)
            largest = max(largest, row * round_.size, summed)
        else:
            total += Work(0.0, 1.0 * row * round_.size * (replicas - 1), int(replicas > 1))
            largest = max(largest, row * round_.size * replicas)
    even, mean = alone / math.prod(mesh_shape.values()), float(flops.mean())
    busiest = ModeCost(
        total.flops,
        total.flops / even if even else 1.0,
        total.flops / mean if mean else 1.0,
        total.sent,
        largest,
        total.collectives,
        total.seconds + total.sent / BYTES_A_SECOND,
    )
    return Assignment(mesh_shape, tuple(leaves), rounds, busiest)


def _balance(
    layouts: Sequence[LeafLayout], works: Mapping[Kind, Work], mesh_shape: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray, dict[Kind, np.ndarray]]:
    """Flops and seconds of every device, and for each kind of units how many every owner gets."""
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
    return flops, seconds, counts


def _owner_devices(group: ExchangeGroup, mesh_shape: Mapping[str, int]) -> np.ndarray:
    """[owner, its devices]: more than one where matrices stay sharded, or where the work is repeated."""
    names = list(mesh_shape)
    first = [names.index(axis) for axis in group.owner_axes]
    rest = [i for i in range(len(names)) if i not in first]
    devices = np.arange(math.prod(mesh_shape.values())).reshape(tuple(mesh_shape.values()))
    return devices.transpose(first + rest).reshape(size_of(mesh_shape, group.owner_axes), -1)
