"""After everything, the learning rate included: scale what passed its threshold. p + u is the new weight already."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from muonjax._clipping.factors import spread
from muonjax._clipping.matching import Target
from muonjax._clipping.statistics import match_statistics
from muonjax._trees import flatten_paths, is_masked


class QKClipState(NamedTuple):
    """What `qk_clip` and `signal_clip` remember, all of it worth a dashboard.

    Dictionaries go by the path of the module (`qk_clip`) or of the signal (`signal_clip`); their arrays are
    [*layers, heads].

    Attributes:
      count: int32 [], updates seen.
      running_max: float32, maxima since the last clip; no entries if `every_k` is 1.
      maxima: float32, the maxima that the last clip went by; -inf before the first.
      factors: float32 in (0, 1], γ at the last clip; 1 where nothing was scaled.
      clips: int32, how often each head was scaled.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> state = muonjax.qk_clip(100.0, muonjax.mha_site()).init(params)
      >>> state.maxima["attention"], int(state.total_clipped)
      (Array([-inf, -inf], dtype=float32), 0)
    """

    count: jax.Array
    running_max: dict[str, jax.Array]
    maxima: dict[str, jax.Array]
    factors: dict[str, jax.Array]
    clips: dict[str, jax.Array]

    # Sums over heads are made when somebody asks: in the state, they would cost a mesh an all-reduce a step.

    @property
    def num_clipped(self) -> jax.Array:
        """Heads that the last clip scaled, int32 []."""
        return sum((jnp.sum(f < 1, dtype=jnp.int32) for f in self.factors.values()), jnp.zeros([], jnp.int32))

    @property
    def total_clipped(self) -> jax.Array:
        """The sum of that over all clips, int32 []."""
        return sum((jnp.sum(n) for n in self.clips.values()), jnp.zeros([], jnp.int32))


class Watched(NamedTuple):
    """A module with its signal, under the name that the state keeps it by."""

    name: str
    target: Target
    threshold: optax.ScalarOrSchedule


def clip(
    call: str,
    find: Callable[[Any], Sequence[Watched]],
    argument: str,
    every_k: int,
    axis_name: str | tuple[str, ...] | None,
) -> optax.GradientTransformationExtraArgs:
    """The transformation behind `signal_clip` and `qk_clip`, for the modules that `find(params)` returns."""
    if isinstance(every_k, bool) or not isinstance(every_k, int):
        raise TypeError(
            f"{call}(every_k={every_k!r}) must be a Python int; in optax.inject_hyperparams make it a static_args."
        )
    if every_k < 1:
        raise ValueError(f"{call}(every_k={every_k}) must be at least 1.")

    def init(params: optax.Params) -> QKClipState:
        # Optax looks for parameter-like state with a placeholder that has no leaves. Nothing here is like a
        # parameter, and one array in the place of each dictionary says so.
        placeholder = not jax.tree.leaves(params, is_leaf=is_masked)
        watched = [] if placeholder else find(params)
        _warn_of_low_precision(call, [w.target for w in watched], params)

        def full(value: float, dtype: jax.typing.DTypeLike = jnp.float32) -> Any:
            # Made anew for each field: one buffer in two places can't be donated.
            if placeholder:
                return jnp.zeros([])
            return {w.name: jnp.full((*w.target.layers, w.target.entries), value, dtype) for w in watched}

        return QKClipState(
            count=jnp.zeros([], jnp.int32),
            running_max=full(-jnp.inf) if every_k > 1 else {},
            maxima=full(-jnp.inf),
            factors=full(1.0),
            clips=full(0, jnp.int32),
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        statistics = extra_args.get(argument)
        if params is None:
            raise ValueError(f"{call} scales weights: call tx.update(grads, state, params, {argument}=...).")
        if statistics is None:
            raise ValueError(
                f"{call} needs this step's statistics: tx.update(grads, state, params, {argument}=...), as "
                f"sown by muonjax's attention_fn. Flax's TrainState.apply_gradients does not pass them on; "
                f"call tx.update yourself."
            )
        watched = find(params)
        _check_state(call, state, watched, every_k)
        leaves = flatten_paths(params)
        largest = match_statistics(call, argument, statistics, [w.target for w in watched])
        maxima = {w.name: s for w, s in zip(watched, largest, strict=True)}
        if axis_name is not None:
            # Replicas that clip by their own maxima would drift apart.
            maxima = {name: lax.pmax(s, axis_name) for name, s in maxima.items()}
        if every_k > 1:
            maxima = {name: jnp.maximum(s, state.running_max[name]) for name, s in maxima.items()}
        due = (state.count + 1) % every_k == 0
        gammas = {}
        for name, _, threshold in watched:
            limit = threshold(state.count // every_k) if callable(threshold) else threshold
            gamma = clip_factor(maxima[name], limit)
            gammas[name] = gamma if every_k == 1 else jnp.where(due, gamma, 1.0)
        factors = parameter_factors([w.target for w in watched], list(gammas.values()), leaves)

        def at_clip(new: Any, old: Any) -> Any:
            return new if every_k == 1 else jax.tree.map(lambda a, b: jnp.where(due, a, b), new, old)

        state = QKClipState(
            count=jnp.asarray(optax.safe_increment(state.count)),
            running_max={} if every_k == 1 else {n: jnp.where(due, -jnp.inf, s) for n, s in maxima.items()},
            maxima=at_clip(maxima, state.maxima),
            factors=at_clip(gammas, state.factors),
            clips={name: state.clips[name] + (gamma < 1) for name, gamma in gammas.items()},
        )
        treedef = jax.tree.structure(updates, is_leaf=is_masked)
        scaled = (
            _scaled(u, leaves[path], factors[path]) if path in factors else u
            for path, u in flatten_paths(updates).items()
        )
        return treedef.unflatten(scaled), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_state(call: str, state: QKClipState, watched: Sequence[Watched], every_k: int) -> None:
    """A restored state may meet another threshold, but not other modules, heads or accumulation."""
    here = {w.name: (*w.target.layers, w.target.entries) for w in watched}
    there = {name: tuple(f.shape) for name, f in state.factors.items()}
    if here != there:
        raise ValueError(
            f"{call}: this state was made for {there} (shapes of [*layers, heads]), but sites and parameters say "
            f"{here}. Take the sites that it was made with, or start the clip anew with init."
        )
    if bool(state.running_max) != (every_k > 1):
        made = "every_k=1" if every_k > 1 else "every_k > 1"
        raise ValueError(
            f"{call}(every_k={every_k}): this state was made with {made}; keep that, or start the clip anew with init."
        )


def clip_factor(signal: jax.Array, threshold: jax.typing.ArrayLike) -> jax.Array:
    """γ = min(1, threshold / S); exactly 1 where S is not a finite number above the threshold, and the threshold not
    positive (a schedule's can't be checked)."""
    hot = (signal > threshold) & jnp.isfinite(signal) & (jnp.asarray(threshold) > 0)
    gamma = jnp.where(hot, threshold / jnp.where(hot, signal, 1.0), 1.0).astype(jnp.float32)
    # Never zero: a head would be dead for ever, and γ·γ^(-1/2) NaN.
    return jnp.maximum(gamma, jnp.finfo(jnp.float32).tiny)


def parameter_factors(
    targets: Sequence[Target], gammas: Sequence[jax.Array], leaves: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """What each parameter is multiplied by: γ**power · (the group's smallest γ)**group_power, head by head."""
    factors: dict[str, jax.Array] = {}
    for target, gamma in zip(targets, gammas, strict=True):
        grouped = gamma.reshape(*gamma.shape[:-1], target.groups, -1)
        smallest = grouped.min(-1, keepdims=True)
        for scale in target.scales:
            if scale.power == scale.group_power == 0:
                continue
            f = _power(smallest, scale.group_power)  # one a group: all that a shared key can take
            if scale.entries == target.entries:
                f = f * _power(grouped, scale.power)
            f = f.reshape(*gamma.shape[:-1], -1)
            f = spread(f, scale, leaves[scale.path].shape, target.scan_axis)
            factors[scale.path] = factors[scale.path] * f if scale.path in factors else f
    return factors


def _power(x: jax.Array, power: float) -> jax.Array:
    # By name where it can be: exact, and faster than a general power.
    return {0.0: jnp.ones_like, 0.5: jnp.sqrt, 1.0: lambda x: x}.get(power, lambda x: x**power)(x)


def _scaled(u: jax.Array, p: jax.Array, f: jax.Array) -> jax.Array:
    """u' with p + u' = f·(p + u), and u bit for bit where f = 1 (where 0·p would turn −0 into 0, and inf into NaN)."""
    # A half-precision update of a float32 weight would miss the bound.
    dtype = jnp.promote_types(u.dtype, p.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    return jnp.where(f == 1, u.astype(wide), f * u.astype(wide) + (f - 1) * p.astype(wide)).astype(dtype)


def check_threshold(call: str, threshold: Any) -> None:
    """Schedules and traced thresholds pass: their values are not known yet."""
    if isinstance(threshold, (int, float)) and not threshold > 0:
        raise ValueError(f"{call}(threshold={threshold!r}) must be positive; Kimi K2 used 100.")


def _warn_of_low_precision(call: str, targets: Sequence[Target], params: Any) -> None:
    leaves = flatten_paths(params)
    low = {s.path: leaves[s.path].dtype for t in targets for s in t.scales}
    low = {path: dtype for path, dtype in low.items() if jnp.finfo(dtype).bits < 32}
    if low:
        path, dtype = next(iter(low.items()))
        warnings.warn(
            f"{call}: {path!r} (and {len(low) - 1} more) is {dtype}, in which a factor near 1 rounds away: a "
            f"logit less than a percent above the threshold stays there. Keep float32 master weights.",
            stacklevel=4,
        )
