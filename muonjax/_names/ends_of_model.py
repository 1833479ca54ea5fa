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
    # How many parameters take each width, and which widths any of them gives: a kernel [32, 80]
    # takes 32 and gives 80.
    taken: Counter[int] = Counter()
    given: set[int] = set()
    for p in parameters:
        takes, gives = _widths(p, answers[p.path].numbers)
        taken.update(takes)
        given |= gives
    # Which layers repeat from block to block, and which are the last of their kind
    layers = _Layers(parameters)
    # A single layer has no layer before or after it, and is no end of a model.
    is_single = sum(p.rank > 1 for p in parameters) == 1
    new_answers = {}
    for p in parameters:
        numbers = answers[p.path].numbers
        if numbers is None:
            continue
        # A matrix that may be several of these counts as the first that fits, in this order: a
        # grouped convolution, an output head, an embedding. The warning gives the reason for it.
        answer = grouped(p, numbers, given)
        if not is_single:
            takes, gives = _widths(p, numbers)
            # What this one takes itself, as a square kernel takes the width that it gives, does not
            # count: a layer that follows is another one.
            taken_by_others = taken - Counter(takes)
            is_untaken = gives.isdisjoint(taken_by_others)
            answer = answer or _output_head(p, layers, is_untaken)
            # A layer's matrix is usually a `kernel` or a `w` in the layer's module. A bare array
            # [m, n], whose path is its module, may be a table of m rows if its name is unknown and
            # no parameter gives m.
            is_unnamed = p.role is roles.UNKNOWN and p.module == words(p.path)
            if answer is None and is_unnamed and given.isdisjoint(takes):
                answer = Answer(
                    None,
                    "no other parameter gives its input, so that it may be an embedding",
                    is_open=True,
                )
        if answer is not None:
            new_answers[p.path] = answer
    return new_answers


def _widths(
    p: Parameter, numbers: DimensionNumbers | None
) -> tuple[set[int], set[int]]:
    """The widths that a parameter takes and those that it gives:
    {32} and {80} of a kernel [32, 80].

    An attention's output [4, 16, 64] takes {4, 16} and gives {64}. `ends` counts them, because a
    layer whose output no other parameter takes may be an output head. `numbers` is its matrix, or
    None if Adam takes it.
    """
    # A scale or a table has the width of the layers before and after it; a scalar has no width.
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
    to Dense_4), and an output whose width no other parameter takes. A dense layer at the root, or
    in a module such as `decoder`, is surely a head by its name and its width together. All else
    with a sign is open.

    Args:
      p: A matrix.
      layers: The layers of its model.
      is_untaken: Whether no other parameter takes its output.
    """
    modules = [stem(name) for name in p.scope[layers.num_common :]]
    # Layers of an attention are hidden, even one whose output no parameter takes, because it is
    # added to the logits or multiplied with them.
    in_attention = re.search("att(n|en)", "/".join(modules))
    if in_attention or not _is_layer(p):
        return None
    name = stem(p.layer)
    has_end_name = _END.fullmatch(name)
    # At the root, or in a module with the name of an end, such as `decoder`.
    is_in_end = not modules or _END.fullmatch(modules[-1])
    # A model has one end. So no stack of layers is one, and no layer of a part that others
    # continue, such as an encoder; nor is layers_1/out, which repeats layers_0/out.
    is_hidden = p.is_stack or any(map(_HIDDEN.fullmatch, modules))
    is_repeated = layers.is_repeated(p)
    by_name = has_end_name and not is_hidden and not is_repeated

    # Dense_4 of several counts as the last of its kind, and so does a single layer if its name says
    # no more than the kind, such as Dense. But where a layer of the module has the name of an end,
    # such as `out`, that is the last, and shows by its name.
    is_last_of_several = layers.is_last(p, 2)
    is_last = is_last_of_several or (_PLAIN.fullmatch(name) and layers.is_last(p, 1))
    module_has_end = any(map(_END.fullmatch, layers.numbers[p.scope]))
    by_number = is_last and is_in_end and not is_hidden and not module_has_end

    # In blocks that repeat, a width that nothing takes may be a fused gate's, which is split before
    # the next layer takes it. So there it is a sign only with the name of an end or with the last
    # number, as that of fc2 next to fc1.
    may_be_head = has_end_name or is_last_of_several or not is_repeated
    by_width = is_untaken and may_be_head

    signs = {
        "by its name": by_name,
        "the last of its kind": by_number,
        "no other parameter takes its output": by_width,
    }
    # The warning prints the signs that the layer has.
    reasons = ", ".join(sign for sign, holds in signs.items() if holds)
    if not reasons:
        return None
    is_sure = by_name and by_width and is_in_end and p.rank == 2
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
        # For each module the names of its layers without numbers, and their numbers:
        # {("block_0",): {"fc": [(1,), (2,)], "norm": []}} of block_0/fc1, fc2 and norm. `is_last`
        # finds the last one. A layer of nested lists, layers/3/0, has two numbers, (3, 0).
        self.numbers: dict[Words, dict[str, list[tuple[int, ...]]]] = defaultdict(dict)
        # The modules that have a layer, by its path without numbers: fc1 is in block_0 and in
        # block_1, {"block_/fc": {("block_0",), ("block_1",)}}. `is_repeated` finds such layers.
        self._scopes: dict[str, set[Words]] = defaultdict(set)
        for p in parameters:
            self._scopes[self._kind(p)].add(p.scope)
            # Each layer has an entry, also a norm, even one without numbers: `_output_head` reads
            # the names, and in a module with a layer `out` no other layer counts as its last. Only
            # what may be a kernel of a dense layer or a convolution adds a number (`_is_layer`).
            numbers = self.numbers[p.scope].setdefault(stem(p.layer), [])
            if p.rank > 1 and _is_layer(p):
                numbers.append(_numbers_of(p))
        # The modules are paths such as ("params", "block_0"). The first names that all have in
        # common are around the model: params/Dense_0 is at its root. They are counted here, up to
        # the end of the shortest path.
        self.num_common = 0
        for names in zip(*self.numbers, strict=False):
            if len({*names}) > 1:
                break
            self.num_common += 1

    def is_last(self, p: Parameter, least: int) -> bool:
        """Whether a layer has the last number of the `least` or more layers of its name in its
        module: Dense_4 of Dense_0 to Dense_4.

        Only dense layers, of two axes, have a last one: after the last convolution these may
        follow.
        """
        numbers = self.numbers[p.scope][stem(p.layer)]
        return p.rank == 2 and len(numbers) >= least and _numbers_of(p) == max(numbers)

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
