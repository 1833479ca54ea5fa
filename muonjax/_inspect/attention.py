"""From softmax(Q Kᵀ) V to the parameters that a clip scales, and to the place where the logits are."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from muonjax._clip.scale import Scale, first_positions
from muonjax._inspect import softmax
from muonjax._inspect.certificate import Certificate
from muonjax._inspect.findings import Walk
from muonjax._inspect.layout import HOLE, UNORDERED, Layout, Run
from muonjax._inspect.measure import Probe
from muonjax._inspect.moves import reshaped
from muonjax._inspect.values import Image, Side, Term, grouped


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


class Call(NamedTuple):
    """One attention: what to scale, and where its largest logits are; or why it can't be clipped."""

    line: str
    spans: tuple[Span, ...] = ()
    probe: Probe | None = None
    layers: tuple[int, ...] = ()
    heads: int = 1
    problem: str = ""
    terms: tuple[Term, ...] = ()  # the parameters of its queries and keys
    # What a clip may scale, the best first: both sides of the product, or the queries alone.
    proposals: tuple[tuple[Span, ...], ...] = ()
    doubt: str = ""  # what can't be told of its masks, for a warning


class _Refused(Exception):
    """Why this attention can't be clipped."""


def attentions(walk: Walk) -> list[list[Call]]:
    """The calls of each attention, in the order of the program."""
    found = {i: _call(walk, i) for i in walk.attentions}
    for i, images in walk.opaque.items():
        node = walk.nodes[i]
        name = str(node.params.get("name") or node.name)
        why = f"{name!r} is a call whose logits can't be seen; measure them with muonjax.max_logits"
        found[i] = Call(walk.graph.line(i), problem=why, terms=_terms(images))
    for i, at in walk.softmaxes.items():
        if i not in walk.attentions:
            why = f"its queries, keys and values can't all be followed to parameters: {walk.graph.line(at)}"
            found[i] = Call(walk.graph.line(i), problem=why)
    each = sorted(found.items())
    # What scales the queries of a call scales those of every other call that takes them.
    groups = grouped(
        (call.proposals[-1:] or call.terms or call.line, (at, call)) for at, call in each
    )
    trained = [
        group for group in groups.values() if any(at in walk.graph.trained for at, _ in group)
    ]
    return [_proved(walk, *zip(*group, strict=True)) for group in trained]


def _terms(images: Iterable[Image]) -> tuple[Term, ...]:
    return tuple(image.product.use.term for image in images)


def _proved(walk: Walk, places: Sequence[int], group: Sequence[Call]) -> list[Call]:
    """The calls of one attention, with the first proposal that scales the logits of each of its heads alone."""
    result = list(group)
    for spans in group[0].proposals:
        if all(spans in call.proposals for call in group):
            result = _tried(walk, places, group, spans)
        if result[0].spans:
            break
    return result


