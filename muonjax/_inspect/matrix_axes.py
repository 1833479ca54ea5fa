"""The matrices in a parameter: rows, columns and batches,
and how columns are cut into parts and heads."""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from muonjax._inspect.layouts import Region, Run, axes_of
from muonjax._inspect.records import Records
from muonjax._inspect.values import Use
from muonjax._matrices.matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    one_or_several,
)


class Contradiction(Exception):
    """Why the products with a parameter do not make it a stack of matrices."""


class _Cut(NamedTuple):
    """Parts of an axis."""

    axis: int
    sizes: tuple[int, ...]
    repeats: int = 1  # how often the parts of these sizes follow each other


class _Form(NamedTuple):
    """The axes of a parameter in one product; those in neither set count matrices."""

    rows: frozenset[int]
    columns: frozenset[int]
    cut: _Cut | None = None

    def __str__(self) -> str:
        axes = ", ".join(map(str, sorted(self.rows)))
        parts = f", in {len(self.cut.sizes)} parts" if self.cut else ""
        return f"multiplied along {'axis' if len(self.rows) == 1 else 'axes'} {axes}{parts}"


def matrices_of(
    records: Records, uses: Sequence[Use]
) -> tuple[DimensionNumbers, DimensionNumbers, str]:
    """The matrices that all of these products, at least one, agree on: the dimension numbers; the
    same with a matrix for each head; and why, as "multiplied along axis 0: model.py:41", which is
    the first product's line.

    Raises:
      Contradiction: They do not agree, or one of them has no such axes.
    """
    first = uses[0]
    shape = first.view.layout.origin
    form, line = _form(records, first), records.line(first.node)
    for use in uses[1:]:
        other = _form(records, use)
        # A tied matrix, x @ w and y @ w.T, is orthogonalized the same either way: rows may be the
        # columns of another product.
        has_same_sides = {form.rows, form.columns} == {other.rows, other.columns}
        if form.cut != other.cut or not has_same_sides:
            raise Contradiction(
                f"{form} in {line}, but {other} in {records.line(use.node)}"
            )
    # Where no operation cuts the result of a product, the function may cut the parameter itself, as
    # in x @ w[:, :32] and x @ w[:, 32:]. Such slices are parts only if together they fill the axis;
    # else it stays one matrix: along `sliced` axes, here all of columns, `_cut` leaves no rest.
    if form.cut is None:
        slices = {use.view.layout.region for use in uses}
        cut = _cut(slices, shape, form.columns, sliced=form.columns)
        form = form._replace(cut=cut)
    # Which columns count heads in any of the products, for `per_head`: [64, 8, 16] has the run
    # 0, ..., 7 along axis 1. The region says which part of the columns has these heads, as the
    # queries of a fused kernel. `form` has the rows and columns of the first product. What another
    # product takes as columns, as in y @ w.T, may be rows there: heads along them are left out.
    heads = set()
    for use in uses:
        for run, region in use.product.heads:
            if run.axis in form.columns:
                heads.add((run, region))
    numbers = _numbers(form)
    per_head = _numbers_per_head(form, shape, heads) if heads else numbers
    return numbers, per_head, f"{form}: {line}"


