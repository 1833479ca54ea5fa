"""The size of weights: decay that spares a weight which moves away from zero, and a norm that never changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muonjax._common.arguments import check_rates, fitted_mask, require_params
from muonjax._common.linalg import at_least_float32
from muonjax._matrices.matrix_view import DimensionNumbersTree, MatrixView, matrix_pieces
from muonjax._transforms.learning_rate import scale_by_learning_rate

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact, Num


def cautious_weight_decay(
    weight_decay: optax.ScalarOrSchedule = 0.1, mask: Any = None
) -> optax.GradientTransformation:
    r"""Decay each weight only where update and weight have the same sign.

        u <- u + weight_decay 1[u w >= 0] w

    It takes the place of `optax.add_decayed_weights`, before `optax.scale_by_learning_rate`: u is still to be
    subtracted, so equal signs mean that it moves the weight toward zero.

    Args:
      weight_decay: A number or a schedule, >= 0; the learning rate multiplies it.
      mask: Leaves that decay, as in `optax.add_decayed_weights`: a tree of booleans, a prefix, or a function of the
        parameters. None: all.

    Returns:
      An `optax.GradientTransformation` with the state of `optax.add_decayed_weights`; `update` needs `params`.

    Raises:
      ValueError: If `weight_decay` is negative or infinite, or `update` gets no `params`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> tx = muonjax.cautious_weight_decay(0.5)
      >>> params, updates = jnp.array([2.0, 2.0]), jnp.array([1.0, -1.0])
      >>> tx.update(updates, tx.init(params), params)[0]
      Array([ 2., -1.], dtype=float32)

    Source: Chen et al., "Cautious weight decay", 2025 (arXiv:2510.12402), eq. (2).
    """
    check_rates("cautious_weight_decay", weight_decay=weight_decay)
    mask = fitted_mask("cautious_weight_decay", "mask", mask)
    decay = optax.add_decayed_weights(weight_decay, mask)

    def agreeing(
        u: Num[Array, "*leaf"] | None, w: Num[Array, "*leaf"]
    ) -> Num[Array, "*leaf"] | None:
        """The weight where its sign is the update's, else 0."""
        if u is None:
            return None
        # Signs, because a product of two small numbers underflows.
        agree = (jnp.sign(u).conj() * jnp.sign(w)).real >= 0
        return jnp.where(agree, w, jnp.zeros_like(w))

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None):
        require_params("cautious_weight_decay", params)
        # add_decayed_weights reads the weights of unmasked leaves only, so all of them can be given.
        weights = jax.tree.map(agreeing, updates, params, is_leaf=lambda x: x is None)
        updates, _ = decay.update(updates, state, weights)
        # All that its state can hold is a schedule's count, which Optax 0.2.6 does not advance.
        return updates, jax.tree.map(optax.safe_increment, state)

    return optax.GradientTransformation(decay.init, update)


_SAME = 1e-5  # a norm that differs by less, or by less than a bit of the weight or update, is the one that was kept
_SMALL = 2.0**-80  # smaller squares, and the inverse of larger ones, are summed at another scale


class HyperballState(NamedTuple):
    """State of `hyperball`.

    Attributes:
      learning_rate: A `LearningRateState` for a schedule, `optax.EmptyState()` for a number.
      rms: A tree like the parameters. For each matrix ||W||_F / sqrt(m n), which it keeps; float32 or wider, in the
        leaf's shape with the axes of the matrix of size 1. `optax.MaskedNode()` in place of a leaf that is no matrix, a
        tuple where a leaf has unequal parts.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> muonjax.hyperball(0.1).init({"w": jnp.full((3, 4), 2.0)}).rms["w"]
      Array([[2.]], dtype=float32)
    """

    learning_rate: Any
    rms: Any


