"""What a clip of an attention may scale: the entries of the parameters that make its queries and keys."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from muonjax._clip.scale import PlacedScale, Scale
from muonjax._inspect.layouts import HOLE, Layout, other_axes
from muonjax._inspect.records import Records
from muonjax._inspect.values import Operand, Projection


class Refused(Exception):
    """Why this attention can't be clipped."""


# What a clip scales: entries of parameters, queries first.
Spans: TypeAlias = tuple[PlacedScale, ...]
# All features of queries or keys, by number.
_ALL = range(1 << 30)


def proposals_of(pairs: Sequence[QueriesAndKeys]) -> list[Spans]:
    """What a clip may scale, the best first, where logits are a sum of products of these queries and keys.

    The first proposal scales both sides of each product where each head has keys of its own, and the last the queries
    alone.

    Raises:
      Refused: The queries can't be scaled.
    """
    # Each span once: in Transformer-XL the same queries meet keys and positions.
    both: dict[PlacedScale, None] = {}
    queries_alone: dict[PlacedScale, None] = {}
    for pair in pairs:
        both |= dict.fromkeys(pair.both_sides())
        queries_alone |= dict.fromkeys(pair.queries([_ALL]))
    # They are equal where no key can be scaled, such as keys that do not train.
    different = dict.fromkeys([tuple(both), tuple(queries_alone)])
    proposals = [spans for spans in different if len(set(map(_heads_of, spans))) == 1]
    if not proposals:
        raise Refused("its queries are cut into heads or layers in several ways")
    return proposals


def _heads_of(span: PlacedScale) -> tuple[int, tuple[int, ...]]:
    """The number of heads, and the sizes of the axes that count layers."""
    return span.entries, span.layers


class QueriesAndKeys:
    """The two operands of one product of queries and keys."""

    def __init__(self, records: Records, product: int, normalized: frozenset[int]):
        """`normalized`: the axes of the product that count keys."""
        self.shapes, self.normalized = records.shapes, normalized
        left, right = records.attention.operands[product]
        if left.is_query(normalized):
            self.query, self.key = left, right
        else:
            self.query, self.key = right, left

    def both_sides(self) -> list[PlacedScale]:
        """Queries and keys, with the factor √γ each, "query" and "key".

        Keys that several heads share, or whose heads can't be told apart, stay as they are, and the queries that they
        meet get the factor γ, "whole": all of them in multi-query and grouped-query attention, and the rotary features
        in latent attention (MLA).

        Raises:
          Refused: As `queries`.
        """
        # For its numbers of heads and layers, which all spans have in common.
        first, *_ = self.queries([_ALL])
        of_keys: list[PlacedScale] = []
        shared: list[range] = []
        for projection in self.key.value.projections:
            spans: list[PlacedScale] = []
            with contextlib.suppress(Refused):
                spans = self._spans(self.key, projection, "key")
            if set(map(_heads_of, spans)) == {_heads_of(first)}:
                of_keys += spans
            else:
                shared.append(self._features(self.key, projection))
        return [*self.queries(shared if of_keys else [_ALL]), *of_keys]

    def queries(self, shared: Sequence[range]) -> list[PlacedScale]:
        """The queries; those of their features that are `shared` meet keys which several heads share.

        Raises:
          Refused: Which parameters make a head can't be told.
        """
        projections = self.query.value.projections
        if not projections:
            raise Refused("its queries can't be followed to parameters that train")
        spans: list[PlacedScale] = []
        for projection in projections:
            first_feature = self._features(self.query, projection).start
            for span in self._spans(self.query, projection, "query"):
                spans += _divided(span, first_feature, shared)
        return spans

    def _heads(self, operand: Operand, layout: Layout) -> list[int]:
        """The axes of an operand that count heads.

        In queries [batch, query, head, feature] it is axis 2. Along it they come from other entries of the parameter,
        and along `batch` and `query` from the same. The axis of keys, which softmax normalizes, counts no heads.
        """
        heads = []
        for axis, source in enumerate(operand.sources):
            if source is not None and axis not in self.normalized:
                heads.append(source)
        return [source for source in heads if layout.runs_along([source])]

    def _features(self, operand: Operand, projection: Projection) -> range:
        """Which features of an operand a projection fills that may have been concatenated with others."""
        (axis, *more) = operand.summed
        layout = projection.layout
        if more or not layout.is_placed([axis]):
            return _ALL
        there = np.argwhere(~layout.holes)[:, axis]
        return range(int(there.min()), int(there.max()) + 1)

    def _spans(
        self, operand: Operand, projection: Projection, factor: str
    ) -> list[PlacedScale]:
        """The spans in the kernel and in the biases of one projection in the queries or the keys.

        Raises:
          Refused: Which entries make a head can't be told.
        """
        # `varying` are the axes along which entries come from different columns. Without any, each entry is made of all
        # columns: so it is after a norm over all heads, after a matrix that does not train, and in an adapter.
        if not projection.layout.varying:
            raise Refused(
                "the heads of its queries can't be told apart: all columns of a parameter make each of them"
            )
        # stack([x @ a, x @ b]) along the axis of heads: each projection fills a part of this batch axis, as `is_placed`
        # says. And concatenate([x @ a, x @ b]) without an axis of heads may be two halves of one head, or two heads
        # that share a key: they look the same, and take different factors.
        is_alone = len(operand.value.projections) == 1
        has_heads = is_alone or self._heads(operand, projection.layout)
        if projection.layout.is_placed(operand.batch) or not has_heads:
            raise Refused("heads of its queries are put together from several products")
        spans = [self._span(projection.view.leaf, projection.layout, operand, factor)]
        for bias in projection.biases:
            spans.append(self._span(bias.leaf, bias.layout, operand, factor))
        return spans

    def _span(
        self, leaf: int, layout: Layout, operand: Operand, factor: str
    ) -> PlacedScale:
        """The entries of a parameter that a clip scales by one number for each head.

        A scan takes w [layers, 64, 8 * 16] layer by layer, and x @ w is reshaped to queries [batch, query, 8, 16].
        Their layout has one run, 0 to 127 along axis 2 of w. The span has the stack (0,) and a `Scale` of 8 entries
        with 16 positions each along the axis -1 of a layer.

        Args:
          leaf: The number of the parameter.
          layout: Which of its entries the entries of the operand come from.
          operand: The queries or the keys.
          factor: As in `Scale`.
        """
        shape = self.shapes[leaf]
        stack = tuple(dict.fromkeys(run.axis for run in layout.loops))
        heads = self._heads(operand, layout)
        head_axes = [run.axis for run in layout.runs_along(heads)]
        # A kernel [64, 16, 8] with the heads last is flattened along (2, 1), so that the features of one head follow
        # each other.
        runs = sorted(layout.runs[1:], key=lambda x: (x.axis not in head_axes, x.axis))
        held = [run.axis for run in runs]
        if not set(held).isdisjoint(stack):
            raise Refused("a loop goes over a part of an axis of its parameter")
        # The positions of each entry of the operand along the flattened axes: [terms, batch, query, 8, 16] here.
        positions = np.zeros([1] * (1 + len(layout.shape)), int)
        size = 1
        for run in reversed(runs):
            positions = positions + size * run.positions.astype(int)
            size *= shape[run.axis]
        heads = [1 + axis for axis in heads]
        count = math.prod(positions.shape[axis] for axis in heads)
        of_heads = np.moveaxis(positions, heads, range(len(heads))).reshape(count, -1)
        width = len(np.unique(of_heads[0, of_heads[0] < HOLE]))
        # Each head once: an axis of examples and heads has those of each example.
        places = _places(np.unique(of_heads.min(1)), width, size)
        # A `Scale` counts the axes of one layer from the last.
        axes_of_layer = other_axes(len(shape), stack)
        rank = len(axes_of_layer)
        axes = tuple(axes_of_layer.index(axis) - rank for axis in held)
        scale = Scale(path="", rank=rank, axes=axes, factor=factor, **places)
        return PlacedScale(leaf, scale, shape, stack, tuple(held))


