"""How the matrices of a sharded leaf are stored on a mesh, and over which mesh axes they are exchanged.

The words of this folder:

  unit       What has one owner: a matrix, or several that are fused along one axis.
  owner      The device that computes a unit; devices, where its matrices stay sharded over the mesh axes `tensor`.
  block      What one device stores of a unit, and sends to its owner.
  replicas   Devices that store the same blocks and divide the work on them.
  group      Leaves that are exchanged over the same mesh axes, in one dtype.
  kind       Units of one group and one layout, which are interchangeable.
  round      One all-to-all of a group to the owners, and one back.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from muonjax._matrices.matrix_view import MatrixView, view_of

Axes = tuple[str, ...]  # mesh axes


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


def size_of(mesh_shape: Mapping[str, int], axes: Axes) -> int:
    """Devices along `axes`."""
    return math.prod(mesh_shape[axis] for axis in axes)


def unit_axes(view: MatrixView) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leaf's axes that count units, and those of one unit."""
    own = _leaf_axes(view, view.reduction_axes + view.output_axes)
    return tuple(i for i in range(len(view.leaf_shape)) if i not in own), tuple(sorted(own))


def unit_kind(leaf: ShardedLeaf, mesh_shape: Mapping[str, int], tensor: Axes = ()) -> tuple[Kind, int]:
    """The kind of a leaf's units, and how many of them one device stores.

    Args:
      leaf: Its view and its sharding.
      mesh_shape: Sizes of the mesh's axes.
      tensor: Mesh axes over which a matrix has several owners, if they shard its longer side; others are ignored.
    """
    view = leaf.view
    batch, own = unit_axes(view)
    sharding = [tuple(axis for axis in axes if mesh_shape[axis] > 1) for axes in leaf.sharding]
    local = [size // size_of(mesh_shape, axes) for size, axes in zip(view.leaf_shape, sharding, strict=True)]
    of_matrix = {axis for i in own for axis in sharding[i]}
    stored = {axis for axes in sharding for axis in axes}
    tall = view.fan_in > view.fan_out
    # A mesh axis along which matrices are fused would divide these among devices, and not each of them.
    longer = set(_leaf_axes(view, view.reduction_axes if tall else view.output_axes)) - {view.cut}
    tensor = tuple(axis for axis in tensor if any(axis in sharding[i] for i in longer))
    exchange = tuple(axis for axis in mesh_shape if axis in of_matrix and axis not in tensor)
    gathered = tuple(tuple(axis for axis in sharding[i] if axis in exchange) for i in own)
    sizes = {i: local[i] * size_of(mesh_shape, axes) for i, axes in zip(own, gathered, strict=True)}
    unit = UnitLayout(_unit_view(view, sizes), tall, tuple(local[i] for i in own), gathered)
    replicas = tuple(axis for axis, size in mesh_shape.items() if size > 1 and axis not in stored)
    kind = Kind(ExchangeGroup(exchange, replicas, tensor, leaf.dtype), unit)
    return kind, math.prod(local[i] for i in batch)


def _leaf_axes(view: MatrixView, axes: tuple[int, ...]) -> list[int]:
    """Rows or columns of `view.shape` as axes of the leaf, where a fused axis is one and not two."""
    return [axis if view.cut is None or axis <= view.cut else axis - 1 for axis in axes]


def _unit_view(view: MatrixView, sizes: dict[int, int]) -> MatrixView:
    """`view` of one unit; `sizes`: of its axes, by their number in the leaf."""
    own = sorted(sizes)
    rows, columns = (
        tuple(own.index(axis) for axis in _leaf_axes(view, axes))
        for axes in (view.reduction_axes, view.output_axes)
    )
    shape = tuple(sizes[axis] for axis in own)
    if view.cut is None:
        return view_of(shape, rows, columns)
    return view_of(shape, rows, columns, own.index(view.cut), view.shape[view.cut])
