"""Find the two ends of a model, which belong to Adam: output heads, and embeddings of patches and tokens.

The name of `lm_head` is enough (`roles`). Another dense layer may be a head where its name or its place says so,

  1. its name is that of an end, such as `out` or `q_net`;
  2. it is the last of its kind, as Dense_4 of Dense_0 to Dense_4, at the root or in a module with the name of an end,
     such as `decoder`;

or where sizes do:

  3. no other parameter takes what it gives;
  4. it is [d, vocabulary] next to a table [vocabulary, d].

Where 1 and sizes agree, it is a head. All else that may be one goes to Adam with a warning, as do matrices that may be
embeddings; where no head is found, also each layer whose output nothing takes.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from muonjax._matrices.matrix_view import DimensionNumbers, axes_of
from muonjax._names import roles
from muonjax._names.axes import is_bare, is_trailing_window, is_weight, is_window
from muonjax._names.roles import Parameter, Path, module, stem, words

# The end of a model, or a part of it that is a model of its own.
_END = re.compile(
    r"(?!pre_|norm_)(\w+_)?(outs?|outputs?|logits?|heads?|final|last|predict\w*|classif\w*)(_\w+)?|top|readout|softmax|to_\w+"
    r"|(\w+_)?dec(oder?s?)?(_\w*mlp)?|gen(erator)?|disc(riminator)?|(\w+_)?(critics?|actors?|policy|pol|pi|value|reward)(_\w+)?"
    r"|v|vs|vf|q|qs|qf|q_?(net|nets|network|values?|function|fn)|adv(antage)?|(text|image|visual|vision)_proj(ection)?|w_?h[yo]|mu|mean|(log_?)?std|stddev|sigma|action\w*|eps|noise|score"
    r"|cls|(class|bbox|box)_embed"
)
# What is split, added or concatenated before use, and parts of a model that others continue.
_HIDDEN = re.compile(
    r"(?!(class|bbox|box)_)(\w+_)?(block|in|inputs?|up|gate|down|wi|router|att(n|en)\w*|enc(oder?s?)?|tower|branch|trunk|torso|backbone|stem|bottom|log_?var|var"
    r"|features?|extractor|embed\w*|emb|patch\w*|film|hyper\w*|proj_in)(_\w+)?|(ada|cond|modulat|time|scale_shift)\w*"
)
_PLAIN = re.compile(r"dense|linear|lin|fc|layers?|top|predictions")

_UNNAMED = roles.DENSE, roles.CONVOLUTION, roles.UNKNOWN
_NAME, _LAST = "by its name", "the last of its kind"
_UNTAKEN, _VOCABULARY = "no other parameter takes its output", "gives what the model takes"


def for_adam(
    parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]
) -> tuple[dict[Path, str], set[Path]]:
    """The ends of a model that no name in `roles` shows.

    Returns:
      Paths of kernels that are, or may be, depthwise convolutions, output heads or embeddings, and why; and which of
      these only a name or only a position gives to Adam.
    """
    depthwise = (p for p in parameters if _input_channels(p, decided[p.path]) == 1)
    ends = {p.path: "one input channel: depthwise" for p in depthwise}
    doubts = {*ends} if len(ends) == 1 else set()  # or a model's first convolution
    model = _Model(parameters, {**decided, **dict.fromkeys(ends)})
    for p in model.matrices:
        names, sizes = model.witnesses(p)
        if names or sizes:
            ends[p.path] = "output head: " + ", ".join(names + sizes)
            if names != [_NAME] or not sizes:
                doubts.add(p.path)
    has_head = model.has_head or any(why.startswith("output head") for why in ends.values())
    modules = Counter(module(p.path) for p in parameters)
    for p in parameters:
        is_long = sum(size > 1 for size in p.shape) > 1
        if (why := patch_embedding(p)) not in ("", roles.PATCHES.name):
            pass
        elif words(p.path)[-1:] == ("b",) and is_long and modules[module(p.path)] == 1:
            why = "a bias by its name, a matrix by its axes"
        elif p.role is roles.LONE_LETTER and is_long:
            why = "a letter"
        elif not model.decided[p.path] or p.path in ends:
            continue
        elif model.may_be_a_table(p):
            why = "no other parameter gives its input, so that it may be an embedding"
        elif not has_head and p.role in _UNNAMED and model.is_untaken(p):
            why = f"{_UNTAKEN}, and no output head is found"
        else:
            continue
        ends[p.path] = why
        doubts.add(p.path)
    return ends, doubts


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
    if window[-1] % 2 or inputs > 16:
        return ""
    if any(re.search("embed|patch|stem", name.lower()) for name in words(p.path)[-4:-1]):
        return roles.PATCHES.name
    is_large = window[-1] >= 8 and outputs >= 128
    return "a large window that sees few channels, as of a patch embedding" if is_large else ""


def _input_channels(p: Parameter, numbers: DimensionNumbers | None) -> int:
    """The channels that a convolution's window sees; 0 for other leaves."""
    if p.role is roles.CONVOLUTION and len(p.shape) == 2:
        # (window, channels), as a temporal convolution has it
        return int(numbers is not None and min(p.shape) <= 8 and 8 * min(p.shape) <= max(p.shape))
    if numbers is None or p.role.layouts or p.role not in (roles.CONVOLUTION, roles.UNKNOWN):
        return 0
    rows = axes_of(numbers.reduction_axis)
    return 0 if len(rows) < 2 else p.shape[rows[0] if axes_of(numbers.output_axis) == (0,) else rows[-1]]


