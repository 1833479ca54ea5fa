"""Match the statistics that `update` gets to the sites, and take the largest of several.

The largest of several statistics of one attention counts, and NaN never hides a finite one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._clip.site import PlacedSite
from muonjax._common.trees import listed

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32


def match_statistics(
    argument: str, given: Any, sites: Sequence[PlacedSite], ignored: Collection[str]
) -> dict[str, Float32[Array, "*layers entries"]]:
    """The statistic of each module, [*layers, heads], by its name: the largest over the axes of a batch.

    Raises unless the dictionary has one statistic of the right shape for each module, and no others.

    Args:
      argument: What `update` calls the statistics, for errors.
      given: The dictionary, such as {"decoder/attention": [*layers, *batch, heads]}.
      sites: The modules that are clipped.
      ignored: Keys that may be in the dictionary without a module.
    """
    # value_and_grad measures logits and no other signal.
    returned = (
        ", as muonjax.value_and_grad returns it" if argument == "max_logits" else ""
    )
    form = f"{argument} is a dict {{module path: array [*layers, heads]}}{returned}."
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument}={type(given).__name__}: {form}")
    # Statistics are looked up by the same text as the state, whatever type their keys have.
    statistics = {str(path): value for path, value in given.items()}
    by_name = {site.name: site for site in sites}
    # A statistic without a site is a mistake too: its attention would go unclipped.
    missing = [name for name in by_name if name not in statistics]
    # The attention of a program whose parameters do not train is measured, and not clipped.
    unclaimed = statistics.keys() - by_name.keys() - set(ignored)
    if missing or unclaimed:
        raise ValueError(
            f"{argument} and the sites do not fit: sites without statistics [{listed(missing, ', ')}], statistics "
            f"without a site [{listed(sorted(unclaimed), ', ')}]. {form}"
        )
    matched = {}
    for name, site in by_name.items():
        what = f"{argument} of {name!r}"
        _check_real(what, statistics[name])
        matched[name] = _largest_of_batch(what, statistics[name], site)
    return matched


def _check_real(what: str, value: Any) -> None:
    """Raise unless a statistic is an array of real numbers, or one number of Python."""
    # Statistics of one head and one layer may come as a number of Python.
    dtype = getattr(value, "dtype", type(value))
    kinds = (jnp.floating, jnp.integer)
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        kind = getattr(dtype, "__name__", dtype)
        raise TypeError(
            f"{what} is {kind}; give an array of real numbers, [*layers, heads]."
        )


def _largest_of_batch(
    what: str, value: Any, site: PlacedSite
) -> Float32[Array, "*layers entries"]:
    """The largest over the axes of a batch: [*layers, *batch, entries] -> [*layers, entries].

    With 12 layers and 8 heads, [12, 8], [12, 4, 8] and [12, 2, 4, 8] give [12, 8].

    A batch as long as an axis of layers is refused: `scan` and `vmap` put an axis of micro-batches in front of the
    layers, and with equal lengths the shape does not show that.

    Args:
      what: Names the statistic in errors.
      value: The statistic.
      site: The module, whose parameters say how many layers and entries there are.
    """
    # The clip is no part of the loss, and its arithmetic is in float32 whatever the model computes in.
    statistic = lax.stop_gradient(jnp.asarray(value)).astype(jnp.float32)
    if site.entries == 1 and statistic.shape == site.layers:
        # A signal with one number for each layer may come without an axis of entries.
        statistic = statistic[..., None]
    elif statistic.ndim == 1 and set(site.layers) == {1}:
        # A program does not record a scan of length one as a loop, so its statistic lacks the axes of layers.
        statistic = statistic.reshape(*site.layers, -1)
    count = len(site.layers)
    shape = statistic.shape
    # A statistic [8] has no axis of heads for 8 layers of 8 heads, and an empty batch has no largest logit.
    is_complete = len(shape) > count and 0 not in shape
    if not is_complete or (*shape[:count], shape[-1]) != site.shape:
        raise ValueError(
            f"{what} has shape {jnp.shape(value)}; the parameters say {site.shape}, layers before heads, and a batch "
            "between them. What value_and_grad returns fits the sites of muonjax.inspect."
        )
    # An axis of one micro-batch is no mistake in either order.
    batch = {size for size in shape[count:-1] if size > 1}
    if batch.intersection(site.layers):
        raise ValueError(
            f"{what} has shape {shape}, in which an axis of a batch is as long as that of layers: they can't be told "
            f"apart. Take the maximum over the batch; the parameters say {site.shape}."
        )
    return largest(statistic, tuple(range(count, len(shape) - 1)))


def larger(
    a: Float[Array, "*shape"], b: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The larger of two, entry by entry, where a finite number counts more than one that is not.

    2 and 3 give 3, 2 and NaN give 2, 2 and inf give 2, inf and NaN give NaN.
    """
    return largest(jnp.stack([a, b]), (0,))


def largest(x: Float[Array, " ..."], axes: tuple[int, ...]) -> Float[Array, " ..."]:
    """The largest along some axes, where finite numbers count more than others, as in `larger`."""
    return _finite_first(
        x, lambda pair: pair.max(tuple(axis + 1 for axis in axes), initial=-jnp.inf)
    )


def largest_of_devices(
    x: Float[Array, "*shape"], axis_name: str | tuple[str, ...]
) -> Float[Array, "*shape"]:
    """The largest among the devices along mesh axes, where finite numbers count more, as in `largest`."""
    return _finite_first(x, lambda pair: lax.pmax(pair, axis_name))


def _finite_first(
    x: Float[Array, "*shape"], maximum: Callable[[jax.Array], jax.Array]
) -> Float[Array, " ..."]:
    """The `maximum` of the finite numbers; where there are none that of all, which passes NaN on.

    It is called once, with both as [2, *shape]: two maxima over devices would be two all-reduces.
    """
    # −inf, which loses against every number, in place of infinities and NaN.
    finite = jnp.where(jnp.isfinite(x), x, -jnp.inf)
    of_finite, of_all = maximum(jnp.stack([finite, x]))
    return jnp.where(of_finite > -jnp.inf, of_finite, of_all)
