"""Find the layers at the two ends of a model, which belong to Adam: patch embeddings and output heads.

The name of `lm_head` is enough (`roles`). Any other dense layer is a head where its name or its place says so,

  1. its name, or its module's, is that of an end: `out`, `final_layer/linear`, `q_net`, `decoder/Dense_1`;
  2. it is the last of its kind, as Dense_4 of Dense_0 to Dense_4, where a model ends;

and sizes confirm it:

  3. no other parameter takes what it gives, alone or in a concatenation;
  4. it gives what the model takes: it is [d, vocabulary] beside a table [vocabulary, d], or an autoencoder's last.

A layer that only names or only sizes speak for stays with Muon, and a warning names it.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from muonjax._matrix_view import DimensionNumbers, axes_of
from muonjax._routing import roles
from muonjax._routing.roles import head_module, is_position, module, stem, words
from muonjax._routing.siblings import Parameter, is_trailing_window, is_weight, is_window

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
_PROJECTION = re.compile(r"proj|projection")


def is_input_patches(p: Parameter) -> bool:
    """Whether a convolution's kernel cuts an image or a video into patches.

    Its window is even, and it is named for an embedding, or it is large and sees few channels.
    """
    if len(p.shape) not in (4, 5):
        return False
    *window, inputs, outputs = p.shape
    if is_weight(p) and is_trailing_window(p.shape):
        outputs, inputs, *window = p.shape
    elif not is_window(p.shape):
        return False
    names = r"embed|patch|stem" if inputs <= 4 else r"embed|patch"
    named = any(re.search(names, name.lower()) for name in words(p.path)[-4:-1])
    large = window[-1] >= 8 and outputs >= 128
    return window[-1] % 2 == 0 and inputs <= 16 and (large or named)


def depthwise(parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]) -> list[Path]:
    """Convolutions of one input channel, which a depthwise one has for each output; but not a model's first one."""
    inputs = {p.path: _input_channels(p, decided[p.path]) for p in parameters}
    found = [p for p in parameters if inputs[p.path] == 1]
    if len(found) == 1:
        (p,) = found
        like = [
            q for q in parameters if inputs[q.path] > 1 and (_stem(q), _scope(q)) == (_stem(p), _scope(p))
        ]
        others = [q for q in parameters if inputs[q.path] > 1]
        first = all(_number(p) < _number(q) for q in like) and all(len(p.path) <= len(q.path) for q in others)
        if first and (len(p.shape) > 3 or like):
            return []
    return [p.path for p in found]


def _input_channels(p: Parameter, numbers: DimensionNumbers | None) -> int:
    """The channels that a convolution's window sees; 0 for what is none."""
    if p.role is roles.CONVOLUTION and len(p.shape) == 2:
        # (window, channels), as a temporal convolution has it
        return int(numbers is not None and 8 * min(p.shape) <= max(p.shape))
    if numbers is None or p.role.layouts or p.role not in (roles.CONVOLUTION, roles.UNKNOWN):
        return 0
    rows = axes_of(numbers.reduction_axis)
    return 0 if len(rows) < 2 else p.shape[rows[0] if axes_of(numbers.output_axis) == (0,) else rows[-1]]


def output_heads(
    parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]
) -> tuple[dict[Path, str], dict[Path, str]]:
    """Paths of the kernels that are output heads though their name alone does not say so, and why; and of those that
    only names, or only sizes, speak for, and what these say."""
    model = _Model(parameters, decided)
    heads, chances = {}, {}
    for p in model.dense:
        if decided[p.path] is None:
            continue
        names, sizes = model.witnesses(p)
        if sizes and names:
            heads[p.path] = "output head: " + ", ".join((names + sizes)[:2])
        elif names and not p.role.kind:
            chances[p.path] = f"{names[0]}, but its sizes do not say so"
        elif sizes and not model.is_multiple(p):
            chances[p.path] = f"{sizes[0]}, but its name does not say so"
    return heads, {} if heads or model.has_head else chances


_NAME, _LAST = "by its name", "the last of its kind"
_UNTAKEN, _VOCABULARY = "no other parameter takes its output", "gives what the model takes"


