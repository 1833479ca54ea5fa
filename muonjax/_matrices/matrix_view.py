"""View a leaf as a stack of matrices, leaf <-> [batch, m, n], by dimension numbers."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import optax

from muonjax._common.platform import sharded_like, whole_along
from muonjax._common.trees import broadcast_prefix, is_boxed, is_masked, tree_of, without_box

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact

MuonDimensionNumbers = optax.contrib.MuonDimensionNumbers
"""Optax's own class, `MuonDimensionNumbers(reduction_axis=0, output_axis=1)`: the axes of a leaf, one or several,
that are the matrix's rows (what the layer sums over) and its columns. All other axes count matrices.

Example:
  >>> import muonjax
  >>> query = muonjax.MuonDimensionNumbers(reduction_axis=0, output_axis=(1, 2))  # (d, heads, size): one matrix
  >>> a_matrix_a_head = muonjax.MuonDimensionNumbers(reduction_axis=0, output_axis=2)

Source: `optax.contrib.MuonDimensionNumbers`."""


class FusedDimensionNumbers(NamedTuple):
    """Several matrices side by side along one axis of a leaf: query, key and value in one (d, 3·d) kernel.

    Optax's `MuonDimensionNumbers` can group axes but not cut one. Here `axis`, one of the reduction or output
    axes, is cut into `parts` consecutive pieces, and each piece is a separate matrix.

    Attributes:
      reduction_axis: As in `MuonDimensionNumbers`.
      output_axis: As in `MuonDimensionNumbers`.
      parts: How many matrices of equal size, >= 1, which must divide the size of `axis`; or the sizes of the pieces,
        which must sum to it: (32, 8, 8) for the queries, keys and values of 32 heads that share 8 key heads.
      axis: The axis that is cut; one of the two above.
      repeats: How often the sequence of parts repeats along the axis: as many times as there are heads where query, key
        and value of each head follow each other. All stretches of one part are one matrix.

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


DimensionNumbers: TypeAlias = MuonDimensionNumbers | FusedDimensionNumbers


Ints: TypeAlias = tuple[int, ...]
DimensionNumbersTree: TypeAlias = Any
"""A tree of `DimensionNumbers` or None, a prefix of the parameters' tree, or a function of the
parameters that returns one. None marks a leaf that is no matrix."""


def axes_of(axes: int | Sequence[int]) -> tuple[int, ...]:
    """One axis or several, as a tuple."""
    return (axes,) if isinstance(axes, int) else tuple(axes)


def one_or_several(axes: Sequence[int]) -> int | tuple[int, ...]:
    """The inverse of `axes_of`."""
    return axes[0] if len(axes) == 1 else tuple(axes)


def resolve_dimension_numbers(
    numbers: DimensionNumbersTree, tree: Any, *, call: str
) -> list[DimensionNumbers | None]:
    """One entry per leaf of `tree` (MaskedNodes are no leaves), from a tree, a prefix tree, a function, or None.

    None for the whole of it means that every leaf is one plain matrix (fan_in, fan_out). A tree without leaves, which
    Optax gives to `init` to find the parts of a state that are like parameters, fits all.
    """
    if not jax.tree.leaves(tree):
        return []
    given = tree_of(MuonDimensionNumbers() if numbers is None else numbers, tree)
    entries = broadcast_prefix(
        given, tree, is_leaf=_is_entry, call=call, what="the dimension numbers"
    )
    for entry in entries:
        if not _is_entry(entry):
            raise TypeError(
                f"{call}: dimension numbers hold {entry!r}, not MuonDimensionNumbers or None."
            )
    return [None if is_masked(entry) else entry for entry in entries]


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(
        x, (MuonDimensionNumbers, FusedDimensionNumbers, optax.MaskedNode)
    )


def matrix_pieces(numbers: DimensionNumbersTree, tree: Any, *, call: str) -> Pieces:
    """The matrices of all leaves of `tree`: a piece per leaf, or several where its parts are unequal, in order.

    `Pieces` as the numbers are those that an optimizer has found for such trees already.
    """
    if isinstance(numbers, Pieces):
        return numbers
    entries = resolve_dimension_numbers(numbers, tree, call=call)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    found = Pieces(treedef)
    for i, ((path, leaf), entry) in enumerate(zip(leaves, entries, strict=True)):
        if entry is not None:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found += _pieces(i, leaf, f"the leaf {name!r}" if name else "the leaf", entry, call)
    return found


