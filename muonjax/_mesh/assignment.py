"""Assign an owner to every matrix, so that the devices of a mesh have equal work. Needs shapes only, no arrays.

The rule is "longest processing time first": the matrices that take longest are assigned first, each to the owner with
the least work so far. The load of a device is a sum over all shapes, shardings and dtypes. The device with the highest
load has at most 4/3 of the best possible load, and in practice a few percent more than the mean (Graham, "Bounds on
multiprocessing timing anomalies", 1969).

An owner is one device, or the devices along a mesh axis that shards the longer side of a matrix: then the matrix stays
sharded over it, and they share its work. That pays where there are fewer matrices than devices.

The words of this folder:

  unit       What has one owner: a matrix, or several that are fused along one axis.
  owner      The device that computes a unit; devices, where its matrices stay sharded over the mesh axes `tensor`.
  block      What one device stores of a unit, and sends to its owner.
  replicas   Devices that store the same blocks and divide the work on them.
  group      Leaves that are exchanged over the same mesh axes, in one dtype.
  kind       Units of one group and one layout, which are interchangeable.
  round      One all-to-all of a group to the owners, and one back.
"""

import collections
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from muonjax._common.platform import BYTES_A_SECOND, flops_a_second
from muonjax._matrices.batching import Function
from muonjax._matrices.matrix_view import MatrixView, view_of
from muonjax._mesh.distribution import Axes, size_of


class ShardedLeaf(NamedTuple):
    """A leaf of one or more matrices, sharded over a mesh.

    Attributes:
      view: Which axes are rows and columns.
      sharding: For each axis of the leaf, the mesh axes that shard it; the product of their sizes divides it.
      dtype: In which the leaf is exchanged.
    """

    view: MatrixView
    sharding: tuple[Axes, ...]
    dtype: Any


class UnitLayout(NamedTuple):
    """Shape and sharding of a unit.

    Attributes:
      view: The unit as its owner sees it.
      tall: Whether its matrices must be transposed to have m <= n.
      local_shape: The shape of the block that one device stores, its axes in the leaf's order.
      gathered: For each of these axes, the mesh axes over which the owner gathers it.
    """

    view: MatrixView
    tall: bool
    local_shape: tuple[int, ...]
    gathered: tuple[Axes, ...]

    @property
    def size(self) -> int:
        """Elements of a block."""
        return math.prod(self.local_shape)

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(matrices in a unit, m, n), m <= n, on one device of the owner."""
        sizes = (self.view.fan_in, self.view.fan_out)
        return (self.view.batch, *(reversed(sizes) if self.tall else sizes))  # pyright: ignore


class ExchangeGroup(NamedTuple):
    """The mesh axes over which some leaves are exchanged together.

    Attributes:
      exchange: Mesh axes of the all-to-all.
      replicas: Mesh axes over which the leaves are replicated and the work on them is divided.
      tensor: Mesh axes over which a matrix stays sharded, along its longer side, while its owners work on it.
      dtype: The dtype of what is exchanged.
    """

    exchange: Axes
    replicas: Axes
    tensor: Axes
    dtype: Any

    @property
    def owner_axes(self) -> Axes:
        """The mesh axes whose coordinates identify an owner."""
        return self.replicas + self.exchange


class Kind(NamedTuple):
    """Units of one group and one layout, which are interchangeable."""

    group: ExchangeGroup
    unit: UnitLayout


def unit_kind(leaf: ShardedLeaf, mesh_shape: Mapping[str, int], tensor: Axes = ()) -> tuple[Kind, int]:
    """The kind of a leaf's units, and how many of them one device stores.

    Args:
      leaf: Its view and its sharding.
      mesh_shape: Sizes of the mesh's axes.
      tensor: Mesh axes over which a matrix has several owners, if they shard its longer side; others are ignored.
    """
    view = leaf.view
    batch, own = view.unit_axes
    sharding = [tuple(axis for axis in axes if mesh_shape[axis] > 1) for axes in leaf.sharding]
    local = [size // size_of(mesh_shape, axes) for size, axes in zip(view.leaf_shape, sharding, strict=True)]
    of_matrix = {axis for i in own for axis in sharding[i]}
    stored = {axis for axes in sharding for axis in axes}
    tall = view.fan_in > view.fan_out
    # A mesh axis along which matrices are fused would divide these among devices, and not each of them.
    longer = set(view.leaf_axes(view.reduction_axes if tall else view.output_axes)) - {view.cut}
    tensor = tuple(axis for axis in tensor if any(axis in sharding[i] for i in longer))
    exchange = tuple(axis for axis in mesh_shape if axis in of_matrix and axis not in tensor)
    gathered = tuple(tuple(axis for axis in sharding[i] if axis in exchange) for i in own)
    sizes = {i: local[i] * size_of(mesh_shape, axes) for i, axes in zip(own, gathered, strict=True)}
    unit = UnitLayout(_unit_view(view, sizes), tall, tuple(local[i] for i in own), gathered)
    replicas = tuple(axis for axis, size in mesh_shape.items() if size > 1 and axis not in stored)
    kind = Kind(ExchangeGroup(exchange, replicas, tensor, leaf.dtype), unit)
    return kind, math.prod(local[i] for i in batch)


def _unit_view(view: MatrixView, sizes: dict[int, int]) -> MatrixView:
    """`view` of one unit; `sizes`: of its axes, by their number in the leaf."""
    own = sorted(sizes)
    sides = view.reduction_axes, view.output_axes
    rows, columns = (tuple(map(own.index, view.leaf_axes(axes))) for axes in sides)
    shape = tuple(sizes[axis] for axis in own)
    if view.cut is None:
        return view_of(shape, rows, columns)
    return view_of(shape, rows, columns, own.index(view.cut), view.shape[view.cut])


Queues = Mapping[Kind, Sequence[tuple[int, int]]]  # all units of each kind, as (leaf, number)

# (dtype, m, columns on this device, devices that share the columns) -> the seconds of that device for one matrix.
Cost = Callable[[Any, int, int, int], float]


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
      owned: For each replica and each of its owners, in the order of their coordinates, what it gets; equal shapes
        follow each other.
    """

    group: ExchangeGroup
    owned: list[list[list[OwnedUnits]]]

    @property
    def sizes(self) -> list[int]:
        """For each replica, the elements that one device sends to the owner that gets most."""
        own = [[sum(run.count * run.layout.size for run in own) for own in owners] for owners in self.owned]
        return [*map(max, own)]

    @property
    def size(self) -> int:
        """The largest of these, to which the others' parts are padded."""
        return max(self.sizes)

    @property
    def sums(self) -> bool:
        """Whether results reach all replicas by an all-reduce, unpadded, and not by an all-gather.

        A sum with zeros is exact and sends everything twice; a gather pads every replica's part to the largest, which
        is more where few replicas own anything.
        """
        return 2 * sum(self.sizes) < len(self.owned) * self.size

    @property
    def sent(self) -> float:
        """Bytes that one device sends: to the owners, back, and to the other replicas."""
        replicas, devices = len(self.owned), len(self.owned[0])
        to_replicas = 2.0 * sum(self.sizes) / replicas if self.sums else self.size
        elements = 2.0 * self.size * (devices - 1) + devices * to_replicas * (replicas - 1)
        return elements * self.group.dtype.itemsize


