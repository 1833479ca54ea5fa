"""Operations that only move entries: what each does to the axes of an array."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from muonjax._inspect.graph import Node
from muonjax._inspect.layout import PLACED, Layout
from muonjax._inspect.rules import bent, is_zero, latest, rule, unknown
from muonjax._inspect.values import DATA, Value, concatenated, dependent, moved
from muonjax._inspect.walk import Walk


@rule(
    """
    convert_element_type copy copy_p sharding_constraint layout_constraint reduce_precision optimization_barrier reshard
    mesh_cast pvary pcast to_varying psum psum2 pmax psum_invariant ppermute device_put name real imag conj
    stop_gradient
    """
)
def _same(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    return values


@rule("broadcast_in_dim")
def _broadcast(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    sources: list[int | None] = [None] * len(new)
    for axis, to in enumerate(node.params["broadcast_dimensions"]):
        sources[to] = axis if old[axis] == new[to] else None
    return [values[0].repeated(old, sources, new)]


@rule("transpose reshape rev slice scan_stack")
def _moved(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    p, old, new = node.params, walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    reordered = any(x.layout.is_reordered for x in (*values[0].terms, *values[0].images))
    if (node.name == "reshape" and p["dimensions"]) or (node.name == "slice" and reordered):
        return unknown(walk, i, node, values)  # in another order, of which a part is not followed

    def move(y: Layout) -> Layout | None:
        match node.name:
            case "transpose":
                return y.pick(p["permutation"], new)
            case "reshape":
                return y.reshape(new)
            case "rev":
                return functools.reduce(lambda y, axis: y.reorder(axis, old[axis]), p["dimensions"], y)
            case "slice":
                strides = p["strides"] or [1] * len(old)
                every = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
                return functools.reduce(lambda y, part: y and y.cut(part[0], *part[1]), enumerate(every), y)
        return y.pick([None, *range(len(old))], new)  # what a scan collects

    return [values[0].map(move)]


@rule("concatenate")
def _put_together(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    axis = node.params["dimension"]
    sizes = [walk.shape(x)[axis] for x in node.inputs]
    joined = dependent(values)
    if not joined.is_weight:
        values = [walk.as_input(v) if v.is_weight else v for v in values]
        walk.record_terms(i, "joined with data", values)
    images = latest(walk, i, concatenated(values, axis, sizes))
    if not all(v.images or is_zero(walk, x) for v, x in zip(values, node.inputs, strict=True)):
        images = tuple(bent(walk, m, "put together with something else", i) for m in images)
    placed = [
        v.map(functools.partial(Layout.place, axis=axis, start=stop - size, size=sum(sizes)))
        for v, size, stop in zip(values, sizes, itertools.accumulate(sizes), strict=True)
    ]
    logits = tuple(x for v in placed for x in v.logits)
    if len(logits) > 1 and logits[0].stage == "logits":
        logits = (logits[0]._replace(problem=logits[0].problem or ("its logits are joined with others", i)),)
    terms = tuple(t for v in placed for t in v.terms) if joined.is_weight else ()
    return [joined._replace(terms=terms, images=images, logits=logits)]


@rule("gather")
def _gather(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    x, indices = values
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(old)) if axis not in gone]
    start = walk.known(node.inputs[1])
    if start is not None and walk.shape(node.inputs[1]) == (1,):  # `jnp.take(x, 2, axis)`
        (axis,) = numbers.start_index_map
        sources = [kept[numbers.offset_dims.index(at)] for at in range(len(new))]
        part = x.map(lambda layout: layout.cut(axis, *inside(start, old[axis], sizes[axis])))
        return [part.map(lambda layout: layout.pick(sources, new))]
    sources: list[int | None] = [None] * len(new)
    for at, axis in zip(numbers.offset_dims, kept, strict=True):
        sources[at] = axis if sizes[axis] == old[axis] else None
    picked = [axis for axis in range(len(old)) if axis not in sources and old[axis] > 1]
    here = any(y.layout.atoms(picked) for y in (*x.terms, *x.images))
    order = start if here and len(picked) == 1 else None
    if order is not None and np.array_equal(np.sort(order, None), np.arange(old[picked[0]])):
        return unknown(walk, i, node, values)  # all positions in another order
    if not x.terms:
        walk.record_read(x, picked, indices)
        if here:
            walk.record_parts(i, x.images)
            return [dependent(values)]
    return [looked_up(walk, i, values, picked, sources, new)]


def inside(start: Any, size: int, part: int) -> tuple[int, int]:
    """Where `part` entries are read that begin at `start`, if there are so many."""
    first = min(max(int(np.squeeze(start)), 0), size - part)
    return first, first + part


def looked_up(
    walk: Walk, i: int, values: Sequence[Value], picked: Sequence[int], sources: Sequence[int | None],
    shape: Sequence[int],
) -> Value:  # fmt: skip
    """Entries of `picked` axes at indices that are known only when it runs."""
    x, *indices = values
    by_data = any(v.depends_on & DATA for v in indices)
    x = _one_of_several(x, picked)
    terms = []
    for k, t in enumerate(x.terms):
        if by_data and t.inner and not t.layout.atoms(picked):  # a table times a matrix: rows of the product
            every = t.layout.atoms(range(len(t.layout.axes)))
            walk.record(i, "product", t, k=k, rows=t.inner[0], columns=every)
            continue
        rows = t.layout.atoms(picked)
        layout = t.layout._replace(loops=(*t.layout.loops, *rows)).pick(sources, shape)
        if by_data and rows:
            walk.record(i, "looked up", t, rows=rows)
            t = t._replace(looked=(*t.looked, i))
        terms.append(t._replace(layout=layout))
    images = moved(x.images, lambda layout: layout.pick(sources, shape)) if not x.terms else ()
    return dependent(values)._replace(terms=tuple(terms), images=images)


def _one_of_several(x: Value, axes: Sequence[int]) -> Value:
    """Parameters that were put together along `axes`, which a loop enumerates now: it visits each of them only once."""

    def seen(layout: Layout) -> Layout:
        places = [layout.axes[k][0] for k in axes if layout.axes[k] and layout.axes[k][0].axis == PLACED]
        return layout._replace(loops=(*layout.loops, *places))

    return x._replace(terms=moved(x.terms, seen))


@rule("dynamic_slice")
def _dynamic_slice(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    sources = [axis if n == m else None for axis, (n, m) in enumerate(zip(old, new, strict=True))]
    picked = [axis for axis, source in enumerate(sources) if source is None]
    runs = [axis for axis in picked if new[axis] > 1]  # which of them an index reaches is not followed
    if any(x.layout.atoms(runs) for x in (*values[0].terms, *values[0].images)):
        return unknown(walk, i, node, values)
    return [looked_up(walk, i, values, picked, sources, new)]


@rule("scan_slice")
def _scan_slice(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    return [_one_of_several(values[0], [0]).map(lambda layout: layout.loop(0))]


@rule("shard unshard all_gather all_gather_invariant reduce_scatter psum_scatter all_to_all")
def _resize(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    shapes = ((walk.shape(at), walk.shape(out)) for at, out in zip(node.inputs, node.outputs, strict=True))
    return [
        x.map(lambda layout, new=new: layout.resize(new)) if len(old) == len(new) else dependent([x])
        for x, (old, new) in zip(values, shapes, strict=True)
    ]
