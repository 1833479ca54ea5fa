"""After everything, for any signal: clip where it is unstable. QK-Clip is its main use, and stands beside it."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import optax

from muonjax._clipping.matching import find_targets
from muonjax._clipping.sites import Site
from muonjax._clipping.transform import Watched, check_threshold, clip


@dataclasses.dataclass(frozen=True)
class SignalRule:
    r"""A signal, the weights behind it, and the most that it may be.

    The signal S must be a maximum of sums of products, each linear in its factors (a factor is a kernel with its
    bias). If along every product the powers sum to one, scaling by the powers of γ = min(1, threshold / S) scales the
    signal by γ, exactly. That sum is checked here; the linearity is the caller's to know.

    Attributes:
      site: where; its scales' powers count, `power` for an entry's own γ and `group_power` for its group's smallest.
      threshold: the most that the signal may be, > 0, or a schedule of the number of clips.
      products: names of the factors along each product; None: every factor is one by itself. A factor that is not
        scaled at all, as a shared key, is left out.

    Raises:
      ValueError: powers that do not sum to one along a product, or that differ within a factor.

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
        check_threshold("SignalRule", self.threshold)
        powers = {s.factor: (s.power, s.group_power) for s in self.site.scales}
        uneven = [s.path for s in self.site.scales if powers[s.factor] != (s.power, s.group_power)]
        if uneven:
            raise ValueError(
                f"SignalRule: {uneven} have another power than the rest of their factor; a kernel and its bias "
                f"scale alike."
            )
        products = [(f,) for f in powers] if self.products is None else self.products
        strangers = set(itertools.chain(*products)) ^ set(powers)
        if strangers:
            raise ValueError(
                f"SignalRule(products={self.products}): {sorted(strangers)} are not both in a product and in the site."
            )
        for product in products:
            own, group = (sum(powers[f][i] for f in product) for i in (0, 1))
            if abs(own + group - 1) > 1e-6 or group < 0:
                raise ValueError(
                    f"SignalRule: along the product {product} the powers sum to {own} and the group powers to {group}; "
                    "together they must be 1, and the group's not negative, or the signal is not scaled by γ."
                )


def signal_clip(
    rules: SignalRule | Sequence[SignalRule],
    *,
    every_k: int = 1,
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip where it is unstable: scale down weights whose measured signal passed its threshold.

    `qk_clip` is this with attention logits for the signal; another is the largest output of a layer ("MaxOutput"), an
    output dimension, a group of them, or a whole layer at a time.

    Args:
      rules: what is measured, which weights make it, and the most that it may be.
      every_k: as in `qk_clip`.
      axis_name: as in `qk_clip`.

    Returns:
      A transformation whose `update` needs `params` and `signals`, a tree of statistics as `qk_clip` takes
      it. Its state is a `QKClipState`, with dictionaries by the statistics' paths.

    Raises:
      ValueError: as `qk_clip`.
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
    rules = (rules,) if isinstance(rules, SignalRule) else tuple(rules)
    if not rules or not all(isinstance(rule, SignalRule) for rule in rules):
        raise TypeError(f"signal_clip(rules={rules!r}) needs a SignalRule or several.")

    def find(params: Any) -> list[Watched]:
        watched = [
            Watched(t.signal, t, rule.threshold)
            for rule in rules
            for t in find_targets("signal_clip", params, rule.site)
        ]
        seen = [w.name for w in watched]
        twice = sorted({name for name in seen if seen.count(name) > 1})
        if twice:
            raise ValueError(f"signal_clip: two rules go by the same signal {twice}; merge their scales.")
        for name, target, _ in watched:
            shared = [s.path for s in target.scales if s.power and s.entries != target.entries]
            if shared:
                raise ValueError(
                    f"signal_clip: several entries of {name!r} share {shared}, which can't take the γ of one of "
                    f"them; give it a group_power, or power=0."
                )
        return watched

    return clip("signal_clip", find, "signals", every_k, axis_name)
