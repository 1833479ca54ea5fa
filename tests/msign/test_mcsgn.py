"""mcsgn: values, every derivative, and the edge of their domain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from muonjax import JORDAN, mcsgn, msign, polar_express
from muonjax._common.linalg import dot
from muonjax._msign.mcsgn import _iterate, _unit
from tests.msign import oracles as msign_oracles
from tests.tools import oracles
from tests.tools.tiers import thorough

relative = msign_oracles.relative


def with_eigenvalues(eigenvalues, seed=0, skewness=0.3):
    """P L P^-1 and its sign P sign(L) P^-1. Built, not computed: general sign functions lose small eigenvalues."""
    n = len(eigenvalues)
    p = np.eye(n) + skewness * np.random.default_rng(seed).standard_normal(
        (n, n)
    ) / np.sqrt(n)
    inverse = np.linalg.inv(p)
    return (p * eigenvalues) @ inverse, (p * np.sign(eigenvalues)) @ inverse


EIGENVALUES = np.array([1.0, -0.8, 0.6, -0.4, 0.3])


def steps(rows, x):
    """The steps alone, which JAX differentiates."""
    return _iterate(_unit(x)[0], jnp.asarray(rows), dot)


def test_value():
    x, sign = with_eigenvalues(
        np.r_[np.geomspace(1, 1e-2, 20), -np.geomspace(1, 1e-2, 12)]
    )
    assert relative(mcsgn(jnp.asarray(x, jnp.float32)), sign) < 1e-4
    with jax.enable_x64(True):
        assert relative(mcsgn(jnp.asarray(x)), sign) < 1e-11


def test_it_is_msign_on_symmetric_matrices_in_value_and_derivatives():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((2, 6, 6))
        x = jnp.asarray(x + np.swapaxes(x, -1, -2))
        c = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape))
        c = c + c.mT

        @functools.partial(jax.jit, static_argnums=0)
        def value_and_gradient(f, x):
            y, back = jax.vjp(f, x)
            return y, back(c)[0]

        y, g = value_and_gradient(mcsgn, x)
        z, other = value_and_gradient(msign, x)
        assert_allclose(y, z, atol=1e-11)
        assert_allclose(g, other, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "rows", [thorough(polar_express(8) + oracles.CLASSICAL * 2), JORDAN * 5]
)
def test_all_derivatives_are_those_of_the_steps(rows):
    f = functools.partial(mcsgn, coefficients=rows)
    plain = functools.partial(steps, rows)
    with jax.enable_x64(True):
        x = jnp.asarray(with_eigenvalues(EIGENVALUES)[0])
        c = jnp.asarray(np.random.default_rng(3).standard_normal(x.shape))

        def loss(g):
            return lambda x: jnp.sum(jnp.sin(g(x)) * c)

        assert relative(f(x), plain(x)) < 1e-14
        gradient = jax.jit(jax.grad(loss(f)))
        exact = jax.jit(jax.grad(loss(plain)))(x)
        assert relative(gradient(x), exact) < 1e-12
        assert relative(jax.jit(jax.jacfwd(loss(f)))(x), exact) < 1e-12
        batch = jnp.stack([x, 2 * x.T])
        assert_allclose(
            jax.jit(jax.vmap(gradient))(batch),
            jnp.stack([gradient(v) for v in batch]),
            atol=1e-10,
        )


@pytest.mark.thorough
def test_second_derivatives():
    rows = polar_express(8) + oracles.CLASSICAL * 2
    with jax.enable_x64(True):
        x = jnp.asarray(with_eigenvalues(EIGENVALUES[:3])[0])

        def loss(g):
            return lambda x: jnp.sum(jnp.sin(g(x)) * x)

        second = jax.jit(jax.hessian(loss(functools.partial(steps, rows))))(x)
        for outer, inner in ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacrev)):
            f = outer(inner(loss(functools.partial(mcsgn, coefficients=rows))))
            assert relative(jax.jit(f)(x), second) < 1e-11


@pytest.mark.thorough
@pytest.mark.nan
def test_scale_zero_and_the_edge_of_the_domain():
    x = jnp.asarray(with_eigenvalues(EIGENVALUES)[0], jnp.float32)
    y = mcsgn(x)
    assert_array_equal(mcsgn(x * 2.0**90), y)
    assert_array_equal(mcsgn(x * 2.0**-90), y)
    rotation = jnp.array(
        [[0.0, -1.0], [1.0, 0.0]]
    )  # eigenvalues ±i, trace of the square -2
    nilpotent = jnp.array([[0.0, 1.0], [0.0, 0.0]])
    batch = jnp.stack(
        [rotation, nilpotent, jnp.zeros((2, 2)), jnp.eye(2), jnp.full((2, 2), jnp.nan)]
    )
    y, g = jax.jit(lambda x: (mcsgn(x), jax.grad(lambda x: mcsgn(x).sum())(x)))(batch)
    assert np.all(np.isnan(y[:2]))
    assert np.all(np.isnan(y[4]))
    assert_array_equal(y[2], 0)
    assert_array_equal(g[2], 0)
    assert_allclose(y[3], np.eye(2), atol=1e-6)
    assert np.all(np.isfinite(g[3]))
    assert mcsgn(jnp.zeros((3, 0, 0))).shape == (3, 0, 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: mcsgn(jnp.ones((2, 2), jnp.complex64)),
            TypeError,
            r"mcsgn\(x\) needs a real",
        ),
        (
            lambda: mcsgn(jnp.ones((2, 3))),
            ValueError,
            r"square matrices, got shape \(2, 3\)",
        ),
        (lambda: mcsgn(None), TypeError, r"mcsgn\(x=None\) must be an array"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()
