"""The rules of operations entry by entry: what is linear in their operands, and what stays of each.

What is linear in an operand leaves its projections linear: sums and choices in all operands
together, a product in each, a quotient in the first. After all other functions they are nonlinear.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from muonjax._inspect import follow_logits
from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import NotFollowed, whole
from muonjax._inspect.records import Records
from muonjax._inspect.rules import rule
from muonjax._inspect.values import (
    ADDED,
    CHOICES,
    MULTIPLIED,
    NOISE,
    PARAMETER,
    SUMS,
    AxisFact,
    ParameterView,
    Projection,
    Value,
    dependent,
    grouped,
    parts_of_products,
    united,
    used_in_one_way,
)

# Numbers that are no function of the parameters.


@rule("iota")
def _iota(records: Records, node: Node) -> Sequence[Value]:
    sizes = records.shape(node.outputs[0])
    counted = node.params["dimension"]
    shape = tuple(n if axis == counted else 1 for axis, n in enumerate(sizes))
    return [Value(facts=(AxisFact("counts", whole(shape)),))]


@rule("eq")
def _eq(records: Records, node: Node) -> Sequence[Value]:
    """An array compared with 0, 1, 2, ... along an axis equals it at one index: the result is one
    hot along this axis.

    So `(tokens[:, None] == jnp.arange(10)) @ table`, as `jax.nn.one_hot` has it, is a look-up. It
    is not checked that the array is the same along this axis, as the tokens are.
    """
    # Each operand, repeated along the axes of the result where it has one entry
    values = spread_operands(records, node)
    # Parameters and columns end here: the result only depends on them.
    result = dependent(values)
    facts = []
    for value in values:
        for fact in value.facts:
            if fact.what == "counts":
                facts.append(fact._replace(what="one hot"))
    return [result._replace(facts=tuple(facts))]


@rule(
    "random_bits random_clone random_wrap random_unwrap random_seed random_fold_in random_split "
    "random_gamma threefry2x32 threefry4x32 philox2x32 philox4x32 iota_2x32_shape "
    "rng_bit_generator rng_uniform"
)
def _random(records: Records, node: Node) -> Sequence[Value]:
    """Random numbers, and keys of them."""
    return [Value(NOISE)] * len(node.outputs)


# Operations on numbers that the program contains, such as an index that may be negative.
FOLDED: dict[str, Callable[..., Any]] = {
    "lt": operator.lt,
    "add": operator.add,
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
}
_SAME_NUMBERS = "broadcast_in_dim convert_element_type pcast pvary reshape squeeze"
FOLDED |= dict.fromkeys(_SAME_NUMBERS.split(), lambda x: x)


# Entry by entry.

_ENTRYWISE = """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex cos cosh digamma div eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac integer_pow is_finite join le le_to lgamma log log1p log2 logistic lt
    lt_to max min mul ne nextafter not and one_minus_square or xor polygamma polynomial
    population_count pow random_gamma_grad regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
"""
_SCALES = ("mul", "div")
_MOST_PROJECTIONS = 6  # of one value that are followed


class Operation(NamedTuple):
    """An operation entry by entry."""

    records: Records
    node: Node
    values: Sequence[Value]  # of its operands, but for the one that a choice chooses by
    arrays: Sequence[int]  # the numbers of these operands
    chooser: Value = Value()

    @property
    def is_sum(self) -> bool:
        """Whether it is linear in all operands together. A choice is too:
        each entry is one of the operands'."""
        return self.node.name in SUMS

    @property
    def is_choice(self) -> bool:
        return self.node.name in CHOICES

    @property
    def is_scale(self) -> bool:
        return self.node.name in _SCALES

    @property
    def has_several_of_model(self) -> bool:
        """Whether several operands depend on parameters, perhaps frozen ones; what chooses among
        the others is one."""
        return sum(x.is_of_model for x in (*self.values, self.chooser)) > 1

    @property
    def what(self) -> str:
        """What it does with a parameter, in words."""
        if self.is_sum:
            return ADDED
        return MULTIPLIED if self.is_scale else self.node.name


