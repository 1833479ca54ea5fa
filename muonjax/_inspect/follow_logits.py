"""Follow the logits of an attention through what softmax is made of: masks, their maximum, an exponential, its sum.

This finds where the logits are, and what is reported of them; the certificate says what a clip changes. Logits that are
a sum of products, as in latent attention, are followed once for each product. Where they become something else, nothing
is followed on, and the attention is refused with that operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import whole
from muonjax._inspect.possible_numbers import is_mask, numbers_in
from muonjax._inspect.values import FROZEN, PARAMETER, Addend, AxisFact, Logits, Value

if TYPE_CHECKING:
    from muonjax._inspect.entrywise_rules import Operation

EXPONENTIALS = ("exp", "exp2", "logistic")
_POWERS = (
    *EXPONENTIALS,
    "sqrt",
    "rsqrt",
    "cbrt",
    "pow",
    "integer_pow",
    "square",
    "one_minus_square",
    "polynomial",
)
_STAGES = ("logits", "weights", "per query")


def after(operation: Operation) -> tuple[Logits, ...]:
    """What an operation entry by entry makes of logits, of their maximum, or of softmax's weights.

    `exp(x - largest)` of logits x makes weights, and x plus an array without parameters is masked logits. Nothing is
    left of logits where they become something else.
    """
    # The first value decides: logits before the weights of an earlier softmax that they are added to, weights before
    # their sum; then those whose product comes last in the program.
    with_logits = [v for v in operation.values if v.logits]
    with_logits.sort(
        key=lambda v: (_STAGES.index(v.logits[0].stage), -v.logits[0].product)
    )
    if not with_logits:
        return ()
    value, node = with_logits[0], operation.node
    if value.logits[0].stage != "logits":
        return _of_weights(operation, with_logits)
    if node.name in ("exp", "logistic"):
        return _exponential(node, value)
    if not operation.is_sum:
        # Times a number below zero, what a mask hides, -1e9, would become the largest logits.
        if value.logits[0].is_masked and not _is_positive_scale(operation):
            return ()
        return through(node, value)
    # The logits are operand number `at`.
    at = next(k for k, v in enumerate(operation.values) if v is value)
    return _chosen(operation, at) if operation.is_choice else _added(operation, at)


def _is_positive_scale(operation: Operation) -> bool:
    """Whether what multiplies or divides logits is made of the program's own numbers, none of them 0 or below.

    Numbers that are not computed here, such as sqrt(64), are taken for positive ones.
    """
    for array, value in zip(operation.arrays, operation.values, strict=True):
        if not value.logits:
            numbers = numbers_in(operation.records.graph, array)
            if numbers is None or numbers.min() <= 0:
                return False
    return True


def through(node: Node, value: Value) -> tuple[Logits, ...]:
    """Logits after an operation that takes no other ones, of any kind: a scale, a tanh, a sum over devices.

    Whether it scales them or makes something else of them is for the certificate to say. None are left if a mask or a
    bias was added before (`is_biased`), or their maximum subtracted (`shifts`): in tanh(logits + mask) the largest
    logit that `measure` takes before the mask is not the one that softmax gets.
    """
    logits = []
    for x in value.logits:
        # This is an exponential already, or a maximum: what follows only shows to which attention it belongs.
        if x.stage != "logits":
            logits.append(x)
        elif not x.is_biased and not x.shifts:
            logits.append(x._replace(value=node.outputs[0]))
    return tuple(logits)


def _of_weights(
    operation: Operation, with_logits: Sequence[Value]
) -> tuple[Logits, ...]:
    """What an operation makes of softmax's weights, or, if there are none, of a maximum or a sum over keys.

    `with_logits` are the operands that are made of logits, the weights first. Weights divided by their sum are weights,
    and so is a difference of two softmaxes, as in differential attention, which has the logits of both. A power of
    weights, or a product of two, is the softmax of other logits: softmax(x)² is proportional to softmax(2 x).
    """
    stage = with_logits[0].logits[0].stage
    # Next to weights, a maximum or a sum is left out: it is one number for each query, and only scales them.
    of_stage = [v for v in with_logits if v.logits[0].stage == stage]
    is_product = operation.is_scale and len(of_stage) > 1
    if stage == "weights" and (is_product or operation.node.name in _POWERS):
        return ()
    logits: dict[Logits, None] = {}  # each once
    for value in of_stage:
        logits |= dict.fromkeys(value.logits)
    return tuple(logits)


def _exponential(node: Node, value: Value) -> tuple[Logits, ...]:
    """The weights that an exponential makes of all logits, and a sigmoid without their maximum subtracted."""
    weights = []
    for x in value.logits:
        # softmax(x - c) = softmax(x), and no such thing is true of a sigmoid.
        is_shifted = node.name == "logistic" and bool(x.shifts)
        if not is_shifted and not x.layout.region:
            weights.append(x._replace(stage="weights"))
    return tuple(weights)


def _added(operation: Operation, at: int) -> tuple[Logits, ...]:
    """The sum or the difference of logits, operand number `at`, and the only other operand.

    That may be logits of other products, as in q1 @ k1 + q2 @ k2; the maximum of these logits; or a mask or a bias.
    """
    node, arrays = operation.node, operation.arrays
    value, other = operation.values[at], operation.values[1 - at]
    further = _products(other, "logits")
    if further and further.isdisjoint(_products(value, "logits")):
        both = value._replace(logits=(*value.logits, *other.logits))
        return through(node, both)
    if node.name == "sub" and at == 1:  # mask - logits
        return ()
    logits = []
    for x in value.logits:
        if x.product in _products(other, "per query"):
            # Softmax may subtract any number that is the same for all keys. The maximum [batch, head, query, 1]
            # repeats along the keys. Without such a fact, a number may differ along all axes.
            facts = [fact for fact in other.facts if fact.what == "repeats"]
            everywhere = AxisFact("repeats", whole(x.layout.shape))
            shifts = (*x.shifts, *(facts or [everywhere]))
            logits.append(x._replace(shifts=shifts))
        # No mask is added after the maximum, and no array that a clip may change, such as a learned bias.
        elif not x.shifts and not _may_change([other]):
            masked = x._replace(value=node.outputs[0], is_masked=True)
            # A mask of 0 and -inf hides logits, and leaves the others as they are. Anything else may be a bias.
            is_plain = node.name == "add" and is_mask(
                operation.records.graph, arrays[1 - at]
            )
            if x.is_biased or not is_plain:
                sign = -1 if node.name == "sub" else 1
                masked = masked._replace(
                    # Before the first of several: later ones are added to masked logits.
                    raw=x.raw if x.is_biased else arrays[at],
                    added=(*x.added, Addend(arrays[1 - at], node.index, sign)),
                )
            logits.append(masked)
    return tuple(logits)


def _chosen(operation: Operation, at: int) -> tuple[Logits, ...]:
    """Logits after `jnp.where(mask, logits, -inf)`, where they are operand number `at`, if a clip may change no more.

    The operands are those that the mask chooses between; `operation.chooser` is the mask.
    """
    others = [v for k, v in enumerate(operation.values) if k != at]
    # After `logits + bias` the certificate looks at nothing, and what is hidden is told by what has been added
    # (`masks_or_biases`). A mask that a clip changes, such as `biased > 0`, would hide others.
    may_change = _may_change([*others, operation.chooser])
    logits = []
    for x in operation.values[at].logits:
        if not x.shifts and not (x.is_biased and may_change):
            logits.append(x._replace(value=operation.node.outputs[0], is_masked=True))
    return tuple(logits)


def _may_change(values: Iterable[Value]) -> bool:
    """Whether a clip may change these."""
    return any(v.depends_on & (PARAMETER | FROZEN) for v in values)


def _products(value: Value, stage: str) -> set[int]:
    """The products of queries and keys of which it has logits, weights, or a number for each query."""
    return {x.product for x in value.logits if x.stage == stage}
