"""Polar error of the accelerators' half precision, emulated on a CPU, on recorded and adversarial spectra.

    python -m benchmarks.optimizer.half_precision [--quick]

The program is the one that runs on a GPU or a TPU: operands rounded to bfloat16, sums in float32. Optax's default with
bfloat16 matrices and the same presets in float32 stand beside it. Nothing here has run on an accelerator: order and
rounding of a device's own sums differ.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import _muon

from benchmarks.common import measure, momentum
from muonjax import NewtonSchulz
from muonjax._newton_schulz.iteration import polar_factor
from muonjax._policy import Policy

PRESETS = {"fast": NewtonSchulz.fast(), "balanced": NewtonSchulz.balanced()}
PLATFORMS = {"gpu": "gpu", "tpu": "tpu", "float32": "cpu"}
SHAPES = ((192, 192), (192, 768), (384, 384))


def optax_bfloat16(x: jax.Array) -> jax.Array:
    """Optax's five steps on a matrix rounded to bfloat16."""
    numbers = optax.contrib.MuonDimensionNumbers(0, 1)
    coefficients = jnp.asarray((3.4445, -4.7750, 2.0315))
    y = _muon.orthogonalize_via_newton_schulz(x.astype(jnp.bfloat16), coefficients, dimension_numbers=numbers)
    return y.astype(jnp.float32)


def methods() -> dict[str, Any]:
    ours = {
        f"{preset} {name}": functools.partial(polar_factor, settings=settings, policy=Policy(platform))
        for preset, settings in PRESETS.items()
        for name, platform in PLATFORMS.items()
    }
    return ours | {"optax bfloat16": optax_bfloat16}


def errors(m: int, n: int, every: int) -> dict[str, dict[str, float]]:
    """Root mean square polar errors, their mean and the worst, and the largest singular value of any result."""
    rng = np.random.default_rng(0)
    matrices = [momentum.matrix(s, m, n, rng) for s in momentum.spectra()[::every]]
    rows = {}
    for name, method in methods().items():
        f = jax.jit(method)
        results = [np.asarray(f(jnp.asarray(x)), np.float64) for x, _ in matrices]
        found = [momentum.polar_error(y, polar) for y, (_, polar) in zip(results, matrices, strict=True)]
        top = max(float(np.linalg.norm(y, 2)) for y in results)
        rows[name] = {"mean": float(np.mean(found)), "worst": float(np.max(found)), "largest": top}
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small shape, nothing written")
    quick = parser.parse_args().quick
    shapes = ((64, 96),) if quick else SHAPES
    rows = [
        {"shape": shape, "method": name, **row}
        for shape in shapes
        for name, row in errors(*shape, every=12 if quick else 3).items()
    ]
    print(measure.table(rows))
    if not quick:
        print(measure.write("half_precision", {"emulated": True, "rows": rows}))


if __name__ == "__main__":
    main()
