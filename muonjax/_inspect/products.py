"""The rules of products: by a parameter, of two parameters, of two activations, and convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from muonjax._inspect import softmax
from muonjax._inspect.entrywise import bent, entrywise, rule
from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Node
from muonjax._inspect.layout import whole
from muonjax._inspect.moves import looked_up
from muonjax._inspect.values import (
    DATA,
    FROZEN,
    MULTIPLIED,
    PARAMETER,
    Image,
    Logits,
    Side,
    Value,
    dependent,
)


@rule("dot_general")
def _dot(walk: Walk, node: Node) -> Sequence[Value]:
    sums, batches = node.params["dimension_numbers"]
    ranks = [len(walk.shape(x)) for x in node.inputs]
    left, right = map(Side, walk.operands(node), node.inputs, ranks, sums, batches)
    left.sources = (*left.batch, *left.given, *[None] * len(right.given))
    right.sources = (*right.batch, *[None] * len(left.given), *right.given)
    left.shape = right.shape = walk.shape(node.outputs[0])
    return [multiply(walk, node, left, right)]


def multiply(walk: Walk, node: Node, left: Side, right: Side) -> Value:
    a, b = left.value, right.value
    product = dependent([a, b])
    if not product.depends_on & PARAMETER:
        return product
    if not left.summed:  # entry by entry, written as an einsum
        node = dataclasses.replace(node, name="mul")
        moved = [s.value.repeated(walk.shape(s.operand), s.sources, s.shape) for s in (left, right)]
        return entrywise(walk, node, moved)
    for side, rest in ((left, right), (right, left)):
        walk.record_unknown(side.value, rest.value)
    if left.is_parameter and right.is_parameter:
        return _of_parameters(product, left, right)
    for side, rest in ((left, right), (right, left)):
        hot = rest.value.axes("one hot")
        if side.value.terms and hot and side.is_parameter and set(hot) & set(rest.summed):
            return looked_up(
                walk, node, [side.value, rest.value], side.summed, side.sources, side.shape
            )
        if hot:
            chosen = [
                mine for mine, theirs in zip(side.summed, rest.summed, strict=True) if theirs in hot
            ]
            walk.record_read(side.value, chosen, rest.value)
            for image in side.value.images:
                image.product.batches.update(image.layout.atoms(chosen))
    sides = [s for s in (left, right) if s.is_parameter and s.value.terms]
    if not sides:
        sides = [s for s in (left, right) if s.is_matrix]
    if sides:
        side = sides[0]
        rest = right if side is left else left
        if _may_be_learned(side, rest):
            walk.record_terms(node, "", [side.value])
            if walk.graph.einsum(node.index):
                walk.consumers.add(node.index)
            walk.softmaxes |= {rest.value.weights: node.index} if rest.value.weights >= 0 else {}
            walk.one_sided.add(node.index)
            return product._replace(scores=node.index)
        result = by_parameter(walk, node, product, side, rest)
        return result._replace(logits=softmax.scaled(node, rest.aligned))
    return _of_activations(walk, node, product, left, right)


def _may_be_learned(side: Side, rest: Side) -> bool:
    """Whether a product of parameters may be learned queries, keys or values, and no matrix of several factors."""
    sums_over_last = not side.value.terms[0].layout.atoms(side.summed)
    return all(t.inner for t in side.value.terms) and (sums_over_last or rest.value.weights >= 0)


def _of_parameters(product: Value, left: Side, right: Side) -> Value:
    """Not used yet: a penalty, or factors of a matrix (adapters)."""
    terms = []
    for side, before in ((left, False), (right, True)):
        for t in side.value.terms:
            between = t.layout.atoms(side.summed)
            inner = (between, *t.inner) if before else (*t.inner, between)
            inner = inner if between else t.inner
            terms.append(t._replace(layout=side.along(t.layout), inner=inner))
    return product._replace(terms=tuple(terms))


def by_parameter(walk: Walk, node: Node, product: Value, side: Side, rest: Side, **extra) -> Value:
    """The product of an activation with a parameter, or with a sum of several."""
    walk.record_terms(node, "a learned input", [rest.value] if rest.value.is_weight else [])
    if "groups" not in extra or not rest.value.logits:  # otherwise a convolution of logits
        walk.one_sided.add(node.index)
        product = product._replace(scores=node.index if side.is_matrix else -1, weights=-1)
    if not extra.get("is_depthwise"):
        walk.record_parts(rest.value.images)
    images, depends_on = [], product.depends_on | DATA
    experts = _experts(walk, side, rest)
    is_patch = extra.pop("is_patch", False) or _cuts_input(rest)
    for k, t in enumerate(side.value.terms):
        rows, columns = side.rows(t), side.columns(t)
        kind = "product" if t.layout.atoms(side.summed) or t.inner else "other"
        batch = (*t.layout.atoms(side.batch), *t.layout.loops)
        each = t.layout.atoms(experts)
        rows, batch = tuple(a for a in rows if a not in each), (*batch, *each)
        axes = {"rows": rows, "columns": columns, "batch": batch}
        walk.record(
            node, kind, t, MULTIPLIED, k=k, operand=rest.operand, is_patch=is_patch, **axes, **extra
        )
        if kind == "product":
            images.append(Image(walk.product(node, k), side.along(t.layout)))
            depends_on |= images[-1].product.bit
    if not images:  # a scale, written as a product
        return product._replace(images=rest.aligned.images)
    for (
        image
    ) in rest.value.images:  # an axis that one product gives and the next has as a batch: experts
        image.product.batches.update(image.layout.atoms(rest.batch))
    if walk.graph.is_stack_of_scalars(rest.operand):  # losses and their weights
        return product
    if extra.get("is_depthwise"):
        images += [bent(walk, m, node, apart=True) for m in rest.aligned.images]
    walk.consumers.add(node.index)
    return product._replace(images=tuple(images), depends_on=depends_on, no_rule=-1)


def _experts(walk: Walk, side: Side, rest: Side) -> list[int]:
    """Summed axes of a parameter that count experts: the activation was gated along them."""
    gated = []
    for mine, theirs in zip(side.summed, rest.summed, strict=False):
        for image in rest.value.images:
            atoms = set(image.layout.atoms([theirs]))
            if atoms and atoms <= image.product.batches - {a for a, _ in image.product.heads}:
                gated.append(mine)
    return gated if len(set(gated)) < len(side.summed) else []


def _cuts_input(side: Side) -> bool:
    """Whether the sum runs over stretches of two axes of an argument, as over the pixels of a patch."""
    for mark in side.value.marks:
        inside = mark.layout.atoms(side.summed) if mark.what == "input" else ()
        outside = {a.axis for a in mark.layout.atoms(side.given)}
        if len({a.axis for a in inside if a.axis in outside and a.stride == 1}) > 1:
            return True
    return False


def _of_activations(walk: Walk, node: Node, product: Value, left: Side, right: Side) -> Value:
    a, b = left.value, right.value
    for side in (left, right):
        walk.record_contracted(node, side)
    of_a_model = PARAMETER | FROZEN  # heads are heads where the queries and keys do not train
    for side in (left, right) if a.depends_on & of_a_model and b.depends_on & of_a_model else ():
        walk.record_parts(side.value.images)
        walk.record_heads(side.value.images, side.batch)
    for side, values in ((left, right), (right, left)):
        found = [
            x for x in side.value.logits if x.stage == "weights" and x.layout.atoms(side.summed)
        ]
        for x in found:  # several where softmaxes are subtracted
            walk.record_attention(node, x, x.layout.atoms(side.summed), values)
        if not found or side.value.no_rule >= 0:
            walk.record_weights(node, side.value, values.value)
    if a.depends_on & b.depends_on & PARAMETER:
        product = product._replace(scores=node.index, weights=-1)
        features = all(m.layout.atoms(s.summed) for s in (left, right) for m in s.value.images[:1])
        # Entry by entry, as of two towers.
        matched = a.images and b.images and features and a.depends_on != b.depends_on
        if (left.given and right.given) or matched:
            walk.consumers.add(node.index)
        if a.images and b.images and (left.given or right.given):
            walk.pairs[node.index], result = (left, right), node.outputs[0]
            return product._replace(
                logits=(Logits(node.index, whole(walk.shape(result)), value=result),)
            )
    elif left.given and right.given and product.scores < 0:
        walk.one_sided.add(node.index)
        product = product._replace(scores=node.index, weights=-1)
    # A mask or a rotation by constants: still the image of one product.
    for side, rest in ((left, right), (right, left)):
        if not rest.value.depends_on & PARAMETER:
            einsum = walk.graph.einsum(node.index)
            # Which operands a product of several meets first depends on sizes.
            if einsum is not None and einsum.is_layer and rest.value.depends_on & (DATA | FROZEN):
                walk.frozen_layers.add(node.index)
            elif _is_frozen_layer(side, rest):
                layers = walk.frozen_attentions if rest.batch else walk.frozen_layers
                layers.add(node.index)
            logits = softmax.scaled(node, side.aligned)
            return product._replace(images=side.added_up.images, logits=logits)
    return product


def _is_frozen_layer(activation: Side, other: Side) -> bool:
    """Whether this is a product of features by a matrix that does not train: an argument, or one without gradient.

    Numbers that the function makes itself are no layer, nor is a label.
    """
    if not other.value.depends_on & (DATA | FROZEN):
        return False
    if not other.given or other.value.axes("one hot"):
        return False
    if other.batch and not activation.given:  # a label for each class
        return False
    images = (
        activation.value.images
    )  # an adjacency matrix sums over nodes, and over no columns of a product
    return not images or any(image.layout.atoms(activation.summed) for image in images)


@rule("conv_general_dilated")
def _conv(walk: Walk, node: Node) -> Sequence[Value]:
    numbers, shape = node.params["dimension_numbers"], walk.shape(node.inputs[1])
    out, into, *window = numbers.rhs_spec
    sources: list[int | None] = [None] * len(shape)
    sources[numbers.out_spec[1]] = out
    features: list[int | None] = [None] * len(shape)
    if walk.shape(node.inputs[0])[numbers.lhs_spec[1]] == shape[out]:
        features[numbers.out_spec[1]] = numbers.lhs_spec[1]
    sizes = tuple(shape[axis] for axis in window)
    groups = node.params["feature_group_count"] * node.params["batch_group_count"]
    extra = {
        "groups": groups,
        "is_depthwise": groups > 1 and shape[into] == 1,
        "is_patch": tuple(node.params["window_strides"]) == sizes and max(sizes, default=1) > 1,
    }
    return [_by_kernel(walk, node, (into, *window), (), sources, features, **extra)]


@rule("ragged_dot_general")
def _ragged(walk: Walk, node: Node) -> Sequence[Value]:
    """Each expert's matrix times the rows that belong to it."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batch) = numbers.dot_dimension_numbers
    batch = (*batch, *numbers.rhs_group_dimensions)
    given = [
        axis for axis in range(len(walk.shape(node.inputs[1]))) if axis not in (*summed, *batch)
    ]
    rank = len(walk.shape(node.outputs[0]))
    return [_by_kernel(walk, node, summed, batch, [None] * (rank - len(given)) + given)]


def _by_kernel(
    walk: Walk, node: Node, summed: Sequence[int], batch: Sequence[int],
    sources: Sequence[int | None], features: Sequence[int | None] = (), **extra: Any,
) -> Value:  # fmt: skip
    """A product whose second operand has the parameters; of the first one, only features that stay are followed."""
    values = walk.operands(node)
    product = dependent(values)
    if not values[1].terms or (
        extra.get("groups", 1) > 1 and not values[1].is_weight
    ):  # groups of examples
        walk.record_terms(node, node.name, values, "unknown")
        if values[1].depends_on & PARAMETER:
            walk.consumers.add(node.index)
        elif product.depends_on & PARAMETER and not extra.get("is_depthwise"):
            walk.frozen_layers.add(node.index)
        return product
    data, kernel = (
        Side(v, x, len(walk.shape(x)), *axes)
        for v, x, axes in zip(values[:2], node.inputs[:2], (((), ()), (summed, batch)), strict=True)
    )
    walk.record_unknown(kernel.value, data.value)
    data.sources, kernel.sources = features or [None] * len(sources), sources
    data.shape = kernel.shape = walk.shape(node.outputs[0])
    return by_parameter(walk, node, product, kernel, data, **extra)
