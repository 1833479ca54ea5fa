"""Hyperball optimization: each weight matrix keeps its Frobenius norm, and a step is an angle on that sphere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muonjax._hyperparameters import is_known
from muonjax._linalg import at_least_float32
from muonjax._matrix_view import DimensionNumbersTree, MatrixView, matrix_pieces, replace_pieces

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact


def hyperball(
    learning_rate: optax.ScalarOrSchedule, *, dimension_numbers: DimensionNumbersTree | None = None
) -> optax.GradientTransformation:
    r"""Step by a fixed angle, and return to the sphere: the weight's norm never changes.

    With O the update so far, such as an orthogonalized one, and R = ||W||_F,

        W <- R normalize(W - learning_rate R normalize(O)),    normalize(X) = X / ||X||_F

    It takes the place of `optax.scale_by_learning_rate`, at the end of the chain; only `qk_clip` may follow. The norm
    is that of each whole matrix, on every mesh. No weight decay and no `match_rms` belong beside it: the norm of a
    weight can't decay, and the length of O does not count. Everything else of a chain may stand before it,
    `normalize_neurons` too.

    Args:
      learning_rate: A number or a schedule, the length of a step in units of the weight's norm, >= 0; 0.01 to 0.02 is
        usual.
      dimension_numbers: As in `orthogonalize`; each matrix of a stacked leaf has its own sphere. A leaf that is no
        matrix takes the step -learning_rate O.

    Returns:
      An `optax.GradientTransformation` with the state of `optax.scale_by_learning_rate`; `update` needs `params`.

    Raises:
      ValueError: If `learning_rate` is negative or infinite, a matrix is zero at `init` (traced, it stays zero),
        `update` gets no `params`, or the dimension numbers do not fit the tree.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> tx = muonjax.hyperball(0.1)
      >>> params = {"w": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
      >>> updates, _ = tx.update({"w": jnp.eye(2)}, tx.init(params), params)
      >>> float(jnp.linalg.norm(optax.apply_updates(params, updates)["w"]))
      5.0

    Source: Wen et al., "Fantastic pretraining optimizers and where to find them II: hyperball optimization", 2026
    (arXiv:2606.16899); with R taken anew at each step, so that what `qk_clip` has shrunk stays shrunk.
    """
    if is_known(learning_rate) and not 0 <= learning_rate < math.inf:
        raise ValueError(
            f"hyperball(learning_rate={learning_rate!r}) must be finite and not negative; 0.02 is usual."
        )
    rate = optax.scale_by_learning_rate(learning_rate, flip_sign=False)

    def init(params: optax.Params) -> optax.OptState:
        paths, leaves = (
            zip(*jax.tree.leaves_with_path(params), strict=True) if jax.tree.leaves(params) else ((), ())
        )
        for piece in matrix_pieces(dimension_numbers, params, call="hyperball"):
            path, leaf = paths[piece.leaf], leaves[piece.leaf]
            if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
                continue
            w = _wide(piece.take(leaves), piece.view)
            if not bool((_dot(w, w, piece.view) > 0).all()):
                raise ValueError(
                    f"hyperball: the leaf {jax.tree_util.keystr(path)} of shape {leaf.shape} has a matrix of zeros, "
                    "which has no sphere to stay on; start it from random numbers, or give it to another optimizer."
                )
        return rate.init(jnp.zeros(()))

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None):
        if params is None:
            raise ValueError("hyperball: update(updates, state, params) needs params.")
        eta: Any
        eta, state = rate.update(jnp.ones(()), state)
        leaves, treedef = jax.tree.flatten(updates)
        weights = treedef.flatten_up_to(params)
        pieces = matrix_pieces(dimension_numbers, updates, call="hyperball")
        steps = [_step(piece.take(leaves), piece.take(weights), piece.view, eta) for piece in pieces]
        others = [-eta.astype(u.dtype) * u for u in leaves]  # of matrices, replaced
        return treedef.unflatten(replace_pieces(others, pieces, steps)), state

    return optax.GradientTransformation(init, update)


def _wide(leaf: jax.Array, view: MatrixView) -> jax.Array:
    return view.split(leaf).astype(at_least_float32(leaf.dtype))


def _dot(
    x: Inexact[Array, "*split"], y: Inexact[Array, "*split"], view: MatrixView
) -> Float[Array, "*#split"]:
    """Re <X, Y> of each matrix, with axes of size 1 for rows and columns."""
    return jnp.sum((x * y.conj()).real, (*view.reduction_axes, *view.output_axes), keepdims=True)


def _step(
    leaf: Inexact[Array, "*leaf"], weight: Inexact[Array, "*leaf"], view: MatrixView, eta: Float[Array, ""]
) -> Inexact[Array, "*leaf"]:
    """What to add to W."""
    w, u = _wide(weight, view), _wide(leaf, view)
    w2, u2, wu = _dot(w, w, view), _dot(u, u, view), _dot(w, u, view)
    toward = -eta * jnp.sqrt(w2 / jnp.where(u2 == 0, 1, u2))
    # ||W + toward U||_F from the three sums: no second reduction.
    moved2 = w2 + 2 * toward * wu + toward**2 * u2
    back = jnp.sqrt(w2 / jnp.where(moved2 == 0, 1, moved2))
    step = (back - 1) * w + back * toward * u
    return view.join(step.astype(leaf.dtype), like=leaf)
