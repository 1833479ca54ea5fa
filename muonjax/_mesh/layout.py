"""On a mesh, first: how the matrices of a leaf lie on the devices, and which way they can travel."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from muonjax._matrix_view import MatrixView

Axes = tuple[str, ...]  # mesh axes


class Leaf(NamedTuple):
    """A stack of matrices on a mesh.

    Attributes:
      view: which axes are rows and columns.
      spec: for each axis of the leaf, the mesh axes that cut it; each divides what it cuts.
      dtype: what the entries are on the wire.
    """

    view: MatrixView
    spec: tuple[Axes, ...]
    dtype: Any


class Kind(NamedTuple):
    """Units of one shape that are cut in one way. A unit is a matrix, or several that share one array.

    Attributes:
      view: of the unit as its home sees it.
      tall: whether its matrices must be transposed to have m <= n.
      local: sizes of the unit's axes, in the leaf's order, on the devices that store it.
      cuts: for each of these axes, the mesh axes over which its pieces are gathered.
      split: (axis, count): this axis of a piece is shared out to `count` devices; count 1: to one.
    """

    view: MatrixView
    tall: bool
    local: tuple[int, ...]
    cuts: tuple[Axes, ...]
    split: tuple[int, int]

    @property
    def piece(self) -> tuple[int, ...]:
        """Sizes of what one device sends to another."""
        axis, count = self.split
        return tuple(size // count if i == axis else size for i, size in enumerate(self.local))

    @property
    def elements(self) -> int:
        """Of a piece."""
        return math.prod(self.piece)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(matrices in a unit, m, n) at home; under a tensor-parallel lane n is the home's share of it."""
        sizes = (self.view.fan_in, self.view.fan_out)
        return (self.view.batch, *(reversed(sizes) if self.tall else sizes))  # pyright: ignore


class Lane(NamedTuple):
    """What travels together: one all-to-all there, one back.

    Attributes:
      exchange: mesh axes of the all-to-all.
      replicas: mesh axes over which the leaves are replicated, and the work on them is shared.
      tensor: mesh axes over which a matrix stays cut, along its longer side, at home.
      dtype: on the wire.
    """

    exchange: Axes
    replicas: Axes
    tensor: Axes
    dtype: Any

    @property
    def homes(self) -> Axes:
        """The mesh axes whose coordinates tell homes apart."""
        return self.replicas + tuple(axis for axis in self.exchange if axis not in self.tensor)

    @property
    def shares(self) -> Axes:
        """The exchanged axes along which a piece is shared out instead: the tensor axes that cut rows."""
        return tuple(axis for axis in self.exchange if axis in self.tensor)


class Placement(NamedTuple):
    """A leaf's lane, the kind of its units, and how many of them a device stores."""

    lane: Lane
    kind: Kind
    units: int


def unit_axes(view: MatrixView) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leaf's axes that count units, and those of a unit. Matrices cut out of one axis stay together."""

    def on_leaf(axis: int) -> int:
        return axis if view.cut is None or axis <= view.cut else axis - 1

    own = {on_leaf(axis) for axis in view.reduction_axes + view.output_axes}
    return tuple(i for i in range(len(view.leaf_shape)) if i not in own), tuple(sorted(own))


def _unit_view(view: MatrixView, sizes: dict[int, int]) -> MatrixView:
    """`view` of one unit; `sizes`: of its axes, by their place in the leaf."""
    kept: list[int] = []  # axes of view.shape
    shape: list[int] = []
    cut = None
    for axis in sorted(sizes):
        if view.cut == axis:
            cut = len(shape)
            kept += [axis, axis + 1]
            shape += [view.shape[axis], sizes[axis] // view.shape[axis]]
        else:
            kept.append(axis if view.cut is None or axis < view.cut else axis + 1)
            shape.append(sizes[axis])
    place = {axis: i for i, axis in enumerate(kept)}

    def moved(axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(place[axis] for axis in axes if axis in place)

    return MatrixView(
        tuple(sizes[axis] for axis in sorted(sizes)),
        tuple(shape),
        moved(view.batch_axes),
        moved(view.reduction_axes),
        moved(view.output_axes),
        cut,
    )


def place(leaf: Leaf, mesh_shape: Mapping[str, int], axes: Axes, tensor: Axes = ()) -> Placement | None:
    """How a leaf travels if its matrices stay cut over the mesh axes `tensor`; None if they can't.

    Args:
      leaf: What, and how it lies.
      mesh_shape: Sizes of the mesh's axes.
      axes: Mesh axes over which replicas share the work.
      tensor: Those of the axes that cut the leaf's matrices over which a matrix has no single home.
    """
    view = leaf.view
    batch, own = unit_axes(view)
    spec = [tuple(axis for axis in cut if mesh_shape[axis] > 1) for cut in leaf.spec]
    local = [
        size // math.prod(mesh_shape[a] for a in cut) for size, cut in zip(view.leaf_shape, spec, strict=True)
    ]
    cutting = {axis for i in own for axis in spec[i]}
    counting = {axis for i in batch for axis in spec[i]}
    tensor = tuple(axis for axis in tensor if axis in cutting)

    tall = view.fan_in > view.fan_out
    long = {
        axis if view.cut is None or axis <= view.cut else axis - 1
        for axis in (view.reduction_axes if tall else view.output_axes)
    }
    if view.cut in own and any(axis in tensor for axis in spec[view.cut]):
        return None
    stays = {axis for i in long for axis in spec[i] if axis in tensor}
    exchange = tuple(axis for axis in mesh_shape if axis in cutting - stays)
    count = math.prod(mesh_shape[axis] for axis in tensor if axis in exchange)
    divisible = [i for i in long if i != view.cut and local[i] % count == 0]
    if not divisible and count > 1:
        return None
    shared = max(divisible, key=local.__getitem__, default=own[0])
    cuts = tuple(tuple(axis for axis in spec[i] if axis in exchange) for i in own)
    sizes = {
        i: local[i] * math.prod(mesh_shape[axis] for axis in cut) // (count if i == shared else 1)
        for i, cut in zip(own, cuts, strict=True)
    }
    kind = Kind(_unit_view(view, sizes), tall, tuple(local[i] for i in own), cuts, (own.index(shared), count))
    replicas = tuple(
        axis
        for axis in mesh_shape
        if axis in axes and mesh_shape[axis] > 1 and axis not in cutting | counting
    )
    return Placement(Lane(exchange, replicas, tensor, leaf.dtype), kind, math.prod(local[i] for i in batch))
