"""The rules of products: by a parameter, of two parameters, of two activations, and convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from muonjax._inspect import softmax
from muonjax._inspect.entrywise import after_nonlinearity, entrywise, rule
from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Node
from muonjax._inspect.layout import whole
from muonjax._inspect.moves import looked_up
from muonjax._inspect.values import (
    DATA,
    FROZEN,
    MULTIPLIED,
    NOISE,
    PARAMETER,
    AxisFact,
    Logits,
    Operand,
    Projection,
    Value,
    dependent,
)


@rule("dot_general")
def _dot(walk: Walk, node: Node) -> Sequence[Value]:
    sums, batches = node.params["dimension_numbers"]
    ranks = [len(walk.shape(x)) for x in node.inputs]
    left, right = map(Operand, walk.inputs(node), node.inputs, ranks, sums, batches)
    left.sources = (*left.batch, *left.free, *[None] * len(right.free))
    right.sources = (*right.batch, *[None] * len(left.free), *right.free)
    left.shape = right.shape = walk.shape(node.outputs[0])
    return [multiply(walk, node, left, right)]


def multiply(walk: Walk, node: Node, left: Operand, right: Operand) -> Value:
    """The product of two arrays, by what they are made of."""
    product = dependent([left.value, right.value])
    if not product.depends_on & PARAMETER:
        return product
    pairs = ((left, right), (right, left))
    if not left.summed:  # entry by entry, written as an einsum
        node = dataclasses.replace(node, name="mul")
        moved = [s.value.repeated(walk.shape(s.array), s.sources, s.shape) for s in (left, right)]
        return entrywise(walk, node, moved)
    for operand, rest in pairs:
        walk.record_unknown(operand.value, rest.value)
    if left.is_parameter and right.is_parameter:
        return _of_parameters(product, left, right)
    for operand, rest in pairs:
        chosen = _chosen_by_one_hot(operand, rest)
        if chosen and operand.is_parameter and operand.value.views:
            values = [operand.value, rest.value]
            return looked_up(walk, node, values, operand.summed, operand.sources, operand.shape)
        walk.record_read(operand.value, chosen, rest.value)
        for projection in operand.value.projections:
            projection.product.batches.update(projection.layout.runs_along(chosen))
    for operand, rest in pairs:
        if operand.is_parameter and operand.value.views:
            return _by_matrix(walk, node, product, operand, rest)
    for operand, rest in pairs:
        if operand.is_matrix:
            return _by_matrix(walk, node, product, operand, rest)
    return _of_activations(walk, node, product, left, right)


def _chosen_by_one_hot(operand: Operand, rest: Operand) -> list[int]:
    """The summed axes of one operand along which the other is one hot."""
    one_hot = rest.value.axes("one hot")
    pairs = zip(operand.summed, rest.summed, strict=True)
    return [axis for axis, axis_of_rest in pairs if axis_of_rest in one_hot]


def _by_matrix(walk: Walk, node: Node, product: Value, operand: Operand, rest: Operand) -> Value:
    if _may_be_learned(operand, rest):
        walk.record_views(node, "", [operand.value])
        if walk.graph.einsum(node.index):
            walk.consumers.add(node.index)
        if rest.value.weights >= 0:
            walk.softmaxes[rest.value.weights] = node.index
        walk.one_sided.add(node.index)
        return product._replace(scores=node.index)
    result = by_parameter(walk, node, product, operand, rest)
    return result._replace(logits=softmax.scaled(node, rest.aligned))


def _may_be_learned(operand: Operand, rest: Operand) -> bool:
    """Whether a product of parameters may be learned queries, keys or values, and no matrix of several factors."""
    sums_over_last = not operand.value.views[0].layout.runs_along(operand.summed)
    return all(t.inner for t in operand.value.views) and (sums_over_last or rest.value.weights >= 0)


def _of_parameters(product: Value, left: Operand, right: Operand) -> Value:
    """Not used yet: a penalty, or factors of a matrix (adapters)."""
    views = []
    for operand in (left, right):
        for t in operand.value.views:
            between = t.layout.runs_along(operand.summed)
            inner = t.inner
            if between:  # the factor on the left sums over its last axis, the other over its first
                inner = (*inner, between) if operand is left else (between, *inner)
            views.append(t._replace(layout=operand.along(t.layout), inner=inner))
    return product._replace(views=tuple(views))


def by_parameter(
    walk: Walk,
    node: Node,
    product: Value,
    operand: Operand,
    rest: Operand,
    kernel: Kernel | None = None,
) -> Value:
    """The product of an activation with a parameter, or with a sum of several; `kernel` is that of a convolution."""
    if rest.value.is_weight:
        walk.record_views(node, "a learned input", [rest.value])
    is_depthwise = kernel is not None and kernel.is_depthwise
    if kernel is None or not rest.value.logits:  # otherwise a convolution of logits
        walk.one_sided.add(node.index)
        product = product._replace(scores=node.index if operand.is_matrix else -1, weights=-1)
    if not is_depthwise:
        walk.record_parts(rest.value.projections)
    projections = _recorded_products(walk, node, operand, rest, kernel)
    if not projections:  # a scale, written as a product
        return product._replace(projections=rest.aligned.projections)
    # An axis that one product gives and the next has as a batch counts experts.
    for projection in rest.value.projections:
        projection.product.batches.update(projection.layout.runs_along(rest.batch))
    if walk.graph.is_stack_of_scalars(rest.array):  # losses and their weights
        return product
    depends_on = product.depends_on | DATA
    for projection in projections:
        depends_on |= projection.product.bit
    if is_depthwise:
        projections += [
            after_nonlinearity(walk, m, node, unmixed=True) for m in rest.aligned.projections
        ]
    walk.consumers.add(node.index)
    return product._replace(projections=tuple(projections), depends_on=depends_on, no_rule=-1)


def _recorded_products(
    walk: Walk, node: Node, operand: Operand, rest: Operand, kernel: Kernel | None
) -> list[Projection]:
    """The projections by the parameters in a sum of several, each recorded as a use."""
    projections = []
    experts = _experts(operand, rest)
    is_patch = _cuts_input(rest)
    groups, is_depthwise = 1, False
    if kernel is not None:
        groups, is_depthwise = kernel.groups, kernel.is_depthwise
        is_patch = is_patch or kernel.is_patch
    for k, t in enumerate(operand.value.views):
        is_product = bool(t.layout.runs_along(operand.summed) or t.inner)
        of_experts = t.layout.runs_along(experts)
        walk.record(
            node,
            "product" if is_product else "other",
            t,
            MULTIPLIED,
            k=k,
            rows=tuple(run for run in operand.rows(t) if run not in of_experts),
            columns=operand.columns(t),
            batch=(*t.layout.runs_along(operand.batch), *t.layout.loops, *of_experts),
            activation=rest.array,
            groups=groups,
            is_depthwise=is_depthwise,
            is_patch=is_patch,
        )
        if is_product:
            projection = Projection(walk.product(node, k), operand.along(t.layout))
            projection.product.is_mixture |= _is_mixture(walk, rest)
            projections.append(projection)
    return projections


def _experts(operand: Operand, rest: Operand) -> list[int]:
    """Summed axes of a parameter that count experts: the activation was gated along them."""
    gated = []
    for axis, axis_of_rest in zip(operand.summed, rest.summed, strict=False):
        for projection in rest.value.projections:
            runs = set(projection.layout.runs_along([axis_of_rest]))
            heads = {run for run, _ in projection.product.heads}
            if runs and runs <= projection.product.batches - heads:
                gated.append(axis)
    return gated if len(set(gated)) < len(operand.summed) else []


def _is_mixture(walk: Walk, operand: Operand) -> bool:
    """Whether a router's weights along some summed axes multiply features along others: a mixture of experts."""
    if operand.value.weights not in walk.routers:
        return False
    shape = walk.shape(operand.array)
    summed = {axis for axis in operand.summed if shape[axis] > 1}
    varying = [projection.layout.varying & summed for projection in operand.value.projections]
    return any(axes and axes < summed for axes in varying) and summed not in varying


