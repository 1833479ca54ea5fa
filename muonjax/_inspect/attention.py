"""From softmax(Q Kᵀ) V to the parameters that a clip scales, and to the place where the logits are."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from muonjax._inspect.certificate import Certificate
from muonjax._inspect.layout import HOLE, UNKNOWN, Layout, Run
from muonjax._inspect.report import Probe
from muonjax._inspect.structure import reshaped
from muonjax._inspect.values import Image, Side
from muonjax._inspect.walk import Attention, Walk


class Span(NamedTuple):
    """The positions in one parameter that feed the heads: `Scale` in `muonjax.qk_clip` has the same words."""

    leaf: int
    rank: int  # of one layer's parameter
    axes: tuple[int, ...]  # of one layer's parameter, negative
    entries: int
    start: int
    size: int
    span: tuple[int, int]
    factor: str  # "query", "key", or "rotary": a query whose key stays as it is
    stack: tuple[int, ...]  # axes of the parameter that count layers
    index: tuple[int, ...] = ()  # of those that a constant index chooses, the first of them: the layer


class Call(NamedTuple):
    """One attention: what to scale, and where its largest logits are; or why it can't be clipped."""

    line: str
    spans: tuple[Span, ...] = ()
    probe: Probe | None = None
    layers: tuple[int, ...] = ()
    index: tuple[int, ...] = ()  # the layer on the first axes, where they are taken one by one
    heads: int = 1
    problem: str = ""
    images: tuple[Image, ...] = ()  # what a clip scales; of a refused one, its queries and keys


class _Refused(Exception):
    """Why this attention can't be clipped."""


def calls(walk: Walk) -> list[Call]:
    """One for each attention, in the order of the program."""
    found = {i: _call(walk, attention) for i, attention in walk.attentions.items()}
    for i, images in walk.opaque.items():
        node = walk.nodes[i]
        name = str(node.params.get("name") or node.name)
        why = f"{name!r} is a call whose logits can't be seen; measure them with muonjax.max_logits"
        found[i, -1] = Call(walk.graph.line(i), problem=why, images=images)
    for i, at in walk.softmaxes.items():
        if i not in {product for product, _ in walk.attentions}:
            why = f"its queries, keys and values can't all be followed to parameters: {walk.graph.line(at)}"
            found[i, -1] = Call(walk.graph.line(i), problem=why)
    one = defaultdict(list)
    for at, call in found.items():
        one[call.spans].append((at, call))
    for spans, group in one.items():
        if spans:
            found |= _proved(walk, group)
    return [call for _, call in sorted(found.items())]


