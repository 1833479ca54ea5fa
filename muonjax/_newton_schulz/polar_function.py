"""The polar factor as a function that batching can call: at once, or in two passes over each stack."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp

from muonjax._batching import TwoPasses
from muonjax._linalg import at_least_float32, sum_over
from muonjax._newton_schulz import half_precision
from muonjax._newton_schulz.iteration import polar_factor
from muonjax._newton_schulz.settings import NewtonSchulz
from muonjax._newton_schulz.thin_deflation import Shrinking, Sketch
from muonjax._policy import Policy

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact


def polar_function(settings: NewtonSchulz, policy: Policy, *, adaptive: bool = False) -> TwoPasses:
    """x -> its polar factor, also where the columns are sharded over the mesh axes `axis_name`.

    In half precision a wide x is looked at twice: for what the deflation's k x k matrices are made of, and to apply
    them. Between the two, batching makes those of many stacks at once.
    """

    def polar(
        x: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...] = (), shrinking: Shrinking | None = None
    ) -> Inexact[Array, "*batch m n"]:
        y = polar_factor(x, settings, policy, axis_name, shrinking)
        return y * _dual_norm(x, y, axis_name) if adaptive else y

    def first(x: Inexact[Array, "*batch m n"]) -> Sketch | None:
        half = policy.compute_dtype(x.dtype, settings.compute_dtype) == jnp.bfloat16
        sketch = half_precision.first_pass(x, settings, policy) if half else None
        # It would stay in memory until the second pass.
        return None if sketch is None else sketch._replace(rounded=None)

    def second(x: Inexact[Array, "*batch m n"], shrinking: Shrinking | None) -> Inexact[Array, "*batch m n"]:
        return polar(x, shrinking=shrinking)

    return TwoPasses(polar, first, functools.partial(half_precision.between, policy=policy), second)


def _dual_norm(
    g: Inexact[Array, "*batch m n"], y: Inexact[Array, "*batch m n"], axis_name: tuple[str, ...]
) -> Float[Array, "*batch 1 1"]:
    """<g, y> of each matrix: the dual of the spectral norm, where y is g's polar factor."""
    product = jnp.sum(g.conj() * y, axis=(-2, -1), keepdims=True, dtype=at_least_float32(g.dtype))
    return sum_over(axis_name, product).real.astype(y.real.dtype)
