"""Read from the parameters beside a leaf what it does not show itself: bias, attention, order of axes."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from muonjax._routing.roles import FUSED_KV, FUSED_QKV, Role, attention_scope, layer_of, module, words

Shape = tuple[int, ...]


class Parameter(NamedTuple):
    """A leaf as one layer sees it.

    Attributes:
      path: Names from the root.
      role: What it is in its layer.
      shape: Its shape in one layer.
      axes: For each axis of `shape`, which axis of the leaf it is.
      leaf_shape: Its shape as it is stored.
      stacked: True where further axes enumerate layers, but it is not known which ones.
    """

    path: tuple[str, ...]
    role: Role
    shape: Shape
    axes: tuple[int, ...]
    leaf_shape: Shape
    stacked: bool | None = None


class Siblings:
    """What the parameters of a tree show together.

    Attributes:
      biases: Module to the shape of its bias.
      attentions: Attention module to the shapes of its projections by kind, "query" to "out".
      head_sizes: Attention's scope to the size of its heads, where its module shows it.
      outputs_first: Whether leaves called `weight` are (out, in, *window), as PyTorch and Equinox store them.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        head_sizes: Mapping[tuple[str, ...], int] | None = None,
        outputs_first: bool | None = None,
    ):
        self.biases: dict[tuple[str, ...], Shape] = {
            module(p.path): p.shape for p in parameters if p.role.name == "bias"
        }
        self.attentions: dict[tuple[str, ...], dict[str, Shape]] = {}
        self._modules: dict[tuple[str, ...], list[Parameter]] = {}
        self._folders: dict[tuple[str, ...], list[Parameter]] = {}
        self.head_sizes = head_sizes or {}
        for p in parameters:
            scope = layer_of(p.path)[0]
            self._modules.setdefault(scope, []).append(p)
            self._folders.setdefault(words(p.path)[:-1], []).append(p)
            if p.role.kind or p.role in (FUSED_QKV, FUSED_KV):
                shapes = self.attentions.setdefault(attention_scope(scope), {})
                shapes[p.role.kind or f"{p.role.parts} fused"] = p.shape
        self.outputs_first = self._outputs_first(parameters) if outputs_first is None else outputs_first

    def bias(self, p: Parameter) -> Shape | None:
        """The shape of the bias beside a weight, on one layer's axes."""
        shape = self.biases.get(module(p.path))
        if shape and (len(shape) > 2 or (shape[1:] == (1,) and is_weight(p))):
            # (16, 1, 1) is a convolution's in PyTorch's order.
            return tuple(size for size in shape if size > 1) or (1,)
        return shape

    def attention(self, p: Parameter) -> dict[str, Shape]:
        """The shapes of the attention that a projection belongs to."""
        shapes = self.attentions.get(attention_scope(layer_of(p.path)[0]), {})
        if "query" not in shapes and "3 fused" in shapes and len(shapes.get("out", ())) == 3:
            return shapes | {"query": _query_in(shapes["3 fused"], shapes["out"])}
        return shapes

    def beside(self, p: Parameter) -> Iterable[Parameter]:
        """Other parameters whose layer is in the same scope."""
        return (q for q in self._modules.get(layer_of(p.path)[0], ()) if q.path != p.path)

    def partners(self, p: Parameter) -> Iterable[Parameter]:
        """The other parameters in the same dictionary: of an adapter's factor, the other factor."""
        return (q for q in self._folders.get(words(p.path)[:-1], ()) if q.path != p.path)

    def is_batched_factor(self, p: Parameter) -> bool:
        """Whether an adapter has a pair of factors for each matrix of its weight: [*batch, in, rank] beside
        [*batch, rank, out] and [*batch, in, out]."""
        name = words(p.path)[-1]
        base = re.sub(r"_?lora_[ab]$", "", name)
        found = {words(q.path)[-1]: q.shape for q in self._folders.get(words(p.path)[:-1], ())}
        weights = [found[n] for n in ([base] if base else ("w", "kernel", "weight")) if n in found]
        a, b = (found.get(name[: len(name) - 1] + letter, ()) for letter in "ab")
        pairs = [((*w[:-1], a[-1]), (*w[:-2], a[-1], w[-1])) for w in weights if a and len(w) > 2]
        return (a, b) in pairs

    def _outputs_first(self, parameters: Sequence[Parameter]) -> bool:
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


def is_weight(p: Parameter) -> bool:
    """Whether the leaf is called `weight`, as PyTorch, Equinox and axlearn call what Flax calls `kernel`."""
    path = words(p.path)
    return bool(path) and bool(re.fullmatch(r"weights?(_(v|ih|hh)\w*)?", path[-1]))


