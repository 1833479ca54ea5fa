"""Decide from its uses which optimizer takes a parameter, and as which matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from muonjax._matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    one_or_several,
)
from muonjax._program.graph import line_of
from muonjax._program.heads import Ends
from muonjax._program.layout import Atom, Run
from muonjax._program.walk import Use, Walk

Region: TypeAlias = frozenset[Run]

PENALTY = "used without data, as in a penalty"


class Decision(NamedTuple):
    """What becomes of one parameter."""

    numbers: DimensionNumbers | None  # None: Adam
    why: str
    per_head: DimensionNumbers | None = None  # with a matrix for each attention head
    problem: str = ""  # why it can't be decided: two uses with their lines
    by_names: bool = False  # nothing is decided; routing by names may


class _Form(NamedTuple):
    """The axes of a parameter in one product."""

    rows: frozenset[int]
    columns: frozenset[int]
    cut: tuple[int, int | tuple[int, ...], int] | None = None  # axis, parts, how often they repeat


def decide(walk: Walk, is_loss: bool) -> list[Decision]:
    """One decision per parameter."""
    ends = Ends(walk)
    by_leaf: dict[int, list[Use]] = {}
    for use in walk.uses.values():
        by_leaf.setdefault(use.term.leaf, []).append(use)
    return [_decide(walk, ends, k, shape, by_leaf.get(k, []), is_loss) for k, shape in enumerate(walk.shapes)]


def _decide(walk: Walk, ends: Ends, leaf: int, shape: Any, uses: list[Use], is_loss: bool) -> Decision:
    forward = [u for u in uses if not u.kind.startswith("transposed ")]
    uses = forward or [u._replace(kind=u.kind.removeprefix("transposed ")) for u in uses]
    scale = walk.scales[leaf]
    uses = [u for u in uses if u.kind != "product" or not walk.bit(u.product) & scale] or uses
    if not uses:
        parameter = walk.graph.parameters[leaf]
        readers = (
            n for n, live in zip(walk.nodes, walk.graph.live, strict=True) if live and parameter in n.inputs
        )
        reader = next(readers, None)
        return Decision(None, "never used" if reader is None else f"{PENALTY}: {line_of(reader.equation)}")
    if not walk.graph.is_float(walk.graph.parameters[leaf]):
        return Decision(None, "whole numbers")
    products = [u for u in uses if u.kind == "product"]
    within = {i for u in products for i in u.term.looked}  # lookups of a matrix: of an expert, an adapter
    if lookups := [u for u in uses if u.kind == "looked up" and u.node not in within]:
        also = f", and multiplied: {_line(walk, products[0])}" if products else ""
        return Decision(None, f"looked up: {_line(walk, lookups[0])}{also}")
    if not products:
        return _no_matrix(walk, uses)
    if is_loss and all(_is_head(walk, ends, u) for u in products):
        return Decision(None, f"no product after it, an output head: {_line(walk, products[0])}")
    matrices = [u for u in products if u.rows and u.columns and not _is_depthwise(u)]
    if not matrices:
        why = "a depthwise convolution" if _is_depthwise(products[0]) else "multiplied by vectors"
        return Decision(None, f"{why}: {_line(walk, products[0])}")
    if unknown := [u for u in uses if u.kind.startswith("unknown: ")]:
        name = unknown[0].kind.removeprefix("unknown: ")
        return Decision(None, f"{name} is not followed: {_line(walk, unknown[0])}", by_names=True)
    if not is_loss and all(_is_head(walk, ends, u) for u in matrices):
        return Decision(None, f"last product: {_line(walk, matrices[0])}", by_names=True)
    if all(u.is_patch and not walk.values[u.operand].before for u in matrices):
        return Decision(
            None, f"an embedding of patches, windows that do not overlap: {_line(walk, matrices[0])}"
        )
    return _matrix(walk, leaf, shape, matrices)


def _no_matrix(walk: Walk, uses: list[Use]) -> Decision:
    first = uses[0]
    *unknown, kind = first.kind.split(": ")
    words = {"added": "added", "multiplied": "multiplied entry by entry", "product": "a vector in a product"}
    return Decision(None, f"{words.get(kind, kind)}: {_line(walk, first)}", by_names=bool(unknown))


def _is_depthwise(use: Use) -> bool:
    return use.groups > 1 and use.depth == 1


def _is_head(walk: Walk, ends: Ends, use: Use) -> bool:
    value = walk.nodes[use.node].outputs[0]
    chosen = any((use.node, k) in walk.read for k in range(4))
    return (chosen and value in ends.direct) or value not in ends.consumed


def _line(walk: Walk, use: Use) -> str:
    return line_of(walk.nodes[use.node].equation)


def _matrix(walk: Walk, leaf: int, shape: tuple[int, ...], uses: Sequence[Use]) -> Decision:
    forms: dict[_Form, Use] = {}
    for use in uses:
        form = _form(walk, leaf, shape, use)
        if isinstance(form, str):
            return Decision(None, form, problem=form)
        turned = form._replace(rows=form.columns, columns=form.rows)
        if turned not in forms:
            forms.setdefault(form, use)
    (form, use), *others = forms.items()
    if others:
        second, elsewhere = others[0]
        problem = (
            f"{_described(form)} in {_line(walk, use)}, but {_described(second)} in {_line(walk, elsewhere)}"
        )
        return Decision(None, problem, problem=problem)
    if form.cut is None:
        form = form._replace(cut=_slices(walk, shape, form.columns, uses))
    numbers = _numbers(form, shape)
    heads = {a for a in walk.heads[use.product] if a.axis in form.columns}
    per_head = _numbers_per_head(form, shape, heads) if heads else numbers
    return Decision(numbers, f"{_described(form)}: {_line(walk, use)}", per_head)


def _described(form: _Form) -> str:
    axes = sorted(form.rows)
    text = f"multiplied along ax{'is' if len(axes) == 1 else 'es'} {', '.join(map(str, axes))}"
    if form.cut is not None:
        count = form.cut[1] if isinstance(form.cut[1], int) else len(form.cut[1])
        text += f", in {count} parts"
    return text


def _axes(atoms: Iterable[Atom]) -> frozenset[int]:
    return frozenset(a.axis for a in atoms)


def _form(walk: Walk, leaf: int, shape: tuple[int, ...], use: Use) -> _Form | str:
    """Rows, columns and parts of a parameter in one product; a text says what can't be expressed."""
    product = use.product
    rows, columns, batch = set(use.rows), set(use.columns), set(use.batch)
    heads, experts = walk.heads[product], walk.later_batches[product]
    for atom in batch & walk.summed[product]:
        rows.add(atom)
        batch.discard(atom)
    counting = columns & (experts - heads)
    for atom in counting if counting != columns else ():
        columns.discard(atom)
        batch.add(atom)
    slices = walk.summed_slices[leaf]
    rows |= {a for a in batch if a.axis in slices}
    batch = {a for a in batch if a.axis not in slices}
    row_axes = _axes(rows)
    column_axes = _axes(columns)
    if row_axes & column_axes:
        return f"one axis of it is both summed and given: {_line(walk, use)}"
    form = _Form(row_axes, column_axes)
    split = _axes(batch) & (row_axes | column_axes)
    if split:
        (axis, *more) = split
        outer = [a for a in batch if a.axis == axis]
        if more or len(outer) > 1 or outer[0].stride * outer[0].of != shape[axis]:
            return f"matrices inside of an axis: {_line(walk, use)}"
        return form._replace(cut=(axis, outer[0].size, 1))
    if use.groups > 1:
        axis = next(iter(column_axes))
        return form._replace(cut=(axis, use.groups, 1))
    cut = _parts(walk, product, shape, column_axes)
    if cut is not None and cut[1] == (1,) * shape[cut[0]]:  # an axis that counts query, key and value
        return form._replace(columns=column_axes - {cut[0]})
    return form._replace(cut=cut)


