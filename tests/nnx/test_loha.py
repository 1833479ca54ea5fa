"""LoHa adapters in NNX: the start, merging, training adapters alone, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from muonjax import adapter_mask, apply_qk_clip, dimension_numbers, mha_site
from muonjax import nnx as nnx_loha
from muonjax.nnx import LoHaParam, add_loha
from tests.tools.oracles import disturbed


def train_nnx(model):
    """Every parameter of every adapter moved, as training would."""
    nnx.update(model, disturbed(nnx.state(model, LoHaParam)))
    return model


def adapted(layer, rank, alpha=None):
    add_loha(layer, "", rank=rank, alpha=alpha, rngs=nnx.Rngs(1))
    return layer


def weight64(layer, holder):
    """The kernel that the layer should act with, by NumPy."""
    kernel = np.asarray(layer.kernel[...], np.float64)
    w1a, w1b, w2a, w2b = (np.asarray(factor, np.float64) for factor in holder.factors())
    return kernel + (holder.scale * (w1a @ w1b) * (w2a @ w2b)).reshape(kernel.shape)


class Mixed(nnx.Module):
    """One of each layer that can be adapted, and one that can't."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.conv(x))
        return self.norm(self.up(x))


def paths_of(model):
    return {path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}


TOKENS = jnp.arange(10).reshape(2, 5)
LAYERS = [
    "attention/key",
    "attention/out",
    "attention/query",
    "attention/value",
    "conv",
    "up",
]


@pytest.mark.parametrize("alpha", [None, 5.0])
def test_nnx_linear_starts_plain_then_follows_its_factors(alpha):
    layer = adapted(nnx.Linear(6, 5, rngs=nnx.Rngs(0)), 2, alpha)
    x = jax.random.normal(jax.random.key(1), (3, 6))
    assert_allclose(layer(x), x @ layer.kernel[...] + layer.bias[...], atol=1e-6)
    train_nnx(layer)
    want = np.asarray(x, np.float64) @ weight64(layer, layer.dot_general)
    assert_allclose(layer(x), want, atol=2e-5)
    assert np.abs(layer(x) - x @ layer.kernel[...]).max() > 0.1


@pytest.mark.parametrize(("dtype", "exact"), [(jnp.float32, 5e-6), (jnp.bfloat16, 0.1)])
def test_nnx_merge_leaves_a_plain_layer_with_the_same_outputs(dtype, exact):
    plain = nnx.Linear(6, 5, param_dtype=dtype, rngs=nnx.Rngs(0))
    layer = train_nnx(adapted(plain, 3, 7.0))
    x = jax.random.normal(jax.random.key(1), (3, 6))
    before = layer(x)
    want = weight64(layer, layer.dot_general)
    nnx_loha.merge(layer)
    assert layer.dot_general is jax.lax.dot_general
    assert_allclose(nnx.jit(lambda layer, x: layer(x))(layer, x), before, atol=exact)
    assert_allclose(np.asarray(layer.kernel[...], np.float64), want, atol=exact)
    with pytest.raises(ValueError, match="merged already"):
        nnx_loha.merge(layer)


@pytest.mark.thorough
def test_add_loha_in_place_changes_no_output_and_no_path():
    model = Mixed(nnx.Rngs(0))
    before = model(TOKENS)
    paths = paths_of(model)
    query = model.attention.query
    assert sorted(add_loha(model, ".", rank=2, rngs=nnx.Rngs(1))) == LAYERS
    assert_allclose(model(TOKENS), before, atol=1e-5)
    assert model.attention.query is query
    assert paths <= paths_of(model)
    after = train_nnx(model)(TOKENS)
    assert np.abs(after - before).max() > 0.1
    nnx_loha.merge(model)
    assert_allclose(model(TOKENS), after, atol=2e-5)
    assert paths_of(model) == paths
    add_loha(model, "up", rank=2, rngs=nnx.Rngs(1))  # and it can be adapted again


