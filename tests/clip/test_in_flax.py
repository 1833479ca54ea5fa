"""MuonClip with Flax: models of which nothing has to change, parts of models, `TrainState`."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from tests.clip.attentions import EXACT
from tests.tools.oracles import SHORT, normal
from tests.tools.tiers import thorough

X = normal(2, 7, 8)
MASK = nn.make_causal_mask(X[..., 0])


def want(params, x=X, **settings):
    """The maxima from the parameters of an attention."""
    params = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    q, k = (
        jnp.einsum("...d,dhe->...he", x, params[n]["kernel"]) + params[n]["bias"]
        for n in ("query", "key")
    )
    return muonjax.max_logits(q, k, **settings)


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
            4,
            8,
            decode=False,
            bias_init=nnx.initializers.normal(1.0),
            rngs=rngs,
            **settings,
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


def inspected():
    """A model and its program."""
    model = Model(nnx.Rngs(0))
    return model, muonjax.inspect(loss_fn, model, X)


def trained(model, tx, wrt=nnx.Param):
    """An optimizer of the model, and its compiled step."""

    @nnx.jit
    def step(model, optimizer, x):
        argnums = nnx.DiffState(0, wrt)
        (loss, max_logits), grads = muonjax.value_and_grad(loss_fn, argnums=argnums)(
            model, x
        )
        optimizer.update(model, grads, max_logits=max_logits)
        return loss, max_logits

    return nnx.Optimizer(model, tx, wrt=wrt), step


def test_one_clip_is_exact():
    """`nnx.Optimizer` initializes with paths that end in .value and updates without."""
    model, program = inspected()
    optimizer, step = trained(
        model, optax.chain(optax.sgd(0.0), muonjax.qk_clip(0.5, program))
    )
    _, before = step(model, optimizer, X)
    first = muonjax.metrics(optimizer.opt_state)
    assert first["qk_clip/num_clipped"] > 0
    largest = before["blocks/0/attention"].max()
    assert_allclose(first["qk_clip/largest/blocks/0/attention"], largest, rtol=1e-6)
    params = nnx.state(model.blocks[0].attention, nnx.Param)
    assert want(params, model.blocks[0].norm(X), is_causal=True).max() <= 0.5 * EXACT


SECOND = nnx.All(nnx.Param, nnx.PathContains(1))
KEYS = nnx.All(
    nnx.Param, nnx.Not(nnx.All(nnx.PathContains(0), nnx.PathContains("query")))
)


@pytest.mark.parametrize("wrt", [SECOND, KEYS])
@pytest.mark.parametrize(
    "make", [functools.partial(muonjax.muonclip, newton_schulz=SHORT), muonjax.adamclip]
)
def test_parts_of_a_model(make, wrt):
    """The attention of which queries or keys are not trained is skipped, and its statistic is left aside."""
    model, program = inspected()
    optimizer, step = trained(model, make(0.0, program, threshold=0.5), wrt)
    frozen = jax.tree.map(jnp.copy, nnx.state(model.blocks[0], nnx.Param))
    _, max_logits = step(model, optimizer, X)
    assert set(max_logits) == {"blocks/0/attention", "blocks/1/attention"}
    assert set(optimizer.opt_state[-1].factors) == {"blocks/1/attention"}
    jax.tree.map(assert_array_equal, frozen, nnx.state(model.blocks[0], nnx.Param))
    attention = model.blocks[1].attention
    x = model.blocks[1].norm(model.blocks[0](X))
    assert want(nnx.state(attention, nnx.Param), x, is_causal=True).max() <= 0.5 * EXACT


def test_a_part_without_attention():
    model, program = inspected()
    with pytest.raises(
        ValueError,
        match=r"adamclip: no attention of the program is trained.*muonjax\.muon",
    ):
        nnx.Optimizer(
            model,
            muonjax.adamclip(1e-3, program),
            wrt=nnx.All(nnx.Param, nnx.PathContains("norm")),
        )


def test_aux_of_the_loss():
    fun = muonjax.value_and_grad(
        lambda model, x: (loss_fn(model, x), {"accuracy": 1.0}), has_aux=True
    )
    (_, (aux, max_logits)), _ = fun(Block(nnx.Rngs(0)), X)
    assert aux == {"accuracy": 1.0}
    assert max_logits["attention"].shape == (4,)


class Noisy(nnx.Module):
    """A model with running means, and one that draws random numbers, its own and its caller's."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.block = Block(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, rngs):
        return self.dropout(self.block(self.norm(x))) + jax.random.normal(
            rngs.noise(), x.shape
        )


