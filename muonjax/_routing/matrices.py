"""Decide which matrices one layer's parameter holds, from its role, its shape and its siblings.

Where the role leaves several readings of a shape, the evidence is taken in this order: the bias (what has a bias is an
output axis), the attention's other projections (they agree on d, heads and size), the partner of an adapter factor
(they share the rank), what the rest of the tree stores first (`weight` as (out, in)), and last the shape alone (two
axes are (in, out); equal small axes before larger ones are a window). Where none of them tells, there is no answer.
"""

import re

from muonjax._matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    axes_of,
    one_or_several,
)
from muonjax._routing import roles
from muonjax._routing.roles import layer_of, module, words
from muonjax._routing.siblings import (
    FLAX,
    Arrangement,
    Parameter,
    Siblings,
    arrangements,
    has_heads_of_flax,
    is_bias_of_blocks,
    is_outputs_first,
    is_weight,
    is_window,
)


def matrices(p: Parameter, siblings: Siblings, attention: str) -> DimensionNumbers | None:
    """The matrices in one layer's parameter, on that layer's axes; None where nothing tells."""
    role, rank = p.role, len(p.shape)
    if role in (roles.INTERLEAVED, roles.LETTER):
        return None
    if role is roles.ADAPTER:
        return _adapter(p, siblings)
    if role is roles.GATE_UP:
        return _gate_up(p, siblings)
    if role in (roles.FUSED_QKV, roles.FUSED_KV):
        return _fused(p, siblings, attention)
    if role.kind or role is roles.MLA_UP:
        return _attention(p, siblings, attention)
    if numbers := role.layouts.get(rank):
        return numbers
    if rank == 2:
        return _dense(p, siblings)
    return _kernel(p, siblings)


def _dense(p: Parameter, siblings: Siblings) -> MuonDimensionNumbers:
    """(in, out), or (out, in) where the bias or the rest of the tree says so."""
    bias, outputs_first = siblings.bias(p), is_weight(p) and siblings.outputs_first
    if bias and p.shape[0] != p.shape[1]:
        outputs_first = bias == p.shape[:1]
    elif p.role is roles.ROUTER and is_weight(p) and 8 * p.shape[0] <= p.shape[1]:
        outputs_first = True  # there are fewer experts than features
    elif p.shape[0] != p.shape[1] and re.fullmatch(r"(\w+_)?(down|wo)(_proj)?", layer_of(p.path)[1]):
        up = [q for q in siblings.beside(p) if re.fullmatch(r"(\w+_)?(up|wi)(_proj)?", layer_of(q.path)[1])]
        outputs_first ^= any(q.shape == p.shape for q in up)  # stored alike, [d, hidden] both
    return MuonDimensionNumbers(1, 0) if outputs_first else MuonDimensionNumbers(0, 1)


def _kernel(p: Parameter, siblings: Siblings) -> MuonDimensionNumbers | None:
    """The kernel of a convolution, of a DenseGeneral, or of an einsum with a bias."""
    shape, rank, bias = p.shape, len(p.shape), siblings.bias(p)
    convolution = p.role in (roles.CONVOLUTION, roles.ADAPTER_CORE)
    last = MuonDimensionNumbers(tuple(range(rank - 1)), rank - 1)
    transposed = MuonDimensionNumbers((*range(rank - 2), rank - 1), rank - 2)
    outputs_first = MuonDimensionNumbers(tuple(range(1, rank)), 0)
    trailing = is_outputs_first(p, siblings)
    if bias and is_bias_of_blocks(bias, shape):  # a matrix per block
        return MuonDimensionNumbers(rank - 2, rank - 1)
    if bias and len(bias) == 1:
        if trailing and shape[0] == bias[0]:
            return outputs_first
        if shape[-1] == bias[0]:  # Keras' and Haiku's transposed convolutions are [*window, out, in]
            return transposed if shape[-2] == bias[0] and "transpose" in "/".join(p.path).lower() else last
        if shape[-2] == bias[0]:
            return transposed
        return outputs_first if shape[0] == bias[0] else None
    if bias and rank > len(bias) and shape[-len(bias) :] == bias:
        inputs = tuple(range(rank - len(bias)))
        return MuonDimensionNumbers(one_or_several(inputs), tuple(range(rank - len(bias), rank)))
    if trailing:
        return outputs_first
    if is_dense_general(p):
        return MuonDimensionNumbers(0, 2 if shape[1] == 2 else (1, 2))  # two are a gate and its values
    if convolution or (is_window(shape) and not _is_bare(p)):
        return last
    return None