def _cuts_input(operand: Operand) -> bool:
    """Whether the sum runs over stretches of two axes of an argument, as over the pixels of a patch."""
    for fact in operand.value.facts:
        if fact.what == "input":
            outside = {run.axis for run in fact.layout.runs_along(operand.free)}
            stretches = {
                run.axis for run in fact.layout.runs_along(operand.summed) if run.stride == 1
            }
            if len(stretches & outside) > 1:
                return True
    return False


def _of_activations(walk: Walk, node: Node, product: Value, left: Operand, right: Operand) -> Value:
    for operand, rest in ((left, right), (right, left)):
        walk.record_contracted(node, operand, is_mixture=rest.value.weights in walk.routers)
    of_a_model = PARAMETER | FROZEN  # heads are heads where the queries and keys do not train
    if left.value.depends_on & of_a_model and right.value.depends_on & of_a_model:
        for operand in (left, right):
            walk.record_parts(operand.value.projections)
            walk.record_heads(operand.value.projections, operand.batch)
    for weights, values in ((left, right), (right, left)):
        _record_weights(walk, node, weights, values)
    if not right.value.depends_on & PARAMETER:
        return _by_constants(walk, node, product, left, right)
    if not left.value.depends_on & PARAMETER:
        return _by_constants(walk, node, product, right, left)
    return _of_two_activations(walk, node, product, left, right)


