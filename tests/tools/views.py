"""The view of one leaf, as the tests take it."""

from muonjax._matrices.matrix_view import matrix_pieces


def matrix_view(leaf, numbers, *, call):
    """The view of one leaf (anything with shape and dtype), whose parts are equal."""
    (piece,) = matrix_pieces(numbers, leaf, call=call)
    return piece.view
