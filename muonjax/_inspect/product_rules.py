"""The rules of products: by a parameter, of two parameters, of two activations,
by frozen numbers; convolutions."""

import dataclasses
from collections.abc import Sequence

from muonjax._inspect import follow_logits
from muonjax._inspect.entrywise_rules import (
    after_nonlinearity,
    are_several_parts,
    entrywise,
)
from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import axes_of, whole
from muonjax._inspect.move_rules import looked_up
from muonjax._inspect.records import Records
from muonjax._inspect.rules import rule
from muonjax._inspect.values import (
    DATA,
    FROZEN,
    MULTIPLIED,
    NOISE,
    PARAMETER,
    PRODUCT_OF_PARAMETERS,
    Kernel,
    Logits,
    Operand,
    Projection,
    Value,
    dependent,
    grouped,
    is_match,
)


@rule("dot_general")
def _dot(records: Records, node: Node) -> Sequence[Value]:
    """The result has the batch axes, then the free axes of the left operand,
    then those of the right one."""
    sums, batches = node.params["dimension_numbers"]
    left, right = (records.operand(node, k, sums[k], batches[k]) for k in (0, 1))
    left.sources = (*left.batch, *left.free, *[None] * len(right.free))
    right.sources = (*right.batch, *[None] * len(left.free), *right.free)
    return [_multiply(records, node, left, right)]


def _multiply(records: Records, node: Node, left: Operand, right: Operand) -> Value:
    """The value of a product of two arrays, by the first of these cases that holds.

    - No operand depends on parameters: there is nothing to record.
    - It sums over no axis, as an einsum `bi,i->bi`: it is a `mul`.
    - Both are made of parameters alone: factors of an adapter, or a penalty.
    - one_hot(tokens) @ table is a look-up.
    - x @ w is a layer, also if w is a parameter plus data,
      or one of several matrices that data choose.
    - All else is a product of two activations, or of an activation with numbers that do not train.
    """
    result = dependent([left.value, right.value])
    if not result.depends_on & PARAMETER:
        return result
    # Both have as many summed axes. Without any, each operand repeats along the axes of the product
    # that it lacks, and entries are multiplied one by one.
    if not left.summed:
        node = dataclasses.replace(node, name="mul")
        repeated = [
            x.value.repeated(x.shape, x.sources, x.product_shape) for x in (left, right)
        ]
        return entrywise(records, node, repeated)
    if left.is_parameter and right.is_parameter:
        return _of_parameters(result, left, right)
    # Each operand with the other one. One that is made of parameters alone comes first: next to it
    # a matrix that data are in, as w * mask, is the activation of a layer.
    pairs = [(left, right), (right, left)]
    if right.is_parameter:
        pairs.reverse()
    for operand, other in pairs:
        # The summed axes of `operand` along which the other one is one hot: the index where that is
        # not zero chooses one entry along them. Mostly there are none, and no record is made here.
        one_hot = other.value.axes("one hot")
        axes = zip(operand.summed, other.summed, strict=True)
        chosen = [axis for axis, of_other in axes if of_other in one_hot]
        # `sources` has the axes that the product has all of, as [None, None, 1] for the rows of a
        # table: of its summed axes the result has one entry. Without views (the parameter was lost,
        # as in an operation that is not followed) there is nothing to look up.
        if chosen and operand.is_parameter and operand.value.views:
            values = [operand.value, other.value]
            return looked_up(records, node, values, operand.sources)
        # sum_c one_hot(labels)[b, c] y[b, c] of a layer's result y, as in a cross-entropy: if data
        # choose a column, the layer may be an output head.
        records.record_choice_by_labels(operand.value, chosen, other.value)
        # In einsum("be,bef->bf", one_hot(expert), y), of a layer's result y, the columns along e
        # are taken one by one, as those of experts are (`Product.batches`).
        for projection in operand.value.projections:
            projection.product.batches.update(projection.layout.runs_along(chosen))
    # The weights of a layer are parameters alone, perhaps a vector (`is_parameter`), or else a
    # matrix that data are in too (`is_matrix`).
    for operand, other in pairs:
        # Without views there is no parameter to record, as above.
        if operand.value.views and (operand.is_parameter or operand.is_matrix):
            return _by_matrix(records, node, result, operand, other)
    return _of_activations(records, node, result, left, right)


