"""Follow the logits of an attention through what softmax is made of: masks, their maximum, an exponential, its sum.

This finds where the logits are, and what is reported of them; the certificate says what a clip changes. Logits are lost
where they become something else, and an attention with lost logits is refused with that operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from muonjax._inspect.constants import numbers_in
from muonjax._inspect.graph import Graph, Node
from muonjax._inspect.values import CHOICES, FROZEN, PARAMETER, SUMS, Logits, Value

# What is added to a logit to mask it is this or less, where it may be any number; an ALiBi bias of this size masks as
# well. It is -1e4 in many models, which is -9984 in bfloat16, and less exact where a logit of this precision takes it.
MASKED = -9e3
# Softmax gives e^-20, 2e-9, of a share to what so much is added to; a larger number hides nothing.
_HIDES = -20.0
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
    return _of_sum(graph, node, which, values, operands, at)


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
    graph: Graph,
    node: Node,
    which: Value,
    values: Sequence[Value],
    operands: Sequence[int],
    at: int,
) -> tuple[Logits, ...]:
    """Logits, operand number `at`, less their maximum, or with a mask; anything else that is added loses them."""
    name, first = node.name, values[at].logits[0]
    maxima = [
        x for v in values for x in v.logits if x.stage == "largest" and x.product == first.product
    ]
    is_second = (name, at) == ("sub", 1)
    added = products(v for k, v in enumerate(values) if k != at)
    if name in SUMS and name not in CHOICES and added - products([values[at]]):
        return (first._replace(value=node.outputs[0], lost=node.outputs[0]),)
    if first.lost >= 0 or name not in SUMS or (is_second and not maxima):
        return scaled(node, values[at])
    if maxima and name not in CHOICES and not is_second:
        axes = {run.axis for run in first.layout.atoms_beside(values[1 - at].axes("repeats"))}
        return (first._replace(shifted=(first.shifted or frozenset()) | axes),)
    changes = PARAMETER | FROZEN  # what a clip may change as well
    others = [v for k, v in enumerate(values) if k != at and v.depends_on & changes]
    if (
        name in CHOICES and first.raw < 0
    ):  # the same logits, masked; to a sum they are something else
        same = first.product, first.raw, first.stage
        others = [v for v in others if same not in [(x.product, x.raw, x.stage) for x in v.logits]]
    is_scaled = first.unit != 1.0  # what is added now has other units than what was
    if (
        others
        or is_scaled
        or first.shifted is not None
        or (first.raw >= 0 and which.depends_on & changes)
    ):
        return (lost(node, first),)
    # As they are here, not where they were scaled.
    raw = first.raw if name in CHOICES or first.raw >= 0 else operands[at]
    masked = first._replace(value=node.outputs[0], raw=raw)
    if name in CHOICES:
        return (masked,)
    return (_with_added(graph, node, masked, operands[1 - at]),)


def products(values: Iterable[Value]) -> set[int]:
    """Those whose logits these are."""
    return {x.product for v in values for x in v.logits if x.stage == "logits"}


def _with_added(graph: Graph, node: Node, logits: Logits, added: int) -> Logits:
    """Logits to which a mask or a bias was added. Next to a bias, a mask of small numbers can't be told from it."""
    mask = _number_of_mask(graph, node, added)
    seen = [x for x in (logits.mask, mask) if x is not None]
    is_bias = len(seen) < 2
    # A bias of ordinary size stays far above `MASKED`, and a mask of -1e4 below it.
    if is_bias and max(seen, default=-math.inf) > MASKED:
        return lost(node, logits)
    return logits._replace(mask=None if is_bias else max(seen))


def _number_of_mask(graph: Graph, node: Node, added: int) -> float | None:
    """The number below zero that a mask adds to what it hides; it adds zero to all else. None for a bias."""
    numbers = numbers_in(graph, added) or {math.nan}
    if node.name == "sub":
        numbers = {-x for x in numbers}
    return min(numbers) if min(numbers) <= _HIDES and max(numbers) == 0 else None
