"""Find the two ends of a model, which belong to Adam: output heads, and embeddings of patches and tokens.

The name of `lm_head` is enough (`roles`). Another layer may be an output head for one of three reasons:

  1. no other parameter takes its output, wherever it is;
  2. its name is that of an end, such as `out` or `q_net`;
  3. it is the last of its kind, as Dense_4 of Dense_0 to Dense_4, at the root or in a module with the name of an end,
     such as `decoder`.

Blocks that repeat, as layers_0 and layers_1 do, continue each other. Inside of them a name is no reason, and a kernel
whose output is split, such as a fused gate, is no end.

Where 1 and 2 agree, the layer is a head. All else that may be one goes to Adam with a warning, as do matrices that may
be embeddings, and convolutions that may have groups because no parameter gives as many channels as they take.
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
    r"(?!pre_|norm_|.*att|.*_in(_|$))((\w+_)?(\w*outs?|outputs?|logits?|heads?|final|last|pred\w*|classif\w*)(_\w+)?|top|readout|softmax|to_\w+"
    r"|(\w+_)?(dec(oder?s?)?(_\w*mlp)?|gen(erator)?|disc(riminator)?|(\w+_)?(critics?|actors?|policy|pol|pi|value|reward)(_\w+)?)"
    r"|v|vs|vf|q|qs|qf|q_?(net|nets|network|values?|function|fn)|adv(antage)?|w_?h[yo]|mu|mean|(log_?)?std|stddev|sigma|action\w*|eps|noise|score"
    r"|cls|(class|bbox|box)_embed|(\w+_)?unembed(ding)?)"
)
# Parts of a model that others continue.
_HIDDEN = re.compile(
    r"(\w+_)?(block|enc(oder)?s?|att(n|en)\w*|embedder|embeddings?|tower|trunk|torso|backbone)(_\w+)?"
)
_PLAIN = re.compile(r"dense|linear|lin|fc|layers?|top|predictions|proj|projection")

_UNTAKEN = "no other parameter takes its output"
_IMAGE_CHANNELS = 3


def ends(parameters: Sequence[Parameter], answers: Mapping[Path, Answer]) -> dict[Path, Answer]:
    """New answers for what is, or may be, a depthwise or grouped convolution, an output head or an embedding by no
    name in `roles`."""
    numbers = {path: answer.numbers for path, answer in answers.items()}
    depthwise = [p.path for p in parameters if _channels(p, numbers[p.path]) == 1]
    # A single one may be a model's first convolution.
    found = dict.fromkeys(depthwise, Answer(None, "one input channel: depthwise", len(depthwise) == 1))
    if sum(len(p.shape) > 1 for p in parameters) == 1:
        return found  # a layer by itself may be any
    model = _Model(parameters, {**numbers, **dict.fromkeys(depthwise)})
    for p in model.matrices:
        if answer := model.output_head(p) or model.table(p) or model.grouped_convolution(p):
            found[p.path] = answer
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


def _channels(p: Parameter, numbers: DimensionNumbers | None) -> int | None:
    """How many channels the window of a convolution sees; None for other leaves."""
    if numbers is None or p.role not in (roles.CONVOLUTION, roles.UNKNOWN):
        return None
    rows = axes_of(numbers.reduction_axis)
    if len(rows) == 1:
        return None
    return p.shape[rows[0] if axes_of(numbers.output_axis) == (0,) else rows[-1]]


class _Model:
    """What the parameters of a tree take and give, the names next to each other, and where the model may end."""

    def __init__(self, parameters: Sequence[Parameter], numbers: Mapping[Path, DimensionNumbers | None]):
        self.numbers = numbers
        self.matrices = [p for p in parameters if numbers[p.path]]
        self.widths = {p.path: _widths(p, numbers[p.path]) for p in parameters}
        self.taken = Counter(width for takes, _ in self.widths.values() for width in takes)
        self.given = Counter(width for _, gives in self.widths.values() for width in gives)
        self.channels = Counter(_channels(p, numbers[p.path]) for p in parameters)
        scopes = [module(p.path)[:-1] for p in parameters]
        shared = itertools.takewhile(lambda names: len({*names}) == 1, zip(*scopes, strict=False))
        self.root = len([*shared])
        self.beside: dict[Path, set[str]] = defaultdict(set)
        self.series: dict[tuple[Path, str], list[tuple[int, ...]]] = defaultdict(list)
        self.places: dict[tuple[Path, str], set[Path]] = defaultdict(set)
        for p in parameters:
            scope, name, count = _numbered(p)
            self.beside[scope].add(name)
            self.places[_without_numbers(scope), name].add(scope)
            if _is_layer(p) and (numbers[p.path] or 1 in p.shape):
                self.series[scope, name].append(count)

    def output_head(self, p: Parameter) -> Answer | None:
        """The answer for what is or may be an output head, by the reasons in the module's docstring."""
        scope, name, count = _numbered(p)
        inside = [stem(x) for x in scope[self.root :]]
        if not _is_layer(p) or re.search("att(n|en)", "/".join(inside)):
            return None
        is_repeated = len(self.places[_without_numbers(scope), name]) > 1
        is_dense = len(p.shape) == 2
        is_stacked = len(p.shape) < len(p.leaf_shape)
        in_end = not inside or bool(_END.fullmatch(inside[-1]))
        has_name = bool(_END.fullmatch(name))
        series = self.series[scope, name]
        is_plain = len(series) > 1 or bool(_PLAIN.fullmatch(name or "layers"))
        is_last = is_plain and count == max(series)
        is_hidden = is_stacked or any(map(_HIDDEN.fullmatch, inside))
        has_other_end = any(map(_END.fullmatch, self.beside[scope] - {name}))

        ends_a_series = is_dense and len(series) > 1 and is_last
        by_size = self.is_untaken(p) and (not is_repeated or ends_a_series or has_name)
        by_name = has_name and not is_hidden and (in_end or not is_repeated)
        by_place = is_last and in_end and not is_hidden and not (has_name or has_other_end)
        by_place &= is_dense
        signs = ["by its name"] * by_name + ["the last of its kind"] * by_place + [_UNTAKEN] * by_size
        is_open = not (by_name and by_size and in_end and is_dense)
        return Answer(None, f"output head: {', '.join(signs)}", is_open) if signs else None

    def is_untaken(self, p: Parameter) -> bool:
        """Whether no other parameter takes what a matrix gives."""
        takes, (gives,) = self.widths[p.path]
        return not (self.taken - Counter(takes))[gives]

    def table(self, p: Parameter) -> Answer | None:
        """The answer for a matrix without a name that says what it is, which takes what no other parameter gives."""
        is_unnamed = p.role is roles.UNKNOWN and is_bare(p) and len(p.leaf_shape) == 2
        if not is_unnamed or any(self.given[width] for width in self.widths[p.path][0]):
            return None
        return Answer(
            None, "no other parameter gives its input, so that it may be an embedding", is_open=True
        )

    def grouped_convolution(self, p: Parameter) -> Answer | None:
        """The answer for a convolution of as many channels as nothing gives, where these may be one of several groups.

        Three channels are an image's, if one convolution alone takes them.
        """
        channels = _channels(p, self.numbers[p.path])
        if channels is None or self.given[channels]:
            return None
        if channels == _IMAGE_CHANNELS and self.channels[channels] == 1:
            return None
        (outputs,) = self.widths[p.path][1]
        groups = [width // channels for width in self.given if width % channels == 0]
        if all(outputs % count for count in groups):
            return None
        return Answer(
            None, "no other parameter gives as many channels, so that it may have groups", is_open=True
        )


def _without_numbers(scope: Path) -> Path:
    """The same name for all blocks of a series."""
    return tuple(re.sub(r"\d+", "", name) for name in scope)


def _numbered(p: Parameter) -> tuple[Path, str, tuple[int, ...]]:
    """The module around a layer, its name and its numbers: `fc` and 2 of fc2, `layers` and 3 of layers/3."""
    path = "/".join(module(p.path))
    named = path.rstrip("0123456789/")
    *scope, name = named.split("/")
    return tuple(scope), stem(name), tuple(map(int, re.findall(r"\d+", path[len(named) :])))


def _is_layer(p: Parameter) -> bool:
    """Whether the leaf may be the kernel of a dense layer or of a convolution."""
    return p.role in (roles.DENSE, roles.CONVOLUTION, roles.UNKNOWN)


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
