"""After everything, the learning rate included: clip where it is unstable. p + u is the new weight already."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muonjax._routing import names
from muonjax._sites import Found, Site, broadcast_heads, find_sites, match_statistics

SharedKeys = Literal["query"]


class QKClipState(NamedTuple):
    """What `qk_clip` remembers; all of it is worth a dashboard."""

    count: jax.Array  # int32 []: updates seen
    running_max: dict[str, jax.Array]  # float32 [*stack, heads] a module: since the last clip
    max_logits: dict[str, jax.Array]  # float32 [*stack, heads] a module: at the last clip
    num_clipped: jax.Array  # int32 []: heads above the threshold at the last clip
    total_clipped: jax.Array  # int32 []: the sum of all of them


def clip_factor(largest: jax.Array, threshold: jax.typing.ArrayLike) -> jax.Array:
    """gamma = min(1, threshold / S), exactly 1 where S is not a finite number above the threshold."""
    hot = (largest > threshold) & jnp.isfinite(largest)
    return jnp.where(hot, threshold / jnp.where(hot, largest, 1.0), 1.0)


def _scales(found: Found, gamma: jax.Array, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The factor of each parameter of a module, such that the query's times the key's is gamma, head by head."""
    shared = found.heads["key"] != found.heads["query"]
    # Keys that several heads share stay as they are: scaling them would clip the innocent heads as well.
    query = gamma if shared else jnp.sqrt(gamma)
    return {
        path: broadcast_heads(query, found, path, leaves[path])
        for path, factor in found.factors.items()
        if factor.side == "query" or not shared
    }


def apply_qk_clip(
    params: Any, max_logits: Any, sites: Sequence[Site], threshold: jax.typing.ArrayLike = 100.0
) -> Any:
    """Scale query and key parameters so that the statistics, measured on these very parameters, obey the threshold.

    Args:
      params: Parameters, with arrays as leaves.
      max_logits: What `attention_fn` sowed, or a dict from module path to [*stack, heads].
      sites: As in `qk_clip`.
      threshold: The largest logit allowed; > 0.

    Returns:
      The parameters; heads at or below the threshold are bit for bit what they were.

    Raises:
      ValueError: As `qk_clip`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> attention = {"query": {"kernel": jnp.ones((8, 2, 4))}, "key": {"kernel": jnp.ones((8, 2, 4))}}
      >>> statistics = {"attention": jnp.array([400.0, 50.0])}
      >>> params = {"attention": attention}
      >>> clipped = muonjax.apply_qk_clip(params, statistics, [muonjax.mha_site()], 100.0)
      >>> clipped["attention"]["query"]["kernel"][0, :, 0]
      Array([0.5, 1. ], dtype=float32)
    """
    zeros = jax.tree.map(jnp.zeros_like, params)
    found = find_sites(params, sites, call="apply_qk_clip")
    statistics = match_statistics(max_logits, found, call="apply_qk_clip")
    updates = _clip(zeros, params, found, {k: clip_factor(s, threshold) for k, s in statistics.items()})
    return optax.apply_updates(params, updates)


