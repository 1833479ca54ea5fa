"""Operations that only move entries: what each does to the axes of an array."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from muonjax._inspect import softmax
from muonjax._inspect.entrywise import is_zero, last_projections
from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Node
from muonjax._inspect.layout import MOST, UNORDERED, Layout, Unmoved, merged
from muonjax._inspect.rules import rule, unknown
from muonjax._inspect.values import (
    DATA,
    MULTIPLIED,
    Move,
    ParameterView,
    Value,
    all_projections,
    dependent,
    grouped,
    move_each,
)

SAME = """
    convert_element_type copy copy_p sharding_constraint layout_constraint reduce_precision optimization_barrier reshard
    mesh_cast pvary pcast to_varying psum psum2 pmax psum_invariant ppermute device_put name real imag conj
    stop_gradient
"""
Shape: TypeAlias = Sequence[int]
RESIZED = "shard unshard all_gather all_gather_invariant reduce_scatter psum_scatter all_to_all"


@rule(SAME)
def _same(walk: Walk, node: Node) -> Sequence[Value]:
    values = walk.inputs(node)
    if node.name == "stop_gradient":
        return [v.without_gradient for v in values]
    if node.name in ("psum", "psum2", "psum_invariant", "imag") or rounds_coarsely(walk, node):
        return [v._replace(logits=softmax.scaled(node, v)) for v in values]
    return values


def rounds_coarsely(walk: Walk, node: Node) -> bool:
    """Whether it keeps fewer than eight significant bits: a factor changes what is rounded off."""
    if node.name not in ("convert_element_type", "reduce_precision"):
        return False
    size = walk.graph.avals[node.outputs[0]].dtype.itemsize
    return size < 2 or node.params.get("mantissa_bits", 7) < 7


def moved_by(node: Node, x: np.ndarray, old: Shape, new: Shape, start: Any = None) -> np.ndarray:
    """Facts about the entries of an array, after an operation that moves the entries.

    Args:
      node: The operation.
      x: The facts: like the array they have its axes as the last ones, each with one entry where nothing depends on it.
      old: The shape of the array.
      new: Its shape after the operation.
      start: A known index of a `gather`.

    Raises:
      Unmoved: There is no rule for the operation, or there would be too many facts.
    """
    params, first = node.params, x.ndim - len(old)
    if node.name == "transpose":
        return x.transpose(*range(first), *(first + axis for axis in params["permutation"]))
    if node.name == "reshape" and params["dimensions"] is None:
        return reshaped(x, old, new)
    if node.name == "broadcast_in_dim":
        return _placed(x, first, params["broadcast_dimensions"], range(len(old)), len(new))
    if node.name == "rev":
        return np.flip(x, tuple(first + axis for axis in params["dimensions"]))
    if node.name == "scan_stack":
        return np.expand_dims(x, first)
    if node.name == "slice":
        strides = params["strides"] or [1] * len(old)
        bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        for axis, bound in enumerate(bounds):
            x = _cut(x, first + axis, *bound)
        return x
    if node.name == "gather":
        return _gathered(x, params, old, len(new), start)
    raise Unmoved


def _cut(x: np.ndarray, axis: int, *bounds: int) -> np.ndarray:
    """x[..., start:stop:stride, ...] along an axis, where something depends on it."""
    if x.shape[axis] == 1:
        return x
    return x[(slice(None),) * axis + (slice(*bounds),)]


def _placed(
    x: np.ndarray, first: int, where: Sequence[int], kept: Iterable[int], rank: int
) -> np.ndarray:
    """Axis `kept[i]` becomes axis `where[i]` of `rank`, after the `first`; nothing depends on the others."""
    sizes = [1] * rank
    for axis, source in zip(where, kept, strict=True):
        sizes[axis] = x.shape[first + source]
    return x.reshape([*x.shape[:first], *sizes])


def _gathered(
    x: np.ndarray, params: dict[str, Any], old: Shape, rank: int, start: Any
) -> np.ndarray:
    numbers, sizes, first = params["dimension_numbers"], params["slice_sizes"], x.ndim - len(old)
    if start is not None and np.size(start) == 1:
        (axis,), position = numbers.start_index_map, int(np.reshape(start, ()))
        position = min(max(position, 0), old[axis] - sizes[axis])
        x = _cut(x, first + axis, position, position + sizes[axis])
    if any(n > size for n, size in zip(x.shape[first:], sizes, strict=True)):
        raise Unmoved  # at an index that is not known
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(old)) if axis not in gone]
    return _placed(x, first, numbers.offset_dims, kept, rank)


def reshaped(x: np.ndarray, old: Shape, new: Shape) -> np.ndarray:
    """After a reshape: of axes that become others together, all are there if something depends on one."""
    if math.prod(old) != math.prod(new) or 0 in old:
        raise Unmoved
    first = x.ndim - len(old)
    full, result = list(x.shape[:first]), list(x.shape[:first])
    for before, after in _regrouped(old, new):
        varies = math.prod(x.shape[first + axis] for axis in before) > 1
        full += [old[axis] if varies else 1 for axis in before]
        result += [new[axis] if varies else 1 for axis in after]
    if math.prod(full) > MOST:
        raise Unmoved
    return np.broadcast_to(x, full).reshape(result)


def _regrouped(old: Shape, new: Shape) -> Iterator[tuple[range, range]]:
    """The axes of a reshape that become others: [4, 6, 5] -> [24, 5] gives ((0, 1), (0,)) and ((2,), (1,))."""
    i_end = j_end = 0
    while i_end < len(old) or j_end < len(new):
        i, j = i_end, j_end
        i_end, j_end = i + 1, j + 1
        while (m := math.prod(old[i:i_end])) != (n := math.prod(new[j:j_end])):
            if m < n:
                i_end += 1
            else:
                j_end += 1
        # One of them may be at its end already: then the other has axes of one entry left.
        yield range(i, min(i_end, len(old))), range(j, min(j_end, len(new)))


@rule("transpose reshape rev slice scan_stack broadcast_in_dim")
def _one_operand(walk: Walk, node: Node) -> Sequence[Value]:
    (x,) = walk.inputs(node)
    if node.name == "broadcast_in_dim":
        x = x.repeating(walk.shape(node.inputs[0]))
    return _rearranged(walk, node, x)


def _rearranged(walk: Walk, node: Node, x: Value, start: Any = None) -> Sequence[Value]:
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    move = functools.partial(moved_by, node, old=old, new=new, start=start)
    return _mapped(walk, node, x, lambda layout: layout.moved(new, move))


def _mapped(walk: Walk, node: Node, x: Value, move: Move) -> Sequence[Value]:
    """The value with other layouts, unless it is not followed any more where entries of parameters go."""
    result = x.map(move)
    if not _is_unordered(x) and _is_unordered(result):
        return unknown(walk, node)
    return [result]


def _is_unordered(x: Value) -> bool:
    return any(UNORDERED in held.layout.loops for held in (*x.views, *x.projections))


@rule("concatenate")
def _concatenate(walk: Walk, node: Node) -> Sequence[Value]:
    axis = node.params["dimension"]
    inputs = [x for x in node.inputs if walk.shape(x)[axis]]
    values = [walk.values[x] for x in inputs]
    sizes = [walk.shape(x)[axis] for x in inputs]
    joined = dependent(values)
    if not joined.is_weight:
        walk.record_views(node, "joined with data", [v for v in values if v.is_weight])
    # A single array between zeros is padded. A clip scales zeros by any factor, so they count as its own.
    zeros = sum(not is_zero(walk, x) for x in node.inputs) == 1
    placed = []
    for start, value in zip(itertools.accumulate(sizes, initial=0), values, strict=False):
        place = functools.partial(
            Layout.place, axis=axis, start=start, size=sum(sizes), zeros=zeros
        )
        placed.append(value.map(place))
    projections = last_projections(walk, node, all_projections(placed))
    logits = tuple(x for v in placed for x in v.logits)
    if len(logits) > 1:
        logits = tuple(softmax.lost(node, x) if x.stage == "logits" else x for x in logits)
    views = _reassembled(placed, axis) if joined.is_weight else ()
    return [joined._replace(views=views, projections=projections, logits=logits)]


def _reassembled(values: Sequence[Value], axis: int) -> tuple[ParameterView, ...]:
    """The views in a concatenation; parts of one parameter become one view, where that can be told."""
    parts = grouped(((t.leaf, t.inner, t.noisy), t) for v in values for t in v.views)
    views: list[ParameterView] = []
    for group in parts.values():
        layout = merged(tuple(t.layout for t in group))
        if layout.taken == group[0].layout.taken and layout.is_separable([axis]):
            views.append(group[0]._replace(layout=layout))
        else:
            views += group
    return tuple(views)


@rule("gather")
def _gather(walk: Walk, node: Node) -> Sequence[Value]:
    values = x, indices = walk.inputs(node)
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    start = walk.known(node.inputs[1])
    if start is not None and walk.shape(node.inputs[1]) == (1,):  # `jnp.take(x, 2, axis)`
        return _rearranged(walk, node, x, start)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(old)) if axis not in gone]
    sources: list[int | None] = [None] * len(new)
    for at, axis in zip(numbers.offset_dims, kept, strict=True):
        if sizes[axis] == old[axis]:
            sources[at] = axis
    picked = [axis for axis in range(len(old)) if axis not in sources and old[axis] > 1]
    depends = any(held.layout.runs_along(picked) for held in (*x.views, *x.projections))
    if depends and len(picked) == 1 and start is not None:
        every = np.arange(old[picked[0]])
        if np.array_equal(np.sort(start, None), every):  # all positions in another order
            return unknown(walk, node)
    if not x.views:
        walk.record_read(x, picked, indices)
        if depends:
            walk.record_parts(x.projections)
            return [dependent(values)]
    return [looked_up(walk, node, values, picked, sources, new)]


def looked_up(
    walk: Walk,
    node: Node,
    values: Sequence[Value],
    picked: Sequence[int],
    sources: Sequence[int | None],
    shape: tuple[int, ...],
) -> Value:
    """Entries of `picked` axes at indices that are known only when it runs."""
    x, *indices = values
    by_data = any(v.depends_on & DATA for v in indices)
    views = []
    for k, t in enumerate(x.views):
        rows = t.layout.runs_along(picked)
        if by_data and t.inner and not rows:  # a table times a matrix: rows of the product
            columns = t.layout.runs_along(range(len(t.layout.shape)))
            walk.record(node, "product", t, MULTIPLIED, k=k, rows=t.inner[0], columns=columns)
            continue
        if by_data and rows:
            walk.record(node, "looked up", t, "looked up", rows=rows)
        layout = t.layout.visit(picked).pick(tuple(sources), shape)
        views.append(t._replace(layout=layout))
    projections: tuple[Any, ...] = ()
    if not x.views:
        projections = move_each(x.projections, lambda layout: layout.pick(tuple(sources), shape))
    return dependent(values)._replace(views=tuple(views), projections=projections)


@rule("dynamic_slice")
def _dynamic_slice(walk: Walk, node: Node) -> Sequence[Value]:
    values = walk.inputs(node)
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    sources = [axis if old[axis] == new[axis] else None for axis in range(len(old))]
    picked = [axis for axis in range(len(old)) if old[axis] != new[axis]]
    stretches = [axis for axis in picked if new[axis] > 1]  # their entries are not followed
    if any(
        held.layout.runs_along(stretches) for held in (*values[0].views, *values[0].projections)
    ):
        return unknown(walk, node)
    return [looked_up(walk, node, values, picked, sources, new)]


@rule("scan_slice")
def _scan_slice(walk: Walk, node: Node) -> Sequence[Value]:
    (value, *_), shape = walk.inputs(node), walk.shape(node.outputs[0])
    rest = tuple(range(1, 1 + len(shape)))
    return [value.map(lambda layout: layout.visit([0]).pick(rest, shape))]


@rule(RESIZED)
def _resize(walk: Walk, node: Node) -> Sequence[Value]:
    (value,), old, new = (
        walk.inputs(node),
        walk.shape(node.inputs[0]),
        walk.shape(node.outputs[0]),
    )
    if len(old) != len(new):
        return unknown(walk, node)
    return _mapped(walk, node, value, lambda layout: layout.resize(new))
