"""Statistics of as many layers as heads: which axis is which is known, or said by the caller, and never guessed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import muonjax
from tests.tools.oracles import normal
from tests.tools.tiers import quick, thorough

N = 3  # layers, heads, and examples of a batch
X = normal(N, 5, 12, seed=3)


def expected(params, axis, inputs):
    """Each layer's largest logits [layers, heads] in float64, and the output of each layer is the next one's input."""
    layers = [
        jax.tree.map(lambda p: np.take(np.asarray(p, np.float64), i, axis), params)  # noqa: B023
        for i in range(N)
    ]
    x, found = np.asarray(inputs, np.float64), []
    for p in layers:
        q, k, v = (
            np.einsum("btd,dhe->bthe", x, p[n]["kernel"]) + p[n]["bias"] for n in ("query", "key", "value")
        )
        logits = np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(q.shape[-1])
        found.append(logits.max((0, 2, 3)))
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("bhts,bshe->bthe", weights, v)
        x = x + np.einsum("bthe,hed->btd", y, p["out"]["kernel"]) + p["out"]["bias"]
    return np.stack(found)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.normal(0.5)
        return x + nn.MultiHeadDotProductAttention(N, kernel_init=init, name="attention")(x), None


def linen(axis, where):
    axes = {"params": axis, "intermediates": where}
    model = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=N)()
    params = model.init(jax.random.key(0), X)["params"]
    with muonjax.linen.watch():
        _, sown = jax.jit(lambda p: model.apply({"params": p}, X, mutable=["intermediates"]))(params)
    return params, sown


@quick("0-1", "1-0")
@pytest.mark.parametrize("where", [0, 1, -1])
@pytest.mark.parametrize("axis", [0, 1])
def test_linen_statistics_on_any_axis(axis, where):
    params, sown = linen(axis, where)
    tx = muonjax.qk_clip(0.1)
    _, state = jax.jit(tx.update)(params, tx.init(params), params, max_logits=sown)
    want = expected(params["attention"], axis, X)
    np.testing.assert_allclose(state.maxima["attention"], want, rtol=1e-4)
    np.testing.assert_allclose(state.factors["attention"], np.minimum(1, 0.1 / want), rtol=1e-4)


class Stack(nnx.Module):
    def __init__(self, axis, rngs):
        self.axis = axis
        make = nnx.vmap(self.layer, in_axes=(0,), out_axes=axis)
        self.attention = nnx.split_rngs(splits=N)(make)(rngs)

    @staticmethod
    def layer(rngs):
        init = nnx.initializers.normal(0.5)
        return nnx.MultiHeadAttention(N, 12, decode=False, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, self.axis), out_axes=nnx.Carry)
        def run(x, attention):
            return x + attention(x)

        return run(x, self.attention)


@quick("1")
@pytest.mark.parametrize("axis", [0, 1])
def test_nnx_statistics_on_any_axis(axis):
    """A hot head 1 of layer 0 clipped head 0 of layer 1."""
    model = Stack(axis, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, muonjax.muonclip(0.0, threshold=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        (_, stats), grads = muonjax.value_and_grad(lambda m: (m(X) ** 2).mean())(model)
        optimizer.update(model, grads, max_logits=stats)

    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    step(model, optimizer)
    want = expected(before["attention"], axis, X)
    np.testing.assert_allclose(optimizer.opt_state[-1].maxima["attention"][...], want, rtol=1e-4)


PARAMS = {"a": {name: {"kernel": jnp.ones((N, 12, N, 4))} for name in ("query", "key")}}
HOT = jnp.ones((N, N)).at[0, 1].set(400.0)


def clipped(statistics, params=PARAMS, **site):
    apply = functools.partial(muonjax.apply_qk_clip, sites=muonjax.mha_site(**site))
    got = jax.jit(apply)(params, statistics)
    return np.asarray(got["a"]["query"]["kernel"])[:, 0, :, 0]


HALF = np.where(HOT > 100, 0.5, 1.0)


def marked(axis):
    """The statistic [layers, heads] and what stands beside it, with the layers on another axis."""
    marker = jnp.full((N, N + 1), -jnp.inf)
    return {"a": {"max_logits": jnp.moveaxis(HOT, 0, axis), "max_logits_axes": jnp.moveaxis(marker, 0, axis)}}


@pytest.mark.parametrize("axis", [0, 1])
def test_the_array_beside_a_statistic_says_which_axis_is_which(axis):
    np.testing.assert_array_equal(clipped(marked(axis)), HALF)
    np.testing.assert_array_equal(clipped({"intermediates": marked(axis)}), HALF)
    micro = jax.tree.map(lambda x: jnp.stack([x, x - 1], -1), marked(axis))  # of two micro-batches
    np.testing.assert_array_equal(clipped(micro), HALF)


@pytest.mark.parametrize(
    "statistic",
    [
        {"a": {"max_logits": HOT}},
        {"intermediates": {"a": {"max_logits": (HOT,)}}},
        {"a/max_logits": HOT},
        {"a": {"op": {"max_logits": HOT}}},
        {"a": {"max_logits": jnp.ones((N, N, N))}},
        # Micro-batches in front: as many as layers.
        jax.tree.map(lambda x: jnp.stack([x] * N), marked(0)),
        # What does not belong together says nothing.
        {"a": {"max_logits": HOT, "max_logits_axes": jnp.ones((N, N))}},
        {"a": {"max_logits": HOT, "max_logits_axes": jnp.ones((N + 1, N + 1))}},
        {"a": {"max_logits": HOT, "max_logits_axes": jnp.ones((N, N, N + 1))}},
    ],
)
def test_axes_that_sizes_do_not_tell_are_refused(statistic):
    with pytest.raises(ValueError, match=r"max_logits of 'a' have shape .* fit several of its axes") as error:
        clipped(statistic)
    (code,) = re.findall(r"max_logits=(\{.*?\})", str(error.value))
    np.testing.assert_array_equal(clipped(eval(code, {"statistic": HOT})), HALF)


def test_axes_in_a_module_with_two_attentions():
    """The module's path does not name one of them."""
    kernel = {"kernel": jnp.ones((N, 12, N, 4))}
    params = {"a": {f"{which}_{name}": kernel for which in ("self", "cross") for name in ("query", "key")}}
    sites = [
        muonjax.mha_site("a", query=f"{which}_query", key=f"{which}_key", signal=f"{which}_logits")
        for which in ("self", "cross")
    ]
    with pytest.raises(ValueError, match="fit several of its axes") as error:
        muonjax.apply_qk_clip(params, {"a": {"self_logits": HOT, "cross_logits": HOT}}, sites)
    (code,) = re.findall(r"max_logits=(\{.*?\})", str(error.value))
    both = {}
    for which in ("self", "cross"):
        both |= eval(re.sub("self|cross", which, code), {"statistic": HOT})
    got = muonjax.apply_qk_clip(params, both, sites)
    np.testing.assert_array_equal(got["a"]["cross_key"]["kernel"][:, 0, :, 0], HALF)


