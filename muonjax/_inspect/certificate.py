"""The proof that a clip is exact: the logits of each head get its factor, and no loss changes otherwise.

Each array is followed with a table of what the clip does to its entries: the logarithm of the factor, and the first and
the last position of the parameters that the entry is made of. Along an axis on which nothing depends a table has one
entry. Heads get factors drawn at random, so that no two sums of logarithms are equal by accident. Logits of several
heads that were taken for one have different positions. What is zero has the logarithm NaN, for it fits every factor.
An operation that has no rule here, or whose operands do not fit, refuses the clip.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from muonjax._clip.scale import runs_of
from muonjax._inspect.constants import MASKED
from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Node
from muonjax._inspect.layout import MOST, Unmoved
from muonjax._inspect.measure import Probe
from muonjax._inspect.moves import RESIZED, SAME, moved_by, reshaped, rounds_coarsely

_UNTOUCHED, _ZERO = [0.0, np.inf, -np.inf], [np.nan, np.inf, -np.inf]
# Operations that move entries along axes on which nothing depends, or none at all, or change all of them equally.
_SAME = frozenset(f"{SAME} {RESIZED}".split())
_OF_SEVERAL = "mul div add sub add_any max complex select_n join concatenate"
_SEVERAL = frozenset(_OF_SEVERAL.split())


def _product(a: np.ndarray, b: np.ndarray, sign: int = 1) -> np.ndarray:
    """The product of two arrays entry by entry, or the quotient."""
    if math.prod(np.broadcast_shapes(a.shape, b.shape)) > MOST:
        raise Unmoved
    logarithm = a[0] + sign * b[0]
    return np.stack([logarithm, np.minimum(a[1], b[1]), np.maximum(a[2], b[2])])


def _total(table: np.ndarray, axes: Iterable[int]) -> np.ndarray:
    """The largest logarithm over these axes, of which one entry is left, and all positions."""
    axes = tuple(axis - 1 for axis in axes)
    logarithms, first, last = table
    return np.stack(
        [
            np.fmax.reduce(logarithms, axes, keepdims=True),  # it skips NaN
            np.minimum.reduce(first, axes, keepdims=True),
            np.maximum.reduce(last, axes, keepdims=True),
        ]
    )


def _filled(table: np.ndarray, axes: Iterable[int]) -> np.ndarray:
    """With the others' factor for entries that are zero, along axes where all others are equal: padding."""
    for axis in axes:
        total = _total(table, [axis])
        if (np.isnan(table[0]) | (table == total).all(0)).all():
            table = total
    return table


def _reduced(table: np.ndarray, axes: Iterable[int]) -> np.ndarray:
    """The sum over these axes, along which all have equal factors."""
    axes = tuple(axes)
    total = _total(table, axes)
    if (table[0] < total[0]).any():
        raise Unmoved
    return total.squeeze(axes)


def _smallest(table: np.ndarray | None) -> np.ndarray | None:
    """One entry along each axis where all are equal; None where nothing is touched."""
    if table is None or not table.size:
        return None
    for axis in range(1, table.ndim):
        first = table.take([0], axis)
        if np.array_equal(table, np.broadcast_to(first, table.shape), equal_nan=True):
            table = first
    return None if table.ravel().tolist() == _UNTOUCHED else table