def _by_matrix(
    records: Records, node: Node, result: Value, weights: Operand, activation: Operand
) -> Value:
    """The product of an activation and an operand made of parameters. `result` has what it
    depends on; returned is the same value with projections, or with new scores.

    It is followed as a layer by w, or by w + a @ b or a @ b with an adapter (`_by_parameter`). But
    a product of parameters, queries @ w, may be the queries, keys or values of an attention: then
    its factors are left to names, as one of them may be a learned input and no matrix.
    """
    attention = records.attention
    views = weights.value.views
    # The operand is nothing but a product of parameters: each factor meets another one (`inner`).
    is_product = all(view.inner for view in views)
    # x @ (a @ b) sums over an axis of a, the first view. x @ (queries @ w).T sums over none of the
    # first factor but over one of w, the last: so the operand may be queries or keys of an
    # attention, and the result its scores.
    is_transposed = not views[0].layout.runs_along(weights.summed)
    # The other way: the activation may be softmax's weights, and the operand their values. So it is
    # if the activation is made of exponentials of an earlier product, here `scores` (-1: of none):
    # queries @ keys.T, or x @ c with parameters c, which are a router's or learned keys.
    scores = activation.value.exponential_of
    has_weights = scores in attention.candidates | attention.routers
    if not is_product or not (is_transposed or has_weights):
        return _by_parameter(records, node, result, weights, activation)
    # Factors are recorded as "unknown", which leaves them to names (`record_views`).
    records.record_views(node, PRODUCT_OF_PARAMETERS, [weights.value])
    # This product reads the exponentials, and is not followed: `clippable_attention` lists an
    # attention with such a reader, and refuses it.
    if has_weights:
        attention.other_readers[scores] = node.index
    # It counts as a layer: what is before it is no output head.
    # The result may be the scores of an attention.
    records.layers.add(node.index)
    return result._replace(scores=node.index)


def _of_parameters(product: Value, left: Operand, right: Operand) -> Value:
    """A product of parameters that meets no data yet: a penalty,
    or factors of a matrix (adapters).

    It has the views of both operands, each with the axes along which it meets the other (`inner`):
    of a[i, k] @ b[k, j] both have one entry, for k.
    """
    views = []
    for operand in (left, right):
        for view in operand.value.views:
            between = view.layout.runs_along(operand.summed)
            inner = view.inner
            # `inner` goes from left to right. In (a @ b) @ c, where the product sums over j of
            # b[k, j] and c[j, l], b gets j after k; a, which has no j, keeps what it has.
            if between:
                inner = (*inner, between) if operand is left else (between, *inner)
            # From here on the layout is along the axes of the product.
            views.append(view._replace(layout=operand.along(view.layout), inner=inner))
    return product._replace(views=tuple(views))


# Products by a parameter.