def _pieces(i: int, leaf: Any, named: str, numbers: DimensionNumbers, call: str) -> list[Piece]:
    """The pieces of the i-th leaf, after all checks."""
    shape, dtype = tuple(leaf.shape), leaf.dtype
    if len(shape) < 2:
        raise ValueError(
            f"{call} needs matrices, but {named} has shape {shape}; give it to Adam, by None."
        )
    if not jax.numpy.issubdtype(dtype, jax.numpy.inexact):
        raise TypeError(
            f"{call} needs float or complex leaves, but {named} is {dtype}; see optax.masked."
        )
    if jax.numpy.finfo(dtype).bits < 16:
        raise TypeError(
            f"{call}: {named} is {dtype}, whose few bits round steps away; train in float32."
        )
    reduction = _checked_axes(call, named, "reduction_axis", numbers.reduction_axis, shape)
    output = _checked_axes(call, named, "output_axis", numbers.output_axis, shape)
    if (
        not reduction
        or not output
        or len({*reduction, *output}) != len(reduction + output)
        or 0 in shape
    ):
        why = (
            "has an empty dimension"
            if 0 in shape
            else "needs disjoint axes for its sides, none twice"
        )
        raise ValueError(f"{call}: {named} of shape {shape} {why}, got {numbers}.")
    if not isinstance(numbers, FusedDimensionNumbers):
        return [Piece(i, view_of(shape, reduction, output))]
    (cut,) = _checked_axes(call, named, "axis", numbers.axis, shape)
    parts, repeats = numbers.parts, numbers.repeats
    size, rest = divmod(shape[cut], max(1, repeats))
    sizes = (size // max(1, parts),) * parts if isinstance(parts, int) else parts
    fill = not rest and repeats >= 1 and min(sizes, default=0) >= 1 and sum(sizes) == size
    if cut not in reduction + output or not fill:
        raise ValueError(
            f"{call}: {numbers} can't cut {named} of shape {shape}: `axis` must be one of the reduction or output "
            f"axes, and the sizes in `parts`, or as many equal ones, fill its {shape[cut]} entries `repeats` times."
        )
    if isinstance(parts, int) and repeats == 1:
        return [Piece(i, view_of(shape, reduction, output, cut, parts))]
    found = []
    for part, start in zip(sizes, itertools.accumulate(sizes, initial=0), strict=False):
        view = view_of((*shape[:cut], repeats * part, *shape[cut + 1 :]), reduction, output)
        found.append(Piece(i, view, cut, start, math.gcd(*sizes), repeats))
    return found


def _checked_axes(
    call: str, leaf: str, name: str, value: Any, shape: tuple[int, ...]
) -> tuple[int, ...]:
    try:
        axes = tuple(map(operator.index, value if isinstance(value, Sequence) else (value,)))
    except TypeError:
        raise TypeError(
            f"{call}: {name}={value!r} must be an axis, a whole number, or several."
        ) from None
    for axis in axes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{call}: {name}={value!r} names axis {axis}, but {leaf} has shape {shape}."
            )
    return tuple(axis % len(shape) for axis in axes)


def view_of(
    shape: Ints, reduction: Ints, output: Ints, cut: int | None = None, parts: int = 1
) -> MatrixView:
    """The view of a leaf of this shape by checked axes, one of which may be cut into equal parts."""
    cut_shape = shape
    if cut is not None:
        # (..., parts * size, ...) -> (..., parts, size, ...): the parts become a batch axis.
        cut_shape = (*shape[:cut], parts, shape[cut] // parts, *shape[cut + 1 :])
        reduction, output = (
            tuple(axis + (axis >= cut) for axis in axes) for axes in (reduction, output)
        )
    batch = tuple(axis for axis in range(len(cut_shape)) if axis not in reduction + output)
    return MatrixView(shape, cut_shape, batch, reduction, output, cut)


class Piece(NamedTuple):
    """A leaf with its view, or one of the unequal parts that a leaf is cut into."""

    leaf: int  # its index among the leaves
    view: MatrixView
    axis: int | None = None  # the axis that is cut; None: the piece is the leaf
    start: int = 0  # within one stretch
    step: int = 1  # the leaf is cut at multiples of it
    repeats: int = 1  # how many stretches of the axis the piece is made of, at equal distances

    def take(self, leaves: Sequence[Any]) -> Any:
        """The piece of its leaf; of a `jax.ShapeDtypeStruct`, its shape."""
        x = leaves[self.leaf]
        if self.axis is None:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.view.leaf_shape, x.dtype)
        x = _in_stretches(whole_along(x, self.axis, self.step if self.repeats == 1 else None), self)
        size = self.view.leaf_shape[self.axis] // self.repeats
        part = jax.lax.slice_in_dim(
            x, self.start, self.start + size, axis=self.axis + (self.repeats > 1)
        )
        return part.reshape(self.view.leaf_shape)


def _in_stretches(x: jax.Array, piece: Piece) -> jax.Array:
    """x with the piece's axis cut into as many stretches as the piece has."""
    axis, n = piece.axis, piece.repeats
    return x if axis is None or n == 1 else x.reshape(*x.shape[:axis], n, -1, *x.shape[axis + 1 :])


