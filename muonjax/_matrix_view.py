"""First step inside `orthogonalize`: a leaf is seen as a stack of matrices, leaf <-> [batch, m, n]."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

MuonDimensionNumbers = optax.contrib.MuonDimensionNumbers

DimensionNumbersTree: TypeAlias = Any
"""A tree of `MuonDimensionNumbers` or None, a prefix of the parameters' tree, or a function of the
parameters that returns one. None marks a leaf that is no matrix."""


class MatrixView(NamedTuple):
    """How one leaf becomes matrices: which axes are rows, which are columns, which only count."""

    shape: tuple[int, ...]
    batch_axes: tuple[int, ...]
    reduction_axes: tuple[int, ...]
    output_axes: tuple[int, ...]

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
        return leaf.transpose(self._order).reshape(self.batch, self.fan_in, self.fan_out)

    def to_leaf(self, matrices: jax.Array) -> jax.Array:
        """[batch, fan_in, fan_out] -> the leaf's own shape; the inverse of `to_matrices`."""
        inverse = sorted(range(len(self.shape)), key=self._order.__getitem__)
        return matrices.reshape(self._sizes(self._order)).transpose(inverse)

    def per_matrix(self, scalars: jax.Array) -> jax.Array:
        """[batch] -> something that broadcasts against the leaf, one scalar a matrix."""
        ones = (1,) * (len(self.shape) - len(self.batch_axes))
        inverse = sorted(range(len(self.shape)), key=self._order.__getitem__)
        return scalars.reshape(self._sizes(self.batch_axes) + ones).transpose(inverse)


def _axes(call: str, name: str, value: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    axes = (value,) if isinstance(value, int) else tuple(value)
    for axis in axes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"{call}: {name}={value!r} names axis {axis}, but the leaf has shape {shape}.")
    return tuple(axis % len(shape) for axis in axes)


def matrix_view(leaf: Any, numbers: MuonDimensionNumbers, *, call: str) -> MatrixView:
    """The view of a leaf (anything with shape and dtype) under `numbers`; `call` names the caller in
    errors."""
    shape = tuple(leaf.shape)
    if len(shape) < 2:
        raise ValueError(
            f"{call} needs matrices, but this leaf has shape {shape}; give it to Adam instead: None in its "
            "place in the dimension numbers."
        )
    if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
        raise TypeError(
            f"{call} needs a float or complex leaf, got {leaf.dtype} of shape {shape}; keep integers out of the "
            "optimizer (optax.masked) or cast them."
        )
    reduction = _axes(call, "reduction_axis", numbers.reduction_axis, shape)
    output = _axes(call, "output_axis", numbers.output_axis, shape)
    if not reduction or not output:
        raise ValueError(
            f"{call}: {numbers} leaves one side of the matrix without an axis (leaf shape {shape})."
        )
    if len(set(reduction + output)) != len(reduction + output):
        raise ValueError(
            f"{call}: {numbers} uses an axis of the leaf of shape {shape} twice; reduction and output axes must be "
            "disjoint."
        )
    if 0 in shape:
        raise ValueError(
            f"{call}: a leaf of shape {shape} has an empty dimension, so there is nothing to update."
        )
    batch = tuple(axis for axis in range(len(shape)) if axis not in reduction + output)
    return MatrixView(shape, batch, reduction, output)


def resolve_dimension_numbers(
    numbers: DimensionNumbersTree | Callable[[Any], Any] | None, tree: Any, *, call: str
) -> list[MuonDimensionNumbers | None]:
    """One entry a leaf of `tree` (MaskedNodes are no leaves), from a tree, a prefix tree, a function, or None.

    None for the whole of it means that every leaf is one plain matrix (fan_in, fan_out).
    """
    if numbers is None:
        numbers = MuonDimensionNumbers()
    resolved: Any = numbers(tree) if callable(numbers) else numbers

    def is_entry(x):
        return x is None or isinstance(x, (MuonDimensionNumbers, optax.MaskedNode))

    def spread(entry, subtree):
        entry = None if isinstance(entry, optax.MaskedNode) else entry
        if entry is not None and not isinstance(entry, MuonDimensionNumbers):
            raise TypeError(
                f"{call}: dimension numbers hold {entry!r}; expected MuonDimensionNumbers or None."
            )
        # A one-element tuple, for None is no leaf.
        return jax.tree.map(lambda _: _Entry(entry), subtree)

    try:
        entries = jax.tree.map(spread, resolved, tree, is_leaf=is_entry)
    except ValueError as error:
        raise ValueError(
            f"{call}: the dimension numbers {jax.tree.structure(resolved, is_leaf=is_entry)} are neither the tree of "
            f"the updates nor a prefix of it, {jax.tree.structure(tree)}."
        ) from error
    return [e.numbers for e in jax.tree.leaves(entries, is_leaf=lambda x: isinstance(x, _Entry))]


class _Entry:
    """Holds dimension numbers as an opaque leaf: MuonDimensionNumbers is itself a tuple, thus a tree."""

    def __init__(self, numbers: MuonDimensionNumbers | None):
        self.numbers = numbers