def _by_parameter(
    records: Records, node: Node, result: Value, weights: Operand, activation: Operand
) -> Value:
    """The result of a layer, with a projection by each parameter in `weights`, such as w,
    a and b in x @ (w + a @ b); or without any, where it may be no layer.

    `result` has what it depends on.
    """
    # The input of the layer may be made of parameters too, as learned queries [8, 64] that are
    # repeated for each example. They are no matrix.
    if activation.value.is_weight:
        records.record_views(node, "a learned input", [activation.value])
    # Softmax's weights stay weights where a parameter mixes those of several heads. Logits before
    # their exponential end here, and an attention of them is refused.
    mixed = follow_logits.through(node, activation.added_up)
    logits = tuple(x for x in mixed if x.stage == "weights")
    # x @ queries.T with learned queries may be the scores of an attention,
    # in place of older ones that x was made of.
    result = result._replace(scores=node.index, logits=logits)
    projections = _recorded_projections(records, node, weights, activation)
    # What it shows of the layers before: it takes some of their columns together, as one part, and
    # may have another matrix for each of some others, which count experts.
    _record_columns_of_input(records, weights, activation)
    # Two results that may be no layer's. Without projections the parameters only scale, or are left
    # to names (`_unfollowed`). A single number may be a sum of weighted losses, or what a model
    # gives for one example: the projections end here. What looks like an output head before either
    # is left to its name (`possible_layers`).
    if not projections or activation.product_shape == ():
        records.possible_layers.add(node.index)
        return result
    # Where the input is learned, the result depends on no data so far. It counts as data, because
    # the next product would otherwise take it for a product of parameters (`_of_parameters`).
    # The `bit` of a product says that an array is made of it: softmax(y) * y is no gate of y.
    depends_on = result.depends_on | DATA
    for projection in projections:
        depends_on |= projection.product.bit
    # Each feature after a depthwise convolution comes from one column of the layer before, whose
    # projections go on. As after a nonlinear operation, what a later sum adds are results of this
    # layer, and not of the one before.
    if weights.kernel.is_depthwise:
        for projection in activation.added_up.projections:
            projections.append(
                after_nonlinearity(records, projection, node, unmixed=True)
            )
    records.layers.add(node.index)
    return result._replace(projections=tuple(projections), depends_on=depends_on)


def _record_columns_of_input(
    records: Records, weights: Operand, activation: Operand
) -> None:
    """Records what a layer shows of the columns of earlier layers that are in its input:
    which belong together, and which count experts."""
    # The columns that it sums over are one part of the earlier kernel, or all of it. A depthwise
    # convolution takes each column by itself.
    if not weights.kernel.is_depthwise:
        records.record_parts(activation.value.projections)
    # In einsum("bef,efd->bed", y, w) of an earlier layer's result y, each column of y along the
    # batch axis e meets another matrix of w: these columns count experts, which is noted in the
    # product that gave y. In einsum("bhd,hd->bh", y, queries), with a vector each, h counts heads,
    # which stay columns.
    if weights.is_matrix:
        for earlier in activation.value.projections:
            experts = earlier.layout.runs_along(activation.batch)
            earlier.product.batches.update(experts)


def _unfollowed(records: Records, weights: Operand, activation: Operand) -> str:
    """What in a product leaves the parameters in its weights to names, in words;
    "" if nothing does."""
    # Axes of experts would be taken for rows.
    if _sums_over_experts(records, activation):
        return "a sum over experts"
    # In x @ (w[0] * gate0 + w[1] * gate1) data choose between two matrices, which are followed. The
    # two cases below are of parameters without data in them.
    if not weights.value.is_weight:
        return ""
    views = weights.value.views
    # In x @ (w[0] + w[1]) both slices are one matrix, and in a complex c[..., 0] + 1j * c[..., 1]
    # they may be two: which one it is, is not followed.
    if are_several_parts([weights.value]):
        return "a sum of its slices"
    # (queries @ w).reshape(q, h, d) with learned queries, multiplied by keys in
    # einsum("qhd,bkhd->bhqk"): the batch axis h counts columns of w, and no axis of the queries. A
    # factor without the batch axis is such an input and no matrix, so both are left to names.
    lacks_heads = any(not view.layout.runs_along(weights.batch) for view in views)
    if weights.batch and lacks_heads and any(view.inner for view in views):
        return PRODUCT_OF_PARAMETERS
    return ""


