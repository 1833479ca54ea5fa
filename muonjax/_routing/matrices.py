"""Decide which matrices one layer's parameter holds, from its role, its shape and its siblings.

Where the role leaves several readings of a shape, the evidence is taken in this order: the bias (what has a bias is an
output axis), the attention's other projections (they agree on d, heads and size), the partner of an adapter factor
(they share the rank), what the rest of the tree stores first (`weight` as (out, in)), and last the shape alone (two
axes are (in, out); equal small axes before larger ones are a window). Where none of them tells, there is no answer.
"""

import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

from muonjax._matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    axes_of,
    one_or_several,
)
from muonjax._routing import roles
from muonjax._routing.roles import Parameter, layer_of, module, words
from muonjax._routing.siblings import (
    Shape,
    Siblings,
    axis_of_parts,
    is_einsum,
    is_outputs_first_convolution,
    is_weight,
    is_window,
)


def matrices(p: Parameter, siblings: Siblings, attention: str) -> DimensionNumbers | None:
    """The matrices in one layer's parameter, on that layer's axes; None where nothing tells."""
    role, rank = p.role, len(p.shape)
    if role in (roles.INTERLEAVED, roles.LONE_LETTER):
        return None
    if role is roles.ADAPTER:
        return _adapter(p, siblings)
    if role is roles.GATE_UP:
        return _gate_up(p, siblings)
    is_fused = role in (roles.FUSED_QKV, roles.FUSED_KV)
    if is_fused:
        numbers = _fused(p, siblings)
    elif rank == 2:
        numbers = _dense(p, siblings)
    elif role.projection:
        numbers = _attention(p, siblings)
    else:
        numbers = role.layouts.get(rank) or _kernel(p, siblings)
    if (
        attention == "heads"
        and numbers
        and (role.projection not in ("", "out") or is_fused or role is roles.MLA_UP)
    ):
        return _by_head(p, siblings, numbers)
    return numbers


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
    shape, rank, bias = p.shape, len(p.shape), siblings.bias(p) or ()
    last = MuonDimensionNumbers(tuple(range(rank - 1)), rank - 1)
    transposed = MuonDimensionNumbers((*range(rank - 2), rank - 1), rank - 2)
    outputs_first = MuonDimensionNumbers(tuple(range(1, rank)), 0)
    trailing = is_outputs_first_convolution(p, siblings)
    if len(bias) == 1:
        is_transposed = "transpose" in "/".join(p.path).lower()  # Keras' and Haiku's are [*window, out, in]
        orders = ((last, -1), (transposed, -2), (outputs_first, 0))
        first = (outputs_first, 0) if trailing else (transposed, -2) if is_transposed else orders[0]
        return next((numbers for numbers, axis in (first, *orders) if shape[axis] == bias[0]), None)
    if bias == (*shape[:-2], shape[-1]):
        return None  # a matrix for each block, or [in, heads, size] of as many heads as inputs
    if bias and rank > len(bias) and shape[-len(bias) :] == bias:
        inputs = tuple(range(rank - len(bias)))
        return MuonDimensionNumbers(one_or_several(inputs), tuple(range(rank - len(bias), rank)))
    if trailing:
        return outputs_first
    if is_dense_general(p):
        return MuonDimensionNumbers(0, 2 if shape[1] == 2 else (1, 2))  # two are a gate and its values
    is_bare = module(p.path) == words(p.path)  # no kernel or bias of a module but its own name
    if p.role in (roles.CONVOLUTION, roles.ADAPTER_CORE) or (is_window(shape) and not is_bare):
        return last
    return None


def is_dense_general(p: Parameter) -> bool:
    """Whether a Dense kernel of three axes, alone in its stack, is [in, groups, size]: layers are counted first."""
    return p.role is roles.DENSE and len(p.shape) == 3 and p.shape[1] < min(p.shape[0], p.shape[2])


def _attention(p: Parameter, siblings: Siblings) -> DimensionNumbers | None:
    """Query, key, value [d, heads, size] and output [heads, size, d], in the order that the siblings agree on."""
    found = _arrangement(p, siblings) if len(p.shape) == 3 else None
    if found is None:
        return None
    d, heads, size = map((found.out if p.role.projection == "out" else found.projection).index, "dhs")
    both = tuple(sorted((heads, size)))
    return MuonDimensionNumbers(both, d) if p.role.projection == "out" else MuonDimensionNumbers(d, both)


class _Arrangement(NamedTuple):
    """The order of the axes d (features), h (heads) and s (size of a head) in projections and output kernel."""

    projection: str
    out: str


_FLAX = _Arrangement("dhs", "hsd")
_EINSUM = _Arrangement("hds", "hsd")  # Gemma's
_ARRANGEMENTS = (_FLAX, _Arrangement("dhs", "dhs"), _EINSUM, _Arrangement("hsd", "dhs"))


def _arrangement(p: Parameter, siblings: Siblings) -> _Arrangement | None:
    """Where d, heads and size are in the projections of this attention; None where the siblings do not tell."""
    shapes = {name: shape for name, shape in siblings.attention(p).items() if len(shape) == 3}
    order = sorted(_ARRANGEMENTS, key=lambda a: a is not _EINSUM) if is_einsum(p) else _ARRANGEMENTS
    score, _, best = max((_agreement(shapes, a), -i, a) for i, a in enumerate(order))
    if score < 0:  # as in a small model whose heads are larger than d: Flax's name and equal heads decide
        query, out = shapes.get("query"), shapes.get("out")
        named = words(p.path)[-1] == "kernel" and bool(query and out and query[1] == out[0])
        return _FLAX if named or (words(p.path)[-1] == "kernel" and [*shapes] == ["out"]) else None
    return best if best.out == "hsd" or p.role.projection != "out" or len(shapes) > 1 else None


