"""Operations that only move entries: what each does to the axes of an array."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from muonjax._inspect import softmax
from muonjax._inspect.entrywise import is_zero, latest, rule, unknown
from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Node
from muonjax._inspect.layout import MOST, UNORDERED, Layout, Unmoved, merged
from muonjax._inspect.values import (
    DATA,
    MULTIPLIED,
    Move,
    Value,
    all_images,
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
    values = walk.operands(node)
    if node.name == "stop_gradient":
        return [v.without_gradient for v in values]
    if node.name in ("psum", "psum2", "psum_invariant", "imag") or is_coarse(walk, node):
        return [v._replace(logits=softmax.scaled(node, v)) for v in values]
    return values


def is_coarse(walk: Walk, node: Node) -> bool:
    """Whether it keeps fewer than eight significant bits: a factor changes what is rounded off."""
    if node.name not in ("convert_element_type", "reduce_precision"):
        return False
    size = walk.graph.avals[node.outputs[0]].dtype.itemsize
    return size < 2 or node.params.get("mantissa_bits", 7) < 7


def moved_by(node: Node, x: np.ndarray, old: Shape, new: Shape, start: Any = None) -> np.ndarray:
    """Facts about the entries of an array, after an operation that moves the entries.

    Like the array they have its axes as the last ones, each with one entry where nothing depends on it. `start` is a
    known index of a `gather`.
    """
    p, first = node.params, x.ndim - len(old)

    def cut(axis: int, *part: int) -> np.ndarray:
        k = first + axis
        return x[(slice(None),) * k + (slice(*part),)] if x.shape[k] > 1 else x

    def placed(where: Sequence[int], kept: Sequence[int]) -> np.ndarray:
        """Axis `kept[i]` becomes axis `where[i]`, and nothing depends on the others."""
        sizes = dict(zip(where, (x.shape[first + axis] for axis in kept), strict=True))
        return x.reshape([*x.shape[:first], *(sizes.get(axis, 1) for axis in range(len(new)))])

    match node.name:
        case "transpose":
            return x.transpose(*range(first), *(first + axis for axis in p["permutation"]))
        case "reshape" if p["dimensions"] is None:
            return reshaped(x, old, new)
        case "broadcast_in_dim":
            return placed(p["broadcast_dimensions"], range(len(old)))
        case "rev":
            return np.flip(x, tuple(first + axis for axis in p["dimensions"]))
        case "scan_stack":
            return np.expand_dims(x, first)
        case "slice":
            strides = p["strides"] or [1] * len(old)
            for axis, part in enumerate(
                zip(p["start_indices"], p["limit_indices"], strides, strict=True)
            ):
                x = cut(axis, *part)
            return x
        case "gather":
            numbers, sizes = p["dimension_numbers"], p["slice_sizes"]
            index = [] if start is None or np.size(start) > 1 else np.reshape(start, -1).tolist()
            for axis, position in zip(numbers.start_index_map, index, strict=False):
                position = min(max(position, 0), old[axis] - sizes[axis])
                x = cut(axis, position, position + sizes[axis])
            gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
            if all(x.shape[first + k] <= sizes[k] for k in range(len(old))):
                return placed(numbers.offset_dims, [k for k in range(len(old)) if k not in gone])
    raise Unmoved


def reshaped(x: np.ndarray, old: Shape, new: Shape) -> np.ndarray:
    """After a reshape: all axes are there that become others with one on which something depends."""
    if math.prod(old) != math.prod(new):
        raise Unmoved
    lead, sizes = x.shape[: x.ndim - len(old)], x.shape[x.ndim - len(old) :]
    full, result, i, j = [], [], 0, 0
    while i < len(old) or j < len(new):
        a, b, i, j = i, j, i + 1, j + 1
        while (m := math.prod(old[a:i])) != (n := math.prod(new[b:j])):
            i, j = (i + 1, j) if m < n else (i, j + 1)
        varies = any(size > 1 for size in sizes[a:i])
        full += old[a:i] if varies else [1] * len(old[a:i])
        result += new[b:j] if varies else [1] * len(new[b:j])
    if math.prod((*lead, *full)) > MOST:
        raise Unmoved
    return np.broadcast_to(x, (*lead, *full)).reshape((*lead, *result))


@rule("transpose reshape rev slice scan_stack broadcast_in_dim")
def _one_operand(walk: Walk, node: Node) -> Sequence[Value]:
    (x,) = walk.operands(node)
    if node.name == "broadcast_in_dim":
        x = x.repeating(walk.shape(node.inputs[0]))
    return _rearranged(walk, node, x)


def _rearranged(walk: Walk, node: Node, x: Value, start: Any = None) -> Sequence[Value]:
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    move = functools.partial(moved_by, node, old=old, new=new, start=start)
    return _mapped(walk, node, x, lambda layout: layout.moved(new, move))


def _mapped(walk: Walk, node: Node, x: Value, move: Move) -> Sequence[Value]:
    """The value with other layouts, unless it is not followed where entries of parameters go."""
    result = x.map(move)
    lost = [any(UNORDERED in y.layout.loops for y in (*v.terms, *v.images)) for v in (x, result)]
    return unknown(walk, node) if lost == [False, True] else [result]


@rule("concatenate")
def _put_together(walk: Walk, node: Node) -> Sequence[Value]:
    axis = node.params["dimension"]
    values = [
        v for v, x in zip(walk.operands(node), node.inputs, strict=True) if walk.shape(x)[axis]
    ]
    sizes = [walk.shape(x)[axis] for x in node.inputs if walk.shape(x)[axis]]
    joined = dependent(values)
    if not joined.is_weight:
        walk.record_terms(node, "joined with data", [v for v in values if v.is_weight])
    starts = zip(values, itertools.accumulate(sizes, initial=0), strict=False)
    zeros = sum(not is_zero(walk, x) for x in node.inputs) == 1
    place = functools.partial(Layout.place, axis=axis, size=sum(sizes), zeros=zeros)
    placed = [v.map(functools.partial(place, start=start)) for v, start in starts]
    images = latest(walk, node, all_images(placed))
    logits = tuple(x for v in placed for x in v.logits)
    if len(logits) > 1:
        logits = tuple(softmax.lost(node, x) if x.stage == "logits" else x for x in logits)
    terms = [t for v in placed for t in v.terms] if joined.is_weight else []
    for group in grouped(((t.leaf, *t[2:]), t) for t in terms).values():  # parts of one parameter
        layout = merged(tuple(t.layout for t in group))
        if len(group) > 1 and layout.taken == group[0].layout.taken and layout.is_separable([axis]):
            terms = [group[0]._replace(layout=layout), *(t for t in terms if t not in group)]
    return [joined._replace(terms=tuple(terms), images=images, logits=logits)]


@rule("gather")
def _gather(walk: Walk, node: Node) -> Sequence[Value]:
    values = x, indices = walk.operands(node)
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(old)) if axis not in gone]
    start = walk.known(node.inputs[1])
    if start is not None and walk.shape(node.inputs[1]) == (1,):  # `jnp.take(x, 2, axis)`
        return _rearranged(walk, node, x, start)
    sources: list[int | None] = [None] * len(new)
    for at, axis in zip(numbers.offset_dims, kept, strict=True):
        sources[at] = axis if sizes[axis] == old[axis] else None
    picked = [axis for axis in range(len(old)) if axis not in sources and old[axis] > 1]
    here = any(y.layout.atoms(picked) for y in (*x.terms, *x.images))
    order = start if here and len(picked) == 1 else None
    if order is not None and np.array_equal(np.sort(order, None), np.arange(old[picked[0]])):
        return unknown(walk, node)  # all positions in another order
    if not x.terms:
        walk.record_read(x, picked, indices)
        if here:
            walk.record_parts(x.images)
            return [dependent(values)]
    return [looked_up(walk, node, values, picked, sources, new)]


def looked_up(
    walk: Walk, node: Node, values: Sequence[Value], picked: Sequence[int], sources: Sequence[int | None],
    shape: tuple[int, ...],
) -> Value:  # fmt: skip
    """Entries of `picked` axes at indices that are known only when it runs."""
    x, *indices = values
    by_data = any(v.depends_on & DATA for v in indices)
    terms = []
    for k, t in enumerate(x.terms):
        if (
            by_data and t.inner and not t.layout.atoms(picked)
        ):  # a table times a matrix: rows of the product
            every = t.layout.atoms(range(len(t.layout.shape)))
            walk.record(node, "product", t, MULTIPLIED, k=k, rows=t.inner[0], columns=every)
            continue
        rows = t.layout.atoms(picked)
        layout = t.layout.visit(picked).pick(tuple(sources), shape)
        if by_data and rows:
            walk.record(node, "looked up", t, "looked up", rows=rows)
        terms.append(t._replace(layout=layout))
    images = (
        move_each(x.images, lambda layout: layout.pick(tuple(sources), shape))
        if not x.terms
        else ()
    )
    return dependent(values)._replace(terms=tuple(terms), images=images)


@rule("dynamic_slice")
def _dynamic_slice(walk: Walk, node: Node) -> Sequence[Value]:
    values = walk.operands(node)
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    sources = [axis if n == m else None for axis, (n, m) in enumerate(zip(old, new, strict=True))]
    picked = [axis for axis, source in enumerate(sources) if source is None]
    runs = [
        axis for axis in picked if new[axis] > 1
    ]  # which of them an index reaches is not followed
    if any(x.layout.atoms(runs) for x in (*values[0].terms, *values[0].images)):
        return unknown(walk, node)
    return [looked_up(walk, node, values, picked, sources, new)]


@rule("scan_slice")
def _scan_slice(walk: Walk, node: Node) -> Sequence[Value]:
    rest, shape = (*range(1, len(walk.shape(node.inputs[0]))),), walk.shape(node.outputs[0])
    value = walk.operands(node)[0]
    return [value.map(lambda layout: layout.visit([0]).pick(rest, shape))]


@rule(RESIZED)
def _resize(walk: Walk, node: Node) -> Sequence[Value]:
    (x,), old, new = walk.operands(node), walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    if len(old) != len(new):
        return unknown(walk, node)
    return _mapped(walk, node, x, lambda layout: layout.resize(new))