def _recorded_projections(
    records: Records, node: Node, weights: Operand, activation: Operand
) -> list[Projection]:
    """Records how a layer uses each parameter in `weights`,
    and returns a projection for each that is part of a matrix.

    x @ (w + a @ b) uses w, a and b, numbers 0, 1 and 2, each with rows, columns and batch axes of
    its own. The product sums over an axis of w and of a. It sums over none of b, but b meets a:
    `view.inner` has the axes of each that meet the other, the columns of a and the rows of b. A
    parameter with neither is a scale, as v in x @ (u[:, None] * v).
    """
    # Why the result can't be followed, such as "a sum over experts"; "" if it can. A use of the
    # kind "unknown" leaves the parameter to its name.
    unfollowed = _unfollowed(records, weights, activation)
    if unfollowed:
        records.record_views(node, unfollowed, [weights.value], "unknown")
        return []
    kernel = weights.kernel
    # Images that were reshaped to patches: such a product is a convolution whose windows do not
    # overlap, which `decisions` may take for an embedding.
    if _cuts_input(activation):
        kernel = kernel._replace(is_patch=True)
    projections = []
    for k, view in enumerate(weights.value.views):
        layout = view.layout
        is_product = layout.runs_along(weights.summed) or view.inner
        product = records.record(
            node,
            "product" if is_product else "other",
            view,
            MULTIPLIED,  # the words for a scale; a product needs none
            k=k,  # tells two records of one parameter apart, as in x @ (w + w.T)
            rows=weights.rows(view),
            columns=weights.columns(view),
            # All that count matrices: batch axes, and axes that a loop or a look-up goes over.
            batch=(*layout.runs_along(weights.batch), *layout.loops),
            activation=activation.array,
            kernel=kernel,
        )
        # `record` gives None for a scale, which is no product.
        if product is not None:
            # The layout of the parameter along the axes of the result: where its columns are.
            projections.append(Projection(product, weights.along(layout)))
    return projections


def _sums_over_experts(records: Records, activation: Operand) -> bool:
    """Whether a product sums over experts and their features: the activation was gated along some
    of the axes. Such a product is left to names, as its experts would be taken for rows.

    In sum_{e, f} gate[b, e] h[b, e, f] w[e, f, d] the axis 0 of w counts matrices, and no rows. The
    gate has put the columns e into the `batches` of the product that gave h, and its `experts` are
    those that count no heads. If the activation is made of a router's weights, softmax(x @ r) along
    the columns of r, they may be such a gate.
    """
    long = [axis for axis in activation.summed if activation.shape[axis] > 1]
    # gate * h keeps the `exponential_of` of its gate: the number of the product x @ r, or -1, which
    # is no router's.
    is_of_router = activation.value.exponential_of in records.attention.routers
    # One axis alone, as in gate[b, e] w[e, d], is not experts and features together.
    if is_of_router and len(long) > 1:
        return True
    for projection in activation.value.projections:
        # The columns of the earlier kernel that this product sums over. Heads are not experts: an
        # output projection sums over heads and their features, and both are rows.
        summed = projection.layout.runs_along(activation.summed)
        if not projection.product.experts.isdisjoint(summed):
            return True
    return False


def _cuts_input(operand: Operand) -> bool:
    """Whether a product takes patches of an argument: its sum runs over stretches of two axes,
    as over 4 x 4 pixels.

    Images [b, 32, 32], reshaped to [b, 8, 4, 8, 4] and summed over both axes of 4, are such an
    argument. Along each of their axes the sum takes neighbors (a stride of 1), and an axis of 8
    that counts patches is left. Then `decisions` gives the kernel to AdamW, as an embedding. One
    such axis shows no patches: data [b, 128], as [b, 8, 16], may be groups of features.
    """
    for fact in operand.value.facts:
        # The layout of an "input" says where the axes of an argument of the function are in the
        # operand.
        if fact.what != "input":
            continue
        outside = axes_of(fact.layout.runs_along(operand.free))
        inside = fact.layout.runs_along(operand.summed)
        stretches = axes_of(run for run in inside if run.stride == 1)
        if len(stretches & outside) > 1:
            return True
    return False


# Products of two activations, and of an activation with numbers that do not train.


