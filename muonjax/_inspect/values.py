"""What is known of an array while a function is followed: which parameters and products it is made of.

In `q, k, v = jnp.split(x @ p["qkv"], 3, -1)` the parameter is a `ParameterView` of the product's operand. The product
with it is a `Product`, and its result holds one `Projection` of this product. The split gives three of it, each with
the region of its columns; a region that is used separately is a part, a matrix of its own. What softmax takes is
`Logits`. A value may be a sum, so it may hold several views, projections and logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from muonjax._inspect.layout import UNORDERED, Layout, Region, Run, merged, whole

# What is done with a parameter; "alone": without data, as in a penalty.
Kind: TypeAlias = Literal["product", "looked up", "unknown", "alone", "other"]
MULTIPLIED = "multiplied entry by entry"
ADDED = "added"
PRODUCT_OF_PARAMETERS = "a product of parameters"
# Operations entry by entry that are linear in all their operands together.
CHOICES = ("select_n", "join")
SUMS = ("add", "sub", "add_any", "complex", *CHOICES)

# What a value depends on, as bits; those of products are higher. A number in the program depends on nothing. What is
# made of parameters and went through a `stop_gradient` is frozen.
DATA, NOISE, PARAMETER, FROZEN, OF_PRODUCTS = 1, 2, 4, 8, 16

# Where entries go; None if nothing of the origin is left.
Move: TypeAlias = Callable[[Layout], Layout | None]


class ParameterView(NamedTuple):
    """A parameter seen along the axes of an array, perhaps after structural operations."""

    leaf: int
    layout: Layout
    # Axes of the leaf over which products with other parameters sum.
    inner: tuple[tuple[Run, ...], ...] = ()
    noisy: bool = False  # multiplied by random numbers


class Use(NamedTuple):
    """One thing that is done with a parameter; axes are those of the parameter."""

    kind: Kind
    what: str  # in words
    node: int
    view: ParameterView
    rows: tuple[Run, ...] = ()
    columns: tuple[Run, ...] = ()
    batch: tuple[Run, ...] = ()
    activation: int = -1  # the activation that it is multiplied with
    groups: int = 1  # of a convolution
    is_depthwise: bool = False  # each group of one feature
    is_patch: bool = False  # of windows that do not overlap
    product: Any = None  # if it is one, what becomes of it: a `Product`


@dataclasses.dataclass(eq=False, slots=True)
class Product:
    """What becomes of an activation's product with one parameter; axes are those of the parameter."""

    bit: int
    use: Any = None  # its `Use`
    added_up: set[Run] = dataclasses.field(default_factory=set)  # afterwards
    # Columns that the same einsum of several operands sums over later. In which order it multiplies depends on sizes.
    contracted: set[Run] = dataclasses.field(default_factory=set)
    # Axes that are batches in a product with another parameter.
    batches: set[Run] = dataclasses.field(default_factory=set)
    # Batches of a product of two activations, each with the part in which it counts heads.
    heads: set[tuple[Run, Region]] = dataclasses.field(default_factory=set)
    # The parts that are used separately.
    parts: set[Region] = dataclasses.field(default_factory=set)
    # Columns that are mixed while others stay unmixed, as by a norm of each head: what is taken.
    mixed: set[Layout] = dataclasses.field(default_factory=set)
    is_mixture: bool = False  # of features with a router's weights, perhaps of experts


class Projection(NamedTuple):
    """What is left of one product with a parameter: its axes as axes of that parameter."""

    product: Product
    layout: Layout
    biases: tuple[ParameterView, ...] = ()  # parameters that were added since then
    nonlinear_at: int = -1  # the first operation that does not commute with scaling the parameter
    unmixed: bool = True  # no operation yet that mixes its columns: it may still be cut into parts

    @property
    def linear(self) -> bool:
        return self.nonlinear_at < 0


class Addend(NamedTuple):
    """An array that was added to logits, a mask or a bias."""

    value: int
    node: int  # the operation
    sign: int = 1


