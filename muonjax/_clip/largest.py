"""The largest of several measurements, where one that is NaN or infinite never hides a finite one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Float


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
