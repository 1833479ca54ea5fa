"""Count the widths that parameters take and give, which tells where a model may begin and end."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from muonjax._matrices.matrix_view import DimensionNumbers, axes_of
from muonjax._names import roles
from muonjax._names.path_words import Path
from muonjax._names.roles import Parameter

Matrices = Mapping[Path, DimensionNumbers | None]


class Widths:
    """Which widths the parameters of a tree take as inputs and give as outputs.

    A kernel [32, 80] takes 32 and gives 80. A width that nothing takes may be the output of the model, and one that
    nothing gives its input.

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
        self.taken: Counter[int] = Counter()
        self.given: Counter[int] = Counter()
        self.readers_of_channels: Counter[int | None] = Counter()
        for p in parameters:
            takes, gives = _widths(p, numbers[p.path])
            self.takes[p.path] = takes
            self.gives[p.path] = gives
            # A width is the size of an axis, or of several as one: a kernel [8, 16] takes {8} and gives {16}. A
            # parameter counts once for each of its widths.
            self.taken.update(takes)
            self.given.update(gives)
            # None counts what is no convolution, and is never asked for.
            self.readers_of_channels[channels(p, numbers[p.path])] += 1

    def is_untaken(self, p: Parameter) -> bool:
        """Whether no other parameter takes what a matrix gives."""
        (width,) = self.gives[p.path]
        # A square matrix takes the width that it gives.
        takes_itself = width in self.takes[p.path]
        return self.taken[width] == takes_itself

    def is_ungiven(self, p: Parameter) -> bool:
        """Whether no parameter gives what a matrix takes."""
        return self.given.keys().isdisjoint(self.takes[p.path])


def channels(p: Parameter, numbers: DimensionNumbers | None) -> int | None:
    """How many channels the window of a convolution sees; None for other leaves."""
    # A kernel whose name says nothing may be a convolution's.
    if numbers is None or p.role not in (roles.CONVOLUTION, roles.UNKNOWN):
        return None
    # The rows of a convolution are its channels and its window, so more than one axis.
    rows = axes_of(numbers.reduction_axis)
    if len(rows) == 1:
        return None
    # PyTorch's kernels are [out, in, *window], others [*window, in, out]: the channels are the first row, or the last.
    is_outputs_first = axes_of(numbers.output_axis) == (0,)
    axis = rows[0] if is_outputs_first else rows[-1]
    return p.shape[axis]


def _widths(
    p: Parameter, numbers: DimensionNumbers | None
) -> tuple[set[int], set[int]]:
    """The widths that a parameter takes and those that it gives.

    A kernel [32, 80] takes {32} and gives {80}; an attention's output [4, 16, 64] takes {4, 16, 64} and gives {64}.
    """
    # A scale or a table has the width of the layers before and after it.
    if p.role.name in ("scale", "embedding") and p.shape:
        width = {p.shape[-1]}
        return width, width
    # An output head gives the model's output, which no layer takes. A layer with one output is taken for one, and so is
    # a layer with one input, since names do not say which axis is which.
    is_head = p.role is roles.HEAD or (p.role.muon and 1 in p.shape)
    if p.rank == 2 and is_head:
        return {p.shape[0]}, set()
    # A depthwise convolution changes each channel by itself.
    if numbers is None or channels(p, numbers) == 1:
        return set(), set()
    rows = [p.shape[axis] for axis in axes_of(numbers.reduction_axis)]
    columns = [p.shape[axis] for axis in axes_of(numbers.output_axis)]
    # Each of several rows counts: the channels without the window, or the features of one head.
    return {*rows}, {math.prod(columns)}
