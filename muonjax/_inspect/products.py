"""The rules of products: by a parameter, of two parameters, of two activations, by frozen numbers; convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from muonjax._inspect import softmax
from muonjax._inspect.entrywise import after_nonlinearity, entrywise
from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Node
from muonjax._inspect.moves import looked_up
from muonjax._inspect.positions import whole
from muonjax._inspect.rules import rule
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
    grouped,
)


@rule("dot_general")
def _dot(walk: Walk, node: Node) -> Sequence[Value]:
    """The result has the batch axes, then the free axes of the left operand, then those of the right one."""
    sums, batches = node.params["dimension_numbers"]
    ranks = [len(walk.shape(x)) for x in node.inputs]
    left, right = map(Operand, walk.inputs(node), node.inputs, ranks, sums, batches)
    left.sources = (*left.batch, *left.free, *[None] * len(right.free))
    right.sources = (*right.batch, *[None] * len(left.free), *right.free)
    left.shape = right.shape = walk.shape(node.outputs[0])
    return [_multiply(walk, node, left, right)]


def _multiply(walk: Walk, node: Node, left: Operand, right: Operand) -> Value:
    """The product of two arrays, by what they are made of.

    The order counts: a one-hot operand makes a product a look-up; an operand of parameters alone makes it a layer; all
    else is a product of two activations, or of an activation with numbers that do not train.
    """
    # So far what it depends on.
    product = dependent([left.value, right.value])
    if not product.depends_on & PARAMETER:
        return product
    if not left.summed:
        return _entry_by_entry(walk, node, left, right)
    # Each operand with the other one.
    pairs = ((left, right), (right, left))
    for operand, other in pairs:
        walk.record_unknown_factor(operand.value, other.value)
    if left.is_parameter and right.is_parameter:
        return _of_parameters(product, left, right)
    for operand, other in pairs:
        chosen = _chosen_by_one_hot(operand, other)
        if chosen and operand.is_parameter and operand.value.views:
            values = [operand.value, other.value]
            return looked_up(walk, node, values, operand.sources)
        walk.record_choice_by_labels(operand.value, chosen, other.value)
        # One hot along experts: the product takes the columns of one of them.
        for projection in operand.value.projections:
            projection.product.batches.update(projection.layout.runs_along(chosen))
    for operand, other in pairs:
        if operand.is_parameter and operand.value.views:
            return _by_matrix(walk, node, product, operand, other)
    # An activation plus a matrix, or one of several matrices that data choose, counts as a matrix as well.
    for operand, other in pairs:
        if operand.is_matrix:
            return _by_matrix(walk, node, product, operand, other)
    return _of_activations(walk, node, product, left, right)


def _entry_by_entry(walk: Walk, node: Node, left: Operand, right: Operand) -> Value:
    """A product that sums over nothing, as an einsum `bi,i->bi` is, by the rule of `mul`."""
    repeated = []
    for operand in (left, right):
        old = walk.shape(operand.array)
        repeated.append(operand.value.repeated(old, operand.sources, operand.shape))
    return entrywise(walk, dataclasses.replace(node, name="mul"), repeated)


def _chosen_by_one_hot(operand: Operand, other: Operand) -> list[int]:
    """The summed axes of one operand along which the other is one hot."""
    one_hot = other.value.axes("one hot")
    pairs = zip(operand.summed, other.summed, strict=True)
    return [axis for axis, axis_of_other in pairs if axis_of_other in one_hot]


def _by_matrix(
    walk: Walk, node: Node, product: Value, operand: Operand, other: Operand
) -> Value:
    """An array times an operand that is made of parameters."""
    attention = walk.attention
    scores = other.value.exponential_of
    has_weights = scores in attention.summed_exponentials or scores in attention.routers
    if _may_be_learned_input(operand, has_weights):
        walk.record_views(node, "", [operand.value])
        if has_weights:
            attention.readers[scores] = node.index
        attention.one_sided.add(node.index)
        return product._replace(scores=node.index)
    return _by_parameter(walk, node, product, operand, other)


def _may_be_learned_input(operand: Operand, has_weights: bool) -> bool:
    """Whether a product of parameters may be learned queries, keys or values, and no matrix of several factors.

    Learned queries times a matrix, q @ w, multiply keys along their last axis. Learned values multiply softmax's
    weights: `has_weights` says that the other operand may be these.
    """
    sums_over_last = not operand.value.views[0].layout.runs_along(operand.summed)
    has_factors = all(view.inner for view in operand.value.views)
    return has_factors and (sums_over_last or has_weights)


def _of_parameters(product: Value, left: Operand, right: Operand) -> Value:
    """A product of parameters that meets no data yet: a penalty, or factors of a matrix (adapters)."""
    views = []
    for operand in (left, right):
        for view in operand.value.views:
            between = view.layout.runs_along(operand.summed)
            inner = view.inner
            if between:  # the factor on the left sums over its last axis, the other over its first
                inner = (*inner, between) if operand is left else (between, *inner)
            views.append(view._replace(layout=operand.along(view.layout), inner=inner))
    return product._replace(views=tuple(views))


# Products by a parameter.


class Kernel(NamedTuple):
    """What is different in a convolution."""

    groups: int = 1
    is_depthwise: bool = False  # each group of one feature
    is_patch: bool = False  # of windows that do not overlap


NO_KERNEL = Kernel()


def _by_parameter(
    walk: Walk,
    node: Node,
    product: Value,
    operand: Operand,
    other: Operand,
    kernel: Kernel = NO_KERNEL,
) -> Value:
    """The product of an activation, `other`, with a parameter or a sum of several, `operand`.

    `product` has so far what it depends on.
    """
    if other.value.is_weight:
        walk.record_views(node, "a learned input", [other.value])
    # Scores that the activation was made of went through a layer, and this product may be one of learned queries or
    # keys: the scores are its own from here on. Softmax's weights stay what they are, as those of talking heads.
    walk.attention.one_sided.add(node.index)
    product = product._replace(scores=node.index)
    if product.exponential_of not in walk.attention.summed_exponentials:
        product = product._replace(exponential_of=-1)
    # A depthwise convolution takes no columns together.
    if not kernel.is_depthwise:
        walk.record_parts(other.value.projections)
    projections = _recorded_projections(walk, node, operand, other, kernel)
    # It sums over no axis of the parameters: a scale, written as a product.
    if not projections:
        scaled = other.aligned
        return product._replace(
            projections=scaled.projections, logits=softmax.through(node, scaled)
        )
    # An axis that one product gives and the next, by a matrix for each, has as a batch counts experts. With a vector
    # for each, as of learned queries, it counts heads.
    if operand.is_matrix:
        for projection in other.value.projections:
            batches = projection.layout.runs_along(other.batch)
            projection.product.batches.update(batches)
    if walk.graph.is_stack_of_scalars(other.array):  # losses and their weights
        return product
    # A layer gives data: what follows is no parameter, also where its input is learned.
    depends_on = product.depends_on | DATA
    for projection in projections:
        depends_on |= projection.product.bit
    # Each feature of a depthwise convolution still is one column's of the product before.
    if kernel.is_depthwise:
        for projection in other.aligned.projections:
            projections.append(after_nonlinearity(walk, projection, node, unmixed=True))
    walk.layers.products.add(node.index)
    return product._replace(
        projections=tuple(projections), depends_on=depends_on, no_rule=-1
    )


def _recorded_projections(
    walk: Walk, node: Node, operand: Operand, other: Operand, kernel: Kernel
) -> list[Projection]:
    """Records a use of each parameter in `operand`, a sum of several, and returns the projections by them."""
    projections = []
    if operand.value.is_weight:
        _record_slices_of_one(walk, operand.value)
    # A sum over experts, sum_e gate[e] (x[e] @ w[e]), does not make e an axis of rows: it counts matrices.
    experts = _experts(operand, other)
    is_patch = kernel.is_patch or _cuts_input(other)
    for k, view in enumerate(operand.value.views):
        layout = view.layout
        # Without a sum over an axis of the parameter it is a scale, as w[h] in an einsum `bh,h->bh`. A factor of a
        # product of parameters is always part of a matrix.
        is_product = bool(layout.runs_along(operand.summed) or view.inner)
        of_experts = layout.runs_along(experts)
        walk.record(
            node,
            "product" if is_product else "other",
            view,
            MULTIPLIED,
            k=k,
            rows=tuple(run for run in operand.rows(view) if run not in of_experts),
            columns=operand.columns(view),
            batch=(*layout.runs_along(operand.batch), *layout.loops, *of_experts),
            activation=other.array,
            groups=kernel.groups,
            is_depthwise=kernel.is_depthwise,
            is_patch=is_patch,
        )
        if is_product:
            projection = Projection(walk.product(node, k), operand.along(layout))
            projection.product.is_mixture |= _is_mixture(walk, other)
            projections.append(projection)
    return projections


def _record_slices_of_one(walk: Walk, weights: Value) -> None:
    """Records slices of one parameter that are added, as c[..., 0] + 1j * c[..., 1] of a complex matrix: one matrix."""
    views = grouped((view.leaf, view) for view in weights.views)
    for first, *others in views.values():
        for another in others:
            walk.record_added_slices(first, another)


def _experts(operand: Operand, other: Operand) -> list[int]:
    """The summed axes of a parameter that count experts: the activation was gated along them.

    In sum_{e, f} gate[b, e] h[b, e, f] w[e, f, d], the gate makes e a batch of the product that gave h.
    """
    experts = []
    # A convolution has no summed axes of its image, and no experts.
    for axis, axis_of_other in zip(operand.summed, other.summed, strict=False):
        for projection in other.value.projections:
            runs = set(projection.layout.runs_along([axis_of_other]))
            heads = {run for run, _ in projection.product.heads}
            if runs and runs <= projection.product.batches - heads:
                experts.append(axis)
    # An axis of features has to be left, or the parameter would have no rows.
    leaves_rows = len(set(experts)) < len(operand.summed)
    return experts if leaves_rows else []


def _is_mixture(walk: Walk, operand: Operand) -> bool:
    """Whether a router's weights along some summed axes multiply features along others: a mixture of experts."""
    if operand.value.exponential_of not in walk.attention.routers:
        return False
    shape = walk.shape(operand.array)
    summed = {axis for axis in operand.summed if shape[axis] > 1}
    varying = [
        projection.layout.varying & summed for projection in operand.value.projections
    ]
    return any(axes and axes < summed for axes in varying) and summed not in varying


