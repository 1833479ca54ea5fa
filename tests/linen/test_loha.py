"""LoHa adapters in Linen: the start, merging, training adapters alone, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from muonjax import adapter_mask, apply_qk_clip, dimension_numbers, mha_site
from muonjax import linen as linen_loha
from muonjax._adapters.config import LoHaConfig
from muonjax.linen._loha import LoHa


def disturb(tree, seed=0):
    """Every leaf moved, as training would."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, moved)


class Network(nn.Module):
    """The same parameters' paths with and without adapters."""

    adapted: bool = True
    decompose: bool = False
    rank_dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        settings = {
            "rank": 2,
            "alpha": 5.0,
            "decompose": self.decompose,
            "rank_dropout": self.rank_dropout,
        }
        dense = functools.partial(linen_loha.LoHaDense, **settings) if self.adapted else nn.Dense
        conv = functools.partial(linen_loha.LoHaConv, **settings) if self.adapted else nn.Conv
        x = dense(8, name="up")(x)
        qkv = linen_loha.loha(**settings) if self.adapted else None
        x = nn.MultiHeadAttention(num_heads=2, qkv_dot_general_cls=qkv)(x)
        return nn.LayerNorm()(conv(6, (3,), strides=2)(x))


X = jax.random.normal(jax.random.key(5), (2, 5, 8))
LINEN_LAYERS = {"Conv_0", "up"} | {f"MultiHeadAttention_0/{name}" for name in ("query", "key", "value")}


def adopted(decompose=False):
    plain = Network(adapted=False).init(jax.random.key(0), X)["params"]
    params = Network(decompose=decompose).init(jax.random.key(1), X)["params"]
    return plain, linen_loha.adopt(params, plain)


@pytest.mark.thorough
@pytest.mark.parametrize("decompose", [False, True])
def test_linen_adopts_trained_parameters_and_starts_as_they_are(decompose):
    plain, params = adopted(decompose)
    want = Network(adapted=False).apply({"params": plain}, X)
    np.testing.assert_allclose(Network(decompose=decompose).apply({"params": params}, X), want, atol=2e-5)
    flat = flatten_dict(params, sep="/")
    assert {path.removesuffix("/loha/hada_w1_a") for path in flat if "hada_w1_a" in path} == LINEN_LAYERS
    np.testing.assert_array_equal(params["up"]["kernel"], plain["up"]["kernel"])


@pytest.mark.thorough
@pytest.mark.parametrize("decompose", [False, True])
def test_linen_merges_into_the_plain_model(decompose):
    plain, params = adopted(decompose)
    adapters, frozen = linen_loha.split_adapters(params)
    params = linen_loha.join_adapters(disturb(adapters), frozen)
    apart = Network(decompose=decompose).apply({"params": params}, X)
    merged = linen_loha.merge(params)
    assert jax.tree.structure(merged) == jax.tree.structure(plain)
    np.testing.assert_allclose(Network(adapted=False).apply({"params": merged}, X), apart, atol=5e-5)
    assert np.abs(merged["up"]["kernel"] - plain["up"]["kernel"]).max() > 0.1
    with pytest.raises(ValueError, match="merged already"):
        linen_loha.merge(merged)
    if decompose:
        with pytest.raises(ValueError, match="needs the norms"):
            linen_loha.unmerge(merged, params)
        return
    again = linen_loha.unmerge(merged, params)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_linen_adopt_names_what_does_not_fit():
    plain, params = adopted()
    wrong = {**plain, "up": {"kernel": jnp.ones((3, 8)), "extra": jnp.ones(1)}}
    with pytest.raises(
        ValueError, match=r"up/bias is only in one; up/extra is only in one; up/kernel has shape"
    ):
        linen_loha.adopt(params, wrong)


def test_a_mismatch_in_many_layers_names_the_first():
    _, params = adopted()
    with pytest.raises(ValueError, match=r"Conv_0/bias is only in one; .* and \d,\d{3} more\.") as error:
        linen_loha.adopt(params, {f"layer_{i}": {"kernel": jnp.ones(1)} for i in range(3000)})
    assert len(str(error.value)) < 2000


@pytest.mark.thorough
def test_only_adapters_train_in_linen_by_a_mask_and_by_splitting():
    _, params = adopted()
    network = Network()

    @jax.jit
    def loss(params):
        return jnp.mean(network.apply({"params": params}, X)[..., 0] ** 2)

    mask = adapter_mask(params)
    frozen = jax.tree.map(lambda trains: not trains, mask)
    tx = optax.chain(optax.masked(optax.adam(0.1), mask), optax.masked(optax.set_to_zero(), frozen))
    state, now = tx.init(params), params
    for _ in range(2):
        updates, state = tx.update(jax.grad(loss)(now), state, now)
        now = optax.apply_updates(now, updates)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), params, now)
    assert moved == mask
    assert sum(jax.tree.leaves(mask)) == 4 * len(LINEN_LAYERS)

    adapters, rest = linen_loha.split_adapters(params)
    grads = jax.grad(lambda adapters: loss(linen_loha.join_adapters(adapters, rest)))(adapters)
    whole = jax.grad(loss)(params)
    np.testing.assert_allclose(
        grads["up"]["loha"]["hada_w2_b"], whole["up"]["loha"]["hada_w2_b"], rtol=1e-4, atol=1e-6
    )
    assert not any(
        re.search("kernel|scale", jax.tree_util.keystr(p)) for p, _ in jax.tree.leaves_with_path(grads)
    )