def _parts(
    walk: Walk, product: tuple[int, int], shape: tuple[int, ...], columns: frozenset[int]
) -> tuple[int, int | tuple[int, ...], int] | None:
    """Along which axis, and into which sizes, the result of a product is cut for different purposes."""
    regions = {region for region, _ in walk.parts[product]}
    groups = _united(regions, walk.rejoined[product])
    if len(groups) < 2 or any(not g for g in groups):
        return None
    keys = set.intersection(*({run[:2] for run in g} for g in groups))
    for axis, period in sorted(keys):
        runs = sorted({(run.start, run.stop) for g in groups for run in g if run[:2] == (axis, period)})
        tiles = [0, *(stop for _, stop in runs)] == [*(start for start, _ in runs), period]
        if axis in columns and len(runs) > 1 and tiles:
            return axis, tuple(stop - start for start, stop in runs), shape[axis] // period
    return None


def _slices(
    walk: Walk, shape: tuple[int, ...], columns: frozenset[int], uses: Sequence[Use]
) -> tuple[int, int | tuple[int, ...], int] | None:
    """As `_parts`, of a parameter that is cut before its products.

    Neighbouring slices are one matrix as long as their products do not meet: heads computed one by one do not, queries
    and keys do, and so do gates of which one feeds the other.
    """
    products: dict[Run, list[Use]] = {}
    for use in uses:
        found = [run for run in use.term.layout.region if run.axis in columns]
        if len(found) != 1:
            return None
        products.setdefault(found[0], []).append(use)
    runs = sorted(products)
    axis, period = runs[0][:2]
    if {run[:2] for run in runs} != {(axis, period)}:
        return None
    if [0, *(run.stop for run in runs)] != [*(run.start for run in runs), period]:
        return None
    groups = [runs[:1]]
    for run in runs[1:]:
        if any(_meet(walk, a, b) for other in groups[-1] for a in products[other] for b in products[run]):
            groups.append([run])
        else:
            groups[-1].append(run)
    if len(groups) < 2:
        return None
    return axis, tuple(group[-1].stop - group[0].start for group in groups), shape[axis] // period


