"""Keep statistics of an optimizer's step in its state: sizes of updates, weights and momentum, and orthogonality."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
from muonjax._common.trees import is_masked, leaf_paths, names
from muonjax._matrices.matrix_view import (
    DimensionNumbersTree,
    MatrixView,
    Pieces,
    matrix_pieces,
)
from muonjax._names.routes import dimension_numbers as by_names
from muonjax._transforms.momentum import cast_momentum, has_int8

if TYPE_CHECKING:
    from jaxtyping import Array, Float32


Groups = Callable[[str], str | None]

STATISTICS = (
    "update_rms",
    "weight_rms",
    "update_to_weight",
    "momentum_norm",
    "orthogonality",
    "non_finite",
)


class MonitorState(NamedTuple):
    """State of `monitor`.

    Attributes:
      inner: The state of the transformation that is watched.
      count: Steps so far, int32.
      statistics: For each group of leaves a mapping from the names in `monitor` to float32 scalars; NaN until the first
        step has been measured.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> state = muonjax.monitor(optax.sgd(0.1), groups=lambda path: "all").init({"w": jnp.ones((2, 2))})
      >>> list(state.statistics), int(state.count)
      (['all'], 0)
    """

    inner: Any
    count: jax.Array
    statistics: dict[str, dict[str, jax.Array]]


def monitor(
    inner: optax.GradientTransformation,
    program: DimensionNumbersTree | None = None,
    *,
    groups: Groups | None = None,
    every_k: int = 10,
) -> optax.GradientTransformationExtraArgs:
    r"""Keep statistics of each step of `inner` in its state; the updates are those of `inner`.

    For each group of leaves

    - `update_rms`, `weight_rms`: root mean square of the entries of what `inner` returns, and of the parameters;
    - `update_to_weight`: the first over the second; 0 where both are 0;
    - `momentum_norm`: Frobenius norm of the momentum (`optax.trace`'s, Adam's first moment), all leaves together;
    - `orthogonality`: how far the updates are from multiples of orthogonal matrices, 0 at best and below 1: the least
      ||c U U^T - I||_F / sqrt(m) over all numbers c, for U [m, n] with m <= n, as root mean square over the matrices.
      If the update contains weight decay, that counts too. 0 for a group without matrices;
    - `non_finite`: the share of leaves whose gradient has a NaN or an infinity.

    `muonjax.metrics(state)` makes one flat mapping of them for a logger.

    Args:
      inner: Any transformation, such as `muon(1e-3, program)`.
      program: Which leaves are matrices, and how: what `inner` was given. None reads it off paths and shapes, as `muon`
        does.
      groups: From a leaf's path, "block_0/attention/query/kernel", to the name of its group, or None for no statistics.
        None: "muon" for the matrices and "adam" for all other leaves.
      every_k: Measure at the first step and every `every_k` steps, >= 1; between, the last values stay.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `MonitorState`; `update` needs `params`.

    Raises:
      ValueError, TypeError: An argument of another type or out of its range; `inner` takes other leaves for matrices;
        `update` gets no `params` or a state with other groups, or nothing tells which leaves are matrices.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
      >>> tx = muonjax.monitor(muonjax.muon(1e-3, weight_decay=0.0))
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> round(float(state.statistics["muon"]["update_rms"]), 4)
      0.0002

    Source: `optax.monitor`, for a member of a chain that measures its input.
    """
    with errors_of("monitor"):
        check_transformation("inner", inner)
        if not (groups is None or callable(groups)):
            raise TypeError(
                f"(groups={groups!r}) must be a function from a leaf's path to its group."
            )
        every_k = whole_number("every_k", every_k, 1, " of steps, at least 1.")
    inner = optax.with_extra_args_support(inner)
    numbers = by_names if program is None else program

    def init(params) -> MonitorState:
        inner_state = inner.init(params)
        with errors_of("monitor"):
            pieces = matrix_pieces(numbers, params)
            _check_same_matrices(inner_state, params, pieces)
        statistics: Any = {}
        for group in _leaves_of_groups(groups, params, pieces):
            # NaN until the first step; a new array for each, because a buffer that is in two places can't be donated.
            statistics[group] = {
                name: jnp.full((), jnp.nan, jnp.float32) for name in STATISTICS
            }
        if not jax.tree.leaves(params, is_leaf=is_masked):
            # Optax finds the parts of a state that mirror the parameters by calling `init` with a placeholder that has
            # no leaves. One array in place of the dictionary tells Optax that the statistics don't.
            statistics = jnp.zeros([])
        return MonitorState(inner_state, jnp.zeros([], jnp.int32), statistics)

    def update(updates, state, params=None, **extra_args):
        gradients = updates
        with errors_of("monitor"):
            require_params(params)
        # An error that `inner` raises names the call of `inner`, and not `monitor`.
        updates, inner_state = inner.update(
            gradients, state.inner, params, **extra_args
        )
        with errors_of("monitor"):
            pieces = matrix_pieces(numbers, params)
            leaves_of_groups = _leaves_of_groups(groups, params, pieces)
            if set(leaves_of_groups) != set(state.statistics):
                raise ValueError(
                    f"the state has groups {[*state.statistics]}, not {[*leaves_of_groups]}."
                )

        # `cond` computes this only at the steps that are measured.
        def measured() -> dict[str, dict[str, jax.Array]]:
            # All trees have the structure of the parameters, so their leaves are in one order.
            step = _Step(
                pieces,
                gradients=jax.tree.leaves(gradients),
                updates=jax.tree.leaves(updates),
                weights=jax.tree.leaves(params),
                momenta=_momenta(inner_state, params),
            )
            statistics = {}
            for group, leaves in leaves_of_groups.items():
                statistics[group] = _measure(step, leaves)
            return statistics

        # A checkpoint may have been restored in another dtype.
        last = optax.tree.cast(state.statistics, jnp.float32)
        is_due = state.count % every_k == 0
        statistics = jax.lax.cond(is_due, measured, lambda: last)
        count = jnp.asarray(optax.safe_increment(state.count))
        return updates, MonitorState(inner_state, count, statistics)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_same_matrices(state: Any, params: Any, pieces: Pieces) -> None:
    """Raise where the optimizer inside gives other leaves to Muon than those that are measured as matrices.

    In `monitor(muon(1e-3, program))` the optimizer takes the matrices of the program, and the monitor those of names.
    """
    matrices = {piece.leaf for piece in pieces}
    # The state of `optax.partition` has `inner_states`, the states of its parts by their labels; muonjax calls the part
    # for matrices "muon". The other leaves of this tree are arrays.
    for node in jax.tree.leaves(
        state, is_leaf=lambda node: hasattr(node, "inner_states")
    ):
        # {leaf: [array]}; empty for an array, for a partition with other labels, and for a Muon without momentum.
        momenta = _momenta(getattr(node, "inner_states", {}).get("muon"), params)
        if momenta and momenta.keys() != matrices:
            # The caller's `errors_of` puts "monitor" before it.
            raise ValueError(
                " needs its optimizer's program: monitor(muon(1e-3, program), program)."
            )


def _leaves_of_groups(
    groups: Groups | None, params: Any, pieces: Pieces
) -> dict[str, list[int]]:
    """The indices of the leaves of each group: {"muon": [0, 2], "adam": [1]} where `groups` is None."""
    # The leaves that hold a matrix or several; each piece is one matrix or a stack of them.
    matrices = {piece.leaf for piece in pieces}
    leaves: dict[str, list[int]] = {}
    for index, path in enumerate(leaf_paths(params)):
        group = "muon" if index in matrices else "adam"
        if groups is not None:
            group = groups("/".join(path))
        if group is not None:
            leaves.setdefault(group, []).append(index)
    return leaves


def _momenta(state: Any, params: Any) -> dict[int, list[jax.Array]]:
    """First moments in an optimizer's state by the index of their parameter: what is under `trace` or `mu`.

    A chain may have several of one parameter.
    """
    # The norm of int8 momentum is that of integers times scales.
    if has_int8(state):
        state = cast_momentum(state, jnp.float32)
    index_of = {path: index for index, path in enumerate(leaf_paths(params))}
    momenta: dict[int, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        # state[0].trace["dense"]["kernel"] ends in the path of params["dense"]["kernel"].
        for depth, key in enumerate(path):
            # Only the key of an attribute, such as a named tuple's field, has a `name`.
            if getattr(key, "name", None) not in ("trace", "mu"):
                continue
            index = index_of.get(names(path[depth + 1 :]))
            if index is not None:
                momenta.setdefault(index, []).append(leaf)
    return momenta


class _Step(NamedTuple):
    """One step of the optimizer, to measure.

    Attributes:
      pieces: The matrices, each a piece of a leaf.
      gradients: One array for each leaf; so are `updates` and `weights`.
      momenta: The first moments by the index of their leaf, {0: [array]}; no entry for a leaf without one.
    """

    pieces: Pieces
    gradients: list[jax.Array]
    updates: list[jax.Array]
    weights: list[jax.Array]
    momenta: dict[int, list[jax.Array]]


def _measure(step: _Step, leaves: list[int]) -> dict[str, jax.Array]:
    """The statistics of a group of leaves, {"update_rms": float32 [], ...} as `monitor` describes them.

    `leaves` are the indices of the leaves, one at least.
    """
    # Each root mean square is a norm over the root of the number of entries.
    size = sum(jnp.size(step.weights[i]) for i in leaves)
    update_rms = _norm([step.updates[i] for i in leaves]) / size**0.5
    weight_rms = _norm([step.weights[i] for i in leaves]) / size**0.5
    # A weight of zero that does not move has the ratio 0, and one that moves infinity.
    are_zero = (update_rms == 0) & (weight_rms == 0)
    # All momenta count as one vector, whose norm is 0 without any. A chain may have several of one leaf.
    momenta = []
    num_non_finite = jnp.float32(0)
    for i in leaves:
        momenta += step.momenta.get(i, [])
        is_non_finite = jnp.any(~jnp.isfinite(step.gradients[i]))
        num_non_finite += is_non_finite.astype(jnp.float32)
    # [matrices of the piece] each
    deviations = []
    for piece in step.pieces:
        if piece.leaf in leaves:
            deviations.append(_deviation(piece.take(step.updates), piece.view))
    orthogonality = jnp.float32(0)
    if deviations:
        orthogonality = jnp.sqrt(jnp.mean(jnp.concatenate(deviations)))
    return {
        "update_rms": update_rms,
        "weight_rms": weight_rms,
        "update_to_weight": update_rms / jnp.where(are_zero, 1, weight_rms),
        "momentum_norm": _norm(momenta),
        "orthogonality": orthogonality,
        "non_finite": num_non_finite / len(leaves),
    }


def _norm(arrays: Sequence[jax.Array]) -> Float32[Array, ""]:
    """sqrt(sum x^2) over all entries x of the arrays, whose squares need not be numbers of float32."""
    norm = jnp.float32(0)
    for x in arrays:
        magnitudes = jnp.abs(x).astype(jnp.float32)
        factor, square = square_of_any_size(magnitudes, lambda x: jnp.sum(x**2))
        norm = jnp.hypot(norm, jnp.sqrt(square) / factor)
    return norm


def _deviation(update: jax.Array, view: MatrixView) -> Float32[Array, " batch"]:
    """The least |c U U^T - I|_F^2 / m over c, of each matrix."""
    local = functools.partial(_local_deviation, view=view)
    if not is_explicit(update):
        return local(update)
    # XLA divides the products among the devices, as on a mesh with automatic axis types.
    replicated = NamedSharding(jax.typeof(update).sharding.mesh, PartitionSpec())
    in_auto_axes: Any = jax.sharding.auto_axes(local, out_sharding=replicated)
    return in_auto_axes(update)


def _local_deviation(
    update: jax.Array, *, view: MatrixView
) -> Float32[Array, " batch"]:
    """The least |c U U^H - I|^2 / m over c of each matrix: 0 for a multiple of an orthogonal one, 1 - 1/m for rank 1.

    The array is a device's own, or XLA decides how its products are sharded.
    """
    # [batch, m, n]
    u = view.to_matrices(update)
    # m <= n, so that the Gram matrix is the smaller one.
    u = u.mT if u.shape[-2] > u.shape[-1] else u
    u = u.astype(at_least_float32(u.dtype))
    # The deviation does not depend on the scale of U, and no power of entries up to 1 overflows.
    largest = jnp.max(jnp.abs(u), (-2, -1), keepdims=True)
    u = u / jnp.maximum(largest, float(jnp.finfo(jnp.float32).tiny))
    # With A = U U^H the least |c A - I|^2 / m is 1 - tr(A)^2 / (m |A|^2), at c = tr(A) / |A|^2.
    # tr(A) is |U|^2.
    gram = dot.with_adjoint(u, u)
    trace = jnp.sum(jnp.abs(u) ** 2, (-2, -1))
    m_times_square = square_norm(gram)[..., 0, 0] * gram.shape[-1]
    share = trace**2 / or_one(m_times_square)
    # A matrix of zeros counts as orthogonal, and rounding may make a share larger than 1.
    deviation = jnp.where(m_times_square == 0, 0, jnp.maximum(1 - share, 0))
    return deviation.astype(jnp.float32)