def _clip(updates: Any, params: Any, found: dict[str, Found], gammas: dict[str, jax.Array]) -> Any:
    """u' = f u + (f - 1) p, so that p + u' = f (p + u); where f is 1, u' is u to the bit."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(updates)
    leaves = {"/".join(names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    scales: dict[str, jax.Array] = {}
    for name, module in found.items():
        scales |= _scales(module, gammas[name], leaves)

    def clipped(path, u):
        f = scales.get(path)
        if f is None:
            return u
        p = leaves[path].astype(jnp.float32)
        return jnp.where(f == 1, u, (f * u.astype(jnp.float32) + (f - 1) * p).astype(u.dtype))

    return jax.tree.unflatten(treedef, [clipped("/".join(names(path)), u) for path, u in flat])


def qk_clip(
    threshold: optax.ScalarOrSchedule,
    sites: Sequence[Site],
    *,
    shared_keys: SharedKeys = "query",
    every_k: int = 1,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""QK-Clip: after the update, scale down the queries and keys of every head whose logits ran away.

    With S the largest logit of a head in the forward pass and gamma = min(1, threshold / S), the new query and key
    weights of that head, biases included, are multiplied by sqrt(gamma) each. It stands last in the chain. The
    bound is exact for the weights and inputs that S was measured on; with a learning rate the statistic lags one
    step behind.

    Args:
      threshold: The largest pre-softmax logit allowed, after the 1/sqrt(d) scale and the mask: > 0, or a schedule.
      sites: The attention modules: `[mha_site()]`.
      shared_keys: What happens where several query heads share a key head; "query" puts all of gamma on the
        query and leaves the key alone.
      every_k: Clip on every k-th update with the largest logits since the last clip, for gradient accumulation:
        `chain(MultiSteps(muon, k).gradient_transformation(), qk_clip(..., every_k=k))`.
      axis_name: Mesh axes to take the maximum over, inside of `shard_map` or `pmap`.

    Returns:
      A transformation whose `update` needs `params` and `max_logits`.

    Raises:
      ValueError: While tracing: a site that matches nothing, a statistic without a site or the reverse, shapes that
        do not fit, a module that normalizes its queries and keys, missing `params` or `max_logits`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {"query": {"kernel": jnp.ones((8, 2, 4))}, "key": {"kernel": jnp.ones((8, 2, 4))}}}
      >>> tx = muonjax.qk_clip(100.0, [muonjax.mha_site()])
      >>> state = tx.init(params)
      >>> zeros = {"attention": {"query": {"kernel": jnp.zeros((8, 2, 4))}, "key": {"kernel": jnp.zeros((8, 2, 4))}}}
      >>> updates, state = tx.update(zeros, state, params, max_logits={"attention": jnp.array([400.0, 50.0])})
      >>> int(state.num_clipped)
      1

    Source: Kimi Team, "Kimi K2", 2025, section 2.1, Algorithm 1; J. Su, kexue.fm/archives/11126 (whose
    translation in circulation prints Q gamma, K gamma: that clips twice).
    """
    sites = tuple(sites)
    if not callable(threshold) and isinstance(threshold, (int, float)) and not threshold > 0:
        raise ValueError(f"qk_clip(threshold={threshold!r}) must be positive.")
    if not sites:
        raise ValueError("qk_clip(sites=[]) clips nothing; name the attention modules, such as [mha_site()].")
    if shared_keys != "query":
        raise ValueError(f"qk_clip(shared_keys={shared_keys!r}) is unknown; use 'query'.")
    if not isinstance(every_k, int) or every_k < 1:
        raise ValueError(f"qk_clip(every_k={every_k!r}) must be a whole number, at least 1.")

    def init(params: optax.Params) -> QKClipState:
        found = find_sites(params, sites, call="qk_clip") if jax.tree.leaves(params) else {}

        def lowest():  # made anew for each field: one buffer in two places can't be donated
            return {
                name: jnp.full((*m.stack, m.heads["query"]), -jnp.inf, jnp.float32)
                for name, m in found.items()
            }

        count, clipped, total = (jnp.zeros([], jnp.int32) for _ in range(3))
        return QKClipState(count, lowest(), lowest(), clipped, total)

    def update(updates, state: Any, params: Any = None, *, max_logits: Any = None, **extra_args: Any):
        del extra_args
        if params is None:
            raise ValueError("qk_clip scales weights: call tx.update(grads, state, params, max_logits=...).")
        if max_logits is None:
            raise ValueError(
                "qk_clip needs this step's statistics: tx.update(grads, state, params, max_logits=...), as sown by "
                "muonjax.linen.attention_fn or muonjax.nnx.attention_fn."
            )
        found = find_sites(params, sites, call="qk_clip")
        running = match_statistics(max_logits, found, call="qk_clip")
        for name, largest in running.items():
            # pmax first: replicas that clip by their own maxima would drift apart.
            largest = largest if axis_name is None else jax.lax.pmax(largest, axis_name)
            running[name] = jnp.maximum(largest, state.running_max[name])
        due = (state.count + 1) % every_k == 0
        limit = threshold(state.count) if callable(threshold) else threshold
        gammas = {name: jnp.where(due, clip_factor(largest, limit), 1.0) for name, largest in running.items()}
        hot = sum(
            (jnp.sum(gamma < 1, dtype=jnp.int32) for gamma in gammas.values()), jnp.zeros([], jnp.int32)
        )
        new = QKClipState(
            count=jnp.asarray(optax.safe_increment(state.count)),
            running_max={name: jnp.where(due, -jnp.inf, largest) for name, largest in running.items()},
            max_logits={
                name: jnp.where(due, largest, state.max_logits[name]) for name, largest in running.items()
            },
            num_clipped=jnp.where(due, hot, state.num_clipped),
            total_clipped=state.total_clipped + hot,
        )
        return _clip(updates, params, found, gammas), new

    return optax.GradientTransformationExtraArgs(init, update)