def spread_operands(records: Records, node: Node) -> list[Value]:
    """The operands of an operation entry by entry,
    each repeated along the axes where it has one entry."""
    values = records.inputs(node)
    shape = records.shape(node.outputs[0])
    spread = []
    for value, array in zip(values, node.inputs, strict=True):
        old = records.shape(array)
        if old != shape:
            # [8, 1] next to [8, 16] has the sources (0, None): it repeats along axis 1. A scalar
            # repeats along all axes.
            sources = [k if old and old[k] == n else None for k, n in enumerate(shape)]
            value = value.repeated(old, sources, shape)
        spread.append(value)
    return spread


# The number of a device has no operands, so that it depends on nothing.
@rule(f"axis_index platform_index {_ENTRYWISE}")
def _entrywise(records: Records, node: Node) -> Sequence[Value]:
    return [entrywise(records, node, spread_operands(records, node))]


def entrywise(records: Records, node: Node, values: Sequence[Value]) -> Value:
    """The result of an operation entry by entry: on parameters and numbers alone, such as w * mask,
    on activations or parameters and data, or on data alone, in this order.

    `values`: those of its operands, each repeated along all axes of the result (`spread_operands`).
    """
    # What the result depends on, without parameters, projections and logits: these come below.
    result = dependent(values)
    # `dependent` takes the scores of the last product. But in q @ k + x @ gate they stay q @ k:
    # x @ gate does not multiply queries by keys, so it is not among the `operands` of attention.
    scores = [v.scores for v in values if v.scores in records.attention.operands]
    result = result._replace(scores=max(scores, default=result.scores))
    operation = Operation(records, node, values, node.inputs)
    if operation.is_choice:
        # The first operand says which of the others, the cases, each entry is taken from.
        chooser, *cases = values
        operation = Operation(records, node, cases, node.inputs[1:], chooser)
        # As in `jnp.where(mask, w[:4], w[4:])`: which entries of w the result has is not known, and
        # `unknown` takes the place of this rule.
        if are_several_parts(cases):
            raise NotFollowed
    elif node.name in ("add", "add_any"):
        for value, other in zip(values, reversed(node.inputs), strict=True):
            # Where the other operand is the number 0, with which Python's `sum` begins, x + 0 is x.
            # A table of zeros is no such number: it may be a state that changes, as a running mean.
            if np.array_equal(records.known(other, np.nan), 0):
                return value
    if result.is_weight:
        return result._replace(views=_of_weights(operation))
    # In a choice these are the cases: no entry of the result is one of the chooser's.
    for value in operation.values:
        # Parameters with data: activations. So is the maximum that softmax subtracts. It is without
        # gradient, so that it depends on no parameter, but it has logits.
        if value.depends_on & PARAMETER or value.logits:
            return _of_activations(operation, result)
    return result._replace(facts=_facts_of_data(operation))


def _facts_of_data(operation: Operation) -> tuple[AxisFact, ...]:
    """What is known of the axes of a sum, a choice or a product of arrays that no parameter is in.

    An image minus its mean still has the axes of an argument, by which an embedding of patches is
    known. Labels that choose are known by "one hot": one_hot(labels) * weight is zero but for one
    index, and so, but for a constant and a few indices, are one_hot(a) + one_hot(b) and smoothed
    labels, 0.9 * one_hot(labels) + 0.01.
    """
    if not (operation.is_sum or operation.is_scale):
        return ()
    facts: dict[AxisFact, None] = {}
    data = [value for value in operation.values if value.depends_on]
    for value in operation.values:
        for fact in value.facts:
            # A sum, or a choice among cases, is one hot where all of it are but numbers of the
            # program. These alone, such as I - 1/n, choose nothing.
            in_all_data = bool(data) and all(fact in other.facts for other in data)
            is_one_hot = fact.what == "one hot" and (operation.is_scale or in_all_data)
            if fact.what == "input" or is_one_hot:
                facts[fact] = None
    return tuple(facts)


def are_several_parts(values: Sequence[Value]) -> bool:
    """Whether these hold several parts of one parameter, or of its product:
    two regions of one origin."""
    parts: set[tuple[Any, Any]] = set()
    for value in values:
        parts |= {(view.leaf, view.layout.region) for view in value.views}
        for projection in value.projections:
            parts.add((projection.product, projection.layout.region))
    origins = {origin for origin, _ in parts}
    return len(origins) < len(parts)


# Operands that are made of parameters alone.


