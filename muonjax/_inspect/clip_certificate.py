"""The proof that a clip is exact: the logits of each head get its factor, and no loss changes otherwise.

Each array is followed with a table of what the clip does to its entries: the logarithm of the factor, and the first and
the last position of the parameters that the entry is made of. Along an axis on which nothing depends a table has one
entry. Heads get factors drawn at random, so that no two sums of logarithms are equal by accident. Logits of several
heads that were taken for one have different positions. What is zero has the logarithm NaN, for it fits every factor.
An operation that has no rule here, or whose operands do not fit, refuses the clip.

A clip of two heads, in a query kernel [16, 64], by factors with the logarithms a and b begins with the table [3, 1, 64]

    logarithms       a  a  ...  a   b   b  ...  b
    first positions  0  1  ...  31  32  33 ...  63
    last positions   the same, with a minus

and at the logits [batch, head, query, key] it has to be [3, 1, 2, 1, 1] with the logarithms a, b, if the keys are not
scaled, and the positions 0 to 31 and 32 to 63: the sum over features took the least and the largest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from muonjax._clip.scale import PlacedScale
from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import MOST, NotFollowed, other_axes
from muonjax._inspect.measure import Probe
from muonjax._inspect.move_rules import (
    RESIZED,
    SAME,
    axes_after,
    moved_by,
    reshaped,
    rounds_coarsely,
)
from muonjax._inspect.possible_numbers import MASKED, is_mask
from muonjax._inspect.records import Records
from muonjax._inspect.values import CHOICES

# [3, *loops, *axes of the array]: logarithms, first positions, and last positions with a minus, so that what is made of
# several entries has the least of both.
Table: TypeAlias = np.ndarray
# The three of an entry that no clip changes, and of one that is zero.
_UNTOUCHED = [0.0, np.inf, np.inf]
_ZERO = [np.nan, np.inf, np.inf]
# Operations that leave the table of their operand as it is: casts, exchanges among devices, and those that cut an array
# into shards for them.
_KEEPS_TABLE = frozenset(f"{SAME} {RESIZED}".split())
_OF_SEVERAL = "mul div add sub add_any max complex select_n join concatenate"
_SEVERAL = frozenset(_OF_SEVERAL.split())


def _product(a: Table, b: Table, sign: int = 1) -> Table:
    """The table of a product of two arrays entry by entry; of the quotient, with the sign -1.

    log(a b^±1) = log(a) ± log(b), made of the positions of both
    """
    if math.prod(np.broadcast_shapes(a.shape, b.shape)) > MOST:
        raise NotFollowed
    return np.concatenate([a[:1] + sign * b[:1], np.minimum(a[1:], b[1:])])


def _total(table: Table, axes: Collection[int]) -> Table:
    """The largest logarithm over these axes, of which one entry is left, and all positions."""
    axes = tuple(axes)
    logarithms = np.fmax.reduce(table[:1], axes, keepdims=True)  # it skips NaN
    positions = np.minimum.reduce(table[1:], axes, keepdims=True)
    return np.concatenate([logarithms, positions])


def _filled(table: Table, axes: Iterable[int]) -> Table:
    """With the others' factor for entries that are zero, along axes where all others are equal: padding."""
    for axis in axes:
        total = _total(table, [axis])
        is_zero = np.isnan(table[0])
        if (is_zero | (table == total).all(0)).all():
            table = total
    return table


def _reduced_if_equal(table: Table, axes: Collection[int]) -> Table:
    """The table of a sum or a maximum over these axes, along which all entries but zeros must have equal factors."""
    total = _total(table, axes)
    # A sum of entries with different factors is no multiple of the sum. Zeros, NaN here, compare as false.
    if (table[0] < total[0]).any():
        raise NotFollowed
    return total.squeeze(tuple(axes))


def _compact(table: Table | None) -> Table | None:
    """The table with one entry along each axis where all are equal; None where nothing is touched."""
    if table is None or not table.size:
        return None
    for axis in range(1, table.ndim):
        first = table.take([0], axis)
        if np.array_equal(table, np.broadcast_to(first, table.shape), equal_nan=True):
            table = first
    return None if table.ravel().tolist() == _UNTOUCHED else table