def is_bias_of_blocks(bias: Shape, shape: Shape) -> bool:
    """Whether a bias has every output of a matrix per block, [blocks, in, out], in one axis or by block."""
    blocks = math.prod(shape[:-2])
    return blocks > 1 and bias in ((*shape[:-2], shape[-1]), (blocks * shape[-1],))


def is_window(shape: Shape) -> bool:
    """Whether the leading axes of [*window, in, out] look like a window: equal, small and before larger ones."""
    window = shape[:-2]
    return len(shape) in (4, 5) and window[-1] == window[-2] <= 32 and max(window) < shape[-1]


def is_trailing_window(shape: Shape) -> bool:
    """Whether the trailing axes of [out, in, *window] look like a window."""
    window = shape[2:]
    return len(shape) in (4, 5) and len(set(window)) == 1 and window[0] <= 32 and window[0] < shape[0]


def is_outputs_first(p: Parameter, siblings: Siblings) -> bool:
    """Whether a leaf called `weight` of three axes or more is a convolution's [out, in, *window]."""
    likely = siblings.outputs_first or is_trailing_window(p.shape)
    if p.role.name == "convolution" and len(p.shape) == 3:  # of one window axis, which is the shortest
        likely = likely or p.shape[2] < min(p.shape[:2])
    return is_weight(p) and len(p.shape) > 2 and likely and not is_window(p.shape)


class Arrangement(NamedTuple):
    """The order of the axes d (features), h (heads) and s (size of a head) in projections and output kernel."""

    projection: str
    out: str


FLAX = Arrangement("dhs", "hsd")

# Flax first; axlearn and simply; Gemma's einsums; outputs first.
_ARRANGEMENTS = [
    Arrangement(*pair) for pair in (("dhs", "hsd"), ("dhs", "dhs"), ("hds", "hsd"), ("hsd", "dhs"))
]


def arrangements(shapes: Mapping[str, Shape], *, einsum: bool = False) -> list[Arrangement]:
    """The arrangements that all projections of an attention agree with, the likeliest first.

    Args:
      shapes: By kind, of one layer; only those with three axes are looked at.
      einsum: Whether the names say that these are weights of einsums, [heads, d, size] in Gemma.
    """
    shapes = {kind: shape for kind, shape in shapes.items() if len(shape) == 3}
    order = sorted(_ARRANGEMENTS, key=lambda a: a.projection != "hds") if einsum else _ARRANGEMENTS
    scored = [(_agreement(shapes, a), a) for a in order]
    return [a for score, a in sorted(scored, key=lambda pair: -pair[0]) if score >= 0]


def has_heads_of_flax(shapes: Mapping[str, Shape]) -> bool:
    """Whether query [d, heads, size] and output [heads, size, d] have equal heads.

    Where no arrangement is likely, as in a small model whose heads are larger than d, this and Flax's name decide."""
    query, out = shapes.get("query", ()), shapes.get("out", ())
    return len(query) == len(out) == 3 and query[1] == out[0]


def _agreement(shapes: Mapping[str, Shape], arrangement: Arrangement) -> int:
    """How many pairs of sizes agree of those that rarely differ; −1 if sizes differ that must agree."""

    def read(kind: str) -> dict[str, int] | None:
        order = arrangement.out if kind == "out" else arrangement.projection
        return dict(zip(order, shapes[kind], strict=True)) if kind in shapes else None

    query, key, value, out = map(read, ("query", "key", "value", "out"))
    for kernel in (query, key, value, out):
        if kernel and kernel["s"] >= kernel["d"] and kernel["h"] > 1:
            return -1
        if kernel and kernel["h"] * kernel["s"] > 64 * kernel["d"]:
            return -1
    if query and out and query["h"] != out["h"]:
        return -1
    if any(a and b and b["h"] % a["h"] for a, b in ((value, query), (value, key), (key, query), (key, out))):
        return -1
    pairs = itertools.combinations([kernel for kernel in (query, key, value, out) if kernel], 2)
    return sum((a["d"] == b["d"]) + (a["s"] == b["s"]) for a, b in pairs)


def _query_in(fused: Shape, out: Shape) -> Shape:
    """The shape of the query's part of a kernel that holds query, key and value; () where it can't be told."""
    if len(fused) == 4 and 3 in fused[:-1]:
        batch = fused.index(3)
        return fused[:batch] + fused[batch + 1 :]
    if len(fused) == 3:
        for a in arrangements({"out": out}):
            d, heads, size = (fused[a.projection.index(axis)] for axis in "dhs")
            sizes = dict(zip(a.out, out, strict=True))
            if (d, size) == (sizes["d"], sizes["s"]) and heads > sizes["h"]:
                return tuple(sizes["h"] if axis == "h" else fused[i] for i, axis in enumerate(a.projection))
    return ()
