"""First step inside `orthogonalize`: a leaf is seen as a stack of matrices, leaf <-> [batch, m, n]."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from muonjax._trees import broadcast_prefix, is_masked, tree_of

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
    axes, is cut into `parts` consecutive pieces of equal size, and each piece is a matrix of its own.

    Attributes:
      reduction_axis: as in `MuonDimensionNumbers`.
      output_axis: as in `MuonDimensionNumbers`.
      parts: how many matrices, >= 1; must divide the size of `axis`.
      axis: the axis that is cut; one of the two above.

    Raises:
      ValueError: while tracing, if the parts do not fit a leaf; naming its shape.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> qkv = muonjax.FusedDimensionNumbers(reduction_axis=0, output_axis=1, parts=3, axis=1)
      >>> print(muonjax.tabulate({"w": jnp.ones((8, 24))}, {"w": qkv}).splitlines()[2])
      w     8×24   Muon     3 of 8×8  given

    Source: K. Jordan, "Muon", 2024: query, key and value apart.
    """

    reduction_axis: Sequence[int] | int = 0
    output_axis: Sequence[int] | int = 1
    parts: int = 3
    axis: int = 1


DimensionNumbers: TypeAlias = MuonDimensionNumbers | FusedDimensionNumbers

DimensionNumbersTree: TypeAlias = Any
"""A tree of `DimensionNumbers` or None, a prefix of the parameters' tree, or a function of the
parameters that returns one. None marks a leaf that is no matrix."""


class MatrixView(NamedTuple):
    """How one leaf becomes matrices: which axes are rows, which are columns, which only count."""

    leaf_shape: tuple[int, ...]
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

    @property
    def _order(self) -> tuple[int, ...]:
        return self.batch_axes + self.reduction_axes + self.output_axes

    def to_matrices(self, leaf: jax.Array) -> jax.Array:
        """`leaf` -> [batch, fan_in, fan_out]."""
        return leaf.reshape(self.shape).transpose(self._order).reshape(self.batch, self.fan_in, self.fan_out)

    def to_leaf(self, matrices: jax.Array) -> jax.Array:
        """[batch, fan_in, fan_out] -> the leaf's own shape; the inverse of `to_matrices`."""
        inverse = sorted(range(len(self.shape)), key=self._order.__getitem__)
        return matrices.reshape(self._sizes(self._order)).transpose(inverse).reshape(self.leaf_shape)


def _axes(call: str, leaf: str, name: str, value: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    try:
        axes = tuple(map(operator.index, value if isinstance(value, Sequence) else (value,)))
    except TypeError:
        raise TypeError(f"{call}: {name}={value!r} must be an axis, a whole number, or several.") from None
    for axis in axes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"{call}: {name}={value!r} names axis {axis}, but {leaf} has shape {shape}.")
    return tuple(axis % len(shape) for axis in axes)


def matrix_view(leaf: Any, numbers: DimensionNumbers, *, call: str, path: Any = ()) -> MatrixView:
    """The view of a leaf (anything with shape and dtype) under `numbers`.

    Args:
      call: Names the caller in errors.
      path: The leaf's key path, which errors name too.
    """
    shape = tuple(leaf.shape)
    named = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    named = f"the leaf {named!r}" if named else "the leaf"
    if len(shape) < 2:
        raise ValueError(
            f"{call} needs matrices, but {named} has shape {shape}; give it to Adam instead: None in its place in the "
            "dimension numbers."
        )
    if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
        raise TypeError(
            f"{call} needs float or complex leaves, but {named} of shape {shape} is {leaf.dtype}; keep integers out of "
            "the optimizer (optax.masked) or cast them."
        )
    reduction = _axes(call, named, "reduction_axis", numbers.reduction_axis, shape)
    output = _axes(call, named, "output_axis", numbers.output_axis, shape)
    if not reduction or not output:
        raise ValueError(
            f"{call}: {numbers} leaves one side of the matrix without an axis ({named} has shape {shape})."
        )
    if len(set(reduction + output)) != len(reduction + output):
        raise ValueError(
            f"{call}: {numbers} uses an axis of {named} of shape {shape} twice; reduction and output axes must be "
            "disjoint."
        )
    if 0 in shape:
        raise ValueError(
            f"{call}: {named} of shape {shape} has an empty dimension, so there is nothing to update."
        )
    cut, cut_shape = None, shape
    if isinstance(numbers, FusedDimensionNumbers):
        (cut,) = _axes(call, named, "axis", numbers.axis, shape)
        if cut not in reduction + output or numbers.parts < 1 or shape[cut] % numbers.parts:
            raise ValueError(
                f"{call}: {numbers} can't cut {named} of shape {shape}: `axis` must be one of the reduction or "
                "output axes, and `parts` must divide its size."
            )
        # (..., parts * size, ...) -> (..., parts, size, ...): the parts become a batch axis.
        cut_shape = (*shape[:cut], numbers.parts, shape[cut] // numbers.parts, *shape[cut + 1 :])
        reduction, output = (tuple(axis + (axis >= cut) for axis in axes) for axes in (reduction, output))
    batch = tuple(axis for axis in range(len(cut_shape)) if axis not in reduction + output)
    return MatrixView(shape, cut_shape, batch, reduction, output, cut)


def resolve_dimension_numbers(
    numbers: DimensionNumbersTree | Callable[[Any], Any] | None, tree: Any, *, call: str
) -> list[DimensionNumbers | None]:
    """One entry a leaf of `tree` (MaskedNodes are no leaves), from a tree, a prefix tree, a function, or None.

    None for the whole of it means that every leaf is one plain matrix (fan_in, fan_out).
    """
    given = tree_of(MuonDimensionNumbers() if numbers is None else numbers, tree)
    entries = broadcast_prefix(given, tree, is_leaf=_is_entry, call=call, what="the dimension numbers")
    for entry in entries:
        if not _is_entry(entry):
            raise TypeError(
                f"{call}: dimension numbers hold {entry!r}; expected MuonDimensionNumbers or None."
            )
    return [None if is_masked(entry) else entry for entry in entries]


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, (MuonDimensionNumbers, FusedDimensionNumbers, optax.MaskedNode))


def matrix_views(
    numbers: DimensionNumbersTree | Callable[[Any], Any] | None, tree: Any, *, call: str
) -> list[MatrixView | None]:
    """One view a leaf of `tree`, None where its numbers are None (taken as by `resolve_dimension_numbers`)."""
    entries = resolve_dimension_numbers(numbers, tree, call=call)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        None if entry is None else matrix_view(leaf, entry, call=call, path=path)
        for (path, leaf), entry in zip(leaves, entries, strict=True)
    ]
