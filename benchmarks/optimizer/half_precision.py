"""Polar error of the accelerators' half precision, emulated on a CPU, on recorded spectra.

    python -m benchmarks.optimizer.half_precision

The program is the one that runs on a GPU or a TPU: operands rounded to half precision, sums in float32. It is compared
with Optax's default on bfloat16 matrices, and with the same presets in float32. Nothing here has run on an accelerator:
order and rounding of a device's own sums differ.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import measure, momentum
from benchmarks.common.accelerator_model import optax_matrix
from muonjax import NewtonSchulz
from muonjax._common.platform_policy import Policy
from muonjax._newton_schulz.polar_factor import polar_factor

PRESETS = {"fast": NewtonSchulz.fast(), "balanced": NewtonSchulz.balanced()}
PLATFORMS = {"gpu": "gpu", "tpu": "tpu", "float32": "cpu"}
# XLA would leave some of the roundings to bfloat16 out, on a CPU.
EMULATED = {"xla_allow_excess_precision": False}
SHAPE = (384, 384)


def optax_bfloat16(x: jax.Array) -> jax.Array:
    """Optax's five steps on a matrix rounded to bfloat16."""
    return optax_matrix(x.astype(jnp.bfloat16)).astype(jnp.float32)


def methods() -> dict[str, Any]:
    """Functions of one matrix, by name."""
    functions: dict[str, Any] = {}
    for preset, name in itertools.product(PRESETS, PLATFORMS):
        functions[f"{preset} {name}"] = functools.partial(
            polar_factor, settings=PRESETS[preset], policy=Policy(PLATFORMS[name])
        )
    functions["optax bfloat16"] = optax_bfloat16
    return functions


def recorded() -> list[measure.Row]:
    """A row for each method, on recorded spectra."""
    matrices, polars = momentum.recorded(*SHAPE, every=3)
    rows = []
    for name, method in methods().items():
        f = jax.jit(method, compiler_options=EMULATED)
        errors = momentum.errors([f(jnp.asarray(x)) for x in matrices], polars)
        rows.append({"shape": SHAPE, "method": name, **errors})
    return rows


if __name__ == "__main__":
    measure.write("half_precision", {"rows": recorded()})