class _Model:
    """What the parameters of a tree take and give, the names next to each other, and where the model may end."""

    def __init__(self, parameters: Sequence[Parameter], decided: Mapping[Path, Any]):
        self.parameters, self.decided = parameters, decided
        self.matrices = [p for p in parameters if decided[p.path]]
        self.tables = {p.shape for p in parameters if p.role.name == "embedding"}
        self.has_head = any(p.role is roles.HEAD for p in parameters)
        widths = [_widths(p, decided[p.path]) for p in parameters]
        self.taken = Counter(width for takes, _ in widths for width in takes)
        self.given = Counter(width for _, gives in widths for width in gives)
        scopes = [module(p.path)[:-1] for p in parameters]
        shared = itertools.takewhile(lambda names: len({*names}) == 1, zip(*scopes, strict=False))
        self.root = len([*shared])
        self.beside: dict[Path, set[str]] = defaultdict(set)
        self.series: dict[tuple[Path, str], list[tuple[int, ...]]] = defaultdict(list)
        for p in parameters:
            scope, name, numbers = _numbered(p)
            self.beside[scope].add(name)
            self.beside[scope[:-1]].update(map(stem, scope[-1:]))
            if _is_dense(p, decided[p.path]):
                self.series[scope, name].append(numbers)

    def witnesses(self, p: Parameter) -> tuple[list[str], list[str]]:
        """What says that a matrix is an output head, of the four in the module's docstring: names, sizes."""
        scope, name, numbers = _numbered(p)
        series, inside = self.series[scope, name], [stem(x) for x in scope[self.root :]]
        is_hidden = any(map(_HIDDEN.fullmatch, inside)) or (_HIDDEN.fullmatch(name) and len(series) == 1)
        is_end = not inside or _END.fullmatch(inside[-1])
        if not _is_dense(p, self.decided[p.path]) or is_hidden or not is_end or not self._is_led_to(p):
            return [], []
        is_plain = _PLAIN.fullmatch(name or "layers") or (inside and name in ("proj", "projection"))
        has_other_end = any(map(_END.fullmatch, self.beside[scope] - {name}))
        last = (len(series) > 1 or is_plain) and numbers == max(series) and not has_other_end
        rows, columns = (math.prod(side) for side in _sides(p, self.decided[p.path]))
        sizes = [_UNTAKEN] if self.is_untaken(p) else [_VOCABULARY] * ((columns, rows) in self.tables)
        return [_NAME] if _END.fullmatch(name) else [_LAST] * bool(last), sizes

    def _is_led_to(self, p: Parameter) -> bool:
        """Whether another parameter may come before it: a table of tokens, a matrix, another head; no adapter."""
        others = (q for q in self.parameters if q is not p and q.role is not roles.ADAPTER)
        return any(self.decided[q.path] or q.role is roles.HEAD or q.role.name == "embedding" for q in others)

    def is_untaken(self, p: Parameter) -> bool:
        """Whether no other parameter takes what a matrix gives, in a model of several."""
        takes, (gives,) = _widths(p, self.decided[p.path])
        return not (self.taken - Counter(takes))[gives] and self._is_led_to(p)

    def may_be_a_table(self, p: Parameter) -> bool:
        """Whether a matrix without a name that says what it is takes what no other parameter gives."""
        if p.role is not roles.UNKNOWN or not is_bare(p) or len(p.leaf_shape) != 2:
            return False
        takes, _ = _widths(p, self.decided[p.path])
        return len(self.parameters) > 1 and not any(self.given[width] for width in takes)


def _numbered(p: Parameter) -> tuple[Path, str, tuple[int, ...]]:
    """The module around a layer, its name and its numbers: `fc` and 2 of fc2, `layers` and 3 of layers/3."""
    *scope, name = ("", *module(p.path))
    numbers = []
    while name.isdigit():
        numbers.insert(0, int(name))
        name = scope.pop()
    number = re.search(r"\d+$", name)
    return tuple(scope[1:]), stem(name), tuple(numbers) if numbers else (int(number[0]) if number else -1,)


def _is_dense(p: Parameter, numbers: DimensionNumbers | None) -> bool:
    """Whether this is one layer's dense kernel, of one column too."""
    is_plain = p.role in (roles.DENSE, roles.EXPERTS, roles.UNKNOWN)
    return is_plain and len(p.leaf_shape) == 2 and (bool(numbers) or 1 in p.shape)


def _sides(p: Parameter, numbers: DimensionNumbers) -> list[list[int]]:
    """The sizes of the axes that are rows, and of those that are columns."""
    return [[p.shape[i] for i in axes_of(axes)] for axes in numbers[:2]]


def _widths(p: Parameter, numbers: DimensionNumbers | None) -> tuple[set[int], set[int]]:
    """The widths that a parameter takes, the rows of a kernel, and those that it gives."""
    if p.role.name in ("scale", "embedding") and p.shape:
        return {p.shape[-1]}, {p.shape[-1]}
    if len(p.shape) == 2 and (p.role is roles.HEAD or (p.role.muon and 1 in p.shape)):
        return {p.shape[0]}, set()
    if numbers is None:
        return set(), set()
    rows, columns = _sides(p, numbers)
    channels = _input_channels(p, numbers)  # a window's sizes are no widths
    return {*([channels] if channels else rows), math.prod(rows)}, {math.prod(columns)}