def _record_weights(walk: Walk, node: Node, weights: Operand, values: Operand) -> None:
    """The attentions of which this sums over the keys, several where softmaxes are subtracted."""
    attentions = _read_by(weights)
    for logits in attentions:
        walk.record_attention(node, logits, logits.layout.runs_along(weights.summed), values)
    if not attentions or weights.value.no_rule >= 0:
        walk.record_weights(node, weights.value, values.value)


def _read_by(weights: Operand) -> list[Logits]:
    """The softmaxes over whose keys the product sums."""
    softmaxes = [x for x in weights.value.logits if x.stage == "weights"]
    return [x for x in softmaxes if x.layout.runs_along(weights.summed)]


def _of_two_activations(
    walk: Walk, node: Node, product: Value, left: Operand, right: Operand
) -> Value:
    product = product._replace(scores=node.index, weights=-1)
    first, second = left.value, right.value
    sums_features = all(
        m.layout.runs_along(s.summed) for s in (left, right) for m in s.value.projections[:1]
    )
    # Features of two towers are matched entry by entry.
    is_match = first.projections and second.projections and sums_features
    if (left.free and right.free) or (is_match and first.depends_on != second.depends_on):
        walk.consumers.add(node.index)
    has_logits = first.logits or second.logits  # such as softmax's weights with values
    if (first.projections or second.projections) and not has_logits and (left.free or right.free):
        return product._replace(logits=_new_logits(walk, node, left, right))
    return product


def _new_logits(walk: Walk, node: Node, left: Operand, right: Operand) -> tuple[Logits, ...]:
    walk.pairs[node.index] = left, right
    (result,) = node.outputs
    return (Logits(node.index, whole(walk.shape(result)), value=result),)


def _by_constants(walk: Walk, node: Node, product: Value, operand: Operand, rest: Operand) -> Value:
    """An activation times numbers that do not train: a mask, a rotation, a frozen layer, frozen keys or values.

    The result is linear in what the activation is linear in.
    """
    # Weights that this product reads are no logits of what follows.
    attentions = [x.product for x in _read_by(operand)]
    logits = [x for x in softmax.scaled(node, operand.aligned) if x.product not in attentions]
    product = product._replace(projections=operand.added_up.projections, logits=tuple(logits))
    is_layer = _is_frozen_layer(operand, rest)
    einsum = walk.graph.einsum(node.index)
    # Which of its operands an einsum of several multiplies first depends on their sizes.
    is_in_layer = einsum is not None and einsum.is_layer
    if is_layer or (is_in_layer and rest.value.depends_on & (DATA | FROZEN)):
        walk.frozen_layers.add(node.index)
    if is_layer or attentions or (operand.free and rest.free and product.scores < 0):
        walk.one_sided.add(node.index)
        product = product._replace(scores=node.index, weights=-1)
    if is_layer and not operand.value.logits and rest.batch:  # perhaps of queries with frozen keys
        return product._replace(logits=_new_logits(walk, node, operand, rest))
    if is_layer and operand.value.weights < 0:  # softmax's weights are no features of a head
        columns = AxisFact("columns", rest.along(whole(walk.shape(rest.array))), node.index)
        product = product._replace(facts=(columns,))
    return product