class Assignment(NamedTuple):
    """Which owner orthogonalizes which matrices.

    Attributes:
      rounds: The rounds of all groups.
      seconds: Predicted for the busiest device, the exchange included: for an H100 and its links to the same node.
    """

    rounds: list[Round]
    seconds: float


def assign_owners(leaves: Sequence[ShardedLeaf], mesh_shape: Mapping[str, int], cost: Cost) -> Assignment:
    """Assign an owner to every matrix.

    Over which mesh axis the matrices of a leaf stay sharded is what takes least time for all leaves that are sharded
    over the same mesh axes. Latency and slower links between nodes do not count.
    """
    cost = functools.cache(cost)
    shardings = [unit_kind(leaf, mesh_shape)[0].group.exchange for leaf in leaves]

    def quickest(sharding: Axes) -> Axes:
        own = [leaf for leaf, other in zip(leaves, shardings, strict=True) if other == sharding]
        choices = _tensor_axes(sharding, own, mesh_shape)  # on a tie whole matrices, which come first
        return min(choices, key=lambda axes: _assignment(own, [axes] * len(own), mesh_shape, cost).seconds)

    tensor = {sharding: quickest(sharding) for sharding in dict.fromkeys(shardings)}
    return _assignment(leaves, [tensor[sharding] for sharding in shardings], mesh_shape, cost)


def _tensor_axes(sharding: Axes, leaves: Sequence[ShardedLeaf], mesh_shape: Mapping[str, int]) -> list[Axes]:
    """Mesh axes over which all these matrices, which `sharding` shards, can stay sharded at their owners."""
    stay = [unit_kind(leaf, mesh_shape, sharding)[0].group.tensor for leaf in leaves]
    return [(), *((axis,) for axis in sharding if all(axis in axes for axes in stay))]


def _assignment(
    leaves: Sequence[ShardedLeaf], tensor: Sequence[Axes], mesh_shape: Mapping[str, int], cost: Cost
) -> Assignment:
    """What the owners do if the matrices of each leaf stay sharded over the mesh axes `tensor`."""
    queues: dict[Kind, list[tuple[int, int]]] = collections.defaultdict(list)
    for i, (leaf, axes) in enumerate(zip(leaves, tensor, strict=True)):
        kind, num_units = unit_kind(leaf, mesh_shape, axes)
        queues[kind] += [(i, number) for number in range(num_units)]
    seconds: dict[Kind, float] = {}  # for one unit
    for kind in queues:
        group, (matrices, m, columns) = kind.group, kind.unit.matrices
        seconds[kind] = matrices * cost(group.dtype, m, columns, size_of(mesh_shape, group.tensor))
    busiest, counts = _balance(queues, seconds, mesh_shape)
    rounds = _rounds(queues, counts, mesh_shape)
    return Assignment(rounds, busiest + sum(round_.sent for round_ in rounds) / BYTES_A_SECOND)


