"""What the rules record while a function is followed: uses of parameters, products that make attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muonjax._inspect.graph import Graph, Node
from muonjax._inspect.layout import Run, whole
from muonjax._inspect.values import (
    ADDED,
    DATA,
    NOISE,
    OF_PRODUCTS,
    PARAMETER,
    PRODUCT_OF_PARAMETERS,
    AxisFact,
    Kind,
    Logits,
    Operand,
    ParameterView,
    Product,
    Projection,
    Use,
    Value,
    alike,
    grouped,
)


class Walk:
    """What one pass over the operations finds out."""

    def __init__(self, graph: Graph):
        self.graph, self.nodes, self.shape = graph, graph.nodes, graph.shape
        self.known = graph.known.get  # the number that the program contains, if it does
        self.shapes = [graph.shape(x) for x in graph.parameters]
        self.values: list[Value] = [Value()] * len(graph.avals)
        self.uses: dict[tuple[int, int, int], Use] = {}
        # By product: the logits that enter each softmax, and the axes of the product that it normalizes.
        self.attentions: dict[int, list[tuple[Logits, frozenset[int]]]] = defaultdict(list)
        # Calls of three products, perhaps of queries, keys and values.
        self.opaque: dict[int, tuple[Projection, ...]] = {}
        # Products of two activations of which an exponential multiplies a third, where that is.
        self.softmaxes: dict[int, int] = {}
        # Products of an activation with learned queries or with data, perhaps frozen keys: they are attention if their
        # exponentials are summed, and not along the columns of a parameter, as a router's.
        self.one_sided: set[int] = set()
        self.normalized: set[int] = set()
        # Products by a parameter whose exponentials are summed along its columns.
        self.routers: set[int] = set()
        # Operands of products that may be of queries and keys.
        self.pairs: dict[int, tuple[Operand, Operand]] = {}
        self.consumers: set[int] = set()  # products that take activations
        # Products of activations by matrices that do not train.
        self.frozen_layers: set[int] = set()
        # Products that an operation without a rule takes, or an exponential of what is not followed; and which.
        self.unseen: dict[int, int] = {}
        self.no_rule: set[int] = set()  # operations without a rule
        self.read: set[int] = set()  # products with columns of which labels choose one
        self.products: dict[tuple[int, int], Product] = {}  # by operation and number of the view
        # For the products that give queries, keys and values, the parts of the last one.
        self.value_parts: dict[tuple[Product, ...], Any] = {}
        # For each parameter, its axes along which products with slices of it are added up.
        self.summed_slices: dict[int, set[int]] = defaultdict(set)
        # For each parameter, the products in its scale, as bits.
        self.scales: dict[int, int] = defaultdict(int)
        # Products of two activations entry by entry.
        self.entrywise: dict[int, tuple[Projection, ...]] = {}
        for k, x in enumerate(graph.parameters):
            views = (ParameterView(k, whole(graph.shape(x))),) if graph.is_float(x) else ()
            self.values[x] = Value(PARAMETER, views)
        for x in (*graph.arguments, *graph.constants):
            is_key = jnp.issubdtype(getattr(graph.avals[x], "dtype", float), jax.dtypes.prng_key)
            facts = (AxisFact("input", whole(graph.shape(x))),) if graph.is_float(x) else ()
            self.values[x] = Value(NOISE if is_key else DATA, facts=facts)

    def inputs(self, node: Node) -> list[Value]:
        return [self.values[x] for x in node.inputs]

    def forget(self, operations: range) -> None:
        """Uses and attentions that were recorded for these operations."""
        for use in [use for use in self.uses if use[0] in operations]:
            del self.uses[use]
        for recorded in (self.attentions, self.softmaxes, self.unseen):
            for i in operations:
                recorded.pop(i, None)

    def product(self, node: Node, k: int) -> Product:
        return self.products.setdefault((node.index, k), Product(OF_PRODUCTS << len(self.products)))

    # What the rules record.

    def record(
        self, node: Node, kind: Kind, view: ParameterView, what: str, *, k: int = 0, **axes: Any
    ) -> None:
        product = self.product(node, k) if kind == "product" else None
        self.uses[node.index, view.leaf, k] = use = Use(
            kind, what, node.index, view, product=product, **axes
        )
        if product is not None:
            product.use = use

    def record_views(
        self, node: Node, what: str, values: Iterable[Value], kind: Kind = "other"
    ) -> None:
        views = [t for v in values for t in v.views]
        for t in views:
            # Which factor is a learned input is not followed; a sum may be an adapter's with a frozen matrix.
            if t.inner and t.layout.shape and what != ADDED:
                self.record(node, "unknown", t, PRODUCT_OF_PARAMETERS)
            else:
                self.record(node, kind, t, what)

    def record_unknown(self, value: Value, other: Value) -> None:
        """What is multiplied by the result of an operation without a rule: perhaps that is one hot, and looks it up."""
        if other.no_rule >= 0:
            operation = self.nodes[other.no_rule]
            for t in (*value.views, *(m.product.use.view for m in value.projections)):
                self.record(operation, "unknown", t, operation.name)

    def record_read(self, value: Value, axes: Sequence[int], labels: Value) -> None:
        """Data that depend on no parameter choose one entry along these axes."""
        if labels.depends_on & DATA and not labels.depends_on & PARAMETER:
            for projection in value.projections:
                if projection.layout.runs_along(axes):
                    self.read.add(projection.product.use.node)
            for fact in value.facts:
                if fact.what == "columns" and fact.layout.runs_along(axes):
                    self.read.add(fact.product)

    def record_weights(self, node: Node, weights: Value, values: Value) -> None:
        """Perhaps those of a softmax, which is no sum of its own exponentials."""
        at = weights.weights
        is_softmax = at >= 0 and (at not in self.one_sided or at in self.normalized)
        if is_softmax and values.depends_on & DATA and values.weights != at:
            self.softmaxes.setdefault(at, node.index)

    def record_factors(self, node: Node, x: Value, y: Value) -> None:
        """A product entry by entry."""
        (result,) = node.outputs
        rank = sum(n > 1 for n in self.shape(result))
        for v, factor in ((x, y), (y, x)):
            repeats = factor.axes("repeats")
            if repeats:
                self.record_weights(node, factor, v)
            if v.is_weight and len(repeats) == rank:
                for t in v.views:  # one factor for all of it, as a spectral norm
                    self.scales[t.leaf] |= factor.depends_on
            self.record_read(v, factor.axes("one hot"), factor)
            if factor.is_activation:
                self.record_gates(v.projections, factor, repeats)
        if x.projections and y.projections and x.depends_on != y.depends_on:
            projections = x.projections + y.projections
            if all(
                m.linear or self.nodes[m.nonlinear_at].name in ("mul", "div") for m in projections
            ):
                self.entrywise[result] = projections

    def record_parts(self, projections: Iterable[Projection]) -> None:
        """An operation that mixes columns takes these projections: the region of each is used, by itself.

        What comes later says nothing about parts, so this is called before `after_nonlinearity`.
        """
        for m in projections:
            if m.unmixed:
                m.product.parts.add(m.layout.region)

    def record_reduced(self, projections: Iterable[Projection], axes: Sequence[int]) -> None:
        """Columns along these axes are mixed: by itself that says nothing about those along others."""
        for m in projections:
            if (
                m.unmixed
                and (m.layout.runs_along(axes) or m.layout.taken)
                and m.layout.runs_not_along(axes)
            ):
                m.product.mixed.add(m.layout.add_up(axes))
            else:
                self.record_parts([m])

    def record_meeting_parts(self, values: Iterable[Value]) -> None:
        """Parts of one product come together after different functions of each."""
        for projections in grouped((m.product, m) for v in values for m in v.projections).values():
            if not alike(projections):
                self.record_parts(projections)

    def record_sum(self, projections: Sequence[Projection]) -> None:
        """Products with slices of one parameter, added up: a sum over heads, written as a loop."""
        by_leaf = grouped((m.product.use.view.leaf, m) for m in projections if m.linear)
        for leaf, (first, *others) in by_leaf.items():
            runs = {*first.layout.loops, *first.layout.runs}
            for m in others:
                if first.product.bit & self.values[m.product.use.activation].depends_on:
                    continue  # layers, one after the other
                differing = runs ^ {*m.layout.loops, *m.layout.runs}
                self.summed_slices[leaf].update(run.axis for run in differing)

    def record_gates(
        self, projections: Iterable[Projection], factor: Value, repeated: Sequence[int]
    ) -> None:
        """A factor that differs along one axis of a product's columns and not along another: a gate of experts."""
        for m in projections:
            if not m.product.bit & factor.depends_on and m.layout.runs_along(repeated):
                m.product.batches.update(m.layout.runs_not_along(repeated))

    def record_heads(self, projections: Iterable[Projection], axes: Sequence[int]) -> None:
        for m in projections:
            m.product.heads.update((run, m.layout.region) for run in m.layout.runs_along(axes))

    def record_contracted(self, node: Node, operand: Operand, is_mixture: bool) -> None:
        """Columns of a product that another product of the same einsum sums over: rows, whatever the order is."""
        einsum = self.graph.einsum(node.index)
        for projection in operand.value.projections if einsum else ():
            if self.graph.einsum(projection.product.use.node) == einsum:
                contracted = projection.layout.runs_along(operand.summed)
                projection.product.contracted.update(contracted)
                projection.product.is_mixture |= is_mixture and bool(contracted)

    def record_attention(
        self, node: Node, logits: Logits, keys: tuple[Run, ...], values: Operand
    ) -> None:
        self.attentions[logits.product].append((logits, frozenset(run.axis for run in keys)))
        operands = self.pairs[logits.product]
        # Queries that share a key head are counted by an axis of their own.
        for operand in operands:
            self.record_heads(operand.value.projections, operand.free)
        projections = [m for operand in (*operands, values) for m in operand.value.projections[:1]]
        if not projections:
            return
        # Heads one by one, whose parts are no matrices; subtracted softmaxes share their values.
        part = projections[-1].layout.region
        if self.value_parts.setdefault(tuple(m.product for m in projections), part) != part:
            why = "attention head by head"
            for m in projections:
                self.record(self.nodes[logits.product], "unknown", m.product.use.view, why)
