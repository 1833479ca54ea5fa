"""`ema_nesterov` against the paper's algorithm in float64, and with what it is combined with."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from tests.clip.attentions import EXACT, multi_head
from tests.tools.oracles import SHORT, normal

STEPS = 50
BETAS = np.array(
    [0.6 * (1 - t / STEPS) if 5 <= t < 35 else 0.0 for t in range(STEPS + 1)]
)  # as the record's
CURVATURE = np.linspace(0.1, 2.0, 12).reshape(3, 4)


def noise(step):
    return np.random.default_rng(step).standard_normal((3, 4))


def reference(learning_rate=0.05, momentum=0.9, weight_decay=0.1, decay=0.95):
    """The paper's algorithm around SGD with momentum and weight decay, with all three buffers: y and θ of each step."""
    weights = np.ones((3, 4))
    mean = np.zeros((3, 4))
    trace = np.zeros((3, 4))
    history = []
    for step in range(STEPS):
        previous = weights
        ahead = weights + BETAS[step] * mean
        trace = momentum * trace + CURVATURE * ahead + noise(step)
        weights = ahead - learning_rate * (trace + weight_decay * ahead)
        mean = decay * mean + (1 - decay) * (weights - previous)
        history.append((weights + BETAS[step + 1] * mean, weights))
    return history


def sgd(learning_rate=0.05):
    return optax.chain(
        optax.trace(0.9),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(learning_rate),
    )


def trajectory(tx, tree, steps=STEPS):
    """Parameters and weights after each step, by a scan."""

    def step(carry, randomness):
        tree, state = carry
        grads = jax.tree.map(
            lambda w: jnp.asarray(CURVATURE, w.dtype) * w + randomness.astype(w.dtype),
            tree,
        )
        updates, state = tx.update(grads, state, tree)
        tree = optax.apply_updates(tree, updates)
        return (tree, state), (tree, muonjax.ema_nesterov_params(state, tree))

    randomness = jnp.stack([jnp.asarray(noise(step)) for step in range(steps)])
    return jax.jit(lambda *carry: jax.lax.scan(step, carry, randomness))(
        tree, tx.init(tree)
    )[1]


@pytest.mark.parametrize("precise", [False, True])
def test_fifty_steps_equal_the_papers_algorithm_in_float64(precise):
    with jax.enable_x64(precise):
        start = {"w": jnp.ones((3, 4), jnp.result_type(float))}
        tx = muonjax.ema_nesterov(
            sgd(), lambda step: jnp.asarray(BETAS)[step], decay=0.95
        )
        found = trajectory(tx, start)
        ahead, weights = jax.tree.map(np.asarray, found)
    expected = np.asarray(reference())
    for got, wanted in ((ahead["w"], expected[:, 0]), (weights["w"], expected[:, 1])):
        tolerance = (1e-13 if precise else 1e-6) * np.max(np.abs(wanted))
        assert_allclose(got, wanted, rtol=0, atol=tolerance)


def test_without_a_look_ahead_it_is_the_optimizer_inside():
    inner = muonjax.muon(0.02, newton_schulz=SHORT)
    tree = {"w": normal(3, 4)}
    ahead, weights = trajectory(muonjax.ema_nesterov(inner, 0.0), tree, 3)
    state = inner.init(tree)
    plain = tree
    update = jax.jit(inner.update)
    for step in range(3):
        grads = {
            "w": jnp.asarray(CURVATURE, jnp.float32) * plain["w"]
            + jnp.float32(noise(step))
        }
        updates, state = update(grads, state, plain)
        plain = optax.apply_updates(plain, updates)
    assert_allclose(ahead["w"][-1], plain["w"], atol=1e-6)
    assert_array_equal(ahead["w"], weights["w"])


def test_bfloat16_parameters_keep_their_dtype_in_a_scan():
    ahead, weights = trajectory(
        muonjax.ema_nesterov(sgd(), 0.5), {"w": jnp.ones((3, 4), jnp.bfloat16)}, 2
    )
    assert ahead["w"].dtype == weights["w"].dtype == jnp.bfloat16


def test_inside_of_multi_steps_every_micro_batch_sees_the_same_parameters():
    tree = {"w": normal(3, 4)}
    grads = [{"w": normal(3, 4, seed=i)} for i in range(4)]
    tx = muonjax.ema_nesterov(sgd(), 0.5, decay=0.5)
    several = optax.MultiSteps(tx, 2).gradient_transformation()
    state = several.init(tree)
    found = tree
    update = jax.jit(several.update)
    for micro, g in enumerate(grads):
        updates, state = update(g, state, found)
        assert bool(updates["w"].any()) == (micro % 2 == 1)
        found = optax.apply_updates(found, updates)
    once = tx.init(tree)
    wanted = tree
    for a, b in (grads[:2], grads[2:]):
        updates, once = jax.jit(tx.update)({"w": (a["w"] + b["w"]) / 2}, once, wanted)
        wanted = optax.apply_updates(wanted, updates)
    assert_allclose(found["w"], wanted["w"], atol=1e-6)
    of_both = (
        muonjax.ema_nesterov_params(*pair)["w"]
        for pair in ((state, found), (once, wanted))
    )
    assert_allclose(*of_both, atol=1e-6)


def test_the_clip_scales_what_the_model_sees():
    """The weights with their look-ahead, not the weights alone."""
    params, maxima, site = multi_head()
    statistics = {"max_logits": maxima(params)}
    threshold = 0.5 * float(jnp.min(maxima(params)))
    wrapped = muonjax.ema_nesterov(sgd(), 0.9, decay=0.5)
    clip = muonjax.qk_clip(threshold, site)
    tx = optax.chain(wrapped, clip)
    grads = jax.tree.map(lambda p: -0.1 * p, params)
    updates, state = jax.jit(wrapped.update)(grads, wrapped.init(params), params)
    params = optax.apply_updates(params, updates)
    unclipped, _ = jax.jit(wrapped.update)(grads, state, params)
    clipped, _ = jax.jit(tx.update)(
        grads, (state, clip.init(params)), params, max_logits=statistics
    )
    seen = optax.apply_updates(params, unclipped)
    expected = muonjax.apply_qk_clip(seen, statistics, site, threshold)
    assert (
        float(jnp.max(maxima(expected) / maxima(seen) * statistics["max_logits"]))
        <= threshold * EXACT
    )
    found = optax.apply_updates(params, clipped)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.nan("monitor starts from it")
@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            muonjax.muonclip(0.1, muonjax.mha_site()),
            "put the clip after it, optax.chain",
        ),
        (
            muonjax.monitor(muonjax.adamclip(0.1, muonjax.mha_site())),
            "put the clip after it, optax.chain",
        ),
        (
            optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
            "MultiSteps around it",
        ),
    ],
)
def test_a_clip_or_an_accumulation_inside_is_refused(inner, message):
    params, *_ = multi_head()
    with pytest.raises(ValueError, match=message):
        muonjax.ema_nesterov(inner, 0.5).init(params)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: muonjax.ema_nesterov_params(
                sgd().init({"w": jnp.ones(2)}), {"w": jnp.ones(2)}
            ),
            "not 0",
        ),
        (
            lambda: muonjax.ema_nesterov_params(
                muonjax.ema_nesterov(sgd(), 0.5).init({"w": jnp.ones(2)}),
                {"w": jnp.ones(3)},
            ),
            "have other shapes",
        ),
    ],
)
def test_mistakes_say_what_to_give(call, message):
    with pytest.raises(ValueError, match=message):
        call()
