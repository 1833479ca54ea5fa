"""JAX's strict modes, and leaves whose dtypes differ from their gradients'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax
from muonjax._common.platform import Policy
from muonjax._newton_schulz.polar_factor import polar_factor
from tests.tools.tiers import quick

STACK = np.random.default_rng(0).standard_normal((2, 24, 32)).astype(np.float32)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_half_precision_without_promotion(platform):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.jit(lambda x: polar_factor(x, settings=muonjax.NewtonSchulz(), policy=Policy(platform))).trace(
            STACK
        )


def test_normalized_complex_neurons_without_promotion():
    x = (STACK[0] + 1j * STACK[1]).astype(np.complex64)
    tx = muonjax.normalize_neurons()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.jit(lambda tree: tx.update(tree, tx.init(tree))[0]).trace({"w": x})


def test_orthogonalize_without_rank_promotion():
    tree = {"stack": jnp.ones((3, 16, 40)), "square": jnp.ones((300, 256)), "thin": jnp.ones((5, 4))}
    numbers = {name: muonjax.MuonDimensionNumbers(-2, -1) for name in tree}
    tx = muonjax.orthogonalize(dimension_numbers=numbers)
    with jax.numpy_rank_promotion("raise"):
        jax.jit(lambda tree: tx.update(tree, tx.init(tree))[0]).trace(tree)


@quick("standard-9", "standard-zero", others="nightly")
@pytest.mark.parametrize("x", [STACK[0, :9], STACK[0, :15], np.zeros((16, 24))], ids=["9", "15", "zero"])
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_gradients_through_newton_schulz_are_numbers(x, form):
    settings = muonjax.NewtonSchulz(form=form)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(muonjax.newton_schulz(x, settings) * (x + 1))))(x)
    assert bool(jnp.isfinite(gradient).all())


@pytest.mark.promotes("gradients of another dtype than the parameters, which Optax's momentum adds")
@pytest.mark.parametrize("nesterov", [True, False])
def test_half_precision_parameters_keep_their_state_under_float32_gradients(nesterov):
    params = {"w": jnp.ones((8, 12), jnp.bfloat16), "b": jnp.ones(8, jnp.bfloat16)}
    gradients = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    tx = muonjax.muon(1e-3, nesterov=nesterov)
    state = tx.init(params)
    _, after = jax.eval_shape(tx.update, gradients, state, params)
    trace = [leaf.dtype for leaf in jax.tree.leaves(after.inner_states["muon"])]
    assert trace == [leaf.dtype for leaf in jax.tree.leaves(state.inner_states["muon"])]


def test_other_bad_settings():
    with pytest.raises(TypeError, match=r"muon\(mu_dtype="):
        muonjax.muon(1e-3, mu_dtype=jnp.int32)
    assert muonjax.NewtonSchulz(deflation=np.int32(8)) == muonjax.NewtonSchulz(deflation=8)
    with pytest.raises(ValueError, match="deflation"):
        muonjax.NewtonSchulz(deflation=np.int32(-1))
