"""The proof that a clip is exact: the logits of each head get its factor,
and no loss changes otherwise.

Each array is followed with a table of what the clip does to its entries: the logarithm of the
factor, and the first and the last position of the parameters that the entry is made of. Along an
axis on which nothing depends a table has one entry. Heads get factors drawn at random, so that no
two sums of logarithms are equal by accident. Logits of several heads that were taken for one have
different positions. What is zero has the logarithm NaN, for it fits every factor. An operation that
has no rule here, or whose operands do not fit, refuses the clip.

A clip of two heads, in a query kernel [16, 64],
by factors with the logarithms a and b begins with the table [3, 1, 64]

    logarithms       a  a  ...  a   b   b  ...  b
    first positions  0  1  ...  31  32  33 ...  63
    last positions   the same, with a minus

and at the logits [batch, head, query, key] it has to be [3, 1, 2, 1, 1] with the logarithms a, b,
if the keys are not scaled, and the positions 0 to 31 and 32 to 63:
the sum over features took the least and the largest.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from muonjax._clip.scale import PlacedScale
from muonjax._inspect.graph import Node, Place
from muonjax._inspect.layouts import MOST, NotFollowed, other_axes
from muonjax._inspect.measure import Probe
from muonjax._inspect.move_rules import (
    RESIZED,
    SAME,
    axes_after,
    moved_by,
    rounds_coarsely,
)
from muonjax._inspect.possible_numbers import MASKED, is_mask
from muonjax._inspect.records import Records
from muonjax._inspect.values import CHOICES, SUMS, grouped

# [3, *loops, *axes of the array]: logarithms, first positions, and last positions with a minus, so
# that a sum of entries has the least of both.
Table: TypeAlias = np.ndarray
# These three numbers for an entry that no clip changes, and for one that is zero.
_UNTOUCHED = [0.0, np.inf, np.inf]
_ZERO = [np.nan, np.inf, np.inf]
# Operations that leave the table of their operand as it is: casts, exchanges among devices, and
# those that cut an array into shards for them.
_KEEPS_TABLE = frozenset(f"{SAME} {RESIZED}".split())
# Operations that may take several arrays which a clip changes, besides products.
_OF_SEVERAL = ("mul", "div", "max", "concatenate", *SUMS)


def _product(a: Table, b: Table, sign: int = 1) -> Table:
    """The table of a product of two arrays entry by entry; of the quotient, with the sign -1.

    log(a b^±1) = log(a) ± log(b), made of the positions of both; zero is made of none.
    """
    if math.prod(np.broadcast_shapes(a.shape, b.shape)) > MOST:
        raise NotFollowed
    logarithms = a[:1] + sign * b[:1]
    positions = np.minimum(a[1:], b[1:])
    positions = np.where(np.isnan(logarithms), np.inf, positions)
    return np.concatenate([logarithms, positions])


def _with_one_entry(table: Table, axes: tuple[int, ...]) -> Table:
    """The table with one entry along these axes: the largest logarithm there,
    and the least of both positions.

    It is the table of the sum over these axes, if all entries but zeros have one factor;
    the caller has to see to that.
    """
    logarithms = np.fmax.reduce(table[:1], axes, keepdims=True)  # it skips NaN
    positions = np.minimum.reduce(table[1:], axes, keepdims=True)
    return np.concatenate([logarithms, positions])


def _reduced_if_equal(table: Table, axes: tuple[int, ...]) -> Table:
    """The table of a sum or a maximum over these axes,
    along which all entries but zeros must have equal factors."""
    one_entry = _with_one_entry(table, axes)
    # A sum of entries with different factors is no multiple of the sum. Zeros, NaN here,
    # compare as false.
    if (table[0] < one_entry[0]).any():
        raise NotFollowed
    return one_entry.squeeze(axes)


class Certificate:
    """One pass over the operations that a clip changes, up to the logits."""

    def __init__(
        self,
        records: Records,
        probes: Sequence[Probe],
        logits: Sequence[int],
        spans: Sequence[PlacedScale],
    ):
        """A certificate of one clip.

        Args:
          records: What is known of the function.
          probes: Where the logits are measured: `path` has the steps to their body from the
            outside, of which some are scans.
          logits: The number of each one's array: before the first bias, or what may be one, is
            added, or else what softmax takes. The certificate ends there: what softmax makes of
            them may change.
          spans: What the clip scales, all by the factors of the same heads and layers.
        """
        self.records, self.graph, self.logits = records, records.graph, logits
        # For each scan around the logits its axis in a table, by the place of its body: inside of a
        # scan over four layers a table is [3, 4, *axes of the array]. Several probes may be in one
        # scan.
        self.loops: dict[Place, int] = {}
        for probe in probes:
            for depth, step in enumerate(probe.path, start=1):
                if step.kind == "scan":
                    place = probe.path[:depth]
                    self.loops.setdefault(place, 1 + len(self.loops))
        # Axis k of an array is axis first + k of its table.
        self.first = 1 + len(self.loops)
        # The table of each array that the clip changes, by the array's number. Along axis 0 it has
        # three numbers for each entry: the logarithm of its factor, and the first and the last
        # position in the parameters of what it is made of. The positions show where logits of two
        # heads were taken for those of one.
        self.tables: dict[int, Table] = {}
        # Operations that take one of these arrays, and are to be followed.
        self.pending: set[int] = set()
        # The logarithm of γ for each head of each layer, which all spans share. They are random, so
        # that no two sums of them are equal by accident, and even whole numbers: half of one is
        # whole too, for √γ, and no sum is rounded.
        shape = (*spans[0].layers, spans[0].entries)
        self.logarithms = 2.0 * np.random.default_rng(0).integers(1, 1 << 40, shape)
        # The first tables are those of the parameters. Each makes its readers pending.
        for spans_of_leaf in grouped((span.leaf, span) for span in spans).values():
            self._begin(spans_of_leaf)

    def _begin(self, spans: Sequence[PlacedScale]) -> None:
        """Makes and keeps the table of the parameter of which the clip scales these parts.

        A table has for each entry the logarithm of its factor, its first and its last position. A
        kernel [64, 2, 16] has two layers along axis 1 and four heads of four entries along the last
        axis. With logarithms [2 layers, 4 heads] its table is [3, 1, 2, 16], and [3, 1, 1, 2, 16]
        if the logits are in one scan.
        """
        # An entry of two parts is scaled twice: the logarithms of its factors are added.
        logarithms: Any = 0.0
        for span in spans:
            # Queries and keys take √γ each, or one of them γ.
            power = 1.0 if span.factor == "whole" else 0.5
            # [1, 2, 16]: one entry along axes without layers or heads, and 0 for what the span
            # leaves as it is.
            logarithms = logarithms + power * span.spread(self.logarithms, 0.0)
        # A position for each entry of `logarithms`. Logits that take only some features of a head
        # have another first or last position than those that take all. A sum over entries keeps the
        # least of both numbers, so the last positions have a minus.
        positions = np.arange(logarithms.size).reshape(logarithms.shape)
        table = np.stack([logarithms, positions, -positions])
        # What is not scaled has no position: inf. Its logarithm is 0, and those of factors are
        # above 0.
        table[1:, logarithms == 0] = np.inf
        # The parameter is outside of all scans: the axes of the loops, 1 to `first` - 1,
        # have one entry.
        table = np.expand_dims(table, tuple(range(1, self.first)))
        self._keep(self.graph.parameters[spans[0].leaf], table)

    def _keep(self, value: int, table: Table) -> None:
        """Keeps the table of an array, [3, *loops, *axes], if the clip changes the array, and makes
        the operations that read it pending, unless it is logits. Along an axis where all entries of
        the table are equal it keeps one.

        `table[0]` has the logarithms of factors, and `table[1:]` the first and the last position in
        the scaled parameters of what an entry is made of.

        Zeros, as of padded queries or of a further key, have the logarithm NaN, and take the
        numbers of the other entries: a, a, NaN become a, and a, b, NaN stay. Among logits NaN
        stays, and `located` refuses it: a zero there, as a sink has, is no logit of a head.
        """
        is_logits = value in self.logits
        # An array without entries, such as an empty slice, has nothing that a clip could change.
        if not table.size:
            return
        for axis in range(1, table.ndim):
            # The largest logarithm along the axis, without NaN, and the least positions. If all
            # have equal numbers, these are theirs.
            one_entry = _with_one_entry(table, (axis,))
            fits_all = np.isnan(table[0]) & (not is_logits)
            if (fits_all | (table == one_entry).all(0)).all():
                table = one_entry
        # One entry with the factor 1 (logarithm 0), made of nothing that is scaled (no position,
        # inf), as the values that a slice takes of a fused kernel: the clip does not change them.
        if table.ravel().tolist() == _UNTOUCHED:
            return
        self.tables[value] = table
        # At the logits the certificate ends: what reads them, such as softmax, is not followed.
        if not is_logits:
            self.pending.update(self.graph.readers[value])

    def failure(self) -> int | None:
        """Follows the clip to the logits: the first operation that it may not pass, or None.

        None says that no scalar result changes but by the logits. Whether these get the right
        factors is for `located`. `_keep` makes the readers of each array pending, but not those of
        the logits, at which the clip ends.
        """
        graph = self.graph
        while self.pending:
            # In the order of the program: the tables of all operands are there.
            operation = min(self.pending)
            self.pending.remove(operation)
            node = graph.nodes[operation]
            # Results that are thrown away may change. So may x - maximum(x) of logits x, as
            # softmax(x - c) = softmax(x): the clip comes to it where `jax.nn.softmax` masks the
            # logits once more before it takes the maximum. If anything else is subtracted,
            # `_check_readers` has refused it, where a gradient comes back to the difference.
            is_shift = node.name == "sub" and node.inputs[0] in self.logits
            if (is_shift and operation in graph.trained) or operation not in graph.live:
                continue
            # `_followed` refuses an operation with several results.
            try:
                self._keep(node.outputs[0], self._followed(node))
            except NotFollowed:
                return operation
        # An array may be returned with the clip's factors, as a parameter is; a loss may not.
        for value in graph.outputs:
            if value in self.tables and self.records.shape(value) == ():
                # Refused with the line of the operation that makes it. A parameter of one number,
                # which no operation makes, has no heads to scale, and no table.
                return graph.makers[value].index
        return None

    def _table(self, value: int, rank: int, hides: float = -np.inf) -> Table:
        """The table of an operand, with `rank` axes for those of the array:
        an axis of one entry where one is missing.

        An array that holds only 0 fits every factor, and so does one that also holds -inf, or with
        `hides` any numbers of `hides` or less, which a mask puts in the place of logits: scaled or
        not, softmax makes zero of them.
        """
        table = self.tables.get(value)
        if table is None:
            # The logarithm is NaN for zero, and 0 for what the clip does not change.
            entry = _ZERO if is_mask(self.graph, value, hides) else _UNTOUCHED
            table = np.array(entry)
        # An array that the clip doesn't change has [3], one entry for all loops and axes; a number
        # next to an array has [3, *loops].
        missing = self.first + rank - table.ndim
        return table.reshape(*table.shape, *[1] * missing)

    def _followed(self, node: Node) -> Table:
        """The table of the result of an operation.

        Raises:
          NotFollowed: The clip may not pass it.
        """
        if node.name == "dot_general":
            return self._dot(node)
        if node.name in _OF_SEVERAL:
            return self._of_several(node)
        # All others may take one array that the clip changes: their first operand, or the kernel of
        # a convolution, its second, which may make the queries.
        operand = node.inputs[1 if node.name == "conv_general_dilated" else 0]
        touched = [x for x in node.inputs if x in self.tables]
        # Refused are others that the clip changes, as what a scatter adds to the first operand; and
        # operations with several results, as top_k, since a table is that of one.
        if touched != [operand] or len(node.outputs) > 1:
            raise NotFollowed
        return self._moved(node, self.tables[operand])

    def _of_several(self, node: Node) -> Table:
        """The table of a product entry by entry, a sum, a maximum,
        a choice or a concatenation of several arrays.

        A table has three numbers for each entry: the logarithm of its factor, and the first and the
        last position that it is made of. In a product the logarithms are added, and in a quotient
        subtracted. Entries that are added, or of which one is chosen, must have equal factors,
        f a + f b = f (a + b), or be zero.
        """
        inputs, (out,) = node.inputs, node.outputs
        if node.name in CHOICES:
            # The first operand is the condition, which no clip changes: comparisons and casts to
            # whole numbers are refused.
            _, *inputs = inputs
        # If the result is logits (`values[out].logits`), what a choice puts in their place, or a
        # sum adds to them, counts as zero if it holds 0 and numbers of `MASKED` or less: softmax
        # gives these no weight, whatever their factor is. Elsewhere only 0 and -inf count as zero.
        may_mask = node.name in ("select_n", "add") and self.records.values[out].logits
        hides = MASKED if may_mask else -np.inf
        rank = len(self.records.shape(out))
        # An operand that the clip does not change has the factor 1: the logarithm 0, and NaN if all
        # of it counts as zero.
        tables = [self._table(x, rank, hides) for x in inputs]
        if node.name in ("mul", "div"):
            return _product(*tables, sign=1 if node.name == "mul" else -1)
        if node.name == "concatenate":
            return self._concatenated(node, tables)
        # Axis 0 of a table has its three numbers. The operands lie along a new axis 1, which then
        # goes as in a sum over an axis: different factors along it, but for zeros, raise
        # `NotFollowed`.
        return _reduced_if_equal(np.stack(np.broadcast_arrays(*tables), 1), (1,))

    def _concatenated(self, node: Node, tables: Sequence[Table]) -> Table:
        """The table of a concatenation of arrays with these tables.

        q [5, 8] with heads along its last axis, table [3, 1, 8], and 4 zeros, table [3, 1, 1],
        along axis 1 give [3, 1, 12]: along this axis each table gets as many entries as its array.
        """
        dimension = node.params["dimension"]
        axis = self.first + dimension
        # Along all other axes, on which a table may have one entry for all, each gets as many as
        # the longest. `take` leaves one entry along the axis of the concatenation itself.
        shape = list(
            np.broadcast_shapes(*(table.take([0], axis).shape for table in tables))
        )
        full = []
        for table, x in zip(tables, node.inputs, strict=True):
            shape[axis] = self.records.shape(x)[dimension]
            full.append(np.broadcast_to(table, shape))
        return np.concatenate(full, axis)

    def _dot(self, node: Node) -> Table:
        """The table of a product of arrays, whose terms must have equal factors along the axes that
        it sums over.

        `bqd,bkd->bqk` combines the tables [3, *loops, b, q, 1, d] and [3, *loops, b, 1, k, d] entry
        by entry: logarithms of factors are added, and of positions the least is kept. Then d goes.
        """
        sums, batches = node.params["dimension_numbers"]
        operands = []
        for x, batch, summed in zip(node.inputs, batches, sums, strict=True):
            # [3, *loops, *batch, *free, *summed]
            rank = len(self.records.shape(x))
            free = other_axes(rank, (*summed, *batch))
            order = axes_after(self.first, (*batch, *free, *summed))
            table = self._table(x, rank).transpose(*range(self.first), *order)
            operands.append(table)
        left, right = operands
        # Both get the axes of the product, and then those that it sums over. The free axes of the
        # left operand are from `start` to `middle`, those of the right one from there to `stop`.
        start = self.first + len(batches[0])
        middle = left.ndim - len(sums[0])
        stop = self.first + len(self.records.shape(node.outputs[0]))
        left = np.expand_dims(left, tuple(range(middle, stop)))
        right = np.expand_dims(right, tuple(range(start, middle)))
        terms = _product(left, right)
        return _reduced_if_equal(terms, tuple(range(stop, terms.ndim)))

    def _moved(self, node: Node, table: Table) -> Table:
        """The table of the result of an operation on one array with this table,
        [3, *loops, *axes of the array].

        It has the logarithm of each entry's factor, and the first and the last position that the
        entry is made of. Axis k of the array is axis `first` + k of the table.
        Along an axis on which nothing depends it has one entry.

        Raises:
          NotFollowed: The clip may not pass the operation.
        """
        name = node.name
        # f a + f b = f (a + b), and max(f a, f b) = f max(a, b), as no factor is below zero.
        # Different factors along the reduced axes raise `NotFollowed`.
        if name in ("reduce_sum", "reduce_max", "reduce_min"):
            axes = axes_after(self.first, node.params["axes"])
            return _reduced_if_equal(table, axes)
        # What each iteration of a scan takes of an array [iterations, ...], and what all iterations
        # make together: the axis of iterations becomes the axis of this loop in the table, or the
        # reverse. A scan without logits has no such axis: then all iterations need equal factors.
        if name in ("scan_slice", "scan_stack"):
            return self._through_scan(node, table)
        if name == "conv_general_dilated":
            # The table is that of the kernel: `_followed` refuses a clip of the activation. All of
            # its axes but that of output features are summed over: along these it needs equal
            # factors.
            return self._by_kernel(node, table)
        # Casts and exchanges among devices keep the table. Refused are casts to whole numbers and
        # to very few digits, as f times the rounded x is not the rounded f x; shards along an axis
        # on which factors differ; and an axis that is added for the devices.
        if name in _KEEPS_TABLE:
            self._check_kept(node, table)
            return table
        # What moves entries, as a transpose, moves their factors in the same way. `moved_by` raises
        # `NotFollowed` for all that it does not know, such as a tanh.
        return moved_by(self.records, node, table)

    def _check_kept(self, node: Node, table: Table) -> None:
        """Raises `NotFollowed` if a cast, or what devices exchange, may change factors.

        `table` is that of its operand: axis k of the array is axis `first` + k, with one entry if
        nothing depends on it.
        """
        # A cast to whole numbers, or to very few digits:
        # rounding f x gives other numbers than f times the rounded x.
        rounds = rounds_coarsely(self.records, node)
        if rounds or not self.graph.is_float(node.outputs[0]):
            raise NotFollowed
        # The shapes of the array before and after
        old, new = self.graph.shapes(node)
        # An untiled `all_gather` adds an axis that counts devices.
        if len(old) != len(new):
            raise NotFollowed
        # A device's shard of an array has fewer entries along an axis. If factors differ along it,
        # it isn't known which of them the shard has.
        for before, after, entries in zip(
            old, new, table.shape[self.first :], strict=True
        ):
            if before != after and entries > 1:
                raise NotFollowed

    def _by_kernel(self, node: Node, table: Table) -> Table:
        """The table of a convolution by a kernel with this table,
        in which only output features have other factors."""
        numbers = node.params["dimension_numbers"]
        # The axes of the kernel: of output features, of input features, of the window. It sums over
        # all but the first. Those of the result: of examples, of output features, of the window.
        summed = axes_after(self.first, numbers.rhs_spec[1:])
        others = other_axes(len(numbers.out_spec), numbers.out_spec[1:2])
        of_features = _reduced_if_equal(table, summed)
        return np.expand_dims(of_features, axes_after(self.first, others))

    def _through_scan(self, node: Node, table: Table) -> Table:
        """The table of what the iterations of a scan take of an array [iterations, ...]
        ("scan_slice"), or of the array that they make together ("scan_stack").

        Inside of a scan over four layers that has the logits, with axis 1 for this loop, layers
        take kernels [64, 8] of an array [4, 64, 8]: its table [3, 1, 4, 64, 8] (the three numbers
        of an entry, the loop, the array) becomes [3, 4, 64, 8]. A stack is the reverse.

        Raises:
          NotFollowed: The table differs from iteration to iteration, in factors or positions, and
            no loop of the logits is this scan: a table has no axis that could say so.
        """
        # The axis of this loop in a table, along which an array outside of it has one entry. A scan
        # without logits has none: then `first` is exchanged with itself, and all axes stay.
        loop = self.loops.get(node.params["scan"], self.first)
        # Axis `first` is the array's axis of iterations: new in a stack, and gone after a slice.
        if node.name == "scan_stack":
            return np.expand_dims(table, self.first).swapaxes(loop, self.first)
        table = table.swapaxes(loop, self.first)
        # After the exchange with a loop's axis one entry is left, but of what the loop carried out.
        if table.shape[self.first] > 1:
            raise NotFollowed
        return table.squeeze(self.first)

    def located(self, probe: Probe, logits: int) -> Probe:
        """The probe with the axes of its layers and heads, if its logits have the right factors.

        Logits [batch, 4 heads, query, key] inside of a scan over two layers have a table
        [3, 2, 1, 4, 1, 1]: the three numbers of each entry (see `Table`), the loop, and the four
        axes of the array. The probe gets the axis of four as `heads`, and the step of its path into
        the scan is marked `layer`.

        `logits` is the number of their array: before a bias is added, or else what softmax takes.

        Raises:
          NotFollowed: The logits got other factors than those of their heads.
        """
        table = self.tables.get(logits)
        # The clip does not change these logits.
        if table is None:
            raise NotFollowed
        # `loops` has the axis of each scan, by the steps of the path to its body.
        path = list(probe.path)
        for place, axis in self.loops.items():
            # All iterations have the same factors, so this scan does not go over layers.
            if table.shape[axis] == 1:
                continue
            # The factors differ from iteration to iteration, so this scan goes over layers. It has
            # to be around these logits. Logits after the scan, made of an array that it carries,
            # have this axis in their table too, but are those of the last layer alone. (An array
            # that it stacks has its layers along an axis of its own: `_through_scan`.)
            depth = len(place)
            if probe.path[:depth] != place:
                raise NotFollowed
            path[depth - 1] = path[depth - 1]._replace(layer=True)
        return probe._replace(path=tuple(path), heads=self._axes_of_heads(table))

    def _axes_of_heads(self, table: Table) -> tuple[int, ...]:
        """The axes of the logits with this table that count heads, in the order of the heads.

        Numbers of heads [[0, 2], [1, 3]] give (1, 0): a step along axis 1 goes from head 0 to
        head 2, and one along axis 0 to head 1.

        Raises:
          NotFollowed: The logits got other factors than those of their heads, or these lie in
            another order.
        """
        # [*axes of the array], with one entry along axes on which no head depends.
        head_of = self._heads_of_entries(table)
        axes = [axis for axis, size in enumerate(head_of.shape) if size > 1]
        # The longest step comes first, so that the heads follow each other.
        axes.sort(key=lambda axis: head_of.take(1, axis).min(), reverse=True)
        # The entries have to be the heads one by one, perhaps for each example: one axis of two
        # examples and three heads has 0, 1, 2, 0, 1, 2. `logarithms` [*layers, heads] says how many
        # heads there are.
        heads = np.moveaxis(head_of, axes, range(len(axes))).ravel()
        if (heads != np.arange(len(heads)) % self.logarithms.shape[-1]).any():
            raise NotFollowed
        return tuple(axes)

    def _heads_of_entries(self, table: Table) -> np.ndarray:
        """The number of the head of each entry of the logits, found by the logarithm of its factor.

        Two heads have the logarithms a and b. Logits with an axis of two examples and two heads
        have the table [3, 4, 1, 1] with a, b, a, b: it gives 0, 1, 0, 1 of the shape [4, 1, 1].

        Args:
          table: That of the logits, [3, *loops, *axes], with the axes of the array from `first` on.
            The loops are the scans around the logits; one that does not go over layers has one
            entry.

        Returns:
          The numbers, [*axes], with one entry along each axis on which no head depends. An entry
          has to be of the same head in all layers.

        Raises:
          NotFollowed: They got other factors than their heads.
        """
        layers = math.prod(table.shape[1 : self.first])
        # A column for each entry of the logits: in all layers its logarithm, then in all layers the
        # first and the last position, in the parameters that are scaled, of what it is made of.
        # Entries of one head have equal columns, of which one is left: `columns` are sorted, and
        # `column_of` says which of them each entry has. Logits of some features of a head only, or
        # of two heads that were taken for one, have the logarithm of a head and other positions:
        # then there are more columns than heads.
        columns, column_of = np.unique(
            table.reshape(3 * layers, -1), axis=1, return_inverse=True
        )
        # [layers, heads]: the drawn logarithms, of which each layer and head has its own
        expected = self.logarithms.reshape(-1, self.logarithms.shape[-1])
        # The columns are sorted by their first number: column i is that of the head `order[i]`,
        # with the i-th least logarithm in the first layer.
        order = expected[0].argsort()
        # The logarithms are the first rows. More columns than heads have another shape. A zero
        # among the logits, as of a sink, has NaN, which equals nothing.
        if not np.array_equal(columns[:layers], expected[:, order]):
            raise NotFollowed
        return order[column_of].reshape(table.shape[self.first :])
