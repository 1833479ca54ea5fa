"""What is known of an array while a function is followed:
which parameters and products it is made of.

In `q, k, v = jnp.split(x @ p["qkv"], 3, -1)` the parameter is a `ParameterView` of the product's
operand. The product with it is a `Product`, and its result holds one `Projection` of this product.
The split gives three of it, each with the region of its columns; a region that is used separately
is a part, a matrix of its own. What softmax takes is `Logits`. A value may be a sum, so it may hold
several views, projections and logits.

Say that the parameter is [d, 3 * heads * 16]. In the query projection, reshaped to
[batch, length, heads, 16], the layout says that axis 2 takes steps of 16 along axis 1 of the
parameter from 0 on, and axis 3 steps of 1: two runs. Its region is the first third of axis 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from muonjax._inspect.layouts import Layout, Region, Run, merged, other_axes, whole

# What is done with a parameter; "alone": without data, as in a penalty.
Kind: TypeAlias = Literal["product", "looked up", "unknown", "alone", "other"]
MULTIPLIED = "multiplied entry by entry"
ADDED = "added"
PRODUCT_OF_PARAMETERS = "a product of parameters"
# Operations entry by entry that are linear in all their operands together.
CHOICES = ("select_n", "join")
SUMS = ("add", "sub", "add_any", "complex", *CHOICES)

# What a value depends on, as bits; those of products are higher. A number in the program depends on
# nothing. What is made of parameters and went through a `stop_gradient` is frozen.
DATA, NOISE, PARAMETER, FROZEN, OF_PRODUCTS = 1, 2, 4, 8, 16

# Where entries go; None if nothing of the origin is left.
Move: TypeAlias = Callable[[Layout], Layout | None]


class ParameterView(NamedTuple):
    """A parameter, or a part of it, in an array: which entries lie along which axes of the
    array."""

    leaf: int  # the number of the parameter
    layout: Layout
    # For a factor of a product of parameters: the axes of the leaf that meet the factors next to
    # it, from left to right. In a[i, k] b[k, j] c[j, l] the factor a has one entry, for k,
    # and b has two, for k and for j.
    inner: tuple[tuple[Run, ...], ...] = ()


class Kernel(NamedTuple):
    """What is different in a convolution."""

    groups: int = 1
    is_depthwise: bool = False  # each group of one feature
    is_patch: bool = False  # of windows that do not overlap


class Use(NamedTuple):
    """One thing that is done with a parameter; axes are those of the parameter."""

    kind: Kind
    what: str  # in words, or the name of the operation; "" if the kind says it
    node: int  # the number of the operation
    view: ParameterView
    rows: tuple[
        Run, ...
    ] = ()  # a product sums over them, an index of a look-up chooses along them
    columns: tuple[Run, ...] = ()  # a product gives them
    batch: tuple[Run, ...] = ()  # they count matrices: batch axes, loops, experts
    activation: int = -1  # the activation that it is multiplied with
    kernel: Kernel = Kernel()
    product: Any = None  # if it is one, what becomes of it: a `Product`

    @property
    def is_matrix(self) -> bool:
        """Whether the product sums over axes of the parameter and gives others:
        not one by a vector."""
        return bool(self.rows and self.columns) and not self.kernel.is_depthwise


class Product:
    """What becomes of an activation's product with one parameter;
    axes are those of the parameter."""

    def __init__(self, bit: int):
        self.bit = bit  # a power of two, which stands for it in `Value.depends_on`
        self.use: Any = None  # its `Use`
        # Axes over which its result is summed, as h after "hbd,hdf->hbf" in an output projection.
        # Then h has rows, and counts no matrices.
        self.added_up: set[Run] = set()
        # Columns that another operation takes one by one: e of this result y[b, e, f] if a gate
        # [b, e, 1] multiplies it, if "bef,efd->bed" has another matrix for each e, or if
        # one_hot(expert) chooses e. If `heads` has them too they stay columns; otherwise they are
        # experts, and count matrices (`matrix_axes._rows_and_columns`).
        self.batches: set[Run] = set()
        # Columns that count heads: batches of a product of activations, such as queries and keys,
        # each with the part of the columns that has these heads, as the queries of a fused kernel.
        self.heads: set[tuple[Run, Region]] = set()
        # The parts that are used separately, each perhaps a matrix of its own.
        self.parts: set[Region] = set()
        # Whether labels choose one of its columns, as in a cross-entropy: it may be an output head.
        self.is_read_by_labels = False
        # Whether an operation mixed all columns in groups, each for itself, as a norm of each head
        # does. If there are parts then, the parameter is left to names: a group may lie across two.
        self.has_mixed_groups = False

    @property
    def experts(self) -> set[Run]:
        """Columns that count experts: those that are taken one by one, and count no heads."""
        return self.batches - {run for run, _ in self.heads}


class Projection(NamedTuple):
    """What is left of one product with a parameter: its axes as axes of that parameter."""

    product: Product
    layout: Layout
    biases: tuple[ParameterView, ...] = ()  # parameters that were added since then
    # The first operation that does not commute with scaling the parameter,
    # of a sum the last of its parts' operations.
    nonlinear_at: int = -1
    # No nonlinear operation yet puts several columns together: it may still be cut into parts.
    unmixed: bool = True

    @property
    def is_linear(self) -> bool:
        """Whether scaling the parameter scales it."""
        return self.nonlinear_at < 0

    @property
    def view(self) -> ParameterView:
        """The parameter, as its product takes it."""
        return self.product.use.view


class Addend(NamedTuple):
    """An array that was added to logits, a mask or a bias."""

    value: int
    node: int  # the operation
    sign: int  # -1 if it was subtracted


class AxisFact(NamedTuple):
    """What is known of some axes of an array, as a layout that has runs along these alone.

    "counts": it counts 0, 1, 2, ... along one; "one hot": along one it is a number that
    repeats, but for one index or a few that data choose; "input": they are those of an argument of
    the function; "repeats": it differs along all but those that only repeat it.
    """

    what: str
    layout: Layout


class Logits(NamedTuple):
    """What is left of the product of two projections:
    attention logits and what softmax makes of them."""

    product: int  # the operation
    layout: Layout  # the axes as axes of the product's result
    # "weights": after the exponential. "maximum": the largest logits, one for each query. "sum": a
    # sum or an extremum of the weights or of such sums, or the weights times frozen values.
    stage: str = "logits"
    # The array of the logits so far: in the end what enters softmax, scaled and masked.
    value: int = -1
    # The array just before the first bias, or what may be one, was added; -1 if none was.
    # What is a mask for sure is in neither of these two.
    raw: int = -1
    added: tuple[Addend, ...] = ()
    is_masked: bool = False  # some are replaced, or hidden by what was added
    # The axes of the array along which a number differs that was subtracted, such as their maximum.
    shifts: tuple[AxisFact, ...] = ()
    # The axes of the product over which the weights were normalized, as by a division by their sum.
    normalized: frozenset[int] = frozenset()
    is_divided: bool = False  # the weights, by a sum of them
    # The array of exponentials that weights, or a sum of them, are made of; -1 if another array of
    # the model came in, or if more was done to the sum than to add a number or to bound it by one.
    exponentials: int = -1

    @property
    def is_biased(self) -> bool:
        """Whether a bias, or what may be one, was added to the logits."""
        return self.raw >= 0


class Value(NamedTuple):
    """What is known of one array."""

    depends_on: int = 0  # the bits at the top of this file, and those of products
    views: tuple[ParameterView, ...] = ()
    projections: tuple[Projection, ...] = ()
    logits: tuple[Logits, ...] = ()
    facts: tuple[AxisFact, ...] = ()
    # The logits of the weights in weights @ values. They stay where entries are only moved, as by a
    # transpose, and where a sum of the weights divides; all else ends them.
    mixed_by: tuple[Logits, ...] = ()
    # The last product of two activations that it is made of, perhaps queries and keys;
    # -1 if there is none, or if a parameter multiplied it since.
    scores: int = -1
    # The last such product whose exponential it is made of, perhaps softmax's weights;
    # -1 if there is none.
    exponential_of: int = -1

    @property
    def is_weight(self) -> bool:
        """Made of parameters, perhaps with constants and random numbers, without data."""
        return bool(self.depends_on & PARAMETER) and not self.depends_on & DATA

    @property
    def is_activation(self) -> bool:
        """Made of parameters and data."""
        return bool(self.depends_on & PARAMETER and self.depends_on & DATA)

    @property
    def is_of_model(self) -> bool:
        """Whether it depends on parameters, perhaps frozen ones: a clip may change it."""
        return bool(self.depends_on & (PARAMETER | FROZEN))

    @property
    def varying(self) -> frozenset[int]:
        """The axes along which the parameters in it differ."""
        return frozenset().union(*(view.layout.varying for view in self.views))

    @property
    def without_gradient(self) -> Value:
        """The value after a `stop_gradient`: it depends on FROZEN in place of PARAMETER.

        Its parameters and projections end here, as nothing trains through it. Its facts and logits
        stay, because softmax subtracts the maximum of the logits without gradient. So does
        `exponential_of`, for an array that has lost its logits, or loses them later: it may be the
        sum that divides softmax's weights, which end then (`follow_logits.normalized`).
        """
        depends_on = self.depends_on
        if depends_on & PARAMETER:
            depends_on = (depends_on - PARAMETER) | FROZEN
        return self._replace(depends_on=depends_on, views=(), projections=())

    @property
    def stage(self) -> str:
        """That of its logits, which all have the same; "" if it has none."""
        return self.logits[0].stage if self.logits else ""

    def map(self, move: Move) -> Value:
        """After an operation that only moves entries."""
        return self._replace(
            views=move_each(self.views, move),
            projections=move_each(self.projections, move),
            logits=move_each(self.logits, move),
            facts=move_each(self.facts, move),
            mixed_by=move_each(self.mixed_by, move),
        )

    def repeated(
        self, old: Sequence[int], sources: Sequence[int | None], shape: Sequence[int]
    ) -> Value:
        """An array of this shape, whose axis i is the axis `sources[i]` of this one,
        of shape `old`.

        Along an axis without a source the entries repeat.
        """
        return self.repeating(old).map(
            lambda layout: layout.pick(tuple(sources), shape)
        )

    def repeating(self, shape: Sequence[int]) -> Value:
        """The value of this shape, before axes are added along which its entries repeat."""
        if not self.depends_on or any(fact.what == "repeats" for fact in self.facts):
            return self
        return self._replace(
            facts=(*self.facts, AxisFact("repeats", whole(tuple(shape))))
        )

    def axes(self, what: str) -> tuple[int, ...]:
        """The axes along which the value is "one hot", "counts", or "repeats"."""
        axes: set[int] = set()
        for fact in self.facts:
            if fact.what == what:
                layout = fact.layout
                long = {axis for axis, n in enumerate(layout.shape) if n > 1}
                # The layout of "repeats" varies along the axes along which the value does not
                # repeat.
                axes |= long - layout.varying if what == "repeats" else layout.varying
        return tuple(sorted(axes))


@dataclasses.dataclass(eq=False)
class Operand:
    """One operand of a product, an array whose axes are summed over, or batches, or free.

    The product has the batch axes and the free axes of both operands. In `bqd,bkd->bqk` the left
    one has the batch axis 0, the free axis 1 and the summed axis 2, and `sources` (0, 1, None).
    Whoever makes the operands of a product sets `sources` once both are known.
    """

    value: Value
    array: int
    shape: tuple[int, ...]
    product_shape: tuple[int, ...]
    summed: Sequence[int]
    batch: Sequence[int]
    # For each axis of the product, the axis of this operand that it comes from, if any.
    sources: Sequence[int | None] = ()
    kernel: Kernel = dataclasses.field(default_factory=Kernel)

    @property
    def free(self) -> tuple[int, ...]:
        """The axes that are neither summed over nor batches."""
        return tuple(other_axes(len(self.shape), (*self.summed, *self.batch)))

    def is_query(self, keys: Iterable[int]) -> bool:
        """Whether it is the queries of a product whose axes `keys` count keys:
        these come from the other operand.

        After the shift of Transformer-XL, of "bqhd,khd->bhqk", both operands have some of these
        axes. The queries have all others, and the positions have no axis of examples.
        """
        of_this = [self.sources[axis] is not None for axis in keys]
        has_all_others = self.sources.count(None) == 1
        return not any(of_this) or (has_all_others and not all(of_this))

    def along(self, layout: Layout) -> Layout:
        """A layout of this operand, with the axes of the product in place of the operand's."""
        return layout.pick(tuple(self.sources), self.product_shape)

    @property
    def added_up(self) -> Value:
        """Its value along the axes of the product, with all that the product sums over added up."""
        return self.value.map(lambda layout: self.along(layout.add_up(self.summed)))

    @property
    def is_parameter(self) -> bool:
        """Whether it is made of parameters alone, and differs along all of its axes.

        Learned queries that are repeated along the batch don't. a[:, None] * b, of two vectors,
        does, though each vector repeats along one axis.
        """
        if not self.value.is_weight:
            return False
        if not self.value.views:  # not followed, such as a weight without its mean
            return True
        long = {axis for axis, n in enumerate(self.shape) if n > 1}
        return long <= self.value.varying

    @property
    def is_matrix(self) -> bool:
        """Whether a parameter in it has rows and columns, so that this is a product by a matrix."""
        return any(self.rows(view) and self.columns(view) for view in self.value.views)

    def rows(self, view: ParameterView) -> tuple[Run, ...]:
        """The axes of a parameter in it over which the product sums."""
        rows = view.layout.runs_along(self.summed)
        # x @ (a @ b) sums over an axis of a. The rows of b are those that meet a.
        if not rows and view.inner:
            return view.inner[0]
        return rows

    def columns(self, view: ParameterView) -> tuple[Run, ...]:
        """The axes of a parameter in it that the product gives.

        In a product of parameters, w @ a @ b, the columns of a are those that meet the rows of b.
        """
        columns = view.layout.runs_along(self.free)
        if columns:
            return columns
        # The first factor has rows that the product sums over. Those of any other are its first
        # entry in `inner`, which meets the factor before it.
        has_rows = bool(view.layout.runs_along(self.summed))
        between = view.inner if has_rows else view.inner[1:]
        return between[-1] if between else ()


