"""Find the two ends of a model, which belong to Adam: output heads, and embeddings of patches and tokens.

The name of `lm_head` is enough (`roles`). Another dense layer may be a head where its name or its place says so,

  1. its name is that of an end, such as `out` or `q_net`;
  2. it is the last of its kind, as Dense_4 of Dense_0 to Dense_4, at the root or in a module with the name of an end,
     such as `decoder`;

or where sizes do:

  3. no other parameter takes what it gives.

Where 1 and sizes agree, it is a head. All else that may be one goes to Adam with a warning, as do matrices that may be
embeddings; where no head is found, also each layer whose output nothing takes.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

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
# Parts of a model that others continue.
_HIDDEN = re.compile(r"(\w+_)?(block|enc(oder)?s?|att(n|en)\w*|tower|trunk|torso|backbone)(_\w+)?")
_PLAIN = re.compile(r"dense|linear|lin|fc|layers?|top|predictions|proj|projection")

_UNTAKEN = "no other parameter takes its output"


def ends(parameters: Sequence[Parameter], answers: Mapping[Path, Answer]) -> dict[Path, Answer]:
    """New answers for what is, or may be, a depthwise convolution, an output head or an embedding by no name in
    `roles`."""
    numbers = {path: answer.numbers for path, answer in answers.items()}
    depthwise = [p.path for p in parameters if _sees_one_channel(p, numbers[p.path])]
    # A single one may be a model's first convolution.
    found = dict.fromkeys(depthwise, Answer(None, "one input channel: depthwise", len(depthwise) == 1))
    if sum(len(p.shape) > 1 for p in parameters) == 1:
        return found  # a layer by itself may be any
    model = _Model(parameters, {**numbers, **dict.fromkeys(depthwise)})
    found |= {p.path: head for p in model.matrices if (head := model.output_head(p))}
    has_head = len(found) > len(depthwise) or any(p.role is roles.HEAD for p in parameters)
    for p in model.matrices:
        is_layer = p.role in (roles.DENSE, roles.CONVOLUTION, roles.UNKNOWN)
        if p.path in found:
            continue
        if model.may_be_a_table(p):
            why = "no other parameter gives its input, so that it may be an embedding"
            found[p.path] = Answer(None, why, is_open=True)
        elif is_layer and not has_head and model.is_untaken(p):
            found[p.path] = Answer(None, f"{_UNTAKEN}, and no output head is found", is_open=True)
    return found


def patch_embedding(p: Parameter) -> Answer | None:
    """The answer for a convolution's kernel that cuts an image or a video into patches; None for other leaves.

    Its window is even, and it is named for an embedding, or, which stays open, it is large and sees few channels.
    """
    is_outputs_first = is_weight(p) and is_trailing_window(p.shape)
    if not (is_outputs_first or is_window(p.shape)):
        return None
    outputs, inputs, side = p.shape[:3] if is_outputs_first else p.shape[:-4:-1]
    is_named = any(re.search("embed|patch|stem", name.lower()) for name in words(p.path)[-4:-1])
    if side % 2 or inputs > 16 or not (is_named or (side >= 8 and outputs >= 128)):
        return None
    return Answer(None, roles.PATCHES.name, is_open=not is_named)


def _sees_one_channel(p: Parameter, numbers: DimensionNumbers | None) -> bool:
    """Whether this is a convolution whose window sees one channel."""
    if numbers is None or p.role not in (roles.CONVOLUTION, roles.UNKNOWN):
        return False
    rows = axes_of(numbers.reduction_axis)
    return len(rows) > 1 and p.shape[rows[0] if axes_of(numbers.output_axis) == (0,) else rows[-1]] == 1


class _Model:
    """What the parameters of a tree take and give, the names next to each other, and where the model may end."""

    def __init__(self, parameters: Sequence[Parameter], numbers: Mapping[Path, DimensionNumbers | None]):
        self.matrices = [p for p in parameters if numbers[p.path]]
        self.widths = {p.path: _widths(p, numbers[p.path]) for p in parameters}
        self.taken = Counter(width for takes, _ in self.widths.values() for width in takes)
        self.given = Counter(width for _, gives in self.widths.values() for width in gives)
        scopes = [module(p.path)[:-1] for p in parameters]
        shared = itertools.takewhile(lambda names: len({*names}) == 1, zip(*scopes, strict=False))
        self.root = len([*shared])
        self.beside: dict[Path, set[str]] = defaultdict(set)
        self.series: dict[tuple[Path, str], list[tuple[int, ...]]] = defaultdict(list)
        for p in parameters:
            scope, name, count = _numbered(p)
            self.beside[scope].add(name)
            if _is_dense(p) and (numbers[p.path] or 1 in p.shape):
                self.series[scope, name].append(count)

    def output_head(self, p: Parameter) -> Answer | None:
        """The answer for an output head by one of the signs in the module's docstring; None for other matrices."""
        scope, name, count = _numbered(p)
        series, inside = self.series[scope, name], [stem(x) for x in scope[self.root :]]
        is_hidden = any(map(_HIDDEN.fullmatch, inside))
        is_end = not inside or _END.fullmatch(inside[-1])
        if is_hidden or not is_end or not _is_dense(p):
            return None
        is_named, is_untaken = bool(_END.fullmatch(name)), self.is_untaken(p)
        has_other_end = any(map(_END.fullmatch, self.beside[scope] - {name}))
        is_plain = len(series) > 1 or bool(_PLAIN.fullmatch(name or "layers"))
        is_last = is_plain and count == max(series) and not (is_named or has_other_end)
        signs = ["by its name"] * is_named + ["the last of its kind"] * is_last + [_UNTAKEN] * is_untaken
        is_open = not (is_named and is_untaken)
        return Answer(None, f"output head: {', '.join(signs)}", is_open) if signs else None

    def is_untaken(self, p: Parameter) -> bool:
        """Whether no other parameter takes what a matrix gives."""
        takes, (gives,) = self.widths[p.path]
        return not (self.taken - Counter(takes))[gives]

    def may_be_a_table(self, p: Parameter) -> bool:
        """Whether a matrix without a name that says what it is takes what no other parameter gives."""
        is_unnamed = p.role is roles.UNKNOWN and is_bare(p) and len(p.leaf_shape) == 2
        return is_unnamed and not any(self.given[width] for width in self.widths[p.path][0])


def _numbered(p: Parameter) -> tuple[Path, str, tuple[int, ...]]:
    """The module around a layer, its name and its numbers: `fc` and 2 of fc2, `layers` and 3 of layers/3."""
    path = "/".join(module(p.path))
    named = path.rstrip("0123456789/")
    *scope, name = named.split("/")
    return tuple(scope), stem(name), tuple(map(int, re.findall(r"\d+", path[len(named) :])))


def _is_dense(p: Parameter) -> bool:
    """Whether the leaf may be one dense layer's kernel."""
    return p.role in (roles.DENSE, roles.EXPERTS, roles.UNKNOWN) and len(p.leaf_shape) == 2


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
