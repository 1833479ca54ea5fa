"""What a clip of an attention may scale: the entries of the parameters that make its queries and
keys."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from muonjax._clip.scale import PlacedScale, Scale
from muonjax._inspect.layouts import HOLE, Layout, axes_of, other_axes
from muonjax._inspect.records import Records
from muonjax._inspect.values import Operand, Projection


class Refused(Exception):
    """Why this attention can't be clipped."""


# What a clip scales: entries of parameters, queries first.
Spans: TypeAlias = tuple[PlacedScale, ...]
# All features of queries or keys, by number.
_ALL = range(1 << 30)


def proposals_of(records: Records, products: Sequence[int]) -> list[Spans]:
    """What a clip may scale, the best first, where logits are the sum of these products of queries
    and keys.

    The first proposal scales queries and keys by √γ each. Keys that several heads share, or whose
    heads can't be told apart, stay as they are, and the queries that they meet are scaled by γ: all
    of them in multi-query and grouped-query attention, and the rotary features in latent attention
    (MLA). The second proposal scales all queries by γ; without keys to scale both are the same.

    Raises:
      Refused: The queries can't be scaled.
    """
    # Dictionaries as ordered sets, since a span is scaled once: in Transformer-XL the same queries
    # meet keys in one product and positions in another.
    both: dict[PlacedScale, None] = {}
    queries_alone: dict[PlacedScale, None] = {}
    attention = records.attention
    for product in products:
        # The axes of the product that count keys. `softmaxes` has a pair (logits, key_axes) for
        # each product of softmax's weights and values. The first one stands for all: logits whose
        # pairs have different axes were refused before (`_check_softmaxes`).
        _, key_axes = attention.softmaxes[product][0]
        # The queries are the operand that has no axis of keys.
        left, right = attention.operands[product]
        if not left.is_query(key_axes):
            left, right = right, left
        queries = _Side(left, key_axes, "query")
        keys = _Side(right, key_axes, "key")
        # For the second proposal: if all features count as shared by the keys, each query takes γ.
        scaled_queries = _scaled_queries(queries, shared=[_ALL])
        # For the first: keys with another number of heads or other axes of layers than the queries
        # (`_heads_of`) are shared. They stay as they are, and the queries take γ in the features
        # that meet them, √γ in the others.
        scaled_keys, shared = _scaled_keys(keys, _heads_of(scaled_queries[0]))
        both |= dict.fromkeys([*_scaled_queries(queries, shared), *scaled_keys])
        queries_alone |= dict.fromkeys(scaled_queries)
    # A clip has one γ for each head of each layer, so all queries need as many heads and the same
    # axes of layers. The keys that are scaled have those of their queries.
    if len(set(map(_heads_of, queries_alone))) > 1:
        raise Refused("its queries are cut into heads or layers in several ways")
    return [tuple(both), tuple(queries_alone)]


def _heads_of(span: PlacedScale) -> tuple[Any, ...]:
    """The number of heads, the sizes of the axes that count layers, and these axes, which are
    (8, (12,), (0,)) in a scan over twelve layers: all scales of a clip have the same.

    The axes too, since `Site.scan_axis` is one for all parameters of a site.
    """
    return span.entries, span.layers, span.stack


def _scaled_queries(queries: _Side, shared: Sequence[range]) -> list[PlacedScale]:
    """The scales of the queries: by γ, "whole", for features that meet `shared` ones of the keys,
    which are not scaled; by √γ for the others, whose keys take the other √γ.

    Features are numbered along the axis that the logits sum over. With all of them, `[_ALL]`, the
    queries alone are scaled, as in the second proposal.

    Raises:
      Refused: The queries come from no parameter that trains,
        or which entries make a head can't be told.
    """
    projections = queries.operand.value.projections
    if not projections:
        raise Refused("its queries can't be followed to parameters that train")
    scaled: list[PlacedScale] = []
    for projection in projections:
        first_feature = queries.features(projection).start
        # The spans of its kernel and of its biases, which have the same features.
        for span in queries.spans(projection):
            scaled += _divided(span, first_feature, shared)
    return scaled


def _scaled_keys(
    keys: _Side, heads: tuple[Any, ...]
) -> tuple[list[PlacedScale], list[range]]:
    """The scales of those keys that have the heads of the queries; and the ranges of features of
    all other keys, which are shared: the queries take all of γ in these.

    The keys of latent attention, 128 features of each head and then 64 that all heads share, give
    the scales of the former and [range(128, 192)]. Without any such keys it is [] and [_ALL].

    `heads`: how many the queries have, and the axes that count layers, as `_heads_of` gives them.
    """
    scaled: list[PlacedScale] = []
    shared: list[range] = []
    for projection in keys.operand.value.projections:
        try:
            spans = keys.spans(projection)
        except Refused:
            # Keys whose heads can't be told apart, such as those that all heads share, stay as
            # they are.
            spans = []
        # The spans of their kernel and its biases, all with the heads and layers of the queries.
        # Keys with fewer heads, as in grouped-query attention, are shared.
        if set(map(_heads_of, spans)) == {heads}:
            scaled += spans
        else:
            shared.append(keys.features(projection))
    return scaled, shared if scaled else [_ALL]


