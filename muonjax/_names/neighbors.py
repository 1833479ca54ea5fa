"""Read from the parameters beside a leaf what it does not show itself: its bias, its attention, the order of axes."""

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