def _is_frozen_layer(activation: Operand, other: Operand) -> bool:
    """Whether this is a product of features by a matrix that does not train.

    It is an argument or closed over, drawn at random, or without gradient. Numbers that the function makes itself are
    no layer, nor are labels.
    """
    if not other.value.depends_on & (DATA | FROZEN | NOISE):
        return False
    if not other.free or other.value.axes("one hot"):
        return False
    if other.batch and not activation.free:  # a label for each class
        return False
    projections = activation.value.projections
    # An adjacency matrix sums over nodes, and over no columns of a product.
    return not projections or any(
        projection.layout.runs_along(activation.summed) for projection in projections
    )


class Kernel(NamedTuple):
    """What is different in a convolution."""

    groups: int = 1
    is_depthwise: bool = False  # each group of one feature
    is_patch: bool = False  # of windows that do not overlap


@rule("conv_general_dilated")
def _conv(walk: Walk, node: Node) -> Sequence[Value]:
    params, (x, weight) = node.params, map(walk.shape, node.inputs)
    numbers = params["dimension_numbers"]
    out, into, *window = numbers.rhs_spec
    sources: list[int | None] = [None] * len(weight)
    sources[numbers.out_spec[1]] = out
    features: list[int | None] = [None] * len(weight)
    if x[numbers.lhs_spec[1]] == weight[out]:
        features[numbers.out_spec[1]] = numbers.lhs_spec[1]
    sizes = tuple(weight[axis] for axis in window)
    groups = params["feature_group_count"] * params["batch_group_count"]
    kernel = Kernel(
        groups=groups,
        is_depthwise=groups > 1 and weight[into] == 1,
        is_patch=tuple(params["window_strides"]) == sizes and max(sizes, default=1) > 1,
    )
    left, right = _sides(walk, node, (into, *window), ())
    left.sources, right.sources = features, sources
    return [_by_kernel(walk, node, left, right, kernel)]


@rule("ragged_dot_general")
def _ragged(walk: Walk, node: Node) -> Sequence[Value]:
    """Each expert's matrix times the rows that belong to it."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batch) = numbers.dot_dimension_numbers
    left, right = _sides(walk, node, summed, (*batch, *numbers.rhs_group_dimensions))
    left.sources = [None] * len(left.shape)
    right.sources = [None] * (len(right.shape) - len(right.free)) + list(right.free)
    return [_by_kernel(walk, node, left, right)]


def _sides(
    walk: Walk, node: Node, summed: Sequence[int], batch: Sequence[int]
) -> tuple[Operand, Operand]:
    """The operands, the second of which has the parameters; of the first only features that stay are followed."""
    values, ranks = walk.inputs(node), [len(walk.shape(x)) for x in node.inputs]
    left = Operand(values[0], node.inputs[0], ranks[0], (), ())
    right = Operand(values[1], node.inputs[1], ranks[1], summed, batch)
    left.shape = right.shape = walk.shape(node.outputs[0])
    return left, right


def _by_kernel(
    walk: Walk, node: Node, left: Operand, right: Operand, kernel: Kernel | None = None
) -> Value:
    values = walk.inputs(node)
    product, weights = dependent(values), right.value
    has_groups = kernel is not None and kernel.groups > 1
    if weights.views and (weights.is_weight or not has_groups):
        walk.record_unknown(weights, left.value)
        return by_parameter(walk, node, product, right, left, kernel)
    # A kernel that does not train, or one for each example.
    walk.record_views(node, node.name, values, "unknown")
    if weights.depends_on & PARAMETER:
        walk.consumers.add(node.index)
    elif product.depends_on & PARAMETER and not (kernel and kernel.is_depthwise):
        walk.frozen_layers.add(node.index)
    return product