def _form(records: Records, use: Use) -> _Form:
    """Rows and columns of a parameter in one product, and how its columns are cut.

    x @ w with w [64, 192], of which three operations take 64 columns each, is a form with rows {0},
    columns {1} and _Cut(axis=1, sizes=(64, 64, 64)).

    Raises:
      Contradiction: An axis has two roles, or a norm mixed columns before they are cut. Then the
        parameter is left to its name.
    """
    # `origin` is the shape of the parameter.
    product, shape = use.product, use.view.layout.origin
    form = _Form(*_rows_and_columns(records, use))
    # 1, but for a convolution by groups. That has a matrix for each group, of as many output
    # features: these are the cut, whatever parts of its result are used. Its kernel has one axis of
    # columns.
    groups = use.kernel.groups
    if groups > 1:
        axis = min(form.columns)
        return form._replace(cut=_Cut(axis, (shape[axis] // groups,) * groups))
    # The columns that operations take of the result are the parts. `_cut` makes a part of columns
    # that no operation takes, too. But x @ w[:, :64] has only the columns 0 to 63 of w, and another
    # product may take the rest: along a sliced axis it makes no cut unless the parts have all.
    sliced = {axis for axis, _ in use.view.layout.region}
    cut = _cut(product.parts, shape, form.columns, sliced)
    if cut is None:
        return form
    # Before the cut an operation mixed columns in groups, as a norm of each gate of an LSTM does.
    # If a group lay across two parts, these would be no matrices of their own. That is not followed
    # (`record_reduced`), so names decide.
    if product.has_mixed_groups:
        raise Contradiction(
            f"a norm of some of its columns before they are cut: {records.line(use.node)}"
        )
    if cut.sizes == (1,) * shape[cut.axis]:
        # Each position along the axis is a part, as along axis 1 of [64, 3, 16], of queries, keys
        # and values: it counts matrices, so it is no column, and needs no cut. If it is the only
        # axis of columns, as in [64, 3], the parts are vectors, which stay one matrix.
        return form._replace(columns=(form.columns - {cut.axis}) or form.columns)
    return form._replace(cut=cut)


def _rows_and_columns(
    records: Records, use: Use
) -> tuple[frozenset[int], frozenset[int]]:
    """The axes of a parameter that are rows in one product, and those that are columns;
    all others count matrices.

    An einsum "ebd,edf->ebf" with a kernel w [e, d, f] gives the rows {1} and the columns {2}:
    e counts matrices.

    Raises:
      Contradiction: An axis would be two of these.
    """
    # `rows`, `columns` and `batch` are runs, of which one axis may have several.
    columns, batch = set(use.columns), set(use.batch)
    # "hbd,hdf->hbf", and then a sum over h (`added_up`), is one product that sums over h and d:
    # both are rows.
    summed = batch & use.product.added_up
    # Columns that a later operation takes one by one count matrices, as e of y = x @ w with
    # w [d, e, f], if a product takes y[b, e] with another matrix for each expert e, or a gate
    # multiplies it, gate[b, e, 1] * y[b, e, f]. Heads, which `experts` leaves out, stay columns.
    experts = columns & use.product.experts
    # one_hot(action) chooses one of the values x @ w, with w [d, actions]: actions are taken one by
    # one, but without them w would have no columns. So they stay columns.
    if experts == columns:
        experts = set()
    # x[0] @ w[0] + x[1] @ w[1] + ..., as of a loop over heads, adds products with slices of w. So
    # axis 0, along which these differ, has rows, also where each product has it as a batch.
    slices = records.uses.summed_slices[use.view.leaf]
    row_axes = axes_of([*use.rows, *summed]) | slices
    column_axes = axes_of(columns - experts)
    batch_axes = axes_of((batch - summed) | experts) - slices
    # No axis may have two roles; `batch_axes` serves this check alone. Two contradictions: in
    # x @ w[:, :8] + y @ w[:, 8:] axis 1 has columns, and is summed over; in
    # x @ w.reshape(8, 8, 64)[i] with w [64, 64] axis 0 is batch in steps of 8, and rows within.
    axes = [*row_axes, *column_axes, *batch_axes]
    if len(set(axes)) < len(axes):
        raise Contradiction(
            "one axis of it has two roles among rows, columns and batch: "
            f"{records.line(use.node)}"
        )
    return row_axes, column_axes


def _cut(
    regions: Collection[Region],
    shape: tuple[int, ...],
    columns: frozenset[int],
    sliced: Collection[int],
) -> _Cut | None:
    """Along which axis, and into which sizes, columns are cut for different purposes, by the first
    axis of columns that is cut; None: they are one matrix.

    Columns of [64, 96] in regions 0 to 31, 32 to 63 and 64 to 95 are cut along axis 1 into (32, 32,
    32). The region of the first is {(1, mask)}, with 32 times true and 64 times false in the mask;
    an axis without a mask is taken whole. Sizes that repeat along the axis are given once, with how
    often (`repeats`).

    Args:
      regions: The parts of the parameter that operations take.
      shape: Its shape.
      columns: Its axes that are columns.
      sliced: Axes of which a product takes a slice of the parameter, as x @ w[:, :64].
    """
    for axis in sorted(columns):
        masks = {dict(region).get(axis, b"") for region in regions}
        # No cut here: an operation takes all of the axis, which has no mask in its region, or all
        # operations take the same part of it. The next axis may be cut.
        if b"" in masks or len(masks) < 2:
            continue
        parts = np.array([np.frombuffer(mask, bool) for mask in masks])
        # After how many columns all parts repeat, a divisor of their number, at most the number
        # itself: 3 for the masks 100100 and 010010, those of queries and keys that alternate with
        # values, of two groups of heads.
        period = 1
        while shape[axis] % period or (np.roll(parts, period, 1) != parts).any():
            period += 1
        parts = parts[:, :period]
        # Where a part begins or ends: twice if it is one stretch.
        changes = np.diff(parts, axis=1, prepend=False, append=False)
        # No cut: operations take columns that others take too, or columns with gaps between them.
        if parts.sum(0).max() > 1 or (changes.sum(1) != 2).any():
            continue
        # Columns that no operation takes become parts, too. But along a sliced axis another product
        # may take them: then it is no cut.
        edges = sorted({0, period, *np.flatnonzero(changes.any(0)).tolist()})
        if parts.any(0).all() or axis not in sliced:
            return _Cut(axis, tuple(np.diff(edges).tolist()), shape[axis] // period)
    return None


def _numbers(form: _Form) -> DimensionNumbers:
    rows = one_or_several(sorted(form.rows))
    columns = one_or_several(sorted(form.columns))
    if form.cut is None:
        return MuonDimensionNumbers(rows, columns)
    sizes = form.cut.sizes
    parts = len(sizes) if len(set(sizes)) == 1 else sizes
    return FusedDimensionNumbers(rows, columns, parts, form.cut.axis, form.cut.repeats)


def _numbers_per_head(
    form: _Form, shape: tuple[int, ...], heads: set[tuple[Run, Region]]
) -> DimensionNumbers:
    """The dimension numbers of `form`, with a matrix for each head.

    An axis that counts heads, 1 of [64, 8, 16], is no column any more: it counts matrices. One that
    heads divide, 1 of [64, 128], is cut. If [64, 384] is cut into queries, keys and values of 128
    columns each, and the queries alone have heads of 16, the parts are eight of 16 and two of 128.
    Where an axis of heads is the only one with columns, the matrices stay those of `form`.

    Args:
      form: The matrices of the parameter.
      shape: Its shape.
      heads: Where its columns count heads, at least once: the run from head to head, along axis 1
        of [64, 8, 16], or in steps of 16 along axis 1 of [64, 128]; and the region that has these
        heads, as (axis, mask of its positions) pairs.
    """
    axes = axes_of(run for run, _ in heads)
    # Axes along which each position is another head, as axis 1 of [64, 8, 16]: these lose their
    # columns, and heads that divide another axis stay together. Heads at uneven distances, as the
    # queries of q q k v q q k v, have the stride 1 too (`Run.stride`), and are treated the same.
    counting = axes_of(run for run, _ in heads if run.stride == 1)
    cut = form.cut
    if counting:
        columns = form.columns - counting
        # No other axis has columns: of [64, 8], where a head is a vector, and of [64, 16 * 8] with
        # heads along the faster axis, where a head has every eighth column.
        if not columns:
            return _numbers(form)
        # [64, 24, 16], cut along axis 1 into eight heads of queries, keys and values each: if each
        # head is a matrix, nothing is left to cut there.
        if cut is not None and cut.axis in counting:
            cut = None
        return _numbers(form._replace(columns=columns, cut=cut))
    # Dimension numbers cut one axis alone. If no heads lie along that of the parts, or there are no
    # parts, it is the first axis with heads, which begins as one piece: then parts along another
    # axis stay together.
    if cut is None or cut.axis not in axes:
        cut = _Cut(min(axes), (shape[min(axes)],))
    # Where matrices begin along the axis, and its end. At first these are the parts, of sizes 2, 1,
    # 2, 1 for (2, 1) with two repeats; the loop adds those of heads.
    edges = {0, *itertools.accumulate(cut.sizes * cut.repeats)}
    for run, region in heads:
        # Heads along another axis stay together.
        if run.axis == cut.axis:
            # The columns that have these heads, such as 0 to 127, the queries, of 384; without a
            # mask all of the axis. In these a head begins every `stride` columns, and the last one
            # ends after the last of them. (In a region with gaps, as of queries in q k v q k v, the
            # stride goes from one q to the next, where the parts begin too.)
            mask = dict(region).get(cut.axis, b"\1" * shape[cut.axis])
            with_heads = np.flatnonzero(np.frombuffer(mask, bool))
            edges.update(range(with_heads[0], with_heads[-1] + 2, run.stride))
    sizes = tuple(np.diff(sorted(edges)).tolist())
    return _numbers(form._replace(cut=_Cut(cut.axis, sizes)))