def _of_activations(
    records: Records, node: Node, result: Value, left: Operand, right: Operand
) -> Value:
    """The product of two arrays that are no matrices of parameters,
    at least one of which depends on parameters.

    It may mix the results of experts, multiply queries by keys, or softmax's weights by values.
    `result` has what it depends on.
    """
    pairs = ((left, right), (right, left))
    for operand, other in pairs:
        # A sum over some columns of a layer that keeps others may mix experts.
        _record_mixture(records, node, operand)
        # Both may be queries, keys or values, one of them frozen, but not data alone, such as an
        # adjacency matrix. The columns that the product takes are a part of their layer. Those
        # along a batch axis, as h of "bqhd,bkhd->bhqk", count heads; along b no columns lie.
        if other.value.is_of_model:
            records.record_parts(operand.value.projections)
            records.record_heads(operand.value.projections, operand.batch)
    # Either operand may be softmax's weights.
    for weights, values in pairs:
        softmaxes = _softmaxes_of(weights)
        for softmax in softmaxes:
            _record_attention(records, softmax, weights, values)
        # This does nothing unless `weights` are exponentials. Then their logits were lost before
        # this product, and the attention is listed and refused.
        if not softmaxes:
            records.record_weights(node, weights.value, values.value)
    for activation, constants in pairs:
        if not constants.value.depends_on & PARAMETER:
            return _by_constants(records, node, result, activation, constants)
    return _of_two_activations(records, node, result, left, right)


def _record_mixture(records: Records, node: Node, operand: Operand) -> None:
    """Leaves a layer w to names if a product of its result with another activation, or with numbers
    that do not train, sums over some columns of w and keeps others: these may count experts.

    With a router's weights r, sum_e r[b, e] y[b, e, f] of y = einsum("bd,edf->bef", x, w) is such a
    product. So is one with kernels that were mixed for each example, x[b, d] v[b, d, f] with
    v = einsum("be,edf->bdf", r, w). Queries times keys may be one too: once a softmax of it is
    followed to its values, `_record_attention` takes the record back.
    """
    for projection in operand.value.projections:
        layout = projection.layout
        # The runs along columns of w, but for those that are known to count experts or heads.
        columns = set(projection.product.use.columns) - projection.product.batches
        summed = layout.runs_along(operand.summed)
        kept = layout.runs_along(operand.free)
        if columns.intersection(summed) and columns.intersection(kept):
            records.record(
                node, "unknown", projection.view, "a sum over a part of its columns"
            )
        # Without batch axes, and with columns along all free axes, no axis counts examples: the
        # result is a kernel. In x @ (w + (y @ g).reshape(d, d)) this takes w out of the biases of
        # y @ g.
        if summed and not operand.batch and layout.varying.issuperset(operand.free):
            records.uses.biases -= {bias.leaf for bias in projection.biases}


def _softmaxes_of(weights: Operand) -> list[list[Logits]]:
    """The logits of each softmax in `weights` over whose keys the product sums.

    Several softmaxes may be subtracted. One has several `Logits` if it takes a sum of products, as
    q1 @ k1 + q2 @ k2 in latent attention.
    """
    of_arrays = grouped(
        (logits.value, logits)
        for logits in weights.value.logits
        if logits.stage == "weights" and logits.layout.runs_along(weights.summed)
    )
    return list(of_arrays.values())


