"""View a leaf as a stack of matrices, leaf <-> [batch, m, n], by dimension numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muonjax._common.arguments import axis_numbers
from muonjax._common.explicit_axes import sharded_like, whole_along
from muonjax._common.trees import (
    broadcast_prefix,
    is_boxed,
    is_masked,
    tree_of,
    without_box,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact

MuonDimensionNumbers = optax.contrib.MuonDimensionNumbers
"""Optax's own class, `MuonDimensionNumbers(reduction_axis=0, output_axis=1)`: the axes of a leaf,
one or several, that are the matrix's rows (what the layer sums over) and its columns.
All other axes count matrices.

Example:
  >>> import muonjax
  >>> # A kernel (d, heads, size) as one matrix, and as a matrix for each head.
  >>> query = muonjax.MuonDimensionNumbers(reduction_axis=0, output_axis=(1, 2))
  >>> a_matrix_a_head = muonjax.MuonDimensionNumbers(reduction_axis=0, output_axis=2)

Source: `optax.contrib.MuonDimensionNumbers`."""


class FusedDimensionNumbers(NamedTuple):
    """Several matrices side by side along one axis of a leaf: query, key and value in one (d, 3·d)
    kernel.

    Optax's `MuonDimensionNumbers` can group axes but not cut one. Here `axis`, one of the reduction
    or output axes, is cut into `parts` consecutive pieces, and each piece is a separate matrix.

    Attributes:
      reduction_axis: As in `MuonDimensionNumbers`.
      output_axis: As in `MuonDimensionNumbers`.
      parts: How many matrices of equal size, >= 1, which must divide the size of `axis`; or the
        sizes of the pieces, which must sum to it: (32, 8, 8) for the queries,
        keys and values of 32 heads that share 8 key heads.
      axis: The axis that is cut; one of the two above.
      repeats: How often the sequence of parts repeats along the axis: as many times as there are
        heads where query, key and value of each head follow each other.
        All stretches of one part are one matrix.

    Raises:
      ValueError: while tracing, if the parts do not fit a leaf; naming its shape.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> qkv = muonjax.FusedDimensionNumbers(reduction_axis=0, output_axis=1, parts=3, axis=1)
      >>> print(muonjax.tabulate({"w": jnp.ones((8, 24))}, {"w": qkv}).splitlines()[2])
      w     8×24   Muon     3 of 8×8  given

    Source: K. Jordan, "Muon", 2024: query, key and value separately.
    """

    reduction_axis: Sequence[int] | int = 0
    output_axis: Sequence[int] | int = 1
    parts: int | tuple[int, ...] = 3
    axis: int = 1
    repeats: int = 1


DimensionNumbers = MuonDimensionNumbers | FusedDimensionNumbers
DimensionNumbersTree = Any
"""A tree of `DimensionNumbers` or None, a prefix of the parameters' tree, or a function of the
parameters that returns one. None marks a leaf that is no matrix."""


Axes = tuple[int, ...]


def axes_of(axes: int | Sequence[int]) -> Axes:
    """One axis or several, as a tuple."""
    if isinstance(axes, int):
        return (axes,)
    return tuple(axes)


def one_or_several(axes: Sequence[int]) -> int | tuple[int, ...]:
    """The inverse of `axes_of`."""
    return axes[0] if len(axes) == 1 else tuple(axes)


def resolve_dimension_numbers(
    numbers: DimensionNumbersTree, tree: Any
) -> list[DimensionNumbers | None]:
    """One entry per leaf of `tree` (MaskedNodes are no leaves), from a tree, a prefix tree,
    a function of `tree` that returns one, a program, or None.

    {"attention": MuonDimensionNumbers(), "bias": None} for a tree of two kernels below "attention"
    and a bias gives [MuonDimensionNumbers(), MuonDimensionNumbers(), None].

    An entry of None is no matrix. None for the whole of it means that every leaf is one plain
    matrix (fan_in, fan_out). A tree without leaves, which Optax gives to `init` to find the parts
    of a state that are like parameters, fits all.
    """
    if not jax.tree.leaves(tree):
        return []
    if numbers is None:
        numbers = MuonDimensionNumbers()
    # `is_leaf`, because an entry is a named tuple, which JAX would take for a part of the tree.
    entries = broadcast_prefix(
        tree_of(numbers, tree),
        tree,
        is_leaf=_is_entry,
        what="the dimension numbers",
    )
    for entry in entries:
        if not _is_entry(entry):
            raise TypeError(
                f"dimension numbers hold {entry!r}, not MuonDimensionNumbers or None."
            )
    # A masked entry says the same as None: the leaf is another optimizer's.
    return [None if is_masked(entry) else entry for entry in entries]


def _is_entry(x: Any) -> bool:
    """Whether it is an entry of a tree of dimension numbers;
    Optax masks those of leaves that it masks."""
    return isinstance(x, DimensionNumbers | optax.MaskedNode | None)


def matrix_pieces(numbers: DimensionNumbersTree, tree: Any) -> Pieces:
    """The pieces of `tree`, a list: one for each leaf that has matrices,
    or for each part of a fused one, in order.

    A piece may hold a stack of matrices. A fused kernel [64, 128] of queries with 64 columns, and
    of keys and values with 32 each, is three pieces.

    `numbers` may be these `Pieces` already: an optimizer finds them once, for all trees of this
    structure, and gives them to each member of its chain. The caller has an `errors_of` around it,
    whose call the errors name.
    """
    if isinstance(numbers, Pieces):
        return numbers
    # One entry for each leaf, in the order of the leaves
    entries = resolve_dimension_numbers(numbers, tree)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    pieces = Pieces(treedef)
    for i, (path, leaf) in enumerate(leaves):
        entry = entries[i]
        if entry is None:  # no matrix
            continue
        # The leaf as errors name it; a tree may be one array.
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        named = f"the leaf {name!r}" if name else "the leaf"
        _check_leaf(named, leaf)
        pieces += _pieces(named, i, tuple(leaf.shape), entry)
    return pieces


def _check_leaf(named: str, leaf: Any) -> None:
    """Raise unless the leaf can hold matrices of floating-point numbers.

    `errors_of` begins each message with the public call: "muon needs matrices, but the leaf 'b' has
    shape (4,)", "muon: the leaf 'w' is ...".
    """
    if len(leaf.shape) < 2:
        raise ValueError(
            f" needs matrices, but {named} has shape {tuple(leaf.shape)}; give it to Adam, by None."
        )
    dtype = leaf.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f" needs float or complex leaves, but {named} is {dtype}; see optax.masked."
        )
    if jnp.finfo(dtype).bits < 16:
        raise TypeError(
            f"{named} is {dtype}, whose few bits round steps away; train in float32."
        )


def _pieces(named: str, i: int, shape: Axes, numbers: DimensionNumbers) -> list[Piece]:
    """The pieces of the i-th leaf, after all checks of its axes.

    There is one, or one for each part of a fused axis. `parts=(2, 1, 3)` along the second axis of
    [5, 24] with `repeats=4` are three pieces: [5, 8], [5, 4] and [5, 12].
    """
    reduction = _checked_axes(named, "reduction_axis", numbers.reduction_axis, shape)
    output = _checked_axes(named, "output_axis", numbers.output_axis, shape)
    sides = reduction + output
    is_twice = len(set(sides)) < len(sides)
    if 0 in shape or not reduction or not output or is_twice:
        raise ValueError(
            f"{named} of shape {shape} needs disjoint axes for its sides, none twice, and no empty "
            f"dimension, got {numbers}."
        )
    if not isinstance(numbers, FusedDimensionNumbers):
        return [Piece(i, MatrixView(shape, reduction, output))]

    (axis,) = _checked_axes(named, "axis", numbers.axis, shape)
    part_sizes = numbers.parts
    repeats = numbers.repeats
    # A number of parts means as many equal ones. Parts or repeats below 1 may be given too: with
    # `max` they divide by no zero, and are refused below, as they do not fill the axis.
    if isinstance(part_sizes, int):
        part_sizes = (shape[axis] // max(1, part_sizes * repeats),) * part_sizes
    fill = min(part_sizes, default=0) >= 1 and sum(part_sizes) * repeats == shape[axis]
    if axis not in sides or not fill:
        raise ValueError(
            f"{numbers} can't cut {named} of shape {shape}: `axis` must be one of the reduction or "
            f"output axes, and the sizes in `parts`, or as many equal ones, fill its {shape[axis]} "
            "entries `repeats` times."
        )
    # Parts begin and end at multiples of `step`: those of 32, 8 and 8 at multiples of 8. On a mesh
    # `Piece.take` can cut a sharded axis there, without gathering it, if the number of its shards
    # divides `step` (and the axis is one stretch).
    step = math.gcd(*part_sizes)
    pieces = []
    start = 0
    for size in part_sizes:
        # All stretches of a part are one matrix.
        part_shape = (*shape[:axis], repeats * size, *shape[axis + 1 :])
        view = MatrixView(part_shape, reduction, output)
        pieces.append(Piece(i, view, axis, start, step, repeats))
        start += size
    return pieces


def _checked_axes(named: str, argument: str, value: Any, shape: Axes) -> Axes:
    """The axes of a leaf that an argument names, counted from 0: -1 of three axes is (2,)."""
    axes = axis_numbers(argument, value)
    for axis in axes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{argument}={value!r} names axis {axis}, but {named} has shape {shape}."
            )
    return tuple(axis % len(shape) for axis in axes)


class Piece(NamedTuple):
    """A leaf with its view, or one of the parts that a leaf is cut into.

    Parts of 2, 1 and 3 columns that repeat four times along an axis of 24: a stretch is six
    columns, and the second piece, with `start` 2 and `repeats` 4, is made of the columns 2, 8,
    14 and 20.

    Attributes:
      leaf: The leaf's index among the leaves.
      view: The view of the piece.
      axis: The axis that is cut; None: the piece is the leaf.
      start: Where the piece starts within one stretch.
      step: The greatest common divisor of the sizes of all parts of the leaf:
        each begins and ends at a multiple of it.
      repeats: How many stretches of the axis the piece is made of, at equal distances.
    """

    leaf: int
    view: MatrixView
    axis: int | None = None
    start: int = 0
    step: int = 1
    repeats: int = 1

    def take(self, leaves: Sequence[Any]) -> Any:
        """The piece of its leaf, of shape `view.shape`; of a `jax.ShapeDtypeStruct` another one.

        An axis of 24 entries with two repeats is two stretches of 12. A piece with `start` 8 and
        eight entries in all has four of each stretch: the entries 8 to 11 and 20 to 23.
        """
        leaf = leaves[self.leaf]
        # Most pieces are leaves, which are taken as they are.
        if self.axis is None:
            return leaf
        # The shape of the piece
        shape = self.view.shape
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, leaf.dtype)
        # On a mesh with explicit axis types JAX cuts a sharded axis only into parts of which every
        # shard can have an equal piece. All pieces begin and end at multiples of `step`, so
        # `whole_along` leaves the leaf as it is where the shards can share `step` entries equally.
        # Else, and always with several stretches (None), it gathers the axis first.
        step = self.step if self.repeats == 1 else None
        leaf = whole_along(leaf, self.axis, step)
        # The cut axis is two from here on, [..., repeats, entries of a stretch, ...],
        # also where there is one repeat.
        stretches = self.in_stretches(leaf)
        # The view's axis has the entries of all stretches.
        stop = self.start + shape[self.axis] // self.repeats
        part = jax.lax.slice_in_dim(stretches, self.start, stop, axis=self.axis + 1)
        return part.reshape(shape)

    def in_stretches(self, x: Any) -> Any:
        """x with the cut axis as two: [5, 24] with four stretches as [5, 4, 6],
        whose last axis has the pieces."""
        # Only a piece of a leaf that is cut has stretches, and such a piece has an axis.
        axis: Any = self.axis
        return x.reshape(*x.shape[:axis], self.repeats, -1, *x.shape[axis + 1 :])


class MatrixView(NamedTuple):
    """How one leaf becomes matrices: which axes are rows, which are columns, which only count.

    Attributes:
      shape: The shape of the leaf, or of the piece of it that is viewed.
      reduction_axes: The axes of the rows, counted from 0.
      output_axes: The axes of the columns, counted from 0.
    """

    shape: Axes
    reduction_axes: Axes
    output_axes: Axes

    @property
    def batch_axes(self) -> Axes:
        """The axes that count matrices: all others."""
        sides = self.reduction_axes + self.output_axes
        return tuple(axis for axis in range(len(self.shape)) if axis not in sides)

    def _sizes(self, axes: Axes) -> Axes:
        """The sizes of these axes of `shape`."""
        return tuple(self.shape[axis] for axis in axes)

    @property
    def batch(self) -> int:
        """The number of matrices in the leaf."""
        return math.prod(self._sizes(self.batch_axes))

    @property
    def fan_in(self) -> int:
        """Rows of each matrix: the product of the axes that the layer sums over."""
        return math.prod(self._sizes(self.reduction_axes))

    @property
    def fan_out(self) -> int:
        """Columns of each matrix."""
        return math.prod(self._sizes(self.output_axes))

    def summed_shape(self, axes: Axes) -> Axes:
        """`shape` after a sum over these axes that keeps them."""
        return tuple(
            1 if axis in axes else size for axis, size in enumerate(self.shape)
        )

    @property
    def _order(self) -> Axes:
        """The axes of `shape` as a stack of matrices has them: what counts, rows, columns."""
        return self.batch_axes + self.reduction_axes + self.output_axes

    @property
    def is_tall(self) -> bool:
        """Whether a matrix has more rows than columns."""
        return self.fan_in > self.fan_out

    @property
    def wide(self) -> MatrixView:
        """The view of the transposes where this one has tall matrices:
        rows and columns are exchanged; else itself."""
        if not self.is_tall:
            return self
        return self._replace(
            reduction_axes=self.output_axes, output_axes=self.reduction_axes
        )

    def to_matrices(self, leaf: jax.Array) -> Inexact[Array, "batch fan_in fan_out"]:
        """The leaf as a stack of matrices: [layers, d, heads, size] with rows d gives
        [layers, d, heads * size]."""
        # [*batch_axes, *reduction_axes, *output_axes]
        ordered = leaf.transpose(self._order)
        return ordered.reshape(self.batch, self.fan_in, self.fan_out)

    def to_leaf(self, matrices: jax.Array) -> jax.Array:
        """The inverse of `to_matrices`, from the same numbers in any shape."""
        ordered = matrices.reshape(self._sizes(self._order))
        # The place of each axis of `shape` among the ordered ones
        return ordered.transpose(np.argsort(self._order))


class Pieces(list[Piece]):
    """The pieces of a tree's leaves, and how trees of this structure are taken apart and put
    together again."""

    def __init__(self, treedef: Any):
        super().__init__()
        self.treedef = treedef

    def of(self, tree: Any) -> list[Any]:
        """The pieces of the leaves of another such tree."""
        leaves = self.treedef.flatten_up_to(tree)
        return [piece.take(leaves) for piece in self]

    def _by_leaf(self, values: Sequence[Any]) -> dict[int, list[tuple[Piece, Any]]]:
        """By the leaf's index, its pieces in the order in which they lie in it,
        each with its value."""
        by_leaf: dict[int, list[tuple[Piece, Any]]] = {}
        for piece, value in zip(self, values, strict=True):
            by_leaf.setdefault(piece.leaf, []).append((piece, value))
        return by_leaf

    def replaced(self, tree: Any, results: Sequence[Any]) -> Any:
        """The tree with each piece replaced by its result, of the piece's shape;
        what is no matrix stays.

        A fused kernel [8, 12] of queries, keys and values has three pieces [8, 4]. `in_stretches`
        shows them as [8, 1, 4], and side by side along the last axis they are [8, 1, 12]. Where the
        axis is q k v q k v, of two groups, each piece has two stretches of two columns, [8, 2, 2].
        """
        leaves = self.treedef.flatten_up_to(tree)
        for i, pairs in self._by_leaf(results).items():
            # The pieces of leaf i, each with its result. All are cut along one axis, into as many
            # stretches: the first stands for all.
            piece, result = pairs[0]
            axis = piece.axis
            # A piece without an axis is a whole leaf, whose result takes its place as it is.
            if axis is not None:
                # The leaf was cut: its pieces are put side by side again in each stretch.
                parts = [piece.in_stretches(part) for _, part in pairs]
                whole = jnp.concatenate(parts, axis=axis + 1)
                # `Piece.take` may have gathered a sharded axis, to cut it.
                result = sharded_like(whole.reshape(leaves[i].shape), leaves[i])
            leaves[i] = result
        return self.treedef.unflatten(leaves)

    def as_state(self, arrays: Sequence[jax.Array]) -> Any:
        """A state with an array for each piece: a tuple where a leaf is cut,
        MaskedNode where it is no matrix."""
        # `optax.MaskedNode` marks what is no matrix, as Optax's own states do.
        entries: list[Any] = [optax.MaskedNode()] * self.treedef.num_leaves
        for i, pairs in self._by_leaf(arrays).items():
            parts = [array for _, array in pairs]
            entries[i] = tuple(parts) if len(parts) > 1 else parts[0]
        state = self.treedef.unflatten(entries)
        # Boxes of Flax are left out: they have the sharding of the parameter, of another shape.
        return jax.tree.map(without_box, state, is_leaf=is_boxed)

    def of_state(self, state: Any, shapes: Sequence[Axes]) -> list[Any]:
        """The inverse of `as_state`; raises unless the arrays have these shapes."""
        # Masked nodes have no leaves.
        arrays = jax.tree.leaves(state)
        state_shapes = list(map(jnp.shape, arrays))
        if state_shapes != list(shapes):
            raise ValueError(
                f"the state has shapes {state_shapes[:9]}, these updates need {list(shapes)[:9]}."
            )
        return arrays
