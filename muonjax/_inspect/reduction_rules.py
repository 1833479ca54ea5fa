"""The rules of reductions: what stays of an array whose entries along some axes become one."""

from __future__ import annotations

from collections.abc import Sequence

from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import Layout
from muonjax._inspect.records import Records
from muonjax._inspect.rules import rule
from muonjax._inspect.values import ParameterView, Value, dependent


@rule("reduce_max argmax reduce_min argmin reduce_and reduce_or reduce_prod")
def _reduce(records: Records, node: Node) -> Sequence[Value]:
    """All but the maximum of logits is not followed further."""
    (value,) = records.inputs(node)
    records.record_reduced(value.projections, node.params["axes"])
    result = dependent([value])
    if node.name == "reduce_max" and value.logits and value.logits[0].stage == "logits":
        result = result._replace(logits=(value.logits[0]._replace(stage="per query"),))
    return [_without_axes(result, node.params["axes"])]


@rule("reduce_sum")
def _reduce_sum(records: Records, node: Node) -> Sequence[Value]:
    """A sum over axes. Linear projections are followed on, with their columns along these axes added up."""
    (value,), axes = records.inputs(node), node.params["axes"]
    # If the operand is a product q * k entry by entry: the projections in q and in k.
    factors = records.entrywise.get(node.inputs[0], ())
    summed = {factor.product for factor in factors if factor.layout.runs_along(axes)}
    if len(summed) > 1:
        # sum_d q[i, d] k[j, d]: a product of two activations, as by an einsum.
        records.layers.products.add(node.index)
        value = value._replace(scores=node.index)
    _record_sum_of_exponentials(records, value, axes)
    linear = []
    for projection in value.projections:
        if projection.is_linear:
            projection.product.added_up.update(projection.layout.runs_along(axes))
            linear.append(projection)
        else:
            records.record_reduced([projection], axes)
    # The sum of softmax's weights is one number for each query, as the maximum is. Added logits are not followed.
    totals = [
        logits._replace(stage="per query")
        for logits in value.logits
        if logits.stage == "weights"
    ]
    views = _reduced_views(value, axes)
    result = value._replace(
        views=views, projections=tuple(linear), logits=tuple(totals)
    )
    return [_without_axes(result, axes)]


def _record_sum_of_exponentials(
    records: Records, value: Value, axes: Sequence[int]
) -> None:
    """Records that a sum normalizes the exponentials of a product, as a softmax does, if `value` is such exponentials.

    A softmax along the columns of a parameter is that of a router or of an output head, not of attention.
    """
    product = value.exponential_of
    if product < 0:
        return
    has_parameter = (product, 0) in records.uses.products
    projections = [p for p in value.projections if p.product.use.node == product]
    if any(p.layout.runs_along(axes) for p in projections):
        records.attention.routers.add(product)
    # Without its projection nothing says whether a product with a parameter has its columns along these axes.
    elif projections or not has_parameter:
        records.attention.summed_exponentials.add(product)


def _reduced_views(value: Value, axes: Sequence[int]) -> tuple[ParameterView, ...]:
    """The parameters in a sum over `axes` of parameters multiplied by numbers or by each other.

    - Those that keep the same axes are a mixture, as sum_e share[e] * w[e, i, j] of experts: a loop visits them.
    - Those that keep different axes are factors of one matrix, sum_k a[i, k] * b[k, j]. The first sums over its last
      axis, the others over their first.

    Nothing is left of a parameter that is summed over all its axes, as in a norm or a penalty, or over none. Views that
    keep different axes can't come from a sum such as kernel + bias, of which `entrywise_rules` keeps the kernel alone.
    """
    summed = []
    kept_sets = set()
    for view in value.views:
        runs = view.layout.runs_along(axes)
        kept = view.layout.varying.difference(axes)
        if runs and kept:
            summed.append((view, runs))
            kept_sets.add(kept)
    are_factors = len(kept_sets) > 1
    reduced = []
    for k, (view, runs) in enumerate(summed):
        if not are_factors:
            reduced.append(view._replace(layout=view.layout.visit(axes)))
        elif k == 0:
            reduced.append(view._replace(inner=(*view.inner, runs)))
        else:
            reduced.append(view._replace(inner=(runs, *view.inner)))
    return tuple(reduced)


def _without_axes(value: Value, axes: Sequence[int]) -> Value:
    """A value with these axes added up, and gone."""

    def reduced(layout: Layout) -> Layout:
        left = tuple(axis for axis in range(len(layout.shape)) if axis not in axes)
        shape = tuple(layout.shape[axis] for axis in left)
        return layout.add_up(axes).pick(left, shape)

    return value.map(reduced)
