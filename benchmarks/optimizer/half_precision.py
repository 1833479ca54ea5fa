"""Polar error of the accelerators' half precision, emulated on a CPU, on recorded spectra and hostile matrices.

    python -m benchmarks.optimizer.half_precision [rows] [hostile]

The program is the one that runs on a GPU or a TPU: operands rounded to half precision, sums in float32. It is compared
with Optax's default on bfloat16 matrices, and with the same presets in float32. "hostile" counts what is finite of
matrices of low rank, repeated, sparse, constant and of extreme size (`benchmarks/common/hostile.py`), at short sides on
both sides of each switch. Nothing here has run on an accelerator: order and rounding of a device's own sums differ.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import hostile, measure, momentum
from benchmarks.common.accelerator_model import optax_matrix
from muonjax import NewtonSchulz
from muonjax._common.platform import Policy
from muonjax._newton_schulz.polar_factor import polar_factor

PRESETS = {"fast": NewtonSchulz.fast(), "balanced": NewtonSchulz.balanced()}
PLATFORMS = {"gpu": "gpu", "tpu": "tpu", "float32": "cpu"}
# XLA would leave some of the roundings to bfloat16 out, on a CPU.
EMULATED = {"xla_allow_excess_precision": False}
SHAPES = ((192, 192), (192, 768), (384, 384))

# Short sides of hostile matrices, square and twice as wide.
SIDES = (
    1,
    2,
    3,
    7,
    8,
    9,
    15,
    16,
    17,
    24,
    48,
    63,
    64,
    72,
    96,
    128,
    136,
    160,
    200,
    256,
    320,
)


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


def recorded() -> list[dict[str, Any]]:
    """A row for each shape and method, on recorded spectra."""
    rows = []
    for shape in SHAPES:
        rng = np.random.default_rng(0)
        matrices = [momentum.matrix(s, *shape, rng) for s in momentum.spectra()[::3]]
        for name, method in methods().items():
            f = jax.jit(method, compiler_options=EMULATED)
            results = [f(jnp.asarray(x)) for x, _ in matrices]
            errors = momentum.errors(results, [polar for _, polar in matrices])
            rows.append({"shape": shape, "method": name, **errors})
    return rows


def hostile_rows() -> list[dict[str, Any]]:
    """For each preset and platform: the hostile matrices, the finite results, the largest singular value of any."""
    rows = []
    for name, method in methods().items():
        if not name.endswith(("gpu", "tpu")):
            continue
        f = jax.jit(functools.partial(jax.lax.map, method), compiler_options=EMULATED)
        finite, largest = [], []
        for m, width in itertools.product(SIDES, (1, 2)):
            matrices = hostile.matrices(m, width * m, np.random.default_rng(m))
            y = np.asarray(f(jnp.stack(list(matrices.values()))), np.float64)
            finite += list(np.isfinite(y).all((-2, -1)))
            largest += list(np.linalg.norm(np.nan_to_num(y), 2, (-2, -1)))
        row = {"method": name, "count": len(finite), "finite": int(sum(finite))}
        rows.append(row | {"largest": float(max(largest))})
    return rows


if __name__ == "__main__":
    measure.run_parts(
        __doc__, "half_precision", {"rows": recorded, "hostile": hostile_rows}
    )