def _of_weights(operation: Operation) -> tuple[ParameterView, ...]:
    """The parameters that go on in the result of an operation on parameters and numbers alone, such
    as a weight times its mask, or tanh(w): a product may take it as a matrix.

    Two kinds are recorded as added or multiplied, and not followed further: a bias or a gain, which
    repeats along an axis of another parameter, and a parameter that noise multiplied, next to
    another one, as s in the sampled weight mu + s * noise.
    """
    values = operation.values  # in a choice the cases, and not what chooses among them
    several = sum(bool(value.views) for value in values) > 1
    # The axes along which the parameters in each operand differ: none in a mask of numbers, so that
    # a parameter which repeats along an axis of a mask is still the weight. A bias or a gain
    # differs along fewer axes than the weight.
    extents = [value.varying for value in values]
    if operation.is_sum:
        # In a column plus a row each differs along fewer axes than the sum, so that both are
        # biases. A column times a row is another case: both are followed, as factors of a matrix.
        extents.append(frozenset().union(*extents))
    views = []
    for value in values:
        repeats = any(value.varying < extent for extent in extents)
        # Alone, as a weight with dropout, it is the weight.
        is_noisy = several and bool(value.depends_on & NOISE)
        if repeats or is_noisy:
            operation.records.record_views(operation.node, operation.what, [value])
        else:
            # The result is made of it, and may be a matrix.
            views += value.views
    return tuple(dict.fromkeys(views))


# Operands that are made of parameters and data.


def _of_activations(operation: Operation, result: Value) -> Value:
    """`result`, which says what the result of an operation depends on and has the scores of its
    operands, with the parameters, projections and logits that go on. Operands are activations, or
    parameters and data.

    Each operand that is made of parameters alone is recorded as added or multiplied, as a bias or a
    gain is. It goes on as well, as w in w * mask or w + data may be a matrix still: if a product
    takes it, this record does not count.
    """
    records = operation.records
    node = operation.node
    values = operation.values
    weights = [value for value in values if value.is_weight]
    records.record_views(node, operation.what, weights)
    # In x * y each operand may be a gate, a norm or labels for the columns of the other.
    if operation.is_scale:
        # (exp(x) @ values) / exp(x).sum(-1), an attention that was recorded at exp(x) @ values
        if node.name == "div" and follow_logits.is_softmax(*values):
            return values[0]
        _record_factors(records, node, *values)
    elif operation.is_sum:
        # In tanh(q[:, :4]) + q[:, 4:] one slice has gone through a tanh and the other has not: they
        # are used differently, and both become parts of q.
        _record_meeting_parts(records, values)
    # Linear still, or nonlinear from here on; after a sum with the parameters that it adds.
    projections = _projections(operation)
    # The weights of a softmax, if the scores are those of queries and keys: where they meet values,
    # an attention is listed. 2 ** scores is an exponential, too, unlike scores ** 2, which is also
    # a "pow".
    if values[-1].is_of_model and node.name in (*follow_logits.EXPONENTIALS, "pow"):
        result = result._replace(exponential_of=result.scores)
    return result._replace(
        views=_of_masked_weights(operation),
        projections=projections,
        logits=follow_logits.after(operation),
    )


def _of_masked_weights(operation: Operation) -> tuple[ParameterView, ...]:
    """The parameters that go on from a product of parameters and data, such as w * mask,
    or from a mixture: a sum or a choice of such products, parameters and data, such as w + data.

    w0 * a + w1 * (1 - a) is a mixture of two matrices. A sum with a layer's result, with logits, or
    with parameters that are not followed any more, as tanh(w0 * a), is no mixture, and no
    parameters go on. For a product there is no such condition: the gain in gain * (x @ w) goes on.
    """
    values = operation.values
    if operation.is_sum:  # or a choice, which counts as one
        for value in values:
            # A layer's result, logits, or parameters that are not followed any more
            is_no_mixture = not value.views or value.projections or value.logits
            # Data have no views either, and may be added. So may what went through a
            # `stop_gradient`, which depends on FROZEN in place of PARAMETER: first-order MAML and
            # SAM add gradients.
            if value.depends_on & PARAMETER and is_no_mixture:
                return ()
    # Any other operation than a sum, a choice or a product, as tanh(w * mask), ends them.
    elif not operation.is_scale:
        return ()
    return tuple(view for value in values for view in value.views)


