"""Which numbers an array may hold, where the program shows that they are few:
a mask adds 0 or others far below."""

from collections.abc import Callable

import numpy as np

from muonjax._inspect.graph import Graph, Node
from muonjax._inspect.values import CHOICES

# What is added to a logit to mask it is this or less, where it may be any number; an ALiBi bias of
# this size masks as well. It is -1e4 in many models, which is -9984 in bfloat16, and less exact
# where a logit of this precision takes it.
MASKED = -9e3
_MOST = 8
# NaN stands for more numbers than these, as of positions or in a table. Arithmetic with NaN gives
# NaN, and NaN is no number of a mask, since all comparisons with it are false.
_MANY = np.array([np.nan])

# Operations whose results hold no other numbers than their first operand.
_MOVES = """
    broadcast_in_dim convert_element_type copy copy_p dynamic_slice gather pcast pvary reduce_max
    reduce_min reshape reshard rev scan_slice shard sharding_constraint slice squeeze stop_gradient
    tile transpose unshard
"""
_MOVING = frozenset(_MOVES.split())
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "log": np.log,  # of a mask of 0 and 1
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "sub": np.subtract,
}


def numbers_in(graph: Graph, value: int) -> np.ndarray | None:
    """The numbers that an array may hold, sorted; None if data say which. They are kept in the
    graph.

    `jnp.where(mask, 0.0, -1e9)` holds -1e9 and 0. More than eight numbers, as of positions or in a
    table, are one NaN. Booleans that are no constants hold 0 and 1.
    """
    if value in graph.possible_numbers:
        return graph.possible_numbers[value]
    node = graph.maker(value)
    # `known` has literals, and what simple operations make of constants; `constants` has each array
    # that the program closes over.
    constant = graph.known.get(value, graph.constants.get(value))
    numbers = None
    if constant is not None:
        numbers = np.ravel(constant)
        # Most tables show in their first numbers that they hold many:
        # the others need not be sorted.
        if len(np.unique(numbers[:1000].astype(float))) > _MOST:
            numbers = _MANY
    elif graph.avals[value].dtype == bool:
        numbers = np.array([0.0, 1.0])
    # By the numbers of its operands. A parameter or an argument has no node, and gets None.
    elif node is not None:
        numbers = _result_of(graph, node)
    if numbers is not None:
        numbers = np.unique(numbers.astype(float))
        if len(numbers) > _MOST:
            numbers = _MANY
    graph.possible_numbers[value] = numbers
    return numbers


def is_mask(graph: Graph, value: int, hides: float = MASKED) -> bool:
    """Whether all numbers that an array may hold are 0, or `hides` and less,
    as those of a mask that is added."""
    numbers = numbers_in(graph, value)
    return numbers is not None and bool(((numbers == 0) | (numbers <= hides)).all())


def _result_of(graph: Graph, node: Node) -> np.ndarray | None:
    """The numbers that the result of an operation may hold, by those that its operands may hold;
    None if data decide, or parameters themselves.

    where(data, 0, -1e9) holds 0 and -1e9, and data + 1 gives None. Data times a number as large as
    a mask's are taken for a mask that is an argument: data * -1e9 holds -1e9, 0 and 1e9.
    """
    if node.name in _MOVING:
        inputs = node.inputs[:1]
    # The first operand of a choice says which of the others is chosen.
    elif node.name in CHOICES:
        inputs = node.inputs[1:]
    elif node.name in ("concatenate", *_ARITHMETIC):
        inputs = node.inputs
    else:
        # Without data these are numbers of the program, such as the cosines of positions, or made
        # of parameters too. They are not computed here (what a loop carries is made of itself): a
        # NaN stands for them.
        return _MANY if graph.of_data.isdisjoint(node.inputs) else None
    # The numbers of each operand, but for those of which data say which.
    known = []
    for value in inputs:
        numbers = numbers_in(graph, value)
        if numbers is not None:
            known.append(numbers)
    if len(known) < len(inputs):
        # Data times known numbers of 9000 or more, of either sign: the data are not looked at, but
        # taken for a mask of 0 and 1, or of 0 and -1 as in (mask - 1) * 1e9.
        if node.name == "mul" and known and (-np.abs(known[0]) <= MASKED).all():
            return np.concatenate([-known[0], [0.0], known[0]])
        return None
    if node.name not in _ARITHMETIC:
        return np.concatenate(known)
    # Each number of one operand with each of the other; `numbers_in` gives at most eight of each,
    # and `log` has one operand. Some pairs may not occur.
    with np.errstate(all="ignore"):
        combined = _ARITHMETIC[node.name](*np.meshgrid(*known))
    return combined.reshape(-1)
