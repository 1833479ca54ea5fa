"""Which products are output heads: no product with a parameter comes after them on the way to the loss."""

from __future__ import annotations

from collections.abc import Iterable

from muonjax._program.walk import Walk


class Ends:
    """For every value, whether another product takes it, and whether it reaches the loss without one."""

    def __init__(self, walk: Walk):
        self._walk, graph = walk, walk.graph
        taken = (x for i, operands in walk.consumers.items() if graph.live[i] for x in operands)
        self.consumed = self._upstream(taken, through_products=True)
        self.direct = self._upstream(graph.outputs, through_products=False)

    def _upstream(self, values: Iterable[int], through_products: bool) -> set[int]:
        """What these depend on. Whole numbers, as of an argmax, and `stop_gradient` end a path."""
        walk, graph = self._walk, self._walk.graph
        found, pending = set(), [v for v in values if graph.is_float(v)]
        while pending:
            value = pending.pop()
            if value in found:
                continue
            found.add(value)
            i = graph.producer.get(value)
            if i is None:
                continue
            node = graph.nodes[i]
            if node.is_transposed or (node.name == "stop_gradient" and through_products):
                continue
            stops = walk.consumers.get(i, ()) if not through_products else ()
            pending += [x for x in node.inputs if x not in stops and graph.is_float(x)]
        return found
