"""The rules of the reader, by primitive, and what an operation without a rule makes of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import LONG_EINSUM, Node
from muonjax._inspect.values import Projection, Value, dependent

Rule = Callable[[Walk, Node], Sequence[Value]]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for these primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


# Operations that mix columns: what they are given is a part.
_MIXES = """
    approx_top_k bitcast_convert_type cholesky custom_linear_solve dynamic_update_slice eig eigh fft lu mulhi qr
    ragged_all_to_all reduce reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor scatter
    scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_gather_add select_and_scatter
    select_and_scatter_add sort svd swap top_k triangular_solve tridiagonal_solve zeta
"""
_MIXING = frozenset(_MIXES.split())


def unknown(walk: Walk, node: Node) -> Sequence[Value]:
    """The results of an operation that is not followed. They depend on all operands.

    What it records of the parameters among its operands, and of those whose projections it takes:

    - a call, as of a kernel: it may be an attention, and takes the columns of each projection together;
    - one that mixes columns, such as a sort: it takes them together;
    - one whose rule does not handle its settings: parameters that it takes, and those of unmixed projections, are left
      to names, since it may choose some of the columns;
    - one that is in no table: parameters and those of all projections, also behind logits, are left to names.
    """
    values = walk.inputs(node)
    result = dependent(values)
    # pallas_call, pure_callback, cudnn's attention, ...: none of them is an elementary function.
    is_call = "call" in node.name or "attention" in node.name
    # A primitive that is in no table may be an exponential, a product, or something that is one hot.
    has_no_rule = not is_call and node.name not in RULES
    if has_no_rule:
        # The last product of two activations in it counts as normalized: what multiplies it may be values.
        exponential_of = max(result.exponential_of, result.scores)
        result = result._replace(no_rule=node.index, exponential_of=exponential_of)
        if exponential_of >= 0:
            walk.attention.summed_exponentials.add(exponential_of)
        walk.layers.without_rule.add(node.index)
    _record_parameters(walk, node, values)
    projections = [projection for value in values for projection in value.projections]
    if has_no_rule:
        projections += _queries_and_keys(walk, node, values)
    walk.record_parts(projections)
    if not is_call and node.name not in _MIXING:
        for projection in projections:
            # It may choose some of the columns, or use some together: unless they were mixed before.
            if projection.unmixed or has_no_rule:
                walk.record(node, "unknown", projection.view, node.name)
    if is_call:
        _record_call(walk, node, projections)
    return [result] * len(node.outputs)


def _record_parameters(walk: Walk, node: Node, values: Sequence[Value]) -> None:
    """Records that the operation takes parameters; without data it may be a penalty, such as a determinant."""
    has_data = any(value.depends_on and not value.is_weight for value in values)
    walk.record_views(node, node.name, values, "unknown" if has_data else "alone")


def _queries_and_keys(
    walk: Walk, node: Node, values: Iterable[Value]
) -> list[Projection]:
    """The queries and keys whose logits an operation without a rule takes."""
    projections: list[Projection] = []
    for value in values:
        for logits in value.logits:
            walk.attention.unseen[logits.product] = node.index
            for operand in walk.attention.operands[logits.product]:
                projections += operand.value.projections
    return projections


def _record_call(walk: Walk, node: Node, projections: Sequence[Projection]) -> None:
    """Records a call that takes three activations, perhaps queries, keys and values."""
    arrays = [x for x in node.inputs if walk.values[x].is_activation and walk.shape(x)]
    if len(arrays) < 3:
        return
    parts = {
        (projection.product, projection.layout.region): projection
        for projection in projections
    }
    walk.attention.calls[node.index] = tuple(parts.values())
    walk.layers.products.add(node.index)


RULES |= dict.fromkeys([*_MIXING, "pad"], unknown)


def _long_einsum(walk: Walk, node: Node) -> Sequence[Value]:
    """Three operands are not followed; a layer, logits, or a softmax's weights and values may be among them."""
    values = walk.inputs(node)
    walk.layers.without_rule.add(node.index)
    walk.attention.one_sided.add(node.index)
    for value in values:
        for other in values:
            walk.record_weights(node, value, other)
    (result,) = unknown(walk, node)
    return [result._replace(scores=node.index) if result.is_activation else result]


RULES[LONG_EINSUM] = _long_einsum
