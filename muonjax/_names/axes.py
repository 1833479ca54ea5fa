"""Decide which axes of one layer's parameter are the rows and columns of its matrices.

Where the name leaves several readings of a shape, the evidence is taken in this order: the bias
(what has a bias is an output axis), the attention's other projections (they agree on d, heads and
size), what the rest of the tree stores first (`weight` as (out, in)), and last the shape alone (two
axes are (in, out); equal small axes before larger ones are a window). If none of them decides,
there is no answer.
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
from muonjax._names.convolutions import is_outputs_first, is_window
from muonjax._names.neighbors import Neighbors, Shape, axis_of_parts
from muonjax._names.paths import words
from muonjax._names.roles import Parameter


def matrices(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """The matrices in one layer's parameter, on that layer's axes; None where nothing tells."""
    role, rank = p.role, p.rank
    if role in roles.OPEN:
        return None
    if role is roles.ADAPTER and rank != 2:
        return None
    # Its window has at least one axis.
    if role is roles.CONVOLUTION and rank == 2:
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
    first, last = p.shape
    bias = neighbors.bias(p)
    outputs_first = p.is_weight and neighbors.outputs_first
    if bias and first != last:
        outputs_first = bias == (first,)
    elif p.role is roles.ROUTER and p.is_weight:
        # There are fewer experts than features.
        outputs_first |= 8 * first <= last
    elif first != last and _is_stored_as_up(p, neighbors):
        outputs_first = not outputs_first
    return MuonDimensionNumbers(1, 0) if outputs_first else MuonDimensionNumbers(0, 1)


def _is_stored_as_up(p: Parameter, neighbors: Neighbors) -> bool:
    """Whether a down kernel is stored as [d, hidden], like the up kernel next to it, as in seqax."""
    if not re.fullmatch(r"(\w+_)?(down|wo)(_proj)?", p.layer):
        return False
    for other in neighbors.beside(p):
        is_up = re.fullmatch(r"(\w+_)?(up|wi)(_proj)?", other.layer)
        if is_up and other.shape == p.shape:
            return True
    return False


def _kernel(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers | None:
    """The kernel of a convolution, of a DenseGeneral, or of an einsum with a bias."""
    evidence = _outputs_by_bias if neighbors.bias(p) else _outputs_by_window
    outputs = evidence(p, neighbors)
    if not outputs:
        return None
    inputs = [axis for axis in range(p.rank) if axis not in outputs]
    return MuonDimensionNumbers(one_or_several(inputs), one_or_several(outputs))


def _outputs_by_bias(p: Parameter, neighbors: Neighbors) -> list[int]:
    """The kernel's axes that its bias has too; empty if the bias does not show them."""
    shape, rank = p.shape, p.rank
    bias = neighbors.bias(p) or ()
    if len(bias) == 1:
        is_transposed = "transpose" in p.name.lower()
        if is_outputs_first(p, neighbors):
            order = (0, rank - 1, rank - 2)
        elif is_transposed:
            order = (rank - 2, rank - 1, 0)  # Keras' and Haiku's are [*window, out, in]
        else:
            order = (rank - 1, rank - 2, 0)
        for axis in order:
            if shape[axis] == bias[0]:
                return [axis]
        return []
    inputs = rank - len(bias)
    # Kernels of one matrix a block have such a bias too, and so has [in, heads, size] if in = heads.
    is_block = bias == (*shape[:-2], shape[-1])
    if inputs > 0 and shape[inputs:] == bias and not is_block:
        return list(range(inputs, rank))
    return []


def _outputs_by_window(p: Parameter, neighbors: Neighbors) -> list[int]:
    """The axis of a convolution's outputs; empty for other kernels."""
    if is_outputs_first(p, neighbors):
        return [0]
    # A bare array of such a shape may be a stack of matrices.
    has_window = is_window(p.shape) and not p.is_bare
    if p.role is roles.CONVOLUTION or has_window:
        return [p.rank - 1]
    return []


# The axes of projections and of the output, for d features and h heads of size s.
_ORDERS = (
    ("dhs", "hsd"),  # Flax
    ("dhs", "dhs"),  # axlearn
    ("hds", "hsd"),  # Gemma's einsums
)


def _attention(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers | None:
    """A projection's matrix, by the first order of axes that fits all shapes in its attention."""
    shapes: dict[str, Shape] = {}
    for name, shape in neighbors.attention(p).items():
        if len(shape) > 3:
            return None  # queries grouped by key head
        if len(shape) == 3:
            shapes[name] = shape
    # Flax's kernels have one order; an einsum's output could have either.
    if [*shapes] == ["out"] and words(p.path)[-1] != "kernel":
        return None
    is_output = p.role.projection == "out"
    for order in _ORDERS:
        sizes = {}
        for name, shape in shapes.items():
            sizes[name] = dict(zip(order[name == "out"], shape, strict=True))
        if sizes and not _contradict(sizes):
            features = order[is_output].index("d")
            heads = tuple(axis for axis in range(3) if axis != features)
            sides = (heads, features) if is_output else (features, heads)
            return MuonDimensionNumbers(*sides)
    return None


def _contradict(sizes: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether heads are as large as the model, or the numbers of heads do not fit together."""
    for size in sizes.values():
        if size["s"] >= size["d"] and size["h"] > 1:
            return True
        if size["h"] * size["s"] > 64 * size["d"]:
            return True
    if "query" not in sizes or "out" not in sizes:
        return False
    return sizes["query"]["h"] != sizes["out"]["h"]


def _fused(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Query, key and value in one kernel: on an axis of their own, or side by side in one of two."""
    parts = p.role.parts
    axis_of_part = axis_of_parts(p)
    if p.rank == 4 and axis_of_part is not None:
        one_part = _attention(p, neighbors)
        if one_part is not None:
            rows, columns = (_behind(axis_of_part, axes_of(side)) for side in one_part)
            return MuonDimensionNumbers(one_or_several(rows), one_or_several(columns))
    # With grouped keys the numbers of heads are not known here.
    if p.rank != 2 or parts != 3:
        return None
    first, last = p.shape
    if first == 3 * last:
        return FusedDimensionNumbers(1, 0, parts, 0)
    return FusedDimensionNumbers(0, 1, parts, 1) if last == 3 * first else None


def _behind(removed: int, axes: tuple[int, ...]) -> list[int]:
    """The axes of a shape that lacks one axis, as numbers of the axes with it."""
    return [axis + (axis >= removed) for axis in axes]


def _gate_up(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Gate and up along an axis of size two, with or without an axis of experts."""
    axis_of_part = axis_of_parts(p)
    if p.rank == 2 or axis_of_part is None:
        return None
    axes = [axis for axis in range(p.rank - 3, p.rank) if axis != axis_of_part]
    if len(axes) != 2:
        return None
    rows, columns = axes
    sides = (p.shape[rows], p.shape[columns])
    is_square = sides[0] == sides[1]
    for other in neighbors.beside(p):
        is_down = other.role.muon and other.rank == p.rank - 1
        # Gate and up are stored in the same order as the down kernel.
        if is_down and other.shape[-2:] == sides and not is_square:
            return MuonDimensionNumbers(columns, rows)
    return MuonDimensionNumbers(rows, columns)
