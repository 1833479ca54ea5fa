"""Follow the logits of an attention through what softmax is made of: masks, their maximum,
an exponential, its sum.

This finds where the logits are, and what is reported of them; the certificate says what a clip
changes. Logits that are a sum of products, as in latent attention, are followed once for each
product. Where they become something else, nothing is followed on,
and the attention is refused with that operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import axes_of
from muonjax._inspect.possible_numbers import is_mask, numbers_in
from muonjax._inspect.values import Addend, Logits, Value, grouped

if TYPE_CHECKING:
    from muonjax._inspect.entrywise_rules import Operation

EXPONENTIALS = ("exp", "exp2", "logistic")
_ROOTS = "sqrt rsqrt cbrt pow integer_pow square one_minus_square polynomial"
# Operations that make no softmax of softmax's weights
_POWERS = (*EXPONENTIALS, *_ROOTS.split())


def after(operation: Operation) -> tuple[Logits, ...]:
    """What logits the result of an operation entry by entry has, if operands are logits,
    softmax's weights, or the maximum of logits.

    `exp(x - largest)` of logits x makes weights, and x plus an array without parameters is masked
    logits. Nothing is left of logits where they become something else.
    """
    node = operation.node
    values = operation.values
    # Which operands, counted from 0, by how far their logits have come, such as
    # {"logits": [0], "maximum": [1]} for x - largest. All logits of one array are at one stage.
    operands = grouped((v.stage, k) for k, v in enumerate(values))
    if "logits" not in operands:
        return _from_softmax(operation, operands)
    # The logits of the first such operand go on, and those of a second one only where a sum adds
    # them (`_added`). Weights or a maximum in another operand end here: `clippable_attention`
    # refuses an attention whose logits end before its values.
    at = operands["logits"][0]
    value = values[at]
    # The exponential of a softmax, or the sigmoid that some attentions have in its place. 2 ** x
    # makes no weights: it goes on as logits, below, and as no weights reach the values, the
    # attention is refused there (`Records.record_weights`).
    if node.name in ("exp", "logistic"):
        return _exponential(node, value)
    # A choice counts as a sum too (`is_sum`), so it is asked for first.
    if operation.is_choice:
        return _chosen(operation, at)
    # A sum of two operands, or a difference
    if operation.is_sum:
        return _added(operation, at)
    # Times a number below zero, what a mask hides, -1e9, would become the largest logits: masked
    # logits end there, and times data, whose sign is not known.
    if value.logits[0].is_masked and not _is_positive_scale(operation):
        return ()
    # All else, such as a scale or a tanh. `through` ends logits to which a bias was added, or from
    # which their maximum was subtracted; of others the certificate says whether the clip may pass.
    return through(node, value)


def _is_positive_scale(operation: Operation) -> bool:
    """Whether what multiplies or divides logits is made of the program's own numbers,
    none of them 0 or below.

    Numbers that are not computed here, such as sqrt(64), are taken for positive ones.
    """
    for array, value in zip(operation.arrays, operation.values, strict=True):
        if not value.logits:
            numbers = numbers_in(operation.records.graph, array)
            if numbers is None or numbers.min() <= 0:
                return False
    return True


def through(node: Node, value: Value) -> tuple[Logits, ...]:
    """The logits of an array after an operation that is no mask, maximum or exponential: a scale,
    a tanh, a sum.

    The certificate says whether it scales them. Logits to which a bias was added, or what may be
    one (`is_biased`), or from which their maximum was subtracted (`shifts`), end here: `measure`
    takes the largest one before that, which is not the one that softmax gets of
    tanh(logits + bias).
    """
    logits = []
    for x in value.logits:
        # This is an exponential already, or a maximum: what follows only shows to which attention
        # it belongs.
        if x.stage != "logits":
            logits.append(x._replace(exponentials=-1))
        elif not x.is_biased and not x.shifts:
            # `value` is the array of the logits so far, in the end the one that softmax takes.
            logits.append(x._replace(value=node.outputs[0]))
    return tuple(logits)


def _from_softmax(
    operation: Operation, operands: dict[str, list[int]]
) -> tuple[Logits, ...]:
    """The logits of a result that is made of softmax's weights, of their sum, or of a maximum over
    keys.

    `operands` says which operands, counted from 0, are "weights", which are a "sum" of weights, and
    which a "maximum".

    Weights divided by their sum are weights, and so is a difference of two softmaxes, as in
    differential attention, which has the logits of both. A power or an exponential of weights, or
    a product or a quotient of two, is no softmax of these logits: softmax(x)² is proportional to
    softmax(2 x).
    """
    weights = operands.get("weights", [])
    is_product = operation.is_scale and len(weights) > 1
    if weights and (is_product or operation.node.name in _POWERS):
        return ()
    logits = []
    # A sum or a maximum, mostly one number for each query, only scales the weights next to it.
    for k in weights or operands.get("sum") or operands.get("maximum", []):
        logits += operation.values[k].logits
    # Weights stay those of one head if no other array of the model comes in, as none does with a
    # mask. A number, such as 1e-6, may be added to their sum, or bound it from below.
    is_same = weights or operation.node.name in ("add", "max")
    if operation.has_several_of_model or not is_same:
        logits = [x._replace(exponentials=-1) for x in logits]
    return normalized(logits, operation.values, operation.is_scale)


def is_softmax(numerator: Value, divisor: Value) -> bool:
    """Whether a quotient is softmax(x) @ values, written as (exp(x) @ values) / exp(x).sum(-1).

    Numerator and divisor are made of one array of exponentials, and have the same positions along
    each axis of queries @ keys.T: a sum over several heads has the positions of all of these. What
    else was done to either does not count, such as a mask, as long as no other head comes in.
    """
    # The first run of a layout only tells where it has holes.
    of_weights = {(x.exponentials, x.layout.runs[1:]) for x in numerator.mixed_by}
    of_sum = {(x.exponentials, x.layout.runs[1:]) for x in divisor.logits}
    is_known = all(x.exponentials >= 0 for x in divisor.logits)
    return is_known and of_weights == of_sum != set()


def summed(value: Value) -> tuple[Logits, ...]:
    """The logits of a sum of softmax's weights, or of a sum of such sums.
    A maximum or a minimum of them counts as a sum."""
    return tuple(
        x._replace(stage="sum") for x in value.logits if x.stage in ("weights", "sum")
    )


def normalized(
    logits: Iterable[Logits], values: Sequence[Value], is_scale: bool = False
) -> tuple[Logits, ...]:
    """These logits after an operation that also takes `values`, such as the divisor of softmax's
    weights.

    Where `values` have a sum of softmax's weights, the weights are normalized over each axis of
    the product queries @ keys.T along which the sum has other positions than the weights: the axis
    of keys, and that of heads if the sum goes over heads too. Where weights that nothing divided
    yet were added up along an axis, as by a matrix that mixes heads, they are normalized over this
    axis, too: one softmax goes over all of these heads. A sum that is put next to weights before
    they are divided counts as well, as a slot does that a concatenation adds. After a product or a
    quotient (`is_scale`) with such a sum, another operation only mixes the weights with sums, as
    where the mean over heads is added to each head.

    Logits end where one of `values` is made of their exponentials and was not followed, such as
    the last entry of a `cumsum`: it may be a sum over several heads.
    """
    lost = {value.exponential_of for value in values if not value.logits}
    totals = [x for value in values for x in value.logits if x.stage == "sum"]
    result = []
    for x in logits:
        is_mixed = x.is_divided and not is_scale
        # The first run of a layout only tells where it has holes.
        runs = set(x.layout.runs[1:])
        added_up = {run for run in runs if len(run.positions) > 1 and not x.is_divided}
        for total in totals:
            if total.product == x.product and not is_mixed:
                # The sum has the positions of all keys, and of all heads if it goes over these.
                others = runs.difference(total.layout.runs)
                axes = x.normalized | axes_of(others | added_up)
                x = x._replace(normalized=axes, is_divided=is_scale)
        if x.product not in lost:
            result.append(x)
    return tuple(dict.fromkeys(result))


def _exponential(node: Node, value: Value) -> tuple[Logits, ...]:
    """The weights that an exponential makes of logits,
    or a sigmoid of logits from which nothing was subtracted."""
    weights = []
    for x in value.logits:
        # softmax(x - c) = softmax(x), and no such thing is true of a sigmoid.
        is_shifted = node.name == "logistic" and x.shifts
        # A slice of the logits, which has a `region`, ends here: what is measured is one array, and
        # other slices may go into other softmaxes.
        if not is_shifted and not x.layout.region:
            weights.append(x._replace(stage="weights", exponentials=node.outputs[0]))
    return tuple(weights)


def _added(operation: Operation, at: int) -> tuple[Logits, ...]:
    """Logits, operand number `at`, plus or minus the only other operand: logits of other products,
    as in q1 @ k1 + q2 @ k2, the maximum of these logits, or else a mask or a bias.

    Logits that none of these cases takes are left out, and their attention is refused.
    """
    node = operation.node
    value, other = operation.values[at], operation.values[1 - at]
    products = {x.product for x in other.logits}
    if other.stage == "logits":
        # In x + x.mT both are of one product: these are not followed.
        if not products.isdisjoint(x.product for x in value.logits):
            return ()
        # From here on one array has the logits of all these products. A sign is not kept: a clip
        # scales a difference as it scales a sum. `through` leaves out logits to which a bias was
        # added, or from which their maximum was subtracted.
        return through(node, value._replace(logits=(*value.logits, *other.logits)))
    # In mask - logits the largest ones are the least of these logits.
    if node.name == "sub" and at == 1:
        return ()
    logits = []
    for x in value.logits:
        # Its maximum, or the logarithm of a sum of its exponentials
        if x.product in products:
            # Softmax may subtract any number that is the same for all keys, such as the maximum
            # [batch, head, query, 1]. Its fact "repeats" has the axes along which it differs, here
            # all but that of the keys; one without this fact may differ along all, which
            # `repeating` notes. If it differs along the keys, `clippable_attention` refuses.
            other = other.repeating(x.layout.shape)
            shifts = [fact for fact in other.facts if fact.what == "repeats"]
            x = x._replace(shifts=(*x.shifts, *shifts))
            # exp(x - logsumexp(x)) has divided by a sum already.
            logits += normalized([x], [other], is_scale=True)
        # A mask or a bias may be added before the maximum is subtracted, and not after it: the
        # largest logits are measured before. Nor may it depend on parameters, as a learned bias
        # does: then a clip may change it.
        elif not x.shifts and not other.is_of_model:
            logits.append(_masked(operation, at, x))
    return tuple(logits)


def _masked(operation: Operation, at: int, logits: Logits) -> Logits:
    """Logits, in operand number `at`, after the other operand is added or subtracted:
    a mask or a bias.

    A mask, known to hold only 0 and numbers of `MASKED` (-9000) or less, leaves all logits that it
    does not hide as they are. Anything else, also a mask that is subtracted, may be a bias, and is
    listed in `added`, for `doubt_of_masks` to warn or refuse. Then `measure` takes the largest
    numbers of `raw`, the array before the first of these, where no -9000 or less was added.
    """
    # Both count as masked, which `after` asks before it multiplies logits by a number: what may be
    # a bias may hide entries as well.
    node, addend = operation.node, operation.arrays[1 - at]
    masked = logits._replace(value=node.outputs[0], is_masked=True)
    if node.name == "add" and is_mask(operation.records.graph, addend):
        return masked
    # A difference is logits - addend: `_added` follows no logits of mask - logits.
    sign = -1 if node.name == "sub" else 1
    return masked._replace(
        # Where a bias was added before, `raw` is there already.
        raw=logits.raw if logits.is_biased else operation.arrays[at],
        added=(*logits.added, Addend(addend, node.index, sign)),
    )


def _chosen(operation: Operation, at: int) -> tuple[Logits, ...]:
    """The logits after a choice in which they are case number `at`, as in
    `jnp.where(mask, logits, -inf)`.

    If the condition (`chooser`) or another case depends on parameters, a clip may change it, as the
    mask `x > 0` of logits x. The certificate refuses that if it comes by here. Where a bias was
    added it checks no further than the logits before that (`raw`): so biased logits are followed no
    further. Nor are logits from which their maximum was subtracted (`shifts`): their largest one is
    measured before that, without this mask.
    """
    may_change = operation.has_several_of_model
    logits = []
    for x in operation.values[at].logits:
        if not x.shifts and not (x.is_biased and may_change):
            logits.append(x._replace(value=operation.node.outputs[0], is_masked=True))
    return tuple(logits)
