"""The rules of reductions: what stays of an array whose entries along some axes become one."""

from __future__ import annotations

from collections.abc import Sequence

from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import NotFollowed, other_axes
from muonjax._inspect.records import Records
from muonjax._inspect.rules import rule
from muonjax._inspect.values import ParameterView, Value, dependent, is_match


@rule("reduce_max argmax reduce_min argmin reduce_and reduce_or reduce_prod")
def _reduce(records: Records, node: Node) -> Sequence[Value]:
    """All but the maximum of logits is not followed further."""
    (value,) = records.inputs(node)
    records.record_reduced(value.projections, node.params["axes"])
    result = dependent([value])
    if node.name == "reduce_max" and value.logits and value.logits[0].stage == "logits":
        maxima = tuple(x._replace(stage="per query") for x in value.logits)
        result = result._replace(logits=maxima)
    return [_without_axes(records, node, result)]


@rule("reduce_sum")
def _reduce_sum(records: Records, node: Node) -> Sequence[Value]:
    """A sum over axes. Linear projections are followed on, with their columns along these axes added up."""
    (value,), axes = records.inputs(node), node.params["axes"]
    if _multiplies_layers(records, node):
        records.layers.products.add(node.index)
        records.attention.two_sided.add(node.index)
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
    return [_without_axes(records, node, result)]


def _multiplies_layers(records: Records, node: Node) -> bool:
    """Whether a sum is a product of two activations, sum_d q[i, d] k[j, d] of q * k, as by an einsum."""
    factors = records.graph.maker(node.inputs[0])
    if factors is None or factors.name != "mul":
        return False
    axes = node.params["axes"]
    return is_match([(value, axes) for value in records.inputs(factors)])


def _record_sum_of_exponentials(
    records: Records, value: Value, axes: Sequence[int]
) -> None:
    """Records that a sum normalizes the exponentials of a product, as a softmax does, if `value` is such exponentials.

    A softmax along the columns of a parameter is that of a router or of an output head, not of attention.
    """
    product = value.exponential_of
    if product < 0:
        return
    # A layer has an entry for each parameter that its weights are a sum of, 0 for the first.
    has_parameter = (product, 0) in records.uses.products
    projections = [p for p in value.projections if p.product.use.node == product]
    if any(p.layout.runs_along(axes) for p in projections):
        records.attention.routers.add(product)
    # Without its projection nothing says whether a product with a parameter has its columns along these axes.
    elif projections or not has_parameter:
        records.attention.summed_exponentials.add(product)


def _reduced_views(value: Value, axes: Sequence[int]) -> tuple[ParameterView, ...]:
    """The parameters in a sum over `axes` of parameters multiplied by numbers or by each other.

    They are a mixture, as sum_e share[e] * w[e, i, j] of experts, which a loop visits. Nothing is left of a parameter
    that is summed over all its axes, as in a norm or a penalty, or over none.

    Raises:
      NotFollowed: The parameters keep different axes, as the factors in sum_k a[i, k] * b[k, j].
    """
    reduced = []
    kept_sets = set()
    for view in value.views:
        kept = view.layout.varying.difference(axes)
        if kept and view.layout.runs_along(axes):
            reduced.append(view._replace(layout=view.layout.visit(axes)))
            kept_sets.add(kept)
    if len(kept_sets) > 1:
        raise NotFollowed
    return tuple(reduced)


def _without_axes(records: Records, node: Node, value: Value) -> Value:
    """A value with the axes of a reduction added up, and gone."""
    old, new = records.graph.shapes(node)
    axes = node.params["axes"]
    kept = tuple(other_axes(len(old), axes))
    return value.map(lambda layout: layout.add_up(axes).pick(kept, new))
