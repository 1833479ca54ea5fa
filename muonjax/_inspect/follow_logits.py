"""Follow the logits of an attention through what softmax is made of: masks, their maximum, an exponential, its sum.

This finds where the logits are, and what is reported of them; the certificate says what a clip changes. Logits are lost
where they become something else, and an attention with lost logits is refused with that operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import Layout
from muonjax._inspect.values import FROZEN, PARAMETER, Addend, Logits, Summand, Value

if TYPE_CHECKING:
    from muonjax._inspect.entrywise_rules import Operation

EXPONENTIALS = ("exp", "exp2", "logistic")
_ROOTS = ("sqrt", "rsqrt", "cbrt")
_POWERS = (
    *EXPONENTIALS,
    *_ROOTS,
    "pow",
    "integer_pow",
    "square",
    "one_minus_square",
    "polynomial",
)
_STAGES = ("logits", "weights", "per query")


def after(operation: Operation) -> tuple[Logits, ...]:
    """What an operation entry by entry makes of logits, of their maximum, or of softmax's weights.

    `exp(x - largest)` of logits x makes weights, and x plus an array without parameters is masked logits.
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
    first = value.logits[0]
    if first.stage != "logits":
        return _of_weights(operation, with_logits)
    if node.name in EXPONENTIALS:
        return tuple(_exponential(node, x) for x in value.logits)
    # The logits are operand number `at`.
    at = next(k for k, v in enumerate(operation.values) if v is value)
    factor = _factor(operation, at)
    if factor is not None and first.is_biased:
        # (logits + mask) / 8: the logits before the mask are measured, times 1 / 8.
        return tuple(x._replace(unit=x.unit * factor) for x in value.logits)
    # After a concatenation of two products there are the logits of both, all of them lost: they are kept, so that each
    # attention is refused.
    if not operation.is_sum or first.is_lost:
        return through(node, value)
    return (_chosen(operation, at) if operation.is_choice else _added(operation, at),)


def through(node: Node, value: Value) -> tuple[Logits, ...]:
    """Logits after an operation that takes no other ones, of any kind: a scale, a tanh, a sum over devices.

    Whether it scales them or makes something else of them is for the certificate to say. They are lost if a mask or a
    bias was added before (`is_biased`), or their maximum subtracted (`shifted`): in tanh(logits + mask) the largest
    logit that `measure` takes before the mask is not the one that softmax gets.
    """
    logits = []
    for x in value.logits:
        # This is an exponential already, or a maximum: what follows only shows to which attention it belongs.
        if x.stage != "logits":
            logits.append(x)
        elif not x.is_biased and x.shifted is None:
            logits.append(x._replace(value=node.outputs[0]))
        else:
            logits.append(lost(node, x))
    return tuple(logits)


def lost(node: Node, x: Logits) -> Logits:
    """Logits that are something else after this operation."""
    (result,) = node.outputs
    first = x.lost if x.is_lost else result
    return x._replace(value=result, lost=first)


def _of_weights(
    operation: Operation, with_logits: Sequence[Value]
) -> tuple[Logits, ...]:
    """What an operation makes of softmax's weights, or, if there are none, of a maximum or a sum over keys.

    `with_logits` are the operands that are made of logits, the weights first. Weights divided by their sum are weights,
    and so is a difference of two softmaxes, as in differential attention, which has the logits of both. A power of
    weights, or a product of two, is the softmax of other logits: softmax(x)² is proportional to softmax(2 x).
    """
    name, stage = operation.node.name, with_logits[0].logits[0].stage
    # Next to weights, a maximum or a sum is left out: it is one number for each query, and only scales them.
    of_stage = [v for v in with_logits if v.logits[0].stage == stage]
    logits: dict[Logits, None] = {}  # each once
    for value in of_stage:
        logits |= dict.fromkeys(value.logits)
    is_product = name == "mul" and len(of_stage) > 1
    if stage == "weights" and (is_product or name in _POWERS):
        return tuple(lost(operation.node, x) for x in logits)
    return tuple(logits)


def _exponential(node: Node, x: Logits) -> Logits:
    """An exponential takes all logits, and a sigmoid takes them without their maximum subtracted."""
    # softmax(x - c) = softmax(x), and no such thing is true of a sigmoid.
    is_shifted = node.name == "logistic" and x.shifted is not None
    if is_shifted or x.layout.region:
        x = lost(node, x)
    # 2^x = exp(x ln 2)
    unit = math.log(2) if node.name == "exp2" else 1.0
    return x._replace(stage="weights", unit=x.unit * unit)


def _factor(operation: Operation, at: int) -> float | None:
    """The number above zero by which the program multiplies operand number `at`: 0.125 for `x / 8` and `at` = 0."""
    if not operation.is_scale:
        return None
    # It has to stand in the program: with a learned temperature the logits are lost.
    number = operation.records.known(operation.arrays[1 - at])
    if number is None or np.ndim(number) or not number > 0:
        return None
    if operation.node.name == "mul":
        return float(number)
    return 1 / float(number) if at == 0 else None