class Certificate:
    """One pass over the operations that a clip changes, up to the logits."""

    def __init__(
        self, records: Records, probes: Sequence[Probe], logits: Sequence[int]
    ):
        """`logits` are the values where softmax takes over, as the `probes` measure them."""
        self.records, self.graph, self.logits = records, records.graph, logits
        # After its first axis, of three, a table has an axis for each scan around the logits. An array inside of a scan
        # over four layers has a table [3, 4, *axes], which says what the clip does to it in each of them. These are the
        # places of the scans' bodies.
        self.loops: list[Any] = []
        for probe in probes:
            for depth, step in enumerate(probe.path, start=1):
                place = probe.path[:depth]
                if step.kind == "scan" and place not in self.loops:
                    self.loops.append(place)
        # Axis k of an array is axis first + k of its table.
        self.first = 1 + len(self.loops)
        # The table of each array that a clip changes, by the array's number.
        self.tables: dict[int, Table] = {}
        # The tables that arrive at the logits, which are not followed further.
        self.at: dict[int, Table] = {}

    def touch(self, spans: Sequence[PlacedScale], logarithms: np.ndarray) -> None:
        """Records the table [3, *loops, *axes] of a parameter of which a clip scales some parts.

        A kernel [64, 2, 16] has two layers along axis 1 and four heads of four entries along the last axis. With
        logarithms [2 layers, 4 heads] its table is [3, 1, 2, 16], without loops.

        Args:
          spans: Its parts, all of one parameter.
          logarithms: Those of the factors of the logits, [*layers, heads].
        """
        tables = []
        for number, span in enumerate(spans):
            # Each feature has a position: at the logits a sum over some features has another first or last position
            # than one over all. Part number k has those from k 2^40 on, which no other part has.
            shape = (span.entries, span.features)
            positions = np.arange(math.prod(shape)).reshape(shape) + float(number << 40)
            positions = np.broadcast_to(positions, (*span.layers, *shape))
            # Queries and keys take √γ each, or one of them γ.
            power = 1.0 if span.factor == "whole" else 0.5
            of_features = power * logarithms[..., None]
            # The first and the last position of an entry; the last with a minus, so that a minimum takes both.
            three = (of_features, positions, -positions)
            tables.append(np.stack(list(map(span.spread, three, _UNTOUCHED))))
        # An entry of two parts is scaled twice.
        table = functools.reduce(_product, tables)
        # The parameter is outside of all scans: the axes of the loops, 1 to `first` - 1, have one entry.
        table = _compact(np.expand_dims(table, tuple(range(1, self.first))))
        # It is None where all factors are 1.
        if table is not None:
            self.tables[self.graph.parameters[spans[0].leaf]] = table

    def failure(self) -> int | None:
        """The first operation that the clip may not pass; None if it changes the logits, and no loss in another way."""
        graph = self.graph
        pending: set[int] = set()
        for value in self.tables:
            pending.update(graph.readers[value])
        while pending:
            # In the order of the program: the tables of all operands are there.
            operation = min(pending)
            pending.remove(operation)
            if operation not in graph.live:  # its results are thrown away
                continue
            node = graph.nodes[operation]
            try:
                table = _compact(self._followed(node))
            except NotFollowed:
                return operation
            if table is None:
                continue
            (value,) = node.outputs
            # Softmax and all that follows change as the clip wants it.
            if value in self.logits:
                self.at[value] = table
            else:
                self.tables[value] = table
                pending.update(graph.readers[value])
        # An array may be returned with the clip's factors, as a parameter is; a loss may not.
        for value in graph.outputs:
            if value in self.tables and self.records.shape(value) == ():
                # No operation makes a parameter of one number: the first one stands for it.
                maker = graph.maker(value)
                return 0 if maker is None else maker.index
        return None

    def _table(self, value: int, rank: int, least: float = -np.inf) -> Table:
        """The table of an operand, with `rank` axes if it is a scalar.

        Zero fits every factor, and so does a number of `least` or less that a mask puts in the place of logits: scaled
        or not, softmax makes zero of it.
        """
        if value in self.tables:
            table = self.tables[value]
            is_scalar = table.ndim == self.first
            return table.reshape(*table.shape, *[1] * rank) if is_scalar else table
        is_zero = is_mask(self.graph, value, least)
        # One entry for the array, with the axes that it has, or the other operand has.
        rank = len(self.records.shape(value)) or rank
        shape = (3, *[1] * (len(self.loops) + rank))
        return np.reshape(_ZERO if is_zero else _UNTOUCHED, shape)

    def _followed(self, node: Node) -> Table | None:
        """The table of the result of an operation, None where nothing changes."""
        records, name = self.records, node.name
        touched = [x for x in node.inputs if x in self.tables]
        # The logits less their maximum, one number per query: softmax changes as the clip wants it, and what follows is
        # not looked at. A clip changes the maximum where `jax.nn.softmax` masks the logits once more for it (`where`).
        if name == "sub" and node.inputs[0] in self.logits:
            subtracted = records.values[node.inputs[1]].logits
            if any(x.stage == "per query" for x in subtracted):
                return None
        if name == "dot_general":
            return self._dot(node)
        if name in _SEVERAL:
            return self._of_several(node)
        # All others take one array that the clip changes: their first operand, or the kernel of a convolution, as of
        # one that makes the queries of an autoencoder.
        operand = node.inputs[1 if name == "conv_general_dilated" else 0]
        if touched != [operand] or len(node.outputs) > 1:
            raise NotFollowed
        return self._moved(node, self.tables[operand])

    def _of_several(self, node: Node) -> Table:
        """The table of a product, a sum, a choice or a concatenation of several arrays.

        Entries of a sum, or among which a choice is made, must have equal factors, (f a + f b) = f (a + b), or be zero.
        """
        inputs, (out,) = node.inputs, node.outputs
        if node.name in CHOICES:
            # No clip changes the condition: comparisons and casts to whole numbers are refused.
            _, *inputs = inputs
        # What a mask puts in the place of logits or adds to them, `MASKED` or less, counts as zero: softmax gives it no
        # weight, so that it fits every factor.
        is_masked = node.name in ("select_n", "add") and self.records.values[out].logits
        least = MASKED if is_masked else -np.inf
        rank = len(self.records.shape(out))
        tables = [self._table(x, rank, least) for x in inputs]
        if node.name in ("mul", "div"):
            left, right = tables
            return _product(left, right, sign=1 if node.name == "mul" else -1)
        if node.name == "concatenate":
            return self._concatenated(node, tables)
        return _reduced_if_equal(np.stack(np.broadcast_arrays(*tables), 1), [1])

    def _concatenated(self, node: Node, tables: Sequence[Table]) -> Table:
        """The tables one after the other, each with as many entries along this axis as its array has."""
        dimension = node.params["dimension"]
        axis = self.first + dimension
        firsts = [table.take([0], axis).shape for table in tables]
        shape = list(np.broadcast_shapes(*firsts))
        full = []
        for table, x in zip(tables, node.inputs, strict=True):
            shape[axis] = self.records.shape(x)[dimension]
            full.append(np.broadcast_to(table, shape))
        return np.concatenate(full, axis)

    def _dot(self, node: Node) -> Table:
        """A product of arrays, if the factors of what it multiplies are equal along the axes that it sums over.

        Axis k of an operand is axis `first` + k of its table.
        """
        sums, batches = node.params["dimension_numbers"]
        left = self._operand_of_dot(node.inputs[0], batches[0], sums[0])
        right = self._operand_of_dot(node.inputs[1], batches[1], sums[1])
        # Both become [3, *loops, *batch, *free of the left, *free of the right, *summed].
        start, count = self.first + len(batches[0]), len(sums[0])
        middle = left.ndim - count
        stop = middle + right.ndim - count - start
        left = np.expand_dims(left, tuple(range(middle, stop)))
        right = np.expand_dims(right, tuple(range(start, middle)))
        return _reduced_if_equal(_product(left, right), range(stop, stop + count))

    def _operand_of_dot(
        self, value: int, batch: Sequence[int], summed: Sequence[int]
    ) -> Table:
        """The table of an operand with its axes in another order, [3, *loops, *batch, *free, *summed]."""
        free = other_axes(len(self.records.shape(value)), (*summed, *batch))
        table = self._table(value, 0)
        # Zeros, as of padded queries or of a further key, take the factor of the other entries.
        free_axes = axes_after(self.first, free)
        table = _filled(table, (*range(1, self.first), *free_axes))
        order = axes_after(self.first, (*batch, *free, *summed))
        return table.transpose(*range(self.first), *order)

    def _moved(self, node: Node, table: Table) -> Table:
        """The table of the result of an operation on one array, from the table of that array."""
        params, name = node.params, node.name
        if name in ("reduce_sum", "reduce_max", "reduce_min"):
            return _reduced_if_equal(table, axes_after(self.first, params["axes"]))
        if name == "scan_slice":
            return self._slice_of_scan(node, table)
        if name == "scan_stack":
            return self._stack_of_scan(node, table)
        if name == "conv_general_dilated":
            return self._by_kernel(node, table)
        if name not in _KEEPS_TABLE:
            return moved_by(self.records, node, table)
        # A cast to whole numbers, or to very few digits: rounding f x gives other numbers than f times the rounded x.
        is_float = self.graph.is_float(node.outputs[0])
        if not is_float or rounds_coarsely(self.records, node):
            raise NotFollowed
        old, new = self.graph.shapes(node)
        # An untiled `all_gather` adds an axis that counts devices.
        if len(old) != len(new):
            raise NotFollowed
        for axis, n in enumerate(old):
            # A shard has fewer entries along an axis. If that has several heads, it isn't known which the shard has.
            if n != new[axis] and table.shape[self.first + axis] > 1:
                raise NotFollowed
        return table

    def _by_kernel(self, node: Node, table: Table) -> Table:
        """The table of a convolution by a kernel with this table, in which only output features differ."""
        numbers = node.params["dimension_numbers"]
        of_features = _reduced_if_equal(
            table, axes_after(self.first, numbers.rhs_spec[1:])
        )
        sizes = [1] * len(numbers.out_spec)
        sizes[numbers.out_spec[1]] = -1
        return of_features.reshape((*table.shape[: self.first], *sizes))

    def _slice_of_scan(self, node: Node, table: Table) -> Table:
        """What the iterations of a scan take of an array [iterations, ...]: its first axis becomes that of the loop."""
        if table.shape[self.first] > 1:
            if node.params["scan"] not in self.loops:
                raise NotFollowed  # the logits are in no iteration of this scan
            loop = 1 + self.loops.index(node.params["scan"])
            if table.shape[loop] > 1:
                raise NotFollowed
            table = np.swapaxes(table, loop, self.first)
        return table.squeeze(self.first)

    def _stack_of_scan(self, node: Node, table: Table) -> Table:
        """What a scan collects, as an array [iterations, ...]: the axis of the loop becomes its first axis."""
        table = np.expand_dims(table, self.first)
        if node.params["scan"] in self.loops:
            loop = 1 + self.loops.index(node.params["scan"])
            table = np.swapaxes(table, loop, self.first)
        return table

    def located(
        self, probe: Probe, value: int, seen: int, expected: np.ndarray
    ) -> Probe:
        """The probe with the axes of its layers and heads.

        Logits [batch, 4 heads, query, key] inside of a scan over two layers have a table [3, 2, 1, 4, 1, 1], with
        `first` 2. The probe gets the axis of four as `heads`, and its step into the scan is one over layers. An axis of
        examples and heads has the heads of the first example first.

        Args:
          probe: Where the logits are measured.
          value: The logits up to which the clip was followed, by the number of their array: before masks are added.
          seen: The logits that the probe measures: after masks, perhaps reshaped.
          expected: The logarithms of the factors, [*layers, heads].

        Raises:
          NotFollowed: The logits got other factors than `expected`.
        """
        if value not in self.at:
            raise NotFollowed
        old, new = self.records.shape(value), self.records.shape(seen)
        table = reshaped(self.at[value], old, new)
        head_of = _heads_of_entries(table, self.first, expected)
        # A table has several entries only along the axes of layers, which come first, and of heads.
        path = list(probe.path)
        for place, size in zip(self.loops, table.shape[1 : self.first], strict=True):
            if size == 1:
                continue
            # This scan goes over layers: `layer` keeps a maximum for each of them.
            depth = len(place)
            # If it is around another probe alone, these logits are made of its last iteration, and of none by itself.
            if probe.path[:depth] != place:
                raise NotFollowed
            path[depth - 1] = path[depth - 1]._replace(layer=True)
        axes = [axis for axis, size in enumerate(head_of.shape) if size > 1]
        # The axis along which the number of the head grows most comes first: axis 1 of [[0, 2], [1, 3]].
        axes.sort(key=lambda axis: head_of.take(1, axis).min(), reverse=True)
        # The entries have to be the heads one by one, perhaps for each example: 0, 1, 2, 0, 1, 2.
        heads = np.moveaxis(head_of, axes, range(len(axes))).ravel()
        if (heads != np.arange(len(heads)) % expected.shape[-1]).any():
            raise NotFollowed
        return probe._replace(path=tuple(path), heads=tuple(axes))


