"""Decide which axes of a leaf count layers, and which are the rows and columns of one layer's matrices.

Both are read from the parameters next to a leaf. In a stack of layers, as `nn.scan` or `nnx.vmap` make it, every
parameter below the scanned module has one axis more than a layer's, at the same position and of the same size. A norm's
scale (L, d), a bias whose shape is not the end of its kernel's, or a Dense kernel of three axes shows that there is a
stack; its axis is the only position at which all parameters of the module agree.

Where the name of one layer's parameter leaves several readings of its shape, the evidence is taken in this order: the
bias (what has a bias is an output axis), the attention's other projections (they agree on d, heads and size), what the
rest of the tree stores first (`weight` as (out, in)), and last the shape alone (two axes are (in, out); equal small
axes before larger ones are a window). Where none of them tells, there is no answer.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from muonjax._matrices.matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    axes_of,
    one_or_several,
)
from muonjax._names import roles
from muonjax._names.roles import FUSED_KV, FUSED_QKV, Parameter, attention_scope, layer_of, module, words

Shape = tuple[int, ...]


class Neighbors:
    """What the parameters of a tree show together.

    Attributes:
      outputs_first: Whether leaves called `weight` are (out, in, *window), as PyTorch and Equinox store them; else
        (*window, in, out).
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self._modules = Counter(module(p.path) for p in parameters)
        self._biases = {module(p.path): p.shape for p in parameters if p.role.name == "bias"}
        self._beside: dict[tuple[str, ...], list[Parameter]] = defaultdict(list)
        self._attentions: dict[tuple[str, ...], dict[str, Shape]] = defaultdict(dict)
        for p in parameters:
            scope, fused = layer_of(p.path)[0], p.role in (FUSED_QKV, FUSED_KV)
            self._beside[scope].append(p)
            if p.role.projection:
                self._attentions[attention_scope(scope)][p.role.projection] = p.shape
            elif fused and (axis := axis_of_parts(p)) is not None and len(p.shape) == 4:
                name = "query" if p.role is FUSED_QKV else "key"
                shape = p.shape[:axis] + p.shape[axis + 1 :]
                self._attentions[attention_scope(scope)].setdefault(name, shape)
        self.outputs_first = self._are_outputs_first(parameters)

    def bias(self, p: Parameter) -> Shape | None:
        """The shape of the bias of a weight, on one layer's axes."""
        shape = self._biases.get(module(p.path))
        if shape and (len(shape) > 2 or (shape[1:] == (1,) and is_weight(p))):
            # (16, 1, 1) is a convolution's in PyTorch's order.
            return tuple(size for size in shape if size > 1) or (1,)
        return shape

    def attention(self, p: Parameter) -> dict[str, Shape]:
        """The shapes of all projections of the attention that one belongs to, "query" to "out"."""
        return self._attentions.get(attention_scope(layer_of(p.path)[0]), {})

    def beside(self, p: Parameter) -> Sequence[Parameter]:
        """The parameters whose layer is in the same scope."""
        return self._beside[layer_of(p.path)[0]]

    def contradict(self, p: Parameter) -> bool:
        """Whether a leaf of several axes can't be the vector or the table that its name says."""
        bias = self.bias(p)
        if p.role in (roles.NORM, roles.TABLE) and bias:
            return len(bias) < len(p.shape)  # a matrix, or the table of a head that is tied
        if p.role is roles.NORM:
            return p.path[-1] == "kernel"
        return words(p.path)[-1:] == ("b",) and self._modules[module(p.path)] == 1

    def _are_outputs_first(self, parameters: Sequence[Parameter]) -> bool:
        votes = 0
        for p in parameters:
            bias = self.bias(p)
            if not p.role.muon or not is_weight(p) or len(p.shape) < 2:
                continue
            if bias and len(bias) == 1:
                votes += (p.shape[0] == bias[0]) - (p.shape[-1] == bias[0])
            elif len(p.shape) == 2 and re.search(
                r"(^|_)(up|gate|fc1|w1|c_fc|wi|intermediate|linear1)(_|$)", layer_of(p.path)[1]
            ):
                votes += (p.shape[0] > p.shape[1]) - (p.shape[0] < p.shape[1])  # a hidden layer is wide
        if not votes:  # an output head called weight that is stored as the table of tokens
            tables = {p.shape for p in parameters if p.role.name == "embedding"}
            return any(p.shape in tables and is_weight(p) for p in parameters if p.role.name == "output head")
        return votes > 0