class _Side(NamedTuple):
    """The queries of a product, or the keys."""

    operand: Operand
    # The axes of the product that count keys, and others that softmax normalizes over
    key_axes: frozenset[int]
    factor: str  # "query" or "key", as in `Scale`

    def heads(self, layout: Layout) -> list[int]:
        """The axes of the operand along which a parameter with this layout has heads.

        The queries of "bqhd,bkhd->bhqk" have them along axis 2: each h comes from other entries of
        the parameter, and all b and q come from the same. An axis that softmax normalizes counts no
        heads, also if it goes over heads and keys together.
        """
        axes = []
        # `axis` is one of the product, bhqk, and `source` the one of the operand, bqhd:
        # 0, 2, 1 and None.
        for axis, source in enumerate(self.operand.sources):
            if source is None or axis in self.key_axes:
                continue
            # Whether the parameter differs along it
            if layout.runs_along([source]):
                axes.append(source)
        return axes

    def features(self, projection: Projection) -> range:
        """Which features of the operand a projection fills,
        if it was concatenated with others along these."""
        axes, layout = self.operand.summed, projection.layout
        if not layout.is_placed(axes):
            return _ALL
        there = np.argwhere(~layout.holes)[:, axes[0]]
        return range(int(there.min()), int(there.max()) + 1)

    def spans(self, projection: Projection) -> list[PlacedScale]:
        """What is scaled in the kernel and in the biases of a projection: the span of each.

        Raises:
          Refused: Which entries make a head can't be told. The messages are for queries, whose
            attention is refused. Keys are not: `_scaled_keys` leaves them as they are, such as the
            rotary keys that all heads share in latent attention, and their queries take all of γ.
        """
        layout = projection.layout
        # Along no axis of the queries do the columns of the parameter differ, since each entry is
        # made of all of them: after a norm over all heads, after a matrix that does not train, and
        # in an adapter.
        if not layout.varying:
            raise Refused(
                "the heads of its queries can't be told apart: all columns of a parameter make "
                "each of them"
            )
        # stack([x @ a, x @ b]) along heads that the keys have too, which are a batch axis of the
        # product: each projection was put next to others, and fills only some of the heads.
        fills_some_heads = layout.is_placed(self.operand.batch)
        # One of several projections, without an axis of heads. Either they are parts of one head,
        # put together along the features, as in concatenate([x @ a, x @ b], -1). Or each is a head,
        # and needs a factor of its own: along heads h that share a key, as in "bqhd,bkd->bhqk".
        # Which of both it is, is not followed. A projection that is the only one is one head.
        may_be_half = len(self.operand.value.projections) > 1 and not self.heads(layout)
        if fills_some_heads or may_be_half:
            raise Refused("heads of its queries are put together from several products")
        spans = [self._span(projection.view.leaf, layout)]
        for bias in projection.biases:
            spans.append(self._span(bias.leaf, bias.layout))
        return spans

    def _span(self, leaf: int, layout: Layout) -> PlacedScale:
        """The entries of a parameter that a clip scales by one number for each head,
        and whose they are: the factor of the `Scale` is "query" or "key".

        A scan takes w [layers, 64, 8 * 16] layer by layer, and x @ w is reshaped to queries
        [batch, query, 8, 16]. Their layout has one run, 0 to 127 along axis 2 of w. The span has
        the stack (0,) and a `Scale` of 8 entries with 16 positions each along the axis -1 of a
        layer.

        Args:
          leaf: The number of the parameter.
          layout: Which of its entries the entries of the operand come from.
        """
        shape = layout.origin
        # The axes of the parameter that loops go over: they count layers.
        stack = tuple(dict.fromkeys(run.axis for run in layout.loops))
        # The axes of the operand that count heads, [2] here, and the axes of the parameter along
        # which these heads lie, {2} here. Without such an axis all is one head.
        heads = self.heads(layout)
        head_axes = axes_of(layout.runs_along(heads))
        # The first of a layout's runs says where other arrays were put next to the parameter's
        # entries (holes), and is along no axis of the parameter. The axes of the others hold these
        # entries (`held`), and are flattened to one.
        _, *runs = layout.runs
        # The axes of heads come first: a kernel [64, 16, 8] with the heads last is flattened along
        # (2, 1), so that the features of one head follow each other.
        runs.sort(key=lambda run: (run.axis not in head_axes, run.axis))
        held = [run.axis for run in runs]
        # An axis of the parameter counts layers or holds heads, not both.
        if not set(held).isdisjoint(stack):
            raise Refused("a loop goes over a part of an axis of its parameter")
        # Where each entry of the operand is along the flattened axes: [1, 1, 1, 8, 16] here, and
        # [terms, ...] if each entry is a sum. Positions i along one axis and j along the next, of
        # size n, are i n + j; for a hole, whose position HOLE is huge, this is no less than HOLE.
        positions = np.zeros([1] * (1 + len(layout.shape)), int)
        for run in runs:
            positions = positions * shape[run.axis] + run.positions
        # Now a row for each head: the axes of heads, in `positions` one behind that of the terms,
        # come first, [8, 1, 1, 1, 16], and all others are flattened, [8, 16], perhaps with holes.
        # `_places` says where heads begin and end, as fields of `Scale`.
        first = [1 + axis for axis in heads]
        positions = np.moveaxis(positions, first, range(len(heads)))
        count = math.prod(positions.shape[: len(heads)])
        size = math.prod(shape[axis] for axis in held)
        places = _places(positions.reshape(count, -1), size)
        # A `Scale` knows a parameter of one layer, without the axes of `stack`, and counts its axes
        # from the last one, -1. `name_attentions` sets its `path`.
        axes_of_layer = other_axes(len(shape), stack)
        rank = len(axes_of_layer)
        axes = tuple(axes_of_layer.index(axis) - rank for axis in held)
        scale = Scale(path="", rank=rank, axes=axes, factor=self.factor, **places)
        return PlacedScale(leaf, scale, shape, stack, tuple(held))