def _projections(operation: Operation) -> tuple[Projection, ...]:
    """The projections of all operands as the result has them, with the parameters that a sum adds
    as their biases: a clip scales x @ w + b by scaling both w and b. A choice counts as a sum."""
    records = operation.records
    # Each operand with its projections after the operation: nonlinear if it is not linear in this
    # operand, as a quotient in the divisor.
    operands = [
        value._replace(projections=_projections_of_operand(operation, k))
        for k, value in enumerate(operation.values)
    ]
    # One projection for each product, of all its parts; or none if there are too many products, as
    # in a residual stream: then the columns of each are recorded as one part.
    projections = projections_of_all(records, operands)
    if not operation.is_sum:
        return projections
    # x[0] @ w[0] + x[1] @ w[1] makes axis 0 of w rows. In a choice each entry has one summand, so
    # no slices are added up.
    if not operation.is_choice:
        _record_sum_of_slices(records, operands)
    added = [
        view for value in operation.values if value.is_weight for view in value.views
    ]
    with_biases = []
    for projection in projections:
        for view in added:
            # A bias lies along columns alone, and gets no weight decay. Positions [tokens, width],
            # which do, lie along tokens too.
            if view.layout.varying <= projection.layout.varying:
                records.uses.biases.add(view.leaf)
        biases = tuple(dict.fromkeys((*projection.biases, *added)))
        with_biases.append(projection._replace(biases=biases))
    return tuple(with_biases)


def _projections_of_operand(operation: Operation, k: int) -> tuple[Projection, ...]:
    """The projections in operand number `k`, as they are after the operation."""
    others = [other for i, other in enumerate(operation.values) if i != k]
    before = operation.values[k].projections
    if _is_linear(operation, k, others):
        return before
    projections = []
    for projection in before:
        # Each entry of tanh(x @ w), without any other operand, or of its product with a gate still
        # comes from one column of w: it is unmixed. Other columns of w, or a norm of all of them,
        # mix the columns: then `after_nonlinearity` records these as a part.
        unmixed = all(_keeps_columns(projection, other) for other in others)
        after = after_nonlinearity(
            operation.records, projection, operation.node, unmixed=unmixed
        )
        projections.append(after)
    return tuple(projections)


def _is_linear(operation: Operation, k: int, others: Sequence[Value]) -> bool:
    """Whether an operation is linear in operand number `k`, where `others` are its other operands.

    - A product is linear unless the other factor is an activation, made of parameters and data,
      as k is in q * k. A quotient is not linear in its divisor.
    - A sum, or a choice, is linear if each other operand has projections too, is a bias, or is a
      number in place of what a mask hides. Any other, as the data in x + x @ w, makes it nonlinear:
      scaling w scales a part of the sum.
    - All other operations, such as tanh, are not linear.
    """
    if operation.is_scale:
        is_divisor = operation.node.name == "div" and k == 1
        return not is_divisor and not others[0].is_activation
    for other in others:
        replaces_hidden = operation.is_choice and not other.depends_on
        if not (other.is_weight or other.projections or replaces_hidden):
            return False
    return operation.is_sum


def _keeps_columns(projection: Projection, other: Value) -> bool:
    """Whether the columns of a projection may still be cut into parts after a sum or a product with
    `other`: each entry comes from one of them, or from those of one head.

    `other` may come from elsewhere, or be a statistic of some of the columns,
    as in a norm of each head.
    """
    # `other` does not depend on the product.
    if not projection.product.bit & other.depends_on:
        return True
    # SiLU is a projection times a function of itself, column by column. Other columns, or the
    # result of a later layer, which is made of all columns, would mix them.
    if other.projections:
        columns = [(part.product, part.layout) for part in other.projections]
        return (projection.product, projection.layout) in columns
    # A norm of each head of [batch, heads, 16] multiplies it by [batch, heads, 1], which repeats
    # along the columns of a head. Heads are left, between which parts may still be cut. A norm of
    # all columns leaves none, and what repeats along no axis may be made of any columns.
    repeats = other.axes("repeats")
    return bool(repeats and projection.layout.runs_not_along(repeats))


def after_nonlinearity(
    records: Records, projection: Projection, node: Node, unmixed: bool
) -> Projection:
    """A projection after an operation that is not linear in the product.

    `unmixed` says that each entry still comes from one column. Otherwise the columns that are mixed
    here are recorded as a part.
    """
    if not unmixed:
        records.record_parts([projection])
    nonlinear_at = node.index if projection.is_linear else projection.nonlinear_at
    return projection._replace(
        nonlinear_at=nonlinear_at, unmixed=projection.unmixed and unmixed
    )


