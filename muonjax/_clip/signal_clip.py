"""Scale down weights whose measured signal exceeds a threshold, for any signal that is linear in the weights."""

import dataclasses
import itertools
from collections.abc import Sequence

import optax

from muonjax._clip.factors import Target
from muonjax._clip.matching import Modules, find_targets
from muonjax._clip.sites import Site
from muonjax._clip.transform import checked_settings, clip
from muonjax._common.arguments import check_range, errors_of, shown


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
        with errors_of("SignalRule"):
            self._check_powers()

    def _check_powers(self):
        powers = {s.factor: s.power for s in self.site.scales}
        uneven = [s.path for s in self.site.scales if powers[s.factor] != s.power]
        if uneven:
            raise ValueError(
                f"{uneven} have another power than the rest of their factor; a kernel and its bias take the same power."
            )
        products = [(f,) for f in powers] if self.products is None else self.products
        is_tuples = isinstance(products, Sequence) and all(isinstance(p, Sequence) for p in products)
        if not is_tuples or set(itertools.chain(*products)) != set(powers):
            raise ValueError(
                f"products={self.products!r} have to be tuples of factors, each of {[*powers]} in one."
            )
        for product in products:
            if abs((total := sum(powers[f] for f in product)) - 1) > 1e-6:
                raise ValueError(
                    f"along the product {product} the powers sum to {total}; they must sum to 1, or the signal is not "
                    "scaled by γ."
                )


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
                raise ValueError(
                    f"several entries of {target.signal!r} share {shared}, which takes no γ of one: give it power=0."
                )
        return targets, not_trained

    return clip("signal_clip", "signals", find, every_k, axes)