def _heads_of_entries(table: Table, first: int, expected: np.ndarray) -> np.ndarray:
    """The head of each entry of the logits, by its logarithm, with one entry along each axis without heads.

    A table [3, 4, 1, 1] with the logarithms a, b, a, b and `expected` [a, b] gives 0, 1, 0, 1 of the shape [4, 1, 1].

    Args:
      table: [3, *loops, *axes of the logits]; `first` says where the axes begin.
      first: 1, and 1 for each loop.
      expected: The logarithms of the factors, [*layers, heads].

    Raises:
      NotFollowed: They got other factors than `expected`.
    """
    heads = expected.reshape(-1, expected.shape[-1])  # [layers, heads]
    if math.prod(table.shape[1:first]) != len(heads):
        raise NotFollowed
    axes = table.shape[first:]
    table = table.reshape(3, len(heads), -1)  # [3, layers, entries]
    is_head = heads[:, :, None] == table[0, :, None]  # [layers, heads, entries]
    # The order in the first layer has to be that of all layers.
    head_of = is_head.argmax(1)[0]
    _, first_entries = np.unique(head_of, return_index=True)
    # All entries of one head have its factor, and are made of the same positions.
    is_equal = (table[..., first_entries[head_of]] == table).all()
    if not is_equal or not np.array_equal(table[0][:, first_entries], heads):
        raise NotFollowed
    return head_of.reshape(axes)
