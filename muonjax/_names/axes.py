"""Decide which axes of one layer's parameter are the rows and columns of matrices.

Where its name leaves several readings of a shape, the evidence is taken in this order: the bias (what has a bias is an
output axis), the attention's other projections (they agree on d, heads and size), what the rest of the tree stores
first (`weight` as (out, in)), and last the shape alone (two axes are (in, out); equal small axes before larger ones are
a window). Where none of them tells, there is no answer.
"""

import re
from collections.abc import Mapping

from muonjax._matrices.matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    axes_of,
    one_or_several,
)
from muonjax._names import roles
from muonjax._names.neighbors import (
    Neighbors,
    axis_of_parts,
    is_bare,
    is_einsum,
    is_outputs_first_convolution,
    is_weight,
    is_window,
)
from muonjax._names.roles import Parameter, layer_of, words


def matrices(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """The matrices in one layer's parameter, on that layer's axes; None where nothing tells."""
    role, rank = p.role, len(p.shape)
    unknown = role in (roles.INTERLEAVED, roles.LONE_LETTER, roles.RECURRENT)
    if unknown or (role is roles.ADAPTER and rank != 2):
        return None
    if role is roles.GATE_UP:
        return _gate_up(p, neighbors)
    if role in (roles.FUSED_QKV, roles.FUSED_KV):
        return _fused(p, neighbors)
    if rank == 2:
        return _dense(p, neighbors)
    if role.projection:
        return _attention(p, neighbors) if rank == 3 else None
    return role.layouts.get(rank) or _kernel(p, neighbors)


def _dense(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers:
    """(in, out), or (out, in) where the bias or the rest of the tree says so."""
    bias, outputs_first = neighbors.bias(p), is_weight(p) and neighbors.outputs_first
    if bias and p.shape[0] != p.shape[1]:
        outputs_first = bias == p.shape[:1]
    elif p.role is roles.ROUTER and is_weight(p) and 8 * p.shape[0] <= p.shape[1]:
        outputs_first = True  # there are fewer experts than features
    elif re.fullmatch(r"(\w+_)?(down|wo)(_proj)?", layer_of(p.path)[1]):
        up = [q for q in neighbors.beside(p) if re.fullmatch(r"(\w+_)?(up|wi)(_proj)?", layer_of(q.path)[1])]
        outputs_first ^= any(q.shape == p.shape and p.shape[0] != p.shape[1] for q in up)  # [d, hidden] both
    return MuonDimensionNumbers(1, 0) if outputs_first else MuonDimensionNumbers(0, 1)


def _kernel(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers | None:
    """The kernel of a convolution, of a DenseGeneral, or of an einsum with a bias."""
    shape, rank, bias = p.shape, len(p.shape), neighbors.bias(p) or ()
    is_transposed = "transpose" in "/".join(p.path).lower()  # Keras' and Haiku's are [*window, out, in]
    first = 0 if is_outputs_first_convolution(p, neighbors) else rank - 2 if is_transposed else rank - 1
    likely = first == 0 or p.role is roles.CONVOLUTION or (is_window(shape) and not is_bare(p))
    if len(bias) == 1:
        outputs = [axis for axis in (first, rank - 1, rank - 2, 0) if shape[axis] == bias[0]][:1]
    elif bias and rank > len(bias) and shape[-len(bias) :] == bias and bias != (*shape[:-2], shape[-1]):
        # Not a matrix for each block, or [in, heads, size] of as many heads as inputs.
        outputs = list(range(rank - len(bias), rank))
    else:
        outputs = [first if first == 0 else rank - 1] if likely and not bias else []
    inputs = [axis for axis in range(rank) if axis not in outputs]
    return MuonDimensionNumbers(one_or_several(inputs), one_or_several(outputs)) if outputs else None


# The axes of projections and output, d features, h heads of size s: Flax, axlearn, Gemma's einsums.
_ORDERS = (("dhs", "hsd"), ("dhs", "dhs"), ("hds", "hsd"))


def _attention(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers | None:
    """Query, key, value and output in the first order that no shape in the attention contradicts."""
    shapes = {name: shape for name, shape in neighbors.attention(p).items() if len(shape) == 3}
    if [*shapes] == ["out"] and words(p.path)[-1] != "kernel" and not is_einsum(p):
        return None  # in two orders
    for order in reversed(_ORDERS) if is_einsum(p) else _ORDERS:
        orders = {name: order[name == "out"] for name in shapes}
        read = {name: dict(zip(orders[name], shape, strict=True)) for name, shape in shapes.items()}
        if read and not _contradict(read):
            d = order[p.role.projection == "out"].index("d")
            rest = tuple(i for i in range(3) if i != d)
            return MuonDimensionNumbers(*((rest, d) if p.role.projection == "out" else (d, rest)))
    return None


def _contradict(read: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether heads are as large as the model, or the numbers of heads do not fit together."""
    if any((k["s"] >= k["d"] and k["h"] > 1) or k["h"] * k["s"] > 64 * k["d"] for k in read.values()):
        return True
    query, key, value, out = (read.get(name, {}).get("h") for name in ("query", "key", "value", "out"))
    multiples = ((query, value), (key, value), (query, key), (out, key))
    return bool(query and out and query != out) or any(a and b and a % b for a, b in multiples)


def _fused(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Query, key and value, or key and value: on an axis of their own, or side by side in one of two axes."""
    bias, parts, batch = neighbors.bias(p), p.role.parts, axis_of_parts(p)
    if len(p.shape) == 4 and batch is not None and (inner := _attention(p, neighbors)):
        rows, columns = ([i + (i >= batch) for i in axes_of(axes)] for axes in inner)
        return MuonDimensionNumbers(one_or_several(rows), one_or_several(columns))
    if len(p.shape) != 2:
        return None
    m, n = p.shape
    axis = 0 if (bias == (m,) if bias and m != n else m == 3 * n) else 1
    # Grouped keys: out of how many heads nothing here tells.
    fits = parts == 3 and p.shape[axis] == 3 * p.shape[1 - axis]
    return FusedDimensionNumbers(1 - axis, axis, parts, axis) if fits else None


def _gate_up(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Gate and up side by side in the last axis, or on an axis of two."""
    shape, rank, batch = p.shape, len(p.shape), axis_of_parts(p)
    if rank == 2:
        numbers = _dense(p, neighbors)
        (axis,) = axes_of(numbers.output_axis)
        return FusedDimensionNumbers(*numbers, 2, axis) if shape[axis] % 2 == 0 else None
    if batch is None or batch + 4 <= rank:  # on an axis of two, below experts or not
        return None
    inner = tuple(i for i in range(rank - 3, rank) if i != batch)
    sides = tuple(shape[i] for i in inner)
    down = [q.shape[-2:] for q in neighbors.beside(p) if q.role.muon and len(q.shape) == rank - 1]
    if sides[0] != sides[1] and sides in down:
        inner = inner[::-1]  # stored as the down kernel is
    return MuonDimensionNumbers(*inner)