def _divided(
    span: PlacedScale, first: int, shared: Sequence[range]
) -> Iterator[PlacedScale]:
    """A span of queries, cut where features that meet shared keys begin and end:
    these take γ, the factor "whole", and the others √γ.

    A span of features 0 to 8 with 4 and 5 `shared` gives 0 to 4, 4 to 6 as "whole", 6 to 8. If it
    is the second half of 16 features, `first` is 8: `shared` numbers the features of all queries.
    """
    # Whether each feature meets a shared key
    meets_shared = [
        any(feature in features for features in shared)
        for feature in range(first, first + span.features)
    ]
    start = 0
    for is_shared, group in itertools.groupby(meets_shared):
        factor = "whole" if is_shared else span.factor
        stop = start + len(list(group))
        scale = dataclasses.replace(span.scale, span=(start, stop), factor=factor)
        yield span._replace(scale=scale)
        start = stop


def _places(positions: np.ndarray, size: int) -> dict[str, Any]:
    """Where the heads lie on flattened axes of a parameter, in the words of `Scale`.

    The keys of a fused kernel [64, 3 * 8 * 16] along axis 1 are entries=8, part=(128, 256). With
    the columns q q k v q q k v, 16 each, the queries are entries=4, part=(0, 32) in groups=2.

    Args:
      positions: Those of each head, [heads, any]; HOLE or more for an entry that is not of the
        parameter. If one axis counts examples and heads together, a head has a row for each
        example, and these rows are equal.
      size: The number of all positions.

    Raises:
      Refused: The heads are no equal runs in equal groups.
    """
    # The number of columns of the first head, without holes. Whether all have as many, which follow
    # each other, is for the certificate to say.
    width = len(np.unique(positions[0, positions[0] < HOLE]))
    # The first position of each head; HOLE is larger than any. Equal rows give one head.
    first = np.unique(positions.min(1))
    # A group begins where a head does not follow the one before at once.
    groups = 1 + int(np.count_nonzero(np.diff(first) != width))
    # Each group has `group` positions and `in_group` heads, which are from `start` to `stop` in it.
    # From these follows where each head has to begin.
    in_group = len(first) // groups
    group, rest = divmod(size, groups)
    start = int(first[0])
    stop = start + in_group * width
    expected = np.arange(groups)[:, None] * group + np.arange(start, stop, width)
    # The groups do not divide all positions, or their heads do not fit into one; or heads begin
    # elsewhere, as where groups have different numbers of heads, or a head has only holes.
    if rest or stop > group or not np.array_equal(first, expected.ravel()):
        raise Refused("its heads do not lie one after the other in the parameter")
    return {
        "entries": len(first),
        "part": (start, stop),
        # All features of a head: `_divided` cuts the span where some meet shared keys.
        "span": (0, width),
        "groups": groups,
    }
