"""What the rules record while a function is followed: uses of parameters, products that make attention."""

from __future__ import annotations

import itertools
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
    Image,
    Kind,
    Logits,
    Mark,
    Product,
    Side,
    Term,
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
        self.opaque: dict[
            int, tuple[Image, ...]
        ] = {}  # calls of three products: queries, keys, values?
        # Products of two activations of which an exponential multiplies a third, where that is.
        self.softmaxes: dict[int, int] = {}
        # Products of an activation with learned queries or with data, perhaps frozen keys: they are attention if their
        # exponentials are summed, and not along the columns of a parameter, as a router's.
        self.one_sided: set[int] = set()
        self.normalized: set[int] = set()
        self.pairs: dict[int, tuple[Side, Side]] = {}  # of two images: their operands
        self.consumers: set[int] = set()  # products that take activations
        self.frozen_layers: set[int] = (
            set()
        )  # products of activations by matrices that do not train
        # Those by a matrix for each example: frozen keys or values, or data that the outputs are compared with.
        self.frozen_attentions: set[int] = set()
        # Products that an operation without a rule takes, or an exponential of what is not followed; and which.
        self.unseen: dict[int, int] = {}
        self.no_rule: set[int] = set()  # operations without a rule
        self.read: set[int] = set()  # products with columns of which labels choose one
        self.products: dict[tuple[int, int], Product] = {}  # by operation and number of the term
        # For the products that give queries, keys and values, the parts of the last one.
        self.value_parts: dict[tuple[Product, ...], Any] = {}
        self.summed_slices: dict[int, set[int]] = defaultdict(
            set
        )  # axes whose products are added up
        # For each parameter, the products in its scale, as bits.
        self.scales: dict[int, int] = defaultdict(int)
        self.entrywise: dict[
            int, tuple[Image, ...]
        ] = {}  # products of two activations entry by entry
        for k, x in enumerate(graph.parameters):
            terms = (Term(k, whole(graph.shape(x))),) if graph.is_float(x) else ()
            self.values[x] = Value(PARAMETER, terms)
        for x in (*graph.arguments, *graph.constants):
            is_key = jnp.issubdtype(getattr(graph.avals[x], "dtype", float), jax.dtypes.prng_key)
            marks = (Mark("input", whole(graph.shape(x))),) if graph.is_float(x) else ()
            self.values[x] = Value(NOISE if is_key else DATA, marks=marks)

    def operands(self, node: Node) -> list[Value]:
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
        self, node: Node, kind: Kind, term: Term, what: str, *, k: int = 0, **axes: Any
    ) -> None:
        product = self.product(node, k) if kind == "product" else None
        self.uses[node.index, term.leaf, k] = use = Use(
            kind, what, node.index, term, product=product, **axes
        )
        if product is not None:
            product.use = use

    def record_terms(
        self, node: Node, what: str, values: Iterable[Value], kind: Kind = "other"
    ) -> None:
        for t in [t for v in values for t in v.terms]:
            # Which factor is a learned input is not followed; a sum may be an adapter's with a frozen matrix.
            if t.inner and t.layout.shape and what != ADDED:
                self.record(node, "unknown", t, PRODUCT_OF_PARAMETERS)
            else:
                self.record(node, kind, t, what)

    def record_unknown(self, value: Value, other: Value) -> None:
        """What is multiplied by the result of an operation without a rule: perhaps that is one hot, and looks it up."""
        if other.no_rule >= 0:
            for t in (*value.terms, *(m.product.use.term for m in value.images)):
                operation = self.nodes[other.no_rule]
                self.record(operation, "unknown", t, operation.name)

    def record_read(self, value: Value, axes: Sequence[int], labels: Value) -> None:
        """Data that depend on no parameter choose one entry along these axes."""
        if labels.depends_on & DATA and not labels.depends_on & PARAMETER:
            for image in value.images:
                if image.layout.atoms(axes):
                    self.read.add(image.product.use.node)

    def record_weights(self, node: Node, weights: Value, values: Value) -> None:
        """Perhaps those of a softmax, which is no sum of its own exponentials."""
        at = weights.weights
        is_softmax = at >= 0 and (at not in self.one_sided or at in self.normalized)
        if is_softmax and values.depends_on & DATA and values.weights != at:
            self.softmaxes.setdefault(at, node.index)

    def record_factors(self, node: Node, x: Value, y: Value) -> None:
        """A product entry by entry."""
        for v, factor in ((x, y), (y, x)):
            repeats, hot = factor.axes("repeats"), factor.axes("one hot")
            if repeats:
                self.record_weights(node, factor, v)
            if v.is_weight and len(repeats) == sum(n > 1 for n in self.shape(node.outputs[0])):
                for t in v.terms:  # one factor for all of it, as a spectral norm
                    self.scales[t.leaf] |= factor.depends_on
            self.record_read(v, hot, factor)
            for m in v.images if factor.is_activation else ():
                if not m.product.bit & factor.depends_on:
                    self.record_gate(m, repeats)
        both = x.images + y.images if x.images and y.images and x.depends_on != y.depends_on else ()
        if all(m.linear or self.nodes[m.bent_by].name in ("mul", "div") for m in both):
            self.entrywise[node.outputs[0]] = both

    def record_parts(self, images: Iterable[Image]) -> None:
        """An operation that mixes columns takes these images: the region of each is used, by itself.

        What comes later says nothing about parts, so this is called before an image is `bent`.
        """
        for m in images:
            if m.apart:
                m.product.parts.add(m.layout.region)

    def record_reduced(self, images: Iterable[Image], axes: Sequence[int]) -> None:
        """Columns along these axes are mixed: by itself that says nothing about those along others."""
        for m in images:
            if m.apart and (m.layout.atoms(axes) or m.layout.taken) and m.layout.atoms_beside(axes):
                m.product.mixed.add(m.layout.add_up(axes))
            else:
                self.record_parts([m])

    def record_meeting_parts(self, values: Iterable[Value]) -> None:
        """Parts of one product come together after different functions of each."""
        found = [m for v in values for m in v.images]
        pairs = itertools.permutations(found, 2)
        self.record_parts(m for m, n in pairs if m.product is n.product and not alike([m, n]))

    def record_sum(self, images: Sequence[Image]) -> None:
        """Products with slices of one parameter, added up: a sum over heads, written as a loop."""
        by_leaf = grouped((m.product.use.term.leaf, m) for m in images if m.linear)
        for leaf, found in by_leaf.items():
            for m in found[1:]:
                if found[0].product.bit & self.values[m.product.use.operand].depends_on:
                    continue  # layers, one after the other
                one, other = ({*x.layout.loops, *x.layout.runs} for x in (m, found[0]))
                self.summed_slices[leaf].update(a.axis for a in one ^ other)

    def record_gate(self, m: Image, repeated: Sequence[int]) -> None:
        """A factor that differs along one axis of a product's columns and not along another: a gate of experts."""
        if m.layout.atoms(repeated):
            m.product.batches.update(m.layout.atoms_beside(repeated))

    def record_heads(self, images: Iterable[Image], axes: Sequence[int]) -> None:
        for m in images:
            m.product.heads.update((a, m.layout.region) for a in m.layout.atoms(axes))

    def record_contracted(self, node: Node, side: Side) -> None:
        """Columns of a product that another product of the same einsum sums over: rows, whatever the order is."""
        einsum = self.graph.einsum(node.index)
        for image in side.value.images if einsum else ():
            if self.graph.einsum(image.product.use.node) == einsum:
                image.product.contracted.update(image.layout.atoms(side.summed))

    def record_attention(
        self, node: Node, logits: Logits, keys: tuple[Run, ...], values: Any
    ) -> None:
        self.attentions[logits.product].append((logits, frozenset(a.axis for a in keys)))
        # Queries that share a key head are counted by an axis of their own.
        for side in self.pairs[logits.product]:
            self.record_heads(side.value.images, side.given)
        operands = [
            m for side in (*self.pairs[logits.product], values) for m in side.value.images[:1]
        ]
        part = operands[-1].layout.region if operands else None
        # Heads one by one, whose parts are no matrices; subtracted softmaxes share their values.
        if self.value_parts.setdefault(tuple(m.product for m in operands), part) != part:
            for m in operands:
                self.record(
                    self.nodes[logits.product],
                    "unknown",
                    m.product.use.term,
                    "attention head by head",
                )
