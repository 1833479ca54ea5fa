"""Find the two ends of a model, which belong to Adam: output heads, and embeddings of patches and tokens.

The name of `lm_head` is enough (`roles`). Any other dense layer is a head where its name or its place says so,

  1. its name, or its module's, is that of an end: `out`, `final_layer/linear`, `q_net`, `decoder/Dense_1`;
  2. it is the last of its kind, as Dense_4 of Dense_0 to Dense_4, where a model ends;

and sizes confirm it:

  3. no other parameter takes what it gives, alone or in a concatenation;
  4. it gives what the model takes: it is [d, vocabulary] next to a table [vocabulary, d], or an autoencoder's last.

A layer that only names or only sizes speak for stays with Muon. A warning lists it, and every leaf that only its
position or an ambiguous name gives to Adam; where no head is found, also each layer whose output nothing takes.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from muonjax._matrices.matrix_view import DimensionNumbers, axes_of
from muonjax._names import roles
from muonjax._names.axes import is_bare, is_trailing_window, is_weight, is_window
from muonjax._names.roles import Parameter, head_module, module, stem, words

Path = tuple[str, ...]

# The end of a model, or a part of it that is a model of its own.
_END = re.compile(
    r"(?!pre_)(\w+_)?(outs?|outputs?|logits?|heads?|final|last|predict\w*|classif\w*)(_\w+)?|top|readout|softmax|to_\w+"
    r"|(\w+_)?dec(oder?s?)?(_\w*mlp)?|gen(erator)?|disc(riminator)?|(\w+_)?(critics?|actors?|policy|pol|pi|value|reward)(_\w+)?"
    r"|v|vs|vf|q|qs|qf|q_?(net|nets|network|values?|function|fn)|adv(antage)?|(text|image|visual|vision)_proj(ection)?|w_?h[yo]|mu|mean|(log_?)?std|stddev|sigma|action\w*|eps|noise|score"
)
# What is split, added or concatenated before use, and parts of a model that others continue.
_HIDDEN = re.compile(
    r"(\w+_)?(block|in|inputs?|up|gate|down|wi|router|att(n|en)\w*|enc(oder?s?)?|tower|branch|trunk|torso|backbone|stem|bottom|log_?var|var"
    r"|features?|extractor|embed\w*|emb|patch\w*|film|hyper\w*|proj_in)(_\w+)?|(ada|cond|modulat|time|scale_shift)\w*"
)
_PLAIN = re.compile(r"dense|linear|lin|fc|layers?|top|predictions")


def for_adam(
    parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]
) -> tuple[dict[Path, str], dict[Path, tuple[str, str]]]:
    """The ends of a model that no name in `roles` shows.

    Returns:
      Paths of kernels that are depthwise convolutions or output heads, and why; and paths of the leaves that only a
      name or only a position gives to an optimizer, that optimizer, and what name or position say.
    """
    found, doubts = _depthwise(parameters, decided)
    decided = {**decided, **dict.fromkeys(found)}
    model = _Model(parameters, decided)
    for layer in model.dense:
        path = layer.p.path
        if decided[path] is None:
            continue
        names, sizes = model.witnesses(layer)
        if sizes and names:
            found[path] = "output head: " + ", ".join((names + sizes)[:2])
            if _NAME not in names or layer.p.role.projection:
                doubts[path] = ", ".join((names + sizes)[:2])
        elif names and not layer.p.role.projection:
            doubts[path] = f"{names[0]} an output head, but its sizes do not say so"
        elif sizes:
            doubts[path] = f"{sizes[0]}, as of an output head, but its name does not say so"
    headless = not model.has_head and not any(why.startswith("output head") for why in found.values())
    modules = Counter(module(p.path) for p in parameters)
    for p in parameters:
        is_long = sum(size > 1 for size in p.shape) > 1
        if patch_embedding(p) not in ("", roles.PATCHES.name):
            doubts[p.path] = patch_embedding(p)
        elif words(p.path)[-1:] == ("b",) and is_long and modules[module(p.path)] == 1:
            doubts[p.path] = "a bias by its name, a matrix by its axes"
        elif p.path not in doubts and model.may_be_a_table(p):
            doubts[p.path] = "no other parameter gives its input, so that it may be an embedding"
        elif headless and p.path not in doubts and model.may_be_a_head(p):
            doubts[p.path] = f"{_UNTAKEN}, and no output head is found"
    after = {**decided, **dict.fromkeys(found)}
    return found, {path: ("Muon" if after[path] else "Adam", why) for path, why in doubts.items()}


def patch_embedding(p: Parameter) -> str:
    """Why a convolution's kernel cuts an image or a video into patches; "" if nothing says so.

    Its window is even, and it is named for an embedding, or it is large and sees few channels.
    """
    if is_weight(p) and is_trailing_window(p.shape):
        outputs, inputs, *window = p.shape
    elif is_window(p.shape):
        *window, inputs, outputs = p.shape
    else:
        return ""
    if window[-1] % 2 or inputs > 16 or not p.role.muon:
        return ""
    names = r"embed|patch|stem" if inputs <= 4 else r"embed|patch"
    if any(re.search(names, name.lower()) for name in words(p.path)[-4:-1]):
        return roles.PATCHES.name
    is_large = window[-1] >= 8 and outputs >= 128
    return "a large window that sees few channels, as of a patch embedding" if is_large else ""


def _depthwise(
    parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]
) -> tuple[dict[Path, str], dict[Path, str]]:
    """Convolutions of one input channel, which a depthwise one has for each output; but not a model's first one. And
    one that may be either."""
    inputs = {p.path: _input_channels(p, decided[p.path]) for p in parameters}
    found = {path: "one input channel: depthwise" for path, size in inputs.items() if size == 1}
    if len(found) != 1:
        return found, {}
    convolutions = [_layer(p, None) for p in parameters if inputs[p.path]]
    first, *others = sorted(convolutions, key=lambda q: q.p.path not in found)
    like = [q for q in others if (q.stem, q.scope) == (first.stem, first.scope)]
    if all(first.number < q.number for q in like) and (like or len(first.p.shape) > 3):
        return {}, {}
    return found, dict.fromkeys(found, "one input channel, as of a depthwise convolution or a first layer")


def _input_channels(p: Parameter, numbers: DimensionNumbers | None) -> int:
    """The channels that a convolution's window sees; 0 for other leaves."""
    if p.role is roles.CONVOLUTION and len(p.shape) == 2:
        # (window, channels), as a temporal convolution has it
        return int(numbers is not None and min(p.shape) <= 8 and 8 * min(p.shape) <= max(p.shape))
    if numbers is None or p.role.layouts or p.role not in (roles.CONVOLUTION, roles.UNKNOWN):
        return 0
    rows = axes_of(numbers.reduction_axis)
    return 0 if len(rows) < 2 else p.shape[rows[0] if axes_of(numbers.output_axis) == (0,) else rows[-1]]