def _divided(
    span: PlacedScale, first: int, shared: Sequence[range]
) -> Iterator[PlacedScale]:
    """A span, cut where features that meet shared keys begin and end; these take the "whole" factor.

    A span of features 0 to 8 with 4 and 5 `shared` gives 0 to 4, 4 to 6 as "whole", 6 to 8. `first` is the number of
    its first feature among those of the queries.
    """
    start = span.scale.span[0]

    def is_shared(feature: int) -> bool:
        return any(first + feature in features for features in shared)

    for whole, group in itertools.groupby(range(span.features), is_shared):
        factor = "whole" if whole else span.factor
        stop = start + len(list(group))
        scale = dataclasses.replace(span.scale, span=(start, stop), factor=factor)
        yield span._replace(scale=scale)
        start = stop


def _places(first: np.ndarray, width: int, size: int) -> dict[str, Any]:
    """Where the heads lie on flattened axes of a parameter, in the words of `Scale`.

    The keys of a fused kernel [64, 3 * 8 * 16] along axis 1 are entries=8, part=(128, 256). With the columns
    q q k v q q k v, 16 each, the queries are entries=4, part=(0, 32) in groups=2.

    Args:
      first: The first position of each head.
      width: The number of positions of a head.
      size: The number of all positions.

    Raises:
      Refused: The heads are no equal runs in equal groups.
    """
    # In a group one head follows the other. Whether other columns lie between those of a head is for the certificate.
    in_group = int(np.argmax([*(np.diff(first) != width), True])) + 1
    groups = len(first) // in_group
    group, rest = divmod(size, groups)
    start = int(first[0])
    stop = start + in_group * width
    expected = np.arange(groups)[:, None] * group + np.arange(in_group) * width
    is_regular = np.array_equal(first - start, expected.ravel())
    if rest or stop > group or not is_regular:
        raise Refused("its heads do not lie one after the other in the parameter")
    return {
        "entries": len(first),
        "part": (start, stop),
        "span": (0, width),
        "groups": groups,
    }
