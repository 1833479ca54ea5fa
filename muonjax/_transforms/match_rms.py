"""The size of an orthogonalized update, from the shape of its matrix."""

import math

import optax

from muonjax._common.arguments import check_range, errors_of
from muonjax._matrices.matrix_view import (
    DimensionNumbersTree,
    MatrixView,
    matrix_pieces,
)


def match_rms(
    rms: float | None = 0.2,
    *,
    dimension_numbers: DimensionNumbersTree | None = None,
) -> optax.GradientTransformation:
    r"""Scale orthogonalized updates by their shape.

    An orthogonal m x n matrix of full rank has root mean square 1 / sqrt(max(m, n)); one of rank r
    has sqrt(r / min(m, n)) times that. It is multiplied by `rms` sqrt(max(m, n)), so that every
    update of full rank has the root mean square `rms`. AdamW's is usually 0.2 to 0.4, so 0.2 lets
    Muon take AdamW's weight decay, and two to four times its rate.

    Args:
      rms: The root mean square of an update of full rank; > 0. None multiplies by
        sqrt(max(1, fan_out / fan_in)) instead, as Jordan's Muon does.
      dimension_numbers: As in `orthogonalize`.

    Returns:
      A stateless `optax.GradientTransformation`.

    Raises:
      ValueError: If `rms` is not positive, or the dimension numbers do not fit the tree.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> tx = muonjax.match_rms(0.2)
      >>> updates, _ = tx.update({"w": jnp.eye(4)}, tx.init(None))
      >>> round(float(jnp.sqrt(jnp.mean(updates["w"] ** 2))), 6)
      0.2

    Source: Liu et al., "Muon is scalable for LLM training" (Moonlight), 2025, eq. (4); Jordan et
    al., "Muon", 2024.
    """
    if rms is not None:
        with errors_of("match_rms"):
            check_range(
                "rms", rms, "positive and finite", "; 0.2 is the usual RMS of AdamW's."
            )

    def factor(view: MatrixView) -> float:
        """What an orthogonalized matrix with this view is multiplied by."""
        if rms is None:
            # With fewer outputs than inputs the update stays, with a spectral norm of 1.
            return math.sqrt(max(1.0, view.fan_out / view.fan_in))
        # An orthogonal m x n matrix has the RMS 1 / sqrt(max(m, n)).
        return rms * math.sqrt(max(view.fan_in, view.fan_out))

    @errors_of("match_rms")
    def update(updates, params):
        del params
        pieces = matrix_pieces(dimension_numbers, updates)
        scaled = []
        for piece, x in zip(pieces, pieces.of(updates), strict=True):
            scaled.append(x * factor(piece.view))
        return pieces.replaced(updates, scaled)

    return optax.stateless(update)