def axis_of_parts(p: Parameter) -> int | None:
    """The axis, before the last, that counts the parts of a fused kernel."""
    return next((i for i, size in enumerate(p.shape[:-1]) if size == p.role.parts), None)


def is_weight(p: Parameter) -> bool:
    """Whether the leaf is called `weight`, as PyTorch, Equinox and axlearn call what Flax calls `kernel`."""
    path = words(p.path)
    return bool(path) and bool(re.fullmatch("weights?(_v)?", path[-1]))


def is_bare(p: Parameter) -> bool:
    """Whether the leaf is no kernel or bias of a module: its name is its own."""
    return module(p.path) == words(p.path)


def is_window(shape: Shape) -> bool:
    """Whether the leading axes of [*window, in, out] look like a window: the last two equal and small, none as large as
    the outputs; one more may count frames."""
    window = shape[:-2]
    return len(shape) in (4, 5) and window[-1] == window[-2] <= 32 and max(window) < shape[-1]


def is_trailing_window(shape: Shape) -> bool:
    """Whether the trailing axes of [out, in, *window] look like a window."""
    window = shape[2:]
    return len(shape) in (4, 5) and len(set(window)) == 1 and window[0] <= 32 and window[0] < shape[0]


def is_outputs_first_convolution(p: Parameter, neighbors: Neighbors) -> bool:
    """Whether a leaf called `weight` of three axes or more is a convolution's [out, in, *window]."""
    likely = neighbors.outputs_first or is_trailing_window(p.shape)
    if p.role.name == "convolution" and len(p.shape) == 3:  # of one window axis, which is the shortest
        likely = likely or p.shape[2] < min(p.shape[:2])
    return is_weight(p) and len(p.shape) > 2 and likely and not is_window(p.shape)


