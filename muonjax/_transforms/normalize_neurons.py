"""NorMuon's step: each neuron of an orthogonalized update is divided by the root of its running
mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import optax

from muonjax._common.arguments import check_range, errors_of
from muonjax._common.explicit_axes import zero_beside
from muonjax._common.linalg import at_least_float32, or_one
from muonjax._matrices.matrix_view import (
    DimensionNumbersTree,
    MatrixView,
    matrix_pieces,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Inexact


class NormalizeNeuronsState(NamedTuple):
    """State of `normalize_neurons`.

    Attributes:
      second_moment: A tree like the parameters. For each matrix the running mean, for each of its
        neurons, of the mean square of that neuron's entries; float32, in the leaf's shape with its
        reduction axes of size 1. `optax.MaskedNode()` in place of a leaf that is no matrix, a tuple
        where a leaf has several parts.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> muonjax.normalize_neurons().init({"w": jnp.ones((3, 4))}).second_moment["w"].shape
      (1, 4)
    """

    second_moment: Any


def normalize_neurons(
    decay: float = 0.95,
    *,
    eps: float = 1e-8,
    dimension_numbers: DimensionNumbersTree | None = None,
) -> optax.GradientTransformation:
    r"""Divide each neuron of an orthogonalized update by the root of its running mean square,
    and keep the norm.

    With O [fan_in, fan_out] an orthogonalized update, whose column j holds the weights of neuron j,

        v_j <- decay v_j + (1 - decay) mean_i O_ij^2
        P_ij = O_ij / (sqrt(v_j) + eps)
        O   <- P ||O||_F / ||P||_F

    It belongs directly after `orthogonalize`: other updates pass without an error, but their second
    moment then follows the size of the gradient.

    Args:
      decay: The decay of the running mean, in [0, 1).
      eps: Added to the root, > 0.
      dimension_numbers: As in `orthogonalize`. The neurons are the output axes; each matrix of a
        stacked leaf has its own.

    Returns:
      An `optax.GradientTransformation` whose state is a `NormalizeNeuronsState`.

    Raises:
      ValueError: If `decay` or `eps` is out of its range, the dimension numbers do not fit the
        tree, or the state is that of other parameters.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> tx = muonjax.normalize_neurons()
      >>> updates = {"w": jnp.array([[3.0, 0.1], [4.0, 0.2]])}
      >>> updates, state = tx.update(updates, tx.init(updates))
      >>> norms = jnp.linalg.norm(updates["w"], axis=0)
      >>> [round(float(norm), 3) for norm in norms]  # of both neurons
      [3.539, 3.539]
      >>> state.second_moment["w"].shape
      (1, 2)

    Source: Li et al., "NorMuon: making Muon more efficient and scalable",
    2025 (arXiv:2510.05491), algorithm 1.
    """
    with errors_of("normalize_neurons"):
        check_range("decay", decay, "in [0, 1)", "; 0.95 is usual.")
        check_range("eps", eps, "positive and finite", "; 1e-8 is usual.")

    @errors_of("normalize_neurons")
    def init(params) -> NormalizeNeuronsState:
        pieces = matrix_pieces(dimension_numbers, params)
        moments = []
        for piece, array in zip(pieces, pieces.of(params), strict=True):
            # A number for each neuron: of a leaf [layers, d, columns] an array
            # [layers, 1, columns], sharded as the sum over d is that `update` takes.
            rows = piece.view.reduction_axes
            zeros = jnp.zeros(piece.view.summed_shape(rows), jnp.float32)
            moments.append(zeros + zero_beside(array, rows).astype(jnp.float32))
        return NormalizeNeuronsState(pieces.as_state(moments))

    @errors_of("normalize_neurons")
    def update(updates, state, params=None):
        del params
        # A piece is a leaf, or one matrix of a fused leaf, such as the queries of a kernel of
        # queries, keys and values. A leaf that is no matrix has no piece, and passes unchanged.
        pieces = matrix_pieces(dimension_numbers, updates)
        # Each neuron, a column, has one number: a moment has the shape of its piece,
        # with size 1 along the rows.
        shapes = [
            piece.view.summed_shape(piece.view.reduction_axes) for piece in pieces
        ]
        # The arrays of the state, one for each piece; raises unless they have these shapes.
        # `as_state` below is the inverse: it returns a tree like the parameters.
        moments = pieces.of_state(state.second_moment, shapes)
        normalized = []
        new_moments = []
        for piece, x, moment in zip(pieces, pieces.of(updates), moments, strict=True):
            # Each neuron is divided by the root of its running mean square, and then each matrix by
            # one number, so that its norm is what it was.
            x, moment = _normalize(x, moment, piece.view, decay, eps)
            normalized.append(x)
            new_moments.append(moment)
        updates = pieces.replaced(updates, normalized)
        return updates, NormalizeNeuronsState(pieces.as_state(new_moments))

    return optax.GradientTransformation(init, update)


def _normalize(
    update: Inexact[Array, "*leaf"],
    moment: Float[Array, "*neurons"],
    view: MatrixView,
    decay: Any,
    eps: Any,
) -> tuple[Inexact[Array, "*leaf"], Float32[Array, "*neurons"]]:
    """The step of `normalize_neurons` for one piece, a leaf or one part of a fused leaf: its new
    update, in the dtype of the old one, and the new second moment of its neurons, float32.

    For a leaf [d, heads, size] with rows d the moment is [1, heads, size].
    """
    o = update.astype(at_least_float32(update.dtype))
    # |O_j|^2 of each neuron, which is a column, [1, heads, size]
    squares = jnp.sum(jnp.abs(o) ** 2, view.reduction_axes, keepdims=True)
    # v <- decay v + (1 - decay) |O_j|^2 / fan_in, the mean over the fan_in rows. Adam's correction
    # of the first means would be one factor for all neurons, which |O| / |P| removes.
    moment = decay * moment.astype(squares.dtype) + (1 - decay) * squares / view.fan_in
    # P_j = O_j / (sqrt(v_j) + eps)
    factor = 1 / (jnp.sqrt(moment) + eps)
    # |O|^2 and |P|^2 from the neurons' own norms: no second pass over the update.
    square = jnp.sum(squares, view.output_axes, keepdims=True)
    square_of_p = jnp.sum(squares * factor**2, view.output_axes, keepdims=True)
    # O <- P |O| / |P|
    factor *= jnp.sqrt(square / or_one(square_of_p))
    normalized = o * factor.astype(o.dtype)
    return normalized.astype(update.dtype), moment.astype(jnp.float32)
