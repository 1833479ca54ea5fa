"""MuonClip in five lines: models that are measured without a change to their code, and optimizers that get it all."""

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
from tests.tools.tiers import quick, thorough


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
    model = Model(nnx.Rngs(0))
    tx = optax.chain(optax.sgd(0.0), muonjax.qk_clip(0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        (loss, stats), grads = muonjax.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads, max_logits=stats)
        return loss, stats

    _, before = step(model, optimizer, X)
    logits = before["blocks/0/attention"]
    params = nnx.state(model.blocks[0].attention, nnx.Param)
    first = muonjax.metrics(optimizer.opt_state)
    assert first["qk_clip/num_clipped"] > 0
    np.testing.assert_allclose(first["qk_clip/largest/blocks/0/attention"], logits.max(), rtol=1e-6)
    assert want(params, model.blocks[0].norm(X), is_causal=True).max() <= 0.5 * EXACT


def test_muonclip_trains_a_model():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, muonjax.muonclip(1e-2, threshold=1.0), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        (loss, stats), grads = muonjax.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads, max_logits=stats)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert muonjax.metrics(optimizer.opt_state)["qk_clip/total_clipped"] > 0


@pytest.mark.thorough
def test_aux_of_the_loss():
    model = Block(nnx.Rngs(0))

    def with_aux(model, x):
        return loss_fn(model, x), {"accuracy": 1.0}

    (loss, (aux, stats)), grads = muonjax.value_and_grad(with_aux, has_aux=True)(model, X)
    (alone, _), alone_grads = muonjax.value_and_grad(loss_fn)(model, X)
    assert (float(loss), aux) == (float(alone), {"accuracy": 1.0})
    assert stats["attention"].shape == (4,)
    jax.tree.map(np.testing.assert_array_equal, grads, alone_grads)
    with pytest.raises(TypeError, match="an NNX model must be the first argument of fun"):
        muonjax.value_and_grad(lambda x, model: loss_fn(model, x), argnums=1)(X, model)


class Noisy(nnx.Module):
    """A model with running means, and one that draws random numbers, its own and its caller's."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.block = Block(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, rngs):
        return self.dropout(self.block(self.norm(x))) + jax.random.normal(rngs.noise(), x.shape)


def noisy_loss(model, x, rngs, kind="mean"):
    return getattr(jnp, kind)(model(x, rngs) ** 2)


ATTENTION = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("attention")))


@pytest.mark.parametrize("argnums", [0, 1, thorough((0, 1)), ATTENTION])
def test_all_else_is_as_nnx_has_it(argnums):
    """Gradients of any argument, running means, the counts of random numbers, keywords."""
    results = []
    for value_and_grad in (nnx.value_and_grad, muonjax.value_and_grad):
        model, rngs = Noisy(nnx.Rngs(0)), nnx.Rngs(noise=1)

        keywords = {} if value_and_grad is nnx.value_and_grad else {"kind": "mean"}  # Flax's takes none

        @nnx.jit
        def step(model, rngs):
            return value_and_grad(noisy_loss, argnums=argnums)(model, X, rngs, **keywords)  # noqa: B023

        loss, grads = step(model, rngs)
        if keywords:
            loss, max_logits = loss
            assert {name: x.shape for name, x in max_logits.items()} == {"block/attention": (4,)}
        results.append((loss, grads, nnx.state(model, nnx.Not(nnx.RngKey)), rngs.noise.count[...]))
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    jax.tree.map(np.testing.assert_array_equal, *results)


def capped(query, key, value, **_):
    logits = 50 * jnp.tanh(jnp.einsum("...thd,...shd->...hts", query, key) / 50)
    return jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(logits), value)


@pytest.mark.parametrize(("settings", "reason"), [
    ({"normalize_qk": True}, "its queries are normalized"), ({"attention_fn": capped}, "the logits are capped"),
])  # fmt: skip
def test_says_what_it_cannot_measure(settings, reason):
    block = Block(nnx.Rngs(0), **settings)
    with pytest.raises(ValueError, match=rf"no attention can be clipped.*\.py:\d+.*: {reason}"):
        muonjax.value_and_grad(loss_fn)(block, X)
    both = nnx.List([Block(nnx.Rngs(0)), block])
    grad = muonjax.value_and_grad(lambda blocks: (blocks[1](blocks[0](X)) ** 2).mean())
    (_, max_logits), _ = nnx.jit(grad)(both)
    assert list(max_logits) == ["0/attention"]


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
