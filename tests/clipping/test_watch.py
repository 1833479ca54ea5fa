"""MuonClip in five lines: models that are watched without a change to their code, and optimizers that get it all."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import muonjax
from tests.clipping.attentions import EXACT
from tests.clipping.test_attention_fn import MASK, X, want
from tests.tools.tiers import quick


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Block(nnx.Module):
    """Someone else's: nothing in it knows of QK-Clip."""

    def __init__(self, rngs, **settings):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, 8, decode=False, bias_init=nnx.initializers.normal(1.0), rngs=rngs, **settings
        )

    def __call__(self, x):
        return x + self.attention(self.norm(x), is_causal=True)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def test_five_lines():
    model = muonjax.nnx.watch(Model(nnx.Rngs(0)))
    tx = optax.chain(optax.sgd(0.0), muonjax.qk_clip(0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        (loss, stats), grads = muonjax.nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads, max_logits=stats)
        return loss, stats

    _, before = step(model, optimizer, X)
    logits = before["blocks"][0]["attention"]["max_logits"][...]
    params = nnx.state(model.blocks[0].attention, nnx.Param)
    first = muonjax.metrics(optimizer.opt_state)
    assert first["qk_clip/num_clipped"] > 0
    np.testing.assert_allclose(first["qk_clip/largest/blocks/0/attention"], logits.max(), rtol=1e-6)
    assert want(params, model.blocks[0].norm(X), is_causal=True).max() <= 0.5 * EXACT


def test_muonclip_trains_a_watched_model():
    model = muonjax.nnx.watch(Model(nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, muonjax.muonclip(1e-2, threshold=1.0), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        (loss, stats), grads = muonjax.nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads, max_logits=stats)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert muonjax.metrics(optimizer.opt_state)["qk_clip/total_clipped"] > 0


def test_a_watched_model_computes_what_it_did():
    plain, watched = Model(nnx.Rngs(0)), muonjax.nnx.watch(Model(nnx.Rngs(0)))
    np.testing.assert_array_equal(watched(X), plain(X))
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m)) for m in (watched, plain)))
    y, sown = nnx.capture(watched, nnx.Intermediate)(X)
    np.testing.assert_array_equal(y, plain(X))
    expected = want(nnx.state(plain.blocks[0].attention), plain.blocks[0].norm(X), is_causal=True)
    np.testing.assert_allclose(sown["blocks"][0]["attention"]["max_logits"][...], expected, rtol=1e-6)
    assert isinstance(watched.blocks[0].attention, nnx.MultiHeadAttention)


def test_watching_survives_split_and_merge_and_again():
    model = muonjax.nnx.watch(Model(nnx.Rngs(0)))
    kind = type(model.blocks[0].attention)
    assert type(muonjax.nnx.watch(model).blocks[0].attention) is kind
    merged = nnx.clone(nnx.merge(*nnx.split(model)))
    for watched in (model, merged):
        _, sown = nnx.capture(watched, nnx.Intermediate)(X)
        assert sown["blocks"][1]["attention"]["max_logits"][...].shape == (4,)


def test_aux_of_the_loss():
    model = muonjax.nnx.watch(Block(nnx.Rngs(0)))

    def with_aux(model, x):
        return loss_fn(model, x), {"accuracy": 1.0}

    (loss, (aux, stats)), grads = muonjax.nnx.value_and_grad(with_aux, has_aux=True)(model, X)
    (alone, _), alone_grads = muonjax.nnx.value_and_grad(loss_fn)(model, X)
    assert (float(loss), aux) == (float(alone), {"accuracy": 1.0})
    assert stats["attention"]["max_logits"][...].shape == (4,)
    jax.tree.map(np.testing.assert_array_equal, grads, alone_grads)
    with pytest.raises(TypeError, match="first argument of the loss must be the model"):
        muonjax.nnx.value_and_grad(lambda x: x)(X)


class Bare(nnx.Module):
    """An attention without Flax's."""

    def __init__(self, rngs):
        self.query = nnx.Linear(8, 8, rngs=rngs)
        self.key = nnx.Linear(8, 8, rngs=rngs)


CAPPED = functools.partial(lambda query, key, value, **kwargs: value, softcap=50.0)


@pytest.mark.parametrize(("make", "reason"), [
    (functools.partial(Block, normalize_qk=True), "'attention': normalizes its queries and keys"),
    (Bare, "'': is no nnx.MultiHeadAttention"),
    (functools.partial(Block, attention_fn=CAPPED), "softcap=50.0 caps"),
])  # fmt: skip
def test_says_what_it_cannot_watch(make, reason):
    with pytest.raises(ValueError, match=f"watch: no nnx.MultiHeadAttention.*{reason}"):
        muonjax.nnx.watch(make(nnx.Rngs(0)))
    both = nnx.List([Block(nnx.Rngs(0)), make(nnx.Rngs(0))])
    with pytest.warns(UserWarning, match="watch: not watched: '1.*Leave them out"):
        muonjax.nnx.watch(both)
    _, sown = nnx.capture(lambda blocks: blocks[0](X), nnx.Intermediate)(both)
    assert sown[0]["attention"]["max_logits"][...].shape == (4,)


