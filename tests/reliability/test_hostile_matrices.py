"""Every finite matrix gives a finite update, as close to the polar factor as is stated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import hostile
from benchmarks.optimizer.half_precision import EMULATED, PRESETS
from muonjax._common.platform_policy import Policy
from muonjax._newton_schulz.coefficients import evaluate
from muonjax._newton_schulz.polar_factor import polar_factor
from tests.tools.tiers import nightly, thorough

PLATFORMS = ("gpu", "tpu", "cpu")
# What rounding to bfloat16 may add to the error of the polynomials. Where entries are equal it does not average out.
ROUNDING = 0.15
TOP = 1.2
LOWER = {"fast": 4e-3, "balanced": 3e-3}


# Short sides of every residue of the tiles.
QUICK = (9, 137, 160)
THOROUGH = (1, 2, 7, 8, 15, 16, 17, 24, 64, 72, 128, 136, 320)
NIGHTLY = sorted({*range(1, 321), 511, 512, 520} - {*QUICK, *THOROUGH})
SIDES = [*QUICK, *map(thorough, THOROUGH), *map(nightly, NIGHTLY)]


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=EMULATED)
def orthogonalize(x, platform, preset):
    one = functools.partial(
        polar_factor, settings=PRESETS[preset], policy=Policy(platform)
    )
    return jax.lax.map(one, x)


@functools.lru_cache(
    maxsize=1
)  # both platforms' tests of a side come one after the other
def matrices_and_factors(m, n):
    """By name: the matrix in float32, and the singular value decomposition of what is above its least number."""
    found = {}
    for name, x in hostile.matrices(m, n, np.random.default_rng(m)).items():
        normal = np.where(
            np.abs(x) < np.finfo(np.float32).tiny, 0, x.astype(np.float64)
        )  # as in most products
        found[name] = (
            x,
            np.linalg.svd(
                normal / max(np.abs(normal).max(), 1e-300), full_matrices=False
            ),
        )
    return found


def check(factors, y, preset):
    """Finite; nothing above `TOP`; what lies in the preset's interval, as close to one as its polynomials are."""
    assert np.isfinite(y).all()
    u, s, vh = factors
    if not s.any():
        assert not y.any()
        return
    assert np.linalg.norm(y @ y.T, 2) <= TOP**2
    inside = s / np.linalg.norm(s, 8) >= LOWER[preset]
    at = np.geomspace((s / np.linalg.norm(s, 8))[inside].min(), 1.01, 2_000)
    error = np.abs(evaluate(PRESETS[preset].steps.half, at) - 1).max()
    found = u[:, inside].T @ y @ vh[inside].T - np.eye(inside.sum())
    assert np.linalg.norm(found) <= (error + ROUNDING) * np.sqrt(inside.sum())


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("m", SIDES)
def test_hostile_matrices(m, platform):
    # Wide ones take the Gram form on a GPU.
    n, preset = (2 * m, "balanced") if m % 2 else (m, "fast" if m % 4 else "balanced")
    cases = matrices_and_factors(m, n)
    y = np.asarray(
        orthogonalize(jnp.stack([x for x, _ in cases.values()]), platform, preset),
        np.float64,
    )
    failed = {}
    for (name, (_, factors)), result in zip(cases.items(), y, strict=True):
        try:
            check(factors, result, preset)
        except AssertionError as error:
            failed[name] = str(error).splitlines()[0]
    assert not failed
