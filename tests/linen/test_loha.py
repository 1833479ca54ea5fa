"""LoHa adapters in Linen: the start, merging, training adapters alone, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from numpy.testing import assert_allclose

from muonjax import adapter_mask, dimension_numbers
from muonjax import linen as linen_loha
from tests.tools.oracles import disturbed


class Network(nn.Module):
    """The same parameters' paths with and without adapters."""

    adapted: bool = True

    @nn.compact
    def __call__(self, x):
        loha = linen_loha.loha(2, alpha=5.0) if self.adapted else None
        x = nn.Dense(8, name="up", dot_general_cls=loha)(x)
        x = nn.MultiHeadAttention(num_heads=2, qkv_dot_general_cls=loha)(x)
        conv = nn.Conv(6, (3,), strides=2, conv_general_dilated_cls=loha)
        return nn.LayerNorm()(conv(x))


X = jax.random.normal(jax.random.key(5), (2, 5, 8))
LINEN_LAYERS = {"Conv_0", "up"} | {
    f"MultiHeadAttention_0/{name}" for name in ("query", "key", "value")
}


def adapted_parameters():
    """The parameters of the plain model, and those of the adapted one with them in it."""
    plain = Network(adapted=False).init(jax.random.key(0), X)["params"]
    params = Network().init(jax.random.key(1), X)["params"]
    return plain, unflatten_dict(flatten_dict(params) | flatten_dict(plain))


def trained(params):
    """Every factor of every adapter moved."""
    mask = adapter_mask(params)
    return jax.tree.map(
        lambda trains, a, b: b if trains else a, mask, params, disturbed(params)
    )


@pytest.mark.thorough
def test_linen_starts_as_the_trained_model_and_merges_into_it():
    plain, params = adapted_parameters()
    want = Network(adapted=False).apply({"params": plain}, X)
    assert_allclose(Network().apply({"params": params}, X), want, atol=2e-5)
    flat = flatten_dict(params, sep="/")
    assert {
        path.removesuffix("/loha/hada_w1_a") for path in flat if "hada_w1_a" in path
    } == LINEN_LAYERS
    params = trained(params)
    adapted = Network().apply({"params": params}, X)
    merged = linen_loha.merge(params)
    assert jax.tree.structure(merged) == jax.tree.structure(plain)
    assert_allclose(
        Network(adapted=False).apply({"params": merged}, X), adapted, atol=5e-5
    )
    assert np.abs(merged["up"]["kernel"] - plain["up"]["kernel"]).max() > 0.1
    with pytest.raises(ValueError, match="merged already"):
        linen_loha.merge(merged)


def test_the_mask_is_true_for_the_factors_alone():
    _, params = adapted_parameters()
    mask = flatten_dict(adapter_mask(params))
    factors = {path for path in mask if path[-1].startswith("hada_w")}
    assert {path for path, trains in mask.items() if trains} == factors
    assert len(factors) == 4 * len(LINEN_LAYERS)


def test_linen_routing_knows_the_factors():
    layer = nn.Conv(8, (3,), conv_general_dilated_cls=linen_loha.loha(2))
    numbers = dimension_numbers(layer.init(jax.random.key(0), X)["params"])["loha"]
    assert (
        numbers["hada_w1_a"]
        == numbers["hada_w2_b"]
        == optax.contrib.MuonDimensionNumbers(0, 1)
    )
    assert numbers["hada_scale"] is None


class Stack(nn.Module):
    """Three layers under `nn.scan`."""

    adapted: bool
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        loha = linen_loha.loha(2, alpha=3.0) if self.adapted else None
        layer = nn.Dense(8, name="up", dot_general_cls=loha)
        scan = nn.scan(
            lambda layer, x, _: (jnp.tanh(layer(x)), None),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=3,
        )
        return scan(layer, x, None)[0]


@pytest.mark.thorough
def test_linen_scanned_layers_merge_as_a_stack():
    params = Stack(True).init(jax.random.key(0), X)["params"]
    assert params["up"]["loha"]["hada_w1_a"].shape == (3, 8, 2)
    params = trained(params)
    adapted = Stack(True).apply({"params": params}, X)
    assert_allclose(
        Stack(False).apply({"params": linen_loha.merge(params)}, X),
        adapted,
        atol=1e-5,
    )


def test_linen_stacks_along_another_axis_are_refused():
    params = jax.eval_shape(Stack(True, axis=-1).init, jax.random.key(0), X)["params"]
    with pytest.raises(
        ValueError,
        match="merge: the adapter at 'up': ",
    ):
        linen_loha.merge(params)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.Dense(4, dot_general_cls=linen_loha.loha(5)), "choose 1 to 4"),
        (lambda: linen_loha.loha(0), "rank=0"),
        (lambda: linen_loha.loha(2, alpha=-1.0), "alpha=-1.0.* must be positive"),
        (
            lambda: nn.Conv(
                2,
                (3,),
                mask=jnp.ones((3, 8, 2)),
                conv_general_dilated_cls=linen_loha.loha(1),
            ),
            "mask",
        ),
    ],
)
def test_linen_bad_settings_are_named(layer, message):
    with pytest.raises(ValueError, match=message):
        layer().init(jax.random.key(0), jnp.ones((1, 8)))


def test_linen_merge_needs_the_scales():
    alone = {
        "up": {
            "kernel": jnp.ones((2, 2)),
            "loha": {"hada_w1_a": jnp.ones((2, 1))},
        }
    }
    with pytest.raises(ValueError, match="no hada_scale at up"):
        linen_loha.merge(alone)