def test_add_loha_takes_the_layers_of_the_rule():
    assert add_loha(Mixed(nnx.Rngs(0)), "query|value", rank=2, rngs=nnx.Rngs(1)) == [
        "attention/query",
        "attention/value",
    ]
    assert add_loha(Mixed(nnx.Rngs(0)), "^up$", rank=2, rngs=nnx.Rngs(1)) == ["up"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path_rule": "nothing", "rank": 2}, "matches none of the layers"),
        (
            {"path_rule": "conv|up", "rank": 9},
            "'conv'|'up'.*rank=9 is not possible.*choose 1 to 8",
        ),
    ],
)
def test_add_loha_refuses_and_leaves_the_model_alone(settings, message):
    model = Mixed(nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        add_loha(model, rngs=nnx.Rngs(1), **settings)
    assert not nnx.to_flat_state(nnx.state(model, LoHaParam))


def test_a_second_adapter_is_refused():
    model = Mixed(nnx.Rngs(0))
    add_loha(model, "up", rank=2, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="'up': the layer has an adapter already"):
        add_loha(model, ".", rank=2, rngs=nnx.Rngs(1))
    assert len(nnx.to_flat_state(nnx.state(model, LoHaParam))) == 4


def test_a_stack_of_layers_is_refused_but_a_stack_of_adapted_layers_works():
    make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
    with pytest.raises(ValueError, match="stack of layers"):
        add_loha(make(nnx.Rngs(0).split(3)), "", rank=2, rngs=nnx.Rngs(1))
    make = nnx.vmap(lambda rngs: adapted(nnx.Linear(4, 4, rngs=rngs), 2))
    stack = make(nnx.Rngs(0).split(3))
    y, _ = nnx.scan(lambda x, layer: (layer(x), None), in_axes=(nnx.Carry, 0))(
        jnp.ones((2, 4)), stack
    )
    assert y.shape == (2, 4)
    assert stack.dot_general.hada_w1_a.shape == (3, 4, 2)


def test_muon_takes_every_factor():
    model = Mixed(nnx.Rngs(0))
    add_loha(model, "attention|up", rank=2, rngs=nnx.Rngs(1))
    numbers = dimension_numbers(nnx.state(model, LoHaParam))
    found = jax.tree.leaves(
        numbers, is_leaf=lambda n: n is None or hasattr(n, "output_axis")
    )
    assert len(found) == 5 * 4
    assert all(n == optax.contrib.MuonDimensionNumbers(0, 1) for n in found)


def test_the_mask_is_true_for_adapters_alone():
    model = Mixed(nnx.Rngs(0))
    add_loha(model, "up", rank=2, rngs=nnx.Rngs(1))
    mask = nnx.to_flat_state(adapter_mask(nnx.state(model, nnx.Param)))
    trained = nnx.to_flat_state(nnx.state(model, LoHaParam))
    assert {path for path, value in mask if jax.tree.leaves(value) == [True]} == {
        path for path, _ in trained
    }


def test_one_parameter_without_a_name_is_no_adapter():
    (value,) = jax.tree.leaves(adapter_mask(nnx.Param(jnp.ones(2))))
    assert value is False


def test_qk_clip_refuses_a_frozen_kernel_under_an_adapter():
    model = Mixed(nnx.Rngs(0))
    sites = [mha_site()]
    add_loha(model, "query", rank=2, rngs=nnx.Rngs(1))
    maxima = {"attention": jnp.array([400.0, 1.0])}

    def clipped():
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return apply_qk_clip(params, maxima, sites, 100.0)

    with pytest.raises(ValueError, match=r"hada_w1_a.*Merge them into the kernels"):
        clipped()
    nnx_loha.merge(train_nnx(model))
    kernel = clipped()["attention"]["query"]["kernel"]
    assert_allclose(
        kernel[:, 0], model.attention.query.kernel[...][:, 0] / 2, rtol=1e-6
    )


@pytest.mark.parametrize(
    "conv",
    [
        {"padding": "CIRCULAR"},
        {
            "strides": 2,
            "padding": "VALID",
            "feature_group_count": 2,
            "kernel_dilation": 2,
        },
    ],
)
def test_nnx_convolution_is_the_one_with_the_adapted_kernel(conv):
    plain = nnx.Conv(6, 8, (3, 2), rngs=nnx.Rngs(0), **conv)
    layer = adapted(nnx.clone(plain), 2, 3.0)
    x = jax.random.normal(jax.random.key(1), (2, 7, 7, 6))
    assert_allclose(layer(x), plain(x), atol=1e-5)
    train_nnx(layer)
    plain.kernel[...] = jnp.asarray(
        weight64(layer, layer.conv_general_dilated), jnp.float32
    )
    assert_allclose(layer(x), plain(x), atol=1e-4)
    loss = lambda layer: jnp.sum(layer(x) ** 2)  # noqa: E731
    grads = jax.tree.leaves(nnx.grad(loss, argnums=nnx.DiffState(0, LoHaParam))(layer))
    assert len(grads) == 4
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in grads)


def test_masked_convolutions_and_batched_dense_layers_are_refused():
    with pytest.raises(ValueError, match="mask"):
        adapted(nnx.Conv(2, 2, (3,), mask=jnp.ones((3, 2, 2)), rngs=nnx.Rngs(0)), 1)
    function = lambda: jax.lax.dot_general  # noqa: E731
    own = nnx.LinearGeneral(3, 4, dot_general_cls=function, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="has a dot_general_cls"):
        add_loha(own, "", rank=1, rngs=nnx.Rngs(0))
    batched = nnx.LinearGeneral(3, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="batch of matrices"):
        add_loha(batched, "", rank=1, rngs=nnx.Rngs(0))


def test_half_precision_layers_return_their_own_dtype():
    layer = adapted(nnx.Linear(6, 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), 2)
    assert layer(jnp.ones((1, 6))).dtype == jnp.bfloat16
    assert layer.dot_general.hada_w1_a.dtype == jnp.float32


def test_an_adapter_multiplies_by_the_layers_own_function_which_merge_gives_back():
    def negative(*args, **settings):
        return -jax.lax.dot_general(*args, **settings)

    layer = nnx.Linear(3, 4, dot_general=negative, rngs=nnx.Rngs(0))
    train_nnx(adapted(layer, 1))
    want = -weight64(layer, layer.dot_general)
    assert_allclose(layer(jnp.eye(3)), want, atol=1e-5)
    nnx_loha.merge(layer)
    assert layer.dot_general is negative
    assert_allclose(layer(jnp.eye(3)), want, atol=1e-5)