def projections_of_all(
    records: Records, values: Iterable[Value]
) -> tuple[Projection, ...]:
    """The projections in a sum or a concatenation of these values, one for each product.

    If the products are too many, as in a residual stream, they are not followed further: nothing is
    returned, and the columns of each are recorded as one part.
    """
    projections = tuple(map(united, parts_of_products(values)))
    if len(projections) <= _MOST_PROJECTIONS:
        return projections
    records.record_parts(projections)
    return ()


# What sums and products entry by entry say about parameters.


def _record_factors(records: Records, node: Node, x: Value, y: Value) -> None:
    """Records what each operand of x * y may be for the other one: a softmax's weights, a norm,
    labels, a gate. A quotient x / y counts as a product."""
    # How many axes have several entries. Those with one are never in `repeats`.
    long_axes = sum(n > 1 for n in records.shape(node.outputs[0]))
    for value, factor in ((x, y), (y, x)):
        repeats = factor.axes("repeats")
        # An attention may be sum(weights * values), whose weights [q, k, 1] repeat along the
        # columns of the values. It is listed and refused. `record_weights` does nothing if the
        # factor is not made of exponentials, or the value is made of the same ones, as in softmax's
        # exp(x) / sum(exp(x)).
        if repeats:
            records.record_weights(node, factor, value)
        # weights @ values next to a sum of these weights that does not divide them as softmax does:
        # perhaps one over several heads.
        sums = [logits.product for logits in follow_logits.summed(factor)]
        for logits in value.mixed_by:
            if logits.product in sums:
                records.attention.other_readers.setdefault(logits.product, node.index)
        # One number scales all of w, as its norm in w / norm(w). The products u @ w @ v that make a
        # spectral norm are no uses of w as a matrix: `decisions` leaves out the products that such
        # a number depends on, for each of which `depends_on` has a bit.
        if value.is_weight and len(repeats) == long_axes:
            for view in value.views:
                records.uses.scales[view.leaf] |= factor.depends_on
        # sum(one_hot(labels) * log_softmax(y)) chooses a column of y, which may be the result of an
        # output head. This does nothing if the factor is not one hot, or not made of data alone.
        records.record_choice_by_labels(value, factor.axes("one hot"), factor)
        # Only what is made of parameters and data, as a router's softmax, may be a gate.
        if not factor.is_activation:
            continue
        # gate[b, e, 1] * y[b, e, f], of a layer's result y: the gate repeats along f, where y has
        # columns (`runs_along`), so the columns e count experts, whose matrices are separate
        # (`batches`). A factor made of y itself, as in a norm, is no gate.
        for projection in value.projections:
            layout = projection.layout
            product = projection.product
            if not product.bit & factor.depends_on and layout.runs_along(repeats):
                product.batches.update(layout.runs_not_along(repeats))


def _record_meeting_parts(records: Records, values: Iterable[Value]) -> None:
    """Records columns of one product as parts if a sum adds different functions of them:
    tanh(q[:, :4]) + q[:, 4:]."""
    for parts in parts_of_products(values):
        if not used_in_one_way(parts):
            records.record_parts(parts)


def _record_sum_of_slices(records: Records, values: Iterable[Value]) -> None:
    """Records along which axes slices of one parameter differ, if a sum adds products with them.

    The sum over heads of x[h] @ w[h], written as a Python loop, is one:
    so axis 0 of w counts rows, and not matrices.
    """
    # Projections with nothing but sums and scales between their product and this sum: a nonlinear
    # one is of another layer.
    by_leaf = grouped(
        (projection.view.leaf, projection)
        for value in values
        for projection in value.projections
        if projection.is_linear
    )
    for projections in by_leaf.values():
        # In the order of the program: a sum may name the later product first.
        first, *others = sorted(projections, key=lambda x: x.product.use.node)
        region = first.view.layout.region
        for other in others:
            # In a residual stream the second layer's input depends on the first layer's product:
            # w[0] and w[1] are two matrices then.
            input_of_other = records.values[other.product.use.activation]
            if not first.product.bit & input_of_other.depends_on:
                # The axes along which one slice has another part of the parameter than the other
                axes = {axis for axis, _ in region ^ other.view.layout.region}
                records.uses.summed_slices[first.view.leaf] |= axes
