"""The rules of the reader, by primitive, and what an operation without a rule makes of its
operands."""

from collections.abc import Callable, Sequence

from muonjax._inspect.graph import LONG_EINSUM, Node
from muonjax._inspect.records import Records
from muonjax._inspect.values import Value, dependent

Rule = Callable[[Records, Node], Sequence[Value]]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for these primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


# Operations that mix columns: what they are given is a part.
_MIXES = """
    approx_top_k bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense
    bcoo_spdot_general bcoo_todense bcsr_dot_general bitcast_convert_type cholesky cholesky_update
    coo_matmat csr_matmat cumlogsumexp cummax cummin cumprod cumsum custom_linear_solve
    dynamic_update_slice eig eigh fft geqp3 geqrf hessenberg householder_product lu
    lu_pivots_to_permutation mulhi ormqr pad qr schur tridiagonal ragged_all_to_all reduce
    reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor scatter
    scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_gather_add
    select_and_scatter select_and_scatter_add sort svd swap top_k triangular_solve tridiagonal_solve
    zeta
"""
_MIXING = frozenset(_MIXES.split())


def unknown(records: Records, node: Node) -> Sequence[Value]:
    """The results of an operation that is not followed. They depend on all operands.

    Parameters among the operands are left to names, or to their other uses if all operands are
    parameters or numbers. The columns that it takes of a layer's result, a projection, are one
    part. The first case that holds says what else becomes of the layer:

    - A call, by its name, or because it has no rule and takes three activations: nothing else. But
      if it takes three, it may be an attention, which is listed and refused.
    - An operation that mixes columns (`_MIXING`), such as a sort: nothing else.
    - One whose rule did not handle its settings may choose some of the columns: the layer is left
      to names, unless its columns were mixed before.
    - Any other has no rule and may be anything, a softmax or something one hot: all parameters of
      the function are left to names (`unlisted`).
    """
    values = records.inputs(node)
    # A single number can't be queries, keys or values.
    activations = [
        x for x in node.inputs if records.values[x].is_activation and records.shape(x)
    ]
    takes_three = len(activations) > 2
    # Those that mix columns are in RULES too, with `unknown` for their rule.
    is_listed = node.name in RULES
    # pallas_call, pure_callback, a library's attention, ...: such a call is not taken for a softmax
    # or for something one hot, so that it leaves other parameters as they are.
    is_call = "call" in node.name or (takes_three and not is_listed)
    if not is_call and not is_listed:
        records.unlisted = node.index  # leaves all parameters to names
    # "alone": if all operands are parameters or numbers, as in a penalty with a determinant, it
    # does not say what the parameter is, so that other uses of it decide.
    is_alone = all(value.is_weight or not value.depends_on for value in values)
    records.record_views(node, node.name, values, "alone" if is_alone else "unknown")
    projections = [projection for value in values for projection in value.projections]
    records.record_parts(projections)
    if is_call:
        # Perhaps queries, keys and values, as of a fused kernel. `clippable_attention` lists the
        # call, and refuses to clip these parameters.
        if takes_three:
            records.attention.calls[node.index] = tuple(x.view for x in projections)
            # A matrix before the call is no output head: attention multiplies what it gives.
            records.layers.add(node.index)
    # Its rule did not handle its settings, or it has none: then all is left to names in any case.
    elif node.name not in _MIXING:
        for projection in projections:
            # Columns that were mixed before are one part, whatever this operation chooses.
            if projection.unmixed:
                records.record(node, "unknown", projection.view, node.name)
    return [dependent(values)] * len(node.outputs)


RULES |= dict.fromkeys(_MIXING, unknown)


def _long_einsum(records: Records, node: Node) -> Sequence[Value]:
    """The result of one operation of an einsum of three or more operands, usually a product of two.

    JAX multiplies the operands two by two, in an order that depends on their sizes. So none of
    these operations is followed: `graph` names each LONG_EINSUM, and parameters, and layers whose
    results it takes, are left to names (`unknown`). It may be queries @ keys.T, or softmax's
    weights times values: such an attention is listed and refused.
    """
    values = records.inputs(node)
    # It may be a layer: what looks like an output head before it is left to its name.
    records.possible_layers.add(node.index)
    # Either operand may be softmax's weights, and the other one the values: then the attention is
    # refused. With itself an operand is neither, and `record_weights` does nothing.
    for value in values:
        for other in values:
            records.record_weights(node, value, other)
    (result,) = unknown(records, node)
    # It may be queries @ keys.T: then it is the product that exponentials are made of.
    return [result._replace(scores=node.index) if result.is_activation else result]


RULES[LONG_EINSUM] = _long_einsum
