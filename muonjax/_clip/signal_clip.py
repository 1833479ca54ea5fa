"""Scale down weights whose measured signal exceeds a threshold,
for any signal that is linear in the weights."""

from collections.abc import Sequence

import optax

from muonjax._clip.clip_by_statistic import ClipByStatistic
from muonjax._clip.site import PlacedSite, Site, as_sites
from muonjax._common.arguments import check_range, errors_of


def signal_clip(
    threshold: optax.ScalarOrSchedule,
    sites: Site | Sequence[Site],
    *,
    every_k: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scale down weights whose measured signal exceeds a threshold.

    In `qk_clip` the signal is the largest attention logit. Another signal is the largest output of
    a layer ("MaxOutput"): of each output dimension, of each group of them, or of the whole layer.

    The signal S must be a maximum of sums of products, linear in each factor: a factor is a kernel
    with its bias, and with other parameters that are added to them. Each factor is scaled by a
    power of γ = min(1, threshold / S). If these powers sum to one, the signal is scaled by exactly
    γ. The sum is checked here; that the signal is linear in each factor is not checked.

    Args:
      threshold: The largest value allowed for the signal, > 0, or a schedule,
        a function of the number of clips.
      sites: What is measured, and which weights it depends on with the powers of γ. A factor that
        is not scaled at all, such as a shared key, is left out.
      every_k: As in `qk_clip`.
      axis_name: As in `qk_clip`.

    Returns:
      A transformation whose `update` needs `params` and `signals`, a dict {module path: signal}, by
      the path of the signal where a module has several.
      Its state is a `QKClipState` with the same keys.

    Raises:
      ValueError: As `qk_clip`; powers that do not sum to one, or that differ within a factor.
      TypeError: `sites` are not `Site`s.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> scales = (
      ...     muonjax.Scale(path="kernel", rank=2),
      ...     muonjax.Scale(path="bias", rank=1, optional=True),
      ... )
      >>> site = muonjax.Site(path="head", scales=scales)
      >>> tx = muonjax.signal_clip(10.0, site)
      >>> params = {"head": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}}
      >>> zeros = {"head": {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)}}
      >>> signals = {"head": jnp.array([5.0, 20.0])}
      >>> updates, _ = tx.update(zeros, tx.init(params), params, signals=signals)
      >>> updates["head"]["bias"]  # the second output dimension is halved
      Array([ 0. , -0.5], dtype=float32)

    Source: J. Su, kexue.fm/archives/11126, last part.
    """
    with errors_of("signal_clip"):
        check_range("threshold", threshold, "positive and finite", ".", schedule=True)
        checked = as_sites("sites", sites)
        # Powers do not depend on the parameters, so that a mistake raises where the clip is made.
        for site in checked:
            _check_powers(site)
        clip = ClipByStatistic(
            call="signal_clip",
            argument="signals",
            # Without signals, an error says "update needs signals: call tx.update(...)".
            source=": call ",
            sites=checked,
            # Once the sites are placed on modules, this refuses weights that several entries share.
            prepare=_each_scales_its_own,
            threshold=threshold,
            every_k=every_k,
            axis_name=axis_name,
        )
    return clip.transformation()


def _check_powers(site: Site) -> None:
    """Raise unless the powers of γ that the user gave the site's factors sum to 1, so that γ scales
    their product, the signal.

    x·W·V with the power 0.5 for W and for V is scaled by exactly γ^0.5·γ^0.5 = γ. `qk_clip` sets
    the powers itself, and does not call this.
    """
    # A pair for each factor. A kernel and its bias are added: they belong to one factor, which has
    # one power. A factor in two pairs has two.
    powers = {(scale.factor, scale.power) for scale in site.scales}
    total = sum(power for _, power in powers)
    has_one_power_each = len(powers) == len({factor for factor, _ in powers})
    if not has_one_power_each or abs(total - 1) > 1e-6:
        # `errors_of` puts "signal_clip" before the message.
        raise ValueError(
            f"(sites=Site({site.path!r})): the powers of the factors {sorted(powers)} must sum to "
            "1, and a kernel and its bias have one power."
        )


def _each_scales_its_own(sites: list[PlacedSite]) -> list[PlacedSite]:
    """The same sites; raises where several entries of a signal share weights,
    which then have no single factor."""
    # A shared key head has one weight for several query heads, of which each has its own factor.
    for site in sites:
        for scale in site.scales:
            if scale.scale.power != 0 and scale.entries != site.entries:
                raise ValueError(
                    f"several entries of {site.name!r} share {scale.leaf!r}: give it power=0."
                )
    return sites
