"""Shapes that stand for leaves, and the view of one leaf."""

import jax
import numpy as np

from muonjax import FusedDimensionNumbers, MuonDimensionNumbers
from muonjax._common.arguments import errors_of
from muonjax._matrices.matrix_view import matrix_pieces

# The shape of a leaf, its dimension numbers, and where each of its matrices is.
MATRICES = [
    (
        (2, 6, 3, 4),  # layers, features, heads, size
        MuonDimensionNumbers(1, 3),
        [np.s_[layer, :, head] for layer in range(2) for head in range(3)],
    ),
    (
        (6, 12),
        FusedDimensionNumbers(0, 1, parts=3, axis=1),
        [np.s_[:, :4], np.s_[:, 4:8], np.s_[:, 8:]],
    ),
    (
        (6, 12),
        FusedDimensionNumbers(0, 1, parts=(6, 2, 4), axis=1),
        [np.s_[:, :6], np.s_[:, 6:8], np.s_[:, 8:]],
    ),
]


def leaf(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def matrix_view(leaf, numbers, *, call):
    """The view of one leaf (anything with shape and dtype), which is not cut."""
    with errors_of(call):
        (piece,) = matrix_pieces(numbers, leaf)
    return piece.view
