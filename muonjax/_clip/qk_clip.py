"""QK-Clip: scale queries and keys so that the largest logit of each attention head stays below a
threshold."""

import dataclasses
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muonjax._clip.clip_by_statistic import (
    ClipByStatistic,
    first_state,
    scaled_leaves,
)
from muonjax._clip.match_statistics import match_statistics
from muonjax._clip.place_sites import Modules
from muonjax._clip.site import PlacedSite, Sites, as_sites
from muonjax._common.arguments import check_range, errors_of

_USUAL = "; Kimi K2 used 100."


def qk_clip(
    threshold: optax.ScalarOrSchedule,
    sites: Sites | None = None,
    *,
    every_k: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""QK-Clip: scale down the queries and keys of every head whose attention logits exceed a
    threshold.

    With S the largest logit of a head in the forward pass,

    $$\gamma = \min(1, \tau / S), \qquad W_q \leftarrow \sqrt\gamma\, W_q,
    \qquad W_k \leftarrow \sqrt\gamma\, W_k$$

    for each head of each layer, kernels and biases. A key that several query heads share is not
    scaled: there, and for the rotary features of latent attention (MLA), W_q takes all of γ. What
    is scaled is the new weight: u' = f·u + (f − 1)·p, so that p + u' = f·(p + u); where f = 1 the
    update passes bit for bit. γ is exactly 1 for a maximum that is negative, zero, infinite or NaN.
    If one micro-batch or device measures infinity or NaN,
    the finite maxima of the others still count.

    It is the last member of the chain, after everything that changes the update; `optax.MultiSteps`
    has to be inside:
    `chain(MultiSteps(muon, k).gradient_transformation(), qk_clip(..., every_k=k))`.
    If `MultiSteps` were around the clip, the clip would see the logits of the last
    micro-batch alone. The bound is exact for the weights and inputs that S was measured on: with a
    learning rate, the statistic is one step old. bfloat16 parameters round factors near 1 away
    (`init` warns): keep float32 master weights.

    Args:
      threshold: τ, the largest pre-softmax logit allowed, after the 1/√d scale and the mask; > 0
        (Kimi K2: 100). Or a schedule, a function of the number of clips.
      sites: Where attention is: what `muonjax.inspect` returns. By hand, where the softmax is
        inside of a kernel, sites from `mha_site`, `mla_site` or `fused_qkv_site`. An attention of
        the program whose parameters are frozen, masked or not given is skipped.
      every_k: Clip at every k-th update, on the largest logits since the last;
        for gradient accumulation. None is 1.
      axis_name: Mesh axes to take the maximum over, inside `shard_map` or `pmap`.
        `jit` on a mesh needs none.

    Returns:
      A transformation whose `update` needs `params` and `max_logits`, a dict
      `{module path: [*layers, heads]}` as `muonjax.value_and_grad` returns it.
      Its state is a `QKClipState`.

    Raises:
      ValueError: No sites, or settings out of range; while tracing: a site by hand that matches
        nothing, or a module that is frozen, adapted or normalized; statistics without a site or the
        reverse; shapes that do not fit.
      TypeError: A setting or a statistic of another type.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> tx = optax.chain(optax.sgd(0.0), muonjax.qk_clip(100.0, muonjax.mha_site()))
      >>> statistics = {"attention": jnp.array([400.0, 50.0])}
      >>> updates, state = tx.update(params, tx.init(params), params, max_logits=statistics)
      >>> optax.apply_updates(params, updates)["attention"]["query"]["kernel"][0, :, 0]
      Array([0.5, 1. ], dtype=float32)

    Source: Kimi Team, "Kimi K2", 2025, section 2.1, Algorithm 1; J. Su, kexue.fm/archives/11126
    (whose translation in circulation prints Q·γ and K·γ: that clips twice).
    """
    with errors_of("qk_clip"):
        return clip_of_logits(
            "qk_clip", threshold, sites, every_k, axis_name
        ).transformation()


def clip_of_logits(
    call: str,
    threshold: Any,
    sites: Any,
    every_k: Any = None,
    axis_name: Any = None,
) -> ClipByStatistic:
    """The clip by largest logits for the public function `call`: "qk_clip", "muonclip",
    "adamclip" or "apply_qk_clip", whose other arguments these are.

    That function puts its own name before the messages of errors, with `errors_of`.
    """
    check_range("threshold", threshold, "positive and finite", _USUAL, schedule=True)
    is_optimizer = call in ("muonclip", "adamclip")
    # `muonclip(2e-3)` and `qk_clip(100.0)` are likely first calls. Their signatures allow them, so
    # that this message can show both lines. `apply_qk_clip` requires its sites: `as_sites` refuses
    # its None.
    if sites is None and call != "apply_qk_clip":
        line = f"tx = muonjax.{call}({'2e-3' if is_optimizer else '100.0'}, program)"
        raise ValueError(
            " needs to know where attention is: program = muonjax.inspect(loss_fn, params, "
            f"batch), then\n{line}"
        )
    # γ = min(1, threshold / largest logit). `init` and `update` place the sites on modules, and
    # hand them to `prepare`: `_disjoint_attentions` gives queries and keys their powers of γ, 1/2
    # each, or 1 and 0 where heads share keys. It refuses sites that would scale the same numbers
    # twice.
    return ClipByStatistic(
        call=call,
        argument="max_logits",
        # An error begins "update needs max_logits", goes on with this, and ends "tx.update(...)".
        source=" (muonjax.linen.TrainState passes it on): "
        "(loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(params, batch), then\n",
        sites=as_sites("program" if is_optimizer else "sites", sites),
        prepare=_disjoint_attentions,
        threshold=threshold,
        every_k=every_k,
        axis_name=axis_name,
    )


def apply_qk_clip(
    params: optax.Params,
    max_logits: Any,
    sites: Sites,
    threshold: jax.typing.ArrayLike = 100.0,
) -> optax.Params:
    """Clips parameters by the largest logits that these parameters have: no step lies between,
    and the bound is exact.

    Args:
      params: Parameters, with arrays as leaves.
      max_logits: As `qk_clip` takes them.
      sites: As in `qk_clip`.
      threshold: The largest logit allowed; > 0.

    Returns:
      The parameters; heads at or below the threshold are bit for bit what they were.

    Raises:
      ValueError: As `qk_clip`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> statistics = {"attention": jnp.array([400.0, 50.0])}
      >>> clipped = muonjax.apply_qk_clip(params, statistics, muonjax.mha_site(), 100.0)
      >>> clipped["attention"]["key"]["kernel"][0, :, 0]
      Array([0.5, 1. ], dtype=float32)

    Source: as `qk_clip`.
    """
    with errors_of("apply_qk_clip"):
        clip = clip_of_logits("apply_qk_clip", threshold, sites)
        modules = Modules(params)
        # `not_trained` are statistics of attentions whose parameters are frozen here: ignored.
        attentions, not_trained = clip.find(modules)
        maxima = match_statistics("max_logits", max_logits, attentions, not_trained)
        # A state keeps the largest logits since its last clip. A new one has none, so that these
        # logits alone decide. Without `every_k` each update clips, so also this first one.
        state = first_state(attentions, modules)
        _, factors = clip.state_and_factors(state, attentions, maxima)
    # `scaled_leaves` gives u' = f·u + (f − 1)·p, and u itself, bit for bit, where f = 1. With p = 0
    # and the parameters as u, u' is the clipped parameters.
    zeros = {path: jnp.zeros_like(modules.leaves[path]) for path in factors}
    return scaled_leaves(params, zeros, factors)


def _disjoint_attentions(sites: list[PlacedSite]) -> list[PlacedSite]:
    """The attentions, in which each kernel and bias has its power of γ,
    by the factor of the logit that it belongs to.

    Query and key have 1/2 each, or 1 and 0 where query heads share a key. "whole" has 1: rotary
    queries, whose key all heads share.

    Raises ValueError for another factor, and where two scales name the same numbers of a parameter,
    also those of a shared key, whose power is 0: the logits would change by the factor of another
    attention. Two attentions may share a leaf, such as a fused projection, if each names its own
    positions; and so may the queries and the keys of one.
    """
    # The numbers of each leaf that are named so far: a mask that broadcasts to the leaf, such as
    # [1, heads, size], or False for none. Masks along different axes make one as large as the leaf,
    # so it has booleans, which are small.
    scaled: dict[str, Any] = defaultdict(bool)
    attentions = []
    for site in sites:
        # `site.entries` counts the query heads. With fewer key heads each key head is shared, and
        # keeps its weights, because scaling it would also move the calm heads of its group.
        has_own_keys = all(scale.entries == site.entries for scale in site.scales)
        of_query = 0.5 if has_own_keys else 1.0
        # The power of γ for each factor. A logit is query · key, or rotary query · a rotary key
        # that all heads share, and the powers along each product sum to one.
        powers = {"query": of_query, "key": 1 - of_query, "whole": 1.0}
        scales = []
        for scale in site.scales:
            if scale.factor not in powers:
                raise ValueError(
                    f"{site.name!r} has a factor {scale.factor!r}, not query, key or whole."
                )
            # The mask of this scale: True at the numbers of the leaf that it names
            all_heads = np.ones((*scale.layers, scale.entries), bool)
            is_scaled = scale.spread(all_heads, otherwise=False)
            if (scaled[scale.leaf] & is_scaled).any():
                raise ValueError(
                    f"two sites, or two scales of one, scale {scale.leaf!r}, "
                    "which would be clipped twice."
                )
            scaled[scale.leaf] = scaled[scale.leaf] | is_scaled
            power = powers[scale.factor]
            with_power = dataclasses.replace(scale.scale, power=power)
            scales.append(scale._replace(scale=with_power))
        attentions.append(site._replace(scales=tuple(scales)))
    return attentions
