"""Match the statistics that `update` gets to the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from muonjax._clip.site import PlacedSite
from muonjax._common.arguments import shown
from muonjax._common.trees import listed

if TYPE_CHECKING:
    from jaxtyping import Array, Float32


def match_statistics(
    argument: str, given: Any, sites: Sequence[PlacedSite], ignored: set[str]
) -> dict[str, Float32[Array, "*layers entries"]]:
    """The statistic of each site, by its name, with -inf in place of NaN and infinities.

    It has an axis for each axis of layers, and one of entries, which are the heads of an attention.

    Raises unless the dictionary has one statistic of the right shape for each site, and no others.

    Args:
      argument: What `update` calls the statistics, for errors.
      given: The dictionary, such as {"decoder/attention": [*layers, entries]}.
      sites: What is clipped. The `name` of each is its key: the path of its module, and where a
        module has several statistics, also the name of this one.
      ignored: Keys that may be in the dictionary without a site.
    """
    form = (
        f"{argument} is a dict {{module path: array [*layers, heads]}}, such as "
        "muonjax.value_and_grad returns."
    )
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument}={type(given).__name__}: {form}")
    # The sites' names are strings. A key of another type is looked up by its text.
    statistics = {str(path): value for path, value in given.items()}
    names = [site.name for site in sites]
    missing = [name for name in names if name not in statistics]
    # A statistic without a site is a mistake too: its attention would go unclipped. `ignored` are
    # the attentions of a program with parameters that do not train: `value_and_grad` measures them
    # too, and the clip has no sites for them.
    unclaimed = statistics.keys() - names - ignored
    if missing or unclaimed:
        raise ValueError(
            f"{argument} and the sites do not fit: sites without statistics "
            f"[{listed(missing, ', ')}], statistics without a site "
            f"[{listed(sorted(unclaimed), ', ')}]. {form}"
        )
    # Each is checked, and gets -inf for what is not finite: no head is clipped by a number that
    # overflowed.
    return {
        site.name: _finite_statistic(argument, statistics[site.name], site)
        for site in sites
    }


def _finite_statistic(
    argument: str, value: Any, site: PlacedSite
) -> Float32[Array, "*layers entries"]:
    """The statistic of a site, float32 [*layers, entries], where what is not finite is -inf;
    raises if it is no array of real numbers, or has another shape.

    Axes of size one may be missing in `value`: a program does not record a scan of length one as a
    loop, so its statistic has no axis of layers, and a signal with one number for each layer may
    come without an axis of entries.

    Args:
      argument: What `update` calls the statistics, for errors.
      value: The statistic, as the user gave it.
      site: Its parameters say how many layers and entries there are.
    """
    what = f"{argument} of {site.name!r}"
    dtype = getattr(value, "dtype", type(value))
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if is_complex or not jnp.issubdtype(dtype, jnp.number):
        raise TypeError(
            f"{what} is {shown(value)}; give an array of real numbers, [*layers, heads]."
        )
    # The clip is no part of the loss: a derivative through an update does not pass here. Its
    # arithmetic is in float32 whatever the model computes in.
    statistic = lax.stop_gradient(jnp.asarray(value)).astype(jnp.float32)
    # Both shapes are compared without their axes of size one; `reshape` below adds those again.
    long_axes = tuple(size for size in site.shape if size != 1)
    if statistic.squeeze().shape != long_axes:
        raise ValueError(
            f"{what} has shape {statistic.shape}; the parameters say {site.shape}, layers before "
            "heads: take the maximum over all other axes. What value_and_grad returns fits the "
            "sites of muonjax.inspect."
        )
    # The clip takes the maximum over micro-batches and devices, where -inf loses against each
    # finite measurement, as NaN or inf would not. Where only it remains, no head is clipped.
    statistic = jnp.where(jnp.isfinite(statistic), statistic, -jnp.inf)
    return statistic.reshape(site.shape)
