"""What is known of an array while a function is followed: which parameters and products it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from muonjax._program.layout import Atom, Layout, merged

# What a value depends on. A number that is written in the program depends on nothing.
DATA, NOISE, PARAMETER = 1, 2, 4

_MOST = 6  # images that are followed through one value: a residual stream is the sum of all layers


class Term(NamedTuple):
    """A parameter seen along the axes of an array, perhaps after structural operations."""

    leaf: int
    layout: Layout
    inner: tuple[tuple[Atom, ...], ...] = ()  # axes of the leaf over which products with other parameters sum
    made: int = -1  # the last of these products
    noisy: bool = False  # multiplied by random numbers
    looked: tuple[int, ...] = ()  # the operations that looked up a part of it by data


class Image(NamedTuple):
    """What is left of one product with a parameter: its axes as axes of that parameter."""

    product: tuple[int, int]  # operation, number of the term
    layout: Layout
    linear: bool = True  # no operation since then but those that commute with scaling the parameter
    biases: tuple[Term, ...] = ()  # parameters that were added since then
    after: tuple[str, int] | None = None  # the first operation that does not commute: what, and its number

    def map(self, change: Callable[[Layout], Layout | None]) -> Image | None:
        """After an operation that only moves entries; None if it leaves all of this out."""
        layout = change(self.layout)
        moved = [(t, change(t.layout)) for t in self.biases]
        biases = tuple(t._replace(layout=y) for t, y in moved if y is not None)
        return None if layout is None else self._replace(layout=layout, biases=biases)


class Logits(NamedTuple):
    """What is left of the product of two images: attention logits and what softmax makes of them."""

    product: int
    layout: Layout  # the axes as axes of the product's result
    stage: str = "logits"  # "largest": their maximum; "weights": after the exponential
    value: int = -1  # the logits that enter softmax, masked and scaled
    seen: Layout = Layout(())  # their layout
    problem: tuple[str, int] | None = None  # why scaling query and key does not scale them: reason, operation
    raw: tuple[int, Layout] | None = None  # the logits before data or constants were added, if any were


class Value(NamedTuple):
    """One array."""

    kind: int = 0
    terms: tuple[Term, ...] = ()
    images: tuple[Image, ...] = ()
    logits: tuple[Logits, ...] = ()
    before: int = 0  # the products that it depends on, as bits
    one_hot: tuple[int, ...] | None = None  # the axes along which it is one for a single index
    counts: int | None = None  # the axis along which it counts 0, 1, 2, ...
    inputs: tuple[Image, ...] = ()  # arguments of the function, as long as entries only move
    repeats: frozenset[int] = frozenset()  # axes along which it was repeated just before

    @property
    def is_weight(self) -> bool:
        """Made of parameters alone."""
        return bool(self.kind & PARAMETER) and not self.kind & DATA

    def map(self, change: Callable[[Layout], Layout | None]) -> Value:
        """After an operation that only moves entries; None drops what it leaves out."""
        if not (self.images or self.terms or self.logits or self.inputs):
            return self.opaque()

        def moved(items: Any) -> Any:
            layouts = [change(x.layout) for x in items]
            return tuple(x._replace(layout=y) for x, y in zip(items, layouts, strict=True) if y is not None)

        images = tuple(y for x in self.images if (y := x.map(change)) is not None)
        return Value(
            self.kind, moved(self.terms), images, moved(self.logits), self.before, inputs=moved(self.inputs)
        )

    def opaque(self) -> Value:
        """After an operation of which nothing is known but what it depends on."""
        return Value(self.kind, before=self.before)


def dependent(values: Iterable[Value]) -> Value:
    """A value that depends on all of these, in a way that is not followed."""
    kind = before = 0
    for v in values:
        kind |= v.kind
        before |= v.before
    return Value(kind, before=before)


def summed(values: Iterable[Value]) -> tuple[Image, ...]:
    """The images in a sum: parts of one product count once."""
    return _grouped(values, lambda layouts, _: layouts[0] if len(set(layouts)) == 1 else merged(layouts))


def concatenated(values: Sequence[Value], axis: int, sizes: Sequence[int]) -> tuple[Image, ...]:
    """The images in a concatenation along `axis`; slices of one product that are put together again are whole."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def join(layouts: list[Layout], where: list[int]) -> Layout:
        if len(where) == len(sizes):
            return merged(layouts, axis, sizes)
        if len(where) == 1:
            return layouts[0].place(axis, starts[where[0]], sum(sizes))
        return merged(layouts, axis, sizes, rejoin=False)

    return _grouped(values, join)


def _grouped(values: Iterable[Value], join: Callable[[list[Layout], list[int]], Layout]) -> tuple[Image, ...]:
    groups: dict[tuple[int, int], list[tuple[int, Image]]] = {}
    for i, value in enumerate(values):
        for image in value.images:
            groups.setdefault(image.product, []).append((i, image))
    found = []
    for product, pairs in groups.items():
        images = [image for _, image in pairs]
        after = next((x.after for x in images if x.after), None)
        layout = join([x.layout for x in images], [i for i, _ in pairs])
        biases: dict[int, list[tuple[int, Term]]] = {}
        for i, x in pairs:
            for term in x.biases:
                biases.setdefault(term.leaf, []).append((i, term))
        joined = tuple(
            terms[0][1]._replace(layout=join([t.layout for _, t in terms], [i for i, _ in terms]))
            for terms in biases.values()
        )
        found.append(Image(product, layout, all(x.linear for x in images), joined, after))
    if len(found) > _MOST:
        found = [
            x._replace(linear=False, after=x.after or ("sums of too many projections", -1)) for x in found
        ]
    return tuple(found[-_MOST:])