def noisy_loss(model, x, rngs, kind="mean"):
    return getattr(jnp, kind)(model(x, rngs) ** 2)


ATTENTION = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("attention")))


@pytest.mark.parametrize("argnums", [0, 1, thorough((0, 1)), ATTENTION])
def test_all_else_is_as_nnx_has_it(argnums):
    """Gradients of any argument, running means, the counts of random numbers, keywords."""
    results = []
    for value_and_grad in (nnx.value_and_grad, muonjax.value_and_grad):
        model = Noisy(nnx.Rngs(0))
        rngs = nnx.Rngs(noise=1)

        # Flax's takes none.
        keywords = {} if value_and_grad is nnx.value_and_grad else {"kind": "mean"}

        @nnx.jit
        def step(model, rngs):
            grad_of = value_and_grad(noisy_loss, argnums=argnums)  # noqa: B023
            return grad_of(model, X, rngs, **keywords)  # noqa: B023

        loss, grads = step(model, rngs)
        if keywords:
            loss, max_logits = loss
            assert {name: x.shape for name, x in max_logits.items()} == {
                "block/attention": (4,)
            }
        results.append(
            (loss, grads, nnx.state(model, nnx.Not(nnx.RngKey)), rngs.noise.count[...])
        )
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    jax.tree.map(assert_array_equal, *results)


def capped(query, key, value, **_):
    logits = 50 * jnp.tanh(jnp.einsum("...thd,...shd->...hts", query, key) / 50)
    return jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(logits), value)


@pytest.mark.parametrize(("settings", "reason"), [
    ({"normalize_qk": True}, r".*\(square\)"), ({"attention_fn": capped}, r".*\(tanh\)"),
])  # fmt: skip
def test_says_what_it_cannot_measure(settings, reason):
    block = Block(nnx.Rngs(0), **settings)
    with pytest.raises(
        ValueError, match=rf"no attention can be clipped.*\.py:\d+.*: {reason}"
    ):
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


def test_train_state_hands_the_statistics_on():
    model = LinenModel()
    params = model.init(jax.random.key(0), X)["params"]

    def linen_loss(params):
        return (model.apply({"params": params}, X) ** 2).mean()

    tx = optax.chain(
        optax.sgd(0.0), muonjax.qk_clip(0.5, muonjax.inspect(linen_loss, params))
    )
    state = muonjax.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        (_, max_logits), grads = muonjax.value_and_grad(linen_loss)(state.params)
        return state.apply_gradients(grads=grads, max_logits=max_logits)

    after = step(state)
    assert isinstance(after, muonjax.linen.TrainState)
    assert after.tx is state.tx
    assert int(after.step) == 1
    assert_allclose(
        muonjax.metrics(after.opt_state)["qk_clip/largest/attention_0"],
        want(params["attention_0"], mask=MASK).max(), rtol=1e-6,
    )  # fmt: skip
    assert want(after.params["attention_0"], mask=MASK).max() <= 0.5 * EXACT
    with pytest.raises(
        ValueError, match=r"(?s)update needs max_logits.*muonjax\.linen\.TrainState"
    ):
        state.apply_gradients(grads=params)
    plain = muonjax.linen.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.1)
    )
    expected = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.1)
    )
    jax.tree.map(
        assert_array_equal,
        *(s.apply_gradients(grads=params).params for s in (plain, expected)),
    )
    plain.apply_gradients(
        grads=params, max_logits={}
    )  # as Optax's own, which drop what they don't take
