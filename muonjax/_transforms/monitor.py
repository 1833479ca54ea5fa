"""Statistics of an optimizer's step, kept in its state: sizes of updates, weights and momentum, and orthogonality.

`metrics` makes one dictionary of numbers of them, and of what clips have measured.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from muonjax._common.arguments import check_transformation, require_params, whole_number
from muonjax._common.linalg import at_least_float32, dot, square_norm
from muonjax._common.platform import is_explicit
from muonjax._common.trees import dtype_of, is_masked, leaf_paths, names, unboxed
from muonjax._matrices.matrix_view import DimensionNumbersTree, MatrixView, Piece, matrix_pieces
from muonjax._names.dimension_numbers import dimension_numbers as by_names
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
    check_transformation("monitor(inner", inner)
    if not (groups is None or callable(groups)):
        raise TypeError(
            f"monitor(groups={groups!r}) must be a function from a leaf's path to its group."
        )
    every_k = whole_number("monitor", "every_k", every_k, 1, " of steps, at least 1.")
    inner = optax.with_extra_args_support(inner)
    matrices = functools.partial(
        matrix_pieces, by_names if program is None else program, call="monitor"
    )

    def init(params: optax.Params) -> MonitorState:
        state, pieces = inner.init(params), matrices(params)
        _check_matrices(state, params, {piece.leaf for piece in pieces})
        members = _members(groups, params, pieces)
        # A new array for each: a buffer that is in two places can't be donated.
        statistics: Any = {
            g: {s: jnp.full((), jnp.nan, jnp.float32) for s in STATISTICS} for g in members
        }
        if not jax.tree.leaves(params, is_leaf=is_masked):
            # Optax's placeholder for the parameters has no groups; one array in the place of the dictionary tells it
            # that no part of it is like a parameter.
            statistics = jnp.zeros([])
        return MonitorState(state, jnp.zeros([], jnp.int32), statistics)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ):
        require_params("monitor", params)
        found, inner_state = inner.update(updates, state.inner, params, **extra_args)
        pieces = matrices(params)
        members = _members(groups, params, pieces)
        if set(members) != set(state.statistics):
            raise ValueError(
                f"monitor: the state has groups {[*state.statistics]}, not {[*members]}."
            )
        # A checkpoint may have been restored in another dtype.
        last = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), state.statistics)

        measured = functools.partial(_measure, members, pieces, updates, found, inner_state, params)
        statistics = jax.lax.cond(state.count % every_k == 0, measured, lambda: last)
        return found, MonitorState(
            inner_state, jnp.asarray(optax.safe_increment(state.count)), statistics
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check_matrices(state: Any, params: Any, matrices: set[int]) -> None:
    """Raise where the optimizer inside gives other leaves to Muon than those that are measured as matrices."""
    for node in jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, "inner_states")):
        taken = _momentum(getattr(node, "inner_states", {}).get("muon"), _paths(params))
        if taken and {*taken} != matrices:
            raise ValueError(
                "monitor needs its optimizer's program: monitor(muon(1e-3, program), program)."
            )


def _paths(params: Any) -> dict[tuple[str, ...], int]:
    """The index of each leaf by its path."""
    return {path: i for i, path in enumerate(leaf_paths(params))}


def _members(groups: Groups | None, params: Any, pieces: Sequence[Piece]) -> dict[str, list[int]]:
    """Group to the indices of its leaves."""
    matrices = {piece.leaf for piece in pieces}
    members: dict[str, list[int]] = {}
    for path, index in _paths(params).items():
        label = (
            ("muon" if index in matrices else "adam") if groups is None else groups("/".join(path))
        )
        if label is not None:
            members.setdefault(label, []).append(index)
    return members


def _measure(
    members: dict[str, list[int]],
    pieces: Sequence[Piece],
    gradients: Any,
    updates: Any,
    state: Any,
    params: Any,
) -> dict[str, dict[str, jax.Array]]:
    momentum = _momentum(
        cast_momentum(state, jnp.float32) if has_int8(state) else state, _paths(params)
    )
    gradients, updates, weights = (jax.tree.leaves(tree) for tree in (gradients, updates, params))

    def of_group(indices: list[int]) -> dict[str, Any]:
        size = sum(jnp.size(weights[i]) for i in indices)
        update, weight = (
            _root([leaves[i] for i in indices], size) for leaves in (updates, weights)
        )
        deviations = [_deviation(p.take(updates), p.view) for p in pieces if p.leaf in indices]
        non_finite = sum(jnp.any(~jnp.isfinite(gradients[i])).astype(jnp.float32) for i in indices)
        values = (
            update,
            weight,
            update / jnp.where((update == 0) & (weight == 0), 1, weight),
            _root([m for i in indices for m in momentum.get(i, ())]),
            jnp.sqrt(jnp.mean(jnp.concatenate(deviations))) if deviations else jnp.float32(0),
            non_finite / len(indices),
        )
        return dict(zip(STATISTICS, values, strict=True))

    return {group: of_group(indices) for group, indices in members.items()}


def _momentum(state: Any, paths: dict[tuple[str, ...], int]) -> dict[int, list[jax.Array]]:
    """First moments in an optimizer's state by the index of their parameter: what is under `trace` or `mu`."""
    found: dict[int, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        for depth, key in enumerate(path):
            if isinstance(key, jax.tree_util.GetAttrKey) and key.name in ("trace", "mu"):
                index = paths.get(names(path[depth + 1 :]))
                if index is not None:
                    found.setdefault(index, []).append(leaf)
    return found


def _root(arrays: Sequence[jax.Array], count: int = 1) -> Float32[Array, ""]:
    """The root of the sum of squares over `count`, of entries of any size."""
    sizes = [jnp.abs(x).astype(jnp.float32) for x in arrays]
    largest = functools.reduce(jnp.maximum, map(jnp.max, sizes), jnp.float32(0))
    scale = jnp.where((largest >= jnp.finfo(jnp.float32).tiny) & jnp.isfinite(largest), largest, 1)
    return scale * jnp.sqrt(sum((jnp.sum((x / scale) ** 2) for x in sizes), jnp.float32(0)) / count)


def _deviation(update: jax.Array, view: MatrixView) -> Float32[Array, " batch"]:
    """The least ||c U U^T - I||_F^2 / m over c: 1 - tr(A)^2 / (m ||A||_F^2) with A = U U^T."""
    of = functools.partial(_local_deviation, view=view)
    if not is_explicit(update):
        return of(update)
    # XLA divides the products among the devices, as on a mesh with automatic axis types.
    replicated = NamedSharding(jax.typeof(update).sharding.mesh, PartitionSpec())
    in_auto_axes: Any = jax.sharding.auto_axes(of, out_sharding=replicated)
    return in_auto_axes(update)


def _local_deviation(update: jax.Array, *, view: MatrixView) -> Float32[Array, " batch"]:
    u = view.to_matrices(update)
    u = u.mT if u.shape[-2] > u.shape[-1] else u
    u = u.astype(at_least_float32(u.dtype))
    smallest = float(jnp.finfo(jnp.float32).tiny)
    u = u / jnp.maximum(jnp.max(jnp.abs(u), (-2, -1), keepdims=True), smallest)
    gram = dot.with_adjoint(u, u)
    trace = jnp.sum(jnp.abs(u) ** 2, (-2, -1))
    fourth = square_norm(gram)[..., 0, 0] * gram.shape[-1]
    share = trace**2 / jnp.where(fourth == 0, 1, fourth)
    return jnp.where(fourth == 0, 0, jnp.maximum(1 - share, 0)).astype(jnp.float32)


def metrics(state: Any) -> dict[str, Any]:
    """What an optimizer's state keeps for a log, as one flat mapping from names to numbers.

    - `count`: how many updates there were, where a part of the state counts them; of several counts the largest;
    - `learning_rate`: the rate of the last update, under a schedule of muonjax's optimizers or where
      `optax.inject_hyperparams` keeps it;
    - `adam_learning_rate`: the same of the leaves that are no matrices. With a schedule of your own, give
      `adam=optax.inject_hyperparams(optax.adamw)(schedule)`: the state of `optax.adamw(schedule)` has no rate.

    What clips and monitors have measured is found wherever they are: in a chain at any depth, in `optax.MultiSteps`, in
    Flax's `TrainState.opt_state`, in `nnx.Optimizer.opt_state`, and in `nnx.state` of an optimizer or train state. For
    each `QKClipState`

    - `qk_clip/largest`: the largest signal that the last clip went by; for `qk_clip` a logit;
    - `qk_clip/num_clipped`, `qk_clip/total_clipped`: heads that the last clip scaled, and the sum over all clips;
    - `qk_clip/share_clipped`: the heads that the last clip scaled, over all heads;
    - `qk_clip/smallest_factor`: the smallest γ at the last clip, 1 if nothing was scaled;
    - `qk_clip/largest/<module>`: the largest signal of one module, over its heads and layers.

    For each `MonitorState` its `monitor/<group>/<statistic>`. Those of a second clip or monitor are numbered:
    `qk_clip_1/largest`.

    Args:
      state: The state of any optimizer.

    Returns:
      A dictionary of Python floats; it waits for the step that computes them. Inside of `jit` it is one of float32
      arrays. NaN means that it was not measured yet. A state that keeps nothing of this gives an empty dictionary.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> tx = muonjax.muonclip(1e-3, muonjax.mha_site(), threshold=100.0)
      >>> statistics = {"attention": jnp.array([400.0, 50.0])}
      >>> updates, state = tx.update(params, tx.init(params), params, max_logits=statistics)
      >>> found = muonjax.metrics(state)
      >>> found["count"], found["qk_clip/num_clipped"]
      (1.0, 1.0)
    """
    leaves = [
        (names(path), leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
        if not jnp.shape(leaf)
    ]
    found = _rates(dict(leaves))
    # A parameter of this name is no integer.
    counts = [
        x
        for path, x in leaves
        if path[-1:] == ("count",) and jnp.issubdtype(dtype_of(x), jnp.integer)
    ]
    found |= {"count": functools.reduce(jnp.maximum, counts)} if counts else {}
    seen = Counter[str]()
    for part in _parts(state):
        name, values = (
            ("qk_clip", _of_clip(part)) if "maxima" in part else ("monitor", _of_monitor(part))
        )
        prefix = f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1
        found |= {f"{prefix}/{key}": value for key, value in values.items()}
    # The maximum of nothing is -inf; a log has NaN for it, as for what a monitor has not measured.
    if any(isinstance(value, Tracer) for value in found.values()):
        numbers = {key: jnp.asarray(value, jnp.float32) for key, value in found.items()}
        return {key: jnp.where(value == -jnp.inf, jnp.nan, value) for key, value in numbers.items()}
    return {
        key: math.nan if x == -math.inf else float(x) for key, x in jax.device_get(found).items()
    }


def _rates(scalars: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The learning rates that `optax.inject_hyperparams` and a `LearningRateState` keep."""
    rates: dict[str, Any] = {}
    for path, value in scalars.items():
        if path[-1:] != ("learning_rate",):
            continue
        count = scalars.get((*path[:-1], "count"))
        # A parameter may be called `learning_rate`, but no moment is an integer.
        has_count = count is not None and jnp.issubdtype(dtype_of(count), jnp.integer)
        if path[-2:-1] == ("hyperparams",) or has_count:
            rates["adam_learning_rate" if _is_of_adam(path) else "learning_rate"] = value
    return rates


def _is_of_adam(path: tuple[str, ...]) -> bool:
    """Whether the innermost partition around this entry gives it to the part for all but matrices."""
    labels = [label for name, label in itertools.pairwise(path) if name == "inner_states"]
    return labels[-1:] == ["adam"]


def _parts(state: Any) -> Iterator[Mapping[str, Any]]:
    for node in jax.tree.leaves(state, is_leaf=lambda node: bool(_fields(node))):
        if fields := _fields(node):
            yield fields
            yield from _parts(fields.get("inner"))


def _fields(node: Any) -> Mapping[str, Any]:
    """What a clip or a monitor keeps, by name: of its named tuple, or of the mapping that `nnx.state` makes of one."""
    fields = (
        node if isinstance(node, Mapping) else node._asdict() if hasattr(node, "_asdict") else {}
    )
    is_clip = fields.keys() >= {"count", "maxima", "factors", "clips"}
    return fields if is_clip or fields.keys() == {"inner", "count", "statistics"} else {}


def _of_clip(state: Mapping[str, Any]) -> dict[str, Any]:
    names = "maxima", "factors", "clips"
    maxima, factors, clips = (
        {path: unboxed(x) for path, x in state[name].items()} for name in names
    )
    largest = {path: signal.max() for path, signal in maxima.items()}
    smallest = [factor.min() for factor in factors.values()]
    num_clipped = sum(jnp.sum(factor < 1) for factor in factors.values())
    num_heads = sum(factor.size for factor in factors.values())
    return {
        "largest": functools.reduce(jnp.maximum, largest.values(), -jnp.inf),
        "num_clipped": num_clipped,
        "share_clipped": num_clipped / max(1, num_heads),
        "total_clipped": sum(jnp.sum(count) for count in clips.values()),
        "smallest_factor": functools.reduce(jnp.minimum, smallest, 1.0),
        **{
            f"largest/{path}" if path else "largest/model": value for path, value in largest.items()
        },
    }


def _of_monitor(state: Mapping[str, Any]) -> dict[str, Any]:
    groups = state["statistics"].items()
    return {f"{group}/{name}": unboxed(x) for group, own in groups for name, x in own.items()}
