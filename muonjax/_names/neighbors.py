"""Read what the parameters of a tree say about each other: biases, attentions, orders of axes."""

import re
from collections import defaultdict
from collections.abc import Sequence

from muonjax._names import roles
from muonjax._names.path_words import Words, attention_scope
from muonjax._names.roles import Parameter

Shape = tuple[int, ...]

# Layers whose output is wider than their input: SwiGLU's gate and up, GPT-2's c_fc, T5's wi.
_WIDENING = r"(^|_)(up|gate|fc1|w1|c_fc|wi|intermediate|linear1)(_|$)"


class Neighbors:
    """What the parameters of a tree say about each other: biases, attentions,
    how weights are stored.

    Attributes:
      outputs_first: Whether leaves called `weight` are (out, in, *window), as PyTorch and Equinox
        store them, or (*window, in, out); None if no leaf shows it.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        # The shape of each bias, by the module that its weight is in too: a weight with an axis of
        # this length has its outputs there.
        self._biases: dict[Words, Shape] = {}
        # The shapes of an attention's projections, by the scope that they share, {("attn",):
        # {"query": (64, 4, 16), "out": (4, 16, 64)}}: together they show the order of their axes.
        self._attentions: dict[Words, dict[str, Shape]] = defaultdict(dict)
        for p in parameters:
            if p.role.name == "bias":
                self._biases[p.module] = p.shape
            if p.role.projection:
                shapes = self._attentions[attention_scope(p.path)]
                shapes[p.role.projection] = p.shape
        # In which order the library stores a `weight`. All of them vote, by their biases, which are
        # known now, or their names: 1 for (out, in), -1 for (in, out), 0 for what shows no order.
        # Without a majority it is not known.
        votes = sum(map(self._vote, parameters))
        self.outputs_first = votes > 0 if votes else None

    def bias(self, p: Parameter) -> Shape | None:
        """The shape of the bias of a weight, on one layer's axes; None if it has none."""
        shape = self._biases.get(p.module)
        if shape is None:
            return None
        # Equinox keeps the bias of a convolution as (16, 1, 1), to add it to [channels, *window].
        if len(shape) > 2 or p.is_called_weight:
            return tuple(size for size in shape if size > 1) or (1,)
        return shape

    def attention(self, p: Parameter) -> dict[str, Shape]:
        """The shapes of all projections of the attention that p belongs to,
        {"query": ..., "out": ...}."""
        return self._attentions[attention_scope(p.path)]

    def contradict_name(self, p: Parameter) -> bool:
        """Whether a leaf of several axes can't be the vector or the table that its name says."""
        bias = self.bias(p)
        if bias and p.role in (roles.NORM, roles.TABLE):
            # Norms and tables have no bias of fewer axes: this is a dense layer with a misleading
            # name.
            return len(bias) < p.rank
        # The scale of a norm is a vector; a kernel of two axes is the dense layer of an adaptive
        # norm.
        return p.role is roles.NORM and p.leaf_name == "kernel"

    def _vote(self, p: Parameter) -> int:
        """1 if a weight is stored (out, in), -1 if (in, out),
        0 if its bias and its name don't show it.

        A `kernel` is always (in, out), and needs no vote: 0. A `weight` is (out, in) in PyTorch and
        Equinox, and (in, out) in axlearn. A weight [80, 32] with a bias [80] votes 1, and so does
        one called `up`, which widens 32 to 80.
        """
        is_matrix = p.rank > 1 and p.role not in roles.ADAM
        if not is_matrix or not p.is_called_weight:
            return 0
        first, *_, last = p.shape
        bias = self.bias(p)
        # A bias is as long as the outputs, which come first or last; if both ends are,
        # it votes for neither.
        if bias:
            return (bias == (first,)) - (bias == (last,))
        # A name says which side is wider. The last axis of a convolution (out, in, *window) belongs
        # to its window.
        if p.rank > 2 or not re.search(_WIDENING, p.layer):
            return 0
        return (first > last) - (first < last)
