"""The rules of reductions: what stays of an array whose entries along some axes become one."""

from __future__ import annotations

from collections.abc import Sequence

from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Node
from muonjax._inspect.layout import Layout
from muonjax._inspect.rules import rule
from muonjax._inspect.values import ParameterView, Value, dependent


@rule("reduce_max argmax reduce_min argmin reduce_and reduce_or reduce_prod")
def _reduce(walk: Walk, node: Node) -> Sequence[Value]:
    """All but the maximum of logits is not followed further."""
    (value,) = walk.inputs(node)
    walk.record_reduced(value.projections, node.params["axes"])
    result = dependent([value])
    if node.name == "reduce_max" and value.logits and value.logits[0].stage == "logits":
        result = result._replace(logits=(value.logits[0]._replace(stage="largest"),))
    return [_without(result, node.params["axes"])]


@rule("reduce_sum")
def _reduce_sum(walk: Walk, node: Node) -> Sequence[Value]:
    """A sum is linear: projections stay what they are, with some of their columns added up."""
    (value,), axes = walk.inputs(node), node.params["axes"]
    factors = walk.entrywise.get(node.inputs[0], ())
    summed = {factor.product for factor in factors if factor.layout.runs_along(axes)}
    if len(summed) > 1:
        # sum_d q[i, d] k[j, d]: a product of two activations, as by an einsum.
        walk.layers.products.add(node.index)
        value = value._replace(scores=node.index)
    _record_sum_of_exponentials(walk, value, axes)
    linear, others = [], []
    for projection in value.projections:
        (linear if projection.is_linear else others).append(projection)
    walk.record_reduced(others, axes)
    for projection in linear:
        projection.product.added_up.update(projection.layout.runs_along(axes))
    totals = [
        logits._replace(stage="largest") for logits in value.logits if logits.stage == "weights"
    ]
    views = _reduced_views(value, axes)
    result = value._replace(views=views, projections=tuple(linear), logits=tuple(totals))
    return [_without(result, axes)]


def _record_sum_of_exponentials(walk: Walk, value: Value, axes: Sequence[int]) -> None:
    """Records that a sum normalizes the exponentials of a product, as a softmax does.

    A softmax along the columns of a parameter is that of a router or of an output head, not of attention.
    """
    product = value.exponential_of
    projections = [p for p in value.projections if p.product.use.node == product]
    if any(p.layout.runs_along(axes) for p in projections):
        walk.attention.routers.add(product)
    elif projections or (product, 0) not in walk.uses.products:
        walk.attention.summed_exponentials.add(product)


def _reduced_views(value: Value, axes: Sequence[int]) -> tuple[ParameterView, ...]:
    """The parameters in a sum over `axes`, as a mixture of several experts' or a product of two.

    Nothing is left where all axes of a parameter are summed: in a norm or a penalty.
    """
    views = []
    kept_axes = set()
    for view in value.views:
        kept = view.layout.varying.difference(axes)
        if view.layout.runs_along(axes) and kept:
            views.append(view)
            kept_axes.add(kept)
    # sum_k a[i, k] b[k, j]: two factors of one matrix, which keep different axes.
    are_factors = len(kept_axes) > 1
    reduced = []
    for k, view in enumerate(views):
        summed = view.layout.runs_along(axes)
        if not are_factors:
            reduced.append(view._replace(layout=view.layout.visit(axes)))
        elif k == 0:
            reduced.append(view._replace(inner=(*view.inner, summed)))
        else:
            reduced.append(view._replace(inner=(summed, *view.inner)))
    return tuple(reduced)


def _without(value: Value, axes: Sequence[int]) -> Value:
    """A value with these axes added up, and gone."""

    def reduced(layout: Layout) -> Layout:
        left = tuple(axis for axis in range(len(layout.shape)) if axis not in axes)
        shape = tuple(layout.shape[axis] for axis in left)
        return layout.add_up(axes).pick(left, shape)

    return value.map(reduced)