def is_broadcast(p: Parameter) -> bool:
    """Whether a bare array without a telling name is [1, n, d]: added to each sequence of a batch, or put before it."""
    unknown = _is_bare(p) and p.role is roles.UNKNOWN
    return unknown and len(p.shape) > 2 and p.shape[0] == 1 and p.shape == p.leaf_shape


def _is_bare(p: Parameter) -> bool:
    """Whether the array is no kernel or bias of a module but its own name."""
    return module(p.path) == words(p.path)


def is_dense_general(p: Parameter) -> bool:
    """Whether a Dense kernel of three axes, alone in its stack, is [in, groups, size]: layers are counted first."""
    return p.role is roles.DENSE and len(p.shape) == 3 and p.shape[1] < min(p.shape[0], p.shape[2])


def _attention(p: Parameter, siblings: Siblings, attention: str) -> DimensionNumbers | None:
    """Query, key, value [d, heads, size] and output [heads, size, d], in the order that the siblings agree on."""
    if len(p.shape) == 2:
        if attention == "heads" and p.role.kind != "out":
            return _per_head(p, siblings, _dense(p, siblings))
        return _dense(p, siblings)
    if len(p.shape) != 3:
        return None
    if p.role is roles.MLA_UP:
        return MuonDimensionNumbers(0, (1, 2)) if attention == "whole" else MuonDimensionNumbers(0, 2)
    found = arrangement(p, siblings)
    if found is None:
        return None
    order = found.out if p.role.kind == "out" else found.projection
    d, heads, size = map(order.index, "dhs")
    both = tuple(sorted((heads, size)))
    if p.role.kind == "out":  # whole in either case: its rows are all heads together
        return MuonDimensionNumbers(both, d)
    return MuonDimensionNumbers(d, both if attention == "whole" else size)


def arrangement(p: Parameter, siblings: Siblings) -> Arrangement | None:
    """Where d, heads and size are in the projections of this attention; None where the siblings do not tell."""
    shapes = siblings.attention(p)
    found = arrangements(shapes, einsum=is_einsum(p))
    alone = p.role.kind == "out" and not any(len(s) == 3 for kind, s in shapes.items() if kind != "out")
    if not found:
        return FLAX if words(p.path)[-1] == "kernel" and (alone or has_heads_of_flax(shapes)) else None
    return found[0] if not alone or found[0].out == "hsd" else None


def is_einsum(p: Parameter) -> bool:
    """Whether a name says that the leaf is the weight of an einsum."""
    return any("einsum" in name for name in words(p.path))


