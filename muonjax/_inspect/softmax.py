"""Follow the logits of an attention through what softmax is made of: masks, their maximum, an exponential, its sum.

This finds where the logits are, and what is reported of them; the certificate says what a clip changes. Logits are lost
where they become something else, and an attention with lost logits is refused with that operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from muonjax._inspect.constants import MASKED, numbers_in
from muonjax._inspect.graph import Graph, Node
from muonjax._inspect.layout import Layout
from muonjax._inspect.values import CHOICES, FROZEN, PARAMETER, SUMS, Addend, Logits, Summand, Value

# Softmax gives e^-20, 2e-9, of a share to what so much is added to; a larger number hides nothing.
_HIDES = -20.0
_ROUNDING = 1e-3  # in what a mask adds to what it shows, as in the logarithm of 1 + 1e-9
_MOST_ABOVE = 2  # numbers above `_HIDES` in a table that may be a mask; one with more is a bias
EXPONENTIALS = ("exp", "exp2", "logistic")
_ROOTS = ("sqrt", "rsqrt", "cbrt")
_POWERS = (*EXPONENTIALS, *_ROOTS, "pow", "integer_pow", "square", "one_minus_square", "polynomial")
_STAGES = ("logits", "weights", "largest")


def after(
    graph: Graph, node: Node, which: Value, values: Sequence[Value], operands: Sequence[int]
) -> tuple[Logits, ...]:
    """What an operation entry by entry makes of logits, of their maximum, or of softmax's weights.

    Args:
      graph: The operations of the function.
      node: The operation.
      which: What a choice chooses by.
      values: The operands, without that.
      operands: Their numbers.
    """
    held = [v for v in values if v.logits]
    held.sort(key=lambda v: (_STAGES.index(v.logits[0].stage), -v.logits[0].product))
    if not held:
        return ()
    if held[0].logits[0].stage != "logits":
        return _of_weights(node, held, values)
    if node.name in EXPONENTIALS:
        return tuple(_exponential(node, x) for x in held[0].logits)
    at = next(k for k, v in enumerate(values) if v is held[0])
    if (factor := _factor(graph, node, operands, at)) is not None and held[0].logits[0].raw >= 0:
        return tuple(_in_other_units(node, x, factor) for x in held[0].logits)
    return _of_sum(node, which, values, operands, at)


def scaled(node: Node, v: Value) -> tuple[Logits, ...]:
    """Logits times a number, or moved."""
    if not v.logits or v.logits[0].stage != "logits":
        return v.logits
    return tuple(
        x._replace(value=node.outputs[0]) if x.raw < 0 and x.shifted is None else lost(node, x)
        for x in v.logits
    )


def lost(node: Node, x: Logits) -> Logits:
    """Logits that are something else after this operation."""
    return x._replace(value=node.outputs[0], lost=node.outputs[0] if x.lost < 0 else x.lost)


def _of_weights(node: Node, held: Sequence[Value], values: Sequence[Value]) -> tuple[Logits, ...]:
    """Several softmaxes may be subtracted. A power of weights, or a product of two, belongs to other logits."""
    stage = held[0].logits[0].stage
    found = dict.fromkeys(x for v in held for x in v.logits if x.stage == stage)
    same = [{x.product for x in v.logits if x.stage == "weights"} for v in values]
    is_power = node.name in _POWERS or (node.name == "mul" and set.intersection(*same))
    return tuple(lost(node, x) if stage == "weights" and is_power else x for x in found)


def _exponential(node: Node, x: Logits) -> Logits:
    """An exponential takes all logits, and a sigmoid takes them without their maximum subtracted."""
    if not x.layout.is_all or (node.name == "logistic" and x.shifted is not None):
        x = lost(node, x)
    return x._replace(stage="weights", unit=x.unit * (math.log(2) if node.name == "exp2" else 1.0))


def _factor(graph: Graph, node: Node, operands: Sequence[int], at: int) -> float | None:
    """The number above zero that operand number `at` is multiplied by."""
    number = graph.known.get(operands[1 - at]) if len(operands) == 2 else None
    if number is None or node.name not in ("mul", "div") or np.ndim(number) or not number > 0:
        return None
    if node.name == "mul":
        return float(number)
    return 1 / float(number) if at == 0 else None


def _in_other_units(node: Node, x: Logits, factor: float) -> Logits:
    """Logits and their mask, scaled together: they are measured before."""
    return lost(node, x) if x.shifted is not None else x._replace(unit=x.unit * factor)


def _of_sum(
    node: Node, which: Value, values: Sequence[Value], operands: Sequence[int], at: int
) -> tuple[Logits, ...]:
    """Logits, operand number `at`, of which a choice keeps some, or to which something is added."""
    v, others = values[at], [v for k, v in enumerate(values) if k != at]
    logits = v.logits[0]
    if node.name not in SUMS or (node.name in CHOICES and logits.lost >= 0):
        return scaled(node, v)
    if node.name in CHOICES:
        return (_chosen(node, logits, which, others),)
    if products(others) - products([v]):
        return (_sum_of_products(node, logits, others[0].logits[0]),)
    is_subtracted = node.name == "sub" and at == 1
    maxima = [x for x in others[0].logits if x.stage == "largest" and x.product == logits.product]
    if logits.lost >= 0 or (is_subtracted and not maxima):
        return scaled(node, v)
    if is_subtracted:
        return (lost(node, logits),)
    if maxima:
        axes = {run.axis for run in logits.layout.runs_not_along(others[0].axes("repeats"))}
        return (logits._replace(shifted=(logits.shifted or frozenset()) | axes),)
    if _is_scaled(logits) or _may_change(others):
        return (lost(node, logits),)
    addend = Addend(operands[1 - at], node.index, -1 if node.name == "sub" else 1)
    # The logits as they are here, not where they were scaled.
    raw = operands[at] if logits.raw < 0 else logits.raw
    added = (*logits.added, addend)
    return (logits._replace(value=node.outputs[0], raw=raw, added=added),)


def _sum_of_products(node: Node, first: Logits, second: Logits) -> Logits:
    """The sum of two products of queries and keys, each as it is or times a number; lost otherwise."""
    if second.summands:
        first, second = second, first
    axes = _axes_between(first.layout, second.layout)
    if axes is None or node.name == "sub" or not (_is_plain(first) and _is_plain(second)):
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
        runs = (*first.runs_along([axis]), *second.runs_along([axis]))
        if n > 1 and (len(runs) != 2 or {run.positions.size for run in runs} != {n}):
            return None
        if n > 1:
            pairs.append((runs[0].axis, runs[1].axis))
    return tuple(pairs) if first.is_all and second.is_all else None


def _chosen(node: Node, logits: Logits, which: Value, others: Sequence[Value]) -> Logits:
    """Logits where a mask chooses them, with something that a clip does not change in place of the others."""
    if logits.raw < 0:
        same = logits.product, logits.raw, logits.stage
        others = [v for v in others if same not in [(x.product, x.raw, x.stage) for x in v.logits]]
    else:
        # Once a mask is added, what is hidden is told by what it adds: a clip may not choose.
        others = [*others, which]
    if _is_scaled(logits) or _may_change(others):
        return lost(node, logits)
    return logits._replace(value=node.outputs[0])


def _is_scaled(logits: Logits) -> bool:
    """Whether what is added now has other units than what was, or comes after their maximum."""
    return logits.unit != 1.0 or logits.shifted is not None


def _may_change(values: Iterable[Value]) -> bool:
    """Whether a clip may change these."""
    return any(v.depends_on & (PARAMETER | FROZEN) for v in values)


def products(values: Iterable[Value]) -> set[int]:
    """Those whose logits these are."""
    return {x.product for v in values for x in v.logits if x.stage == "logits"}


class Masks(NamedTuple):
    """What is known of the masks and the biases of an attention."""

    hidden: float = MASKED  # what adds this or less to a logit hides it
    problem: str = ""
    doubt: str = ""


def masks_in(graph: Graph, added: Sequence[Addend]) -> Masks:
    """Which of the arrays that are added to logits are masks, and how they are told from biases.

    Args:
      graph: The operations of the function.
      added: These arrays.
    """
    masks: list[float] = []
    biases: list[Addend] = []
    doubts: list[Addend] = []
    for addend in added:
        effect = _effect(graph, addend)
        if effect is None:
            doubts.append(addend)
        elif effect == 0:
            biases.append(addend)
        else:
            masks.append(effect)
    largest = max(masks, default=-math.inf)
    if not biases and not doubts:
        return Masks(max(largest / 2, MASKED))
    # A bias of ordinary size stays far above `MASKED`, and a mask of -1e4 below it.
    if largest <= MASKED:
        return Masks(doubt=graph.line(doubts[0].node) if doubts else "")
    line = graph.line((*doubts, *biases)[0].node)
    return Masks(problem=f"a mask that adds {largest:g} can't be told from a bias: {line}")


def _effect(graph: Graph, addend: Addend) -> float | None:
    """The largest number below zero that a mask adds; 0 for a bias; None for what may be either."""
    numbers = numbers_in(graph, addend.value)
    if numbers is None:
        return None
    numbers = addend.sign * numbers
    has_many = bool(np.isnan(numbers).any())
    hiding, others = numbers[numbers <= _HIDES], numbers[numbers > _HIDES]
    if not hiding.size or not (others.size or has_many):
        return 0.0
    largest = float(hiding.max())
    if not has_many and others.min() > -_ROUNDING:
        return largest
    # Its small numbers are a bias; those below `MASKED` are told from them where they are measured.
    is_bias = largest <= MASKED or (len(others) > _MOST_ABOVE and not has_many)
    return 0.0 if is_bias else None
