"""Which numbers an array may hold, where the program shows that they are few: a mask adds 0 or others far below."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._inspect.graph import Graph, Node

# What is added to a logit to mask it is this or less, where it may be any number; an ALiBi bias of this size masks as
# well. It is -1e4 in many models, which is -9984 in bfloat16, and less exact where a logit of this precision takes it.
MASKED = -9e3
_MOST = 8
# NaN stands for more numbers than these, as of positions or in a table.
_MANY = np.array([np.nan])

# Operations that hold no other numbers than these of their operands.
_MOVES = """
    broadcast_in_dim convert_element_type copy copy_p dynamic_slice gather pcast pvary reshape reshard rev scan_slice
    shard sharding_constraint slice stop_gradient transpose unshard
"""
_UNIONS = {"concatenate": slice(None), "join": slice(1, None), "select_n": slice(1, None)}
_HELD = dict.fromkeys(_MOVES.split(), slice(1)) | _UNIONS
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "log": np.log,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "sub": np.subtract,
}


def numbers_in(graph: Graph, value: int) -> np.ndarray | None:
    """The numbers that an array may hold; None if data say which.

    Positions and tables of more than a few numbers are NaN. Where data are multiplied by a number as large as those of
    a mask, they are taken for 0, 1 or -1.
    """
    if value not in graph.numbers:
        graph.numbers[value] = _numbers_in(graph, value)
    return graph.numbers[value]


def _numbers_in(graph: Graph, value: int) -> np.ndarray | None:
    constant = graph.known.get(value, graph.closed_over.get(value))
    if constant is not None:
        return _in_table(np.asarray(constant))
    aval = graph.avals[value]
    if aval.dtype == bool:
        return np.array([0.0, 1.0])
    if value not in graph.producer:
        return None
    node = graph.nodes[graph.producer[value]]
    numbers = _made_by(graph, node)
    if numbers is None:
        return None
    if jnp.issubdtype(aval.dtype, jnp.floating):
        with np.errstate(all="ignore"):
            numbers = numbers.astype(aval.dtype)
    numbers = np.unique(numbers.astype(float))
    return numbers if len(numbers) <= _MOST else _MANY


def _made_by(graph: Graph, node: Node) -> np.ndarray | None:
    """The numbers that an operation makes."""
    if node.name in _HELD:
        operands = [numbers_in(graph, x) for x in node.inputs[_HELD[node.name]]]
    elif node.name in _ARITHMETIC:
        operands = [numbers_in(graph, x) for x in node.inputs]
    else:
        return None if _depends_on_data(graph, node) else _MANY
    known = [numbers for numbers in operands if numbers is not None]
    if len(known) == len(operands):
        if node.name in _HELD:
            return np.concatenate(known)
        with np.errstate(all="ignore"):
            return _ARITHMETIC[node.name](*np.meshgrid(*known)).reshape(-1)
    if node.name == "mul" and known and (np.abs(known[0]) >= -MASKED).all():
        return np.concatenate([-known[0], [0.0], known[0]])
    return None


def _in_table(table: np.ndarray) -> np.ndarray:
    """The numbers in an array, without sorting one that may be large."""
    numbers: list[float] = []
    rest = table.reshape(-1)
    if np.iscomplexobj(table) or len(np.unique(rest[:1000].astype(float))) > _MOST:
        return _MANY
    while rest.size:
        if len(numbers) == _MOST:
            return _MANY
        numbers.append(float(rest[0]))
        rest = rest[rest != rest[0]]
    return np.array(numbers)


def _depends_on_data(graph: Graph, node: Node) -> bool:
    """Whether an operation depends on an argument, other than a key of random numbers."""
    dtypes = [graph.avals[x].dtype for x in graph.data_before(node.inputs)]
    return not all(jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes)
