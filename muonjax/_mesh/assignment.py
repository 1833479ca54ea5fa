"""On a mesh, second: every matrix gets a home, so that no device waits long for another. Arithmetic alone.

Matrices are dealt out by longest-processing-time: the costliest first, each to the home that has the least to do so
far. The loads are those of devices, carried over all shapes, layouts and dtypes; the result is within 4/3 of the best
possible and in practice within a few percent (Graham, "Bounds on multiprocessing timing anomalies", 1969).
"""

import collections
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from muonjax._cost_model import BYTES_A_SECOND, Work
from muonjax._mesh.layout import Axes, Kind, Lane, Leaf, Placement, place

Mode = Literal["owner", "tensor_parallel", "hybrid", "auto"]
MODES = get_args(Mode)

# (dtype, m, columns on this device, devices that share the columns) -> the work of that device on one matrix.
Cost = Callable[[Any, int, int, int], Work]


class Run(NamedTuple):
    """Consecutive units of one leaf that share a home."""

    kind: Kind
    leaf: int
    start: int
    count: int


class Shipment(NamedTuple):
    """One trip of a lane: for each home, in the order of its coordinates, what it gets, equal shapes together."""

    homes: tuple[tuple[Run, ...], ...]

    @property
    def elements(self) -> int:
        """Of the largest part; the others are padded to it."""
        return max(sum(run.count * run.kind.elements for run in runs) for runs in self.homes)


class OwnerPlan(NamedTuple):
    """Who orthogonalizes what.

    Attributes:
      mesh_shape: sizes of the mesh's axes.
      leaves: all of them.
      placements: of each leaf.
      shipments: the trips of each lane.
      work: of the busiest device: flops, their seconds, bytes sent, and collectives, the exchange included.
      ideal_flops: the one-device work of all matrices over the number of devices.
      mean_flops: of what the devices do.
      held: bytes of the largest trip's buffer.
    """

    mesh_shape: Mapping[str, int]
    leaves: tuple[Leaf, ...]
    placements: tuple[Placement, ...]
    shipments: Mapping[Lane, tuple[Shipment, ...]]
    work: Work
    ideal_flops: float
    mean_flops: float
    held: float

    @property
    def imbalance(self) -> float:
        """The busiest device's flops over the mean."""
        return self.work.flops / self.mean_flops if self.mean_flops else 1.0

    @property
    def redundancy(self) -> float:
        """The busiest device's flops over an even share of the one-device work: 1 is perfect."""
        return self.work.flops / self.ideal_flops if self.ideal_flops else 1.0

    @property
    def cost(self) -> float:
        """What "auto" makes least: seconds of products and of sending."""
        return self.work.seconds + self.work.sent / BYTES_A_SECOND


def size_of(mesh_shape: Mapping[str, int], axes: Axes) -> int:
    """Devices along `axes`."""
    return math.prod(mesh_shape[axis] for axis in axes)


def make_plan(
    leaves: Sequence[Leaf],
    mesh_shape: Mapping[str, int],
    *,
    axes: Axes,
    mode: Mode,
    chunks: int,
    cost: Cost,
) -> OwnerPlan:
    """A home for every matrix.

    Args:
      leaves: All of them.
      mesh_shape: Sizes of the mesh's axes.
      axes: Mesh axes over which replicas share the work.
      mode: "owner": one device a matrix. "tensor_parallel": all devices that store a matrix work on it together.
        "hybrid": homes along some axes, together along the others. "auto": whichever of these costs least by
        `OwnerPlan.cost`, for the leaves cut over the same mesh axes at a time.
      chunks: Trips a lane makes.
      cost: The work on a matrix.
    """
    groups: dict[Axes, list[int]] = collections.defaultdict(list)
    for index, leaf in enumerate(leaves):
        groups[_cutting(leaf, mesh_shape)].append(index)
    placements: dict[int, Placement] = {}
    for cutting, members in groups.items():
        choices = []
        for tensor in _candidates(cutting, mode):
            placed = [_place(leaves[i], mesh_shape, axes, tensor) for i in members]
            choices.append((placed, tensor))
        if len(choices) > 1:
            alone = [leaves[i] for i in members]
            choices.sort(key=lambda choice: _plan(alone, choice[0], mesh_shape, chunks, cost).cost)
        placements |= zip(members, choices[0][0], strict=True)
    return _plan(leaves, [placements[i] for i in range(len(leaves))], mesh_shape, chunks, cost)


def _place(leaf: Leaf, mesh_shape: Mapping[str, int], axes: Axes, tensor: Axes = ()) -> Placement:
    placement = place(leaf, mesh_shape, axes, tensor) or place(leaf, mesh_shape, axes)
    assert placement is not None  # with a home of its own, everything has a place
    return placement


def _cutting(leaf: Leaf, mesh_shape: Mapping[str, int]) -> Axes:
    """The mesh axes that cut a leaf's matrices."""
    return _place(leaf, mesh_shape, ()).lane.exchange


def _candidates(cutting: Axes, mode: Mode) -> list[Axes]:
    """Choices of tensor axes, the owner mode first: on a tie the first one wins."""
    subsets = [s for count in range(len(cutting) + 1) for s in itertools.combinations(cutting, count)]
    hybrids = subsets[1:-1] or [()]
    return {"owner": [()], "tensor_parallel": [cutting], "hybrid": hybrids, "auto": subsets}[mode]


