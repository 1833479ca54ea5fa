"""Keep statistics of an optimizer's step in its state: sizes of updates and weights,
and orthogonality."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from muonjax._common.arguments import (
    check_transformation,
    errors_of,
    require_params,
    whole_number,
)
from muonjax._common.explicit_axes import is_explicit
from muonjax._common.linalg import (
    at_least_float32,
    dot,
    or_one,
    square_norm,
    square_of_any_size,
)
from muonjax._matrices.matrix_view import (
    DimensionNumbersTree,
    Piece,
    Pieces,
    matrix_pieces,
)
from muonjax._mesh.state_shardings import parameter_like
from muonjax._names.routes import dimension_numbers as by_names

if TYPE_CHECKING:
    from jaxtyping import Array, Float32


class MonitorState(NamedTuple):
    """State of `monitor`.

    Attributes:
      inner: The state of the transformation that is watched.
      count: Steps so far, int32.
      statistics: "muon/update_rms" and all others that `monitor` lists, float32 [];
        NaN until a step has been measured.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> state = muonjax.monitor(optax.sgd(0.1)).init({"dense": {"kernel": jnp.ones((2, 2))}})
      >>> list(state.statistics)[:2], int(state.count)
      (['adam/non_finite', 'adam/update_rms'], 0)
    """

    inner: Any
    count: jax.Array
    statistics: dict[str, jax.Array]


def monitor(
    inner: optax.GradientTransformation,
    program: DimensionNumbersTree | None = None,
    *,
    every_k: int = 10,
) -> optax.GradientTransformationExtraArgs:
    r"""Keep statistics of each step of `inner` in its state; the updates are those of `inner`.

    For the matrices, under "muon", and for all other leaves,
    under "adam" (0 where there is no such leaf),

    - `update_rms`, `weight_rms`: root mean square of the entries of what `inner` returns,
      and of the parameters;
    - `update_to_weight`: the first over the second; 0 where both are 0;
    - `non_finite`: the share of leaves whose gradient has a NaN or an infinity;
    - `orthogonality`, of the matrices alone: how far the updates are from multiples of orthogonal
      matrices, 0 at best and below 1: the least ||c U U^T - I||_F / sqrt(m) over all numbers c, for
      U [m, n] with m <= n, as root mean square over the matrices.
      If the update contains weight decay, that counts too.

    `muonjax.metrics(state)` makes one flat mapping of them for a logger. For leaves of your own
    choice, call `optax.tree.norm` on what `tx.update` returns.

    Args:
      inner: Any transformation, such as `muon(1e-3, program)`.
      program: Which leaves are matrices, and how: what `inner` was given. None reads it off paths
        and shapes, as `muon` does.
      every_k: Measure at the first step and every `every_k` steps, >= 1; between,
        the last values stay.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `MonitorState`;
      `update` needs `params`.

    Raises:
      ValueError, TypeError: An argument of another type or out of its range; `inner` takes other
        leaves for matrices; `update` gets no `params`, or nothing tells which leaves are matrices.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
      >>> tx = muonjax.monitor(muonjax.muon(1e-3, weight_decay=0.0))
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> round(float(state.statistics["muon/update_rms"]), 4)
      0.0002

    Source: `optax.monitor`, for a member of a chain that measures its input.
    """
    with errors_of("monitor"):
        check_transformation("inner", inner)
        every_k = whole_number("every_k", every_k, 1, " of steps, at least 1.")
    inner = optax.with_extra_args_support(inner)
    numbers = by_names if program is None else program

    def init(params) -> MonitorState:
        inner_state = inner.init(params)
        with errors_of("monitor"):
            pieces = matrix_pieces(numbers, params)
            _check_same_matrices(inner_state, params, pieces)
        # The names of the statistics alone, without computing them.
        names = jax.eval_shape(
            functools.partial(_statistics, pieces), params, params, params
        )
        # An array for each, as a buffer in two places can't be donated, and on no mesh,
        # as Optax's counters are.
        unmeasured = {name: jnp.full((), jnp.nan, jnp.float32) for name in names}
        return MonitorState(inner_state, jnp.zeros([], jnp.int32), unmeasured)

    def update(updates, state, params=None, **extra_args):
        with errors_of("monitor"):
            require_params(params)
            pieces = matrix_pieces(numbers, params)
        # Outside of `errors_of`: an error that `inner` raises names the call of `inner`,
        # and not `monitor`.
        new_updates, inner_state = inner.update(
            updates, state.inner, params, **extra_args
        )

        # Between two measurements the last values stay. A checkpoint may have been restored in
        # another dtype, and both branches of `cond` have to return float32.
        last = optax.tree.cast(state.statistics, jnp.float32)
        statistics = jax.lax.cond(
            state.count % every_k == 0,
            lambda: _statistics(pieces, updates, new_updates, params),
            lambda: last,
        )
        count = jnp.asarray(optax.safe_increment(state.count))
        return new_updates, MonitorState(inner_state, count, statistics)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_same_matrices(state: Any, params: Any, pieces: Pieces) -> None:
    """Raise where the optimizer inside gives other leaves to Muon than those that are measured as
    matrices.

    In `monitor(muon(1e-3, program))` the optimizer takes the matrices of the program,
    and the monitor those of names.
    """
    leaves = dict(jax.tree.leaves_with_path(params))
    paths = list(leaves)
    matrices = {paths[piece.leaf] for piece in pieces}
    # The state of `optax.partition` has `inner_states`, the states of its parts by their labels;
    # muonjax calls the part for matrices "muon". All other nodes that this loop meets are arrays,
    # for which `state_of_muon` is None.
    for node in jax.tree.leaves(
        state, is_leaf=lambda node: hasattr(node, "inner_states")
    ):
        state_of_muon = getattr(node, "inner_states", {}).get("muon")
        # The paths of the parameters of which Muon keeps a momentum: an array of its state at
        # .inner_state[0].trace["dense"]["kernel"] is like the parameter ["dense"]["kernel"]. For a
        # count, which is like no parameter, there is None.
        arrays = jax.tree.leaves_with_path(state_of_muon)
        kept = {parameter_like(path, x.shape, leaves) for path, x in arrays} - {None}
        # Nothing is kept of an array, of a partition with other labels,
        # and of a Muon without momentum.
        if kept and kept != matrices:
            # The caller's `errors_of` puts "monitor" before it.
            raise ValueError(
                " needs its optimizer's program: monitor(muon(1e-3, program), program)."
            )


def _statistics(
    pieces: Pieces, gradients: Any, updates: Any, params: Any
) -> dict[str, jax.Array]:
    """The statistics of one step:
    {"muon/orthogonality": float32 [], "muon/update_rms": float32 [], ...}."""
    # For each piece an array [batch], the squared distance of each matrix from a multiple of an
    # orthogonal one: the statistic is the root of their mean over all. The updates have the axes of
    # their leaves, and `view` of a piece says which of them are rows and columns.
    deviations = list(map(_deviation, pieces.of(updates), pieces))
    mean = jnp.mean(jnp.concatenate(deviations)) if deviations else jnp.float32(0)
    statistics = {"muon/orthogonality": jnp.sqrt(mean)}

    matrices = {piece.leaf for piece in pieces}
    groups: dict[str, list[Any]] = {"muon": [], "adam": []}
    # (gradient, update, weight) of each parameter: all three trees have the structure of the
    # parameters. A leaf that has no matrix is one of "adam".
    leaves = zip(*map(jax.tree.leaves, (gradients, updates, params)), strict=True)
    for i, leaf in enumerate(leaves):
        groups["muon" if i in matrices else "adam"].append(leaf)
    for group, members in groups.items():
        statistics |= _of_group(group, members)
    return statistics


def _of_group(
    group: str, leaves: Sequence[tuple[Any, Any, Any]]
) -> dict[str, jax.Array]:
    """The statistics over a group of leaves, {"adam/update_rms": float32 [], ...};
    0 where there is no leaf.

    A leaf is given as (gradient, update, weight).
    """
    update_norm = weight_norm = num_non_finite = jnp.float32(0)
    size = 0
    for gradient, update, weight in leaves:
        # |(x, y)| = hypot(|x|, |y|), which does not overflow
        update_norm = jnp.hypot(update_norm, _norm(update))
        weight_norm = jnp.hypot(weight_norm, _norm(weight))
        size += jnp.size(weight)
        # Leaves with a NaN or an infinity are counted, and not entries.
        is_non_finite = jnp.any(~jnp.isfinite(gradient))
        num_non_finite += is_non_finite.astype(jnp.float32)
    # A weight of zero that does not move has the ratio 0, and one that moves infinity.
    are_zero = (update_norm == 0) & (weight_norm == 0)
    # A norm is this times the root mean square. Without leaves all is 0.
    root = max(1, size) ** 0.5
    return {
        f"{group}/update_rms": update_norm / root,
        f"{group}/weight_rms": weight_norm / root,
        f"{group}/update_to_weight": update_norm / jnp.where(are_zero, 1, weight_norm),
        f"{group}/non_finite": num_non_finite / max(1, len(leaves)),
    }


def _norm(x: jax.Array) -> Float32[Array, ""]:
    """sqrt(sum x^2) over all entries, whose squares need not be numbers of float32."""
    magnitudes = jnp.abs(x).astype(jnp.float32)
    factor, square = square_of_any_size(magnitudes, lambda x: jnp.sum(x**2))
    return jnp.sqrt(square) / factor


def _deviation(update: jax.Array, piece: Piece) -> Float32[Array, " batch"]:
    """The least |c U U^H - I|^2 / m over c for each matrix: 0 if a multiple of U is orthogonal,
    1 - 1/m for rank 1."""

    def of_matrices(update: jax.Array) -> jax.Array:
        """The deviation of each matrix, float32 [batch]: 0 if a multiple of it is orthogonal."""
        # [batch, m, n], of tall matrices the transposes: m <= n, and the Gram matrix is the smaller
        # one.
        u = piece.view.wide.to_matrices(update)
        u = u.astype(at_least_float32(u.dtype))
        # The deviation does not depend on the scale of U, and no power of entries up to 1
        # overflows. `or_one` puts 1 in place of 0: zeros stay zeros.
        largest = jnp.max(jnp.abs(u), (-2, -1), keepdims=True)
        u = u / or_one(largest)
        # A = U U^H, with products in full precision
        gram = dot.with_adjoint(u)
        # The least |c A - I|^2 / m over c is 1 - cos^2 of the angle between A and I, where cos^2 is
        # <A, I>^2 / (|A|^2 |I|^2) with <A, I> = tr(A) = |U|^2 and |I|^2 = m.
        # Zeros count as orthogonal: `or_one` makes cos^2 1 / 1.
        squares = square_norm(gram) * gram.shape[-1]
        cosine_squared = or_one(square_norm(u) ** 2) / or_one(squares)
        # Rounding may make cos^2 larger than 1.
        deviation = jnp.maximum(1 - cosine_squared, 0)
        return deviation.astype(jnp.float32).reshape(-1)

    if not is_explicit(update):
        return of_matrices(update)
    # With explicit axis types JAX refuses reshapes and products whose sharding it can't tell.
    # Inside of `auto_axes` XLA chooses it, and divides the products among the devices.
    replicated = NamedSharding(jax.typeof(update).sharding.mesh, PartitionSpec())
    in_auto_axes: Any = jax.sharding.auto_axes(of_matrices, out_sharding=replicated)
    return in_auto_axes(update)
