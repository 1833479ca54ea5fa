"""What a clip of an attention may scale: the entries of the parameters that make its queries and keys."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from muonjax._clip.scale import Scale, first_positions
from muonjax._inspect.findings import Walk
from muonjax._inspect.layout import HOLE, UNORDERED, Layout, Run
from muonjax._inspect.values import Operand, Projection


class Span(NamedTuple):
    """The positions in one parameter that feed the heads."""

    leaf: int
    scale: Scale  # without its path
    stack: tuple[int, ...]  # axes of the parameter that count layers

    @property
    def heads(self) -> int:
        return self.scale.entries or 1

    @property
    def features(self) -> int:
        return (self.scale.span[1] or 0) - self.scale.span[0]


class Refused(Exception):
    """Why this attention can't be clipped."""


class _Features(NamedTuple):
    """Features from `start` up to `stop`."""

    start: int
    stop: int


class QueriesAndKeys:
    """The two operands of one product of queries and keys."""

    def __init__(self, walk: Walk, product: int, normalized: frozenset[int]):
        """`normalized`: the axes of the product that count keys."""
        self.walk, self.shapes, self.normalized = walk, walk.shapes, normalized
        left, right = walk.pairs[product]
        is_query = left.sources[max(normalized)] is None
        self.query, self.key = (left, right) if is_query else (right, left)

    def proposals(self) -> list[tuple[Span, ...]]:
        """Both sides of the product, or the queries alone.

        Raises:
          Refused: It is neither.
        """
        proposals, why = [], ""
        for keys, shared in (self.split_keys(), ([], [])):
            try:
                proposals.append(self._proposal(keys, shared))
            except Refused as refused:
                why = str(refused)
        if not proposals:
            raise Refused(why)
        return list(dict.fromkeys(proposals))

    def _proposal(
        self, keys: Sequence[Projection], shared: Sequence[_Features]
    ) -> tuple[Span, ...]:
        """What to scale if the keys of these projections take a part of the factor."""
        self._check_queries()
        self._check_order(self.key, keys, "keys")
        factor = "query" if keys else "rotary"
        queries = list(self._spans(self.query, self.query.value.projections, factor, shared))
        of_keys = list(self._spans(self.key, keys, "key"))
        spans = (*queries, *of_keys)
        # Other parts of the queries, or of the keys, may follow the first.
        features = {part[0].features for part in (_of(spans, "query"), of_keys) if part}
        layers = {tuple(self.shapes[s.leaf][axis] for axis in s.stack) for s in spans}
        heads_of_queries, heads_of_keys = ({s.heads for s in part} for part in (queries, of_keys))
        several = max(map(len, (heads_of_queries, heads_of_keys, layers, features))) > 1
        if several or any(queries[0].heads % s.heads for s in spans):
            raise Refused(
                "its queries and keys are cut into heads, features or layers in several ways"
            )
        return spans

    def _check_queries(self) -> None:
        projections = self.query.value.projections
        if not projections:
            raise Refused("its queries can't be followed to parameters that train")
        self._check_order(self.query, projections, "queries")
        for projection in projections:
            if not projection.layout.varying:
                raise Refused(self._why_of_all_columns(projection))
            # Nothing tells queries of one head, put together from several products, from several heads of one key.
            if len(projections) > 1 and not self._heads(self.query, projection.layout):
                raise Refused("heads of its queries are put together from several products")

    def _why_of_all_columns(self, projection: Projection) -> str:
        if projection.product.use.view.inner:
            return "a product of several parameters makes its queries"
        if projection.linear:
            return "the heads of its queries can't be told apart"
        line = self.walk.graph.line(projection.nonlinear_at)
        return f"a function of all heads, as a norm, makes its queries: {line}"

    def _check_order(self, operand: Operand, projections: Sequence[Projection], name: str) -> None:
        for projection in projections:
            layouts = [projection.layout, *(bias.layout for bias in projection.biases)]
            if any(UNORDERED in layout.loops for layout in layouts):
                raise Refused(f"its {name} are in another order than the parameter's")
            if projection.layout.placed(operand.batch):
                raise Refused(f"heads of its {name} are put together from several products")

    def _heads(self, operand: Operand, layout: Layout) -> dict[int, int]:
        """Axes of the product that softmax does not normalize, and the operand's, if parameters differ along them."""
        heads = {}
        for axis, source in enumerate(operand.sources):
            if source is not None and axis not in self.normalized and layout.runs_along([source]):
                heads[axis] = source
        return heads

    def split_keys(self) -> tuple[list[Projection], list[_Features]]:
        """Keys that each head has for itself; and which features those fill that all heads share."""
        heads: set[int] = set()
        for projection in self.query.value.projections:
            heads.update(self._heads(self.query, projection.layout))
        of_one_head, shared = [], []
        for projection in self.key.value.projections:
            is_shared = heads and heads.isdisjoint(self._heads(self.key, projection.layout))
            features = self._features(self.key, projection)
            if is_shared and features is not None:
                shared.append(features)
            else:
                of_one_head.append(projection)
        return of_one_head, shared

    def _features(self, operand: Operand, projection: Projection) -> _Features | None:
        """Where in the sum over features a projection is that was concatenated with others."""
        (axis, *more) = operand.summed
        placed = projection.layout.placed([axis])
        if more or not placed:
            return None
        there = np.argwhere(placed[0].positions < HOLE)[:, axis]
        return _Features(int(there.min()), int(there.max()) + 1)

    def _spans(
        self,
        operand: Operand,
        projections: Sequence[Projection],
        factor: str,
        shared: Sequence[_Features] = (),
    ) -> Iterator[Span]:
        for projection in projections:
            start, stop = self._features(operand, projection) or (0, HOLE)
            # Those that shared keys fill, counted from the first feature of the projection.
            inside = []
            for features in shared:
                first, last = max(features.start, start), min(features.stop, stop)
                if first < last:
                    inside.append(_Features(first - start, last - start))
            kernel = projection.product.use.view.leaf, projection.layout
            for leaf, layout in (kernel, *((bias.leaf, bias.layout) for bias in projection.biases)):
                yield from _divided(self._span(leaf, layout, operand, factor), inside)

    def _span(self, leaf: int, layout: Layout, operand: Operand, factor: str) -> Span:
        shape = self.shapes[leaf]
        rest, heads = layout.split(self._heads(operand, layout).values())
        rest, features = rest.split(operand.summed)
        # The outer axis counts heads in larger steps.
        heads = sorted(heads, key=lambda run: (run.axis, -run.stride))
        features = (*features, *rest.taken, *(run for run in rest.runs if run.axis >= 0))
        stack = tuple(dict.fromkeys(run.axis for run in layout.loops))
        held = {run.axis for run in (*heads, *features)}
        if not held.isdisjoint(stack):
            raise Refused("a loop goes over a part of an axis of its parameter")
        # What an index takes comes first, then the heads, then a head's features.
        wide = {run.axis for run in features if run.positions.size > 1}
        wide -= {run.axis for run in heads}
        order = sorted(held, key=lambda axis: (axis in wide, axis))
        places = _places(shape, order, heads, features)
        if places is None:
            raise Refused("its heads do not lie one after the other in the parameter")
        of_a_layer = [axis for axis in range(len(shape)) if axis not in stack]
        rank = len(of_a_layer)
        axes = tuple(of_a_layer.index(axis) - rank for axis in order)
        return Span(leaf, Scale(path="", rank=rank, axes=axes, factor=factor, **places), stack)


