"""Tell a convolution's window from its channels, and find patches, depthwise ones and groups."""

import re

from muonjax._names import roles
from muonjax._names.neighbors import Neighbors, Shape
from muonjax._names.path_words import words
from muonjax._names.roles import Answer, Parameter
from muonjax._names.widths_taken_and_given import Widths, channels

_LARGEST_WINDOW = 32
# An image has three channels, and no parameter gives a model's input.
_IMAGE_CHANNELS = 3


def patch_embedding(p: Parameter) -> Answer | None:
    """Adam for a kernel that cuts an image or a video into patches; None for other leaves.

    It is a convolution with an even window over few channels, [16, 16, 3, 768], in a module with the name of an
    embedding. Without such a name a large window over few channels is open.
    """
    # PyTorch stores [out, in, *window], Flax [*window, in, out].
    if p.is_called_weight and has_trailing_window(p.shape):
        outputs, inputs, side = p.shape[:3]
    elif has_leading_window(p.shape):
        side, inputs, outputs = p.shape[-3:]
    else:
        return None
    # Up to three modules around the kernel, "model/patch_embed/proj".
    modules = words(p.path)[-4:-1]
    is_named = bool(re.search("embed|patch|stem", "/".join(modules).lower()))
    # The patches of a vision transformer are at least 8 × 8, and its width is at least 128.
    is_large = side >= 8 and outputs >= 128
    if side % 2 or inputs > 16 or not (is_named or is_large):
        return None
    return Answer(None, roles.PATCHES.name, is_open=not is_named)


def grouped(p: Parameter, widths: Widths) -> Answer | None:
    """Adam for a depthwise convolution, [3, 3, 1, 32], open for one that may have groups; None for other leaves.

    Each output of a depthwise one is made of one channel, which has its own small filter and no matrix. With 4 groups a
    kernel over 16 channels is [3, 3, 4, 16]: no other parameter gives 4 channels, but one gives a multiple, 16.
    """
    inputs = channels(p, widths.numbers[p.path])
    # A convolution that alone takes one or three channels may be the first of a model over gray or colored images.
    may_be_first = widths.readers_of_channels[inputs] == 1
    if inputs == 1:
        return Answer(None, "one input channel: depthwise", is_open=may_be_first)
    is_over_image = inputs == _IMAGE_CHANNELS and may_be_first
    if inputs is None or widths.given[inputs] or is_over_image:
        return None
    (outputs,) = widths.gives[p.path]
    # With g groups, a width of g·inputs is given somewhere, and g divides the outputs.
    for width in widths.given:
        if width % inputs == 0 and outputs % (width // inputs) == 0:
            why = (
                "no other parameter gives as many channels, so that it may have groups"
            )
            return Answer(None, why, is_open=True)
    return None


def is_outputs_first(p: Parameter, neighbors: Neighbors) -> bool:
    """Whether a kernel of three axes or more is called `weight` and stored as PyTorch does, (out, in, *window).

    [64, 3, 7, 7] is, and [7, 7, 3, 64] is not. Where the shape shows no window, the other weights of the tree decide.
    """
    if not p.is_called_weight or p.rank < 3:
        return False
    # axlearn calls its kernels [*window, in, out] weights too.
    if has_leading_window(p.shape):
        return False
    if neighbors.outputs_first or has_trailing_window(p.shape):
        return True
    # Over time, [out, in, width] and [width, in, out] differ by where the shortest axis is.
    if p.role is not roles.CONVOLUTION or p.rank > 3:
        return False
    return p.shape[2] < min(p.shape[:2])


def has_leading_window(shape: Shape) -> bool:
    """Whether the leading axes look like the window of a convolution [*window, in, out].

    [3, 3, 16, 32] has one, and [2, 16, 16, 3, 768] with two frames of a video in front. The window
    is square, and its sides are short and less than the outputs.
    """
    if len(shape) not in (4, 5):
        return False
    *window, _, outputs = shape
    is_square = window[-1] == window[-2] <= _LARGEST_WINDOW
    return is_square and max(window) < outputs


def has_trailing_window(shape: Shape) -> bool:
    """Whether the trailing axes look like the window of a convolution [out, in, *window], [32, 16, 3, 3]."""
    outputs_and_inputs = shape[:2]
    window = shape[2:]
    return has_leading_window((*window, *reversed(outputs_and_inputs)))