class Logits(NamedTuple):
    """What is left of the product of two projections: attention logits and what softmax makes of them."""

    product: int  # the operation
    layout: Layout  # the axes as axes of the product's result
    stage: str = "logits"  # "largest": their maximum; "weights": after the exponential
    value: int = -1  # the logits that enter softmax, scaled and masked
    raw: int = -1  # the logits before data or constants were added, if any were
    # Axes of the product along which a subtracted maximum differs.
    shifted: frozenset[int] | None = None
    lost: int = -1  # the first result that is something else: more is added, or scaled after it was
    added: tuple[Addend, ...] = ()
    unit: float = 1.0  # of these logits, in those of exp: ln 2 for exp2


class AxisFact(NamedTuple):
    """What is known of some axes of an array, as a layout that has runs along these alone.

    "counts": it counts 0, 1, 2, ... along one; "one hot": it is one for a single index along one; "input": they are
    those of an argument of the function; "repeats": it differs along all but those that only repeat it; "columns": they
    are those that a matrix gives which does not train.
    """

    what: str
    layout: Layout
    product: int = -1  # of "columns": the operation


class Value(NamedTuple):
    """One array."""

    depends_on: int = 0
    views: tuple[ParameterView, ...] = ()
    projections: tuple[Projection, ...] = ()
    logits: tuple[Logits, ...] = ()
    facts: tuple[AxisFact, ...] = ()
    # `scores`: the last product of two activations that it is made of, if it was not multiplied by a parameter since.
    # `weights`: the last such product whose exponential was taken.
    scores: int = -1
    weights: int = -1
    # The last operation without a rule: what it gives may be indices, one hot, or windows of an argument.
    no_rule: int = -1

    @property
    def is_weight(self) -> bool:
        """Made of parameters, perhaps with constants and random numbers, without data."""
        return bool(self.depends_on & PARAMETER) and not self.depends_on & DATA

    @property
    def is_activation(self) -> bool:
        """Made of parameters and data."""
        return bool(self.depends_on & PARAMETER and self.depends_on & DATA)

    @property
    def without_gradient(self) -> Value:
        """After a `stop_gradient`. It keeps its logits: softmax subtracts a maximum without gradient."""
        depends_on = self.depends_on
        if depends_on & PARAMETER:
            depends_on = depends_on - PARAMETER | FROZEN
        return self._replace(depends_on=depends_on, views=(), projections=(), scores=-1, weights=-1)

    def map(self, move: Move) -> Value:
        """After an operation that only moves entries."""
        if not (self.projections or self.views or self.logits or self.facts):
            return self
        return self._replace(
            views=move_each(self.views, move),
            projections=move_each(self.projections, move),
            logits=move_each(self.logits, move),
            facts=move_each(self.facts, move),
        )

    def repeated(
        self, old: Sequence[int], sources: Sequence[int | None], shape: Sequence[int]
    ) -> Value:
        """Axis i is the axis `sources[i]`, or a new one along which entries repeat."""
        return self.repeating(old).map(lambda layout: layout.pick(tuple(sources), shape))

    def repeating(self, shape: Sequence[int]) -> Value:
        """Before axes are added along which entries repeat."""
        if not self.depends_on or any(m.what == "repeats" for m in self.facts):
            return self
        return self._replace(facts=(*self.facts, AxisFact("repeats", whole(tuple(shape)))))

    def axes(self, what: str) -> tuple[int, ...]:
        """The axes along which it is one hot, or counts, or repeats itself."""
        axes: list[int] = []
        for fact in self.facts:
            if fact.what == what:
                varying, shape = fact.layout.varying, fact.layout.shape
                rest = {k for k, n in enumerate(shape) if n > 1 and k not in varying}
                axes += sorted(rest if what == "repeats" else varying)
        return tuple(axes)


