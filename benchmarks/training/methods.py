"""The optimizers that are compared, all with a weight decay of 0.1, and the schedule of their rates."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation as Transformation
from optax import Schedule

import muonjax
from muonjax import Program

THRESHOLD = 30.0  # of the clips; such small models never reach Kimi K2's 100


class Method(NamedTuple):
    """An optimizer.

    Attributes:
      make: From a schedule and the program.
      statistic: What its clip goes by: "free" is what costs least with the attention that is there, and "exact" is
        measured in every tenth step.
    """

    make: Callable[[Schedule, Program], Transformation]
    statistic: str | None = None


def adamw(rate: Schedule, program: Program) -> Transformation:
    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    return optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=matrices)


def optax_muon(rate: Schedule, program: Program) -> Transformation:
    return optax.contrib.muon(
        rate,
        weight_decay=0.1,
        adam_b2=0.95,
        adam_weight_decay=0.1,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=program.dimension_numbers(),
    )


def fast(rate: Schedule, program: Program) -> Transformation:
    return muonjax.muon(rate, program, newton_schulz=muonjax.NewtonSchulz.fast())


def muonclip(rate: Schedule, program: Program) -> Transformation:
    return muonjax.muonclip(rate, program, threshold=THRESHOLD)


def muonh(rate: Schedule, program: Program) -> Transformation:
    return muonjax.muonh(
        rate, program, adam_learning_rate=lambda count: 0.2 * rate(count)
    )


METHODS = {
    "adamw": Method(adamw),
    "muon": Method(muonjax.muon),
    "optax.contrib.muon": Method(optax_muon),
    "muon, fast": Method(fast),
    "muonclip": Method(muonclip, "free"),
    "muonclip, exact": Method(muonclip, "exact"),
    "muonh": Method(muonh),
}


def schedule(rate: jax.Array, steps: jax.Array) -> Schedule:
    """Linear warm-up over a tenth of the steps, then a cosine to a tenth of the rate; both may be traced."""

    def at(count: jax.Array) -> jax.Array:
        warmup = jnp.maximum(0.1 * steps, 1.0)
        progress = jnp.clip(
            (count - warmup) / jnp.maximum(steps - warmup, 1.0), 0.0, 1.0
        )
        cosine = 0.55 + 0.45 * jnp.cos(jnp.pi * progress)
        return rate * jnp.minimum((count + 1) / warmup, cosine)

    return at
