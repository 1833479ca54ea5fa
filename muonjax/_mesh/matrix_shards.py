"""Say how the matrices of a leaf lie on a mesh: which block of a matrix a device stores,
and which devices can own it.

`matrix_kind` decides it from shapes and shardings; no array is needed. What it does with a mesh
axis depends on what the axis cuts:

- an axis of the leaf that counts matrices, such as layers or experts:
  each device keeps its own matrices;
- a side of a matrix: the owner of the matrix gathers its blocks from the devices along the mesh
  axis;
- nothing: devices along the mesh axis are replicas, and each works on some of the matrices.

In this file an `axis` is a number, an axis of an array, and a `name` is that of a mesh axis.

The words of this folder:

  block     The part of a matrix that one device stores, and sends to the owner.
  owner     The device that orthogonalizes a matrix; one for each shard of an axis that counts
            matrices.
  replicas  Devices that store the same blocks. They divide the matrices among them.
  group     Leaves that are exchanged over the same mesh axes and in the same dtype.
  kind      Matrices of one group with equal layouts. They are interchangeable.
  round     The all-to-all of one group to the owners, and the one back.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from muonjax._matrices.matrix_view import MatrixView
from muonjax._mesh.distribution import Axes, MeshShape, devices_along


class ShardedLeaf(NamedTuple):
    """A leaf of one or more matrices, sharded over a mesh.

    Attributes:
      view: Which axes are rows and columns.
      sharding: For each axis of the leaf, the mesh axes that shard it;
        the product of their sizes divides it.
      dtype: The dtype in which the leaf is exchanged.
    """

    view: MatrixView
    sharding: tuple[Axes, ...]
    dtype: Any


class MatrixLayout(NamedTuple):
    """Shape and sharding of a matrix [m, n] with m <= n; tall ones are transposed.

    Attributes:
      shape: m and n.
      block_shape: The shape of the block that one device stores: the axes of the rows,
        then those of the columns.
      gathered: For each of these axes, the mesh axes along which the owner gathers blocks.
    """

    shape: tuple[int, int]
    block_shape: tuple[int, ...]
    gathered: tuple[Axes, ...]

    @property
    def block_size(self) -> int:
        """Elements of a block."""
        return math.prod(self.block_shape)


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


class MatrixKind(NamedTuple):
    """Matrices of one group and one layout, which are interchangeable."""

    group: ExchangeGroup
    layout: MatrixLayout


def matrix_kind(leaf: ShardedLeaf, mesh_shape: MeshShape) -> MatrixKind:
    """Along which mesh axes the matrices of a leaf go to their owners,
    and which block of each a device stores.

    On a mesh {"data": 2, "fsdp": 4} the matrix [64, 16] with P("fsdp") has blocks [16, 16]. They
    are exchanged along "fsdp", so that its owner, one of four devices, gathers [64, 16]. Devices
    along "data" are replicas, which own other matrices each. Where owners are chosen, matrices of
    one kind are interchangeable.
    """
    # The views of whole matrices and of the blocks that a device stores, both as wide matrices:
    # tall ones are transposed.
    whole = leaf.view.wide
    block = view_of_block(leaf, mesh_shape)
    # The axes of the leaf that are rows, the shorter side, then those that are columns
    axes = whole.reduction_axes + whole.output_axes
    # Mesh axes of size one cut nothing. `_among(a, b)` is those of a that are in b.
    mesh_axes = [name for name, size in mesh_shape.items() if size > 1]
    layout = MatrixLayout(
        shape=(whole.fan_in, whole.fan_out),
        block_shape=tuple(block.shape[axis] for axis in axes),
        gathered=tuple(_among(leaf.sharding[axis], mesh_axes) for axis in axes),
    )
    # Blocks are exchanged along the mesh axes that cut a matrix, in one dtype, since the leaves of
    # a group share a buffer. Devices along mesh axes that cut nothing of the leaf are its replicas.
    # The other mesh axes cut an axis that counts matrices: along these, each device has its own.
    gathered = set().union(*layout.gathered)
    cut = set().union(*leaf.sharding)
    group = ExchangeGroup(
        exchange_axes=_among(mesh_axes, gathered),
        replica_axes=tuple(name for name in mesh_axes if name not in cut),
        dtype=leaf.dtype,
    )
    return MatrixKind(group, layout)


def view_of_block(leaf: ShardedLeaf, mesh_shape: MeshShape) -> MatrixView:
    """The view, as wide matrices, of the block of the leaf that one device stores.

    Four layers [4, 64, 16] with P(None, "fsdp") on a mesh {"fsdp": 2} have blocks [4, 32, 16].
    Their matrices [64, 16] are tall, so that the view shows four matrices [16, 32].
    """
    shape = []
    for size, names in zip(leaf.view.shape, leaf.sharding, strict=True):
        # `even_sharding` has left only mesh axes that divide the axis.
        shape.append(size // devices_along(mesh_shape, names))
    return leaf.view.wide._replace(shape=tuple(shape))


def _among(names: Sequence[str], others: Collection[str]) -> Axes:
    """Those of the names that are among the others, in the order of `names`:
    the order of a mesh or of a spec."""
    return tuple(name for name in names if name in others)