def _meet(walk: Walk, a: Use, b: Use) -> bool:
    """Whether one of two products is multiplied by what depends on the other, or by it."""
    first, second = a.product, b.product
    return bool(
        (walk.met[first] | walk.values[a.operand].before) & walk.bit(second)
        or (walk.met[second] | walk.values[b.operand].before) & walk.bit(first)
    )


def _united(regions: Iterable[Region], rejoined: Iterable[frozenset[Region]]) -> list[Region]:
    """Regions that are put together again count as one: for each run the smallest that holds them all."""
    groups = [{region} for region in {*regions, *(r for together in rejoined for r in together)}]
    for together in rejoined:
        touched = [g for g in groups if g & together]
        groups = [g for g in groups if not g & together] + [set().union(*touched)]
    return list(dict.fromkeys(_hull(g) for g in groups))


def _hull(regions: Iterable[Region]) -> Region:
    regions = list(regions)
    keys = set.intersection(*({run[:2] for run in region} for region in regions))
    hull = set()
    for axis, period in keys:
        found = [run for region in regions for run in region if run[:2] == (axis, period)]
        start, stop = min(run.start for run in found), max(run.stop for run in found)
        if stop - start < period:
            hull.add(Run(axis, period, start, stop))
    return frozenset(hull)


def _numbers(form: _Form, shape: tuple[int, ...]) -> DimensionNumbers:
    rows, columns = one_or_several(sorted(form.rows)), one_or_several(sorted(form.columns))
    if form.cut is None:
        return MuonDimensionNumbers(rows, columns)
    axis, parts, repeats = form.cut
    if isinstance(parts, tuple) and len(set(parts)) == 1:
        parts = len(parts)
    return FusedDimensionNumbers(rows, columns, parts, axis, repeats)


def _numbers_per_head(form: _Form, shape: tuple[int, ...], heads: set[Atom]) -> DimensionNumbers:
    counts = {axis: math.prod(a.size for a in heads if a.axis == axis) for axis in _axes(heads)}
    columns = form.columns - {axis for axis, count in counts.items() if count == shape[axis]}
    if not columns:  # a number for each head: a vector has no orthogonal form
        return _numbers(form, shape)
    if columns != form.columns:
        return _numbers(form._replace(columns=columns), shape)
    head = min(heads)
    if form.cut is not None and form.cut[2] > 1:  # queries, keys and values of a head side by side
        axis, parts, repeats = form.cut
        sizes = parts if isinstance(parts, tuple) else (shape[axis] // repeats // parts,) * parts
        return _numbers(form._replace(cut=(axis, sizes * repeats, 1)), shape)
    return FusedDimensionNumbers(
        one_or_several(sorted(form.rows)),
        one_or_several(sorted(form.columns)),
        shape[head.axis] // head.stride,
        head.axis,
    )