def _cuts_input(operand: Operand) -> bool:
    """Whether the sum runs over stretches of two axes of an argument, as over the pixels of a patch.

    Images [b, 8 * 4, 8 * 4], reshaped and summed over both axes of 4, are such an argument.
    """
    for fact in operand.value.facts:
        if fact.what != "input":
            continue
        outside = {run.axis for run in fact.layout.runs_along(operand.free)}
        inside = fact.layout.runs_along(operand.summed)
        stretches = {run.axis for run in inside if run.stride == 1}
        if len(stretches & outside) > 1:
            return True
    return False


# Products of two activations, and of an activation with numbers that do not train.


def _of_activations(
    walk: Walk, node: Node, product: Value, left: Operand, right: Operand
) -> Value:
    """The product of two arrays of which no one is a matrix, and one at least depends on parameters.

    It records a mixture of experts, parts and heads of both, and attention if one is softmax's weights. Then it is
    followed as a product of two activations, or of one and numbers that do not train.
    """
    # Either operand may be softmax's weights.
    pairs = ((left, right), (right, left))
    for operand, other in pairs:
        if other.value.exponential_of in walk.attention.routers:
            _record_mixture(operand)
    # A batch axis of both counts heads, also where the queries or the keys do not train.
    of_a_model = PARAMETER | FROZEN
    if left.value.depends_on & of_a_model and right.value.depends_on & of_a_model:
        for operand in (left, right):
            walk.record_parts(operand.value.projections)
            walk.record_heads(operand.value.projections, operand.batch)
    for weights, values in pairs:
        attentions = _softmaxes_of(weights)
        for logits in attentions:
            _record_attention(walk, logits, weights, values)
        # Exponentials that are not followed to their logits: an attention to be refused.
        if not attentions or weights.value.no_rule >= 0:
            walk.record_weights(node, weights.value, values.value)
    if not right.value.depends_on & PARAMETER:
        return _by_constants(walk, node, product, left, right)
    if not left.value.depends_on & PARAMETER:
        return _by_constants(walk, node, product, right, left)
    return _of_two_activations(walk, node, product, left, right)


