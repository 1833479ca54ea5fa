"""Tell a convolution's window from its channels, and find patches, depthwise ones and groups."""

import re
from collections.abc import Sequence

from muonjax._names import roles
from muonjax._names.neighbors import Neighbors, Shape
from muonjax._names.paths import Path, words
from muonjax._names.roles import Answer, Parameter
from muonjax._names.widths import Matrices, Widths, channels

_LARGEST_WINDOW = 32
# An image has three channels, and no parameter gives a model's input.
_IMAGE_CHANNELS = 3


def patch_embedding(p: Parameter) -> Answer | None:
    """The answer for a kernel that cuts an image or a video into patches; None for other leaves.

    It has an even window over few channels, and the name of an embedding. Without such a name a
    large window over few channels stays open.
    """
    if p.is_weight and is_trailing_window(p.shape):
        outputs, inputs, side = p.shape[:3]
    elif is_window(p.shape):
        side, inputs, outputs = p.shape[-3:]
    else:
        return None
    # The last is the kernel's own name.
    modules = "/".join(words(p.path)[-4:-1]).lower()
    is_named = bool(re.search("embed|patch|stem", modules))
    is_large = side >= 8 and outputs >= 128
    if side % 2 or inputs > 16 or not (is_named or is_large):
        return None
    return Answer(None, roles.PATCHES.name, is_open=not is_named)


def depthwise(parameters: Sequence[Parameter], numbers: Matrices) -> dict[Path, Answer]:
    """The answers for convolutions whose window sees one channel.

    If there is only one, it may be a model's first convolution, and stays open.
    """
    paths = []
    for p in parameters:
        if channels(p, numbers[p.path]) == 1:
            paths.append(p.path)
    answer = Answer(None, "one input channel: depthwise", is_open=len(paths) == 1)
    return dict.fromkeys(paths, answer)


def grouped(p: Parameter, widths: Widths) -> Answer | None:
    """The answer for a convolution that may have groups; None for other leaves.

    It may have groups if no parameter gives as many channels as its kernel takes, but one gives a
    multiple that divides the outputs. Three channels are an image's if only one convolution takes
    them.
    """
    inputs = channels(p, widths.numbers[p.path])
    if inputs is None or widths.given[inputs]:
        return None
    if inputs == _IMAGE_CHANNELS and widths.readers_of_channels[inputs] == 1:
        return None
    (outputs,) = widths.gives[p.path]
    for width in widths.given:
        if width % inputs == 0 and outputs % (width // inputs) == 0:
            why = "no other parameter gives as many channels, so that it may have groups"
            return Answer(None, why, is_open=True)
    return None


def is_outputs_first(p: Parameter, neighbors: Neighbors) -> bool:
    """Whether a leaf called `weight` is a convolution's [out, in, *window]."""
    if not p.is_weight or p.rank < 3:
        return False
    if is_window(p.shape):
        return False
    if neighbors.outputs_first or is_trailing_window(p.shape):
        return True
    # If the window has one axis, this axis is the shortest of the three.
    if p.role is not roles.CONVOLUTION or p.rank > 3:
        return False
    return p.shape[2] < min(p.shape[:2])


def is_window(shape: Shape) -> bool:
    """Whether the leading axes of [*window, in, out] look like a window.

    Its last two sizes are equal and small, and all are smaller than the outputs. An axis of frames
    may come first.
    """
    if len(shape) not in (4, 5):
        return False
    *window, _, outputs = shape
    is_square = window[-1] == window[-2] <= _LARGEST_WINDOW
    return is_square and max(window) < outputs


def is_trailing_window(shape: Shape) -> bool:
    """Whether the trailing axes of [out, in, *window] look like a window."""
    if len(shape) not in (4, 5):
        return False
    outputs, _, *window = shape
    is_cube = len(set(window)) == 1
    return is_cube and window[0] <= _LARGEST_WINDOW and window[0] < outputs
