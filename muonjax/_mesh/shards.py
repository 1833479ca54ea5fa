"""How the matrices of a sharded leaf are stored on a mesh, and over which mesh axes they are exchanged.

The words of this folder:

  unit       What has one owner: a matrix, or several that are fused along one axis.
  owner      The device that computes a unit; devices, where its matrices stay sharded over the mesh axes `tensor`.
  block      What one device stores of a unit.
  share      What one device sends of a block to one device of the owner.
  replicas   Devices that store the same blocks and divide the work on them.
  group      Leaves that are exchanged over the same mesh axes, in one dtype.
  kind       Units of one group and one layout, which are interchangeable.
  round      One all-to-all of a group to the owners, and one back.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

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
      view: Of the unit, as its owner sees it.
      tall: Whether its matrices must be transposed to have m <= n.
      local_shape: Of the block that one device stores, its axes in the leaf's order.
      gathered: For each of these axes, the mesh axes over which the owner gathers it.
      split_axis: The axis of a block that is divided among the devices that own the unit together.
      num_shares: How many these are; 1 where a single device owns the unit.
    """

    view: MatrixView
    tall: bool
    local_shape: tuple[int, ...]
    gathered: tuple[Axes, ...]
    split_axis: int
    num_shares: int

    @property
    def share_shape(self) -> tuple[int, ...]:
        """Of what one device sends to another."""
        axis, count = self.split_axis, self.num_shares
        return tuple(size // count if i == axis else size for i, size in enumerate(self.local_shape))

    @property
    def share_size(self) -> int:
        """Elements that one device sends to another."""
        return math.prod(self.share_shape)

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
      dtype: Of what is exchanged.
    """

    exchange: Axes
    replicas: Axes
    tensor: Axes
    dtype: Any

    @property
    def owner_axes(self) -> Axes:
        """The mesh axes whose coordinates identify an owner."""
        return self.replicas + tuple(axis for axis in self.exchange if axis not in self.tensor)

    def ranks(self, mesh_shape: Mapping[str, int]) -> list[list[int]]:
        """[owner, share] -> the device's rank in the all-to-all, for the owners of one replica."""
        sizes = [mesh_shape[axis] for axis in self.exchange]
        order = sorted(range(len(sizes)), key=lambda i: self.exchange[i] in self.tensor)
        # Tensor axes that are exchanged shard rows, and shard the longer side at the owner.
        shares = size_of(mesh_shape, tuple(axis for axis in self.exchange if axis in self.tensor))
        return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, shares).tolist()


class LeafLayout(NamedTuple):
    """A leaf's exchange group, the layout of its units, and how many of them one device stores."""

    group: ExchangeGroup
    unit: UnitLayout
    num_units: int


def size_of(mesh_shape: Mapping[str, int], axes: Axes) -> int:
    """Devices along `axes`."""
    return math.prod(mesh_shape[axis] for axis in axes)


def unit_axes(view: MatrixView) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leaf's axes that count units, and those of one unit."""
    own = _leaf_axes(view, view.reduction_axes + view.output_axes)
    return tuple(i for i in range(len(view.leaf_shape)) if i not in own), tuple(sorted(own))


def leaf_layout(leaf: ShardedLeaf, mesh_shape: Mapping[str, int], tensor: Axes = ()) -> LeafLayout:
    """How a leaf is exchanged if its matrices stay sharded over the mesh axes `tensor`; if they can't, over none.

    Args:
      leaf: Its view and its sharding.
      mesh_shape: Sizes of the mesh's axes.
      tensor: Mesh axes over which a matrix has several owners; those that don't shard the leaf's matrices are ignored.
    """
    view = leaf.view
    batch, own = unit_axes(view)
    sharding = [tuple(axis for axis in axes if mesh_shape[axis] > 1) for axes in leaf.sharding]
    local = [size // size_of(mesh_shape, axes) for size, axes in zip(view.leaf_shape, sharding, strict=True)]
    of_matrix = {axis for i in own for axis in sharding[i]}
    of_batch = {axis for i in batch for axis in sharding[i]}
    tensor = tuple(axis for axis in tensor if axis in of_matrix)
    if view.cut in own and any(axis in tensor for axis in sharding[view.cut]):
        # It would divide the fused matrices among devices, and not each of them.
        return leaf_layout(leaf, mesh_shape)

    tall = view.fan_in > view.fan_out
    longer = _leaf_axes(view, view.reduction_axes if tall else view.output_axes)
    stays = {axis for i in longer for axis in sharding[i] if axis in tensor}
    exchange = tuple(axis for axis in mesh_shape if axis in of_matrix - stays)
    num_shares = math.prod(mesh_shape[axis] for axis in tensor if axis in exchange)
    divisible = [i for i in sorted(longer) if i != view.cut and local[i] % num_shares == 0]
    if not divisible and num_shares > 1:
        return leaf_layout(leaf, mesh_shape)
    split = max(divisible, key=local.__getitem__, default=own[0])

    gathered = tuple(tuple(axis for axis in sharding[i] if axis in exchange) for i in own)
    sizes = {i: local[i] * size_of(mesh_shape, axes) for i, axes in zip(own, gathered, strict=True)}
    sizes[split] //= num_shares
    unit = UnitLayout(
        _unit_view(view, sizes), tall, tuple(local[i] for i in own), gathered, own.index(split), num_shares
    )
    sharded = of_matrix | of_batch
    replicas = tuple(axis for axis, size in mesh_shape.items() if size > 1 and axis not in sharded)
    group = ExchangeGroup(exchange, replicas, tensor, leaf.dtype)
    return LeafLayout(group, unit, math.prod(local[i] for i in batch))


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