def _record_mixture(operand: Operand) -> None:
    """Records that a router's weights choose among columns of a product, perhaps of linear experts."""
    for projection in operand.value.projections:
        chosen = set(projection.layout.runs_along(operand.summed))
        columns = set(projection.product.use.columns)
        if chosen & columns and not chosen >= columns:
            projection.product.is_mixture = True


def _softmaxes_of(weights: Operand) -> list[Logits]:
    """The logits of softmaxes over whose keys the product sums, several where softmaxes are subtracted."""
    softmaxes = [logits for logits in weights.value.logits if logits.stage == "weights"]
    return [logits for logits in softmaxes if logits.layout.runs_along(weights.summed)]


def _record_attention(
    walk: Walk, logits: Logits, weights: Operand, values: Operand
) -> None:
    """Records an attention: softmax's weights, made of these logits, times values."""
    product, attention = logits.product, walk.attention
    keys = frozenset(run.axis for run in logits.layout.runs_along(weights.summed))
    attention.softmaxes[product].append((logits, keys))
    query_and_key = attention.operands[product]
    parts = []
    for summand, keys_of_summand in logits.products_and_keys(keys):
        for operand in attention.operands[summand]:
            # Queries that share a key head are counted by an axis of their own.
            walk.record_heads(operand.value.projections, operand.free)
            is_query = operand.is_query(keys_of_summand)
            for part in operand.value.projections:
                parts.append(((part.product, is_query), part.layout.region))
    for (projected, _), regions in grouped(parts).items():
        # q[..., :8] k^T + q[..., 8:] r^T is q [k, r]^T, which takes the columns of q together.
        if len(regions) > 1:
            projected.parts.difference_update(regions)
    _record_heads_one_by_one(walk, product, (*query_and_key, values))