def hyperball(
    learning_rate: optax.ScalarOrSchedule, *, dimension_numbers: DimensionNumbersTree | None = None
) -> optax.GradientTransformation:
    r"""Step by a fixed angle, and return to the sphere: the weight's norm never changes.

    With O the update so far, such as an orthogonalized one, and R = ||W||_F,

        W <- R normalize(W - learning_rate R normalize(O)),    normalize(X) = X / ||X||_F

    It takes the place of `optax.scale_by_learning_rate`, at the end of the chain; only `qk_clip` may follow. The norm
    is that of each whole matrix, on every mesh. Add no weight decay and no `match_rms`: the norm of a
    weight can't decay, and the length of O does not count. Everything else of a chain may come before it,
    `normalize_neurons` too.

    R is kept in the state, so that the rounding of thousands of steps in bfloat16 does not add up: the norm stays
    within 0.4 % of R, one rounding. (Stochastic rounding would let it grow, and `optax.apply_updates` rounds after us.)
    R follows what changes the norm from outside, such as `qk_clip`, by more than the last bit of the weight or the
    update: 0.8 % in bfloat16, 0.001 % in float32. A smaller clip is taken back.

    Args:
      learning_rate: A number or a schedule, the length of a step in units of the weight's norm, >= 0; 0.01 to 0.02 is
        usual.
      dimension_numbers: As in `orthogonalize`; each matrix of a stacked leaf has its own sphere. A leaf that is no
        matrix takes the step -learning_rate O.

    Returns:
      An `optax.GradientTransformation` whose state is a `HyperballState`; `update` needs `params`.

    Raises:
      ValueError: If `learning_rate` is negative or infinite, a matrix is zero at `init` (traced, it stays zero),
        `update` gets no `params`, the dimension numbers do not fit the tree, or the state is that of other parameters.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> tx = muonjax.hyperball(0.1)
      >>> params = {"w": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
      >>> updates, _ = tx.update({"w": jnp.eye(2)}, tx.init(params), params)
      >>> round(float(jnp.linalg.norm(optax.apply_updates(params, updates)["w"])), 5)
      5.0

    Source: Wen et al., "Fantastic pretraining optimizers and where to find them II: hyperball optimization", 2026
    (arXiv:2606.16899); with R that follows `qk_clip`, so that what it has shrunk stays shrunk.
    """
    check_rates("hyperball", learning_rate=learning_rate)
    rate = scale_by_learning_rate(learning_rate, flip_sign=False)

    def init(params: optax.Params) -> HyperballState:
        pieces = matrix_pieces(dimension_numbers, params, call="hyperball")
        paths_and_leaves = jax.tree.leaves_with_path(params)
        for piece in pieces:
            path, leaf = paths_and_leaves[piece.leaf]
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"hyperball: init(params) keeps the norms of the weights, and {jax.tree_util.keystr(path)} is "
                    f"{leaf}; for the shapes of the state call jax.eval_shape(tx.init, params)."
                )
        weights = pieces.of(params)
        kept = [
            _rms(_wide(w, piece.view), piece.view) for w, piece in zip(weights, pieces, strict=True)
        ]
        for piece, rms in zip(pieces, kept, strict=True):
            if not isinstance(rms, Tracer) and not bool((rms > 0).all()):
                where = jax.tree_util.keystr(paths_and_leaves[piece.leaf][0])
                raise ValueError(
                    f"hyperball: {where} has a matrix of zeros; start it from random numbers."
                )
        return HyperballState(rate.init(jnp.zeros(())), pieces.as_state(kept))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None):
        require_params("hyperball", params)
        eta: Any
        eta, of_rate = rate.update(jnp.ones(()), state.learning_rate)
        pieces = matrix_pieces(dimension_numbers, updates, call="hyperball")
        spheres = [p.view.summed_over(p.view.reduction_axes + p.view.output_axes) for p in pieces]
        kept = pieces.of_state(state.rms, spheres, call="hyperball")
        every = zip(pieces.of(updates), pieces.of(params), kept, pieces, strict=True)
        steps = [_step(u, w, rms, piece.view, eta) for u, w, rms, piece in every]
        others = jax.tree.map(lambda u: -eta.astype(u.dtype) * u, updates)  # of matrices, replaced
        updates = pieces.replaced(others, [step for step, _ in steps])
        return updates, HyperballState(of_rate, pieces.as_state([rms for _, rms in steps]))

    return optax.GradientTransformation(init, update)


def _wide(leaf: Any, view: MatrixView) -> Inexact[Array, "*split"]:
    x = view.split(jnp.asarray(leaf))
    return x.astype(at_least_float32(x.dtype))


def _mean(x: Float[Array, "*split"], view: MatrixView) -> Float[Array, "*#split"]:
    """The mean of each matrix, with axes of size 1 for rows and columns."""
    return jnp.mean(x, (*view.reduction_axes, *view.output_axes), keepdims=True)


def _rms(x: Inexact[Array, "*split"], view: MatrixView) -> Float[Array, "*#split"]:
    """The root mean square of each matrix, 1e-37 to 1e37, though float32 has no squares beyond 1e-19 and 1e19.

    Sums of three scales together are one pass, and one all-reduce; the largest entry would have to be known before.
    """
    square, large, small = (
        _mean(jnp.abs(factor * x) ** 2, view) for factor in (1.0, _SMALL, 1 / _SMALL)
    )
    large, small = jnp.sqrt(large) / _SMALL, jnp.sqrt(small) * _SMALL
    return jnp.where(
        square < _SMALL, small, jnp.where(square > 1 / _SMALL, large, jnp.sqrt(square))
    )


def _step(
    leaf: Inexact[Array, "*leaf"],
    weight: Inexact[Array, "*leaf"],
    kept: Float[Array, "*sphere"],
    view: MatrixView,
    eta: Float[Array, ""],
) -> tuple[Inexact[Array, "*leaf"], Float[Array, "*sphere"]]:
    """What to add to W, and the root mean square that it keeps."""
    w, u = _wide(weight, view), _wide(leaf, view)
    kept = jnp.asarray(
        kept, jnp.finfo(w.dtype).dtype
    )  # a checkpoint may have been restored in another dtype
    unit = jnp.where(kept > 0, kept, 1)  # of all sizes below but the update's
    w = w / unit
    size, length = _rms(w, view), _rms(u, view)
    bit = max(_SAME, *(float(jnp.finfo(x.dtype).eps) for x in (leaf, weight)))
    radius = jnp.where(jnp.abs(size - kept / unit) <= bit, kept / unit, size)
    per_length = 1 / jnp.where(length == 0, 1, length)
    toward = -eta.astype(w.dtype) * radius * per_length
    # The size of W + toward U from three sums: no second reduction.
    moved2 = size**2 + 2 * toward * _mean((w * u.conj()).real, view) + (toward * length) ** 2
    # A step to the middle of the ball has no direction from there.
    still = (length == 0) | (moved2 <= 1e-4 * size**2)
    back = radius / jnp.sqrt(jnp.where(still, 1, moved2))
    step = jnp.where(still, 0, unit * ((back - 1) * w + back * toward * u))
    return view.join(step.astype(leaf.dtype), like=leaf), radius * unit