def move_each(items: Sequence[Any], move: Move) -> tuple[Any, ...]:
    """Views, projections, logits or facts after an operation that moves entries,
    each with the layout `move(layout)`.

    An item of which no entry is left is dropped: k after a slice of q from concatenate([q, k]).
    """
    moved = []
    for item in items:
        layout = move(item.layout)
        if layout is None:
            continue
        item = item._replace(layout=layout)
        # The biases that were added to a projection lie in the same array, and `shifts` says along
        # which of its axes a number differs that was subtracted from logits.
        if isinstance(item, Projection):
            item = item._replace(biases=move_each(item.biases, move))
        if isinstance(item, Logits):
            item = item._replace(shifts=move_each(item.shifts, move))
        moved.append(item)
    return tuple(moved)


def dependent(values: Iterable[Value]) -> Value:
    """A value that depends on all of these, in a way that is not followed."""
    depends_on = 0
    scores = -1
    exponential_of = -1
    for value in values:
        depends_on |= value.depends_on
        scores = max(scores, value.scores)
        exponential_of = max(exponential_of, value.exponential_of)
    return Value(depends_on, scores=scores, exponential_of=exponential_of)


def is_match(factors: Iterable[tuple[Value, Sequence[int]]]) -> bool:
    """Whether the sum of a product over these axes of each factor multiplies the columns of layers
    by each other.

    sum_d a[b, d] c[b, d] matches two towers example by example. Two factors that depend on the same
    products are one tower, and the sum may be its squared norm.
    """
    towers = set()
    for value, axes in factors:
        towers.add(value.depends_on)
        if not any(part.layout.runs_along(axes) for part in value.projections):
            return False
    return len(towers) > 1


