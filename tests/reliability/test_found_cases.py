"""What the adversarial examples found, each mistake once and small."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from tests.tools.oracles import queries_and_keys
from tests.tools.tiers import quick


@quick("float32-shape1", "bfloat16-shape0")
@pytest.mark.parametrize("shape", [(40, 40), (40, 64)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_single_entry_is_its_own_polar_factor(shape, dtype):
    x = jnp.zeros(shape, dtype).at[3, 5].set(7)
    y = jax.jit(muonjax.newton_schulz)(x)  # XLA turns a / b / b into a / (b * b)
    assert_allclose(np.asarray(y, np.float32), np.asarray(x / 7, np.float32), atol=0.1)


@pytest.mark.nan
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_number_among_zeros_is_not_hidden(bad):
    """The largest of 4,096 entries that XLA finds on a CPU is 0 here, although one is NaN."""
    x = jnp.zeros((2, 64, 64)).at[0, 3, 5].set(bad)
    for settings in (
        muonjax.NewtonSchulz(),
        muonjax.NewtonSchulz(normalization="frobenius", deflation=0),
    ):
        y = np.asarray(jax.jit(muonjax.newton_schulz, static_argnums=1)(x, settings))
        assert np.isnan(y[0]).any()
        assert_array_equal(y[1], 0)


@pytest.mark.parametrize("shape", [(), (8,)])
def test_a_tree_may_be_one_array(shape):
    tx = muonjax.muon(1e-3)
    params = jnp.ones(shape)
    assert tx.update(params, tx.init(params), params)[0].shape == shape


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_schedule_without_a_positive_threshold_clips_nothing(limit):
    params = {"a": queries_and_keys(4, 2, 4)}
    tx = optax.chain(
        optax.sgd(0.0), muonjax.qk_clip(lambda _: limit, muonjax.mha_site())
    )
    updates, _ = tx.update(
        params, tx.init(params), params, max_logits={"a": jnp.asarray([-0.5, 7.0])}
    )
    assert_array_equal(optax.apply_updates(params, updates)["a"]["key"]["kernel"], 1)
