"""Tell a convolution's window from its channels, and find patches, depthwise ones and groups."""

import re
from collections.abc import Collection

from muonjax._matrices.matrix_view import DimensionNumbers, axes_of
from muonjax._names import roles
from muonjax._names.neighbors import Neighbors, Shape
from muonjax._names.path_words import words
from muonjax._names.roles import Answer, Parameter

_LARGEST_WINDOW = 32
# An image has three channels, and no parameter gives a model's input.
_IMAGE_CHANNELS = 3


def patch_embedding(p: Parameter) -> Answer | None:
    """Adam for a kernel that cuts an image or a video into patches; None for other leaves.

    It is a convolution with an even window over few channels, [16, 16, 3, 768], in a module with
    the name of an embedding. Without such a name a large window over few channels is open:
    Adam takes it, with a warning.
    """
    # PyTorch stores [out, in, *window], Flax [*window, in, out]. A shape fits one of them at most,
    # since a window is smaller than its outputs.
    if has_trailing_window(p.shape):
        outputs, inputs, *window = p.shape
    elif has_leading_window(p.shape):
        *window, inputs, outputs = p.shape
    else:
        return None
    # Up to three modules around the kernel, "model/patch_embed/proj".
    modules = words(p.path)[-4:-1]
    is_named = re.search("embed|patch|stem", "/".join(modules).lower())
    # The window over a video begins with its frames, and is square along height and width.
    side = window[-1]
    # The patches of a vision transformer are at least 8 × 8, and its width is at least 128.
    is_large = side >= 8 and outputs >= 128
    # The sides of patches are even, and those of other windows mostly odd, as 3 × 3. An image has
    # about three channels, and what an autoencoder makes of one often 4 or 16.
    if side % 2 or inputs > 16 or not (is_named or is_large):
        return None
    return Answer(None, roles.PATCHES.name, is_open=not is_named)


def grouped(
    p: Parameter, numbers: DimensionNumbers, given: Collection[int]
) -> Answer | None:
    """An open answer (Adam, with a warning) for a convolution that may be depthwise,
    [3, 3, 1, 32], or have groups; None for other leaves.

    Each output of a depthwise one is made of one channel, which has its own small filter and no
    matrix. With 4 groups a kernel over 16 channels is [3, 3, 4, 16]: no parameter gives 4 channels,
    but one gives a multiple, 16.

    Args:
      p: A parameter.
      numbers: Its matrix.
      given: The widths that the parameters of the tree give, this one among them.
    """
    rows, columns = p.sizes_of(numbers)
    # A kernel whose name says nothing may be a convolution's. Its rows are then its channels and
    # its window, more than the one axis of a dense kernel, and its columns are its outputs.
    may_be_convolution = p.role in (roles.CONVOLUTION, roles.UNKNOWN)
    if not may_be_convolution or len(rows) == 1:
        return None
    # PyTorch's kernels are [out, in, *window], others [*window, in, out]: the channels are the
    # first axis of the rows, or the last. `p.axes[0]` is the first axis of one layer, 1 in a stack.
    is_outputs_first = axes_of(numbers.output_axis) == p.axes[:1]
    inputs = rows[0] if is_outputs_first else rows[-1]
    if inputs == 1:
        return Answer(
            None,
            "one input channel: depthwise, or the first layer over gray images",
            is_open=True,
        )
    # Without groups a parameter gives as many channels as the kernel takes, or they are those of an
    # image, which no parameter gives.
    if inputs in given or inputs == _IMAGE_CHANNELS:
        return None
    for width in given:
        # With g groups, the layer before gives g·inputs channels, and g divides the outputs.
        groups, rest = divmod(width, inputs)
        if rest == 0 and columns[0] % groups == 0:
            return Answer(
                None,
                "no other parameter gives as many channels, so that it may have groups",
                is_open=True,
            )
    # No width fits: the channels may come from the data.
    return None


def outputs_are_first(p: Parameter, neighbors: Neighbors) -> bool:
    """Whether a kernel of three axes or more is called `weight` and stored as PyTorch does,
    (out, in, *window).

    [64, 3, 7, 7] is, and [7, 7, 3, 64] is not. Where the shape shows no window,
    the other weights of the tree decide.
    """
    # axlearn calls its kernels [*window, in, out] weights too.
    if not p.is_called_weight or has_leading_window(p.shape):
        return False
    return bool(neighbors.outputs_first) or has_trailing_window(p.shape)


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
    """Whether the trailing axes look like the window of a convolution [out, in, *window],
    [32, 16, 3, 3]."""
    # [3, 3, 16, 32]
    return has_leading_window((*shape[2:], *reversed(shape[:2])))