class _Model:
    """The widths that the parameters of a tree take and give, and the modules where a model may end."""

    def __init__(self, parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]):
        self.numbers = decided
        self.parameters = parameters
        self.dense = [p for p in parameters if self._is_dense(p)]
        self.tables = {p.shape for p in parameters if p.role.name == "embedding" and not is_position(p.path)}
        self.taken, self.given = Counter(), Counter()
        for p in parameters:
            takes, gives = self._widths(p)
            self.taken.update(takes)
            self.given.update(gives)
        self.root = self._ground(())
        self.series: dict[tuple[Path, str], list[Parameter]] = defaultdict(list)
        for p in self.dense:
            self.series[_scope(p), _stem(p)].append(p)
        for layers in self.series.values():
            layers.sort(key=_number)
        modules = {module(p.path)[:i] for p in self.dense for i in range(1, len(module(p.path)))}
        ends = {self._ground(path) for path in modules if self._is_end(path)}
        below_root = (path for path in modules if len(path) == len(self.root) + 1)
        tops = {self._ground(path) for path in below_root if not re.search(r"\D\d+$", path[-1])}  # no blocks
        at_root = any(scope == self.root for scope, _ in self.series)
        self.has_head = any(p.role is roles.HEAD for p in parameters)
        self.ends = {self.root} | ends | (set() if at_root or self.has_head or ends else tops)

    def witnesses(self, p: Parameter) -> tuple[list[str], list[str]]:
        """What says that a dense layer is an output head, of the four in the module's docstring: names, sizes."""
        scope, columns, head = _scope(p), self._sides(p)[1], head_module(p.path)
        if not any(self._is_layer(q) for q in self.parameters if q.path != p.path):
            return [], []  # nothing leads to it: a layer alone is no head
        sizes = [_UNTAKEN] if self._is_untaken(p, columns, head) else []
        if head:  # what others in it take is the layer before the last
            return ([_NAME], sizes) if sizes and not _is_hidden(head[:-1]) else ([], [])
        if scope not in self.ends:
            return [], []
        if _is_hidden(module(p.path)[len(self.root) :]):
            series = self.series[scope, _stem(p)]  # up2 after up1, where a U-shaped model ends
            ends = len(series) > 1 and p is series[-1] and self._gives_what_the_model_takes(p, True)
            return [], [_VOCABULARY] * ends
        own, last = bool(_END.fullmatch(_stem(p))), self._is_last(p)
        if not sizes and self._gives_what_the_model_takes(p, own or last):
            sizes = [_VOCABULARY]
        names = [_NAME] if own or (last and scope != self.root) else []
        return names + ([_LAST] if last else []), sizes

    def _is_last(self, p: Parameter) -> bool:
        """Whether the layer is the last of a numbered series, or the only plain one where a model ends; also one that
        the next of its series does not follow, but begins anew with an input of the series."""
        layers, columns = self.series[_scope(p), _stem(p)], self._sides(p)[1]
        others = [
            q
            for (scope, stem), found in self.series.items()
            for q in found
            if scope == _scope(p) and stem != _stem(p)
        ]
        if any(self._sides(q)[0] == columns for q in others):
            return False
        if len(layers) == 1:
            plain = _PLAIN.fullmatch(_stem(p) or "layers")
            return bool(plain or (_scope(p) != self.root and _PROJECTION.fullmatch(_stem(p))))
        later = [q for q in layers if _number(q) > _number(p)]
        if not later:
            return True
        inputs = [self._sides(q)[0] for q in layers if _number(q) <= _number(p)]
        return self._sides(later[0])[0] in inputs and not self.taken[columns] and not self.is_multiple(p)

    def _is_untaken(self, p: Parameter, columns: int, head: Path) -> bool:
        """Whether no other parameter takes a layer's output; inside of a head no other parameter of the head."""
        taken, given = Counter(self.taken), Counter(self.given)
        if head:
            inside = (q for q in self.parameters if words(q.path)[: len(head)] == head)
            taken = Counter(width for q in inside for width in self._widths(q)[0])
        taken.subtract(self._widths(p)[0])
        given.subtract([columns])
        if taken[columns] > 0:
            return False
        # 120 may be 96 and 24, put together.
        orphans = {self._sides(q)[0] for q in self.dense if q is not p} - set(given)
        return not any(given[width - columns] > 0 for width in orphans if width > columns)

    def _gives_what_the_model_takes(self, p: Parameter, end: bool) -> bool:
        """Whether a layer undoes an embedding, or alone gives what others take, as an autoencoder's last layer does."""
        rows, columns = self._sides(p)
        matrices = [q for q in self.parameters if self.numbers[q.path] and q is not p]
        if (columns, rows) in self.tables:
            return rows != columns or bool(matrices)
        if not end or self.given[columns] != 1 or rows == columns or any(len(q.shape) > 3 for q in matrices):
            return False
        widths = [self._widths(q) for q in self.parameters if q is not p]
        reached, new = set(), {columns}  # from what it gives back to what it takes, through the others
        while new:
            reached |= new
            new = {width for takes, gives in widths if takes & new for width in gives} - reached
        return rows in reached

    def _is_dense(self, p: Parameter) -> bool:
        """Whether this is one layer's dense kernel, of one column too."""
        plain = p.role in (roles.DENSE, roles.EXPERTS, roles.UNKNOWN)
        plain = plain or bool(p.role.kind and _END.fullmatch(_stem(p)))
        return plain and len(p.leaf_shape) == 2 and (bool(self.numbers[p.path]) or 1 in p.shape)

    def _is_layer(self, p: Parameter) -> bool:
        """Whether a parameter may lead to a head: a table of tokens, a matrix, another head; no adapter."""
        if p.role.name == "embedding":
            return not is_position(p.path)
        return p.role is roles.HEAD or (self.numbers[p.path] is not None and p.role is not roles.ADAPTER)

    def is_multiple(self, p: Parameter) -> bool:
        """Whether a layer's output may be split into parts of a width that others take."""
        columns = self._sides(p)[1]
        return not self.taken[columns] and any(columns % width == 0 for width in self.taken if width > 15)

    def _is_end(self, path: Path) -> bool:
        """Whether a module is a part of the model that ends it, and in no block."""
        names = path[len(self.root) :]
        blocks = any(re.search(r"\d$", name) for name in names[:-1])
        return bool(names) and bool(_END.fullmatch(stem(names[-1]))) and not blocks and not _is_hidden(names)

    def _ground(self, path: Path) -> Path:
        """The module inside of `path` in which its parameters first part."""
        below = [_scope(p) for p in self.parameters if words(p.path)[: len(path)] == path]
        common = min(below, key=len, default=path)
        for other in below:
            while other[: len(common)] != common:
                common = common[:-1]
        return common

    def _sides(self, p: Parameter) -> tuple[int, int]:
        numbers = self.numbers[p.path]
        if numbers is None:
            return max(p.shape), 1
        rows, columns = (math.prod(p.shape[i] for i in axes_of(axes)) for axes in numbers[:2])
        return rows, columns

    def _widths(self, p: Parameter) -> tuple[set[int], set[int]]:
        """The widths that a parameter takes, the rows of a kernel, and those that it gives."""
        numbers = self.numbers[p.path]
        if p.role.name in ("scale", "embedding") and p.shape:
            return {p.shape[-1]}, {p.shape[-1]}
        if p.role is roles.HEAD and len(p.shape) == 2:
            return {p.shape[0]}, set()
        if numbers is None:
            return set(), set()
        rows, columns = ([p.shape[i] for i in axes_of(axes)] for axes in numbers[:2])
        return {*rows, math.prod(rows)}, {math.prod(columns)}


def _scope(p: Parameter) -> Path:
    return module(p.path)[:-1]


def _stem(p: Parameter) -> str:
    return stem((module(p.path) or ("",))[-1])


def _number(p: Parameter) -> int:
    found = re.search(r"(\d+)$", (module(p.path) or ("",))[-1])
    return int(found[1]) if found else -1


def _is_hidden(path: Path) -> bool:
    """Whether the layer or a module around it is named for what lies inside of a model."""
    return any(_HIDDEN.fullmatch(stem(name)) for name in path)
