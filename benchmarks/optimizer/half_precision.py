"""Polar error of the accelerators' half precision, emulated on a CPU, on recorded spectra and hostile matrices.

    python -m benchmarks.optimizer.half_precision [rows] [hostile]

The program is the one that runs on a GPU or a TPU: operands rounded to bfloat16, sums in float32. Optax's default with
bfloat16 matrices and the same presets in float32 stand beside it. "hostile" counts what is finite of matrices of low
rank, repeated, sparse, constant and of extreme size (`benchmarks/common/hostile.py`), at short sides on both sides of
each switch. Nothing here has run on an accelerator: order and rounding of a device's own sums differ.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import _muon

from benchmarks.common import hostile, measure, momentum
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
    numbers = optax.contrib.MuonDimensionNumbers(0, 1)
    coefficients = jnp.asarray((3.4445, -4.7750, 2.0315))
    y = _muon.orthogonalize_via_newton_schulz(
        x.astype(jnp.bfloat16), coefficients, dimension_numbers=numbers
    )
    return y.astype(jnp.float32)


def methods() -> dict[str, Any]:
    ours = {
        f"{preset} {name}": functools.partial(
            polar_factor, settings=settings, policy=Policy(platform)
        )
        for preset, settings in PRESETS.items()
        for name, platform in PLATFORMS.items()
    }
    return ours | {"optax bfloat16": optax_bfloat16}


def errors(m: int, n: int, every: int = 3) -> dict[str, dict[str, float]]:
    """Root mean square polar errors, their mean and the worst, and the largest singular value of any result."""
    rng = np.random.default_rng(0)
    matrices = [momentum.matrix(s, m, n, rng) for s in momentum.spectra()[::every]]
    rows = {}
    for name, method in methods().items():
        f = jax.jit(method, compiler_options=EMULATED)
        results = [np.asarray(f(jnp.asarray(x)), np.float64) for x, _ in matrices]
        found = [
            momentum.polar_error(y, polar)
            for y, (_, polar) in zip(results, matrices, strict=True)
        ]
        top = max(float(np.linalg.norm(y, 2)) for y in results)
        rows[name] = {
            "mean": float(np.mean(found)),
            "worst": float(np.max(found)),
            "largest": top,
        }
    return rows


def with_vectors(
    s: np.ndarray, n: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Matrices [count, m, n] with singular values s and their polar factors; every fourth one is diagonal."""
    count, m = s.shape
    u, v = (np.linalg.qr(rng.standard_normal((count, k, m)))[0] for k in (m, n))
    u[::4], v[::4] = np.eye(m), np.eye(n, m)
    return (u * s[:, None]) @ v.mT, (u * (s > 0)[:, None]) @ v.mT


def hostile_rows() -> list[dict[str, Any]]:
    """For each preset and platform: the hostile matrices, the finite results, the largest singular value of any."""
    rows = []
    for preset, platform in itertools.product(PRESETS, ("gpu", "tpu")):
        finite, top, matrices = [], [], {}
        for m, width in itertools.product(SIDES, (1, 2)):
            matrices = hostile.matrices(m, width * m, np.random.default_rng(m))
            x = jnp.stack(list(matrices.values()))
            y = np.asarray(_orthogonalizer(preset, Policy(platform))(x), np.float64)
            finite += [bool(np.isfinite(a).all()) for a in y]
            top += [float(np.linalg.norm(a, 2)) for a in np.nan_to_num(y)]
        rows.append(
            {
                "method": f"{preset} {platform}",
                "kinds": len(matrices),
                "count": len(finite),
                "finite": sum(finite),
                "largest": max(top),
            }
        )
    return rows


@functools.cache
def _orthogonalizer(preset: str, policy: Policy) -> Any:
    one = functools.partial(polar_factor, settings=PRESETS[preset], policy=policy)
    return jax.jit(lambda x: jax.lax.map(one, x), compiler_options=EMULATED)


def recorded() -> list[dict[str, Any]]:
    """A row for each shape and method, on recorded spectra."""
    return [
        {"shape": shape, "method": name, **row}
        for shape in SHAPES
        for name, row in errors(*shape).items()
    ]


if __name__ == "__main__":
    measure.run_parts(
        __doc__, "half_precision", {"rows": recorded, "hostile": hostile_rows}
    )