def _proved(walk: Walk, group: Sequence[tuple[tuple[int, int], Call]]) -> dict[tuple[int, int], Call]:
    """The calls of one attention, or why a clip would not scale the logits of each of its heads alone."""
    first, random, proved = group[0][1], np.random.default_rng(0), {}
    logs = 2.0 * random.integers(1, 1 << 40, (*first.layers, first.heads))
    groups = next((s.entries for s in first.spans if s.factor == "key"), first.heads)
    keys = logs.reshape(*first.layers, groups, -1).min(-1) / 2
    queries = logs - np.repeat(keys, first.heads // groups, -1)
    of_factor = {"rotary": logs, "key": keys, "query": queries}
    logits = [walk.attentions[at].logits for at, _ in group]
    places = [x.value if x.raw is None else x.raw[0] for x in logits]
    certificate = Certificate(walk, [call.probe for _, call in group if call.probe], places)
    for leaf in {s.leaf for s in first.spans}:
        certificate.touch(leaf, [(s, of_factor[s.factor]) for s in first.spans if s.leaf == leaf])
    i = certificate.failure()
    derived = (
        "" if i is None or not walk.nodes[i].passes else ", but a derivative that the function takes too"
    )
    why = "" if i is None else f"a clip would not scale its logits alone{derived}: {walk.graph.line(i)}"
    for place, x, (at, call) in zip(places, logits, group, strict=True):
        probe = call.probe and certificate.located(call.probe, place, x.value, logs[call.index])
        why = why or ("" if probe else "the heads of its logits are not those of its projections")
        proved[at] = call._replace(probe=probe)
    return {at: call._replace(spans=(), probe=None, problem=why) for at, call in group} if why else proved


def _call(walk: Walk, attention: Attention) -> Call:
    line = walk.graph.line(attention.logits.product)
    finder = _Finder(walk, attention)
    try:
        return finder.call(line)
    except _Refused as refused:
        images = (*finder.query.value.images, *finder.key.value.images)
        return Call(line, problem=str(refused), images=images)


class _Finder:
    """The two operands of one product of queries and keys."""

    def __init__(self, walk: Walk, attention: Attention):
        self.walk, self.shapes, self.attention = walk, walk.shapes, attention
        left, right = walk.pairs[attention.logits.product]
        self.normalized = {a.axis for a in attention.keys}
        is_query = left.sources[max(self.normalized)] is None
        self.query, self.key = (left, right) if is_query else (right, left)

    def heads(self, operand: Side, layout: Layout) -> dict[int, int]:
        """Axes of the product that softmax does not normalize, and the operand's, if parameters differ along them."""
        axes = {d: k for d, k in enumerate(operand.sources) if k is not None and d not in self.normalized}
        return {d: k for d, k in axes.items() if layout.atoms([k])}

    def call(self, line: str) -> Call:
        logits = self.attention.logits
        if logits.problem:
            raise _Refused(f"{logits.problem[0]}: {self.walk.graph.line(logits.problem[1])}")
        for operand, name in ((self.query, "queries"), (self.key, "keys")):
            for image in operand.value.images:
                if image.after is not None:
                    raise _Refused(f"its {name} are {image.after[0]}: {self.walk.graph.line(image.after[1])}")
                layouts = [image.layout, *(bias.layout for bias in image.biases)]
                # Nothing tells queries of one head, put together from several products, from several heads of one key.
                several = operand is self.query and len(operand.value.images) > 1
                batched, given = (image.layout.placed(axes) for axes in (operand.batch, operand.given))
                if any(UNKNOWN in x.loops for x in layouts):
                    raise _Refused(f"its {name} are in another order than the parameter's")
                placed = batched or any(run.axis >= 0 for run in given)
                if placed or (several and not self.heads(operand, image.layout)):
                    raise _Refused(f"heads of its {name} are put together from several products")
        own, shared = self._split_keys()
        queries = list(self._spans(self.query, self.query.value.images, "query" if own else "rotary", shared))
        keys = list(self._spans(self.key, own, "key", {}))
        spans = (*queries, *keys)
        layers = {tuple(self.shapes[s.leaf][a] for a in s.stack) for s in spans}
        entries = [{s.entries for s in found} for found in (queries, keys)]
        several = max(map(len, (*entries, layers, {s.index for s in spans}))) > 1
        if several or (keys and queries[0].entries % keys[0].entries):
            raise _Refused("its queries and keys are cut into heads or layers in several ways")
        first = queries[0]
        spans = tuple(s._replace(index=()) for s in spans)
        images = (*self.query.value.images, *own)
        return Call(line, spans, self._probe(), layers.pop(), first.index, first.entries, images=images)

    def _split_keys(self) -> tuple[list[Image], dict[tuple[int, int], Image]]:
        """Keys that each head has for itself; and those that all heads share, by the features that they fill."""
        heads = {d for image in self.query.value.images for d in self.heads(self.query, image.layout)}
        own, shared = [], {}
        for image in self.key.value.images:
            alone = heads and heads.isdisjoint(self.heads(self.key, image.layout))
            place = self._place(image)
            if alone and place is not None:
                shared[place] = image
            elif alone and len(self.key.value.images) > 1:
                raise _Refused("its keys come from several products, of which heads share some")
            else:
                own.append(image)
        return own, shared

    def _place(self, image: Image) -> tuple[int, int] | None:
        """Where in the sum over features an image is that was concatenated with others."""
        (axis, *more) = self.key.summed
        placed = image.layout.placed([axis])
        if more or not placed:
            return None
        there = np.argwhere(placed[0].positions < HOLE)[:, axis]
        return int(there.min()), int(there.max()) + 1

    def _spans(
        self, operand: Side, images: Sequence[Image], factor: str, shared: dict[tuple[int, int], Image]
    ) -> Iterator[Span]:
        for image in images:
            use = image.product.use
            columns = {a.axis for a in use.columns}
            for term in (None, *image.biases):
                layout = image.layout if term is None else term.layout
                leaf = use.term.leaf if term is None else term.leaf
                held = columns if term is None else set(range(len(self.shapes[leaf])))
                held = held | {a.axis for a in layout.taken}
                # Nothing is left of an axis that a shard_map divides down to one entry.
                seen = held | {a.axis for a in (*layout.loops, *(() if term else (*use.rows, *use.batch)))}
                if any(n > 1 and axis not in seen for axis, n in enumerate(self.shapes[leaf])):
                    raise _Refused("devices of a shard_map have different layers or heads of its parameter")
                span = self._span(leaf, layout, held, operand, factor)
                yield from self._apart(span, shared) if shared else [span]

    def _apart(self, span: Span, shared: dict[tuple[int, int], Image]) -> Iterator[Span]:
        """The features of a query that meet the heads' own keys, and those that meet shared ones."""
        first, last = span.span
        inside = [first, *sorted({edge + first for place in shared for edge in place}), last]
        for start, stop in itertools.pairwise(inside):
            if start < stop:
                rotary = any(a + first <= start and stop <= b + first for a, b in shared)
                yield span._replace(span=(start, stop), factor="rotary" if rotary else span.factor)

    def _span(self, leaf: int, layout: Layout, held: set[int], operand: Side, factor: str) -> Span:
        shape = self.shapes[leaf]
        rest, heads = layout.split(self.heads(operand, layout).values())
        heads = sorted((a for a in heads if a.axis in held), key=lambda a: (a.axis, -a.stride))
        rest, features = rest.split(operand.summed)
        features = [a for a in (*features, *rest.taken, *rest.runs) if a.axis in held]
        single = {a.axis: int(a.positions[0]) for a in layout.loops if a.shape == (1,)}
        looped = tuple(dict.fromkeys(a.axis for a in layout.loops if a.shape > (1,)))
        stack = (*single, *looped)
        held = held - set(stack)
        if not {a.axis for a in (*heads, *features)} <= held:
            raise _Refused("a loop goes over a part of an axis of its parameter")
        own = [axis for axis in range(len(shape)) if axis not in stack]
        # What an index takes comes first, then the heads, then a head's features.
        wide = {a.axis for a in features if len(a.at) > 4} - {a.axis for a in heads}
        order = sorted(held & {a.axis for a in (*heads, *features)}, key=lambda axis: (axis in wide, axis))
        found = _runs(shape, order, heads, features)
        if found is None:
            raise _Refused("its heads do not lie one after the other in the parameter")
        return Span(
            leaf,
            len(own),
            tuple(own.index(a) - len(own) for a in order),
            *found,
            factor,
            stack,
            tuple(single.values()),
        )

    def _probe(self) -> Probe:
        walk, logits = self.walk, self.attention.logits
        places = walk.graph.variables_of(logits.value)
        added = {} if logits.raw is None else walk.graph.variables_of(logits.raw[0])
        custom = {place: sum(s.kind.startswith("custom_") for s in place) for place in places}
        place = min(places, key=lambda place: (custom[place], place not in added, len(place)))
        if any(step.kind in ("while", "cond") for step in place):
            raise _Refused("it is inside of a branch, or of a loop of unknown length, which has no gradient")
        if logits.raw is not None:  # logits and mask, or a bias as ALiBi's
            if place not in added:
                raise _Refused(
                    "something is added to its logits in a function that does not return them without it"
                )
            raw, seen = logits.raw[1], logits.seen
            if raw.moved(seen.shape, lambda x: reshaped(x, raw.shape, seen.shape)) != seen:
                raise _Refused("something is added to its logits before their axes change order")
        return Probe(place, places[place], raw=added.get(place), unit=logits.unit)


def _runs(
    shape: Sequence[int], axes: Sequence[int], heads: Sequence[Run], features: Sequence[Run]
) -> tuple[int, int, int, tuple[int, int]] | None:
    """Entries, start, size and span of the heads on the flattened `axes`; None where they are no such runs."""
    weight = {axis: math.prod(shape[x] for x in axes[k + 1 :]) for k, axis in enumerate(axes)}
    total = math.prod(shape[axis] for axis in axes)

    def positions(atoms: Sequence[Run]) -> np.ndarray:
        found = np.zeros(1, int)
        for a in atoms:
            found = (found[:, None] + a.positions.reshape(-1) * weight[a.axis]).reshape(-1)
        return found

    first, inside = positions(heads), np.sort(positions(features))
    count, width = len(first), len(inside)
    run = int(first[1] - first[0]) if count > 1 else total
    if (np.diff(first) != run).any() or (np.diff(inside) != 1).any() or run <= 0:
        return None
    base = int(first[0] + inside[0])
    start = base - base % run if base % run + width <= run else base
    if start + count * run > total:
        return None
    return count, start, count * run, (base - start, base - start + width)