def _record_heads_one_by_one(
    walk: Walk, product: int, operands: Sequence[Operand]
) -> None:
    """Leaves queries, keys and values to names where attentions take other columns of them: heads written one by one.

    Softmaxes that are subtracted, as in differential attention, take the same values, and are one attention.

    Args:
      walk: Gets the records.
      product: The product of queries and keys.
      operands: Queries, keys and values; the last that is followed tells heads from each other.
    """
    projections: list[Projection] = []
    for operand in operands:
        projections += operand.value.projections[:1]
    if not projections:
        return
    attention = walk.attention
    products = tuple(projection.product for projection in projections)
    part = projections[-1].layout.region
    if attention.value_parts.setdefault(products, part) != part:
        for projection in projections:
            walk.record(
                walk.nodes[product],
                "unknown",
                projection.view,
                "attention head by head",
            )


def _of_two_activations(
    walk: Walk, node: Node, product: Value, left: Operand, right: Operand
) -> Value:
    """Perhaps queries times keys, or softmax's weights times values, or the features of two towers, matched."""
    product = product._replace(scores=node.index, exponential_of=-1)
    first, second = left.value, right.value
    # Those in a sum lie along the same axes, so that the first projection tells for all.
    sums_features = True
    for operand in (left, right):
        for projection in operand.value.projections[:1]:
            sums_features &= bool(projection.layout.runs_along(operand.summed))
    # sum_d a[b, d] c[b, d] over the features of two towers, example by example, keeps no free axis; that of one tower
    # with itself is its squared norm.
    has_two_towers = first.depends_on != second.depends_on
    is_match = (
        first.projections and second.projections and sums_features and has_two_towers
    )
    if (left.free and right.free) or is_match:
        walk.layers.products.add(node.index)
    # Softmax's weights times values are no new logits.
    has_logits = first.logits or second.logits
    has_projections = first.projections or second.projections
    if has_projections and not has_logits and (left.free or right.free):
        return product._replace(logits=_new_logits(walk, node, left, right))
    return product


def _new_logits(
    walk: Walk, node: Node, left: Operand, right: Operand
) -> tuple[Logits, ...]:
    """A product that may be the logits of an attention: queries times keys."""
    walk.attention.operands[node.index] = left, right
    (result,) = node.outputs
    return (Logits(node.index, whole(walk.shape(result)), value=result),)


def _by_constants(
    walk: Walk, node: Node, product: Value, activation: Operand, other: Operand
) -> Value:
    """An activation times numbers that do not train. The result is linear in what the activation is linear in.

    - Numbers that the function makes itself, such as a rotation or an average: projections and logits go on.
    - A frozen layer, x @ c of an array that the function is given: its columns are noted, as labels may choose one.
    - Frozen keys, which have a batch axis: perhaps logits.
    - Frozen values, softmax's weights times c: the logits end here.
    """
    attentions = [logits.product for logits in _softmaxes_of(activation)]
    logits = []
    for after in softmax.through(node, activation.aligned):
        # Weights that this product reads are no logits of what follows.
        if after.product not in attentions:
            logits.append(after)
    projections = activation.added_up.projections
    product = product._replace(projections=projections, logits=tuple(logits))
    is_layer = _is_frozen_layer(activation, other)
    if is_layer:
        walk.layers.frozen.add(node.index)
    # The exponentials of this product may be those of a softmax, as over frozen keys.
    has_free = activation.free and other.free
    if is_layer or attentions or (has_free and product.scores < 0):
        walk.attention.one_sided.add(node.index)
        product = product._replace(scores=node.index, exponential_of=-1)
    if not is_layer:
        return product
    if not activation.value.logits and other.batch:
        # Perhaps queries times frozen keys.
        return product._replace(logits=_new_logits(walk, node, activation, other))
    # Softmax's weights are no features of a head.
    if activation.value.exponential_of < 0:
        layout = other.along(whole(walk.shape(other.array)))
        product = product._replace(facts=(AxisFact("columns", layout, node.index),))
    return product


