"""Decide which axes of one layer's parameter are the rows and columns of its matrices.

Where the name leaves several readings of a shape, the evidence is taken in this order: the bias
(what has a bias is an output axis), the attention's other projections (they agree on d, heads and
size), what the rest of the tree stores first (`weight` as (out, in)), and last the shape alone (two
axes are (in, out); equal small axes before larger ones are a window). If none of them decides,
there is no answer.
"""

from collections.abc import Mapping

from muonjax._matrices.matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    axes_of,
    one_or_several,
)
from muonjax._names import roles
from muonjax._names.convolutions import has_leading_window, is_outputs_first
from muonjax._names.neighbors import Neighbors, Shape, axis_of_parts
from muonjax._names.path_words import words
from muonjax._names.roles import Parameter


def matrices(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Which axes of one layer's parameter are rows and which are columns; None where nothing tells.

    It has two axes or more, and its name is not that of a vector or a table. A query [d, heads, size] gives
    MuonDimensionNumbers(0, (1, 2)).
    """
    role, rank = p.role, p.rank
    # Such as the gates of a recurrent cell, of which names don't show the axes
    if role in roles.OPEN:
        return None
    # The window of a convolution has at least one axis, next to its inputs and outputs.
    if role is roles.CONVOLUTION and rank == 2:
        return None
    if role is roles.GATE_UP:
        return _gate_up(p, neighbors)
    if role in (roles.FUSED_QKV, roles.FUSED_KV):
        return _fused(p, neighbors)
    if rank == 2:
        return _dense(p, neighbors)
    if role.projection:
        return _attention(p, neighbors)
    # Experts [experts, in, out] have one layout; of other kernels a bias or a window tells the outputs.
    return role.layouts.get(rank) or _kernel(p, neighbors)


def _dense(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers | None:
    """Whether a matrix of two axes is stored (in, out), as Flax does, or (out, in), as PyTorch does.

    None for a router that seems to have many more experts than features, as [64, 4096].
    """
    first, last = p.shape
    bias = neighbors.bias(p)
    # Flax calls its arrays `kernel`. Without a bias only a `weight` is taken to be stored (out, in).
    outputs_first = p.is_called_weight and neighbors.outputs_first
    is_router_weight = p.role is roles.ROUTER and p.is_called_weight
    # A bias is as long as the outputs; for a square matrix it shows nothing.
    if bias and first != last:
        outputs_first = bias == (first,)
    elif is_router_weight and not outputs_first and 8 * first <= last:
        # A router has fewer experts than features, so that [64, 4096] may be (out, in), although the other weights of
        # the tree don't show this order. Up to a factor of eight (in, out) is believed: [64, 256] may have 256 experts.
        return None
    return MuonDimensionNumbers(1, 0) if outputs_first else MuonDimensionNumbers(0, 1)


def _kernel(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers | None:
    """Rows and columns of a kernel of three axes or more: a convolution, a DenseGeneral, an einsum.

    Its bias tells which axes are outputs; without a bias only the window of a convolution does.
    """
    outputs_of = _outputs_by_bias if neighbors.bias(p) else _outputs_by_window
    outputs = outputs_of(p, neighbors)
    if not outputs:
        return None
    # Everything else is summed over: the inputs, and the window of a convolution.
    inputs = [axis for axis in range(p.rank) if axis not in outputs]
    return MuonDimensionNumbers(one_or_several(inputs), one_or_several(outputs))


def _outputs_by_bias(p: Parameter, neighbors: Neighbors) -> list[int]:
    """The axes of a kernel that its bias has too; empty if the bias does not show them.

    A kernel [5, 3, 32] with a bias [32] has the outputs [2]; [32, 3, 4, 8] with [4, 8] has [2, 3].
    """
    shape, rank = p.shape, p.rank
    bias = neighbors.bias(p) or ()
    if len(bias) == 1:
        # Where several axes are as long as the bias, the order of axes in the library decides.
        order = [rank - 1, rank - 2]
        # A transposed convolution is [*window, out, in] in Keras and Haiku.
        if "transpose" in p.name.lower():
            order.reverse()
        # PyTorch has the outputs first, other libraries last.
        order = [0, *order] if is_outputs_first(p, neighbors) else [*order, 0]
        for axis in order:
            if shape[axis] == bias[0]:
                return [axis]
        return []
    # The outputs of a DenseGeneral come last: [*inputs, *outputs] with a bias [*outputs]. A kernel with one matrix for
    # each block, [blocks, in, out] with a bias [blocks, out], has such a bias too if blocks = in.
    inputs = rank - len(bias)
    is_block = bias == (*shape[:-2], shape[-1])
    if inputs > 0 and shape[inputs:] == bias and not is_block:
        return list(range(inputs, rank))
    return []


def _outputs_by_window(p: Parameter, neighbors: Neighbors) -> list[int]:
    """The axis of a convolution's outputs, [3] of [3, 3, 16, 32]; empty for other kernels."""
    if is_outputs_first(p, neighbors):
        return [0]
    # A bare array of such a shape may be a stack of matrices.
    has_window = has_leading_window(p.shape) and not p.is_bare
    if p.role is roles.CONVOLUTION or has_window:
        return [p.rank - 1]
    return []


# The order of axes in query, key and value, and in the output, for d features and h heads of size s.
_ORDERS = (
    ("dhs", "hsd"),  # Flax
    ("dhs", "dhs"),  # axlearn
    ("hds", "hsd"),  # Gemma's einsums
)


def _attention(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers | None:
    """The matrix of an attention's projection with three axes: one side is the features, one the heads.

    The order of axes is that of the first library whose order makes sense of all projections in the same attention. A
    query [64, 4, 16] and an output [4, 16, 64] fit Flax, so the query's rows are axis 0 and its columns (1, 2).
    """
    shapes: dict[str, Shape] = {}
    for name, shape in neighbors.attention(p).items():
        # Queries grouped by key head, [d, groups, heads, size], have no order that is usual.
        if len(shape) > 3:
            return None
        if len(shape) == 3:
            shapes[name] = shape
    # An output alone has one order in Flax, whose arrays are called kernel; an einsum's could be any.
    is_alone = [*shapes] == ["out"]
    if is_alone and words(p.path)[-1] != "kernel":
        return None
    is_output = p.role.projection == "out"
    for input_order, output_order in _ORDERS:
        # "dhs" is [d features, h heads, s numbers a head]: a query [64, 4, 16] has {"d": 64, "h": 4, "s": 16}.
        sizes = {}
        for name, shape in shapes.items():
            order = output_order if name == "out" else input_order
            sizes[name] = dict(zip(order, shape, strict=True))
        if sizes and not _contradict(sizes):
            order = output_order if is_output else input_order
            features = order.index("d")
            heads = tuple(axis for axis in range(3) if axis != features)
            sides = (heads, features) if is_output else (features, heads)
            return MuonDimensionNumbers(*sides)
    return None


def _contradict(sizes: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether an order of axes makes no sense: several heads as large as the model, or unequal numbers of heads.

    `sizes` are those that the order gives: {"query": {"d": 64, "h": 4, "s": 16}, "out": ...}.
    """
    for size in sizes.values():
        # A single head may be as large as the model.
        if size["s"] >= size["d"] and size["h"] > 1:
            return True
    if "query" not in sizes or "out" not in sizes:
        return False
    return sizes["query"]["h"] != sizes["out"]["h"]


def _fused(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """The matrices of a kernel that holds query, key and value, or key and value.

    They lie along an axis of their own, as [3, d, heads, size], or side by side in one of two axes: [d, 3·d] has three
    parts on axis 1.
    """
    parts = p.role.parts
    axis_of_part = axis_of_parts(p)
    if p.rank == 4 and axis_of_part is not None:
        # `_attention` answers for one part, [d, heads, size] of [3, d, heads, size], whose shape `neighbors` has. With
        # the axis of parts, which counts matrices, its (0, (1, 2)) is (1, (2, 3)).
        numbers_of_part = _attention(p, neighbors)
        if numbers_of_part is not None:
            rows = _behind(axis_of_part, axes_of(numbers_of_part.reduction_axis))
            columns = _behind(axis_of_part, axes_of(numbers_of_part.output_axis))
            return MuonDimensionNumbers(one_or_several(rows), one_or_several(columns))
    # Two axes show the parts only if all are d × d: with grouped keys their sizes are unknown. A key and value [d, 2·d]
    # may be two of d × d, or [2·n, 4·n] that is stored (out, in) for keys of n features.
    if p.rank != 2 or parts != 3:
        return None
    first, last = p.shape
    if first == 3 * last:
        return FusedDimensionNumbers(1, 0, parts, 0)
    if last == 3 * first:
        return FusedDimensionNumbers(0, 1, parts, 1)
    return None


def _behind(removed: int, axes: tuple[int, ...]) -> list[int]:
    """Axes of a shape from which one was removed, as axes of the whole shape: without axis 1, 0 and 1 are 0 and 2."""
    return [axis + (axis >= removed) for axis in axes]


def _gate_up(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Rows and columns of gate and up in one kernel, [2, in, out] or [experts, 2, in, out]."""
    # Side by side along a longer axis, as in Phi 3, gate and up can't be told from a single matrix.
    if p.rank == 2:
        return None
    # Two of the last three axes are rows and columns, and the third is that of gate and up, of size 2. If no axis
    # before the last has this size, three remain, and nothing tells.
    axis_of_part = axis_of_parts(p)
    axes = [axis for axis in range(p.rank - 3, p.rank) if axis != axis_of_part]
    if len(axes) != 2:
        return None
    rows, columns = axes
    sides = (p.shape[rows], p.shape[columns])
    is_square = sides[0] == sides[1]
    for other in neighbors.beside(p):
        may_be_down = other.role.muon and other.rank == p.rank - 1
        # A down kernel is [hidden, d]. Gate and up of the same sides are stored as [hidden, d] too, which is (out, in).
        if may_be_down and other.shape[-2:] == sides and not is_square:
            return MuonDimensionNumbers(columns, rows)
    return MuonDimensionNumbers(rows, columns)