class Operand:
    """One operand of a product: its value, and which of its axes are summed over, are batches, are given."""

    def __init__(
        self, value: Value, array: int, rank: int, summed: Sequence[int], batch: Sequence[int]
    ):
        self.value, self.array = value, array
        self.summed, self.batch = tuple(summed), tuple(batch)
        self.free = tuple(a for a in range(rank) if a not in self.summed and a not in self.batch)
        # For each axis of the product, the axis of this operand that it comes from, if any.
        self.sources: Sequence[int | None] = ()
        self.shape: tuple[int, ...] = ()  # of the product

    def along(self, layout: Layout) -> Layout:
        """The axes of the product in place of those of this operand."""
        return layout.pick(tuple(self.sources), self.shape)

    @property
    def aligned(self) -> Value:
        """Its value along the axes of the product."""
        return self.value.map(self.along)

    @property
    def added_up(self) -> Value:
        """The same, with all that it sums over added up."""
        return self.value.map(lambda layout: self.along(layout.add_up(self.summed)))

    @property
    def is_parameter(self) -> bool:
        """Whether it is made of parameters alone. One that is repeated for each example is a learned input.

        Each of two factors of a matrix repeats along the axis of the other.
        """
        views = self.value.views
        varying = frozenset().union(*(t.layout.varying for t in views))
        shape = views[0].layout.shape if views else ()
        repeats = any(n > 1 and k not in varying for k, n in enumerate(shape))
        return self.value.is_weight and not repeats

    @property
    def is_matrix(self) -> bool:
        """Whether a parameter in it has summed and given axes, so that this is a product by a matrix."""
        return any(self.rows(t) and self.columns(t) for t in self.value.views)

    def rows(self, t: ParameterView) -> tuple[Run, ...]:
        """The axes of a parameter in it over which the product sums."""
        return t.layout.runs_along(self.summed) or (t.inner[0] if t.inner else ())

    def columns(self, t: ParameterView) -> tuple[Run, ...]:
        """Those that it gives; of one of several parameters multiplied by each other, the axis next to its neighbor."""
        if columns := t.layout.runs_along(self.free):
            return columns
        between = t.inner if t.layout.runs_along(self.summed) else t.inner[1:]
        return between[-1] if between else ()


def move_each(items: Sequence[Any], move: Move) -> tuple[Any, ...]:
    """Each with another layout; those of which nothing is left, or known, are left out."""
    moved = []
    for x in items:
        layout = move(x.layout)
        if layout is None or (isinstance(x, AxisFact) and UNORDERED in layout.loops):
            continue
        x = x._replace(layout=layout)
        if isinstance(x, Projection):
            x = x._replace(biases=move_each(x.biases, move))
        moved.append(x)
    return tuple(moved)


def dependent(values: Iterable[Value]) -> Value:
    """A value that depends on all of these, in a way that is not followed."""
    depends_on, scores, weights, no_rule = 0, -1, -1, -1
    for v in values:
        depends_on |= v.depends_on
        scores = max(scores, v.scores)
        weights = max(weights, v.weights)
        no_rule = max(no_rule, v.no_rule)
    return Value(depends_on, scores=scores, weights=weights, no_rule=no_rule)


def alike(projections: Sequence[Projection]) -> bool:
    """Whether these are the same part of one product, or parts after the same function."""
    return (
        len({m.layout for m in projections}) == 1
        or len({(m.nonlinear_at, m.unmixed) for m in projections}) == 1
    )


def all_projections(values: Iterable[Value]) -> tuple[Projection, ...]:
    """The projections in a sum or a concatenation: parts of one product count once."""
    by_product = grouped((m.product, m) for v in values for m in v.projections)
    return tuple(_united(projections) for projections in by_product.values())


def _united(projections: Sequence[Projection]) -> Projection:
    if len(projections) == 1:
        return projections[0]
    biases = []
    for views in grouped((t.leaf, t) for m in projections for t in m.biases).values():
        layout = merged(tuple(t.layout for t in views))
        biases.append(views[0]._replace(layout=layout))
    return Projection(
        product=projections[0].product,
        layout=merged(tuple(m.layout for m in projections)),
        biases=tuple(biases),
        nonlinear_at=next((m.nonlinear_at for m in projections if not m.linear), -1),
        unmixed=alike(projections) and all(m.unmixed for m in projections),
    )


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The second of each pair, by the first."""
    groups: dict[Any, list[Any]] = {}
    for key, x in pairs:
        groups.setdefault(key, []).append(x)
    return groups
