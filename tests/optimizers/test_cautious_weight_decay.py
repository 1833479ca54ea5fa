"""Cautious weight decay, sign by sign."""

import jax.numpy as jnp
import optax
from numpy.testing import assert_allclose, assert_array_equal

import muonjax


def test_only_weights_that_move_towards_zero_decay():
    params = jnp.array([2.0, 2.0, -2.0, -2.0, 0.0, 2.0, -2.0])
    updates = jnp.array([1.0, -1.0, 1.0, -1.0, 1.0, 0.0, 0.0])
    tx = muonjax.cautious_weight_decay(0.25)
    found, _ = tx.update(updates, tx.init(params), params)
    assert_array_equal(found, [1.5, -1.0, 1.0, -1.5, 1.0, 0.5, -0.5])


def test_signs_count_where_a_product_would_underflow():
    params = jnp.array([1e-30, 1e-30], jnp.float32)
    tx = muonjax.cautious_weight_decay(1e30)
    found, _ = tx.update(
        jnp.array([1e-30, -1e-30], jnp.float32), tx.init(params), params
    )
    assert_allclose(found, [1.0, -1e-30], rtol=1e-6)


def test_the_mask_is_optaxs():
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    tx = muonjax.cautious_weight_decay(0.5, mask={"w": True, "b": False})
    found, _ = tx.update(params, tx.init(params), params)
    assert_array_equal(found["w"], [1.5, 1.5])
    assert_array_equal(found["b"], [1.0, 1.0])


def test_a_schedule_counts_steps():
    tx = muonjax.cautious_weight_decay(optax.linear_schedule(0.0, 1.0, 2))
    params = jnp.ones(1)
    state = tx.init(jnp.ones(1))
    decays = []
    for _ in range(3):
        found, state = tx.update(jnp.ones(1), state, params)
        decays.append(float(found[0]) - 1)
    assert decays == [0.0, 0.5, 1.0]