def used_in_one_way(projections: Sequence[Projection]) -> bool:
    """Whether these projections of one product are the same columns,
    or nothing nonlinear tells them from each other.

    After `jnp.tanh(q[:, :4])` and `q[:, 4:]` the first is nonlinear and the second is not:
    they are used differently.
    """
    layouts = {projection.layout for projection in projections}
    functions = {
        (projection.nonlinear_at, projection.unmixed) for projection in projections
    }
    return len(layouts) == 1 or len(functions) == 1


def parts_of_products(values: Iterable[Value]) -> list[list[Projection]]:
    """The projections in these values, those of one product together."""
    of_products = grouped(
        (projection.product, projection)
        for value in values
        for projection in value.projections
    )
    return list(of_products.values())


def united(parts: Sequence[Projection]) -> Projection:
    """One projection in place of several of one product,
    which a sum adds or a concatenation puts side by side.

    It has the biases of all parts, and is nonlinear if any part is. From here on the columns of all
    parts can only be recorded together, as one part. So it stays unmixed only if all are, and are
    the same columns or went through the same functions (`used_in_one_way`).
    """
    if len(parts) == 1:
        return parts[0]
    biases = grouped((bias.leaf, bias) for part in parts for bias in part.biases)
    return _with_all_entries(parts)._replace(
        biases=tuple(map(_with_all_entries, biases.values())),
        nonlinear_at=max(part.nonlinear_at for part in parts),
        unmixed=used_in_one_way(parts) and all(part.unmixed for part in parts),
    )


def _with_all_entries(parts: Sequence[Any]) -> Any:
    """The first of these parts of one parameter or product,
    with the layout of their sum or concatenation."""
    layout = merged(tuple(part.layout for part in parts))
    return parts[0]._replace(layout=layout)


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The second of each pair, by the first."""
    groups: dict[Any, list[Any]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups
