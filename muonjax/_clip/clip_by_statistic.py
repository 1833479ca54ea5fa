"""Scale down weights whose measured signal exceeds a threshold, for any signal that is linear in the weights."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muonjax._clip.factors import Target, clip_factor, parameter_factors, scaled_update
from muonjax._clip.matching import Modules, find_targets, larger, largest_of_devices, match_statistics
from muonjax._clip.sites import Site
from muonjax._common.arguments import (
    check_order,
    check_range,
    errors_of,
    mesh_axes,
    other_state,
    shown,
    warn_user,
    whole_number,
)
from muonjax._common.platform import sharded_like, zero_beside
from muonjax._common.trees import flatten_paths, is_masked


@dataclasses.dataclass(frozen=True)
class SignalRule:
    r"""A signal, the weights that it depends on, and the largest value allowed for it.

    The signal S must be a maximum of sums of products, each linear in its factors (a factor is a kernel with its
    bias). Each factor is scaled by a power of γ = min(1, threshold / S). If these powers sum to one along every
    product, the signal is scaled by exactly γ. The sums are checked here; that the signal is linear in each factor is
    not checked.

    Attributes:
      site: The weights, with the powers of γ in its scales.
      threshold: The largest value allowed for the signal, > 0, or a schedule of the number of clips.
      products: Names of the factors along each product; None: every factor is a product by itself. A factor that is not
        scaled at all, such as a shared key, is left out.

    Raises:
      ValueError: Powers that do not sum to one along a product, or that differ within a factor.

    Example:
      >>> import muonjax
      >>> kernel = muonjax.Scale(path="kernel", rank=2, entries=1)  # entries=1: the layer as a whole
      >>> site = muonjax.Site(path="layers/.*/out", scales=(kernel,), signal="max_output")
      >>> muonjax.SignalRule(site, threshold=30.0).threshold
      30.0
    """

    site: Site
    threshold: optax.ScalarOrSchedule
    products: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self):
        if not isinstance(self.site, Site):
            raise TypeError(f"SignalRule(site={shown(self.site)}) must be a Site.")
        check_range("SignalRule", "threshold", self.threshold, "positive and finite", ".", schedule=True)
        powers = {s.factor: s.power for s in self.site.scales}
        uneven = [s.path for s in self.site.scales if powers[s.factor] != s.power]
        if uneven:
            raise ValueError(f"SignalRule: {uneven} have another power than others of a factor; give one.")
        products = [(f,) for f in powers] if self.products is None else self.products
        is_tuples = isinstance(products, Sequence) and all(isinstance(p, Sequence) for p in products)
        if not is_tuples or set(itertools.chain(*products)) != set(powers):
            given = f"SignalRule(products={self.products!r})"
            raise ValueError(f"{given} must be tuples of factors, of all {[*powers]}.")
        for product in products:
            if abs((total := sum(powers[f] for f in product)) - 1) > 1e-6:
                raise ValueError(f"SignalRule: along {product} powers sum to {total}; they must sum to 1.")


def signal_clip(
    rules: SignalRule | Sequence[SignalRule],
    *,
    every_k: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scale down weights whose measured signal exceeds its threshold.

    In `qk_clip` the signal is the largest attention logit. Another signal is the largest output of a layer
    ("MaxOutput"): of each output dimension, of each group of them, or of the whole layer.

    Args:
      rules: What is measured, which weights it depends on, and the largest value allowed for it.
      every_k: As in `qk_clip`.
      axis_name: As in `qk_clip`.

    Returns:
      A transformation whose `update` needs `params` and `signals`, a dict {module path: signal}, by the path of the
      signal where a module has several. Its state is a `QKClipState` with the same keys.

    Raises:
      ValueError: As `qk_clip`.
      TypeError: `rules` are not `SignalRule`s.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> scales = (
      ...     muonjax.Scale(path="kernel", rank=2),
      ...     muonjax.Scale(path="bias", rank=1, optional=True),
      ... )
      >>> site = muonjax.Site(path="head", scales=scales, signal="max_output")
      >>> tx = muonjax.signal_clip(muonjax.SignalRule(site, threshold=10.0))
      >>> params = {"head": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}}
      >>> zeros = {"head": {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)}}
      >>> updates, _ = tx.update(zeros, tx.init(params), params, signals={"head": jnp.array([5.0, 20.0])})
      >>> updates["head"]["bias"]  # the second output dimension is halved
      Array([ 0. , -0.5], dtype=float32)

    Source: J. Su, kexue.fm/archives/11126, last part.
    """
    every_k, axes = checked_settings("signal_clip", every_k, axis_name)
    several = (rules,) if isinstance(rules, SignalRule) else rules if isinstance(rules, Sequence) else ()
    if not several or not all(isinstance(rule, SignalRule) for rule in several):
        raise TypeError(f"signal_clip(rules={shown(rules)}) must be a SignalRule or several.")

    def find(modules: Modules) -> tuple[list[Target], set[str]]:
        targets, not_trained = find_targets(modules, [(rule.site, rule.threshold) for rule in several])
        for target in targets:
            if shared := [p.path for p in target.parts if p.scale.power and p.entries != target.entries]:
                raise ValueError(f"several entries of {target.signal!r} share {shared}: give it power=0.")
        return targets, not_trained

    return clip("signal_clip", "signals", find, every_k, axes)


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


def checked_settings(call: str, every_k: Any, axis_name: Any) -> tuple[int, tuple[str, ...]]:
    """`every_k` and the mesh axes, as `qk_clip` and `signal_clip` take them."""
    # None is the default, for optax.inject_hyperparams makes an array of a default that is a number.
    if every_k is None:
        every_k = 1
    why = " of updates, at least 1; optax.inject_hyperparams(..., static_args='every_k') leaves it one."
    return whole_number(call, "every_k", every_k, 1, why), mesh_axes(call, "axis_name", axis_name)


def clip(
    call: str,
    argument: str,
    find: Callable[[Modules], tuple[Sequence[Target], Collection[str]]],
    every_k: int,
    axes: tuple[str, ...],
) -> optax.GradientTransformationExtraArgs:
    """The transformation for the modules that `find` returns.

    Args:
      call: The public function, for errors.
      argument: The name of the argument with the statistics in `update`.
      find: The modules, with their thresholds, and the keys of statistics of modules that are not trained.
      every_k: As in `qk_clip`.
      axes: Mesh axes to take the maximum over.
    """

    def init(params: optax.Params) -> QKClipState:
        # To find the parts of a state that are like parameters, Optax calls `init` with a placeholder without leaves.
        # No part of this state is like a parameter; for Optax, one array in the place of each dictionary means that.
        if not jax.tree.leaves(params, is_leaf=is_masked):
            return QKClipState(jnp.zeros([], jnp.int32), *(jnp.zeros([]) for _ in range(4)))  # pyright: ignore
        with errors_of(call):
            modules = Modules(params)
            targets, _ = find(modules)
        _warn_of_low_precision(call, targets, modules)
        zeros = {t.name: zero_beside(modules.leaves[t.parts[0].path]) for t in targets}

        def full(value: float, dtype: jax.typing.DTypeLike = jnp.float32) -> dict[str, jax.Array]:
            # A new array for each field: a buffer that is in two places can't be donated.
            shapes = _shapes(targets).items()
            return {name: jnp.full(shape, value, dtype) + zeros[name].astype(dtype) for name, shape in shapes}

        return QKClipState(
            count=jnp.zeros([], jnp.int32),
            running_max=full(-jnp.inf) if every_k > 1 else {},
            maxima=full(-jnp.inf),
            factors=full(1.0),
            clips=full(0, jnp.int32),
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        check_order(call, updates, state, params)
        if not hasattr(state, "factors"):
            raise ValueError(other_state(call, state))
        with errors_of(call):
            if params is None or extra_args.get(argument) is None:
                raise ValueError(_missing(argument, "params" if params is None else argument))
            modules = Modules(params)
            targets, not_trained = find(modules)
            _check_state(state, targets, every_k)
            maxima = match_statistics(argument, extra_args[argument], targets, not_trained)
        if axes:
            # Replicas that clip by their own maxima would diverge.
            maxima = {name: largest_of_devices(s, axes) for name, s in maxima.items()}
        state, gammas = _advance(state, maxima, targets, every_k)
        scales = parameter_factors(targets, gammas)
        paths = flatten_paths(updates)
        if lost := [path for path in scales if path not in paths or is_masked(paths[path])]:
            raise ValueError(f"{call}: the updates have no leaf {lost[0]!r}; if frozen, leave out its site.")
        old = modules.leaves
        new = (scaled_update(u, old[p], scales[p]) if p in scales else u for p, u in paths.items())
        return jax.tree.structure(updates, is_leaf=is_masked).unflatten(new), state

    return optax.GradientTransformationExtraArgs(init, update)


def _advance(
    state: QKClipState, maxima: dict[str, jax.Array], targets: Sequence[Target], every_k: int
) -> tuple[QKClipState, dict[str, jax.Array]]:
    """The state after this update, and γ of each module: 1 at an update that does not clip."""
    # As the state is sharded, also where the statistics are not: its buffers can be donated.
    maxima = {name: sharded_like(s, state.maxima[name]) for name, s in maxima.items()}
    if every_k > 1:
        maxima = {name: larger(s, state.running_max[name]) for name, s in maxima.items()}
    due = (state.count + 1) % every_k == 0
    clips_so_far = state.count // every_k

    def at_clip(new: jax.Array, otherwise: Any) -> jax.Array:
        return new if every_k == 1 else jnp.where(due, new, otherwise)

    gammas = {}
    for target in targets:
        limit: Any = target.threshold
        limit = limit(clips_so_far) if callable(limit) else limit
        gammas[target.name] = at_clip(clip_factor(maxima[target.name], limit), 1.0)
    after = QKClipState(
        count=jnp.asarray(optax.safe_increment(state.count)),
        running_max={name: jnp.where(due, -jnp.inf, s) for name, s in maxima.items()} if every_k > 1 else {},
        maxima={name: at_clip(s, state.maxima[name]) for name, s in maxima.items()},
        factors={name: at_clip(g, state.factors[name]) for name, g in gammas.items()},
        clips={name: state.clips[name] + (g < 1).astype(jnp.int32) for name, g in gammas.items()},
    )
    return after, gammas


def _check_state(state: QKClipState, targets: Sequence[Target], every_k: int) -> None:
    """Raise unless modules, heads and accumulation are those of the state; the threshold may have changed."""
    here, there = _shapes(targets), {name: tuple(f.shape) for name, f in state.factors.items()}
    if here != there or bool(state.running_max) != (every_k > 1):
        made = "every_k > 1" if state.running_max else "every_k=1"
        raise ValueError(
            f"this state was made for {shown(there)}, [*layers, heads], and {made}; sites and parameters say "
            f"{shown(here)}, and every_k={every_k}. Take those that it was made with, or start anew with init."
        )


def _warn_of_low_precision(call: str, targets: Sequence[Target], modules: Modules) -> None:
    low = {part.path: modules.leaves[part.path].dtype for t in targets for part in t.parts}
    low = {path: dtype for path, dtype in low.items() if jnp.finfo(dtype).bits < 32}
    if low:
        path, dtype = next(iter(low.items()))
        warn_user(
            f"{call}: {path!r} (and {len(low) - 1} more) is {dtype}, in which a factor near 1 rounds away: a logit "
            "less than a percent above the threshold stays there. Keep float32 master weights."
        )


def _shapes(targets: Sequence[Target]) -> dict[str, tuple[int, ...]]:
    return {t.name: (*t.layers, t.entries) for t in targets}


def _missing(argument: str, missing: str) -> str:
    usage = f"tx.update(grads, state, params, {argument}={argument})"
    if missing != "max_logits":
        return f"update needs {missing}: call {usage}."
    return (
        "update needs max_logits: (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(params, batch), then\n"
        f"{usage}. Linen's TrainState that passes it on is muonjax.linen.TrainState."
    )
