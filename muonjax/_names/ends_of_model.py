"""Find the two ends of a model, which belong to Adam: output heads, and embeddings of tokens.

The name of `lm_head` is enough (`roles`). Another layer may be an output head for one of three
reasons:

  1. no other parameter takes its output, wherever it is;
  2. its name is that of an end, such as `out` or `q_net`;
  3. it is the last of its kind, as Dense_4 of Dense_0 to Dense_4, at the root or in a module with
     the name of an end, such as `decoder`.

Blocks that repeat, as layers_0 and layers_1 do, continue each other. Inside of them a name is no
reason, and a kernel whose output is split, such as a fused gate, is no end.

Where 1 and 2 agree, the layer is a head. All else that may be one goes to Adam with a warning, as
do matrices that may be embeddings.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from muonjax._matrices.matrix_view import DimensionNumbers
from muonjax._names import roles
from muonjax._names.convolutions import grouped
from muonjax._names.path_words import Words, stem, words
from muonjax._names.roles import Answer, Parameter

# Names of the end of a model, or of a part of it that is a model by itself.
_END = re.compile(
    r"(?!pre_|norm_|.*att|.*_in(_|$))("
    # Classifiers and language models: out, proj_out, logits_dense, final_layer, predictions.
    r"(\w+_)?(\w*outs?|outputs?|logits?|heads?|final|last|pred\w*|classif\w*)(_\w+)?"
    r"|top|readout|softmax|to_\w+|cls|(class|bbox|box)_embed|(\w+_)?unembed(ding)?"
    # Autoencoders, GANs, diffusion.
    r"|(\w+_)?dec(oder?s?)?(_\w*mlp)?|gen(erator)?|disc(riminator)?|eps|noise|score"
    # Reinforcement learning: Q networks, actors and critics, distributions of actions.
    r"|(\w+_)?(critics?|actors?|policy|pol|pi|value|reward)(_\w+)?|action\w*|adv(antage)?"
    r"|v|vs|vf|q|qs|qf|q_?(net|nets|network|values?|function|fn)"
    r"|mu|mean|(log_?)?std|stddev|sigma"
    # Elman's networks by letters: from hidden units to outputs.
    r"|w_?h[yo])"
)
# Parts of a model that others continue.
_HIDDEN = re.compile(
    r"(\w+_)?(block|enc(oder)?s?|att(n|en)\w*|embedder|embeddings?|tower|trunk|torso"
    r"|backbone)(_\w+)?"
)
# Names that say nothing but the kind of a layer; one of them alone is the last of its kind.
_PLAIN = re.compile(r"dense|linear|lin|fc|layers?|top|predictions|proj|projection")


def ends(
    parameters: Sequence[Parameter], answers: Mapping[str, Answer]
) -> dict[str, Answer]:
    """Adam for matrices that are no hidden layers, by their paths; open where names can't tell.

    These are depthwise and grouped convolutions, output heads, and embeddings without a name in
    `roles`. `answers` says of each parameter which matrix it is, wherever it is in the model.
    """
    # How many parameters multiply each width, and the widths that come out: a kernel
    # [32, 80] takes 32 and gives 80.
    taken: Counter[int] = Counter()
    given: set[int] = set()
    for p in parameters:
        takes, gives = _widths(p, answers[p.path].numbers)
        taken.update(takes)
        given |= gives
    # Which layers repeat from block to block, and which are the last of their kind
    layers = _Layers(parameters)
    # Nothing comes before or after a single layer.
    is_single = sum(p.rank > 1 for p in parameters) == 1
    new_answers = {}
    for p in parameters:
        numbers = answers[p.path].numbers
        if numbers is None:
            continue
        # A matrix that may be several of these counts as the first, whose reason the warning gives.
        answer = grouped(p, numbers, given)
        if not is_single:
            takes, gives = _widths(p, numbers)
            # Whether no other parameter takes what this one gives. A width that this one takes too,
            # as a square kernel does, was counted once for itself.
            is_untaken = all(taken[width] == (width in takes) for width in gives)
            answer = answer or _output_head(p, layers, is_untaken)
            # A layer's matrix is usually a `kernel` or a `w` in the layer's module. A bare array
            # [m, n], which is its own module, may be a table of m rows if its name is unknown and
            # no parameter gives m.
            is_unnamed = p.role is roles.UNKNOWN and p.module == words(p.path)
            if answer is None and is_unnamed and given.isdisjoint(takes):
                why = (
                    "no other parameter gives its input, so that it may be an embedding"
                )
                answer = Answer(None, why, is_open=True)
        if answer is not None:
            new_answers[p.path] = answer
    return new_answers


def _widths(
    p: Parameter, numbers: DimensionNumbers | None
) -> tuple[set[int], set[int]]:
    """The widths that a parameter takes and those that it gives:
    {32} and {80} of a kernel [32, 80].

    An attention's output [4, 16, 64] takes {4, 16} and gives {64}. `ends` counts them, because a
    layer whose width no other parameter takes may be an output head.
    """
    # A scale or a table has the width of the layers before and after it.
    if p.role.name in ("scale", "embedding") and p.shape:
        width = {p.shape[-1]}
        return width, width
    # An output head [in, out] gives the model's output, which no layer takes. Adam takes it,
    # so that it has no numbers.
    if p.role is roles.HEAD:
        return {*p.shape[:1]}, set()
    if numbers is None:
        return set(), set()
    rows, columns = p.sizes_of(numbers)
    return {*rows}, {*columns}


def _output_head(p: Parameter, layers: "_Layers", is_untaken: bool) -> Answer | None:
    """Adam for what is an output head, open for what may be one, None for a hidden layer.

    The signs of a head are the name of an end ("out", "q_net"), the last number (Dense_4 of Dense_0
    to Dense_4), and an output whose width no other parameter takes. Name and width together are
    sure for a dense layer at the root or in an end; all else with a sign is open.

    Args:
      p: A matrix.
      layers: The layers of its model.
      is_untaken: Whether no other parameter takes its output.
    """
    modules = [stem(name) for name in p.scope[layers.num_common :]]
    # Layers of an attention are hidden, even one whose output is only added to the logits or
    # multiplied with them.
    in_attention = re.search("att(n|en)", "/".join(modules))
    if in_attention or not _is_layer(p):
        return None
    name = stem(p.layer)
    has_end_name = _END.fullmatch(name)
    # At the root, or in a module with the name of an end, such as `decoder`.
    is_in_end = not modules or _END.fullmatch(modules[-1])
    # A model has one end, so that no stack of layers is one,
    # and no layer of a part that others continue: an encoder.
    is_hidden = p.is_stack or any(map(_HIDDEN.fullmatch, modules))
    # layers_1/out repeats layers_0/out.
    is_repeated = layers.is_repeated(p)
    # The first sign
    by_name = has_end_name and not is_hidden and not is_repeated

    # The second sign, by the numbers of all layers with this name in this module: (0,) to (4,) of
    # Dense_0 to Dense_4. Only dense layers, of two axes, have a last one: after the last
    # convolution these may follow.
    numbers = layers.numbers[p.scope][name]
    is_last = p.rank == 2 and _numbers_of(p) == max(numbers)
    is_last_of_several = is_last and len(numbers) > 1
    # Where another layer of the module is called `out`, Dense_4 is not the last one,
    # and `out` itself has the first sign.
    module_has_end = any(map(_END.fullmatch, layers.numbers[p.scope]))
    may_be_last = is_in_end and not is_hidden and not module_has_end
    # Dense_4, or a single layer if its name is a plain one, such as Dense.
    ends_by_number = is_last_of_several or (is_last and _PLAIN.fullmatch(name))

    # The third sign is a width that nothing takes. In blocks that repeat it may be a fused gate's,
    # which is split before the next layer takes it: so there it is a sign only with the name of an
    # end or with the last number, as that of fc2 next to fc1.
    may_be_untaken = has_end_name or is_last_of_several or not is_repeated

    signs = {
        "by its name": by_name,
        "the last of its kind": ends_by_number and may_be_last,
        "no other parameter takes its output": is_untaken and may_be_untaken,
    }
    # The warning prints the signs that the layer has.
    reasons = ", ".join(sign for sign, holds in signs.items() if holds)
    if not reasons:
        return None
    is_sure = by_name and is_untaken and is_in_end and p.rank == 2
    return Answer(None, f"output head: {reasons}", is_open=not is_sure)


def _is_layer(p: Parameter) -> bool:
    """Whether the leaf may be the kernel of a dense layer or of a convolution."""
    return p.role in (roles.DENSE, roles.CONVOLUTION, roles.UNKNOWN)


class _Layers:
    """Which layers of a model repeat, or are the last of their kind.

    Attributes:
      numbers: For each module, the names of its layers without numbers, and the numbers of those
        that are matrices: {("block_0",): {"fc": [(1,), (2,)], "norm": []}} of block_0/fc1,
        block_0/fc2 and block_0/norm.
      num_common: How many modules are around all parameters: 1 if all paths begin with "params".
    """

    def __init__(self, parameters: Sequence[Parameter]):
        # To find the last layer of its kind in a module, which may be an output head, the numbers
        # of its layers: {("block_0",): {"fc": [(1,), (2,)], "norm": []}} of block_0/fc1, fc2, norm.
        # A layer of nested lists, layers/3/0, has two, (3, 0).
        self.numbers: dict[Words, dict[str, list[tuple[int, ...]]]] = defaultdict(dict)
        # To find layers that repeat from block to block, which are no heads by their names, the
        # modules that have a layer, by its path without numbers: fc1 is in block_0 and in block_1,
        # {"block_/fc": {("block_0",), ("block_1",)}}.
        self._scopes: dict[str, set[Words]] = defaultdict(set)
        for p in parameters:
            self._scopes[self._kind(p)].add(p.scope)
            # An entry for each layer, also for a norm or an output head: its name may show that it
            # is the end of its module. Only kernels of dense layers and convolutions add a number.
            numbers = self.numbers[p.scope].setdefault(stem(p.layer), [])
            if p.rank > 1 and _is_layer(p):
                numbers.append(_numbers_of(p))
        # The modules are paths such as ("params", "block_0"). First names that all have in common
        # are no modules of the model: params/Dense_0 is at its root. They are counted here.
        self.num_common = 0
        for names in zip(*self.numbers, strict=False):
            if len({*names}) > 1:
                break
            self.num_common += 1

    def is_repeated(self, p: Parameter) -> bool:
        """Whether the layer is in one of several blocks that differ by number."""
        return len(self._scopes[self._kind(p)]) > 1

    def _kind(self, p: Parameter) -> str:
        """The path of a layer without numbers, which block_0/fc1 and block_1/fc2 have in common."""
        return re.sub(r"\d+", "", "/".join((*p.scope, p.layer)))


def _numbers_of(p: Parameter) -> tuple[int, ...]:
    """The numbers in the name of a layer: (4,) of Dense_4, (3, 0) of layers/3/0."""
    name = "/".join(p.module[len(p.scope) :])
    return tuple(map(int, re.findall(r"\d+", name)))