def _agreement(shapes: Mapping[str, Shape], arrangement: _Arrangement) -> int:
    """How many pairs of sizes agree of those that rarely differ; −1 if sizes differ that must agree."""
    read = {
        name: dict(zip(arrangement.out if name == "out" else arrangement.projection, shape, strict=True))
        for name, shape in shapes.items()
    }
    if any((k["s"] >= k["d"] and k["h"] > 1) or k["h"] * k["s"] > 64 * k["d"] for k in read.values()):
        return -1
    fused, query, key, value, out = map(read.get, ("fused", "query", "key", "value", "out"))
    if fused and out and (fused["h"] <= out["h"] or (fused["h"] - out["h"]) % 2):
        return -1
    if query and out and query["h"] != out["h"]:
        return -1
    if any(a and b and b["h"] % a["h"] for a, b in ((value, query), (value, key), (key, query), (key, out))):
        return -1
    pairs = itertools.combinations(read.values(), 2)
    return sum((a["d"] == b["d"]) + (a["s"] == b["s"]) for a, b in pairs)


def _by_head(p: Parameter, siblings: Siblings, numbers: DimensionNumbers) -> DimensionNumbers | None:
    """A matrix per head, where heads have an axis or the module shows their size."""
    *heads, last = axes_of(numbers.output_axis)
    if heads:
        return MuonDimensionNumbers(numbers.reduction_axis, last)
    size = siblings.head_sizes.get(layer_of(p.path)[0])
    if not size or p.shape[last] % size:
        return None
    return FusedDimensionNumbers(*numbers[:2], parts=p.shape[last] // size, axis=last)


def _fused(p: Parameter, siblings: Siblings) -> DimensionNumbers | None:
    """Query, key and value as [d, 3·d], its transpose, with an axis of three, or with unequal parts."""
    shape, batch, found = p.shape, axis_of_parts(p), _arrangement(p, siblings)
    if len(shape) == 2:
        return _fused_flat(p, siblings)
    if len(shape) == 4 and batch is not None and found:
        inner = [i for i in range(4) if i != batch]
        d, heads, size = (inner[found.projection.index(axis)] for axis in "dhs")
        return MuonDimensionNumbers(d, tuple(sorted((heads, size))))
    out = siblings.attention(p).get("out", ())
    if len(shape) == len(out) == 3 and p.role.parts == 3 and found:
        d, heads, size = map(found.projection.index, "dhs")
        queries, fits = out[found.out.index("h")], (shape[d], shape[size])
        if fits == (out[found.out.index("d")], out[found.out.index("s")]):
            keys = (shape[heads] - queries) // 2
            return FusedDimensionNumbers(d, tuple(sorted((heads, size))), (queries, keys, keys), heads)
    return None


def _fused_flat(p: Parameter, siblings: Siblings) -> FusedDimensionNumbers | None:
    """Query, key and value, or key and value, side by side in one of two axes."""
    bias, parts, (m, n) = siblings.bias(p), p.role.parts, p.shape
    rows_first = bias != (m,) if bias and m != n else not (parts == 3 and m == 3 * n)
    axis, total = (1, n) if rows_first else (0, m)
    if parts == 3 and total == 2 * p.shape[1 - axis] and "query" in siblings.attention(p):
        parts = 2  # the query has a kernel of its own
    # Grouped keys: out of how many heads nothing here tells.
    fits = total % 2 == 0 if parts == 2 else total == 3 * p.shape[1 - axis]
    return FusedDimensionNumbers(1 - axis, axis, parts, axis) if fits else None


def _gate_up(p: Parameter, siblings: Siblings) -> DimensionNumbers | None:
    """Gate and up side by side in the last axis, or on an axis of two."""
    shape, rank, batch = p.shape, len(p.shape), axis_of_parts(p)
    if rank == 2:
        numbers = _dense(p, siblings)
        (axis,) = axes_of(numbers.output_axis)
        return FusedDimensionNumbers(*numbers, 2, axis) if shape[axis] % 2 == 0 else None
    if batch is None or batch + 4 <= rank:  # on an axis of two, below experts or not
        return None
    inner = tuple(i for i in range(rank - 3, rank) if i != batch)
    sides = tuple(shape[i] for i in inner)
    down = [q.shape[-2:] for q in siblings.beside(p) if q.role.muon and len(q.shape) == rank - 1]
    if sides[0] != sides[1] and sides in down:
        inner = inner[::-1]  # stored as the down kernel is
    return MuonDimensionNumbers(*inner)


def _adapter(p: Parameter, siblings: Siblings) -> MuonDimensionNumbers | None:
    """A factor [*in, rank] or [rank, *out]; an axis of two in the second counts keys and values, or gate and up."""
    rank = len(p.shape)
    if siblings.is_batched_factor(p):
        return MuonDimensionNumbers(rank - 2, rank - 1)
    if re.search(r"(?:^|_)(?:a|down|w[12]_?a)(?:_[a-z]+)?$", words(p.path)[-1].lower()):  # the first factor
        return MuonDimensionNumbers(one_or_several(tuple(range(rank - 1))), rank - 1)
    pair = re.search(r"kv_einsum|gating_einsum", "/".join(words(p.path))) and p.shape[1] == 2
    return MuonDimensionNumbers(0, one_or_several(tuple(range(2 if pair else 1, rank))))
