"""What a clip of an attention may scale: the entries of the parameters that make its queries and keys."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from muonjax._clip.scaled_entries import PlacedScale, Scale
from muonjax._inspect.layouts import Layout, Run, other_axes, set_of
from muonjax._inspect.records import Records
from muonjax._inspect.values import PARAMETER, Operand, Projection


class Refused(Exception):
    """Why this attention can't be clipped."""


def proposals_of(pairs: Sequence[QueriesAndKeys]) -> list[tuple[PlacedScale, ...]]:
    """What a clip may scale, the best first, where logits are a sum of products of these queries and keys.

    In a sum, q1 @ k1 + q2 @ k2, all that is scaled has to have as many heads. So the first proposal scales both sides
    of a product where each head has keys of its own, and its queries alone where several heads share keys. The second
    scales the queries alone of all products.

    Raises:
      Refused: A product has no proposal, or the products have other numbers of heads, or of axes that count layers.
    """
    if len(pairs) == 1:
        return pairs[0].proposals()
    best: list[PlacedScale] = []
    queries: list[PlacedScale] = []
    for pair in pairs:
        proposals = pair.proposals()
        first, queries_alone = proposals[0], proposals[-1]
        has_equal_heads = len({span.entries for span in first}) == 1
        best += first if has_equal_heads else queries_alone
        queries += queries_alone
    for spans in (best, queries):
        if len({(span.entries, len(span.stack)) for span in spans}) > 1:
            raise Refused(
                "its logits are a sum of products with other numbers of heads"
            )
    return list(dict.fromkeys([tuple(best), tuple(queries)]))


