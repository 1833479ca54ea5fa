"""From softmax(Q Kᵀ) V to the parameters that a clip scales, and to the place where the logits are."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from muonjax._program.layout import PLACED, Atom, Layout, Shard, joined, other, overlap
from muonjax._program.report import Probe
from muonjax._program.values import Image, Side, Use
from muonjax._program.walk import Attention, Walk


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
            why = f"it can't be followed from its queries and keys to its values: {walk.graph.line(at)}"
            found[i, -1] = Call(walk.graph.line(i), problem=why)
    one, uses = defaultdict(list), defaultdict(list)
    for (product, _), call in found.items():
        one[call.spans].append((product, call))
    for use in walk.uses.values():
        if use.kind in ("product", "added", "multiplied", "looked up"):
            uses[use.term.leaf].append(use)
    return [_unless_used_elsewhere(walk, call, one[call.spans], uses) for _, call in sorted(found.items())]


def _unless_used_elsewhere(
    walk: Walk, call: Call, one: Sequence[tuple[int, Call]], uses: Mapping[int, Sequence[Use]]
) -> Call:
    """A clip may change nothing else: what it scales reaches only the calls of `one` attention, with their products."""
    if not call.spans:
        return call
    images = [m for _, other in one for m in other.images]
    biases = {walk.uses[t.added, t.leaf, 0] for m in images for t in m.biases}
    mine, products = biases.union(m.product.use for m in images), {product for product, _ in one}
    parts = ((m, *part) for m in call.images for part in m.product.parts)
    beyond = [
        ("projection", i) for m, part, i in parts if i not in products and overlap(part, m.layout.region)
    ]
    beyond += [
        ("projection" if own.product else "bias", use.node)
        for own in mine
        for use in uses[own.term.leaf]
        if use not in mine and any(itertools.starmap(overlap, itertools.product(own.regions, use.regions)))
    ]
    if not beyond:
        return call
    what, i = min(beyond, key=lambda found: found[1])
    why = f"its {what} is used for something else too: {walk.graph.line(i)}"
    return call._replace(spans=(), probe=None, problem=why)


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
        # Axes of a parameter out of which queries and keys take different entries: they count these, and no layers.
        taken = {
            (image.product.use.term.leaf, a.axis, a.start)
            for operand in (left, right)
            for image in operand.value.images
            for a in image.layout.loops
            if a.size == 1
        }
        axes = [x[:2] for x in taken]
        self.selecting = {axis for axis in axes if axes.count(axis) > 1}

    def heads(self, operand: Side, layout: Layout) -> dict[int, tuple[Atom, ...]]:
        """The runs of a parameter along the axes of the product that softmax does not normalize, in its order."""
        found = enumerate(operand.along(layout).axes)
        runs = {d: tuple(a for a in atoms if a.axis >= 0) for d, atoms in found if d not in self.normalized}
        found = [(d, atoms) for d, atoms in runs.items() if atoms]
        return dict(sorted(found, key=lambda entry: [(a.axis, -a.stride) for a in entry[1]]))

    def call(self, line: str) -> Call:
        logits = self.attention.logits
        if logits.problem:
            raise _Refused(f"{logits.problem[0]}: {self._line(logits.problem[1])}")
        for operand, name in ((self.query, "queries"), (self.key, "keys")):
            for image in operand.value.images:
                if image.after is not None:
                    raise _Refused(f"its {name} are {image.after[0]}: {self._line(image.after[1])}")
                for term in (image.product.use.term, *image.biases):
                    if term.after is not None:
                        where = self._line(term.after[1])
                        raise _Refused(f"a parameter of its {name} {term.after[0]} before: {where}")
                for layout in (image.layout, *(bias.layout for bias in image.biases)):
                    if layout.is_reordered:
                        raise _Refused(f"its {name} are in another order than the parameter's")
                    if any(a.axis < 0 for a in layout.loops):
                        raise _Refused(
                            "its loop takes layers in another order than a parameter has, or of several"
                        )
                if any(image.layout.is_placed(d) for d in (*operand.batch, *operand.given)):
                    raise _Refused(f"heads of its {name} are put together from several products")
        own, shared = self._split_keys()
        own = [] if any(map(self._is_read_in_turns, own)) else own
        queries = list(self._spans(self.query, self.query.value.images, "query" if own else "rotary", shared))
        keys = list(self._spans(self.key, own, "key", {}))
        if any(_share(q, k) for q in queries for k in keys):
            raise _Refused("its queries and keys are one projection, whose factor would count twice")
        spans = (*queries, *keys)
        layers = {tuple(self.shapes[s.leaf][a] for a in s.stack) for s in spans}
        for q, k in itertools.product(queries[:1], keys[:1]):
            sizes = [s.span[1] - s.span[0] for s in (q, k)]
            if q.entries % k.entries or (q.factor == "query" and len(set(sizes)) > 1):
                counts = f"{q.entries} of {sizes[0]} features, its keys {k.entries} of {sizes[1]}"
                raise _Refused(f"its queries have heads that can't be told from those of its keys: {counts}")
        for differ, why in (
            ({s.entries for s in queries}, "its queries have several numbers of heads"),
            ({s.entries for s in keys if s.factor == "key"}, "its keys have several numbers of heads"),
            (layers, "its queries and keys are in different stacks of layers"),
            ({s.index for s in spans}, "its queries and keys are of different layers of a stack"),
        ):
            if len(differ) > 1:
                raise _Refused(why)
        first = queries[0]
        spans = tuple(s._replace(index=()) for s in spans)
        images = (*self.query.value.images, *own)
        return Call(line, spans, self._probe(first), layers.pop(), first.index, first.entries, images=images)

    def _line(self, i: int) -> str:
        return "" if i < 0 else self.walk.graph.line(i)

    def _split_keys(self) -> tuple[list[Image], dict[tuple[int, int], Image]]:
        """Keys of the heads' own; and those that all heads share, by the features where they stand."""
        heads = {d for image in self.query.value.images for d in self.heads(self.query, image.layout)}
        values = {(image.product, image.layout.region) for image in self.attention.values.value.images}
        own, shared = [], {}
        for image in self.key.value.images:
            alone = heads and heads.isdisjoint(self.heads(self.key, image.layout))
            place = self._place(image)
            if (image.product, image.layout.region) in values:
                continue
            if alone and place is not None:
                shared[place] = image
            elif alone and len(self.key.value.images) > 1:
                raise _Refused("some of its keys are shared by all heads")
            else:
                own.append(image)
        return own, shared

    def _place(self, image: Image) -> tuple[int, int] | None:
        """Where in the sum over features an image stands that was put together with others."""
        (axis, *more) = self.key.summed
        atoms = image.layout.axes[axis]
        if more or not atoms or atoms[0].axis != PLACED:
            return None
        return atoms[0].start, atoms[0].start + math.prod(a.size for a in atoms[1:])

    def _is_read_in_turns(self, key: Image) -> bool:
        """Whether neighbouring heads of queries read different heads of keys, and are no group that shares one."""
        query = self.query.value.images[0].layout
        counted = []
        for operand, layout in ((self.query, query), (self.key, key.layout)):
            runs = [a for d in self.heads(self.query, query) for a in operand.along(layout).axes[d]]
            outside = itertools.takewhile(lambda a: a.axis < 0, runs)
            counted.append(math.prod(a.size for a in outside) if any(a.axis >= 0 for a in runs) else 1)
        return counted[1] > counted[0]

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
        heads = [a for atoms in self.heads(operand, layout).values() for a in atoms if a.axis in held]
        heads.sort(key=lambda a: (a.axis, -a.stride))
        features = [a for a in (*layout.atoms(operand.summed), *layout.taken) if a.axis in held]
        for shard in layout.shards:
            every = _of_all_devices([*heads, *features], shard)
            heads, features = every[: len(heads)], every[len(heads) :]
        chosen = [a for a in layout.loops if a.size == 1 and (leaf, a.axis) in self.selecting]
        features, held = [*features, *chosen], held | {a.axis for a in chosen}
        single = {a.axis: a.start * a.stride for a in layout.loops if a.size == 1 and a not in chosen}
        looped = tuple(dict.fromkeys(a.axis for a in layout.loops if a.size > 1))
        stack = (*single, *looped)
        held = held - set(stack)
        if any(math.prod(a.size for a in layout.loops if a.axis == axis) != shape[axis] for axis in looped):
            raise _Refused("only some of the layers in a stack are used")
        own = [axis for axis in range(len(shape)) if axis not in stack]
        order = sorted(
            held & {a.axis for a in (*heads, *features)}, key=lambda x: _outermost(x, heads, features)
        )
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

    def _probe(self, query: Span) -> Probe:
        walk, logits = self.walk, self.attention.logits
        places = walk.graph.variables_of(logits.value)
        raw = {} if logits.raw is None else walk.graph.variables_of(logits.raw[0])
        custom = {place: sum(s.kind.startswith("custom_") for s in place) for place in places}
        place = min(places, key=lambda place: (custom[place], place not in raw, len(place)))
        if logits.raw is not None:  # logits and mask, or a bias as ALiBi's
            if place not in raw:
                raise _Refused(
                    "something is added to its logits in a function that does not return them without it"
                )
            if _row_major(logits.raw[1]) != _row_major(logits.seen):
                raise _Refused("something is added to its logits before their axes change order")
        is_layer = [query.leaf in walk.layers[place[: n + 1]] for n in range(len(place))]
        if any(atoms and atoms[0].axis == PLACED for atoms in logits.seen.axes):
            raise _Refused("its logits are changed after others were put beside them")
        image = self.query.value.images[0]
        if sum(is_layer) != sum(a.size > 1 for a in image.layout.loops):
            raise _Refused("which layer an iteration of its loop is can't be told")
        axis = [k for k, atoms in enumerate(logits.seen.axes) if {a.axis for a in atoms} & self.normalized]
        found = self.heads(self.query, image.layout)
        count = math.prod(a.size for atoms in found.values() for a in atoms)
        if count * math.prod(s.parts for s in image.layout.shards) % query.entries or count > query.entries:
            raise _Refused("its heads are no columns of the projection of its queries")
        heads = list(found)
        axes = logits.seen.axes
        counted = {
            k: mine for k, atoms in enumerate(axes) if (mine := [a for a in joined(atoms) if a.axis in found])
        }
        kept = sorted(counted, key=lambda k: heads.index(counted[k][0].axis))
        atoms = [a for k in kept for a in counted[k]]
        around = [self._around(image.layout, joined(axes[k]), found) for k in kept]
        if len(axis) != 1 or [a.axis for a in atoms] != heads or not all(a.is_whole for a in atoms):
            raise _Refused("its logits are reshaped before softmax")
        mesh_axes = {shard.axis: shard.mesh_axes for shard in image.layout.shards}
        of_heads = [mesh_axes.get(found[counted[k][0].axis][0].axis, ()) for k in kept]
        path = (
            step._replace(layer=layer, sharded=(*[()] * sum(is_layer[n + 1 :]), *of_heads))
            for n, (step, layer) in enumerate(zip(place, is_layer, strict=True))
        )
        return Probe(
            tuple(path), places[place], axis[0], tuple(kept), raw.get(place), tuple(around), logits.unit
        )

    def _around(self, layout: Layout, atoms: Sequence[Atom], heads: Container[int]) -> tuple[int, ...]:
        """Along an axis of the logits: entries outside of the heads, as of a batch, heads, and entries inside."""
        along = self.query.along(layout)
        runs = [run for a in atoms for run in (along.axes[a.axis] if a.axis in heads else other(a.size))]
        where = [k for k, run in enumerate(runs) if run.axis >= 0]
        first, stop = where[0], where[-1] + 1
        if len(where) < stop - first:
            raise _Refused("its heads have other entries between them")
        return tuple(
            math.prod(r.size for r in part) for part in (runs[:first], runs[first:stop], runs[stop:])
        )


