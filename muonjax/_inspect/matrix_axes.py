"""The matrices in a parameter: rows, columns and batches, and how columns are cut into parts and heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from muonjax._inspect.findings import Walk
from muonjax._inspect.layout import Layout, Region, Run, sums
from muonjax._inspect.values import Use
from muonjax._matrices.matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    one_or_several,
)


class Contradiction(Exception):
    """Why the products with a parameter do not make it a stack of matrices."""


class Matrices(NamedTuple):
    numbers: DimensionNumbers
    per_head: DimensionNumbers  # with a matrix for each attention head
    why: str


class _Cut(NamedTuple):
    """Parts of an axis."""

    axis: int
    sizes: tuple[int, ...]
    repeats: int = 1  # how often the parts of these sizes follow each other


class _Form(NamedTuple):
    """The axes of a parameter in one product."""

    rows: frozenset[int]
    columns: frozenset[int]
    cut: _Cut | None = None

    @property
    def transposed(self) -> _Form:
        return self._replace(rows=self.columns, columns=self.rows)

    def __str__(self) -> str:
        axes = ", ".join(map(str, sorted(self.rows)))
        parts = f", in {len(self.cut.sizes)} parts" if self.cut else ""
        return f"multiplied along {'axis' if len(self.rows) == 1 else 'axes'} {axes}{parts}"


def matrices_of(walk: Walk, leaf: int, uses: Sequence[Use]) -> Matrices:
    """The matrices that all of these products agree on.

    Raises:
      Contradiction: They do not agree, or one of them has no such axes.
    """
    shape = walk.shapes[leaf]
    forms: dict[_Form, Use] = {}
    for use in uses:
        form = _form(walk, leaf, use)
        if form.transposed not in forms:
            forms.setdefault(form, use)
    lines = [f"{form} in {walk.graph.line(use.node)}" for form, use in forms.items()]
    if len(forms) > 1:
        raise Contradiction(f"{lines[0]}, but {lines[1]}")
    ((form, use),) = forms.items()
    if form.cut is None:  # perhaps the function cuts the parameter before its products
        slices = {u.view.layout.region for u in uses}
        form = form._replace(cut=_cut(slices, shape, form.columns, form.columns))
    heads = {
        (run, region) for u in uses for run, region in u.product.heads if run.axis in form.columns
    }
    numbers = _numbers(form)
    per_head = _numbers_per_head(form, shape, heads) if heads else numbers
    return Matrices(numbers, per_head, f"{form}: {walk.graph.line(use.node)}")


def _axes(runs: Iterable[Run]) -> frozenset[int]:
    return frozenset(run.axis for run in runs)


def _form(walk: Walk, leaf: int, use: Use) -> _Form:
    """Rows, columns and parts of a parameter in one product."""
    product, shape, line = use.product, walk.shapes[leaf], walk.graph.line(use.node)
    rows, columns = set(use.rows), set(use.columns)
    batch = {run for run in use.batch if run.axis >= 0}
    if product.contracted < columns:
        rows |= product.contracted
        columns -= product.contracted
    # A sum over a batch axis makes rows of it; columns that count experts are no columns.
    summed = batch & product.added_up
    experts = columns & (product.batches - {run for run, _ in product.heads})
    if experts == columns:
        experts = set()
    slices = walk.summed_slices[leaf]
    row_axes, column_axes = _axes(rows | summed) | slices, _axes(columns - experts)
    batch_axes = _axes(batch - summed | experts) - slices
    if row_axes & column_axes:
        raise Contradiction(f"one axis of it is both summed and given: {line}")
    if batch_axes & (row_axes | column_axes):
        raise Contradiction(f"matrices inside of an axis: {line}")
    form = _Form(row_axes, column_axes)
    if use.groups > 1:
        axis = next(iter(column_axes))
        return form._replace(cut=_Cut(axis, (shape[axis] // use.groups,) * use.groups))
    sliced = {axis for axis, _ in use.view.layout.region}
    cut = _cut(product.parts, shape, column_axes, sliced, product.mixed)
    if cut is not None and cut.sizes == (1,) * shape[cut.axis]:
        # An axis that counts queries, keys and values; vectors stay one matrix.
        return form._replace(columns=column_axes - {cut.axis} or column_axes)
    return form._replace(cut=cut)


def _cut(
    regions: Collection[Region],
    shape: tuple[int, ...],
    columns: frozenset[int],
    sliced: Collection[int],
    mixed: Iterable[Layout] = (),
) -> _Cut | None:
    """Along which axis, and into which sizes, columns are cut for different purposes.

    Along an axis that is `sliced` before, the regions must be all of it.
    """
    for axis in sorted(columns):
        masks = {dict(region).get(axis, b"") for region in regions}
        if b"" in masks or len(masks) < 2:
            continue
        period = math.lcm(*map(len, masks))
        parts = _parts(masks, period)
        if parts is None:
            continue
        is_mixed = any(_divides(stop, axis, layout) for layout in mixed for _, stop in parts)
        covers = sum(stop - start for start, stop in parts) == period
        if not is_mixed and (covers or axis not in sliced):
            edges = sorted({0, period, *itertools.chain(*parts)})  # with columns of no use
            return _Cut(axis, _sizes(edges), shape[axis] // period)
    return None


def _sizes(edges: Iterable[int]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in itertools.pairwise(edges))


def _parts(masks: Collection[bytes], period: int) -> list[tuple[int, int]] | None:
    """Where each part of an axis begins and ends in its period; None if one has gaps, or two overlap."""
    each = np.array([np.resize(np.frombuffer(mask, bool), period) for mask in masks])
    parts = [(int(mask.argmax()), period - int(mask[::-1].argmax())) for mask in each]
    has_gaps = [stop - start for start, stop in parts] != each.sum(1).tolist()
    overlap = each.sum(0).max() > 1
    return None if has_gaps or overlap else parts


def _divides(position: int, axis: int, layout: Layout) -> bool:
    """Whether a cut at this position has entries on both sides that are mixed."""
    starts = sums(run for run in layout.runs if run.axis == axis)
    mixed = sums(run for run in layout.taken if run.axis == axis)
    is_inside = (starts + mixed.min() < position) & (position <= starts + mixed.max())
    return bool(is_inside.any())


def _numbers(form: _Form) -> DimensionNumbers:
    rows, columns = one_or_several(sorted(form.rows)), one_or_several(sorted(form.columns))
    if form.cut is None:
        return MuonDimensionNumbers(rows, columns)
    sizes = form.cut.sizes
    parts = len(sizes) if len(set(sizes)) == 1 else sizes
    return FusedDimensionNumbers(rows, columns, parts, form.cut.axis, form.cut.repeats)


def _numbers_per_head(
    form: _Form, shape: tuple[int, ...], heads: set[tuple[Run, Region]]
) -> DimensionNumbers:
    axes = _axes(run for run, _ in heads)
    counting = _axes(run for run, _ in heads if run.stride == 1)
    if counting:
        # With one number for each head it stays one matrix: a vector has no orthogonal form.
        return _numbers(form._replace(columns=form.columns - counting or form.columns))
    cut = form.cut
    if cut is None or cut.axis not in axes:
        cut = _Cut(min(axes), (shape[min(axes)],))
    edges = {0, *itertools.accumulate(cut.sizes * cut.repeats)}
    for run, region in heads:
        if run.axis == cut.axis:
            mask = np.frombuffer(dict(region).get(cut.axis, b"\1"), bool)
            columns = np.flatnonzero(np.resize(mask, shape[cut.axis]))
            edges.update(range(columns[0], columns[-1] + 1, run.stride))
    return _numbers(form._replace(cut=_Cut(cut.axis, _sizes(sorted(edges)))))
