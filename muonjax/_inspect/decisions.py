"""Decide from its uses which optimizer takes a parameter, and as which matrices.

The first that holds of these, each with its line: whole numbers; never used; used by an operation that is not followed,
and left to names; looked up; in no product; an output head of a loss; in products with vectors alone; in a last
product without a loss, and left to names; an embedding of patches. All others are matrices, if their products agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import PRODUCTS
from muonjax._inspect.layout import Layout, Region, Run, sums
from muonjax._inspect.softmax import EXPONENTIALS
from muonjax._inspect.values import OF_PRODUCTS, PRODUCT_OF_PARAMETERS, Use, grouped
from muonjax._matrices.matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    one_or_several,
)


class Decision(NamedTuple):
    """What becomes of one parameter."""

    numbers: DimensionNumbers | None  # None: Adam
    why: str
    per_head: DimensionNumbers | None = None  # with a matrix for each attention head
    problem: str = ""  # why it can't be decided: two uses with their lines
    by_names: bool = False  # nothing is decided; routing by names may
    trains: bool = True  # it has a gradient, and meets data
    is_vector: bool = (
        False  # a bias, a gain, but for axes that count layers: weight decay is not for it
    )
    doubt: str = ""  # what can't be told, for a warning


_Place: TypeAlias = Literal["head", "layer", "frozen layer", "inner"]
_Cut: TypeAlias = tuple[
    int, tuple[int, ...], int
]  # axis, sizes of the parts, how often they repeat


class _Form(NamedTuple):
    """The axes of a parameter in one product."""

    rows: frozenset[int]
    columns: frozenset[int]
    cut: _Cut | None = None


class _Ends(NamedTuple):
    """Which values go on from where they are, over operations that are no products."""

    consumed: set[int]  # to another product
    frozen: set[int]  # to a product by a matrix that does not train
    # To such a product before another one, or before an exponential: no transform of the outputs.
    layers: set[int]
    backward: set[int]  # to the backward pass of a gradient that the function takes
    direct: set[int]  # to what the function returns
    no_rule: dict[int, int]  # to an operation without a rule, which may be a product


def _ends(walk: Walk) -> _Ends:
    graph = walk.graph

    def numbers(values: Iterable[int]) -> list[int]:
        """Indices, as of an argmax, end a path."""
        return [x for x in values if graph.is_followed(x)]

    def through(i: int) -> list[int]:
        node = graph.nodes[i]
        return (
            []
            if node.passes == "backward" or node.name == "stop_gradient"
            else numbers(node.inputs)
        )

    def before(operations: Iterable[int]) -> set[int]:
        """The values that these operations take, and all before them."""
        return graph.upstream(
            [x for i in operations for x in numbers(graph.nodes[i].inputs)], through
        )

    def directly(i: int) -> list[int]:
        return [] if i in products else through(i)

    backward = {i for i in graph.trained if graph.nodes[i].passes == "backward"}
    consumers = walk.consumers & graph.trained - backward
    frozen = walk.frozen_layers & graph.trained - backward
    inside = before(
        i for i in graph.trained - backward if graph.nodes[i].name in (*PRODUCTS, *EXPONENTIALS)
    )
    layers = {i for i in frozen | walk.frozen_attentions if graph.nodes[i].outputs[0] in inside}
    products = consumers | frozen | layers
    return _Ends(
        consumed=before(consumers),
        frozen=before(frozen),
        layers=before(layers),
        backward=before(backward),
        direct=graph.upstream(numbers(graph.outputs), directly),
        no_rule={x: i for i in sorted(walk.no_rule) for x in before([i])},
    )


def decide(walk: Walk, is_loss: bool) -> list[Decision]:
    """One decision per parameter."""
    ends = _ends(walk)
    uses = [use for use in walk.uses.values() if use.node in walk.graph.trained]
    by_leaf = grouped((use.term.leaf, use) for use in uses)
    return [
        _decide(walk, ends, k, shape, by_leaf.get(k, []), is_loss)
        for k, shape in enumerate(walk.shapes)
    ]


def _decide(
    walk: Walk, ends: _Ends, leaf: int, shape: Any, uses: list[Use], is_loss: bool
) -> Decision:
    graph = walk.graph

    def adam(why: str, node: int, by_names: bool = False) -> Decision:
        return Decision(None, f"{why}: {graph.line(node)}", by_names=by_names)

    def place(use: Use) -> _Place:
        value = graph.nodes[use.node].outputs[0]
        if graph.einsum(use.node):
            _, value = graph.einsum_of(use.node)
        return _place(ends, value, use.node in walk.read)

    if not graph.is_float(graph.parameters[leaf]):
        return Decision(None, "whole numbers")
    uses = [u for u in uses if u.kind != "product" or not u.product.bit & walk.scales[leaf]] or uses
    if not uses:
        return _without_uses(walk, leaf)
    for use in uses:
        if graph.einsum(use.node) and _has_several_weights(walk, use.node):
            return adam("an einsum of several parameters is not followed", use.node, by_names=True)
    if unknown := [u for u in uses if u.kind == "unknown"]:
        return adam(f"{unknown[0].what} is not followed", unknown[0].node, by_names=True)
    products = [u for u in uses if u.kind == "product"]
    visited = {
        run for u in products for run in u.term.layout.loops
    }  # of a matrix: an expert's, an adapter's
    if lookups := [u for u in uses if u.kind == "looked up" and not visited.issuperset(u.rows)]:
        also = f", and multiplied: {graph.line(products[0].node)}" if products else ""
        return Decision(None, f"looked up: {graph.line(lookups[0].node)}{also}")
    if not products:
        if factors := [u for u in uses if u.term.inner]:
            return adam(f"{PRODUCT_OF_PARAMETERS} is not followed", factors[0].node, by_names=True)
        axes = {run.axis for u in uses for run in u.term.layout.runs if len(run.at) > 4}
        found = adam(uses[0].what, uses[0].node, by_names=uses[0].kind == "alone")
        return found._replace(is_vector=len(axes) < 2)
    places = {place(u) for u in products}
    if is_loss and places <= {"head", "inner"}:
        for value in (graph.nodes[u.node].outputs[0] for u in products):
            if (i := ends.no_rule.get(value)) is not None:
                return adam(f"{graph.nodes[i].name} is not followed", i, by_names=True)
        if "head" in places:
            return adam("an output head, as no product follows it", products[0].node)
        inner = adam("used for a gradient inside of the function alone", products[0].node)
        return inner._replace(doubt=inner.why)
    matrices = [u for u in products if u.rows and u.columns and not u.is_depthwise]
    if not matrices:
        why = "a depthwise convolution" if products[0].is_depthwise else "multiplied by vectors"
        return adam(why, products[0].node)
    if not is_loss and all(place(u) == "head" for u in matrices):
        return adam("last product", matrices[0].node, by_names=True)
    if all(u.is_patch and walk.values[u.operand].depends_on < OF_PRODUCTS for u in matrices):
        return adam("an embedding of patches, windows that do not overlap", matrices[0].node)
    decision = _matrix(walk, leaf, shape, matrices)
    if is_loss and "layer" not in places:
        doubt = "what follows it does not train: a frozen layer, or a transform of the outputs"
        decision = decision._replace(doubt=f"{doubt}: {graph.line(matrices[0].node)}")
    return decision


def _has_several_weights(walk: Walk, operation: int) -> bool:
    """Whether an einsum takes several arrays that depend on no argument, and may multiply them by each other first."""
    graph = walk.graph
    operands, _ = graph.einsum_of(operation)
    data = {*graph.arguments, *graph.constants} - graph.closed_over.keys()
    inputs = [graph.upstream([x], lambda i: graph.nodes[i].inputs) for x in operands]
    return sum(data.isdisjoint(x) for x in inputs) > 1


def _place(ends: _Ends, value: int, is_read: bool) -> _Place:
    """Where in the model the result of a product by a parameter is; labels choose one of its columns if `is_read`."""
    if value in ends.direct and is_read:
        return "head"
    if value in ends.consumed or value in ends.layers:
        return "layer"
    if value in ends.frozen:
        return "frozen layer"
    return "inner" if value in ends.backward and value not in ends.direct else "head"


def _without_uses(walk: Walk, leaf: int) -> Decision:
    """Why nothing that trains uses a parameter."""
    graph = walk.graph
    readers = [i for i in graph.readers[graph.parameters[leaf]] if i in graph.live]
    if not readers:
        why = "never used"
    elif graph.trained.isdisjoint(readers):
        why = f"no gradient, by stop_gradient: {graph.line(readers[0])}"
    else:
        why = f"used without data, as in a penalty: {graph.line(readers[0])}"
    return Decision(None, why, trains=False)


def _matrix(walk: Walk, leaf: int, shape: tuple[int, ...], uses: Sequence[Use]) -> Decision:
    forms: dict[_Form, Use] = {}
    for use in uses:
        form = _form(walk, leaf, shape, use)
        if isinstance(form, str):
            return Decision(None, form, problem=form)
        turned = form._replace(rows=form.columns, columns=form.rows)
        if turned not in forms:
            forms.setdefault(form, use)
    if len(forms) > 1:
        first, second, *_ = (
            f"{_described(x)} in {walk.graph.line(u.node)}" for x, u in forms.items()
        )
        problem = f"{first}, but {second}"
        return Decision(None, problem, problem=problem)
    ((form, use),) = forms.items()
    if form.cut is None:
        slices = {u.term.layout.region for u in uses}
        form = form._replace(cut=_parts(slices, shape, form.columns, form.columns))
    numbers = _numbers(form)
    heads = {(a, region) for u in uses for a, region in u.product.heads if a.axis in form.columns}
    per_head = _numbers_per_head(form, shape, heads) if heads else numbers
    return Decision(numbers, f"{_described(form)}: {walk.graph.line(use.node)}", per_head)


def _described(form: _Form) -> str:
    axes = sorted(form.rows)
    parts = f", in {len(form.cut[1])} parts" if form.cut else ""
    return (
        f"multiplied along ax{'is' if len(axes) == 1 else 'es'} {', '.join(map(str, axes))}{parts}"
    )


def _axes(atoms: Iterable[Run]) -> frozenset[int]:
    return frozenset(a.axis for a in atoms)


def _form(walk: Walk, leaf: int, shape: tuple[int, ...], use: Use) -> _Form | str:
    """Rows, columns and parts of a parameter in one product; a text says what can't be expressed."""
    product = use.product
    rows, columns, batch = set(use.rows), set(use.columns), {a for a in use.batch if a.axis >= 0}
    if product.contracted < columns:
        rows, columns = rows | product.contracted, columns - product.contracted
    heads, experts = {a for a, _ in product.heads}, product.batches
    summed, counting = batch & product.added_up, columns & (experts - heads)
    counting = counting if counting != columns else set()
    slices = walk.summed_slices[leaf]
    batch = {a for a in (batch - summed) | counting if a.axis not in slices}
    row_axes, column_axes = _axes(rows | summed) | slices, _axes(columns - counting)
    if row_axes & column_axes:
        return f"one axis of it is both summed and given: {walk.graph.line(use.node)}"
    form = _Form(row_axes, column_axes)
    if _axes(batch) & (row_axes | column_axes):
        return f"matrices inside of an axis: {walk.graph.line(use.node)}"
    if use.groups > 1:
        axis = next(iter(column_axes))
        return form._replace(cut=(axis, (shape[axis] // use.groups,) * use.groups, 1))
    sliced = {axis for axis, _ in use.term.layout.region}
    cut = _parts(product.parts, shape, column_axes, sliced, product.mixed)
    if cut is None or cut[1] != (1,) * shape[cut[0]]:
        return form._replace(cut=cut)
    others = column_axes - {
        cut[0]
    }  # an axis that counts query, key and value; vectors stay one matrix
    return form._replace(columns=others or column_axes)


def _parts(
    regions: Collection[Region], shape: tuple[int, ...], columns: frozenset[int], sliced: Collection[int],
    mixed: Iterable[Layout] = (),
) -> _Cut | None:  # fmt: skip
    """Along which axis, and into which sizes, columns are cut for different purposes.

    Along an axis that is `sliced` before, the regions must be all of it.
    """
    for axis in sorted(columns):
        masks = {dict(region).get(axis, b"") for region in regions}
        if b"" in masks or len(masks) < 2 or (found := _periodic(masks)) is None:
            continue
        period, runs = found
        is_mixed = any(_divides(stop, axis, layout) for layout in mixed for _, stop in runs)
        covers = sum(stop - start for start, stop in runs) == period
        if not is_mixed and (covers or axis not in sliced):
            edges = sorted({0, period, *itertools.chain(*runs)})  # with columns of no use
            return axis, tuple(b - a for a, b in itertools.pairwise(edges)), shape[axis] // period
    return None


def _periodic(masks: Collection[bytes]) -> tuple[int, list[tuple[int, int]]] | None:
    """The period of parts of an axis, and where each begins and ends in it; None if one has gaps, or two overlap."""
    period = math.lcm(*map(len, masks))
    each = np.array([np.resize(np.frombuffer(mask, bool), period) for mask in masks])
    runs = [(int(mask.argmax()), period - int(mask[::-1].argmax())) for mask in each]
    if each.sum(0).max() > 1 or [stop - start for start, stop in runs] != each.sum(1).tolist():
        return None
    return period, runs


def _divides(position: int, axis: int, layout: Layout) -> bool:
    """Whether a cut at this position has entries on both sides that are mixed."""
    starts = sums(run for run in layout.runs if run.axis == axis)
    mixed = sums(run for run in layout.taken if run.axis == axis)
    return bool(((starts + mixed.min() < position) & (position <= starts + mixed.max())).any())


def _numbers(form: _Form) -> DimensionNumbers:
    rows, columns = one_or_several(sorted(form.rows)), one_or_several(sorted(form.columns))
    if form.cut is None:
        return MuonDimensionNumbers(rows, columns)
    axis, sizes, repeats = form.cut
    parts = len(sizes) if len(set(sizes)) == 1 else sizes
    return FusedDimensionNumbers(rows, columns, parts, axis, repeats)


def _numbers_per_head(
    form: _Form, shape: tuple[int, ...], heads: set[tuple[Run, Region]]
) -> DimensionNumbers:
    columns = form.columns - {a.axis for a, _ in heads if a.stride == 1}
    if columns != form.columns:  # but with a number for each head: a vector has no orthogonal form
        return _numbers(form._replace(columns=columns or form.columns))
    axes = {a.axis for a, _ in heads}
    whole = min(axes), (shape[min(axes)],), 1
    axis, sizes, repeats = form.cut if form.cut and form.cut[0] in axes else whole
    edges = {0, *itertools.accumulate(sizes * repeats)}
    for a, mask in ((a, dict(region).get(axis, b"\1")) for a, region in heads if a.axis == axis):
        inside = np.flatnonzero(np.resize(np.frombuffer(mask, bool), shape[axis]))
        edges.update(range(inside[0], inside[-1] + 1, a.stride))
    sizes = tuple(stop - start for start, stop in itertools.pairwise(sorted(edges)))
    return _numbers(form._replace(cut=(axis, sizes, 1)))