class QueriesAndKeys:
    """The two operands of one product of queries and keys."""

    def __init__(self, records: Records, product: int, normalized: frozenset[int]):
        """`normalized`: the axes of the product that count keys."""
        self.records, self.shapes, self.normalized = records, records.shapes, normalized
        left, right = records.attention.operands[product]
        if left.is_query(normalized):
            self.query, self.key = left, right
        else:
            self.query, self.key = right, left

    def proposals(self) -> list[tuple[PlacedScale, ...]]:
        """Both sides of the product, where that is possible, and last the queries alone.

        Raises:
          Refused: The queries can't be scaled, and so neither can both.
        """
        queries_alone = self._proposal([], ())
        try:
            both = self._proposal(*self.split_keys())
        # The keys have other heads or features, as where all heads share their bias.
        except Refused:
            return [queries_alone]
        # They are equal where no key can be scaled, such as keys that do not train.
        return list(dict.fromkeys([both, queries_alone]))

    def _proposal(
        self, keys: Sequence[Projection], shared: Collection[int]
    ) -> tuple[PlacedScale, ...]:
        """What to scale if these keys take a part of the factor γ, and the queries the rest.

        "query" and "key" say √γ each, "whole" says γ. In latent attention keys and queries have features "key" and
        "query", but the rotary features of the queries, `shared`, are "whole". With one key head for all, so are all
        queries.

        Args:
          keys: The projections that give each head keys of its own; none: the queries take the whole factor.
          shared: Which features of the queries meet keys that several heads share: these take the whole factor, too.
        """
        self._check_queries()
        self._check_order(self.key, keys, "keys")
        factor = "query" if keys else "whole"
        of_queries: list[PlacedScale] = []
        for projection in self.query.value.projections:
            of_queries += self._spans(self.query, projection, factor, shared)
        of_keys: list[PlacedScale] = []
        for projection in keys:
            of_keys += self._spans(self.key, projection, "key")
        spans = (*of_queries, *of_keys)
        self._check_equal_heads(of_queries, of_keys)
        return spans

    def _check_equal_heads(
        self, of_queries: Sequence[PlacedScale], of_keys: Sequence[PlacedScale]
    ) -> None:
        """Refuses queries and keys with other layers or features, or heads of keys that no heads of queries share."""
        # The queries that meet `of_keys` have the factor "query", and as many features. Only the first span of each
        # side is compared: the others are its biases, or further features, which the certificate checks.
        meet_keys = [span for span in of_queries if span.factor == "query"]
        features = {spans[0].features for spans in (meet_keys, of_keys) if spans}
        layers = {span.layers for span in (*of_queries, *of_keys)}
        heads_of_queries = {span.entries for span in of_queries}
        heads_of_keys = {span.entries for span in of_keys}
        several = max(map(len, (heads_of_queries, heads_of_keys, layers, features))) > 1
        # With grouped queries, a whole number of heads shares each head of keys, as four heads each of two.
        heads = of_queries[0].entries
        if several or any(heads % n for n in heads_of_keys):
            raise Refused(
                "its queries and keys are cut into heads, features or layers in several ways"
            )

    def _check_queries(self) -> None:
        """Refuses queries whose heads can't be told in the parameters that make them."""
        projections = self.query.value.projections
        if not projections:
            if self.query.value.depends_on & PARAMETER:
                raise Refused("an operation that is not followed makes its queries")
            raise Refused("its queries can't be followed to parameters that train")
        self._check_order(self.query, projections, "queries")
        for projection in projections:
            # The columns differ along no axis of the queries: each entry is made of all of them, and none is of one
            # head. This is so after a norm over all heads, or after a frozen matrix.
            if not projection.layout.varying:
                raise Refused(self._why_of_all_columns(projection))
            # concatenate([x @ a, x @ b]) without an axis of heads may be two halves of one head, or two heads that
            # share a key: they look the same, and take different factors.
            if len(projections) > 1 and not self._heads(self.query, projection.layout):
                raise Refused(
                    "heads of its queries are put together from several products"
                )

    def _why_of_all_columns(self, projection: Projection) -> str:
        """Why each entry of the queries depends on all columns of their projection."""
        if projection.view.inner:
            return "a product of several parameters makes its queries"
        if projection.is_linear:
            return "the heads of its queries can't be told apart"
        line = self.records.graph.line(projection.nonlinear_at)
        return f"a function of all heads, as a norm, makes its queries: {line}"

    def _check_order(
        self, operand: Operand, projections: Sequence[Projection], name: str
    ) -> None:
        """Refuses heads from several products.

        Args:
          operand: The queries or the keys.
          projections: Those in it that are to be scaled.
          name: "queries" or "keys".
        """
        for projection in projections:
            # stack([x @ a, x @ b]) along the axis of heads: each projection has its place on this batch axis.
            if projection.layout.is_placed(operand.batch):
                raise Refused(
                    f"heads of its {name} are put together from several products"
                )

    def _heads(self, operand: Operand, layout: Layout) -> dict[int, int]:
        """The axes of the product that count heads, and for each the axis of the operand that it comes from.

        For a product [batch, head, query, key] of queries [batch, query, head, feature] it is {1: 2}: along the axis of
        heads the queries come from other entries of the parameter, and along `batch` and `query` from the same. Softmax
        normalizes the axis of keys, which counts none.
        """
        heads = {}
        for axis, source in enumerate(operand.sources):
            if source is None or axis in self.normalized:
                continue
            if layout.runs_along([source]):
                heads[axis] = source
        return heads

    def split_keys(self) -> tuple[list[Projection], set[int]]:
        """The keys that a clip may scale; and the features, by number, that the others fill, as all heads share them.

        The keys of latent attention (MLA) are both: features without rotation of each head, then rotated ones of all.
        If all heads share all features, as in multi-query attention, the keys are one head, which a clip may scale.
        """
        heads: set[int] = set()
        for projection in self.query.value.projections:
            heads.update(self._heads(self.query, projection.layout))
        of_one_head: list[Projection] = []
        shared: set[int] = set()
        for projection in self.key.value.projections:
            heads_of_keys = self._heads(self.key, projection.layout)
            is_shared = bool(heads) and heads.isdisjoint(heads_of_keys)
            features = self._features(self.key, projection)  # None: all
            if is_shared and features is not None:
                shared.update(features)
            else:
                of_one_head.append(projection)
        return of_one_head, shared

    def _features(self, operand: Operand, projection: Projection) -> range | None:
        """Which features of an operand a projection fills that was concatenated with others; None if it has all."""
        (axis, *more) = operand.summed
        layout = projection.layout
        if more or not layout.is_placed([axis]):
            return None
        there = np.argwhere(~layout.holes)[:, axis]
        return range(int(there.min()), int(there.max()) + 1)

    def _spans(
        self,
        operand: Operand,
        projection: Projection,
        factor: str,
        shared: Collection[int] = (),
    ) -> list[PlacedScale]:
        """The spans in the kernel and in the biases of one projection.

        Args:
          operand: The queries, or the keys.
          projection: One of the projections in it.
          factor: That of `Scale`.
          shared: Features of the operand that meet keys which several heads share: they take the whole factor.
        """
        # The shared ones, counted from the first feature of the projection.
        features = self._features(operand, projection)
        first = features.start if features else 0
        shared = {feature - first for feature in shared}
        views = [(projection.view.leaf, projection.layout)]
        views += [(bias.leaf, bias.layout) for bias in projection.biases]
        spans: list[PlacedScale] = []
        for leaf, layout in views:
            spans += _divided(self._span(leaf, layout, operand, factor), shared)
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
        # The first head, 0 to 15, and how far the heads are from it: {0, 16, ..., 112}.
        first_head, heads = layout.split(self._heads(operand, layout).values())
        # The features of the first head, {0, ..., 15}, and positions along other axes of the product, or at a fixed
        # index, 0 in w[:, 0].
        features = [set_of(run.axis, run.positions) for run in first_head.runs[1:]]
        # The more significant of two runs along one axis has the larger steps.
        heads = sorted(heads, key=lambda run: (run.axis, -run.stride))
        stack = tuple(dict.fromkeys(run.axis for run in layout.loops))
        head_axes = {run.axis for run in heads}
        used_axes = head_axes | {run.axis for run in features}
        if not used_axes.isdisjoint(stack):
            raise Refused("a loop goes over a part of an axis of its parameter")
        # Axes that only features lie along come last, so that the features of one head follow each other: a kernel
        # [64, 16, 8] with the heads last is flattened along the axes (2, 1).
        feature_axes = {
            run.axis for run in features if run.positions.size > 1
        } - head_axes
        order = sorted(used_axes, key=lambda axis: (axis in feature_axes, axis))
        places = _places([shape[axis] for axis in order], order, heads, features)
        # A `Scale` counts the axes of one layer from the last.
        axes_of_layer = other_axes(len(shape), stack)
        rank = len(axes_of_layer)
        axes = tuple(axes_of_layer.index(axis) - rank for axis in order)
        scale = Scale(path="", rank=rank, axes=axes, factor=factor, **places)
        return PlacedScale(leaf, scale, shape, stack, tuple(order))