def _added(operation: Operation, at: int) -> Logits:
    """The sum or the difference of logits, operand number `at`, and the only other operand.

    That may be other logits, as in q1 @ k1 + q2 @ k2; the maximum of these logits; or a mask or a bias.
    """
    node, arrays = operation.node, operation.arrays
    logits, other = operation.values[at].logits[0], operation.values[1 - at]
    if products([other]) - products([operation.values[at]]):
        return _sum_of_products(node, logits, other.logits[0])
    if node.name == "sub" and at == 1:  # mask - logits
        return lost(node, logits)
    if any(
        x.stage == "per query" and x.product == logits.product for x in other.logits
    ):
        # Softmax may subtract any number that is the same for all keys. The maximum [batch, head, query, 1] repeats
        # along the keys, and differs along the other axes of the product.
        axes = {run.axis for run in logits.layout.runs_not_along(other.axes("repeats"))}
        return logits._replace(shifted=(logits.shifted or frozenset()) | axes)
    # The first mask has another unit, the maximum is subtracted already, or a clip may scale the bias, a learned one.
    if _is_scaled(logits) or _may_change([other]):
        return lost(node, logits)
    sign = -1 if node.name == "sub" else 1
    return logits._replace(
        value=node.outputs[0],
        # Before the first of several masks: later ones are added to masked logits.
        raw=logits.raw if logits.is_biased else arrays[at],
        added=(*logits.added, Addend(arrays[1 - at], node.index, sign)),
    )


def _sum_of_products(node: Node, first: Logits, second: Logits) -> Logits:
    """The sum of two products of queries and keys, each as it is or times a number, as in latent attention.

    The first may be a sum of products already. The logits are lost in all other cases: two such sums, a difference,
    products after a mask or along other axes.
    """
    if second.summands:
        first, second = second, first
    is_sum_of_two = node.name != "sub" and not second.summands
    # For each axis of the first product the one of the second that lies along it.
    axes = _axes_between(first.layout, second.layout)
    are_plain = _is_plain(first) and _is_plain(second)
    # Both products stay candidates. If a softmax takes what is lost here, `first` shows that it is an attention, which
    # is refused.
    if axes is None or not is_sum_of_two or not are_plain:
        return lost(node, first)
    summands = (*first.summands, Summand(second.product, axes))
    return first._replace(value=node.outputs[0], summands=summands)


def _is_plain(x: Logits) -> bool:
    """Whether nothing but products with numbers happened to logits, and sums of such."""
    return x == Logits(x.product, x.layout, value=x.value, summands=x.summands)


def _axes_between(first: Layout, second: Layout) -> tuple[tuple[int, int], ...] | None:
    """The axes of two products that lie along the same axes of an array; None if they are not whole there."""
    pairs = []
    for axis, n in enumerate(first.shape):
        if n == 1:
            continue
        runs = (*first.runs_along([axis]), *second.runs_along([axis]))
        if len(runs) != 2 or {run.positions.size for run in runs} != {n}:
            return None
        pairs.append((runs[0].axis, runs[1].axis))
    return None if first.region or second.region else tuple(pairs)


def _chosen(operation: Operation, at: int) -> Logits:
    """Logits after `jnp.where(mask, logits, -inf)`, where they are operand number `at`; lost if a clip may change more.

    The operands are those that the mask chooses between; `operation.chooser` is the mask.
    """
    logits = operation.values[at].logits[0]
    others = [v for k, v in enumerate(operation.values) if k != at]
    if logits.is_biased:
        # After `logits + bias`, what is hidden is told by what has been added (`masks_or_biases`). A mask that a clip
        # changes, such as `biased > 0`, would hide others.
        others.append(operation.chooser)
    else:
        # The same logits, from another branch of a `cond`, change as these do.
        others = [v for v in others if not _has_unmasked(v, logits.product)]
    if _is_scaled(logits) or _may_change(others):
        return lost(operation.node, logits)
    return logits._replace(value=operation.node.outputs[0])


def _has_unmasked(v: Value, product: int) -> bool:
    """Whether these are logits of this product before a mask is added, as another branch of a `cond` may give them."""
    for x in v.logits:
        if x.product == product and not x.is_biased and x.stage == "logits":
            return True
    return False


def _is_scaled(logits: Logits) -> bool:
    """Whether what is added now has other units than what was, or comes after their maximum."""
    return logits.unit != 1.0 or logits.shifted is not None


def _may_change(values: Iterable[Value]) -> bool:
    """Whether a clip may change these."""
    return any(v.depends_on & (PARAMETER | FROZEN) for v in values)


def products(values: Iterable[Value]) -> set[int]:
    """The products of queries and keys whose logits these are."""
    numbers = set()
    for v in values:
        numbers.update(x.product for x in v.logits if x.stage == "logits")
    return numbers
