"""Say how the matrices of a leaf lie on a mesh: which block of a matrix a device stores, and which devices can own it.

`unit_kind` decides it from shapes and shardings; no array is needed. What it does with a mesh axis depends on what the
axis cuts:

- an axis of the leaf that counts matrices, such as layers or experts: each device keeps its own matrices;
- a side of a matrix: the owner of the matrix gathers its blocks from the devices along the mesh axis;
- nothing: devices along the mesh axis are replicas, and each works on some of the matrices.

In this file an `axis` is a number, an axis of an array, and a `name` is that of a mesh axis.

The words of this folder:

  unit      What one owner orthogonalizes: a matrix, or several that are fused along one axis of a leaf.
  block     The part of a unit that one device stores, and sends to the owner.
  owner     The device that orthogonalizes a unit.
  replicas  Devices that store the same blocks. They divide the units among them.
  group     Leaves that are exchanged over the same mesh axes and in the same dtype.
  kind      Units of one group with equal layouts. They are interchangeable.
  round     The all-to-all of one group to the owners, and the one back.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from muonjax._matrices.matrix_view import MatrixView, view_of
from muonjax._mesh.distribution import Axes, MeshShape, devices_along


class ShardedLeaf(NamedTuple):
    """A leaf of one or more matrices, sharded over a mesh.

    Attributes:
      view: Which axes are rows and columns.
      sharding: For each axis of the leaf, the mesh axes that shard it; the product of their sizes divides it.
      dtype: The dtype in which the leaf is exchanged.
    """

    view: MatrixView
    sharding: tuple[Axes, ...]
    dtype: Any


class UnitLayout(NamedTuple):
    """Shape and sharding of a unit.

    Attributes:
      view: The unit at its owner, seen as matrices with m <= n: if the leaf's are tall, these are their transposes.
      block_shape: The shape of the block that one device stores, with the axes in the leaf's order.
      gathered: For each of these axes, the mesh axes along which the owner gathers blocks.
    """

    view: MatrixView
    block_shape: tuple[int, ...]
    gathered: tuple[Axes, ...]

    @property
    def block_size(self) -> int:
        """Elements of a block."""
        return math.prod(self.block_shape)

    @property
    def stack_shape(self) -> tuple[int, int, int]:
        """[matrices, m, n] of the unit."""
        return self.view.batch, self.view.fan_in, self.view.fan_out


class ExchangeGroup(NamedTuple):
    """The mesh axes over which some leaves are exchanged together.

    Attributes:
      exchange_axes: Mesh axes of the all-to-all.
      replica_axes: Mesh axes over which the leaves are replicated, and the work on them is divided.
      dtype: The dtype of what is exchanged.
    """

    exchange_axes: Axes
    replica_axes: Axes
    dtype: Any

    @property
    def owner_axes(self) -> Axes:
        """The mesh axes whose coordinates identify an owner."""
        return self.replica_axes + self.exchange_axes


class UnitKind(NamedTuple):
    """Units of one group and one layout, which are interchangeable."""

    group: ExchangeGroup
    layout: UnitLayout


def unit_kind(leaf: ShardedLeaf, mesh_shape: MeshShape) -> UnitKind:
    """Along which mesh axes the matrices of a leaf go to their owners, and which block of each a device stores.

    On a mesh {"data": 2, "fsdp": 4} the matrix [64, 16] with P("fsdp") has blocks [16, 16]. They are exchanged along
    "fsdp", so that its owner, one of four devices, gathers [64, 16]. Devices along "data" are replicas, which own other
    matrices each.
    """
    # Mesh axes of size one cut nothing.
    mesh_axes = [name for name, size in mesh_shape.items() if size > 1]
    sharding = [_among(names, mesh_axes) for names in leaf.sharding]
    layout = _unit_layout(leaf.view, sharding, mesh_shape)

    # Blocks of a matrix are exchanged along the axes that cut it. Devices along the axes that cut nothing of the leaf,
    # neither a matrix nor the number of matrices, are its replicas.
    gathered = set().union(*layout.gathered)
    stored = set().union(*sharding)
    group = ExchangeGroup(
        exchange_axes=_among(mesh_axes, gathered),
        replica_axes=tuple(name for name in mesh_axes if name not in stored),
        dtype=leaf.dtype,
    )
    return UnitKind(group, layout)


def _among(names: Sequence[str], others: Collection[str]) -> Axes:
    """Those of the names that are among the others, in the order of `names`: the order of a mesh or of a spec."""
    return tuple(name for name in names if name in others)


def units_on_device(leaf: ShardedLeaf, mesh_shape: MeshShape) -> int:
    """The number of the leaf's units of which one device stores a block."""
    # Every device along a mesh axis that cuts such an axis has units of its own.
    batch_axes, _ = leaf.view.batch_and_unit_axes
    units = 1
    for axis in batch_axes:
        devices = devices_along(mesh_shape, leaf.sharding[axis])
        units *= leaf.view.leaf_shape[axis] // devices
    return units


def _unit_layout(
    view: MatrixView, sharding: Sequence[Axes], mesh_shape: MeshShape
) -> UnitLayout:
    """Shape and sharding of the leaf's units, matrices or fused ones.

    A kernel [16, 64] with P("fsdp", "tensor") on 4 x 2 devices has blocks [4, 32]. Its owner gathers [16, 64].
    """
    _, unit_axes = view.batch_and_unit_axes
    block_shape = []
    for axis in unit_axes:
        # `even_sharding` has left only mesh axes that divide the axis.
        devices = devices_along(mesh_shape, sharding[axis])
        block_shape.append(view.leaf_shape[axis] // devices)
    gathered = tuple(sharding[axis] for axis in unit_axes)
    return UnitLayout(_view_at_owner(view), tuple(block_shape), gathered)


def _view_at_owner(view: MatrixView) -> MatrixView:
    """How the device that orthogonalizes a unit sees it, as matrices with m <= n.

    A unit is a matrix of the leaf, or the fused matrices that lie side by side in it: a leaf [layers, d, heads, 16] has
    units [d, heads, 16]. Its axes are those of the leaf that belong to a matrix, in the same order. With the fused axis
    2, a leaf [layers, d, 3 * d] has units [d, 3 * d], which are three matrices [d, d].
    """
    _, unit_axes = view.batch_and_unit_axes
    shape = tuple(view.leaf_shape[axis] for axis in unit_axes)
    # Axes of the leaf -> axes of the unit
    rows = tuple(map(unit_axes.index, view.leaf_axes(view.reduction_axes)))
    columns = tuple(map(unit_axes.index, view.leaf_axes(view.output_axes)))
    if view.fan_in > view.fan_out:
        # The shorter side becomes the rows, so `to_matrices` transposes the matrices of a tall leaf.
        rows, columns = columns, rows
    if view.fused_axis is None:
        return view_of(shape, rows, columns)
    # The owner cuts a unit into as many matrices as the leaf's view does. In `view.shape` the fused axis is two: the
    # leaf [layers, d, 3 * d] has the shape [layers, d, 3, d], where axis 2 counts the matrices of a unit.
    parts = view.shape[view.fused_axis]
    fused_axis = unit_axes.index(view.fused_axis)
    return view_of(shape, rows, columns, fused_axis, parts)
