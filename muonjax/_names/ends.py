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
from muonjax._names.roles import Answer, Parameter, Path, module, stem, words

# The end of a model, or a part of it that is a model of its own.
_END = re.compile(
    r"(?!pre_|norm_|.*att)(\w+_)?(outs?|outputs?|logits?|heads?|final|last|predict\w*|classif\w*)(_\w+)?|top|readout|softmax|to_\w+"
    r"|(\w+_)?dec(oder?s?)?(_\w*mlp)?|gen(erator)?|disc(riminator)?|(\w+_)?(critics?|actors?|policy|pol|pi|value|reward)(_\w+)?"
    r"|v|vs|vf|q|qs|qf|q_?(net|nets|network|values?|function|fn)|adv(antage)?|(text|image|visual|vision)_proj(ection)?|w_?h[yo]|mu|mean|(log_?)?std|stddev|sigma|action\w*|eps|noise|score"
    r"|cls|(class|bbox|box)_embed|(\w+_)?unembed(ding)?"
)
# What is split, added or concatenated before use, and parts of a model that others continue.
_HIDDEN = re.compile(
    r"(?!(class|bbox|box)_)(\w+_)?(block|in|inputs?|up|gate|down|wi|router|att(n|en)\w*|enc(oder?s?)?|tower|branch|trunk|torso|backbone|stem|bottom|log_?var|var"
    r"|features?|extractor|embed\w*|emb|patch\w*|film|hyper\w*|proj_in)(_\w+)?|(ada|cond|modulat|time|scale_shift)\w*"
)

_PLAIN = re.compile(r"dense|linear|lin|fc|layers?|top|predictions|proj|projection")

_UNNAMED = roles.DENSE, roles.CONVOLUTION, roles.UNKNOWN
_NAME, _LAST = "by its name", "the last of its kind"
_UNTAKEN = "no other parameter takes its output"


def ends(parameters: Sequence[Parameter], answers: Mapping[Path, Answer]) -> dict[Path, Answer]:
    """New answers for what is, or may be, a depthwise convolution, an output head or an embedding by no name in
    `roles`."""
    numbers = {path: answer.numbers for path, answer in answers.items()}
    depthwise = [p.path for p in parameters if _input_channels(p, numbers[p.path]) == 1]
    # A single one may be a model's first convolution.
    found = dict.fromkeys(depthwise, Answer(None, "one input channel: depthwise", len(depthwise) == 1))
    if sum(len(p.shape) > 1 for p in parameters) == 1:
        return found  # a layer by itself may be any
    model = _Model(parameters, {**numbers, **dict.fromkeys(depthwise)})
    for p in model.matrices:
        names, sizes = model.witnesses(p)
        if names or sizes:
            is_open = names != [_NAME] or not sizes
            found[p.path] = Answer(None, "output head: " + ", ".join(names + sizes), is_open)
    has_head = model.has_head or any(answer.why.startswith("output head") for answer in found.values())
    for p in model.matrices:
        if p.path in found:
            continue
        if model.may_be_a_table(p):
            why = "no other parameter gives its input, so that it may be an embedding"
            found[p.path] = Answer(None, why, is_open=True)
        elif not has_head and p.role in _UNNAMED and model.is_untaken(p):
            found[p.path] = Answer(None, f"{_UNTAKEN}, and no output head is found", is_open=True)
    return found


def patch_embedding(p: Parameter) -> Answer | None:
    """The answer for a convolution's kernel that cuts an image or a video into patches; None if nothing says so.

    Its window is even, and it is named for an embedding, or it is large and sees few channels.
    """
    if is_weight(p) and is_trailing_window(p.shape):
        outputs, inputs, *window = p.shape
    elif is_window(p.shape):
        *window, inputs, outputs = p.shape
    else:
        return None
    if window[-1] % 2 or inputs > 16:
        return None
    if any(re.search("embed|patch|stem", name.lower()) for name in words(p.path)[-4:-1]):
        return Answer(None, roles.PATCHES.name)
    is_large = window[-1] >= 8 and outputs >= 128
    return (
        Answer(None, "a large window that sees few channels, as of a patch embedding", True)
        if is_large
        else None
    )


def _input_channels(p: Parameter, numbers: DimensionNumbers | None) -> int:
    """The channels that a convolution's window sees; 0 for other leaves."""
    if numbers is None or p.role.layouts or p.role not in (roles.CONVOLUTION, roles.UNKNOWN):
        return 0
    rows = axes_of(numbers.reduction_axis)
    return 0 if len(rows) < 2 else p.shape[rows[0] if axes_of(numbers.output_axis) == (0,) else rows[-1]]


class _Model:
    """What the parameters of a tree take and give, the names next to each other, and where the model may end."""

    def __init__(self, parameters: Sequence[Parameter], decided: Mapping[Path, Any]):
        self.parameters, self.decided = parameters, decided
        self.matrices = [p for p in parameters if decided[p.path]]
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
            if _is_dense(p, decided[p.path]):
                self.series[scope, name].append(numbers)

    def witnesses(self, p: Parameter) -> tuple[list[str], list[str]]:
        """What says that a matrix is an output head, of the four in the module's docstring: names, sizes."""
        scope, name, numbers = _numbered(p)
        series, inside = self.series[scope, name], [stem(x) for x in scope[self.root :]]
        is_end = not inside or _END.fullmatch(inside[-1])
        if not _is_dense(p, self.decided[p.path]) or any(map(_HIDDEN.fullmatch, inside)) or not is_end:
            return [], []
        has_other_end = any(map(_END.fullmatch, self.beside[scope] - {name}))
        is_plain = len(series) > 1 or _PLAIN.fullmatch(name or "layers")
        last = is_plain and numbers == max(series) and not has_other_end
        return [_NAME] if _END.fullmatch(name) else [_LAST] * bool(last), [_UNTAKEN] * self.is_untaken(p)

    def is_untaken(self, p: Parameter) -> bool:
        """Whether no other parameter takes what a matrix gives, in a model of several."""
        takes, (gives,) = _widths(p, self.decided[p.path])
        return not (self.taken - Counter(takes))[gives]

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


def _widths(p: Parameter, numbers: DimensionNumbers | None) -> tuple[set[int], set[int]]:
    """The widths that a parameter takes, the rows of a kernel, and those that it gives."""
    if p.role.name in ("scale", "embedding") and p.shape:
        return {p.shape[-1]}, {p.shape[-1]}
    if len(p.shape) == 2 and (p.role is roles.HEAD or (p.role.muon and 1 in p.shape)):
        return {p.shape[0]}, set()
    if numbers is None:
        return set(), set()
    rows, columns = ([p.shape[i] for i in axes_of(axes)] for axes in numbers[:2])
    return {*rows, math.prod(rows)}, {math.prod(columns)}
