"""The engine of QK-Clip: scale weights whose statistic exceeds a threshold,
by a factor for each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from muonjax._clip.match_statistics import match_statistics
from muonjax._clip.place_sites import Modules, place_sites
from muonjax._clip.site import PlacedSite, Site
from muonjax._common.arguments import (
    errors_of,
    mesh_axes,
    message_for_other_state,
    require_params,
    shown,
    warn_user,
    whole_number,
)
from muonjax._common.explicit_axes import sharded_like, zero_beside
from muonjax._common.linalg import at_least_float32, common_dtype
from muonjax._common.trees import flatten_paths, is_masked

if TYPE_CHECKING:
    from jaxtyping import Array, Float


# An array for each module, or for each parameter, by its path.
ByPath: TypeAlias = dict[str, jax.Array]


class QKClipState(NamedTuple):
    """The state of `qk_clip` and `signal_clip`; `muonjax.metrics` flattens it for a log.

    The keys of the dictionaries are the paths of the modules, or those of the signals at the root
    and where a module has several; their arrays are [*layers, heads].

    Attributes:
      count: Number of updates so far, int32 [].
      running_max: Maxima since the last clip, float32; -inf after it.
      maxima: The maxima that the last clip used, float32; -inf before the first,
        and where none was finite.
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
    running_max: ByPath
    maxima: ByPath
    factors: ByPath
    clips: ByPath


