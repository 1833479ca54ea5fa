"""The rules of reductions: what stays of an array whose entries along some axes become one."""

from collections.abc import Sequence

from muonjax._inspect import follow_logits
from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import NotFollowed, other_axes
from muonjax._inspect.records import Records
from muonjax._inspect.rules import rule
from muonjax._inspect.values import ParameterView, Value, dependent, is_match


@rule("reduce_max argmax reduce_min argmin reduce_and reduce_or reduce_prod")
def _reduce(records: Records, node: Node) -> Sequence[Value]:
    """A maximum and the like: nothing is followed further but the maximum of logits, which softmax
    subtracts, and what is made of its weights, which may divide them as their sum does."""
    (value,) = records.inputs(node)
    records.record_reduced(value.projections, node.params["axes"])
    logits = follow_logits.summed(value)
    if node.name == "reduce_max":
        logits += tuple(
            x._replace(stage="maximum") for x in value.logits if x.stage == "logits"
        )
    result = dependent([value])._replace(logits=logits)
    return [_without_axes(records, node, result)]


@rule("reduce_sum")
def _reduce_sum(records: Records, node: Node) -> Sequence[Value]:
    """The sum over axes of an array. Linear projections go on,
    with their columns along these axes added up."""
    (value,) = records.inputs(node)
    axes = node.params["axes"]
    # sum(q * k) is a product of two activations, queries and keys or two towers. So it counts as a
    # layer: a matrix before it is no output head. Its result may be the scores of an attention.
    if _multiplies_layers(records, node):
        records.layers.add(node.index)
        records.attention.candidates.add(node.index)
        value = value._replace(scores=node.index)
    # The sum of exponentials may be the one by which a softmax divides.
    _record_sum_of_exponentials(records, value, axes)
    linear = []
    for projection in value.projections:
        if projection.is_linear:
            # Results of x[h] @ w[h] that are added up over h, the heads:
            # then axis h of w is rows, and no batch.
            projection.product.added_up.update(projection.layout.runs_along(axes))
            linear.append(projection)
        else:
            # It ends here, as in a norm, which adds up squares. The columns that are added up are
            # recorded, as one part or as groups that are mixed each for itself.
            records.record_reduced([projection], axes)
    # Parameters go on with the axes that are left; one without any ends here, as in a penalty.
    # Logits end too, as their sum is no logit, and so do those of weights @ values (`mixed_by`), as
    # a sum over heads is no attention of one head. The sum of softmax's weights goes on, as it may
    # divide them. `_without_axes` takes the axes away from what goes on.
    result = value._replace(
        views=_reduced_views(value, axes),
        projections=tuple(linear),
        logits=follow_logits.summed(value),
        mixed_by=(),
    )
    return [_without_axes(records, node, result)]


def _multiplies_layers(records: Records, node: Node) -> bool:
    """Whether a sum is a product of two activations, sum_d q[i, d] k[j, d] of q * k,
    as by an einsum."""
    factors = records.graph.maker(node.inputs[0])
    if factors is None or factors.name != "mul":
        return False
    axes = node.params["axes"]
    return is_match([(value, axes) for value in records.inputs(factors)])


def _record_sum_of_exponentials(
    records: Records, value: Value, axes: Sequence[int]
) -> None:
    """Records what a softmax is of, if `value` is made of exponentials of a product: their sum over
    `axes` is taken for the one by which a softmax divides them.

    Along columns of a parameter it is that of a router or of an output head. Any other may be that
    of an attention: its product becomes a candidate, and if the exponentials multiply values but
    can't be followed, the attention is listed and refused (`Records.record_weights`).
    """
    # The number of the operation x @ w or queries @ keys.T whose result was exponentiated; -1 if
    # there is none.
    product = value.exponential_of
    if product < 0:
        return
    # Whether it is a layer, which is recorded by its operation and the number of each parameter
    # that it multiplies by: 0 is the first one.
    is_layer = (product, 0) in records.uses.products
    # The columns of this layer, if they are followed to here; a product of two activations has none
    # of its own.
    projections = [p for p in value.projections if p.product.use.node == product]
    # softmax(x @ w) along the columns of w
    if any(p.layout.runs_along(axes) for p in projections):
        records.attention.routers.add(product)
    # A layer, x @ queries.T of learned queries, if the sum goes over x. Or no layer: queries times
    # frozen keys, x @ (queries @ w).T, whose factors are left to names, or queries times keys,
    # which are a candidate already. Left out is a layer whose projection was lost: the sum may go
    # along its columns.
    elif projections or not is_layer:
        records.attention.candidates.add(product)


def _reduced_views(value: Value, axes: Sequence[int]) -> tuple[ParameterView, ...]:
    """The parameters in a sum over `axes` of parameters multiplied by numbers or by each other.

    sum_e share[e] * w[e, i, j] is a mixture of experts: w goes on as the matrix [i, j] of each
    expert, as after a loop over them. A parameter ends here if it is summed over all its axes,
    as in a norm or a penalty.

    Raises:
      NotFollowed: The parameters keep different axes: sum_k a[i, k] * b[k, j] is a matrix product,
        in which k is no axis that counts matrices. Or the sum goes over an axis along which a
        parameter was put together with other arrays (`Layout.visit`).
    """
    reduced = []
    kept_sets = set()
    for view in value.views:
        # The axes of the array along which the parameter differs still after the sum.
        kept = view.layout.varying.difference(axes)
        if kept:
            # One entry is left along `axes`, whose positions are noted as a loop's
            # (`Layout.loops`): they count matrices.
            reduced.append(view._replace(layout=view.layout.visit(axes)))
            kept_sets.add(kept)
    if len(kept_sets) > 1:
        raise NotFollowed
    return tuple(reduced)


def _without_axes(records: Records, node: Node, value: Value) -> Value:
    """A value with the axes of a reduction added up, and gone."""
    old, new = records.shapes(node)
    axes = node.params["axes"]
    kept = tuple(other_axes(len(old), axes))
    return value.map(lambda layout: layout.add_up(axes).pick(kept, new))