def _divided(span: PlacedScale, shared: Collection[int]) -> Iterator[PlacedScale]:
    """A span, cut where features that meet shared keys begin and end; these take the "whole" factor.

    A span of features 0 to 8 with 4 and 5 `shared`, counted from its first, gives 0 to 4, 4 to 6 as "whole", 6 to 8.
    """
    first = span.scale.span[0]
    features = itertools.groupby(range(span.features), shared.__contains__)
    for is_shared, piece in features:
        start, *others = piece
        stop = start + len(others) + 1
        scale = dataclasses.replace(
            span.scale,
            span=(first + start, first + stop),
            factor="whole" if is_shared else span.factor,
        )
        yield span._replace(scale=scale)


def _positions(runs: Sequence[Run], weights: dict[int, int]) -> np.ndarray:
    """Every sum of one position of each run, in the order of the runs, along flattened axes."""
    positions = np.zeros(1, int)
    for run in runs:
        steps = run.positions.reshape(-1) * weights[run.axis]
        positions = (positions[:, None] + steps).reshape(-1)
    return positions


def _places(
    sizes: Sequence[int],
    axes: Sequence[int],
    heads: Sequence[Run],
    features: Sequence[Run],
) -> dict[str, Any]:
    """Where the heads lie on flattened axes of a parameter, in the words of `Scale`.

    The keys of a fused kernel [64, 3 * 8 * 16] along axis 1 are entries=8, part=(128, 256), span=(0, 16). With the
    columns q q k v q q k v, 16 each, the queries are entries=4, part=(0, 32), span=(0, 16) in groups=2 of two heads.

    Args:
      sizes: Those of the axes that are flattened.
      axes: These axes, the outermost first.
      heads: The positions that count heads.
      features: The positions of one head, which add to those.

    Raises:
      Refused: The heads are no equal runs.
    """
    weights = {axis: math.prod(sizes[k + 1 :]) for k, axis in enumerate(axes)}
    first = _positions(heads, weights)
    inside = np.sort(_positions(features, weights))
    entries, width = len(first), len(inside)
    # From one head to the next it is a stride, and a longer step from one group of heads to the next.
    steps = np.diff(first)
    stride = int(steps[0]) if entries > 1 else math.prod(sizes)
    in_group = int(np.argmax([*(steps != stride), True])) + 1
    groups = entries // in_group
    group = math.prod(sizes) // groups
    # With columns q k v q k v ..., 16 each, the keys begin at 16 in each stride of 48: part=(0, ...) and span=(16, 32).
    # From 16 on, the last stride would end behind the parameter.
    base = int(first[0] + inside[0])
    start = base - base % stride if base % stride + width <= stride else base
    stop = start + in_group * stride
    expected = np.arange(groups)[:, None] * group + np.arange(in_group) * stride
    is_contiguous = (np.diff(inside) == 1).all()
    if (
        not is_contiguous
        or stride <= 0
        or stop > group
        or not np.array_equal(first[0] + expected.ravel(), first)
    ):
        raise Refused("its heads do not lie one after the other in the parameter")
    return {
        "entries": entries,
        "part": (start, stop),
        "span": (base - start, base - start + width),
        "groups": groups,
    }
