"""Matrices with a short side on a GPU, its rounding emulated: not worse than the deflation that it replaces."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import hostile, momentum
from benchmarks.optimizer.half_precision import EMULATED, PRESETS, with_vectors
from muonjax import JORDAN, NewtonSchulz
from muonjax._newton_schulz import short_side
from muonjax._newton_schulz.coefficients import evaluate
from muonjax._newton_schulz.iteration import polar_factor
from muonjax._policy import Policy
from tests.tools.tiers import quick

M, N = 64, 128


def orthogonalize(x, settings):
    one = functools.partial(polar_factor, settings=settings, policy=Policy("gpu"))
    if settings.form == "auto":  # as the kernel's, by XLA's products
        one = functools.partial(short_side.iterate, settings=settings)
    f = jax.jit(lambda x: jax.lax.map(one, x), compiler_options=EMULATED)
    return np.asarray(f(jnp.asarray(x, jnp.float32)), np.float64)


def by_deflation(settings):
    """The same settings by the deflation: a form that is named keeps it."""
    return dataclasses.replace(settings, form="standard")


@pytest.mark.rounding
@quick("fast-1")
@pytest.mark.parametrize("steeper", [1, 1.39])
@pytest.mark.parametrize("preset", PRESETS)
def test_polar_error_is_smaller_than_with_a_deflation(preset, steeper):
    spectra = np.stack([momentum.interpolated(s, M) for s in momentum.spectra()]) ** steeper
    x, polar = with_vectors(spectra, N, np.random.default_rng(0))
    errors = [
        np.linalg.norm(orthogonalize(x, settings) - polar, axis=(-2, -1)) / np.sqrt(M)
        for settings in (PRESETS[preset], by_deflation(PRESETS[preset]))
    ]
    assert errors[0].mean() < errors[1].mean()
    assert errors[0].max() <= errors[1].max()


@quick("balanced")
@pytest.mark.parametrize("preset", PRESETS)
def test_hostile_matrices_give_finite_updates(preset):
    x = np.stack(list(hostile.matrices(M, N, np.random.default_rng(0)).values()))
    y = orthogonalize(x, PRESETS[preset])
    assert np.isfinite(y).all()
    assert np.linalg.norm(y, 2, axis=(-2, -1)).max() <= 1.2
    assert not y[~x.any((-2, -1))].any()


def test_the_opening_is_nowhere_above_one():
    assert evaluate(short_side._OPENING, np.linspace(0, 1, 10_001)).max() <= 1 + 1e-7


@pytest.mark.parametrize(
    ("m", "n", "settings", "platform", "taken"),
    [
        (128, 7168, NewtonSchulz(), "gpu", False),
        (128, 512, NewtonSchulz(), "gpu", False),
        (128, 512, NewtonSchulz(implementation="hopper"), "gpu", True),
        (129, 7168, NewtonSchulz(implementation="hopper"), "gpu", False),
        (7, 7168, NewtonSchulz(), "gpu", False),
        (128, 7168, NewtonSchulz(implementation="quack"), "gpu", False),
        (128, 7168, NewtonSchulz(deflation=0, implementation="hopper"), "gpu", False),
        (128, 7168, NewtonSchulz(coefficients=JORDAN * 5, implementation="hopper"), "gpu", False),
        (128, 7168, NewtonSchulz(), "tpu", False),
    ],
)
def test_which_matrices_are_taken(m, n, settings, platform, taken):
    assert short_side.takes(settings, Policy(platform), m, n) == taken