def _per_head(p: Parameter, siblings: Siblings, numbers: DimensionNumbers) -> FusedDimensionNumbers | None:
    """A matrix per head of a kernel [d, heads·size], where the size of a head is known."""
    size, (axis,) = siblings.head_sizes.get(layer_of(p.path)[0]), axes_of(numbers.output_axis)
    if not size or p.shape[axis] % size:
        return None
    return FusedDimensionNumbers(*numbers[:2], parts=p.shape[axis] // size, axis=axis)


def _fused(p: Parameter, siblings: Siblings, attention: str) -> DimensionNumbers | None:
    """Query, key and value as [d, 3·d], its transpose, with an axis of three, or with unequal parts."""
    shape, parts, out = p.shape, p.role.parts, siblings.attention(p).get("out", ())
    batch = next((i for i, size in enumerate(shape[:-1]) if size == parts), None)  # it counts the parts
    if len(shape) == 2:
        numbers = _fused_flat(p, siblings)
        return numbers if attention == "whole" or numbers is None else _per_head(p, siblings, numbers)
    if len(shape) == 3 and len(out) == 3 and parts == 3:
        for found in arrangements({"out": out}):
            d, heads, size = map(found.projection.index, "dhs")
            queries = out[found.out.index("h")]
            fits = shape[d] == out[found.out.index("d")] and shape[size] == out[found.out.index("s")]
            if fits and shape[heads] > queries and (shape[heads] - queries) % 2 == 0:
                if attention == "heads":
                    return MuonDimensionNumbers(d, size)
                keys = (shape[heads] - queries) // 2
                return FusedDimensionNumbers(d, tuple(sorted((heads, size))), (queries, keys, keys), heads)
    if len(shape) == 4 and batch is not None:
        inner = [i for i in range(4) if i != batch]
        kind = "query" if parts == 3 else "key"
        shapes = {kind: tuple(shape[i] for i in inner)} | ({"out": out} if len(out) == 3 else {})
        if query := siblings.attention(p).get("query"):
            shapes["query"] = query
        for found in arrangements(shapes, einsum=is_einsum(p)):
            d, heads, size = (inner[found.projection.index(axis)] for axis in "dhs")
            return MuonDimensionNumbers(d, tuple(sorted((heads, size))) if attention == "whole" else size)
    return None


def _fused_flat(p: Parameter, siblings: Siblings) -> FusedDimensionNumbers | None:
    """Query, key and value, or key and value, side by side in one of two axes."""
    bias, parts, (m, n) = siblings.bias(p), p.role.parts, p.shape
    rows_first = bias != (m,) if bias and m != n else not (parts == 3 and m == 3 * n)
    axis, total = (1, n) if rows_first else (0, m)
    numbers = (0, 1) if rows_first else (1, 0)
    if parts == 3 and total == 2 * p.shape[1 - axis] and "query" in siblings.attention(p):
        parts = 2  # the query has a kernel of its own
    if parts == 2:
        return FusedDimensionNumbers(*numbers, 2, axis) if total % 2 == 0 else None
    if total == 3 * p.shape[1 - axis]:
        return FusedDimensionNumbers(*numbers, 3, axis)
    return None  # grouped keys: out of how many heads nothing here tells


def _gate_up(p: Parameter, siblings: Siblings) -> DimensionNumbers | None:
    """Gate and up side by side in the last axis, or on an axis of two."""
    shape, rank = p.shape, len(p.shape)
    if rank == 2:
        numbers = _dense(p, siblings)
        (axis,) = axes_of(numbers.output_axis)
        return FusedDimensionNumbers(*numbers, 2, axis) if shape[axis] % 2 == 0 else None
    batch = next((i for i, size in enumerate(shape[:-1]) if size == 2), None)
    if batch is not None and batch + 4 > rank:  # on an axis of two, below experts or not
        inner = tuple(i for i in range(rank - 3, rank) if i != batch)
        sides = tuple(shape[i] for i in inner)
        down = [q.shape for q in siblings.beside(p) if q.role.muon and len(q.shape) == rank - 1]
        if sides[0] != sides[1] and any(d[-2:] == sides for d in down):
            inner = inner[::-1]  # stored as the down kernel is
        return MuonDimensionNumbers(*inner)
    return None


def _adapter(p: Parameter, siblings: Siblings) -> MuonDimensionNumbers | None:
    """A factor [*in, rank] or [rank, *out]; an axis of two in the second counts keys and values, or gate and up."""
    rank = len(p.shape)
    if siblings.is_batched_factor(p):
        return MuonDimensionNumbers(rank - 2, rank - 1)
    if is_first_factor(p):
        return MuonDimensionNumbers(one_or_several(tuple(range(rank - 1))), rank - 1)
    pair = re.search(r"kv_einsum|gating_einsum", "/".join(words(p.path))) and p.shape[1] == 2
    outputs = tuple(range(2 if pair else 1, rank))
    return MuonDimensionNumbers(0, one_or_several(outputs))


def is_first_factor(p: Parameter) -> bool:
    """Whether an adapter's factor is the one that sees the layer's input, [*in, rank]."""
    return bool(re.search(r"(?:^|_)(?:a|down|w[12]_?a)(?:_[a-z]+)?$", words(p.path)[-1].lower()))
