"""Count the widths that parameters take and give, which tells where a model may begin and end."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from muonjax._matrices.matrix_view import DimensionNumbers, axes_of
from muonjax._names import roles
from muonjax._names.paths import Path
from muonjax._names.roles import Parameter

Matrices = Mapping[Path, DimensionNumbers | None]


class Widths:
    """What the parameters of a tree take and give.

    Attributes:
      numbers: The matrices of each parameter in one layer's axes, None where it has none.
      takes: The widths that a parameter multiplies, by its path.
      gives: The widths of what comes out.
      taken: How many parameters take a width.
      given: How many parameters give a width.
      readers_of_channels: How many convolutions have a number of channels in their window.
    """

    def __init__(self, parameters: Sequence[Parameter], numbers: Matrices):
        self.numbers = numbers
        self.takes: dict[Path, set[int]] = {}
        self.gives: dict[Path, set[int]] = {}
        for p in parameters:
            takes, gives = _widths(p, numbers[p.path])
            self.takes[p.path] = takes
            self.gives[p.path] = gives
        self.taken = Counter(chain.from_iterable(self.takes.values()))
        self.given = Counter(chain.from_iterable(self.gives.values()))
        self.readers_of_channels = Counter(channels(p, numbers[p.path]) for p in parameters)

    def is_untaken(self, p: Parameter) -> bool:
        """Whether no other parameter takes what a matrix gives."""
        (width,) = self.gives[p.path]
        by_itself = width in self.takes[p.path]  # as a square matrix does
        return self.taken[width] == by_itself

    def is_ungiven(self, p: Parameter) -> bool:
        """Whether no parameter gives what a matrix takes."""
        return not any(self.given[width] for width in self.takes[p.path])


def channels(p: Parameter, numbers: DimensionNumbers | None) -> int | None:
    """How many channels the window of a convolution sees; None for other leaves."""
    if numbers is None or p.role not in (roles.CONVOLUTION, roles.UNKNOWN):
        return None
    # The window's axes and the one of the channels.
    rows = axes_of(numbers.reduction_axis)
    if len(rows) == 1:
        return None
    # PyTorch's [out, in, *window], or [*window, in, out].
    is_outputs_first = axes_of(numbers.output_axis) == (0,)
    axis = rows[0] if is_outputs_first else rows[-1]
    return p.shape[axis]


def _widths(p: Parameter, numbers: DimensionNumbers | None) -> tuple[set[int], set[int]]:
    """What a parameter takes and what it gives."""
    # A scale and a table have the width of the layers before and after them.
    if p.role.name in ("scale", "embedding") and p.shape:
        width = {p.shape[-1]}
        return width, width
    # The output of a head is the model's output, and so is a single number.
    is_head = p.role is roles.HEAD or (p.role.muon and 1 in p.shape)
    if p.rank == 2 and is_head:
        return {p.shape[0]}, set()
    if numbers is None:
        return set(), set()
    rows = [p.shape[axis] for axis in axes_of(numbers.reduction_axis)]
    columns = [p.shape[axis] for axis in axes_of(numbers.output_axis)]
    # Each axis counts alone too: the channels of a window, or one head of an attention's output.
    return {*rows, math.prod(rows)}, {math.prod(columns)}