# Linen.


class LinenModel(nn.Module):
    """Someone else's, too."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            attention = nn.MultiHeadDotProductAttention(
                4, bias_init=nn.initializers.normal(1.0), name=f"attention_{i}"
            )
            x = x + attention(x, mask=MASK)
        return x


def linen_loss(state, params):
    with muonjax.linen.watch():
        y, sown = state.apply_fn({"params": params}, X, mutable=["intermediates"])
    return (y**2).mean(), sown


def test_train_state_hands_the_statistics_on():
    model = LinenModel()
    params = model.init(jax.random.key(0), X)["params"]
    tx = optax.chain(optax.sgd(0.0), muonjax.qk_clip(0.5))
    state = muonjax.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        (_, sown), grads = jax.value_and_grad(functools.partial(linen_loss, state), has_aux=True)(
            state.params
        )
        return state.apply_gradients(grads=grads, max_logits=sown)

    after = step(state)
    assert isinstance(after, muonjax.linen.TrainState)
    assert after.tx is state.tx
    assert int(after.step) == 1
    np.testing.assert_allclose(
        muonjax.metrics(after.opt_state)["qk_clip/largest/attention_0"],
        want(params["attention_0"], mask=MASK).max(), rtol=1e-6,
    )  # fmt: skip
    assert want(after.params["attention_0"], mask=MASK).max() <= 0.5 * EXACT
    with pytest.raises(ValueError, match=r"statistics.*muonjax\.linen\.TrainState"):
        state.apply_gradients(grads=params)
    plain = muonjax.linen.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
    expected = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
    jax.tree.map(
        np.testing.assert_array_equal, *(s.apply_gradients(grads=params).params for s in (plain, expected))
    )
    plain.apply_gradients(grads=params, max_logits={})  # as Optax's own, which drop what they don't take


@quick("scan", "<lambda>")
@pytest.mark.parametrize("wrap", [lambda module: module, nn.remat, "scan"])
def test_watching_linen(wrap):
    if wrap == "scan":

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.MultiHeadDotProductAttention(4, name="attention")(x, mask=MASK), None

        axes = {"params": 0, "intermediates": 0}
        model = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=3)()
        variables = model.init(jax.random.key(0), X, None)
        apply = functools.partial(model.apply, variables, X, None)
        shape = (3, 4)
    else:
        model = wrap(LinenModel)()
        variables = model.init(jax.random.key(0), X)
        apply = functools.partial(model.apply, variables, X)
        shape = (4,)
    plain = apply()
    with muonjax.linen.watch():
        watched, sown = apply(mutable=["intermediates"])
        unmeasured = apply()
    jax.tree.map(np.testing.assert_array_equal, watched, plain)
    jax.tree.map(np.testing.assert_array_equal, unmeasured, plain)
    longer = (*shape[:-1], shape[-1] + 1)
    assert {leaf.shape for leaf in jax.tree.leaves(sown)} == {shape, longer}
    _, nothing = apply(mutable=["intermediates"])
    assert not jax.tree.leaves(nothing)  # outside of the context


def test_a_bound_module_is_afterwards_what_it_was():
    model = nn.MultiHeadDotProductAttention(4)
    bound = model.bind(model.init(jax.random.key(0), X))
    function = bound.attention_fn
    with muonjax.linen.watch():
        bound(X)
    assert bound.attention_fn is function


def test_watching_linen_leaves_normalized_attention_alone():
    model = nn.MultiHeadDotProductAttention(4, normalize_qk=True)
    variables = model.init(jax.random.key(0), X)
    with muonjax.linen.watch():
        y, sown = model.apply(variables, X, mutable=["intermediates"])
    assert not jax.tree.leaves(sown)
    np.testing.assert_array_equal(y, model.apply(variables, X))


# What goes wrong with MultiSteps.


def test_multisteps_around_the_clip_warns():
    """It would hand on the last micro-batch's logits alone."""
    params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
    with pytest.warns(UserWarning, match="inside of optax.MultiSteps.*every_k"):
        optax.MultiSteps(muonjax.muonclip(1e-2), 4).init(params)
    with pytest.warns(UserWarning, match="inside of optax.MultiSteps"):
        optax.chain(optax.MultiSteps(muonjax.qk_clip(1.0), 4).gradient_transformation()).init(params)
    inner = optax.MultiSteps(muonjax.muon(1e-2), 4).gradient_transformation()
    optax.chain(inner, muonjax.qk_clip(1.0, every_k=4)).init(params)
