"""Symmetric products in 2 x 2 blocks: the same numbers by three quarters of the work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muonjax import NewtonSchulz
from muonjax._common.linalg import MatrixProduct, in_blocks
from muonjax._common.platform import Policy
from muonjax._newton_schulz.polar_factor import polar_factor


def flops(f, *shape):
    """As XLA counts them before it compiles."""
    return jax.jit(lambda a: f(a)).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).cost_analysis()["flops"]


@pytest.mark.parametrize("m", [8, 9])
def test_blocks_are_the_product(m):
    product = MatrixProduct("bfloat16", None, result="bfloat16")
    a = jax.random.normal(jax.random.key(0), (2, m, 12))
    want, got = product.with_adjoint(a, a), in_blocks(product, a, a)
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=1e-2, rtol=1e-2)
    s = want.astype(jnp.float32)
    want, got = product(s, s), in_blocks(product, s, s)
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=1e-1, rtol=1e-2)


def test_blocks_take_three_quarters_of_the_multiply_adds():
    product = MatrixProduct("bfloat16", None)
    whole = flops(lambda a: product.with_adjoint(a, a), 256, 512)
    assert flops(lambda a: in_blocks(product, a, a), 256, 512) == pytest.approx(3 / 4 * whole, rel=1e-2)


@pytest.mark.parametrize("shape", [(48, 64), (47, 96)])
def test_orthogonalization_in_blocks_is_as_accurate(shape, monkeypatch):
    x = jax.random.normal(jax.random.key(1), shape)
    u, _, vh = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)

    def error():
        y = jax.jit(functools.partial(polar_factor, settings=NewtonSchulz(), policy=Policy("tpu")))(x)
        return np.linalg.norm(np.asarray(y, np.float64) - u @ vh) / np.sqrt(len(u))

    whole = error()
    monkeypatch.setattr(Policy, "symmetric_in_blocks", lambda self, m: True)
    assert error() == pytest.approx(whole, abs=5e-3)
