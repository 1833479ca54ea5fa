"""Read from the parameters next to a leaf what it does not show itself: its bias, its attention, its stack of layers.

In a stack of layers, as `nn.scan` or `nnx.vmap` make it, every parameter below the scanned module has one axis more
than a layer's, at the same position and of the same size. A norm's scale (L, d), a bias whose shape is not the end of
its kernel's, or a Dense kernel of three axes shows that there is a stack; its axis is the only position at which all
parameters of the module agree.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from muonjax._names.roles import FUSED_KV, FUSED_QKV, Parameter, attention_scope, layer_of, module, words

Shape = tuple[int, ...]


class Neighbors:
    """What the parameters of a tree show together.

    Attributes:
      outputs_first: Whether leaves called `weight` are (out, in, *window), as PyTorch and Equinox store them; else
        (*window, in, out).
    """

    def __init__(self, parameters: Sequence[Parameter]):
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
                self._attentions[attention_scope(scope)].setdefault(
                    name, p.shape[:axis] + p.shape[axis + 1 :]
                )
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


def is_einsum(p: Parameter) -> bool:
    """Whether a name says that the leaf is the weight of an einsum."""
    return any("einsum" in name for name in words(p.path))


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
    if (
        p.role.projection in ("query", "out")
        and rank == 4
        and len(neighbors.attention(p).get("key", ())) == 3
    ):
        return None  # queries grouped by key head
    if not p.role.muon and sum(size > 1 for size in p.shape) <= 1 < rank and 1 in ranks:
        return None  # a norm's scale stored as (1, 1, 1, 64), or a stack of one
    is_convolution = is_window(p.shape) or is_outputs_first_convolution(p, neighbors)
    if p.role.muon and not p.role.projection and rank > 3 and is_convolution:
        return None
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
    layer = [_without(p, i) for p, i in zip(parameters, best[0], strict=True)]
    # Not 32 layers of width 3 but 3 of width 32.
    return layer if all(count <= math.prod(p.shape) for p in layer if math.prod(p.shape) > 1) else None


def _without(p: Parameter, i: int) -> Parameter:
    return p._replace(shape=p.shape[:i] + p.shape[i + 1 :], axes=p.axes[:i] + p.axes[i + 1 :], stacked=None)
