"""Decide which axes of one layer's parameter are the rows and columns of its matrices.

Where the name leaves several readings of a shape, the evidence is taken in this order: the bias
(what has a bias is an output axis), the attention's other projections (a head is smaller than d,
and query and output have equally many heads), what the rest of the tree stores first (`weight` as
(out, in)), and last the shape alone (two axes are (in, out); equal small axes before larger ones
are a window). If none of them decides, there is no answer.
"""

from collections.abc import Mapping

import jax

from muonjax._matrices.matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    one_or_several,
)
from muonjax._names import roles
from muonjax._names.convolutions import has_leading_window, outputs_are_first
from muonjax._names.neighbors import Neighbors, Shape
from muonjax._names.roles import Parameter


def matrices(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Which axes of a leaf are the rows of its matrices and which are the columns;
    None where nothing tells.

    One layer of it has two axes or more, and its name is not that of a vector or a table. A query
    [d, heads, size] gives MuonDimensionNumbers(0, (1, 2)), and a stack of these
    [layers, d, heads, size] one axis more, (1, (2, 3)).
    """
    # Queries, keys and values in one kernel, side by side. Those of [3, d, heads, size], with an
    # axis of their own, are one part by now: `unstack` has made [d, heads, size] of them.
    if p.role.parts > 1:
        return _side_by_side(p)
    # The rows and columns in the axes of one layer, 0 and 1 for a stack [6, 32, 80], and then in
    # those of the leaf, 1 and 2. For None, which has no leaves, `jax.tree.map` returns None.
    numbers = _matrix_of_layer(p, neighbors)
    return jax.tree.map(lambda axis: p.axes[axis], numbers)


def _matrix_of_layer(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers | None:
    """The axes of one layer that are rows and columns; None where nothing tells, so that Adam takes
    the leaf, with a warning."""
    role, rank = p.role, p.rank
    # Names show that it is one of these, such as the gates of a recurrent cell,
    # but not how its axes are used.
    if role in roles.OPEN:
        return None
    # A convolution has an axis of inputs, one of outputs, and at least one of its window: two axes
    # are something else.
    if role is roles.CONVOLUTION and rank == 2:
        return None
    if rank > 2:
        if role is roles.MLA_UP:
            # [latents, heads, size]
            return MuonDimensionNumbers(0, (1, 2))
        if role is roles.EXPERTS:
            # [experts, in, out]; an expert in a leaf of two axes is read as a dense layer, below.
            return MuonDimensionNumbers(1, 2)
        # A query, key, value or output of an attention has d, heads and size in some order.
        if role.projection:
            return _attention(p, neighbors)
    output = _output_axis(p, neighbors)
    if output is None:
        return None
    # Everything else is summed over: the inputs, and the window of a convolution
    # [*window, in, out].
    inputs = [axis for axis in range(rank) if axis != output]
    return MuonDimensionNumbers(one_or_several(inputs), output)


def _output_axis(p: Parameter, neighbors: Neighbors) -> int | None:
    """The axis of a kernel's outputs; None if unknown.

    It is the axis that is as long as the bias: axis 0 of a kernel [80, 32] with a bias [80]. If no
    bias shows one axis, the usual axis of its library may be it. A bias of several axes does not
    tell: it may be that of a DenseGeneral [*inputs, *outputs], or of a matrix for each block.
    """
    bias = neighbors.bias(p)
    # Empty without a bias of one axis; both axes of a square kernel
    axes = [axis for axis, size in enumerate(p.shape) if bias == (size,)]
    if len(axes) == 1:
        return axes[0]
    if p.rank == 2:
        return _usual_output_axis(p, neighbors)
    # A `ConvTranspose` of Flax is [*window, in, out], unless it has `transpose_kernel=True`. A
    # `conv2d_transpose` of Keras or Haiku is [*window, out, in], and a `conv_transpose` may be
    # either.
    if "transpose" in p.path:
        return None
    outputs_first = outputs_are_first(p, neighbors)
    is_convolution = p.role is roles.CONVOLUTION or has_leading_window(p.shape)
    usual = 0 if outputs_first else p.rank - 1
    # Several axes are as long as the bias, and the library's order tells which of them; or no axis
    # is, and the outputs are unknown. Without a bias, only convolutions, such as a weight (out, in,
    # *window), are known to have their outputs on one axis: [32, 4, 16] may be a DenseGeneral's,
    # with outputs 4 · 16.
    is_known = usual in axes if bias else outputs_first or is_convolution
    return usual if is_known else None


def _usual_output_axis(p: Parameter, neighbors: Neighbors) -> int | None:
    """The axis of outputs of a matrix, [in, out] or [out, in], by the library that it seems to be
    from; None if unknown."""
    # Flax calls its arrays `kernel`, and stores (in, out). A `weight` may be stored (out, in),
    # as PyTorch does.
    if not p.is_called_weight:
        return 1
    if neighbors.outputs_first:
        return 0
    # The weights of routers are often stored in another order than the other weights.
    is_known = neighbors.outputs_first is False and p.role is not roles.ROUTER
    return 1 if is_known else None


# The order of axes in query, key and value, and in the output,
# for d features and h heads of size s.
_ORDERS = (
    ("dhs", "hsd"),  # Flax
    ("dhs", "dhs"),  # axlearn
    ("hds", "hsd"),  # Gemma's einsums
)


def _attention(p: Parameter, neighbors: Neighbors) -> MuonDimensionNumbers | None:
    """The matrix of an attention's projection with three axes: one side is the features,
    one the heads.

    Libraries order the axes differently. The first one decides whose order does not contradict the
    sizes of the attention's projections: a query [64, 4, 16] and an output [4, 16, 64] fit Flax, so
    that the query's rows are axis 0 and its columns (1, 2).
    """
    shapes: dict[str, Shape] = {}
    for name, shape in neighbors.attention(p).items():
        # Queries grouped by key head, [d, groups, heads, size], have no order that is usual.
        if len(shape) > 3:
            return None
        if len(shape) == 3:
            shapes[name] = shape
    # The sizes of an output alone show no order, as it may be an einsum's.
    if shapes.keys() <= {"out"}:
        return None
    is_output = p.role.projection == "out"
    for input_order, output_order in _ORDERS:
        # "dhs" is [d features, h heads, s numbers a head]: a query [64, 4, 16] has
        # {"d": 64, "h": 4, "s": 16}.
        sizes = {}
        for name, shape in shapes.items():
            order = output_order if name == "out" else input_order
            sizes[name] = dict(zip(order, shape, strict=True))
        # Heads are smaller than the model, and a query and its output have equally many. The first
        # order for which this holds counts.
        if not _contradict(sizes):
            order = output_order if is_output else input_order
            features = order.index("d")
            heads = tuple(axis for axis in range(3) if axis != features)
            # Rows are summed over: the heads by an output, the features by the others.
            sides = (heads, features) if is_output else (features, heads)
            return MuonDimensionNumbers(*sides)
    return None


def _contradict(sizes: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether an order of axes makes no sense: several heads as large as the model,
    or unequal numbers of heads.

    `sizes` are those that the order gives: {"query": {"d": 64, "h": 4, "s": 16}, "out": ...}.
    """
    for size in sizes.values():
        # A single head may be as large as the model.
        if size["s"] >= size["d"] and size["h"] > 1:
            return True
    heads = {sizes[name]["h"] for name in sizes.keys() & {"query", "out"}}
    return len(heads) > 1


def _side_by_side(p: Parameter) -> FusedDimensionNumbers | None:
    """The matrices of query, key and value that lie side by side in one of two axes, as in
    [d, 3·d] on axis 1.

    Two axes show the parts only if all are d × d: with grouped keys their sizes are unknown. Key
    and value alone are left open: [64, 128] may be two of 64 × 64 side by side, or, stored
    (out, in), 64 = 2 · 32 rows, two of 32 × 128.
    """
    if p.rank != 2 or p.role.parts != 3:
        return None
    first, last = p.shape
    # `p.shape` is that of one layer; `p.axes` says where its axes are in the leaf: (1, 2) of a
    # stack [layers, d, 3·d].
    if last == 3 * first:
        inputs, outputs = p.axes
    elif first == 3 * last:
        outputs, inputs = p.axes
    else:
        return None
    return FusedDimensionNumbers(inputs, outputs, parts=3, axis=outputs)
