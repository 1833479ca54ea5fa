"""Which numbers an array may hold, where the program shows that they are at most two: a mask adds 0 or one other."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from jax.core import Tracer

from muonjax._inspect.graph import Graph

# Operations that hold no other numbers than their first operand.
_MOVES = [
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "pcast",
    "pvary",
    "reshape",
    "reshard",
    "rev",
    "sharding_constraint",
    "slice",
    "stop_gradient",
    "transpose",
]
_ARITHMETIC = {"add": operator.add, "mul": operator.mul, "sub": operator.sub}
_MOST = 2


def numbers_in(graph: Graph, value: int) -> frozenset[float] | None:
    """The numbers that an array may hold; None if they are not known, or are more than two."""
    constant = graph.known.get(value, graph.closed_over.get(value))
    if constant is not None:
        return _distinct(constant)
    if graph.avals[value].dtype == bool:
        return frozenset({0.0, 1.0})
    if value not in graph.producer:
        return None
    node = graph.nodes[graph.producer[value]]
    operands = node.inputs[1:] if node.name == "select_n" else node.inputs
    if node.name in _MOVES:
        return numbers_in(graph, operands[0])
    if node.name != "select_n" and node.name not in _ARITHMETIC:
        return None
    numbers: set[float] | None = None
    for operand in operands:
        others = numbers_in(graph, operand)
        if others is None:
            return None
        if numbers is None:
            numbers = set(others)
        elif node.name == "select_n":
            numbers |= others
        else:
            operation = _ARITHMETIC[node.name]
            numbers = {operation(x, y) for x in numbers for y in others}
    return frozenset(numbers) if numbers is not None and len(numbers) <= _MOST else None


def _distinct(constant: Any) -> frozenset[float] | None:
    if isinstance(constant, Tracer):
        return None
    numbers = np.unique(np.asarray(constant, np.float64))
    return frozenset(numbers.tolist()) if len(numbers) <= _MOST else None