_NAME, _LAST = "by its name", "the last of its kind"
_UNTAKEN, _VOCABULARY = "no other parameter takes its output", "gives what the model takes"


class _Layer(NamedTuple):
    """A dense layer: its module's name, as `fc` and 2 of fc2, the module around it, and what it takes and gives."""

    p: Parameter
    scope: Path
    stem: str
    number: int
    rows: int
    columns: int


class _Model:
    """The widths that the parameters of a tree take and give, and the modules where a model may end."""

    def __init__(self, parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]):
        self.decided = decided
        self.parameters = parameters
        self.dense = [_layer(p, decided[p.path]) for p in parameters if _is_dense(p, decided[p.path])]
        self.tables = {p.shape for p in parameters if p.role.name == "embedding"}
        self.widths = [_widths(p, decided[p.path]) for p in parameters]
        self.taken = Counter(width for takes, _ in self.widths for width in takes)
        self.given = Counter(width for _, gives in self.widths for width in gives)
        self.root = self._ground(())
        self.series: dict[tuple[Path, str], list[_Layer]] = defaultdict(list)
        for layer in sorted(self.dense, key=lambda layer: layer.number):
            self.series[layer.scope, layer.stem].append(layer)
        modules = {(*q.scope, "")[:i] for q in self.dense for i in range(1, len(q.scope) + 1)}
        ends = {self._ground(path) for path in modules if self._is_end(path)}
        below_root = (path for path in modules if len(path) == len(self.root) + 1)
        tops = {self._ground(path) for path in below_root if not re.search(r"\D\d+$", path[-1])}  # no blocks
        at_root = any(layer.scope == self.root for layer in self.dense)
        self.has_head = any(p.role is roles.HEAD for p in parameters)
        self.ends = {self.root} | ends | (set() if at_root or self.has_head or ends else tops)

    def witnesses(self, layer: _Layer) -> tuple[list[str], list[str]]:
        """What says that a dense layer is an output head, of the four in the module's docstring: names, sizes."""
        path = layer.p.path
        if not any(self._leads(q) for q in self.parameters if q.path != path):
            return [], []  # a layer alone is no head
        head = head_module(path)
        sizes = [_UNTAKEN] if self._is_untaken(layer, head) else []
        if head:  # what others in it take is the layer before the last
            return ([_NAME], sizes) if sizes and not _is_hidden(head[:-1]) else ([], [])
        if layer.scope not in self.ends:
            return [], []
        if _is_hidden(module(path)[len(self.root) :]):
            series = self.series[layer.scope, layer.stem]  # up2 after up1, where a U-shaped model ends
            ends = len(series) > 1 and layer is series[-1] and self._gives_what_the_model_takes(layer, True)
            return [], [_VOCABULARY] * ends
        own, last = bool(_END.fullmatch(layer.stem)), self._is_last(layer)
        if not sizes and self._gives_what_the_model_takes(layer, own or last):
            sizes = [_VOCABULARY]
        names = [_NAME] if own or (last and layer.scope != self.root) else []
        return names + ([_LAST] if last else []), sizes

    def _is_last(self, layer: _Layer) -> bool:
        """Whether the layer is the last of a numbered series, or the only plain one where a model ends; also one that
        the next of its series does not follow, but begins anew with an input of the series."""
        layers = self.series[layer.scope, layer.stem]
        others = (q for q in self.dense if q.scope == layer.scope and q.stem != layer.stem)
        if any(q.rows == layer.columns for q in others):
            return False
        if len(layers) == 1:
            below = layer.scope != self.root and re.fullmatch("proj|projection", layer.stem)
            return bool(below or _PLAIN.fullmatch(layer.stem or "layers"))
        following = next((q for q in layers if q.number > layer.number), None)
        inputs = [q.rows for q in layers if q.number <= layer.number]
        begins_anew = following and following.rows in inputs and not self.taken[layer.columns]
        may_be_split = any(layer.columns % width == 0 for width in self.taken if width > 15)
        return not following or bool(begins_anew and not may_be_split)

    def _is_untaken(self, layer: _Layer, head: Path) -> bool:
        """Whether no other parameter takes a layer's output; inside of a head no other parameter of the head."""
        taken = Counter(self.taken)
        if head:
            inside = (q for q in self.parameters if words(q.path)[: len(head)] == head)
            taken = Counter(w for q in inside for w in _widths(q, self.decided[q.path])[0])
        taken.subtract(_widths(layer.p, self.decided[layer.p.path])[0])
        if taken[layer.columns] > 0:
            return False
        given = self.given - Counter([layer.columns])
        # 120 may be 96 and 24, put together.
        orphans = {q.rows for q in self.dense if q is not layer} - set(given)
        return not any(given[width - layer.columns] > 0 for width in orphans if width > layer.columns)

    def _gives_what_the_model_takes(self, layer: _Layer, end: bool) -> bool:
        """Whether a layer undoes an embedding, or alone gives what others take, as an autoencoder's last layer does."""
        rows, columns = layer.rows, layer.columns
        matrices = [q for q in self.parameters if self.decided[q.path] and q is not layer.p]
        if (columns, rows) in self.tables:
            return True
        if not end or self.given[columns] != 1 or rows == columns or any(len(q.shape) > 3 for q in matrices):
            return False
        widths = [w for q, w in zip(self.parameters, self.widths, strict=True) if q is not layer.p]
        reached, new = set(), {columns}  # from what it gives back to what it takes, through the others
        while new:
            reached |= new
            new = {width for takes, gives in widths if takes & new for width in gives} - reached
        return rows in reached

    def _leads(self, p: Parameter) -> bool:
        """Whether a parameter may lead to a head: a table of tokens, a matrix, another head; no adapter."""
        is_matrix = self.decided[p.path] is not None and p.role is not roles.ADAPTER
        return is_matrix or p.role is roles.HEAD or p.role.name == "embedding"

    def may_be_a_table(self, p: Parameter) -> bool:
        """Whether a matrix without a name that says what it is takes what no other parameter gives."""
        numbers = self.decided[p.path]
        if not numbers or p.role is not roles.UNKNOWN or len(p.leaf_shape) != 2 or not is_bare(p):
            return False
        return len(self.parameters) > 1 and not self.given[p.shape[axes_of(numbers.reduction_axis)[0]]]

    def may_be_a_head(self, p: Parameter) -> bool:
        """Whether no other parameter takes what a layer without a role gives."""
        numbers = self.decided[p.path]
        if not numbers or p.role not in (roles.DENSE, roles.CONVOLUTION, roles.UNKNOWN):
            return False
        others = self.taken - Counter(_widths(p, numbers)[0])
        leads = any(self._leads(q) for q in self.parameters if q is not p)
        return leads and not others[math.prod(_sides(p, numbers)[1])]

    def _is_end(self, path: Path) -> bool:
        """Whether a module is a part of the model that ends it."""
        names = path[len(self.root) :]
        return bool(names) and bool(_END.fullmatch(stem(names[-1]))) and not _is_hidden(names)

    def _ground(self, path: Path) -> Path:
        """The module inside of `path` in which its parameters first part."""
        below = [module(p.path)[:-1] for p in self.parameters if words(p.path)[: len(path)] == path]
        shared = itertools.takewhile(lambda names: len({*names}) == 1, zip(*below, strict=False))
        return tuple(names[0] for names in shared)