def unstack(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Remove the axes that count layers, again and again where scans are nested.

    Args:
      parameters: Every leaf of the tree.

    Returns:
      The same leaves with the shapes and axes of one layer; `stacked` stays True where the axis can't be told.
    """
    current = list(parameters)
    while True:
        neighbors = Neighbors(current)
        current = [p._replace(stacked=_verdict(p, neighbors)) for p in current]
        peeled = {p.path: p for p in _peel(current, 0)}
        before, current = current, [peeled[p.path] for p in current]
        if current == before:
            return current


def _verdict(p: Parameter, neighbors: Neighbors) -> bool | None:
    """True for a stack, False for one layer, None where it can't be told from this leaf alone."""
    rank, ranks, bias = len(p.shape), p.role.ranks, neighbors.bias(p)
    if bias and len(bias) == 1 and rank > 1 and bias[0] in p.shape:
        return False  # a stack's bias has an axis of layers too
    keys = neighbors.attention(p).get("key", ())
    if p.role.projection in ("query", "out") and rank == 4 and len(keys) == 3:
        return None  # queries grouped by key head
    return True if rank > max(ranks, default=rank) else False if rank == min(ranks, default=0) else None


def _peel(parameters: Sequence[Parameter], depth: int) -> list[Parameter]:
    """Remove one axis of layers from the outermost modules where some leaf shows a stack and none a single layer."""
    verdicts = {p.stacked for p in parameters}
    if True in verdicts and False not in verdicts and (together := _peel_together(parameters)):
        return together
    if len(parameters) == 1:
        return list(parameters)
    children: dict[str, list[Parameter]] = {}
    for p in parameters:
        children.setdefault(p.path[depth] if depth < len(p.path) else "", []).append(p)
    return [p for child in children.values() for p in _peel(child, depth + 1)]


def _peel_together(parameters: Sequence[Parameter]) -> list[Parameter] | None:
    """The parameters without their common axis of layers; as they are if two axes fit equally well; None if none
    fits."""
    ranks = [len(p.shape) for p in parameters]
    fits: dict[tuple[int, ...], int] = {}
    for axis in [*range(max(ranks)), *range(-max(ranks), 0)]:
        where = tuple(axis if axis >= 0 else rank + axis for rank in ranks)
        if all(0 <= i < rank for i, rank in zip(where, ranks, strict=True)):
            sizes = {p.shape[i] for p, i in zip(parameters, where, strict=True)}
            if len(sizes) == 1:
                fits[where] = sizes.pop()
    if not fits:
        return None
    count = min(fits.values())  # square layers fit in more than one way; there are fewer layers than features
    best = [where for where, size in fits.items() if size == count]
    # A kernel alone is a stack only on its first axis, one of an attention may be (d, groups, heads, size).
    if len(parameters) == 1 and (parameters[0].role.projection or any(where[0] for where in best)):
        return None
    if len(best) > 1 and any(p.role.muon for p in parameters):
        return list(parameters)
    return [_without(p, i) for p, i in zip(parameters, best[0], strict=True)]


def _without(p: Parameter, i: int) -> Parameter:
    return p._replace(shape=p.shape[:i] + p.shape[i + 1 :], axes=p.axes[:i] + p.axes[i + 1 :], stacked=None)


def matrices(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """The matrices in one layer's parameter, on that layer's axes; None where nothing tells."""
    role, rank = p.role, len(p.shape)
    if role in roles.OPEN or (role, rank == 2) in ((roles.ADAPTER, False), (roles.CONVOLUTION, True)):
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
    projections = neighbors.attention(p)
    shapes = {name: shape for name, shape in projections.items() if len(shape) == 3}
    if any(len(shape) > 3 for shape in projections.values()) or (
        [*shapes] == ["out"] and words(p.path)[-1] != "kernel"
    ):
        return None  # queries grouped by key head, or an output alone, in two orders
    for order in _ORDERS:
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
    return "query" in read and "out" in read and read["query"]["h"] != read["out"]["h"]


def _fused(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Query, key and value, or key and value: on an axis of their own, or side by side in one of two axes."""
    parts, batch = p.role.parts, axis_of_parts(p)
    if len(p.shape) == 4 and batch is not None and (inner := _attention(p, neighbors)):
        rows, columns = ([i + (i >= batch) for i in axes_of(axes)] for axes in inner)
        return MuonDimensionNumbers(one_or_several(rows), one_or_several(columns))
    if len(p.shape) != 2:
        return None
    axis = 0 if p.shape[0] == 3 * p.shape[1] else 1
    # Grouped keys: out of how many heads nothing here tells.
    fits = parts == 3 and p.shape[axis] == 3 * p.shape[1 - axis]
    return FusedDimensionNumbers(1 - axis, axis, parts, axis) if fits else None


def _gate_up(p: Parameter, neighbors: Neighbors) -> DimensionNumbers | None:
    """Gate and up on an axis of two, below experts or not."""
    shape, rank, batch = p.shape, len(p.shape), axis_of_parts(p)
    if rank == 2 or batch is None or batch + 4 <= rank:
        return None
    inner = tuple(i for i in range(rank - 3, rank) if i != batch)
    sides = tuple(shape[i] for i in inner)
    down = [q.shape[-2:] for q in neighbors.beside(p) if q.role.muon and len(q.shape) == rank - 1]
    if sides[0] != sides[1] and sides in down:
        inner = inner[::-1]  # stored as the down kernel is
    return MuonDimensionNumbers(*inner)
