"""Tell masks from biases among the arrays that are added to logits, by the numbers that they may hold."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from muonjax._inspect.graph import Graph
from muonjax._inspect.possible_numbers import MASKED, numbers_in
from muonjax._inspect.values import Addend

# Softmax gives e^-20, 2e-9, of a share to what so much is added to; a larger number hides nothing.
_HIDES = -20.0
# In what a mask adds to what it shows, as in the logarithm of 1 + 1e-9.
_ROUNDING = 1e-3
# Numbers above `_HIDES` in a table that may be a mask; one with more is a bias.
_MOST_ABOVE = 2


class Masks(NamedTuple):
    """What is known of the masks and the biases of an attention."""

    hidden: float = MASKED  # what adds this or less to a logit hides it
    problem: str = ""  # why masks can't be told from biases
    doubt: str = ""  # the line of an array that may be either


def masks_in(graph: Graph, added: Sequence[Addend]) -> Masks:
    """How to tell which logits are hidden, from the arrays that are added to them, masks or biases.

    If a mask of 0 and -100 is all that is added, what adds -50 or less hides a logit. Next to a bias, whose numbers may
    be anything, only what adds `MASKED` (-9000) or less does, so that the mask of -100 is a problem.
    """
    weakest = -math.inf  # the number nearest to 0 by which one of the masks hides
    biases: list[Addend] = []
    doubts: list[Addend] = []  # masks or biases: data give their numbers
    for addend in added:
        hiding = _hiding_number(graph, addend)
        if hiding is None:
            doubts.append(addend)
        elif hiding == 0:
            biases.append(addend)
        else:
            weakest = max(weakest, hiding)
    if not biases and not doubts:
        return Masks(max(weakest / 2, MASKED))
    # There is no mask, or each adds `MASKED` or less, as one of -1e9 does. A bias of ordinary size stays far above.
    if weakest <= MASKED:
        return Masks(doubt=graph.line(doubts[0].node) if doubts else "")
    line = graph.line((*doubts, *biases)[0].node)
    return Masks(
        problem=f"a mask that adds {weakest:g} can't be told from a bias: {line}"
    )


def _hiding_number(graph: Graph, addend: Addend) -> float | None:
    """The number by which a mask hides: -1e9 for an array of 0 and -1e9. 0 for a bias, None for what may be either.

    If there are several such numbers, it is the one nearest to 0.
    """
    numbers = numbers_in(graph, addend.value)
    if numbers is None:  # data give them
        return None
    numbers = addend.sign * numbers  # each once
    # NaN are numbers that are not known, as of positions.
    has_unknown = bool(np.isnan(numbers).any())
    hiding, others = numbers[numbers <= _HIDES], numbers[numbers > _HIDES]
    # Nothing is hidden, or nothing is shown.
    if not hiding.size or not (others.size or has_unknown):
        return 0.0
    weakest = float(hiding.max())
    # What a mask does not hide it adds 0 to, or a rounded 0.
    if not has_unknown and others.min() > -_ROUNDING:
        return weakest
    # A bias and a mask in one array, as ALiBi's, counts as a bias: next to one, what adds `MASKED` or less hides.
    if weakest <= MASKED:
        return 0.0
    # Many other numbers make a bias, of which some happen to be large, as of distances. One or two may be those by
    # which a mask shows.
    return 0.0 if len(others) > _MOST_ABOVE and not has_unknown else None
