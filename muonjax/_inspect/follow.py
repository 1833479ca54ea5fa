"""Follow every parameter through a function, operation by operation.

The rules are in `entrywise_rules`, `reduction_rules`, `move_rules` and `product_rules`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from muonjax._inspect import (  # they fill RULES
    move_rules,  # noqa: F401
    product_rules,  # noqa: F401
    reduction_rules,  # noqa: F401
)
from muonjax._inspect.entrywise_rules import FOLDED
from muonjax._inspect.graph import Graph, Node
from muonjax._inspect.jax_versions import Body
from muonjax._inspect.layouts import NotFollowed
from muonjax._inspect.records import Records
from muonjax._inspect.rules import RULES, unknown
from muonjax._inspect.values import OF_PRODUCTS, Value, dependent


def follow(body: Body, count: int, given: Sequence[Any] = ()) -> Records:
    """What one pass over the operations of a jaxpr finds out about its parameters,
    the first `count` of its inputs.

    `given` as in `Graph`.
    """
    records = Records(Graph(body, count, given))
    _follow(records, range(len(records.nodes)))
    return records


def _follow(records: Records, operations: range) -> None:
    """Applies its rule to each of these operations that is live; follows loops."""
    i = operations.start
    while i < operations.stop:
        if i in records.graph.loops:
            carries, body = records.graph.loops[i]
            _follow_loop(records, carries, body)
            i = body.stop
            continue
        if i in records.graph.live:
            _apply(records, records.nodes[i])
        i += 1


def _follow_loop(records: Records, first: range, body: range) -> None:
    """Follows the body of a loop again and again,
    until nothing new is known of what its `first` operations carry.

    At first each carried value depends on what enters the loop; after a round also on what the body
    gives. Which columns are where is not carried on: `_after_round` records them as parts. Only the
    maximum of logits and the sum of softmax's weights are, for an online softmax.
    """
    values = records.values
    carries = []
    carried = []
    for i in first:
        carry = records.nodes[i]
        start, end = carry.inputs
        # What the body returns as it is, such as parameters in the carry, stays what it was.
        if end in carry.outputs:
            values[end] = values[start]
        else:
            carries.append(carry)
            carried.append(dependent([values[start]]))
    before = None
    # What a round records of an operation replaces what the round before recorded, and a round only
    # adds dependencies, of which there are finitely many. In `a, b = x, a` x takes two rounds to b.
    while carried != before:
        for carry, value in zip(carries, carried, strict=True):
            values[carry.outputs[0]] = value
        _follow(records, body)
        before = carried
        carried = [_after_round(records, carry) for carry in carries]
    # "transpose" is the backward pass of a gradient that the function takes by itself.
    takes_gradients = any("transpose" in records.graph.derivatives(i) for i in body)
    for carry in carries:
        start = values[carry.inputs[0]]
        # What is made of parameters alone and is changed by the loop is an initial state, as of an
        # RNN: "other" leaves it to AdamW if no product uses it. But a loop that takes gradients may
        # train it, as in MAML: then it may be a matrix, and "unknown" leaves it to names.
        if start.is_weight:
            kind = "unknown" if takes_gradients else "other"
            records.record_views(
                carry, "the start of a loop that changes it", [start], kind
            )


def _after_round(records: Records, carry: Node) -> Value:
    """What one carried array depends on after one more round of the loop; nothing else is known of
    it. The columns that it holds before the loop, and after this round, are recorded as parts."""
    # What was there before the loop, at the end of this round, and before this round.
    start, end = records.inputs(carry)
    value = records.values[carry.outputs[0]]
    # Projections are not followed from round to round: the columns of each product are one part.
    records.record_parts((*start.projections, *end.projections))
    after = dependent([start, end, value])
    # Bits from OF_PRODUCTS on stand for products, and one bit for a product of all rounds. In
    # h = sigmoid(x @ w) * h the h of the round before is made of x @ w, but of another x: with its
    # bit, h would be taken for a statistic of this x @ w, as in a norm, which mixes its columns.
    # So only the bits of products before the loop stay.
    without_products = after.depends_on & (OF_PRODUCTS - 1)
    # Only the maximum of logits and the sum of softmax's weights go on, which an online softmax
    # carries from block to block. What the first round that makes one gives stays: a body that
    # moves it would give another layout in each round, without end.
    logits = value.logits or tuple(
        # A sum that a loop carries is not that of one iteration's exponentials.
        x._replace(exponentials=-1)
        for x in end.logits
        if x.stage in ("maximum", "sum")
    )
    return after._replace(depends_on=without_products | start.depends_on, logits=logits)


def _apply(records: Records, node: Node) -> None:
    """Applies the rule of an operation, and keeps the values of its results,
    and their numbers if all are known."""
    if node.name in FOLDED:
        _fold(records, node)
    try:
        results = RULES.get(node.name, unknown)(records, node)
    except NotFollowed:  # the rule does not handle its settings
        results = unknown(records, node)
    for output, value in zip(node.outputs, results, strict=True):
        if not records.graph.is_followed(output):  # an index, as of an argmax
            value = value._replace(projections=(), logits=(), exponential_of=-1)
        records.values[output] = value


def _fold(records: Records, node: Node) -> None:
    """Adds the numbers in an operation's result to `Graph.known` if those of its operands are
    there.

    Each has to be one number, or as many as the result has.
    """
    operands = [records.known(x) for x in node.inputs]
    size = math.prod(records.shape(node.outputs[0]))
    if all(x is not None and np.size(x) in (1, size) for x in operands):
        records.graph.known[node.outputs[0]] = FOLDED[node.name](*operands)