@dataclasses.dataclass(kw_only=True)
class ClipByStatistic:
    """Scale the weights of sites by the statistics that `update` gets: `qk_clip`,
    `muonclip`, `signal_clip`.

    Attributes:
      call: The public function, for errors.
      argument: What `update` calls the statistics.
      source: How the user gets them, for the error of an update without them.
      sites: What is scaled.
      prepare: Checks the modules that the sites match, and may set their powers of γ.
      threshold: The largest value allowed, or a schedule of the number of clips so far.
      every_k: Clip at every k-th update; None is 1.
      axis_name: Mesh axes to take the maximum over, one or several; None is no axis.
    """

    call: str
    argument: str
    source: str
    sites: Sequence[Site]
    prepare: Callable[[list[PlacedSite]], list[PlacedSite]]
    threshold: Any
    every_k: Any
    axis_name: Any

    def __post_init__(self):
        # None and not 1, because optax.inject_hyperparams makes arrays of numbers.
        every_k = 1 if self.every_k is None else self.every_k
        why = (
            " of updates, at least 1; optax.inject_hyperparams(..., static_args='every_k') "
            "leaves it one."
        )
        self.every_k = whole_number("every_k", every_k, 1, why)
        self.axis_name = mesh_axes("axis_name", self.axis_name)

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The member of a chain."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def find(self, modules: Modules) -> tuple[list[PlacedSite], set[str]]:
        """The modules that are clipped in a tree of parameters,
        and the keys of statistics that are skipped."""
        sites, not_trained = place_sites(modules, self.sites)
        return self.prepare(sites), not_trained

    def init(self, params: optax.Params) -> QKClipState:
        """The state before the first update."""
        # `optax.tree_map_params` calls `init` with a placeholder that has no leaves, to see what in
        # a state mirrors the parameters. Nothing does here, so there is no placeholder in the
        # result. An array in place of each dictionary is a prefix of the state's dictionaries,
        # whatever keys these have. Masked parameters count as leaves, so that a tree of these alone
        # is no placeholder, and `find` refuses it.
        if not jax.tree.leaves(params, is_leaf=is_masked):
            no_dicts: Any = [jnp.zeros([])] * 5
            return QKClipState(*no_dicts)
        with errors_of(self.call):
            modules = Modules(params)
            sites, _ = self.find(modules)
        # Not in `update`, which is traced more than once, and would warn each time
        self._warn_of_low_precision(sites, modules)
        return first_state(sites, modules)

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, QKClipState]:
        """The updates that take the weights to their clipped values, and the state after them."""
        # In a chain, Optax hands every member all further arguments by name.
        statistics = extra_args.get(self.argument)
        with errors_of(self.call):
            # The state of another optimizer lacks this field, and so does the dictionary that a
            # checkpoint may have made of this state.
            if not hasattr(state, "factors"):
                raise ValueError(message_for_other_state(state))
            require_params(params)
            if statistics is None:
                # `source` begins with a space and ends with a line break: "update needs max_logits
                # (muonjax.linen.TrainState passes it on): (loss, max_logits), grads = ..., then".
                raise ValueError(
                    f"update needs {self.argument}{self.source}"
                    f"tx.update(grads, state, params, {self.argument}={self.argument})."
                )
            # Sites are found again, because parameters may be masked or missing here that `init`
            # had. Paths and shapes are static, so this is done while tracing. `not_trained` names
            # the statistics of a program's attentions with frozen parameters, which are ignored.
            modules = Modules(params)
            sites, not_trained = self.find(modules)
            # The state has to have these sites too, with as many heads.
            self._check_state(state, sites)
            maxima = match_statistics(self.argument, statistics, sites, not_trained)
            if self.axis_name:
                # Replicas that clip by their own maxima would diverge.
                maxima = jax.lax.pmax(maxima, self.axis_name)
            state, factors = self.state_and_factors(state, sites, maxima)
            # A parameter p and its update u: the result is u' with p + u' = factor · (p + u).
            return scaled_leaves(updates, modules.leaves, factors), state

    def state_and_factors(
        self, state: QKClipState, sites: Sequence[PlacedSite], maxima: ByPath
    ) -> tuple[QKClipState, ByPath]:
        """The state after this update, and what the update multiplies each parameter by.

        The state keeps the maxima since the last clip. Every k-th update clips by them.

        Args:
          state: The state before this update.
          sites: What is clipped.
          maxima: The largest logit of each head in this forward pass, [*layers, heads],
            by the name of the module.

        Returns:
          The state, and the factor of each parameter that is scaled, by its path, in a shape that
          broadcasts to it. γ is 1 for all heads unless this is the k-th, 2k-th, ... update of
          `every_k` = k.
        """
        # `state.count` is the number of updates before this one.
        is_due = (state.count + 1) % self.every_k == 0
        threshold = self.threshold
        # A schedule goes by the number of clips so far, not of updates.
        if callable(threshold):
            threshold = threshold(state.count // self.every_k)

        gammas: ByPath = {}
        # Unlike `+ 1` it stays at the largest int32.
        count = jnp.asarray(optax.safe_increment(state.count))
        after = QKClipState(count, {}, {}, {}, {})
        for name, maximum in maxima.items():
            # The maxima are sharded as the state is, even if they came otherwise,
            # so that its buffers can be donated.
            maximum = sharded_like(maximum, state.maxima[name])
            # The clip goes by the largest of all micro-batches since the last clip.
            maximum = jnp.maximum(maximum, state.running_max[name])
            after.running_max[name] = jnp.where(is_due, -jnp.inf, maximum)
            gamma = jnp.where(is_due, clip_factor(maximum, threshold), 1.0)
            # For a log, these two keep what the last clip did until the next clip.
            after.maxima[name] = jnp.where(is_due, maximum, state.maxima[name])
            after.factors[name] = jnp.where(is_due, gamma, state.factors[name])
            is_clipped = (gamma < 1).astype(jnp.int32)
            after.clips[name] = state.clips[name] + is_clipped
            gammas[name] = gamma
        return after, _parameter_factors(sites, gammas)

    def _check_state(self, state: QKClipState, sites: Sequence[PlacedSite]) -> None:
        """Raise unless the state was made for these modules and numbers of heads."""
        # Neither a threshold nor `every_k` is a part of the state,
        # so that both may change in a run.
        here = {site.name: site.shape for site in sites}
        there = {name: factor.shape for name, factor in state.factors.items()}
        if here != there:
            raise ValueError(
                f"this state was made for {shown(there)}, [*layers, heads]; sites and parameters "
                f"say {shown(here)}. "
                "Take those that it was made with, or start anew with init."
            )

    def _warn_of_low_precision(
        self, sites: Sequence[PlacedSite], modules: Modules
    ) -> None:
        """Warn once, of the first weights with fewer than 32 bits, in which a factor near 1 is
        lost."""
        for site in sites:
            for scale in site.scales:
                dtype = modules.leaves[scale.leaf].dtype
                if jnp.finfo(dtype).bits < 32:
                    warn_user(
                        f"{self.call}: {scale.leaf!r} is {dtype}, in which a factor near 1 rounds "
                        "away: a logit less than a percent above the threshold stays there. Keep "
                        "float32 master weights."
                    )
                    return


def first_state(sites: Sequence[PlacedSite], modules: Modules) -> QKClipState:
    """The state before the first update: no maxima since a clip (`running_max`), none that a clip
    used (`maxima`), and no head scaled."""
    # No updates so far, and four dictionaries, whose arrays follow
    state = QKClipState(jnp.zeros([], jnp.int32), {}, {}, {}, {})
    for site in sites:
        # On a mesh with explicit axis types, sums with this zero lie on the mesh of the parameters,
        # as the state after an update will: else `jit` would compile `update` twice.
        zero = zero_beside(modules.leaves[site.scales[0].leaf])
        zeros = jnp.zeros(site.shape, jnp.float32) + zero.astype(jnp.float32)
        # Each field gets the result of an operation of its own, and so another buffer: one that is
        # in two places can't be donated.
        state.running_max[site.name] = zeros - jnp.inf
        state.maxima[site.name] = zeros - jnp.inf
        state.factors[site.name] = zeros + 1.0
        state.clips[site.name] = zeros.astype(jnp.int32)
    return state


def clip_factor(
    signal: Float[Array, "*layers entries"], threshold: Any
) -> Float[Array, "*layers entries"]:
    """γ = min(1, threshold / S) for each entry S of `signal`, float32; exactly 1 unless S is finite
    and above the threshold.

    It is also 1 if the threshold is not positive, which a schedule may return.
    """
    # A schedule may return an integer or a half-precision number.
    threshold = jnp.asarray(threshold, jnp.float32)
    # NaN compares as False, so a head with NaN keeps its weights.
    is_hot = (signal > threshold) & jnp.isfinite(signal) & (threshold > 0)
    # `jax_debug_nans` looks at both branches of a `where`,
    # so the branch that is not used divides by 1.
    positive = jnp.where(is_hot, signal, 1.0)
    gamma = jnp.where(is_hot, threshold / positive, 1.0)
    # threshold / S may underflow to 0. Weights times 0 never recover, and a site of `signal_clip`
    # may have a negative power of γ, which would be infinite.
    return jnp.maximum(gamma, jnp.finfo(jnp.float32).tiny)


def _parameter_factors(sites: Sequence[PlacedSite], gammas: ByPath) -> ByPath:
    """What each parameter is multiplied by, by its path, in a shape that broadcasts to it.

    With γ = [1, 0.25] for two heads and the power 1/2, a kernel "attention/query/kernel" of shape
    [d, 2, head_dim] gets an array [1, 2, head_dim], which is 1 for the first head and 0.5 for the
    second.

    Args:
      sites: The modules, each with its parameters and their powers of γ.
      gammas: γ of each head, [*layers, heads], by the name of the module.
    """
    factors: ByPath = {}
    for site in sites:
        for placed in site.scales:
            # A key that several query heads share has power 0, and stays as it is.
            power = placed.scale.power
            if power == 0:
                continue
            gamma = gammas[site.name]
            # The square root is rounded correctly, and faster than a general power.
            root = jnp.sqrt(gamma) if power == 0.5 else gamma**power
            # What is not scaled has 1.
            factor = placed.spread(root, otherwise=1.0)
            # A kernel may have two scales, as the query and the rotary features of latent
            # attention, or a query and a key of a fused kernel. Each factor is 1 where the other
            # scale is (`_disjoint_attentions` has checked this), so the kernel's is their product.
            factors[placed.leaf] = factors.get(placed.leaf, 1.0) * factor
    return factors


def scaled_leaves(updates: Any, params: ByPath, factors: ByPath) -> Any:
    """The updates after which each parameter is its factor times what it would be otherwise."""
    # By path, since a factor is that of a path, and in the order of the tree.
    leaves = flatten_paths(updates)
    for path, factor in factors.items():
        # Optax masks frozen parameters. Without an update there is nothing by which the clip could
        # change them.
        if path not in leaves or is_masked(leaves[path]):
            raise ValueError(
                f"the updates have no leaf {path!r}; if frozen, leave out its site."
            )
        leaves[path] = scaled_update(leaves[path], params[path], factor)
    return jax.tree.structure(updates, is_leaf=is_masked).unflatten(leaves.values())


def scaled_update(
    u: Float[Array, "*parameter"],
    p: Float[Array, "*parameter"],
    f: Float[Array, "*#parameter"],
) -> Float[Array, "*parameter"]:
    """The update u' after which a weight is f times what it would be: p + u' = f·(p + u).

    Where f = 1 it is u bit for bit: the formula below would turn −0 into 0,
    and infinite p into NaN.
    """
    # The result has the wider dtype: a half-precision update of a float32 weight would be rounded,
    # so that the logits miss the threshold.
    dtype = common_dtype(u.dtype, p.dtype)
    wide = at_least_float32(dtype)
    # In 16 bits f itself would be rounded, and the difference f − 1 with it.
    u, p, f = (x.astype(wide) for x in (u, p, f))
    # u' = f·u + (f − 1)·p
    return jnp.where(f == 1, u, f * u + (f - 1) * p).astype(dtype)