def _share(q: Span, k: Span) -> bool:
    """Whether two runs of positions of a parameter may have some in common."""
    if (q.leaf, q.index) != (k.leaf, k.index):
        return False
    apart = q.start >= k.start + k.size or k.start >= q.start + q.size
    return q.axes != k.axes or not (apart or (q[:4] == k[:4] and q.span != k.span))


def _row_major(layout: Layout) -> tuple[Atom, ...]:
    """The order of all entries, which a reshape leaves as it is."""
    return joined([a for atoms in layout.axes for a in joined(atoms)])


def _of_all_devices(atoms: Sequence[Atom], shard: Shard) -> list[Atom]:
    """The runs with the outermost one along a sharded axis as long as it is on all devices together."""
    first = max((a for a in atoms if a.axis == shard.axis), key=lambda a: a.stride, default=None)
    return [a._replace(size=a.size * shard.parts, of=a.of * shard.parts) if a is first else a for a in atoms]


def _outermost(axis: int, heads: Sequence[Atom], features: Sequence[Atom]) -> tuple[int, int]:
    """What an index takes comes first, then the heads, then a head's features."""
    if any(a.axis == axis for a in heads):
        return 1, axis
    return (0 if all(a.size == 1 for a in features if a.axis == axis) else 2), axis


def _runs(
    shape: Sequence[int], axes: Sequence[int], heads: Sequence[Atom], features: Sequence[Atom]
) -> tuple[int, int, int, tuple[int, int]] | None:
    """Entries, start, size and span of the heads on the flattened `axes`; None where they are no such runs."""
    weight = {axis: math.prod(shape[x] for x in axes[k + 1 :]) for k, axis in enumerate(axes)}
    total = math.prod(shape[axis] for axis in axes)

    def positions(atoms: Sequence[Atom]) -> np.ndarray:
        found = np.zeros(1, int)
        for a in atoms:
            steps = (a.start + np.arange(a.size)) * a.stride * weight[a.axis]
            found = (found[:, None] + steps).reshape(-1)
        return found

    first, inside = positions(heads), np.sort(positions(features))
    count, width = len(first), len(inside)
    run = int(first[1] - first[0]) if count > 1 else total
    if (np.diff(first) != run).any() or (np.diff(inside) != 1).any() or run <= 0:
        return None
    base = int(first[0] + inside[0])
    if count == 1:
        return 1, base, width, (0, width)
    start = base - base % run if base % run + width <= run else base
    if start + count * run > total:
        return None
    return count, start, count * run, (base - start, base - start + width)