def _tried(
    walk: Walk, places: Sequence[int], group: Sequence[Call], spans: tuple[Span, ...]
) -> list[Call]:
    """The calls with these spans, or why a clip of them would not scale the logits of each head alone."""
    random = np.random.default_rng(0)
    heads, layers = (
        spans[0].heads,
        tuple(walk.shapes[spans[0].leaf][axis] for axis in spans[0].stack),
    )
    logs = 2.0 * random.integers(1, 1 << 40, (*layers, heads))
    groups = next((s.heads for s in spans if s.scale.factor == "key"), heads)
    keys = logs.reshape(*layers, groups, -1).min(-1) / 2
    queries = logs - np.repeat(keys, heads // groups, -1)
    of_factor = {"rotary": logs, "key": keys, "query": queries}
    logits = [walk.attentions[at][0][0] for at in places]
    values = [x.value if x.raw < 0 else x.raw for x in logits]
    certificate = Certificate(walk, [call.probe for call in group if call.probe], values)
    for leaf, touched in grouped((s.leaf, s) for s in spans).items():
        certificate.touch(
            leaf, touched[0].stack, [(s.scale, of_factor[s.scale.factor]) for s in touched]
        )
    i = certificate.failure()
    probes = [
        call.probe and certificate.located(call.probe, value, x.value, logs)
        for value, x, call in zip(values, logits, group, strict=True)
    ]
    if i is None and all(probes):
        exact = {"spans": spans, "layers": layers, "heads": heads}
        return [
            call._replace(probe=probe, **exact) for call, probe in zip(group, probes, strict=True)
        ]
    why = "the heads of its logits are not those of its projections"
    if any((table[0] == 0).any() for table in certificate.at.values()):
        why = "some of its logits, as of a sink or of padding, are not made of the queries that a clip scales"
    if i is not None:
        why = _not_alone(walk, i)
    return [call._replace(problem=why) for call in group]


def _not_alone(walk: Walk, i: int) -> str:
    if walk.nodes[i].passes and walk.nodes[i].name == "add_any":
        return f"the function takes derivatives of it, which a clip would change too: {walk.graph.line(i)}"
    return f"a clip would not scale its logits alone: {walk.graph.line(i)} ({walk.nodes[i].name})"


def _call(walk: Walk, product: int) -> Call:
    finder, line = _Finder(walk, product), walk.graph.line(product)
    try:
        return finder.call(line)
    except _Refused as refused:
        terms = _terms((*finder.query.value.images, *finder.key.value.images))
        return Call(line, problem=str(refused), terms=terms)


class _Finder:
    """The two operands of one product of queries and keys."""

    def __init__(self, walk: Walk, product: int):
        self.walk, self.shapes = walk, walk.shapes
        self.logits, self.normalized = walk.attentions[product][0]
        left, right = walk.pairs[product]
        is_query = left.sources[max(self.normalized)] is None
        self.query, self.key = (left, right) if is_query else (right, left)

    def heads(self, operand: Side, layout: Layout) -> dict[int, int]:
        """Axes of the product that softmax does not normalize, and the operand's, if parameters differ along them."""
        axes = {
            d: k
            for d, k in enumerate(operand.sources)
            if k is not None and d not in self.normalized
        }
        return {d: k for d, k in axes.items() if layout.atoms([k])}

    def call(self, line: str) -> Call:
        walk, logits, product = self.walk, self.logits, self.logits.product
        if product in walk.unseen:
            raise _Refused(_not_alone(walk, walk.unseen[product]))
        if (
            len({(x._replace(layout=logits.layout), keys) for x, keys in walk.attentions[product]})
            > 1
        ):
            raise _Refused("several softmaxes take its logits")
        if logits.lost >= 0:
            i = walk.graph.producer[logits.lost]
            if len(softmax.products([walk.values[x] for x in walk.nodes[i].inputs])) > 1:
                raise _Refused(f"its logits are made of several products: {walk.graph.line(i)}")
            raise _Refused(_not_alone(walk, i))
        masks = softmax.masks_in(walk.graph, logits.added)
        if masks.problem:
            raise _Refused(masks.problem)
        if logits.shifted and logits.shifted & self.normalized:
            raise _Refused("the maximum subtracted from its logits is not taken over its keys")
        proposals, why = [], ""
        for keys, shared in (self._split_keys(), ([], [])):
            try:
                proposals.append(self._proposal(keys, shared))
            except _Refused as refused:
                why = str(refused)
        if not proposals:
            raise _Refused(why)
        terms = _terms((*self.query.value.images, *self._split_keys()[0]))
        each = tuple(dict.fromkeys(proposals))
        probe = self._probe(masks.hidden)
        return Call(line, probe=probe, terms=terms, proposals=each, doubt=masks.doubt)

    def _proposal(
        self, keys: Sequence[Image], shared: Sequence[tuple[int, int]]
    ) -> tuple[Span, ...]:
        """What to scale if the keys of these images take a part of the factor."""
        images = self.query.value.images
        self._check_order(self.query, images, "queries")
        self._check_order(self.key, keys, "keys")
        queries = list(self._spans(self.query, images, "query" if keys else "rotary", shared))
        spans = (*queries, *self._spans(self.key, keys, "key"))
        layers = {tuple(self.shapes[s.leaf][a] for a in s.stack) for s in spans}
        entries = [{s.heads for s in part} for part in (queries, spans[len(queries) :])]
        first = {
            s.scale.factor: s for s in reversed(spans)
        }  # of several parts, which others may follow
        features = {first[factor].features for factor in ("query", "key") if factor in first}
        several = max(map(len, (*entries, layers, features))) > 1
        if several or any(queries[0].heads % s.heads for s in spans):
            raise _Refused(
                "its queries and keys are cut into heads, features or layers in several ways"
            )
        return spans

    def _check_order(self, operand: Side, images: Sequence[Image], name: str) -> None:
        # Nothing tells queries of one head, put together from several products, from several heads of one key.
        several = operand is self.query and len(images) > 1
        for image in images:
            layouts = [image.layout, *(bias.layout for bias in image.biases)]
            if any(UNORDERED in x.loops for x in layouts):
                raise _Refused(f"its {name} are in another order than the parameter's")
            if operand is self.query and not image.layout.varying:  # made of all columns
                why = "the heads of its queries can't be told apart"
                if not image.linear:
                    line = self.walk.graph.line(image.bent_by)
                    why = f"a function of all heads, as a norm, makes its queries: {line}"
                raise _Refused(why)
            if image.layout.placed(operand.batch) or (
                several and not self.heads(operand, image.layout)
            ):
                raise _Refused(f"heads of its {name} are put together from several products")

    def _split_keys(self) -> tuple[list[Image], list[tuple[int, int]]]:
        """Keys that each head has for itself; and which features those fill that all heads share."""
        heads = {
            d for image in self.query.value.images for d in self.heads(self.query, image.layout)
        }
        own, shared = [], []
        for image in self.key.value.images:
            alone = heads and heads.isdisjoint(self.heads(self.key, image.layout))
            place = self._place(self.key, image)
            if alone and place is not None:
                shared.append(place)
            else:
                own.append(image)
        return own, shared

    def _place(self, operand: Side, image: Image) -> tuple[int, int] | None:
        """Where in the sum over features an image is that was concatenated with others."""
        (axis, *more) = operand.summed
        placed = image.layout.placed([axis])
        if more or not placed:
            return None
        there = np.argwhere(placed[0].positions < HOLE)[:, axis]
        return int(there.min()), int(there.max()) + 1

    def _spans(
        self,
        operand: Side,
        images: Sequence[Image],
        factor: str,
        shared: Sequence[tuple[int, int]] = (),
    ) -> Iterator[Span]:
        for image in images:
            use, (start, stop) = image.product.use, self._place(operand, image) or (0, HOLE)
            parts = ((max(first, start), min(last, stop)) for first, last in shared)
            here = [(first - start, last - start) for first, last in parts if first < last]
            for leaf, layout in [
                (use.term.leaf, image.layout),
                *((t.leaf, t.layout) for t in image.biases),
            ]:
                yield from self._apart(self._span(leaf, layout, operand, factor), here)

    def _apart(self, span: Span, shared: Sequence[tuple[int, int]]) -> Iterator[Span]:
        """The features of a query that meet the heads' own keys, and those that meet shared ones."""
        (first, last), factor = span.scale.span, span.scale.factor
        inside = [first, *sorted({edge + first for place in shared for edge in place}), last]
        for start, stop in itertools.pairwise(inside):
            if start < stop:
                is_shared = any(a + first <= start and stop <= b + first for a, b in shared)
                name = "rotary" if is_shared else factor
                yield span._replace(
                    scale=dataclasses.replace(span.scale, span=(start, stop), factor=name)
                )

    def _span(self, leaf: int, layout: Layout, operand: Side, factor: str) -> Span:
        shape = self.shapes[leaf]
        rest, heads = layout.split(self.heads(operand, layout).values())
        rest, features = rest.split(operand.summed)
        heads = sorted(heads, key=lambda a: (a.axis, -a.stride))
        features = (*features, *rest.taken, *(run for run in rest.runs if run.axis >= 0))
        stack = tuple(dict.fromkeys(a.axis for a in layout.loops))
        held = {a.axis for a in (*heads, *features)}
        if not held.isdisjoint(stack):
            raise _Refused("a loop goes over a part of an axis of its parameter")
        own = [axis for axis in range(len(shape)) if axis not in stack]
        # What an index takes comes first, then the heads, then a head's features.
        wide = {a.axis for a in features if a.positions.size > 1} - {a.axis for a in heads}
        order = sorted(held, key=lambda axis: (axis in wide, axis))
        found = _runs(shape, order, heads, features)
        if found is None:
            raise _Refused("its heads do not lie one after the other in the parameter")
        axes = tuple(own.index(a) - len(own) for a in order)
        scale = Scale(path="", rank=len(own), axes=axes, factor=factor, **found)
        return Span(leaf, scale, stack)

    def _probe(self, hidden: float) -> Probe:
        walk, logits = self.walk, self.logits
        places = walk.graph.variables_of(logits.value)
        added = {} if logits.raw < 0 else walk.graph.variables_of(logits.raw)
        own = walk.nodes[walk.graph.producer[logits.value]].place
        custom = {place: sum(s.kind.startswith("custom_") for s in place) for place in places}
        place = min(places, key=lambda place: (custom[place], place not in added, place != own))
        if any(step.kind == "while" for step in place):
            raise _Refused("it is inside of a loop of unknown length, which has no gradient")
        if logits.raw >= 0:  # logits and mask, or a bias as ALiBi's
            if place not in added:
                raise _Refused(
                    "something is added to its logits in a function that does not return them without it"
                )
            raw, seen = (walk.values[x].logits[0].layout for x in (logits.raw, logits.value))
            if raw.moved(seen.shape, lambda x: reshaped(x, raw.shape, seen.shape)) != seen:
                raise _Refused("something is added to its logits before their axes change order")
        return Probe(place, places[place], raw=added.get(place), hidden=hidden, unit=logits.unit)


def _runs(
    shape: Sequence[int], axes: Sequence[int], heads: Sequence[Run], features: Sequence[Run]
) -> dict[str, Any] | None:
    """Where the heads are on the flattened `axes`, in the words of `Scale`; None where they are no such runs."""
    weight = {axis: math.prod(shape[x] for x in axes[k + 1 :]) for k, axis in enumerate(axes)}
    total = math.prod(shape[axis] for axis in axes)

    def positions(atoms: Sequence[Run]) -> np.ndarray:
        found = np.zeros(1, int)
        for a in atoms:
            found = (found[:, None] + a.positions.reshape(-1) * weight[a.axis]).reshape(-1)
        return found

    first, inside = positions(heads), np.sort(positions(features))
    entries, width = len(first), len(inside)
    steps = np.diff(first)
    run = int(steps[0]) if entries > 1 else total
    ends = np.flatnonzero(steps != run)  # of a group of heads, before a gap
    groups = entries // (int(ends[0]) + 1) if len(ends) else 1
    gap = int(steps[ends[0]]) - run if len(ends) else 0
    if (np.diff(inside) != 1).any() or run <= 0 or gap < 0:
        return None
    base = int(first[0] + inside[0])
    start = base - base % run if base % run + width <= run else base
    size = entries * run + (groups - 1) * gap
    span = (base - start, base - start + width)
    if entries % groups:
        return None
    places = {
        "entries": entries,
        "start": start,
        "size": size,
        "span": span,
        "groups": groups,
        "gap": gap,
    }
    expected = first_positions(entries, run, start=base - inside[0], groups=groups, gap=gap)
    is_right = start + size <= total and np.array_equal(expected, first)
    return places if is_right else None