def _plan(
    leaves: Sequence[Leaf],
    placements: Sequence[Placement],
    mesh_shape: Mapping[str, int],
    chunks: int,
    cost: Cost,
) -> OwnerPlan:
    works, ideal = {}, 0.0
    for leaf, (lane, kind, _) in zip(leaves, placements, strict=True):
        tensor = size_of(mesh_shape, lane.tensor)
        matrices, m, columns = kind.shape
        works[lane, kind] = cost(lane.dtype, m, columns, tensor).times(matrices)
        ideal += leaf.view.batch * cost(lane.dtype, m, columns * tensor, 1).flops
    load, seconds, dealt = _deal(placements, works, mesh_shape)
    shipments = _ship(placements, dealt, chunks)

    total, held = Work(flops=float(load.max(initial=0.0)), seconds=float(seconds.max(initial=0.0))), 0.0
    for lane, trips in shipments.items():
        copies, exchanged = size_of(mesh_shape, lane.replicas), size_of(mesh_shape, lane.exchange)
        for trip in trips:
            size = exchanged * trip.elements * lane.dtype.itemsize
            total += Work(0.0, 2.0 * size * (exchanged - 1) / exchanged, 2 * (exchanged > 1))
            total += Work(0.0, 1.0 * size * (copies - 1), int(copies > 1))
            held = max(held, size * copies)
    for (lane, kind), counts in dealt.items():
        most = int(counts.max())
        total += works[lane, kind]._replace(flops=0.0, seconds=0.0).times(most)
    devices = math.prod(mesh_shape.values())
    return OwnerPlan(
        mesh_shape,
        tuple(leaves),
        tuple(placements),
        shipments,
        total,
        ideal / devices,
        float(load.mean()),
        held,
    )


def _deal(
    placements: Sequence[Placement], works: Mapping[tuple[Lane, Kind], Work], mesh_shape: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray, dict[tuple[Lane, Kind], np.ndarray]]:
    """The flops and the seconds of each device, and how many units of each kind each home gets."""
    names = list(mesh_shape)
    devices = np.arange(math.prod(mesh_shape.values())).reshape(tuple(mesh_shape.values()))
    load, seconds = np.zeros(devices.size), np.zeros(devices.size)
    units: dict[tuple[Lane, Kind], int] = collections.defaultdict(int)
    for lane, kind, count in placements:
        units[lane, kind] += count
    homes, held = {}, {}
    for lane, _ in units:
        first = [names.index(axis) for axis in lane.homes]
        rest = [i for i in range(len(names)) if i not in first]
        # [home, devices there]: more than one where the lane does not tell them apart.
        homes[lane] = devices.transpose(first + rest).reshape(size_of(mesh_shape, lane.homes), -1)
        held[lane] = np.zeros(len(homes[lane]), int)

    def costliest_first(key: tuple[Lane, Kind]):
        return (-works[key].flops, -key[1].elements, key[1].shape)

    dealt = {}
    for lane, kind in sorted(units, key=costliest_first):
        where = homes[lane]
        dealt[lane, kind] = np.zeros(len(where), int)
        for _ in range(units[lane, kind]):
            busy = load[where].max(axis=1)
            least = np.flatnonzero(busy <= busy.min() * (1 + 1e-9))
            home = least[
                np.argmin(held[lane][least])
            ]  # of equally busy ones, the one with the least to store
            load[where[home]] += works[lane, kind].flops
            seconds[where[home]] += works[lane, kind].seconds
            held[lane][home] += kind.elements
            dealt[lane, kind][home] += 1
    return load, seconds, dealt


def _ship(
    placements: Sequence[Placement], dealt: Mapping[tuple[Lane, Kind], np.ndarray], chunks: int
) -> dict[Lane, tuple[Shipment, ...]]:
    """Which unit goes where: units of a kind are all the same, so each home gets neighbours, in few slices."""
    queues: dict[tuple[Lane, Kind], list[tuple[int, int]]] = collections.defaultdict(list)
    for leaf, (lane, kind, units) in enumerate(placements):
        queues[lane, kind] += [(leaf, unit) for unit in range(units)]
    lists: dict[Lane, list[list[tuple[Kind, int, int]]]] = {}
    for lane, kind in sorted(queues, key=lambda key: key[1].shape):
        queue, start = queues[lane, kind], 0
        owned = lists.setdefault(lane, [[] for _ in dealt[lane, kind]])
        for home, count in enumerate(dealt[lane, kind]):
            owned[home] += [(kind, *unit) for unit in queue[start : start + count]]
            start += count
    return {
        lane: tuple(
            Shipment(
                tuple(_runs(own[len(own) * i // chunks : len(own) * (i + 1) // chunks]) for own in owned)
            )
            for i in range(chunks)
        )
        for lane, owned in lists.items()
    }


def _runs(units: Sequence[tuple[Kind, int, int]]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for kind, leaf, unit in units:
        last = runs[-1] if runs else None
        if last and (last.kind, last.leaf, last.start + last.count) == (kind, leaf, unit):
            runs[-1] = last._replace(count=last.count + 1)
        else:
            runs.append(Run(kind, leaf, unit, 1))
    return tuple(runs)