def test_qk_clip_refuses_a_frozen_kernel_under_an_adapter():
    _, params = adopted()
    maxima = {"MultiHeadAttention_0": {"max_logits": jnp.array([400.0, 1.0])}}
    with pytest.raises(ValueError, match=r"hada_w1_a.*Merge them into the kernels"):
        apply_qk_clip(params, maxima, [mha_site()], 100.0)
    apply_qk_clip(linen_loha.merge(params), maxima, [mha_site()], 100.0)


def test_linen_routing_knows_the_factors():
    layer = linen_loha.LoHaConv(8, (3,), rank=2, decompose=True)
    numbers = dimension_numbers(layer.init(jax.random.key(0), X)["params"])["loha"]
    assert numbers["hada_w1_a"] == numbers["hada_w2_b"] == optax.contrib.MuonDimensionNumbers(0, 1)
    assert numbers["dora_scale"] is numbers["hada_scale"] is None


@pytest.mark.thorough
def test_linen_rank_dropout_follows_the_dropout_stream():
    params = Network(rank_dropout=0.5).init(jax.random.key(0), X)["params"]
    adapters, frozen = linen_loha.split_adapters(params)
    network, params = Network(rank_dropout=0.5), linen_loha.join_adapters(disturb(adapters), frozen)
    whole = network.apply({"params": params}, X)
    np.testing.assert_allclose(whole, Network().apply({"params": params}, X), atol=1e-6)
    dropped = network.apply({"params": params}, X, rngs={"dropout": jax.random.key(1)})
    assert np.abs(dropped - whole).max() > 1e-2


class Stack(nn.Module):
    """Three layers under `nn.scan`."""

    adapted: bool
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        layer = (
            linen_loha.LoHaDense(8, rank=2, alpha=3.0, decompose=True, name="up")
            if self.adapted
            else nn.Dense(8, name="up")
        )
        scan = nn.scan(
            lambda layer, x, _: (jnp.tanh(layer(x)), None),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=3,
        )
        return scan(layer, x, None)[0]


@pytest.mark.thorough
def test_linen_scanned_layers_merge_as_a_stack():
    plain = Stack(False).init(jax.random.key(1), X)["params"]
    params = Stack(True).init(jax.random.key(0), X)["params"]
    adapters, frozen = linen_loha.split_adapters(params)
    assert adapters["up"]["loha"]["hada_w1_a"].shape == (3, 8, 2)
    numbers = dimension_numbers(params)["up"]["loha"]
    assert numbers["hada_w1_a"] == numbers["hada_w2_b"] == optax.contrib.MuonDimensionNumbers(1, 2)
    start = Stack(True).apply({"params": linen_loha.adopt(params, plain)}, X)
    np.testing.assert_allclose(start, Stack(False).apply({"params": plain}, X), atol=1e-5)
    params = linen_loha.join_adapters(disturb(adapters), frozen)
    apart = Stack(True).apply({"params": params}, X)
    np.testing.assert_allclose(Stack(False).apply({"params": linen_loha.merge(params)}, X), apart, atol=1e-5)


def test_linen_stacks_along_another_axis_are_refused():
    params = jax.eval_shape(Stack(True, axis=-1).init, jax.random.key(0), X)["params"]
    with pytest.raises(ValueError, match="merge: the adapter at 'up' is stacked along another axis"):
        linen_loha.merge(params)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: linen_loha.LoHaDense(4, rank=5), "choose 1 to 4"),
        (lambda: linen_loha.LoHaDense(4, rank=0), "rank=0"),
        (lambda: linen_loha.LoHaDense(4, rank=2, rank_dropout=-0.1), "at least 0"),
        (
            lambda: nn.Dense(4, dot_general_cls=functools.partial(LoHa, LoHaConfig(2, tucker=True))),
            "convolutions",
        ),
    ],
)
def test_linen_bad_settings_are_named(layer, message):
    with pytest.raises(ValueError, match=message):
        layer().init(jax.random.key(0), jnp.ones((1, 8)))


def test_linen_split_and_unmerge_need_adapters():
    plain, params = adopted()
    with pytest.raises(ValueError, match="no LoHa adapter"):
        linen_loha.split_adapters(plain)
    with pytest.raises(ValueError, match="merged parameters without"):
        linen_loha.unmerge(params, params)
    alone, _ = linen_loha.split_adapters(params)
    with pytest.raises(ValueError, match="up have no hada_scale; join_adapters"):
        linen_loha.merge(alone)
    with pytest.raises(ValueError, match="mask"):
        linen_loha.LoHaConv(2, (3,), rank=1, mask=jnp.ones((3, 2, 2)))
