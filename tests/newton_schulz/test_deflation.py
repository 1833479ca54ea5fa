import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax
from muonjax import NewtonSchulz
from muonjax._newton_schulz.coefficients import evaluate
from muonjax._newton_schulz.deflation import (
    inverse_root,
    other_fourth_powers,
    pre_deflate,
    shrink_dominant,
)
from tests.tools import oracles
from tests.tools.tiers import quick, thorough

# Momentum-like: a few directions far above a long tail.
SPECTRA = {
    "cliff": np.r_[np.geomspace(1, 0.3, 6), np.geomspace(1e-2, 1e-3, 58)],
    "slope": np.geomspace(1, 1e-4, 64),
    "plateaus": np.r_[np.ones(20), np.full(22, 1e-2), np.full(22, 1e-4)],
    "one": np.r_[1.0, np.full(63, 1e-4)],
    # The eighth direction of a subspace is then far from every singular vector, and the seven above it are shrunk most.
    "seven": np.r_[np.geomspace(1, 1 / 3, 7), np.full(57, 1 / 60)],
}
# How far the polar factor may move: 0.05 to first order, and the second adds a few percent. Without the bound it moves
# 0.13 where `pre_deflate` takes "seven" singular values off.
MOVED = 0.055


def shrunk(x):
    gram = jnp.asarray(x @ x.T, jnp.float32)
    return shrink_dominant(gram, jnp.diagonal(gram), 8, "cpu")


def deflated(deflation, x):
    """W x."""
    return deflation.apply_right(jnp.eye(len(x))) @ jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("name", SPECTRA)
def test_the_map_commutes_with_the_polar_factor(name):
    """W x has the polar factor of x, up to the stated tolerance, and W A W is its Gram matrix."""
    x = oracles.with_spectrum(SPECTRA[name], 96)
    deflation = shrunk(x)
    y = np.asarray(deflated(deflation, x), np.float64)
    assert oracles.polar_error(oracles.polar(y), x) < MOVED
    np.testing.assert_allclose(deflation.gram, y @ y.T, atol=1e-5)


def test_the_dominant_directions_come_down_to_the_others():
    x = oracles.with_spectrum(SPECTRA["cliff"], 96)
    y = deflated(shrunk(x), x)
    before, after = (
        np.linalg.svd(np.asarray(a, np.float64), compute_uv=False) for a in (x, y)
    )
    assert after[0] < 0.1 * before[0]
    np.testing.assert_allclose(after[-40:], before[-40:], rtol=0.05)


def test_the_dominant_directions_come_down_to_the_least_of_them():
    """Not to a mean, from where they would stand out of the tail; and equal ones stay where they are."""
    for largest in (0.3, 1.0):
        s = np.r_[np.geomspace(largest, 0.3, 8), np.full(56, 1e-3)]
        x = oracles.with_spectrum(s, 96)
        y = deflated(shrunk(x), x)
        after = np.linalg.svd(np.asarray(y, np.float64), compute_uv=False)[:8]
        np.testing.assert_allclose(after, 0.3, rtol=0.1)


@pytest.mark.parametrize("scale", [0.0, 1e-15, 1.0, 1e15, 1e19])
def test_directions_of_any_size_are_shrunk_and_not_deleted(scale):
    """P = V D, and D = I would delete."""
    x = np.sqrt(scale) * np.diag(np.r_[np.geomspace(1, 0.1, 8), np.zeros(8)])
    assert np.linalg.norm(shrunk(x).p, 2) < 0.95


def test_the_inverse_root_is_one_and_never_more():
    h = np.diag(np.geomspace(3.0, 0.03, 8))
    np.testing.assert_allclose(
        inverse_root(jnp.asarray(h, jnp.float32)),
        np.diag(np.diag(h) ** -0.5),
        rtol=0.02,
        atol=1e-4,
    )
    for low in (1e-4, 1e-8, 0.0):
        h = np.diag(np.r_[np.ones(7), low])
        q = np.asarray(inverse_root(jnp.asarray(h, jnp.float32)), np.float64)
        assert np.linalg.norm(q @ h @ q, 2) < 1 + 1e-5


@quick("seven")
@pytest.mark.rounding
@pytest.mark.parametrize("name", SPECTRA)
def test_pre_deflation_keeps_the_polar_factor(name):
    x = oracles.with_spectrum(SPECTRA[name], 96)
    y = np.asarray(pre_deflate(jnp.asarray(x, jnp.float32), 8), np.float64)
    assert oracles.polar_error(oracles.polar(y), x) < MOVED


@pytest.mark.rounding
@pytest.mark.thorough
@pytest.mark.parametrize("batch", [(), (2,)])
def test_pre_deflation_takes_the_largest_off(batch):
    x = np.broadcast_to(oracles.with_spectrum(SPECTRA["cliff"], 96), (*batch, 64, 96))
    y = np.asarray(pre_deflate(jnp.asarray(x, jnp.float32), 8), np.float64)
    assert np.linalg.norm(y, 2, axis=(-2, -1)).max() < 0.1


@pytest.mark.parametrize("length", [1.0, 0.3])
def test_the_sum_over_the_others_is_never_overestimated(length):
    """Whatever the subspace: an overestimate would make the bound of the largest singular value fail."""
    rng = np.random.default_rng(0)
    for trial in range(50):
        values = rng.uniform(0, 1, 40) ** rng.integers(1, 9)
        q = np.linalg.qr(rng.standard_normal((40, 40)))[0]
        m = (q * values) @ q.T
        basis = (
            q[:, rng.permutation(40)[:10]]
            if trial % 2
            else np.linalg.qr(rng.standard_normal((40, 10)))[0]
        )
        v = length * basis
        found = other_fourth_powers(jnp.asarray(v.T @ m @ v, jnp.float32)).item()
        assert found <= (np.sort(values)[:-1] ** 4).sum() * (1 + 1e-4) + 1e-6


def test_the_sum_over_the_others_is_worth_its_price():
    """Ten equal values: Schatten-8 alone would overestimate the largest by 10^(1/8)."""
    found = other_fourth_powers(0.5 * jnp.eye(10)).item()
    assert found == pytest.approx(0.5**4 * (10 - 10**0.25), rel=1e-4)


@pytest.mark.rounding
@pytest.mark.parametrize("steps", [7, *map(thorough, [3, 5])])
@pytest.mark.parametrize("name", SPECTRA)
def test_rounding_never_grows_in_the_gram_form(name, steps):
    """Next to the largest eigenvalue of A, rounding makes small ones negative, and polynomials amplify those."""
    rows = muonjax.polar_express(steps)
    settings = NewtonSchulz(coefficients=rows, form="gram")
    x = jnp.asarray(oracles.with_spectrum(SPECTRA[name], 400), jnp.float32)
    y = np.asarray(
        jax.jit(muonjax.newton_schulz, static_argnums=1)(x, settings), np.float64
    )
    assert np.linalg.norm(y, 2) < evaluate(rows, np.linspace(0, 1, 10_001)).max() + 0.06
