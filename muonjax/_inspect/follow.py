"""Follow every parameter through a function, operation by operation, as `entrywise`, `moves` and `products` say."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator

import numpy as np

from muonjax._inspect import moves, products  # noqa: F401  with `entrywise`, they fill RULES
from muonjax._inspect.entrywise import FOLDED, RULES, unknown
from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Graph, Node
from muonjax._inspect.values import OF_PRODUCTS, Value, dependent
from muonjax._inspect.versions import Body


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection: it would go through all of JAX's objects for the many small ones of the reader."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def follow(body: Body, parameters: range) -> Walk:
    """What one pass over the operations of a jaxpr finds out about these of its inputs."""
    walk = Walk(Graph(body, parameters))
    _follow(walk, 0, len(walk.nodes))
    return walk


def _follow(walk: Walk, first: int, last: int) -> None:
    """Every live operation in nodes[first:last]; a loop's body until what it carries stays the same."""
    i = first
    while i < last:
        if (loop := walk.graph.loops.get(i)) is None:
            if i in walk.graph.live:
                _apply(walk, walk.nodes[i])
            i += 1
            continue
        carries = [c for c in loop.carries if c in walk.graph.live]
        now = [_first(walk.values[walk.nodes[c].inputs[0]]) for c in carries]
        # What is carried only comes to depend on more, at worst one place further in each round.
        for _ in range(len(carries) + 3):
            for use in [use for use in walk.uses if loop.carries.stop <= use[0] < loop.last]:
                del walk.uses[use]  # of a round that knew less
            for found in (walk.attentions, walk.softmaxes, walk.unseen):
                for k in range(loop.carries.stop, loop.last):
                    found.pop(k, None)
            for carry, value in zip(carries, now, strict=True):
                walk.values[walk.nodes[carry].outputs[0]] = value
            _follow(walk, loop.carries.stop, loop.last)
            before, now = now, [_next(walk, c) for c in carries]
            if now == before:
                break
        trains_inside = any(
            walk.nodes[k].passes == "backward" for k in range(loop.carries.stop, loop.last)
        )
        for carry, value in zip(carries, now, strict=True):
            start = walk.values[walk.nodes[carry].inputs[0]]
            if (
                start.is_weight and not value.is_weight
            ):  # an initial state, or weights that the loop trains
                kind = "unknown" if trains_inside else "other"
                walk.record_terms(
                    walk.nodes[carry], "the start of a loop that changes it", [start], kind
                )
        i = loop.last


def _first(value: Value) -> Value:
    """What a loop carries at first: a parameter as it is; of an activation only what it depends on."""
    return value if value.is_weight else dependent([value])


def _next(walk: Walk, carry: int) -> Value:
    """What it carries after another iteration."""
    start, end = (walk.values[x] for x in walk.nodes[carry].inputs)
    walk.record_parts((*start.images, *end.images))
    now = walk.values[walk.nodes[carry].outputs[0]]
    same = start.is_weight and end.terms == start.terms and end.depends_on == start.depends_on
    if same:
        return now
    after = dependent([start, end, now])  # but for the products in the loop
    return after._replace(depends_on=after.depends_on % OF_PRODUCTS | start.depends_on)


def _apply(walk: Walk, node: Node) -> None:
    if node.name in FOLDED:
        known, size = [walk.known(x) for x in node.inputs], math.prod(walk.shape(node.outputs[0]))
        if all(k is not None and np.size(k) in (1, size) for k in known):
            walk.graph.known[node.outputs[0]] = FOLDED[node.name](*known)
    outs = RULES.get(node.name, unknown)(walk, node)
    for x, out in zip(node.outputs, outs, strict=True):
        walk.values[x] = out if walk.graph.is_followed(x) else out._replace(images=(), logits=())
