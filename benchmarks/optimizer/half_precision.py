"""Polar error of the accelerators' half precision, emulated on a CPU, on recorded and adversarial spectra.

    python -m benchmarks.optimizer.half_precision [rows] [joined] [hostile]

The program is the one that runs on a GPU or a TPU: operands rounded to bfloat16, sums in float32. Optax's default with
bfloat16 matrices and the same presets in float32 stand beside it. "joined" compares the fused last steps of wide
matrices (a Gram form, see `half_precision.py` of the library) with the standard form, on 20,000 random spectra, on
recorded and on adversarial ones. "hostile" counts what is finite of matrices of low rank, repeated, sparse, constant
and of extreme size (`benchmarks/common/hostile.py`), at short sides on both sides of each switch. Nothing here has run
on an accelerator: order and rounding of a device's own sums differ.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import _muon

from benchmarks.common import hostile, measure, momentum
from muonjax import NewtonSchulz
from muonjax._newton_schulz.iteration import polar_factor
from muonjax._policy import Policy

PRESETS = {"fast": NewtonSchulz.fast(), "balanced": NewtonSchulz.balanced()}
PLATFORMS = {"gpu": "gpu", "tpu": "tpu", "float32": "cpu"}
# XLA would leave some of the roundings to bfloat16 out, on a CPU.
EMULATED = {"xla_allow_excess_precision": False}
SHAPES = ((192, 192), (192, 768), (384, 384))

# The presets that join steps, and the shapes of wide matrices with the number of random spectra of each.
JOINED = (("fast", "gpu"), ("balanced", "gpu"), ("balanced", "tpu"))
WIDE = {(16, 48): 8_000, (32, 64): 6_000, (48, 192): 4_000, (64, 256): 2_000}
BATCH = 250

# Short sides of hostile matrices, square and twice as wide.
SIDES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 48, 63, 64, 72, 96, 128, 136, 160, 200, 256, 320)


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


def errors(m: int, n: int, every: int = 3) -> dict[str, dict[str, float]]:
    """Root mean square polar errors, their mean and the worst, and the largest singular value of any result."""
    rng = np.random.default_rng(0)
    matrices = [momentum.matrix(s, m, n, rng) for s in momentum.spectra()[::every]]
    rows = {}
    for name, method in methods().items():
        f = jax.jit(method, compiler_options=EMULATED)
        results = [np.asarray(f(jnp.asarray(x)), np.float64) for x, _ in matrices]
        found = [momentum.polar_error(y, polar) for y, (_, polar) in zip(results, matrices, strict=True)]
        top = max(float(np.linalg.norm(y, 2)) for y in results)
        rows[name] = {"mean": float(np.mean(found)), "worst": float(np.max(found)), "largest": top}
    return rows


class StandardForm(Policy):
    """The policy of the same platform, without fused steps."""

    def joins_last_steps(self, m: int, n: int) -> bool:
        return False


def random_spectra(m: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Singular values [count, m] of five kinds in turn, the largest 1."""
    s = np.empty((count, m))
    for i in range(count):
        match i % 5:
            case 0:  # a random number of decades, crowded at one end or the other
                s[i] = 10 ** -(rng.uniform(0, 6) * rng.random(m) ** 10 ** rng.uniform(-0.7, 0.7))
            case 1:  # up to five levels
                s[i] = rng.choice(10 ** -rng.uniform(0, 4, rng.integers(1, 6)), m)
            case 2:  # of a Gaussian matrix
                s[i] = np.linalg.svd(rng.standard_normal((m, rng.integers(m, 4 * m))), compute_uv=False)
            case 3:  # a few dominant directions over a narrow rest
                s[i] = rng.uniform(0.1, 1, m)
                s[i, : rng.integers(1, m // 2)] *= 10 ** rng.uniform(0, 4)
            case 4:  # of low rank
                s[i] = rng.uniform(0.01, 1, m) * (np.arange(m) < rng.integers(1, m))
    return s / s.max(-1, keepdims=True)


def with_vectors(s: np.ndarray, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Matrices [count, m, n] with singular values s and their polar factors; every fourth one is diagonal."""
    count, m = s.shape
    u, v = (np.linalg.qr(rng.standard_normal((count, k, m)))[0] for k in (m, n))
    u[::4], v[::4] = np.eye(m), np.eye(n, m)
    return (u * s[:, None]) @ v.mT, (u * (s > 0)[:, None]) @ v.mT


def cases() -> Iterator[tuple[str, tuple[int, int], np.ndarray]]:
    """Names, shapes and spectra [count, m] that fused steps are tried on."""
    for (m, n), count in WIDE.items():
        yield "random", (m, n), random_spectra(m, count, np.random.default_rng(m))
        yield "recorded", (m, n), np.stack([momentum.interpolated(s, m) for s in momentum.spectra()])
        yield "adversarial", (m, n), np.stack(list(momentum.adversarial(m).values()))


def joined() -> list[dict[str, Any]]:
    """For each preset, shape and kind of spectra: polar errors and the largest singular values of both forms."""
    rows = []
    for kind, (m, n), spectra in cases():
        found = {method: {form: [] for form in (Policy, StandardForm)} for method in JOINED}
        rng = np.random.default_rng(n)
        for start in range(0, len(spectra), BATCH):
            x, polar = with_vectors(spectra[start : start + BATCH], n, rng)
            for (preset, platform), forms in found.items():
                for form, results in forms.items():
                    results.append(_measured(_orthogonalizer(preset, form(platform)), x, polar))
        for (preset, platform), forms in found.items():
            (error, top), (plain, plain_top) = (np.concatenate(results, 1) for results in forms.values())
            rows.append(
                {
                    "method": f"{preset} {platform}",
                    "kind": kind,
                    "shape": (m, n),
                    "count": len(error),
                    "joined": float(error.mean()),
                    "standard": float(plain.mean()),
                    "worst_excess": float((error - plain).max()),
                    "worse_by_0.02": int(np.sum(error > plain + 0.02)),
                    "largest": float(top.max()),
                    "largest_standard": float(plain_top.max()),
                }
            )
    return rows


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


def _measured(f: Any, x: np.ndarray, polar: np.ndarray) -> np.ndarray:
    """Polar error and largest singular value of each matrix: [2, count]."""
    y = np.asarray(f(jnp.asarray(x, jnp.float32)), np.float64)
    error = np.linalg.norm(y - polar, axis=(-2, -1)) / np.sqrt(x.shape[-2])
    return np.stack([error, np.sqrt(np.linalg.eigvalsh(y @ y.mT)[:, -1])])


def recorded() -> list[dict[str, Any]]:
    """A row for each shape and method, on recorded spectra."""
    return [
        {"shape": shape, "method": name, **row} for shape in SHAPES for name, row in errors(*shape).items()
    ]


if __name__ == "__main__":
    measure.run_parts(
        __doc__, "half_precision", {"rows": recorded, "joined": joined, "hostile": hostile_rows}
    )
