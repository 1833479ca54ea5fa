"""Match each attention with its statistic, and take the largest of several, where NaN never hides a finite one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from muonjax._clip.factors import Target
from muonjax._common.trees import listed

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32


def match_statistics(
    argument: str, given: Any, targets: Sequence[Target], ignored: Collection[str]
) -> dict[str, Float32[Array, "*layers entries"]]:
    """The statistic of each target by its name.

    Args:
      argument: What `update` calls the statistics, for errors.
      given: The dict.
      targets: The modules that are clipped.
      ignored: Keys that may be in the dict without a target.
    """
    returned = ", as muonjax.value_and_grad returns it" if argument == "max_logits" else ""
    form = f"{argument} is a dict {{module path: array [*layers, heads]}}{returned}."
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument}={type(given).__name__}: {form}")
    statistics = {str(path): value for path, value in given.items()}
    by_key = {t.name or t.signal: t for t in targets}
    missing = [key for key in by_key if key not in statistics]
    unclaimed = [key for key in statistics if key not in by_key and key not in ignored]
    if missing or unclaimed:
        raise ValueError(
            f"{argument} and the sites do not fit: sites without statistics [{listed(missing, ', ')}], statistics "
            f"without a site [{listed(unclaimed, ', ')}]. {form}"
        )
    return {t.name: _by_entry(argument, key, statistics[key], t) for key, t in by_key.items()}


def _by_entry(argument: str, key: str, value: Any, target: Target) -> Float32[Array, "*layers entries"]:
    """The largest over all axes between those of layers and of entries.

    As many layers as heads can't be told from each other by their sizes, so the order is always this one.
    """
    dtype = getattr(value, "dtype", type(value))
    is_real = hasattr(value, "dtype") and any(
        jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer)
    )
    if not (is_real or dtype in (int, float)):
        what = getattr(dtype, "__name__", dtype)
        raise TypeError(f"{argument} of {key!r} is {what}; give an array of real numbers, [*layers, heads].")
    array = lax.stop_gradient(jnp.asarray(value)).astype(jnp.float32)
    if target.entries == 1 and array.shape == target.layers:
        array = array[..., None]  # a signal of one number per layer needs no axis for it
    elif array.ndim == 1 and set(target.layers) == {1}:
        array = array.reshape(*target.layers, -1)  # to a program a scan of length one is no loop
    layers = len(target.layers)
    sizes = (*target.layers, target.entries)
    if array.ndim <= layers or not array.size or (*array.shape[:layers], array.shape[-1]) != sizes:
        raise ValueError(
            f"{argument} of {key!r} has shape {jnp.shape(value)}; the parameters say {sizes}, layers before heads, and "
            "a batch between them. What value_and_grad returns fits the sites of muonjax.inspect."
        )
    return largest(array, tuple(range(layers, array.ndim - 1)))


def larger(a: Float[Array, "*shape"], b: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The larger of two, entry by entry; one that is not finite counts only where neither is, and NaN shows there."""
    finite = jnp.isfinite(a)
    return jnp.where(finite == jnp.isfinite(b), jnp.maximum(a, b), jnp.where(finite, a, b))


def largest(x: Float[Array, " ..."], axes: tuple[int, ...]) -> Float[Array, " ..."]:
    """The largest along some axes, as `larger`."""
    finite = jnp.where(jnp.isfinite(x), x, -jnp.inf).max(axes, initial=-jnp.inf)
    return larger(finite, x.max(axes, initial=-jnp.inf))


def largest_of_devices(x: Float[Array, "*shape"], axis_name: str | tuple[str, ...]) -> Float[Array, "*shape"]:
    """The largest along mesh axes, as `larger`, by one all-reduce."""
    finite = jnp.where(jnp.isfinite(x), x, -jnp.inf)
    return larger(*lax.pmax(jnp.stack([finite, x]), axis_name))
