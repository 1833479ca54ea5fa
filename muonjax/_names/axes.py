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
    one_or_several,
)
from muonjax._names import roles
from muonjax._names.convolutions import has_leading_window, is_outputs_first
from muonjax._names.neighbors import Neighbors, Shape
from muonjax._names.roles import Parameter


def matrices(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Which axes of one layer's parameter are rows and which are columns; None where nothing tells.

    It has two axes or more, and its name is not that of a vector or a table. A query [d, heads, size] gives
    MuonDimensionNumbers(0, (1, 2)).
    """
    role, rank = p.role, p.rank
    # Names don't show the axes of these, such as the gates of a recurrent cell.
    if role in roles.OPEN:
        return None
    # The window of a convolution has at least one axis, next to its inputs and outputs.
    if role is roles.CONVOLUTION and rank == 2:
        return None
    # `unstack` took parts that have an axis of their own apart, so that these lie along another one.
    if role.parts > 1:
        return _side_by_side(p)
    if rank > 2:
        if role is roles.MLA_UP:
            return MuonDimensionNumbers(0, (1, 2))
        if role is roles.EXPERTS:
            # [experts, in, out]
            return MuonDimensionNumbers(1, 2)
        if role.projection:
            return _attention(p, neighbors)
    output = _output_axis(p, neighbors)
    if output is None:
        return None
    # Everything else is summed over: the inputs, and the window of a convolution [*window, in, out].
    inputs = [axis for axis in range(rank) if axis != output]
    return MuonDimensionNumbers(one_or_several(inputs), output)


def _output_axis(p: Parameter, neighbors: Neighbors) -> int | None:
    """The axis of a kernel's outputs: the one that its bias has, or the usual one of its library; None if unknown.

    A kernel [80, 32] with a bias [80] has its outputs on axis 0. A bias of several axes does not tell: it may be that
    of a DenseGeneral [*inputs, *outputs], or of a matrix for each block.
    """
    bias = neighbors.bias(p)
    # Flax and most other libraries have the outputs last.
    usual = p.rank - 1
    if p.rank == 2:
        # Flax calls its arrays `kernel`. Only a `weight` is taken to be stored (out, in), as PyTorch does.
        outputs_first = p.is_called_weight and neighbors.outputs_first
        # The weights of routers are often stored in another order than the other weights.
        is_router = p.role is roles.ROUTER and p.is_called_weight
        is_known = outputs_first or (outputs_first is False and not is_router)
    else:
        outputs_first = is_outputs_first(p, neighbors)
        is_convolution = p.role is roles.CONVOLUTION or has_leading_window(p.shape)
        is_known = not bias and (outputs_first or is_convolution)
        # A transposed convolution is [*window, out, in] in Keras and Haiku.
        if bias and "transpose" in p.name.lower():
            usual -= 1
    if outputs_first:
        usual = 0
    axes = [axis for axis, size in enumerate(p.shape) if bias == (size,)]
    # Where several axes are as long as the bias, the order of axes in the library decides.
    if len(axes) == 1 or (axes and usual not in axes):
        return axes[-1]
    is_told = p.rank > 2 and usual in axes
    return usual if is_told or is_known else None


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
    # An output alone may have any order, as that of an einsum.
    if [*shapes] == ["out"]:
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


def _side_by_side(p: Parameter) -> FusedDimensionNumbers | None:
    """The matrices of query, key and value that lie side by side in one of two axes, as in [d, 3·d] on axis 1.

    Two axes show the parts only if all are d × d: with grouped keys their sizes are unknown. Key and value alone are
    left open: [64, 128] may be two of 64 × 64 side by side, or, stored (out, in), two of 32 × 128.
    """
    parts = p.role.parts
    if p.rank != 2 or parts != 3:
        return None
    first, last = p.shape
    if first == 3 * last:
        return FusedDimensionNumbers(
            reduction_axis=1, output_axis=0, parts=parts, axis=0
        )
    if last == 3 * first:
        return FusedDimensionNumbers(0, 1, parts, 1)
    return None