def _record_attention(
    records: Records, softmax: Sequence[Logits], weights: Operand, values: Operand
) -> None:
    """Records an attention, softmax(logits) @ values.

    `softmax` has the logits of each product whose sum the softmax takes, as of q1 @ k1 and q2 @ k2
    in latent attention. Two things are recorded of each product:

    - for `clippable_attention`, which logits softmax takes and which axes count keys; or that it is
      refused, if a number was subtracted that differs from key to key;
    - for `matrix_axes`, which columns of queries and keys count heads.

    The rules of these products came first, and did not know that they belong to an attention. Two
    of their records are corrected: columns of one layer that several products take are one part,
    and four queries that share a key are no mixture of experts. Last, an attention whose values are
    other columns of a layer than in an earlier one is left to names.
    """
    attention = records.attention
    # Those of the values, of the queries and of the keys
    projections = [*values.value.projections]
    regions_of_side = set()
    for logits in softmax:
        product = logits.product
        # The axes of queries @ keys.T that count keys: those over which weights @ values sums, and
        # those over which softmax normalizes. A softmax over heads and keys together has one
        # temperature for all these heads: its axis of heads counts keys too.
        summed = axes_of(logits.layout.runs_along(weights.summed))
        keys = summed | logits.normalized
        # `shifts` says of each number that was subtracted from the logits along which axes it
        # differs. Only one number for all keys of a query leaves a softmax as it is. Otherwise the
        # product itself is recorded as what is not followed.
        if any(fact.layout.runs_along(weights.summed) for fact in logits.shifts):
            attention.other_readers[product] = product
        else:
            attention.softmaxes[product].append((logits, keys))
        # The left and the right operand of queries @ keys.T
        for operand in attention.operands[product]:
            projections += operand.value.projections
            # In einsum("bqghd,bkgd->bghqk", q, k) four queries h share the key head g. The product
            # has recorded that its batch axis g counts heads. Here h does so too, a free axis of q;
            # along the other free axis, of positions, no columns lie.
            records.record_heads(operand.value.projections, operand.free)
            # A fused kernel gives both queries and keys, whose regions stay two parts.
            is_query = operand.is_query(keys)
            for projection in operand.value.projections:
                # That einsum sums over d and keeps h, both columns of q, as a mixture of experts
                # does: `_record_mixture` recorded q's kernel as "unknown" there, which would leave
                # it to names. That use, if there is one, is taken back: 0 is its `k`.
                records.uses.by_operation.pop((product, projection.view.leaf, 0), None)
                side = (projection.product, is_query)
                regions_of_side.add((side, projection.layout.region))
    for (layer, _), regions in grouped(regions_of_side).items():
        # q[..., :8] k^T + q[..., 8:] r^T is q [k, r]^T, one product with all columns of q. So the
        # kernel of q stays one matrix: the parts that `record_parts` noted, one for each of the two
        # products, are taken back.
        if len(regions) > 1:
            layer.parts.difference_update(regions)
    node = records.nodes[softmax[0].product]
    _leave_single_heads_to_names(records, node, values, projections)


def _leave_single_heads_to_names(
    records: Records, node: Node, values: Operand, projections: Sequence[Projection]
) -> None:
    """Leaves an attention to names if an earlier one takes other columns of the same layer for its
    values: the function writes its heads one by one.

    From softmax(q[:, :8] k[:, :8]^T) v[:, :8] and the same of the columns from 8 on, the kernels of
    q, k and v would be cut into a part for each head, as if these were different layers. Here the
    first attention is followed, and any other is not.

    Args:
      records: Gets the columns of the values of each layer's first attention (`value_parts`).
      node: The operation queries @ keys.T, whose line the reason has.
      values: The operand of softmax's weights @ values.
      projections: Those of the values, of the queries and of the keys.
    """
    value_parts = records.attention.value_parts
    for projection in values.value.projections:
        columns = projection.layout.region
        if value_parts.setdefault(projection.product, columns) == columns:
            continue
        why = "attention with other columns of one layer"
        for part in projections:
            records.record(node, "unknown", part.view, why)


