"""The engine of QK-Clip: scale weights whose statistic exceeds a threshold, by a factor for each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muonjax._clip.find_sites import Modules, find_sites
from muonjax._clip.site import PlacedSite, Site
from muonjax._clip.statistics import larger, largest_of_devices, match_statistics
from muonjax._common.arguments import (
    check_order,
    errors_of,
    mesh_axes,
    other_state,
    shown,
    warn_user,
    whole_number,
)
from muonjax._common.platform import sharded_like, zero_beside
from muonjax._common.trees import flatten_paths, is_masked

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class QKClipState(NamedTuple):
    """The state of `qk_clip` and `signal_clip`; `muonjax.metrics` flattens it for a log.

    The keys of the dictionaries are the paths of the modules, or of the signals where a module has several; their
    arrays are [*layers, heads].

    Attributes:
      count: Number of updates so far, int32 [].
      running_max: Maxima since the last clip, float32; no entries if `every_k` is 1.
      maxima: The maxima that the last clip used, float32; -inf before the first.
      factors: γ at the last clip, float32 in (0, 1]; 1 where nothing was scaled.
      clips: How often each head was scaled, int32.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> state = muonjax.qk_clip(100.0, muonjax.mha_site()).init(params)
      >>> state.maxima["attention"], state.clips["attention"]
      (Array([-inf, -inf], dtype=float32), Array([0, 0], dtype=int32))
    """

    count: jax.Array
    running_max: dict[str, jax.Array]
    maxima: dict[str, jax.Array]
    factors: dict[str, jax.Array]
    clips: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipByStatistic:
    """Scale the weights of sites by the statistics that `update` gets: `qk_clip`, `muonclip`, `signal_clip`.

    Attributes:
      call: The public function, for errors.
      argument: What `update` calls the statistics.
      sites: What is scaled.
      prepare: Checks the modules that the sites match, and may set their powers of γ.
      threshold: The largest value allowed, or a schedule, for sites without one.
      every_k: Clip at every k-th update; None is 1.
      axis_name: Mesh axes to take the maximum over.
    """

    call: str
    argument: str
    sites: Sequence[Site]
    prepare: Callable[[list[PlacedSite]], list[PlacedSite]]
    threshold: Any = None
    every_k: Any = None
    axis_name: Any = None

    def __post_init__(self):
        # None and not 1, because optax.inject_hyperparams makes arrays of numbers.
        every_k = 1 if self.every_k is None else self.every_k
        why = " of updates, at least 1; optax.inject_hyperparams(..., static_args='every_k') leaves it one."
        object.__setattr__(self, "every_k", whole_number("every_k", every_k, 1, why))
        object.__setattr__(self, "axis_name", mesh_axes("axis_name", self.axis_name))

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The member of a chain."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def find(self, modules: Modules) -> tuple[list[PlacedSite], set[str]]:
        """What is clipped in a tree of parameters, and the keys of statistics that are skipped."""
        sites, not_trained = find_sites(modules, self.sites)
        return self.prepare(sites), not_trained

    def init(self, params: optax.Params) -> QKClipState:
        """The state before the first update."""
        # To find the parts of a state that are like parameters, Optax calls `init` with a placeholder without leaves.
        # One array in place of each dictionary tells Optax that no part of this state is like a parameter.
        if not jax.tree.leaves(params, is_leaf=is_masked):
            return QKClipState(jnp.zeros([], jnp.int32), *(jnp.zeros([]) for _ in range(4)))  # pyright: ignore
        with errors_of(self.call):
            modules = Modules(params)
            sites, _ = self.find(modules)
        self._warn_of_low_precision(sites, modules)
        state = QKClipState(jnp.zeros([], jnp.int32), {}, {}, {}, {})
        for site in sites:
            # On the mesh of the parameters if it has explicit axis types.
            zero = zero_beside(modules.leaves[site.scales[0].leaf])
            zeros = jnp.zeros(site.shape, jnp.float32) + zero.astype(jnp.float32)
            # A new array for each field: a buffer that is in two places can't be donated.
            if self.every_k > 1:
                state.running_max[site.name] = zeros - jnp.inf
            state.maxima[site.name] = zeros - jnp.inf
            state.factors[site.name] = zeros + 1.0
            state.clips[site.name] = zeros.astype(jnp.int32)
        return state

    def update(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, QKClipState]:
        """The updates that take the weights to their clipped values."""
        statistics = extra_args.get(self.argument)
        with errors_of(self.call):
            check_order(updates, state, params)
            if not hasattr(state, "factors"):
                raise ValueError(other_state(state))
            self._require(params, statistics)
            modules = Modules(params)
            sites, not_trained = self.find(modules)
            self._check_state(state, sites)
            maxima = match_statistics(self.argument, statistics, sites, not_trained)
            if self.axis_name:
                # Replicas that clip by their own maxima would diverge.
                maxima = {name: largest_of_devices(x, self.axis_name) for name, x in maxima.items()}
            state, gammas = self._advance(state, maxima, sites)
            factors = parameter_factors(sites, gammas)
            return scaled_leaves(updates, modules.leaves, factors), state

    def _advance(
        self,
        state: QKClipState,
        maxima: dict[str, jax.Array],
        sites: Sequence[PlacedSite],
    ) -> tuple[QKClipState, dict[str, jax.Array]]:
        """The state after this update, and γ of each module: 1 at an update that does not clip."""
        # The k-th, 2k-th, ... update clips.
        is_due = (state.count + 1) % self.every_k == 0
        clips_so_far = state.count // self.every_k

        def at_clip(new: jax.Array, otherwise: Any) -> jax.Array:
            return new if self.every_k == 1 else jnp.where(is_due, new, otherwise)

        gammas: dict[str, jax.Array] = {}
        count = jnp.asarray(optax.safe_increment(state.count))
        after = QKClipState(count, {}, {}, {}, {})
        for site in sites:
            name = site.name
            # Sharded as the state is, even if the statistics are not, so that its buffers can be donated.
            maximum = sharded_like(maxima[name], state.maxima[name])
            # Between two clips the largest of all micro-batches is kept.
            if self.every_k > 1:
                maximum = larger(maximum, state.running_max[name])
                after.running_max[name] = jnp.where(is_due, -jnp.inf, maximum)
            # The state keeps what the last clip did, for a log; γ is 1 at an update without a clip.
            gamma = at_clip(self.gamma(site, maximum, clips_so_far), 1.0)
            after.maxima[name] = at_clip(maximum, state.maxima[name])
            after.factors[name] = at_clip(gamma, state.factors[name])
            is_clipped = gamma < 1
            after.clips[name] = state.clips[name] + is_clipped.astype(jnp.int32)
            gammas[name] = gamma
        return after, gammas

    def gamma(
        self,
        site: PlacedSite,
        maximum: jax.Array,
        clips_so_far: Any = 0,
    ) -> jax.Array:
        """The factors of one site by its threshold, or by that of all."""
        threshold = self.threshold if site.threshold is None else site.threshold
        if callable(threshold):
            threshold = threshold(clips_so_far)
        return clip_factor(maximum, threshold)

    def _check_state(self, state: QKClipState, sites: Sequence[PlacedSite]) -> None:
        """Raise unless modules, heads and accumulation are those of the state; the threshold may have changed."""
        here = {site.name: site.shape for site in sites}
        there = {name: tuple(factor.shape) for name, factor in state.factors.items()}
        if here != there or bool(state.running_max) != (self.every_k > 1):
            made = "every_k > 1" if state.running_max else "every_k=1"
            raise ValueError(
                f"this state was made for {shown(there)}, [*layers, heads], and {made}; sites and parameters say "
                f"{shown(here)}, and every_k={self.every_k}. Take those that it was made with, or start anew with init."
            )

    def _warn_of_low_precision(
        self,
        sites: Sequence[PlacedSite],
        modules: Modules,
    ) -> None:
        for site in sites:
            for scale in site.scales:
                dtype = modules.leaves[scale.leaf].dtype
                if jnp.finfo(dtype).bits < 32:
                    warn_user(
                        f"{self.call}: {scale.leaf!r} is {dtype}, in which a factor near 1 rounds away: a logit less "
                        "than a percent above the threshold stays there. Keep float32 master weights."
                    )
                    return

    def _require(self, params: Any, statistics: Any) -> None:
        """Raise where `update` was called without parameters or statistics."""
        if params is not None and statistics is not None:
            return
        usage = f"tx.update(grads, state, params, {self.argument}={self.argument})"
        missing = "params" if params is None else self.argument
        if missing != "max_logits":
            raise ValueError(f"update needs {missing}: call {usage}.")
        raise ValueError(
            "update needs max_logits: (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(params, batch), "
            f"then\n{usage}. Linen's TrainState that passes it on is muonjax.linen.TrainState."
        )


def clip_factor(
    signal: Float[Array, "*layers entries"],
    threshold: Any,
) -> Float[Array, "*layers entries"]:
    """γ = min(1, threshold / S); exactly 1 unless S is finite and above the threshold.

    It is also 1 if the threshold is not positive, which a schedule may return.
    """
    threshold = jnp.asarray(threshold, jnp.float32)
    # NaN compares as False, so that it is not hot either.
    is_hot = (signal > threshold) & jnp.isfinite(signal) & (threshold > 0)
    # JAX's check for NaN sees both branches, so the one that is not used divides by 1.
    positive = jnp.where(is_hot, signal, 1.0)
    gamma = jnp.where(is_hot, threshold / positive, 1.0)
    # Never zero: the head could not recover, and γ·γ^(-1/2) would be NaN.
    return jnp.maximum(gamma, jnp.finfo(jnp.float32).tiny)


def parameter_factors(
    sites: Sequence[PlacedSite],
    gammas: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """What each parameter is multiplied by: γ**power, head by head.

    `gammas` are [*layers, entries], by the name of the site.
    """
    factors: dict[str, jax.Array] = {}
    for site in sites:
        for placed_scale in site.scales:
            power, path = placed_scale.scale.power, placed_scale.leaf
            if power == 0:
                continue
            # A kernel's features may belong to two factors, such as query and rotary; each is 1 elsewhere.
            factor = placed_scale.spread(_power(gammas[site.name], power))
            factors[path] = factors[path] * factor if path in factors else factor
    return factors


def _power(x: Float[Array, "*shape"], power: float) -> Float[Array, "*shape"]:
    # The square root is exact, and faster than a general power.
    if power == 1.0:
        return x
    if power == 0.5:
        return jnp.sqrt(x)
    return x**power


def scaled_leaves(
    updates: Any,
    params: Mapping[str, jax.Array],
    factors: Mapping[str, jax.Array],
) -> Any:
    """The updates after which each parameter is its factor times what it would be otherwise."""
    leaves = flatten_paths(updates)
    for path, factor in factors.items():
        if path not in leaves or is_masked(leaves[path]):
            raise ValueError(f"the updates have no leaf {path!r}; if frozen, leave out its site.")
        leaves[path] = scaled_update(leaves[path], params[path], factor)
    return jax.tree.structure(updates, is_leaf=is_masked).unflatten(leaves.values())


def scaled_update(
    u: Float[Array, "*parameter"],
    p: Float[Array, "*parameter"],
    f: Float[Array, "*#parameter"],
) -> Float[Array, "*parameter"]:
    """u' with p + u' = f·(p + u); u bit for bit where f = 1, because 0·p turns −0 into 0 and inf into NaN."""
    # A half-precision update of a float32 weight would miss the bound.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(u.dtype, p.dtype)
        wide = jnp.promote_types(dtype, jnp.float32)
    u = u.astype(wide)
    p = p.astype(wide)
    f = f.astype(wide)
    # u' = f·u + (f − 1)·p
    scaled = f * u + (f - 1) * p
    return jnp.where(f == 1, u, scaled).astype(dtype)