class MatrixView(NamedTuple):
    """How one leaf becomes matrices: which axes are rows, which are columns, which only count."""

    leaf_shape: tuple[int, ...]  # of the leaf, or of the piece of it that is viewed
    shape: tuple[int, ...]  # with a fused axis cut in two; all axes below count on this one
    batch_axes: tuple[int, ...]
    reduction_axes: tuple[int, ...]
    output_axes: tuple[int, ...]
    cut: int | None = None  # the axis of `leaf_shape` that is two of `shape`'s: cut and cut + 1

    def _sizes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
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

    def leaf_axes(self, axes: tuple[int, ...]) -> list[int]:
        """Rows or columns of `shape` as axes of the leaf, where a fused axis is one and not two."""
        return [axis if self.cut is None or axis <= self.cut else axis - 1 for axis in axes]

    @property
    def unit_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The leaf's axes that count units, and those of one unit: a matrix, or several that are fused."""
        own = self.leaf_axes(self.reduction_axes + self.output_axes)
        return tuple(i for i in range(len(self.leaf_shape)) if i not in own), tuple(sorted(own))

    def summed_over(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """`shape` after a sum over these axes that keeps them."""
        return tuple(1 if axis in axes else size for axis, size in enumerate(self.shape))

    @property
    def _order(self) -> tuple[int, ...]:
        return self.batch_axes + self.reduction_axes + self.output_axes

    def split(self, leaf: jax.Array) -> jax.Array:
        """`leaf` in `shape`. With explicit axis types a fused axis is gathered: shards need not end where parts do."""
        return (leaf if self.cut is None else whole_along(leaf, self.cut)).reshape(self.shape)

    def join(
        self, split: Inexact[Array, "*split"], like: Inexact[Array, "*leaf"]
    ) -> Inexact[Array, "*leaf"]:
        """The inverse of `split`, sharded as `like`."""
        leaf = split.reshape(self.leaf_shape)
        return leaf if self.cut is None else sharded_like(leaf, like)

    def to_matrices(self, leaf: jax.Array) -> Inexact[Array, "batch fan_in fan_out"]:
        """The leaf as a stack of matrices."""
        return (
            leaf.reshape(self.shape)
            .transpose(self._order)
            .reshape(self.batch, self.fan_in, self.fan_out)
        )

    def to_leaf(self, matrices: Inexact[Array, "batch fan_in fan_out"]) -> jax.Array:
        """The inverse of `to_matrices`."""
        inverse = sorted(range(len(self.shape)), key=self._order.__getitem__)
        return (
            matrices.reshape(self._sizes(self._order)).transpose(inverse).reshape(self.leaf_shape)
        )


class Pieces(list[Piece]):
    """The pieces of a tree's leaves, and how trees of this structure are taken apart and put together again."""

    def __init__(self, treedef: Any):
        super().__init__()
        self.treedef = treedef

    def of(self, tree: Any) -> list[Any]:
        """The pieces of the leaves of another such tree."""
        leaves = self.treedef.flatten_up_to(tree)
        return [piece.take(leaves) for piece in self]

    def replaced(self, tree: Any, results: Sequence[Any]) -> Any:
        """The tree with the pieces' results in their places."""
        parts: dict[int, list[Any]] = {}
        for piece, result in zip(self, results, strict=True):
            parts.setdefault(piece.leaf, []).append(_in_stretches(result, piece))
        cuts = {piece.leaf: (piece.axis, piece.repeats) for piece in self}

        def joined(i: int, leaf: Any) -> Any:
            axis, repeats = cuts[i]
            if axis is None:
                return parts[i][0]
            whole = jax.numpy.concatenate(parts[i], axis=axis + (repeats > 1))
            return sharded_like(whole.reshape(leaf.shape), leaf)

        leaves = self.treedef.flatten_up_to(tree)
        every = (joined(i, leaf) if i in parts else leaf for i, leaf in enumerate(leaves))
        return self.treedef.unflatten(every)

    def as_state(self, arrays: Sequence[jax.Array]) -> Any:
        """A state with an array for each piece: a tuple where a leaf is cut, MaskedNode where it is no matrix."""
        parts: dict[int, list[jax.Array]] = {}
        for piece, array in zip(self, arrays, strict=True):
            parts.setdefault(piece.leaf, []).append(array)
        one_or_more = {i: own[0] if len(own) == 1 else tuple(own) for i, own in parts.items()}
        leaves = range(self.treedef.num_leaves)
        state = self.treedef.unflatten(one_or_more.get(i, optax.MaskedNode()) for i in leaves)
        # A box of Flax has the sharding of the parameter, which is of another shape.
        return jax.tree.map(without_box, state, is_leaf=is_boxed)

    def of_state(self, state: Any, shapes: Sequence[tuple[int, ...]], *, call: str) -> list[Any]:
        """The inverse of `as_state`; raises unless the arrays have these shapes."""
        arrays = jax.tree.leaves(state)
        found = [jax.numpy.shape(array) for array in arrays]
        if found != [*shapes]:
            raise ValueError(
                f"{call}: the state has shapes {found[:9]}, these updates need {[*shapes][:9]}."
            )
        return arrays