def _of_two_activations(
    records: Records, node: Node, result: Value, left: Operand, right: Operand
) -> Value:
    """The product of two activations, with logits if it may be queries times keys.

    It is a layer, so that a matrix before it is no output head, if both operands have free axes, as
    in queries @ keys.T, or if it matches two towers, as an einsum `bd,bd->b` does with the features
    of images and of texts. The same einsum of arrays that are made of the same products is not a
    layer: it may be a squared norm, as in a loss.
    """
    # Exponentials of the result may be the weights of an attention. If they multiply values, and
    # their logits were lost on the way, `record_weights` looks here, and the attention is refused.
    records.attention.candidates.add(node.index)
    # An exponential of the result gets this number as its `exponential_of`. The result itself is
    # none: softmax's weights times values are made of exponentials, but are no weights any more.
    result = result._replace(scores=node.index, exponential_of=-1)
    first = left.value
    second = right.value
    has_towers = is_match([(first, left.summed), (second, right.summed)])
    if (left.free and right.free) or has_towers:
        records.layers.add(node.index)
    # No new logits in two cases. Softmax's weights keep the logits of their attention, and so
    # weights times values have an operand with logits. Without projections there is no column of a
    # parameter that a clip could scale; one operand's are enough, as of queries times keys of data.
    has_weights = "weights" in (first.stage, second.stage)
    has_projections = first.projections or second.projections
    if has_projections and not has_weights:
        return _with_logits(records, node, result, left, right)
    # The sum of the same weights may divide the result: (exp(x) @ values) / exp(x).sum(-1).
    mixed_by = []
    for weights in (left, right):
        if _softmaxes_of(weights):
            mixed_by += weights.added_up.logits
    return result._replace(mixed_by=tuple(mixed_by))


def _with_logits(
    records: Records, node: Node, product: Value, left: Operand, right: Operand
) -> Value:
    """A product that may be the logits of an attention: queries times keys."""
    records.attention.operands[node.index] = left, right
    logits = Logits(node.index, whole(left.product_shape), value=node.outputs[0])
    return product._replace(logits=(logits,))


def _by_constants(
    records: Records, node: Node, result: Value, activation: Operand, constants: Operand
) -> Value:
    """An activation times numbers that do not train: a rotation, an average, a frozen matrix,
    keys or values.

    The result is linear in the activation: its projections go on, with the columns added up that
    the product sums over, and its logits, those of a softmax that ends here as those of a sum. If
    the numbers may be frozen keys, it has new logits.
    """
    # softmax(q k^T) @ c, of frozen values c, sums over the keys and ends an attention. Its logits
    # go on as those of a sum: with ones in c it is one, perhaps the one that divides the weights. A
    # product that sums over other axes, as one that mixes heads, ends none.
    softmaxes = _softmaxes_of(activation)
    added_up = activation.added_up
    logits = (
        follow_logits.summed(added_up)
        if softmaxes
        else follow_logits.through(node, added_up)
    )
    result = result._replace(projections=added_up.projections, logits=logits)
    is_layer = _is_frozen_layer(activation, constants)
    # `scores` names the product that a later exponential is taken to be of, perhaps a softmax. It
    # is this one in three cases, after which the result is no exponential of an older one either.
    # It is the result of a layer; or it is softmax's weights times values, which are no weights any
    # more; or it may be queries times frozen keys, as both operands have a free axis. In this third
    # case there must be no older scores: queries @ keys.T times a rotation is still their product.
    may_be_scores = activation.free and constants.free and result.scores < 0
    if is_layer or softmaxes or may_be_scores:
        result = result._replace(scores=node.index, exponential_of=-1)
    if is_layer:
        records.frozen_layers.add(node.index)
        # Frozen keys have a batch axis, as in einsum("bqd,bkd->bqk"), and a frozen matrix has none.
        # What has logits already, as softmax's weights have too, is no queries.
        if constants.batch and not activation.value.logits:
            return _with_logits(records, node, result, activation, constants)
    return result


def _is_frozen_layer(activation: Operand, constants: Operand) -> bool:
    """Whether this is a product of features by a matrix that does not train.

    The matrix is an argument or closed over, drawn at random, or without gradient.
    """
    # Numbers that the function makes itself, as a rotation, depend on none of these. Without a free
    # axis it is a vector, which has no columns.
    is_given = constants.value.depends_on & (DATA | NOISE | FROZEN)
    if not is_given or not constants.free:
        return False
    # The axes of the activation along which the columns of earlier layers lie
    column_axes: set[int] = set()
    for projection in activation.value.projections:
        column_axes |= projection.layout.varying
    # No such axis is known, as after a layer norm, which subtracts a mean of all columns. Then it
    # counts: if a frozen layer were missed, the layer before it would be taken for an output head.
    if not column_axes:
        return True
    # An adjacency matrix sums over nodes, and over no columns of the product before it.
    return not column_axes.isdisjoint(activation.summed)