def _of(spans: Sequence[Span], factor: str) -> list[Span]:
    return [s for s in spans if s.scale.factor == factor]


def _divided(span: Span, shared: Sequence[_Features]) -> Iterator[Span]:
    """The features of a query that meet the heads' own keys, and those that meet shared ones."""
    first, last = span.scale.span
    shared = [_Features(first + features.start, first + features.stop) for features in shared]
    edges = [first, *sorted({edge for features in shared for edge in features}), last]
    for start, stop in itertools.pairwise(edges):
        is_shared = any(s.start <= start and stop <= s.stop for s in shared)
        factor = "rotary" if is_shared else span.scale.factor
        if start < stop:
            scale = dataclasses.replace(span.scale, span=(start, stop), factor=factor)
            yield span._replace(scale=scale)


def _positions(runs: Sequence[Run], weights: dict[int, int]) -> np.ndarray:
    """Every sum of one position of each run, in the order of the runs, along flattened axes."""
    positions = np.zeros(1, int)
    for run in runs:
        steps = run.positions.reshape(-1) * weights[run.axis]
        positions = (positions[:, None] + steps).reshape(-1)
    return positions


def _places(
    shape: Sequence[int], axes: Sequence[int], heads: Sequence[Run], features: Sequence[Run]
) -> dict[str, Any] | None:
    """Where the heads are on the flattened `axes`, in the words of `Scale`; None where they are no such runs."""
    weights = {axis: math.prod(shape[x] for x in axes[k + 1 :]) for k, axis in enumerate(axes)}
    total = math.prod(shape[axis] for axis in axes)
    first = _positions(heads, weights)
    inside = np.sort(_positions(features, weights))
    entries, width = len(first), len(inside)
    steps = np.diff(first)
    run = int(steps[0]) if entries > 1 else total
    # A group of heads ends before a gap.
    ends = np.flatnonzero(steps != run)
    groups = entries // (int(ends[0]) + 1) if len(ends) else 1
    gap = int(steps[ends[0]]) - run if len(ends) else 0
    if (np.diff(inside) != 1).any() or run <= 0 or gap < 0 or entries % groups:
        return None
    base = int(first[0] + inside[0])
    # The features of the first head need not begin where its run begins.
    start = base - base % run if base % run + width <= run else base
    size = entries * run + (groups - 1) * gap
    expected = first_positions(entries, run, start=base - inside[0], groups=groups, gap=gap)
    if start + size > total or not np.array_equal(expected, first):
        return None
    return {
        "entries": entries,
        "start": start,
        "size": size,
        "span": (base - start, base - start + width),
        "groups": groups,
        "gap": gap,
    }