def _is_frozen_layer(activation: Operand, other: Operand) -> bool:
    """Whether this is a product of features by a matrix that does not train.

    It is an argument or closed over, drawn at random, or without gradient. Numbers that the function makes itself are
    no layer, nor are labels.
    """
    # Numbers that the function makes itself, as a rotation, depend on none of these.
    if not other.value.depends_on & (DATA | FROZEN | NOISE):
        return False
    if not other.free or other.value.axes("one hot"):
        return False
    # Labels, as in an einsum `b,bc->bc` of a weight for each example.
    if other.batch and not activation.free:
        return False
    # An adjacency matrix sums over nodes, and over no columns of a product. After a layer norm, which subtracts a mean
    # of all columns, it is not known along which axis the columns lie.
    column_axes: set[int] = set()
    for projection in activation.value.projections:
        column_axes |= projection.layout.varying
    return not column_axes or not column_axes.isdisjoint(activation.summed)


# Convolutions, and products of groups of rows.


@rule("conv_general_dilated")
def _conv(walk: Walk, node: Node) -> Sequence[Value]:
    """A convolution, whose kernel has axes of output features, of input features, and of its window."""
    params, weight = node.params, walk.shape(node.inputs[1])
    numbers = params["dimension_numbers"]
    out, into, *window = numbers.rhs_spec
    sizes = tuple(weight[axis] for axis in window)
    groups = params["feature_group_count"] * params["batch_group_count"]
    kernel = Kernel(
        groups=groups,
        is_depthwise=groups > 1 and weight[into] == 1,
        is_patch=tuple(params["window_strides"]) == sizes and max(sizes, default=1) > 1,
    )
    # For each axis of the result the axis of the image, and of the kernel, that it comes from.
    of_image: list[int | None] = [None] * len(weight)
    of_kernel: list[int | None] = [None] * len(weight)
    of_kernel[numbers.out_spec[1]] = out
    # A depthwise convolution with one output for each feature leaves the features where they are.
    if kernel.is_depthwise and weight[out] == groups:
        of_image[numbers.out_spec[1]] = numbers.lhs_spec[1]
    left, right = _operands(walk, node, (into, *window), ())
    left.sources, right.sources = of_image, of_kernel
    return [_by_kernel(walk, node, left, right, kernel)]


@rule("ragged_dot_general")
def _ragged(walk: Walk, node: Node) -> Sequence[Value]:
    """Each expert's matrix times the rows that belong to it."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batch) = numbers.dot_dimension_numbers
    left, right = _operands(walk, node, summed, (*batch, *numbers.rhs_group_dimensions))
    left.sources = [None] * len(left.shape)
    right.sources = [None] * (len(right.shape) - len(right.free)) + list(right.free)
    return [_by_kernel(walk, node, left, right, NO_KERNEL)]


def _operands(
    walk: Walk, node: Node, summed: Sequence[int], batch: Sequence[int]
) -> tuple[Operand, Operand]:
    """The operands of a convolution, or of a product of groups of rows. The second has the parameters.

    `summed` and `batch` are axes of the second. Those of the first are not needed: the caller's `sources` say which of
    its axes the result has.
    """
    values, ranks = walk.inputs(node), [len(walk.shape(x)) for x in node.inputs]
    left = Operand(values[0], node.inputs[0], ranks[0], (), ())
    right = Operand(values[1], node.inputs[1], ranks[1], summed, batch)
    left.shape = right.shape = walk.shape(node.outputs[0])
    return left, right


def _by_kernel(
    walk: Walk, node: Node, left: Operand, right: Operand, kernel: Kernel
) -> Value:
    """A convolution, or a product of groups of rows: by a parameter, or by something that is not followed."""
    values = walk.inputs(node)
    product, weights = dependent(values), right.value
    # A kernel of parameters, or of parameters and data, such as a masked one. With groups, a kernel of parameters and
    # data may be one for each example, where the examples are the groups.
    if weights.views and (weights.is_weight or kernel.groups == 1):
        walk.record_unknown_factor(weights, left.value)
        return _by_parameter(walk, node, product, right, left, kernel)
    # A kernel that does not train, or one for each example.
    walk.record_views(node, node.name, values, "unknown")
    if weights.depends_on & PARAMETER:
        walk.layers.products.add(node.index)
    elif product.depends_on & PARAMETER and not kernel.is_depthwise:
        walk.layers.frozen.add(node.index)
    return product