# Convolutions, and products of groups of rows.


@rule("conv_general_dilated")
def _conv(records: Records, node: Node) -> Sequence[Value]:
    """A convolution, whose kernel has axes of output features, of input features,
    and of its window.

    It embeds patches (`is_patch`) if its windows do not overlap: the strides are the sizes of the
    window, which has several entries. In a depthwise one each group has one input feature.
    """
    params = node.params
    weight = records.shape(node.inputs[1])
    numbers = params["dimension_numbers"]
    out, into, *window = numbers.rhs_spec
    sizes = tuple(weight[axis] for axis in window)
    groups = params["feature_group_count"] * params["batch_group_count"]
    kernel = Kernel(
        groups=groups,
        is_depthwise=groups > 1 and weight[into] == 1,
        is_patch=tuple(params["window_strides"]) == sizes and max(sizes, default=1) > 1,
    )
    # The product sums over the input features and the window of the kernel. Which axes of the image
    # it sums over is not noted: windows are not followed.
    image = records.operand(node, 0)
    weights = records.operand(node, 1, (into, *window))
    weights.kernel = kernel
    # Entry 1 of a specification is the axis of features. `sources` has for each axis of the result
    # that of the operand which it comes from: only features are followed. The result has as many
    # axes as the kernel.
    features = numbers.out_spec[1]
    rank = len(weight)
    # A depthwise convolution with one output for each feature leaves the features where they are.
    is_kept = kernel.is_depthwise and weight[out] == groups
    of_image = numbers.lhs_spec[1] if is_kept else None
    weights.sources = [out if axis == features else None for axis in range(rank)]
    image.sources = [of_image if axis == features else None for axis in range(rank)]
    return [_by_kernel(records, node, image, weights)]


@rule("ragged_dot_general")
def _ragged(records: Records, node: Node) -> Sequence[Value]:
    """Each expert's matrix times the rows that belong to it."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batch) = numbers.dot_dimension_numbers
    rows = records.operand(node, 0)
    matrices = records.operand(node, 1, summed, (*batch, *numbers.rhs_group_dimensions))
    # The result ends with the columns of the matrices. No axis of the rows is followed.
    rank = len(rows.product_shape)
    rows.sources = [None] * rank
    matrices.sources = [None] * (rank - len(matrices.free)) + list(matrices.free)
    return [_by_kernel(records, node, rows, matrices)]


def _by_kernel(
    records: Records, node: Node, activation: Operand, weights: Operand
) -> Value:
    """The result of a convolution, or of each expert's matrix times its rows:
    a layer if the weights are parameters.

    If they are not, or can't be followed, the result only depends on both operands, and parameters
    in these are left to names.
    """
    values = [activation.value, weights.value]
    result = dependent(values)
    # Parameters alone (`is_weight`), or without groups also parameters times data, such as a masked
    # kernel. With groups these may be a kernel for each example: `vmap` makes groups of examples.
    is_followed = weights.value.is_weight or weights.kernel.groups == 1
    if weights.value.views and is_followed:
        return _by_parameter(records, node, result, weights, activation)
    # Parameters that the operands are made of (`views`) are left to names.
    records.record_views(node, node.name, values, "unknown")
    # So is w where the kernel is itself the result of a product with w, and has no view of it: in
    # sum_e r[b, e] w[e, ...] a kernel is mixed for each example.
    _record_mixture(records, node, weights)
    # A product by parameters counts as a layer also if it is not followed: what comes before it is
    # no output head.
    if weights.value.depends_on & PARAMETER:
        records.layers.add(node.index)
    # A kernel without parameters, frozen or given as data, makes a frozen layer: what comes before
    # is a hidden layer, with a warning. A depthwise one, such as a blur, mixes no features,
    # and does not count.
    elif not weights.kernel.is_depthwise:
        records.frozen_layers.add(node.index)
    return result
