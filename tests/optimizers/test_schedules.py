"""Schedules: of the momentum, and of the two rates, whose last values the state keeps for a log."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from muonjax._transforms.adamw import adamw
from tests.tools.optimizers import optimizer
from tests.tools.oracles import SHORT, gradients, normal

PARAMS = {
    "attention": {
        name: {"kernel": normal(8, 2, 4, seed=seed)}
        for seed, name in enumerate(("query", "key"))
    },
    "scale": jnp.ones(8),
}
NUMBERS = {"attention": muonjax.MuonDimensionNumbers(0, (1, 2)), "scale": None}
STEPS = 4


def warm_up(count):
    """The momentum at a step, also in NumPy."""
    return 0.5 + 0.125 * count


def after_steps(tx, **extra):
    state = tx.init(PARAMS)
    for step in range(STEPS):
        _, state = jax.jit(tx.update)(gradients(step, PARAMS), state, PARAMS, **extra)
    return state


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_schedule_of_the_momentum_equals_float64(nesterov):
    tx = muonjax.trace(warm_up, nesterov)
    state = tx.init(PARAMS["scale"])
    momentum = np.zeros(8)
    for step in range(STEPS):
        gradient = normal(8, seed=step)
        update, state = tx.update(gradient, state)
        momentum = np.asarray(gradient, np.float64) + warm_up(step) * momentum
        expected = gradient + warm_up(step) * momentum if nesterov else momentum
        assert_allclose(update, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["muon", "normuon", "muonh", "muonclip"])
def test_each_optimizer_takes_a_schedule_of_the_momentum(name):
    extra = {"max_logits": {"attention": jnp.ones(2)}} if name == "muonclip" else {}
    state = after_steps(optimizer(name, NUMBERS, decay=warm_up), **extra)
    momenta = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
        if ".trace" in jax.tree_util.keystr(path)
    }
    assert len(momenta) == 2
    for leaf, momentum in zip(("key", "query"), momenta.values(), strict=True):
        expected = np.zeros((8, 2, 4))
        for step in range(STEPS):
            gradient = gradients(step, PARAMS)["attention"][leaf]["kernel"]
            expected = np.asarray(gradient, np.float64) + warm_up(step) * expected
        assert_allclose(momentum, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["muon", "normuon", "muonclip", "adamclip"])
def test_each_optimizer_takes_a_schedule_of_the_weight_decay(name):
    """Without a gradient a weight loses the rate times this step's decay of itself."""
    tx = optimizer(name, NUMBERS, 0.5, weight_decay=warm_up)
    extra = {"max_logits": {"attention": jnp.ones(2)}} if "clip" in name else {}
    state = tx.init(PARAMS)
    for step in range(STEPS):
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        updates, state = tx.update(zeros, state, PARAMS, **extra)
        lost = 0.5 * warm_up(step)
        for leaf in ("query", "key"):
            kernel = PARAMS["attention"][leaf]["kernel"]
            update = updates["attention"][leaf]["kernel"]
            assert_allclose(update, -lost * kernel, rtol=1e-6)


def test_a_number_keeps_the_state_of_optax():
    assert type(muonjax.trace(0.9).init(PARAMS)) is optax.TraceState


def test_a_state_without_a_count_is_refused():
    state = muonjax.trace(0.9).init(PARAMS)
    with pytest.raises(AttributeError, match="hyperparams"):
        muonjax.trace(warm_up).update(PARAMS, state)


def test_the_momentum_of_a_schedule_can_be_cast():
    state = muonjax.trace(warm_up).init(PARAMS)
    cast = muonjax.cast_momentum(state, jnp.int8)
    _, after = muonjax.trace(warm_up, accumulator_dtype=jnp.int8).update(PARAMS, cast)
    assert jax.tree.structure(after) == jax.tree.structure(cast)


RATE = optax.linear_schedule(1e-2, 0.0, 8)
ADAM_RATE = optax.linear_schedule(1e-3, 0.0, 16)
INJECTED = optax.inject_hyperparams(optax.adamw)(ADAM_RATE)


@pytest.mark.parametrize(("make", "adam_rate"), [
    (lambda: muonjax.muon(RATE, NUMBERS, newton_schulz=SHORT), RATE),
    (lambda: muonjax.muon(RATE, NUMBERS, newton_schulz=SHORT, adam=INJECTED), ADAM_RATE),
    (lambda: muonjax.muon(RATE, NUMBERS, newton_schulz=SHORT, adam_learning_rate=ADAM_RATE), ADAM_RATE),
    (lambda: muonjax.normuon(RATE, NUMBERS, newton_schulz=SHORT), RATE),
    (lambda: muonjax.muonh(RATE, NUMBERS, newton_schulz=SHORT, adam_learning_rate=ADAM_RATE), ADAM_RATE),
    (lambda: optax.chain(optax.clip(1.0), muonjax.muon(RATE, NUMBERS, newton_schulz=SHORT)), RATE),
])  # fmt: skip
def test_the_metrics_have_the_rates_of_the_last_update(make, adam_rate):
    metrics = muonjax.metrics(after_steps(make()))
    assert metrics["learning_rate"] == pytest.approx(float(RATE(STEPS - 1)))
    assert metrics["adam_learning_rate"] == pytest.approx(float(adam_rate(STEPS - 1)))


@pytest.mark.parametrize("rate", [1e-2, RATE])
def test_adamw_and_its_rate_are_those_of_optax(rate):
    settings = {
        "b2": 0.95,
        "weight_decay": 0.1,
        "mask": {"attention": True, "scale": False},
    }
    ours = adamw(rate, **settings)
    theirs = optax.adamw(rate, **settings)
    states = [ours.init(PARAMS), theirs.init(PARAMS)]
    for step in range(STEPS):
        grads = gradients(step, PARAMS)
        updates, states[0] = ours.update(grads, states[0], PARAMS)
        expected, states[1] = theirs.update(grads, states[1], PARAMS)
        jax.tree.map(assert_array_equal, updates, expected)


@pytest.mark.parametrize("grad_dtype", ["float32", "float16"])
def test_adamw_of_half_precision_is_that_of_float32(grad_dtype):
    """Its square is 0 in float16, and 0.001 of that no change of the second moment in bfloat16."""
    noise = jax.random.normal(jax.random.key(0), (200, 64))
    grads = (1e-4 * noise).astype(grad_dtype)
    tx = adamw(1.0, weight_decay=0.0, mu_dtype=jnp.float32)

    def last_update(dtype):
        params = jnp.ones(64, dtype)

        def step(state, grad):
            update, state = tx.update(grad, state, params)
            return state, update

        _, updates = jax.lax.scan(step, tx.init(params), grads)
        return updates[-1]

    wide = last_update("float32")
    assert_allclose(last_update("bfloat16"), wide, rtol=1e-6)
    theirs = optax.adamw(1.0, weight_decay=0.0)
    state = theirs.init(jnp.ones(64))
    for grad in grads.astype(jnp.float32):
        expected, state = theirs.update(grad, state, wide)
    assert_allclose(wide, expected, rtol=1e-3)