def _is_dense(p: Parameter, numbers: DimensionNumbers | None) -> bool:
    """Whether this is one layer's dense kernel, of one column too."""
    plain = p.role in (roles.DENSE, roles.EXPERTS, roles.UNKNOWN)
    plain = plain or bool(p.role.projection and _END.fullmatch(stem((module(p.path) or ("",))[-1])))
    return plain and len(p.leaf_shape) == 2 and (bool(numbers) or 1 in p.shape)


def _layer(p: Parameter, numbers: DimensionNumbers | None) -> _Layer:
    *scope, name = module(p.path) or ("",)
    number = re.search(r"(\d+)$", name)
    sides = (max(p.shape), 1) if numbers is None else [math.prod(side) for side in _sides(p, numbers)]
    return _Layer(p, tuple(scope), stem(name), int(number[1]) if number else -1, *sides)


def _sides(p: Parameter, numbers: DimensionNumbers) -> list[list[int]]:
    """The sizes of the axes that are rows, and of those that are columns."""
    return [[p.shape[i] for i in axes_of(axes)] for axes in numbers[:2]]


def _widths(p: Parameter, numbers: DimensionNumbers | None) -> tuple[set[int], set[int]]:
    """The widths that a parameter takes, the rows of a kernel, and those that it gives."""
    if p.role.name in ("scale", "embedding") and p.shape:
        return {p.shape[-1]}, {p.shape[-1]}
    if p.role is roles.HEAD and len(p.shape) == 2:
        return {p.shape[0]}, set()
    if numbers is None:
        return set(), set()
    rows, columns = _sides(p, numbers)
    channels = _input_channels(p, numbers)  # a window's sizes are no widths
    return {*([channels] if channels else rows), math.prod(rows)}, {math.prod(columns)}


def _is_hidden(path: Path) -> bool:
    """Whether the layer or a module around it is named for what lies inside of a model."""
    return any(_HIDDEN.fullmatch(stem(name)) for name in path)