class Certificate:
    """One pass over the operations that a clip changes, up to the logits."""

    def __init__(self, walk: Walk, probes: Sequence[Probe], logits: Sequence[int]):
        """`logits` are the values where softmax takes over, as the `probes` measure them."""
        self.walk, self.graph, self.logits = walk, walk.graph, logits
        places = (probe.path[: n + 1] for probe in probes for n in range(len(probe.path)))
        # The first axes of every table: iterations of scans, by the place of their body.
        self.loops = list(dict.fromkeys(place for place in places if place[-1].kind == "scan"))
        self.first = 1 + len(self.loops)
        self.tables: dict[int, np.ndarray] = {}
        self.at: dict[int, np.ndarray] = {}  # those that arrive at the logits

    def touch(
        self, leaf: int, stack: tuple[int, ...], spans: Sequence[tuple[Any, np.ndarray]]
    ) -> None:
        """A clip scales these parts of a parameter by logarithms [*layers, entries]; axes of `stack` count layers."""
        shape = self.walk.shapes[leaf]
        tables = []
        for span, logs in spans:
            # Kernels of which each gives other keys may have their heads at other positions.
            part = sorted({s.start for s, _ in spans if s.factor == span.factor}).index(span.start)
            table = self._touched(shape, stack, span, logs)
            table[1:] += part << 40
            tables.append(table)
        table = functools.reduce(_product, tables)  # an entry of two spans is scaled twice
        table = _smallest(np.expand_dims(table, tuple(range(1, self.first))))
        if table is not None:
            self.tables[self.graph.parameters[leaf]] = table

    def _touched(
        self, shape: Sequence[int], stack: tuple[int, ...], span: Any, logs: np.ndarray
    ) -> np.ndarray:
        """The table of a parameter of which one span is scaled."""
        inner = [axis for axis in range(len(shape)) if axis not in stack]
        held = [inner[axis] for axis in span.axes]
        order = [*stack, *held]
        positions = runs_of(span, span.entries, span.size)  # [entries, features]
        size = math.prod(shape[axis] for axis in held)
        table = np.stack([np.full((*logs.shape[:-1], size), x) for x in _UNTOUCHED])
        table[0][..., positions] = logs[..., None]
        entry, feature = np.indices(positions.shape)
        table[1:, ..., positions] = (entry << 20) + feature
        table = table.reshape(3, *(shape[axis] for axis in order))
        table = table.transpose(0, *(1 + np.argsort(order)))
        return np.expand_dims(table, [1 + k for k in range(len(shape)) if k not in order])

    def failure(self) -> int | None:
        """The first operation that is not followed; None if a clip changes the logits and no loss besides."""
        graph = self.graph
        done, seen = -1, set()
        pending = [i for x in self.tables for i in graph.readers[x]]
        heapq.heapify(pending)  # in the order of the program, so each once
        while pending:
            i = heapq.heappop(pending)
            if i == done or i not in graph.live:
                continue
            done, node = i, graph.nodes[i]
            try:
                tables = [_smallest(table) for table in self._followed(node)]
            except Unmoved:
                return i
            for x, table in zip(node.outputs, tables, strict=True):
                if table is None:
                    continue
                if x in self.logits:
                    self.at[x] = table
                elif x not in seen:
                    seen.add(x)
                    self.tables[x] = table
                    for reader in graph.readers[x]:
                        heapq.heappush(pending, reader)
        # Other arrays may be returned, as a model's parameters are; the loss may not change.
        changed = [x for x in graph.outputs if x in self.tables and self.walk.shape(x) == ()]
        return graph.producer.get(changed[0], 0) if changed else None

    def _table(self, value: int, rank: int, least: float = -np.inf) -> np.ndarray:
        """That of a value, with as many axes as a result has; a known `least` or less is as good as zero."""
        if value in self.tables:
            table = self.tables[value]
            return table if table.ndim > self.first else table.reshape(*table.shape, *[1] * rank)
        known = self.walk.known(value)
        table = _UNTOUCHED
        if known is not None and np.ndim(known) == 0 and (known == 0 or known <= least):
            table = _ZERO
        rank = len(self.walk.shape(value)) or rank
        return np.reshape(table, (3, *[1] * (len(self.loops) + rank)))

    def _followed(self, node: Node) -> Sequence[np.ndarray | None]:
        """The tables of the results of an operation, None where nothing changes."""
        walk, name = self.walk, node.name
        touched = [x for x in node.inputs if x in self.tables]
        for k, place in enumerate(self.loops):
            is_inside = place == node.place[: len(place)]
            if not is_inside and any(self.tables[x].shape[1 + k] > 1 for x in touched):
                raise Unmoved  # a loop's last iteration, or an iteration of another loop
        is_largest = any(x.stage == "largest" for x in walk.values[node.inputs[-1]].logits)
        if name == "sub" and node.inputs[0] in self.logits and is_largest:
            return [None]  # what softmax subtracts
        if name == "dot_general":
            return [self._dot(node)]
        if name in _SEVERAL:
            return [self._of_several(node)]
        if len(touched) > 1 or node.inputs.index(touched[0]) != (name == "conv_general_dilated"):
            raise Unmoved
        old, new = walk.shape(touched[0]), walk.shape(node.outputs[0])
        return [self._moved(node, self.tables[touched[0]], old, new)]

    def _of_several(self, node: Node) -> np.ndarray:
        walk, inputs, out = self.walk, node.inputs, node.outputs[0]
        if node.name in ("select_n", "join"):
            which, *inputs = inputs
            if which in self.tables:
                raise Unmoved
        masks = node.name == "select_n" and walk.values[out].logits
        rank = len(walk.shape(out))
        tables = [self._table(x, rank, MASKED if masks else -np.inf) for x in inputs]
        if node.name in ("mul", "div"):
            return _product(*tables, sign=1 if node.name == "mul" else -1)
        if node.name != "concatenate":
            return _reduced(np.stack(np.broadcast_arrays(*tables), 1), [1])
        return self._concatenated(tables, inputs, node.params["dimension"])

    def _concatenated(
        self, tables: Sequence[np.ndarray], inputs: Sequence[int], dimension: int
    ) -> np.ndarray:
        axis = self.first + dimension
        shape = list(np.broadcast_shapes(*(table.take([0], axis).shape for table in tables)))
        full = []
        for table, x in zip(tables, inputs, strict=True):
            shape[axis] = self.walk.shape(x)[dimension]
            full.append(np.broadcast_to(table, shape))
        return np.concatenate(full, axis)

    def _dot(self, node: Node) -> np.ndarray:
        """Factors are equal along the axes that are summed over."""
        sums, batches = node.params["dimension_numbers"]
        lined, counts = [], []
        for x, summed, batch in zip(node.inputs, sums, batches, strict=True):
            rank = len(self.walk.shape(x))
            free = [axis for axis in range(rank) if axis not in (*summed, *batch)]
            order = [self.first + axis for axis in (*batch, *free, *summed)]
            along = (*range(1, self.first), *(self.first + axis for axis in free))
            table = _filled(self._table(x, 0), along)
            lined.append(table.transpose(*range(self.first), *order))
            counts.append(len(free))
        at, (left, right) = self.first + len(batches[0]), lined
        left = np.expand_dims(left, [at + counts[0] + k for k in range(counts[1])])
        right = np.expand_dims(right, [at + k for k in range(counts[0])])
        product = _product(left, right)  # [*loops, *batch, *free, *free, *summed]
        return _reduced(product, range(product.ndim - len(sums[0]), product.ndim))

    def _moved(
        self, node: Node, table: np.ndarray, old: Sequence[int], new: Sequence[int]
    ) -> np.ndarray:
        """Operations on one array."""
        p, first, name = node.params, self.first, node.name
        if name in ("reduce_sum", "reduce_max", "reduce_min"):
            return _reduced(table, [first + axis for axis in p["axes"]])
        if name == "scan_slice":
            if table.shape[first] > 1:  # this axis becomes that of the loop
                if p["scan"] not in self.loops:
                    raise Unmoved
                loop = 1 + self.loops.index(p["scan"])
                if table.shape[loop] > 1:
                    raise Unmoved
                table = np.swapaxes(table, loop, first)
            return table.squeeze(first)
        if name == "conv_general_dilated":  # of a kernel: queries of an autoencoder, 1 x 1
            numbers = p["dimension_numbers"]
            table = _reduced(table, [first + axis for axis in numbers.rhs_spec[1:]])
            shape = [1] * len(new)
            shape[numbers.out_spec[1]] = -1
            return table.reshape((*table.shape[:first], *shape))
        if name in _SAME and self.graph.is_float(node.outputs[0]):
            resized = [k for k in range(len(old)) if old[k] != new[k]]
            if rounds_coarsely(self.walk, node) or any(table.shape[first + k] > 1 for k in resized):
                raise Unmoved
            return table
        return moved_by(node, table, old, new, self.walk.known(node.inputs[-1]))

    def located(self, probe: Probe, value: int, seen: int, expected: np.ndarray) -> Probe | None:
        """The probe with the axes of its layers and heads, or None if the logits got other factors than `expected`.

        Args:
          probe: Where the logits are measured.
          value: The logits, by the number of their array.
          seen: The array that the probe measures, which may have another shape.
          expected: The logarithms of the factors, [*layers, heads].
        """
        if value not in self.at:
            return None
        try:
            table = reshaped(self.at[value], self.walk.shape(value), self.walk.shape(seen))
        except Unmoved:
            return None
        layers = [k for k in range(1, self.first) if table.shape[k] > 1]
        axes = [k for k in range(self.first, table.ndim) if table.shape[k] > 1]
        others = [k for k in range(1, table.ndim) if k not in (*layers, *axes)]
        heads = expected.reshape(-1, expected.shape[-1])  # [layers, heads]
        if math.prod(table.shape[k] for k in layers) != len(heads):
            return None
        table = table.transpose(0, *layers, *axes, *others).reshape(3, len(heads), -1)
        # The head of each entry along the axes, and the first entry of each head.
        head_of = (heads[:, :, None] == table[0, :, None]).argmax(1)[0]
        first = np.array([(head_of == head).argmax() for head in range(heads.shape[1])])
        if not np.array_equal(table[0][:, first], heads):
            return None
        if (table[..., first[head_of]] != table).any():
            return None
        loops = {self.loops[k - 1] for k in layers}
        path = tuple(
            step._replace(layer=probe.path[: n + 1] in loops) for n, step in enumerate(probe.path)
        )
        in_order = (np.diff(head_of) == 1).all()
        return probe._replace(
            path=path,
            heads=tuple(axis - self.first for axis in axes),
            entries=() if in_order else tuple(head_of),
        )