@pytest.mark.thorough
def test_axes_that_sizes_confirm():
    """As [*layers, *batch, heads], which is what a module is told to sow."""
    wide = {"a": {name: {"kernel": jnp.ones((N, 12, 2, 4))} for name in ("query", "key")}}
    hot = jnp.ones((N, 2)).at[0, 1].set(400.0)
    half = np.where(hot > 100, 0.5, 1.0)
    for statistic in (hot, hot[:, None], jnp.stack([hot, -hot], 1), jnp.stack([hot] * 5, 1)):
        np.testing.assert_array_equal(clipped({"a": {"max_logits": statistic}}, wide), half)
    with pytest.raises(ValueError, match=r"shape \(2, 3\); the parameters say \(3, 2\)"):
        clipped({"a": {"max_logits": hot.T}}, wide)
    one = {"a": {name: {"kernel": jnp.ones((1, 12, 1, 4))} for name in ("query", "key")}}
    assert clipped({"a": {"max_logits": jnp.full((1, 1, 1), 400.0)}}, one) == 0.5


@pytest.mark.parametrize("levels", [(2, 3), thorough((2, 2))])
def test_two_levels_of_layers(levels):
    """Layers in the order of the site's axes; the array beside the statistic says which axis is left for heads."""
    shape, hot = (*levels, 2), (1, 0, 1)
    params = {"a": {name: {"kernel": jnp.ones((*levels, 12, 2, 4))} for name in ("query", "key")}}
    statistic = jnp.ones(shape).at[hot].set(400.0)
    marker = jnp.ones((*levels, 3))
    for axis in range(3):
        sown = {
            "max_logits": jnp.moveaxis(statistic, -1, axis),
            "max_logits_axes": jnp.moveaxis(marker, -1, axis),
        }
        got = muonjax.apply_qk_clip(params, {"a": sown}, muonjax.mha_site(), 100.0)
        factors = np.asarray(got["a"]["key"]["kernel"])[:, :, 0, :, 0]
        np.testing.assert_array_equal(factors, np.where(statistic > 100, 0.5, 1.0))


def test_the_site_says_on_which_axis_parameters_have_their_layers():
    params = jax.tree.map(lambda p: jnp.moveaxis(p, 0, 1), PARAMS)
    tx = optax.chain(optax.sgd(0.0), muonjax.qk_clip(100.0, muonjax.mha_site(scan_axis=1)))
    for axis in (0, 1):
        update = functools.partial(tx.update, max_logits=marked(axis))
        _, state = jax.jit(update)(params, tx.init(params), params)
        np.testing.assert_array_equal(state[-1].factors["a"], np.where(HOT > 100, 0.25, 1.0))
