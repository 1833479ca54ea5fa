"""Keep the norm of each weight: a step by a fixed angle, and back to the sphere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muonjax._common.arguments import check_rates, errors_of, require_params
from muonjax._common.linalg import at_least_float32, or_one, square_of_any_size
from muonjax._matrices.matrix_view import (
    DimensionNumbersTree,
    MatrixView,
    matrix_pieces,
)
from muonjax._transforms.learning_rate import scale_by_learning_rate

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact


# A norm that differs from the kept one by no more than this share, or than the last bit of the
# weight or the update, counts as the kept one.
_LEAST_TOLERANCE = 1e-5


class HyperballState(NamedTuple):
    """State of `hyperball`.

    Attributes:
      learning_rate: The state of `optax.inject_hyperparams` for a schedule,
        `optax.EmptyState()` for a number.
      rms: A tree like the parameters. For each matrix ||W||_F / sqrt(m n), which it keeps; float32
        or wider, in the leaf's shape with the axes of the matrix of size 1. `optax.MaskedNode()` in
        place of a leaf that is no matrix, a tuple where a leaf has several parts.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> muonjax.hyperball(0.1).init({"w": jnp.full((3, 4), 2.0)}).rms["w"]
      Array([[2.]], dtype=float32)
    """

    learning_rate: Any
    rms: Any


def hyperball(
    learning_rate: optax.ScalarOrSchedule,
    *,
    dimension_numbers: DimensionNumbersTree | None = None,
) -> optax.GradientTransformation:
    r"""Step by a fixed angle, and return to the sphere: the weight's norm never changes.

    With O the update so far, such as an orthogonalized one, and R = ||W||_F,

        W <- R normalize(W - learning_rate R normalize(O)),    normalize(X) = X / ||X||_F

    It takes the place of `optax.scale_by_learning_rate`, at the end of the chain; only `qk_clip`
    may follow. The norm is that of each whole matrix, on every mesh. Add no weight decay and no
    `match_rms`: the norm of a weight can't decay, and the length of O does not count. Everything
    else of a chain may come before it, `normalize_neurons` too.

    R is kept in the state, so that the rounding of thousands of steps in bfloat16 does not add up:
    the norm stays within 0.4 % of R, one rounding. (Stochastic rounding would let it grow, and
    `optax.apply_updates` rounds after us.) R follows what changes the norm from outside, such as
    `qk_clip`, by more than the last bit of the weight or the update: 0.8 % in bfloat16, 0.001 % in
    float32. A smaller clip is taken back.

    Args:
      learning_rate: A number or a schedule, the length of a step in units of the weight's norm, >=
        0; 0.01 to 0.02 is usual.
      dimension_numbers: As in `orthogonalize`; each matrix of a stacked leaf has its own sphere. A
        leaf that is no matrix takes the step -learning_rate O.

    Returns:
      An `optax.GradientTransformation` whose state is a `HyperballState`; `update` needs `params`.

    Raises:
      ValueError: If `learning_rate` is negative or infinite, a matrix is zero at `init` (traced, it
        stays zero), `update` gets no `params`, the dimension numbers do not fit the tree, or the
        state is that of other parameters.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> tx = muonjax.hyperball(0.1)
      >>> params = {"w": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
      >>> updates, _ = tx.update({"w": jnp.eye(2)}, tx.init(params), params)
      >>> round(float(jnp.linalg.norm(optax.apply_updates(params, updates)["w"])), 5)
      5.0

    Source: Wen et al., "Fantastic pretraining optimizers and where to find them II: hyperball
    optimization", 2026 (arXiv:2606.16899); with R that follows `qk_clip`,
    so that what it has shrunk stays shrunk.
    """
    with errors_of("hyperball"):
        check_rates(learning_rate=learning_rate)
    rate = scale_by_learning_rate(learning_rate)

    @errors_of("hyperball")
    def init(params) -> HyperballState:
        pieces = matrix_pieces(dimension_numbers, params)
        names_and_leaves = jax.tree.leaves_with_path(params)
        radii = []
        for piece, weight in zip(pieces, pieces.of(params), strict=True):
            name = jax.tree_util.keystr(names_and_leaves[piece.leaf][0])
            if isinstance(weight, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"init(params) keeps the norms of the weights, and {name} is {weight}; for the "
                    "shapes of the state call jax.eval_shape(tx.init, params)."
                )
            radius = _rms(_wide(weight), piece.view)
            # A step keeps the norm, so that a matrix of zeros would stay zero. Inside of `jit` the
            # norm is not known, and such a matrix is not refused.
            if not isinstance(radius, Tracer) and not bool((radius > 0).all()):
                raise ValueError(
                    f"{name} has a matrix of zeros; start it from random numbers."
                )
            radii.append(radius)
        # For a schedule the state of the rate is a count and the last rate. It needs no weights, so
        # any array will do. `as_state` puts the radii into a tree like the parameters.
        return HyperballState(rate.init(jnp.zeros(())), pieces.as_state(radii))

    @errors_of("hyperball")
    def update(updates, state, params=None):
        require_params(params)
        # `rate`, which is `scale_by_learning_rate`, makes -eta of the update 1, where eta is the
        # learning rate. Its state counts the steps of a schedule.
        minus_eta: Any
        minus_eta, rate_state = rate.update(jnp.ones(()), state.learning_rate)
        pieces = matrix_pieces(dimension_numbers, updates)
        # The radius of a sphere is the root mean square of its matrix: one number for each, in the
        # shape of the piece with size 1 along rows and columns. `of_state` raises for other shapes.
        shapes = [piece.view.summed_shape(_matrix_axes(piece.view)) for piece in pieces]
        radii = pieces.of_state(state.rms, shapes)
        steps = []
        new_radii = []
        for piece, u, w, radius in zip(
            pieces, pieces.of(updates), pieces.of(params), radii, strict=True
        ):
            step, radius = _step(u, w, radius, piece.view, minus_eta)
            steps.append(step)
            new_radii.append(radius)
        # A leaf that is no matrix takes the step -eta O;
        # `replaced` puts the steps of matrices in the place of theirs.
        plain_steps = jax.tree.map(lambda u: minus_eta.astype(u.dtype) * u, updates)
        updates = pieces.replaced(plain_steps, steps)
        return updates, HyperballState(rate_state, pieces.as_state(new_radii))

    return optax.GradientTransformation(init, update)


def _matrix_axes(view: MatrixView) -> tuple[int, ...]:
    """The axes of a leaf that are rows and columns."""
    return (*view.reduction_axes, *view.output_axes)


def _wide(leaf: Any) -> Inexact[Array, "*leaf"]:
    """The leaf in float32 or wider."""
    x = jnp.asarray(leaf)
    return x.astype(at_least_float32(x.dtype))


def _mean(x: Float[Array, "*leaf"], view: MatrixView) -> Float[Array, "*#leaf"]:
    """The mean of each matrix, with axes of size 1 for rows and columns."""
    return jnp.mean(x, _matrix_axes(view), keepdims=True)


def _rms(x: Inexact[Array, "*leaf"], view: MatrixView) -> Float[Array, "*#leaf"]:
    """The root mean square of each matrix, 1e-37 to 1e37,
    though float32 has no squares beyond 1e-19 and 1e19."""
    c, square = square_of_any_size(x, lambda x: _mean(jnp.abs(x) ** 2, view))
    # The square is that of c x.
    return jnp.sqrt(square) / c


def _step(
    update: Inexact[Array, "*leaf"],
    weight: Inexact[Array, "*leaf"],
    kept_rms: Float[Array, "*sphere"],
    view: MatrixView,
    minus_eta: Float[Array, ""],
) -> tuple[Inexact[Array, "*leaf"], Float[Array, "*sphere"]]:
    """What to add to the weight W of one leaf, and R, the root mean square that the state keeps
    next.

    |X| below is the root mean square of X, which is the norm over sqrt(m n):
    only ratios of norms count here.

    Args:
      update: U, the update so far, which `hyperball` calls O.
      weight: W.
      kept_rms: The root mean square of each matrix that the state has kept,
        [1, 1] for a leaf [m, n].
      view: Which axes are the matrices of the leaf.
      minus_eta: Minus the learning rate.
    """
    w = _wide(weight)
    u = _wide(update)
    # The kept norm is real, also of a complex W. A checkpoint may have been restored in another
    # dtype.
    kept_rms = jnp.asarray(kept_rms, jnp.finfo(w.dtype).dtype)

    # W is now in units of its kept norm, which then is 1, so that no square overflows. For a matrix
    # of zeros the unit is 1.
    unit = jnp.where(kept_rms > 0, kept_rms, 1)
    w = w / unit
    weight_rms = jnp.sqrt(_mean(jnp.abs(w) ** 2, view))
    # The update may be of any size, as where no `orthogonalize` comes before.
    update_rms = _rms(u, view)

    # R is the kept norm, here 1, or |W| where something outside, such as a clip, changed it by more
    # than rounding does: 1e-5, or the last bit of the update or of the weight, if that is more.
    rounding = _LEAST_TOLERANCE
    for dtype in (update.dtype, weight.dtype):
        rounding = max(rounding, float(jnp.finfo(dtype).eps))
    radius = jnp.where(jnp.abs(weight_rms - 1) <= rounding, 1, weight_rms)

    # V = W + c U with c = -eta R / |U|; c does not count where U is zero (`is_still`).
    c = minus_eta.astype(w.dtype) * radius / or_one(update_rms)
    # |V|^2 = |W|^2 + 2 c <W, U> + c^2 |U|^2 from sums that are there: no second reduction.
    inner_product = _mean((w * u.conj()).real, view)
    moved_square = weight_rms**2 + 2 * c * inner_product + (c * update_rms) ** 2
    # V may be at the middle of the ball, where no direction leads back: for |V| < 0.01 |W| the
    # weight stays. It stays also where U is zero.
    is_still = (update_rms == 0) | (moved_square <= 1e-4 * weight_rms**2)
    # W' - W = R V / |V| - W = (R / |V| - 1) W + R / |V| c U
    back = radius / jnp.sqrt(jnp.where(is_still, 1, moved_square))
    step = (back - 1) * w + back * c * u
    # From here on in the weight's own units
    step = jnp.where(is_still, 0, unit * step)
    return step.astype(update.dtype), radius * unit
