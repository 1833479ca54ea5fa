"""Optax's wrappers around muon and muonclip: the table of docs/saving.md has a row for each."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax


def loss_fn(params, x):
    q, k, v = (jnp.einsum("btd,dhs->bths", x, params[name]) for name in ("q", "k", "v"))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    return jnp.mean(((x + attended) @ params["head"]) ** 2)


SHAPES = {"q": (16, 4, 4), "k": (16, 4, 4), "v": (16, 4, 4), "head": (16, 8)}
PARAMS = {
    n: jax.random.normal(jax.random.key(i), shape)
    for i, (n, shape) in enumerate(SHAPES.items())
}
X = jax.random.normal(jax.random.key(4), (2, 8, 16))
PROGRAM = muonjax.inspect(loss_fn, PARAMS, X)
(_, LOGITS), GRADS = jax.jit(muonjax.value_and_grad(loss_fn))(PARAMS, X)
TRAINED = {name: name != "head" for name in PARAMS}

OPTIMIZERS = {
    "muon": (lambda rate: muonjax.muon(rate, PROGRAM), {}),
    "muonclip": (
        lambda rate: muonjax.muonclip(rate, PROGRAM, threshold=1.0),
        {"max_logits": LOGITS},
    ),
}
WRAPPERS = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "chain": lambda tx: optax.chain(tx, optax.scale(1.0)),
    "masked": lambda tx: optax.masked(tx, TRAINED),
    "partition": lambda tx: optax.partition(
        {True: tx, False: optax.set_to_zero()}, TRAINED
    ),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.01),
}


def first_updates(tx, params=PARAMS, calls=1, **logits):
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(calls):
        updates, state = update(GRADS, state, params, **logits)
    return updates


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_first_update_is_that_of_the_optimizer_alone(wrapper, optimizer):
    make, logits = OPTIMIZERS[optimizer]
    calls = 2 if wrapper == "MultiSteps" else 1
    wrapped = first_updates(WRAPPERS[wrapper](make(0.01)), calls=calls, **logits)
    plain = first_updates(make(0.01), **logits)
    same = [
        name
        for name in PARAMS
        if TRAINED[name] or wrapper not in ("masked", "partition")
    ]
    for name in same:
        np.testing.assert_allclose(wrapped[name], plain[name], rtol=1e-4, atol=1e-6)


def test_lookahead_steps_with_muon_and_takes_no_statistics():
    muon, clip = (
        optax.lookahead(make(0.01), 1, 0.5) for make, _ in OPTIMIZERS.values()
    )
    pair = optax.LookaheadParams(PARAMS, PARAMS)
    plain = first_updates(OPTIMIZERS["muon"][0](0.01))
    half = jax.tree.map(lambda u: u / 2, plain)
    chex.assert_trees_all_close(
        first_updates(muon, pair).slow, half, rtol=1e-4, atol=1e-6
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_logits'"):
        first_updates(clip, pair, max_logits=LOGITS)