def _balance(
    queues: Queues, seconds: Mapping[Kind, float], mesh_shape: Mapping[str, int]
) -> tuple[float, dict[Kind, np.ndarray]]:
    """Seconds of the busiest device, and for each kind of units how many every owner gets."""
    devices = {group: _owner_devices(group, mesh_shape) for group, _ in queues}
    stored = {group: np.zeros(len(own), int) for group, own in devices.items()}
    loads = np.zeros(math.prod(mesh_shape.values()))

    counts = {}
    for kind in sorted(queues, key=lambda kind: (-seconds[kind], -kind.unit.size, kind.unit.matrices)):
        group, unit = kind
        own = devices[group]
        # Loads in units of this kind's cost, rounded so that sums in different orders compare as equal. Among owners of
        # equal load, the one that stores least comes first.
        busy = np.round(loads[own].max(axis=1) / (seconds[kind] or 1.0), 6)
        heap = [*zip(busy.tolist(), stored[group].tolist(), range(len(own)), strict=True)]
        heapq.heapify(heap)
        counts[kind] = np.zeros(len(own), int)
        for _ in queues[kind]:
            load, held, owner = heap[0]
            heapq.heapreplace(heap, (round(load + 1, 6), held + unit.size, owner))
            counts[kind][owner] += 1
        loads[own] += counts[kind][:, None] * seconds[kind]
        stored[group] += counts[kind] * unit.size
    return float(loads.max()), counts


def _owner_devices(group: ExchangeGroup, mesh_shape: Mapping[str, int]) -> np.ndarray:
    """[owner, its devices]: more than one where matrices stay sharded."""
    devices = np.arange(math.prod(mesh_shape.values())).reshape([*mesh_shape.values()])
    axes = [list(mesh_shape).index(axis) for axis in group.owner_axes]
    return np.moveaxis(devices, axes, range(len(axes))).reshape(size_of(mesh_shape, group.owner_axes), -1)


def _rounds(queues: Queues, counts: Mapping[Kind, np.ndarray], mesh_shape: Mapping[str, int]) -> list[Round]:
    """Which units go to which owner: units of a kind are interchangeable, so each owner gets consecutive ones."""
    owned: dict[ExchangeGroup, list[list[tuple[UnitLayout, int, int]]]] = {}
    for kind in sorted(queues, key=lambda kind: kind.unit.matrices):
        group, layout = kind
        queue = iter(queues[kind])
        lists = owned.setdefault(group, [[] for _ in counts[kind]])
        for units, count in zip(lists, counts[kind].tolist(), strict=True):
            units += [(layout, *one) for one in itertools.islice(queue, count)]
    rounds = []
    for group, lists in owned.items():
        runs, devices = [_runs(units) for units in lists], size_of(mesh_shape, group.exchange)
        round_ = Round(group, [runs[r : r + devices] for r in range(0, len(runs), devices)])
        rounds += [round_] if any(runs) else []
        if round_.size >= 2**31:  # the reach of an index of 32 bits
            raise ValueError(f"one device would get {round_.size} numbers from another; use more devices.")
    return rounds


def _runs(units: Sequence[tuple[UnitLayout, int, int]]) -> list[OwnedUnits]:
    """Consecutive units of one leaf together: all along a run, number minus position is the same."""
    runs = itertools.groupby(enumerate(units), lambda one: (one[1][:2], one[1][2] - one[0]))
    found = [[unit for _, unit in run] for _, run in runs]
    return [OwnedUnits(*run[0], len(run)) for run in found]


def seconds_of(f: Function, dtype: Any, m: int, columns: int, devices: int) -> float:
    """What the matrix products, and the sums over devices, of f take: a `Cost`. Loops must have a static length."""
    axes = ("columns",) if devices > 1 else ()
    x = jax.ShapeDtypeStruct((m, columns), dtype)
    return _seconds(jax.make_jaxpr(lambda x: f(x, axes), axis_env=[("columns", devices)])(x), devices)


def _seconds(jaxpr: Jaxpr | ClosedJaxpr, devices: int) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        given: list[Any] = [v.aval for v in equation.invars]
        if name == "dot_general":
            made: Any = equation.outvars[0].aval
            (contracted, _), _ = parameters["dimension_numbers"]
            depth = math.prod(given[0].shape[i] for i in contracted)
            total += 2.0 * made.size * depth / flops_a_second(given[0].dtype)
        elif name in ("psum", "psum_invariant", "pmax", "all_gather"):
            times = devices - 1 if name == "all_gather" else 2.0 * (devices - 1) / devices
            total += times * sum(x.size * x.dtype.itemsize for x in given) / BYTES_A_SECOND
        else:  # a branch that leaves x as it is takes no time, so that all branches are one
            length = parameters["length"] if name == "scan" else 1
            found = jax.tree.leaves([*parameters.values()])
            inner = [x for x in found if isinstance(x, (ClosedJaxpr, Jaxpr))]
            total += length * sum(_seconds(x, devices) for x in inner)
    return total
