"""Tell masks from biases among the arrays that are added to logits,
by the numbers that they may hold."""

from collections.abc import Sequence

from muonjax._inspect.clip_proposals import Refused
from muonjax._inspect.graph import Graph
from muonjax._inspect.possible_numbers import MASKED, numbers_in
from muonjax._inspect.values import Addend

# Softmax gives e^-20, 2e-9, of a share to what so much is added to; a larger number hides nothing.
_HIDES = -20.0


def doubt_of_masks(graph: Graph, added: Sequence[Addend]) -> str:
    """The line where the first array that may be a mask or a bias is added to logits,
    for a warning; "" if there is none.

    That is an array whose numbers only data say, such as an argument. When it runs, an entry to
    which it adds `MASKED` (-9000) or less counts as hidden; anything else counts as a bias, and is
    left out of the largest logits.

    Raises:
      Refused: An array, even after a doubtful one, may add a number above -9000 that is -20
        (`_HIDES`) or less: it is a mask of 0 and -100, or a bias.
    """
    doubt = ""
    for addend in added:
        line = graph.line(addend.node)
        # The numbers that it may hold; None if only data say. Many, as of ALiBi, are one NaN, which
        # is not between any bounds: such a table is a bias.
        numbers = numbers_in(graph, addend.value)
        if numbers is None:
            doubt = doubt or line
            continue
        # What is subtracted has the sign -1.
        numbers = addend.sign * numbers
        # Numbers of -9000 or less are those of a mask, and those above -20 hide nothing and are
        # those of a bias. In between either is possible.
        weak = numbers[(numbers > MASKED) & (numbers <= _HIDES)]
        if weak.size:
            raise Refused(
                f"a mask that adds {weak.max():g} can't be told from a bias; add -jnp.inf: {line}"
            )
    return doubt
