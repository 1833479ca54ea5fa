"""Tell a convolution's window from its channels, and find patches, depthwise ones and groups."""

import re
from collections.abc import Sequence

from muonjax._names import roles
from muonjax._names.neighbors import Neighbors, Shape
from muonjax._names.paths import Path, words
from muonjax._names.roles import Answer, Parameter
from muonjax._names.widths import Matrices, Widths, channels

_LARGEST_WINDOW = 32
# An image has three; what nothing else gives may be the model's input.
_IMAGE_CHANNELS = 3


def patch_embedding(p: Parameter) -> Answer | None:
    """The answer for a kernel that cuts an image or a video into patches; None for other leaves.

    Its window is even, and it is named for an embedding, or, which stays open, it is large and sees
    few channels.
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

    A single one may be a model's first convolution, so that it is open.
    """
    paths = []
    for p in parameters:
        if channels(p, numbers[p.path]) == 1:
            paths.append(p.path)
    answer = Answer(None, "one input channel: depthwise", is_open=len(paths) == 1)
    return dict.fromkeys(paths, answer)


def grouped(p: Parameter, widths: Widths) -> Answer | None:
    """The answer for a convolution that may have groups; None for other leaves.

    No parameter gives as many channels as its kernel takes, and one gives a multiple that divides
    the outputs into groups. Three channels are an image's, if one convolution alone takes them.
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
    # A window of one axis is the shortest of three.
    if p.role is not roles.CONVOLUTION or p.rank > 3:
        return False
    return p.shape[2] < min(p.shape[:2])


def is_window(shape: Shape) -> bool:
    """Whether the leading axes of [*window, in, out] look like a window.

    The last two are equal and small, and none is as large as the outputs; one more may count
    frames.
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
