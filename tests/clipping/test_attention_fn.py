"""Flax's attention computes what it did, and reports each head's largest logit wherever it runs."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import muonjax
from muonjax._clipping.attention_fn import _visible_pairs
from tests.tools.tiers import thorough

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 8)), jnp.float32)
MASK = nn.make_causal_mask(X[..., 0])


@pytest.fixture(autouse=True)
def _no_deprecated_flax():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        yield


def want(params, x=X, y=None, rotate=lambda x: x, **settings):
    """The maxima from the parameters of an attention."""
    params = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    q, k = (
        rotate(jnp.einsum("...d,dhe->...he", z, params[n]["kernel"]) + params[n]["bias"])
        for n, z in (("query", x), ("key", x if y is None else y))
    )
    return muonjax.max_logits(q, k, **settings)


def linen(**settings):
    settings = {"attention_fn": muonjax.linen.attention_fn()} | settings
    return nn.MultiHeadDotProductAttention(4, bias_init=nn.initializers.normal(1.0), **settings)


def nnx_attention(**settings):
    settings = {"attention_fn": muonjax.nnx.attention_fn(), "decode": False} | settings
    return nnx.MultiHeadAttention(4, 8, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0), **settings)


# Linen.


@pytest.mark.parametrize("sow_weights", [False, True])
@pytest.mark.parametrize(
    "mask", [MASK, thorough(None), thorough(jnp.ones((2, 1, 1, 7), bool).at[1, ..., 4:].set(False))]
)
def test_linen_computes_and_reports(sow_weights, mask):
    plain, ours = linen(attention_fn=nn.dot_product_attention), linen()
    params = plain.init(jax.random.key(0), X)
    assert jax.tree.structure(params) == jax.tree.structure(ours.init(jax.random.key(0), X, sow_weights=True))
    expected = plain.apply(params, X, mask=mask)
    y, sown = ours.apply(params, X, mask=mask, sow_weights=sow_weights, mutable=["intermediates"])
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(ours.apply(params, X, mask=mask, sow_weights=sow_weights), expected)
    if not sow_weights:
        assert not jax.tree.leaves(sown)
        return
    assert list(sown["intermediates"]) == ["max_logits", "max_logits_axes"]  # not the whole attention weights
    np.testing.assert_allclose(
        sown["intermediates"]["max_logits"], want(params["params"], mask=mask), rtol=1e-6
    )


def test_linen_does_not_lose_the_mask():
    """Linen passes what it reads from the signature: **kwargs would drop the mask, and measure hidden pairs."""
    params = linen().init(jax.random.key(0), X)
    seen = [
        linen().apply(params, X, mask=mask, sow_weights=True, mutable=["intermediates"])[1]["intermediates"][
            "max_logits"
        ]
        for mask in (MASK, None)
    ]
    assert (seen[0] <= seen[1]).all()
    assert (seen[0] < seen[1]).any()


def test_linen_cross_attention():
    y = X[:, :3]
    params = linen().init(jax.random.key(0), X, y)
    _, sown = linen().apply(params, X, y, sow_weights=True, mutable=["intermediates"])
    np.testing.assert_allclose(sown["intermediates"]["max_logits"], want(params["params"], y=y), rtol=1e-6)


def test_linen_dropout_is_the_same():
    settings = {"dropout_rate": 0.5, "deterministic": False}
    plain, ours = linen(attention_fn=nn.dot_product_attention, **settings), linen(**settings)
    params = linen().init(jax.random.key(0), X)
    rngs = {"dropout": jax.random.key(1)}
    y, sown = ours.apply(params, X, rngs=rngs, sow_weights=True, mutable=["intermediates"])
    np.testing.assert_array_equal(y, plain.apply(params, X, rngs=rngs))
    np.testing.assert_allclose(sown["intermediates"]["max_logits"], want(params["params"]), rtol=1e-6)
    still = linen(dropout_rate=0.5, deterministic=True).apply(params, X)
    np.testing.assert_array_equal(still, linen().apply(params, X))


def test_linen_cache_is_the_same():
    plain, ours = linen(attention_fn=nn.dot_product_attention, decode=True), linen(decode=True)
    variables = ours.init(jax.random.key(0), X)
    token = X[:, :1]
    expected, cache = plain.apply(variables, token, mutable=["cache"])
    y, seen = ours.apply(variables, token, sow_weights=True, mutable=["cache", "intermediates"])
    np.testing.assert_array_equal(y, expected)
    jax.tree.map(np.testing.assert_array_equal, seen["cache"], cache["cache"])
    np.testing.assert_allclose(
        seen["intermediates"]["max_logits"], want(variables["params"], token), rtol=1e-6
    )


@pytest.mark.promotes("Flax's attention multiplies float32 weights by bfloat16 values")
def test_linen_half_precision():
    params = linen().init(jax.random.key(0), X)
    ours = linen(dtype=jnp.bfloat16, force_fp32_for_softmax=True)
    plain = linen(dtype=jnp.bfloat16, force_fp32_for_softmax=True, attention_fn=nn.dot_product_attention)
    y, sown = ours.apply(params, X, sow_weights=True, mutable=["intermediates"])
    np.testing.assert_array_equal(y, plain.apply(params, X))
    assert sown["intermediates"]["max_logits"].dtype == jnp.float32
    np.testing.assert_allclose(sown["intermediates"]["max_logits"], want(params["params"]), rtol=3e-2)


def test_linen_einsums_reach_the_base():
    calls = []

    def counted(*args, **kwargs):
        calls.append(args[0])
        return jnp.einsum(*args, **kwargs)

    module = linen(qk_attn_weights_einsum_cls=lambda: counted, attn_weights_value_einsum_cls=lambda: counted)
    module.apply(linen().init(jax.random.key(0), X), X)
    assert len(calls) == 2


def test_a_linen_module_called_twice_reports_the_larger():
    class Twice(nn.Module):
        def setup(self):
            self.attention = linen()

        def __call__(self, x):
            return self.attention(3 * x, sow_weights=True) + self.attention(x, sow_weights=True)

    params = Twice().init(jax.random.key(0), X)["params"]
    _, sown = Twice().apply({"params": params}, X, mutable=["intermediates"])
    both = [want(params["attention"], scale * X) for scale in (3, 1)]
    np.testing.assert_allclose(
        sown["intermediates"]["attention"]["max_logits"], jnp.maximum(*both), rtol=1e-6
    )


@pytest.mark.parametrize("wrap", [nn.remat, thorough(lambda module: module)])
def test_linen_scan_and_remat_report_a_layer_each(wrap):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + linen(name="attention")(x, mask=MASK, sow_weights=True), None

    model = nn.scan(
        wrap(Layer), variable_axes={"params": 0, "intermediates": 0}, split_rngs={"params": True}, length=3
    )()
    params = model.init(jax.random.key(0), X, None)["params"]
    sown = jax.jit(lambda p: model.apply({"params": p}, X, None, mutable=["intermediates"])[1])(params)
    got = sown["intermediates"]["attention"]["max_logits"]
    assert got.shape == (3, 4)
    first = jax.tree.map(lambda p: p[0], params["attention"])
    np.testing.assert_allclose(got[0], want(first, is_causal=True), rtol=1e-5)


def test_rematerialisation_does_not_measure_twice():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return linen(attention_fn=muonjax.linen.attention_fn(block_k=2), name="attention")(
                x, sow_weights=True
            )

    model = nn.remat(Layer)()
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]

    def loss_fn(params):
        y, sown = model.apply({"params": params}, X, mutable=["intermediates"])
        return (y**2).sum(), sown

    text = jax.jit(jax.grad(loss_fn, has_aux=True)).lower(params).compile().as_text()
    assert len(re.findall(r" while\(", text)) == 1  # the loop over blocks, once


# NNX.


@pytest.mark.parametrize("mask", [MASK, thorough(None)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("key_heads", [2, thorough(4)])
def test_nnx_computes_and_reports(mask, is_causal, key_heads):
    plain = nnx_attention(attention_fn=nnx.dot_product_attention, num_kv_heads=key_heads)
    ours = nnx_attention(num_kv_heads=key_heads)
    expected = plain(X, mask=mask, is_causal=is_causal)
    forward = nnx.capture(lambda m: m(X, mask=mask, is_causal=is_causal, sow_weights=True), nnx.Intermediate)
    y, sown = forward(ours)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(ours(X, mask=mask, is_causal=is_causal), expected)
    assert list(sown) == ["max_logits", "max_logits_axes"]
    expected = want(nnx.state(ours, nnx.Param), mask=mask, is_causal=is_causal)
    np.testing.assert_allclose(sown["max_logits"][...], expected, rtol=1e-6)


def test_nnx_dropout_is_the_same():
    settings = {"dropout_rate": 0.5, "deterministic": False}
    plain = nnx_attention(attention_fn=nnx.dot_product_attention, **settings)
    y, sown = nnx.capture(lambda m: m(X, sow_weights=True), nnx.Intermediate)(nnx_attention(**settings))
    np.testing.assert_array_equal(y, plain(X))
    np.testing.assert_allclose(sown["max_logits"][...], want(nnx.state(plain, nnx.Param)), rtol=1e-6)


def test_nnx_cache_is_the_same():
    plain = nnx_attention(attention_fn=nnx.dot_product_attention, decode=True)
    ours = nnx_attention(decode=True)
    for module in (plain, ours):
        module.init_cache(X.shape)
    for t in range(3):
        expected = plain(X[:, t : t + 1])
        y, sown = nnx.capture(lambda m: m(X[:, t : t + 1], sow_weights=True), nnx.Intermediate)(ours)  # noqa: B023
        np.testing.assert_array_equal(y, expected)
    # The last query, and the keys that are in the cache: no empty place of it.
    expected = want(nnx.state(ours, nnx.Param), X[:, 2:3], X[:, :3])
    np.testing.assert_allclose(sown["max_logits"][...], expected, rtol=1e-6)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
            4,
            8,
            decode=False,
            attention_fn=muonjax.nnx.attention_fn(),
            bias_init=nnx.initializers.normal(1.0),
            rngs=rngs,
        )

    def __call__(self, x):
        return x + self.attention(x, is_causal=True, sow_weights=True)


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=(0,), out_axes=0)
def stack_of_layers(rngs):
    return Layer(rngs)


@pytest.mark.parametrize("how", ["remat scan", *map(thorough, ["scan", "vmap"])])
def test_nnx_stacks_report_a_layer_each(how):
    layers = stack_of_layers(nnx.Rngs(0))

    def forward(layers):
        if how == "vmap":
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None), out_axes=0)(layers, X)
        call = nnx.remat(lambda layer, x: layer(x)) if "remat" in how else lambda layer, x: layer(x)
        return nnx.scan(lambda x, layer: call(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            X, layers
        )

    @nnx.jit
    def gradients(layers):
        def loss_fn(layers):
            y, sown = nnx.capture(forward, nnx.Intermediate)(layers)
            return (y**2).sum(), sown

        return nnx.grad(loss_fn, has_aux=True)(layers)[1]

    got = gradients(layers)["attention"]["max_logits"][...]
    assert got.shape == (3, 4)
    params = nnx.to_pure_dict(nnx.state(layers.attention, nnx.Param))
    for i in range(3 if how == "vmap" else 1):
        layer = jax.tree.map(lambda p: p[i], params)  # noqa: B023
        np.testing.assert_allclose(got[i], want(layer, is_causal=True), rtol=1e-5)
    clipped = muonjax.apply_qk_clip(
        nnx.state(layers, nnx.Param), gradients(layers), [muonjax.mha_site()], 1.0
    )
    assert jax.tree.structure(clipped) == jax.tree.structure(nnx.state(layers, nnx.Param))


def test_an_nnx_module_called_twice_reports_the_larger():
    module = nnx_attention()

    def twice(module):
        return module(3 * X, sow_weights=True) + module(X, sow_weights=True)

    _, sown = nnx.capture(twice, nnx.Intermediate)(module)
    both = [want(nnx.state(module, nnx.Param), scale * X) for scale in (3, 1)]
    np.testing.assert_allclose(sown["max_logits"][...], jnp.maximum(*both), rtol=1e-6)


# Settings.


def turn(x):
    """A rotation by position of pairs of features."""
    a, b = x[..., 0], x[..., 1]
    angle = jnp.broadcast_to(jnp.arange(x.shape[-3], dtype=x.dtype)[:, None], a.shape)
    return jnp.stack([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def test_rotation_comes_before_the_measure():
    params = linen().init(jax.random.key(0), X)
    rotated = linen(attention_fn=muonjax.linen.attention_fn(rotate=turn))
    y, sown = rotated.apply(params, X, sow_weights=True, mutable=["intermediates"])
    got = sown["intermediates"]["max_logits"]
    np.testing.assert_allclose(got, want(params["params"], rotate=turn), rtol=1e-6)
    assert np.abs(got - want(params["params"])).max() > 0.1

    def by_hand(query, key, value):
        return nn.dot_product_attention(turn(query), turn(key), value)

    np.testing.assert_allclose(y, linen(attention_fn=by_hand).apply(params, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fixed", [{"scale": 0.1}, {"local_window_size": (2, 0)}, {"is_causal": True}])
@pytest.mark.parametrize("said_twice", [False, thorough(True)])
def test_settings_of_the_base(fixed, said_twice):
    base = functools.partial(jax.nn.dot_product_attention, **fixed)
    again = fixed if said_twice and "is_causal" not in fixed else {}
    ours = nnx_attention(attention_fn=muonjax.nnx.attention_fn(base, **again))
    _, sown = nnx.capture(lambda m: m(X, sow_weights=True), nnx.Intermediate)(ours)
    params = nnx.state(ours, nnx.Param)
    np.testing.assert_allclose(sown["max_logits"][...], want(params, **fixed), rtol=1e-6)
    assert (want(params, **fixed) != want(params)).any()


def test_settings_of_a_base_that_hides_them():
    def base(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, scale=0.1, local_window_size=(2, 0))

    settings = {"scale": 0.1, "local_window_size": (2, 0)}
    ours = nnx_attention(attention_fn=muonjax.nnx.attention_fn(base, **settings))
    _, sown = nnx.capture(lambda m: m(X, sow_weights=True), nnx.Intermediate)(ours)
    expected = want(nnx.state(ours, nnx.Param), **settings)
    np.testing.assert_allclose(sown["max_logits"][...], expected, rtol=1e-6)


def dot_product_attention_with_rope(query, key, value, *, rope, **kwargs):
    """As Flax has one from 0.12.12 on."""


def capped_attention(query, key, value, *, logits_soft_cap=None, **kwargs):
    """As Tokamax's, with the cap of Gemma 2."""


@pytest.mark.parametrize("wrap", [muonjax.linen.attention_fn, muonjax.nnx.attention_fn])
def test_bases_that_are_refused(wrap):
    with pytest.raises(ValueError, match=r"rotates queries and keys after.*rotate=fn"):
        wrap(functools.partial(dot_product_attention_with_rope, rope=turn))
    with pytest.raises(ValueError, match=r"attention_fn: scale=0\.2 contradicts.*has 0\.1"):
        wrap(functools.partial(jax.nn.dot_product_attention, scale=0.1), scale=0.2)


def always_capped_attention(query, key, value, *, attn_logit_softcapping=50.0):
    """With its cap as a default, that nobody passes."""


@pytest.mark.parametrize("wrap", [muonjax.linen.attention_fn, muonjax.nnx.attention_fn])
def test_capped_logits_are_refused(wrap):
    for base, cap in (
        (functools.partial(capped_attention, logits_soft_cap=50.0), "logits_soft_cap"),
        (functools.partial(functools.partial(lambda q, k, v, **kwargs: v, softcap=50.0)), "softcap"),
        (always_capped_attention, "attn_logit_softcapping"),
    ):
        with pytest.raises(ValueError, match=rf"attention_fn: base=.*: {cap}=50\.0 caps.*Leave the cap out"):
            wrap(base)
    wrap(functools.partial(capped_attention, logits_soft_cap=None))
    wrap(functools.partial(always_capped_attention, attn_logit_softcapping=0.0))  # off, as in FlashAttention
    wrap(lambda query, key, value, capture=True, capacity=2: value)


def test_defaults_of_the_base_are_measured():
    def base(query, key, value, scale=0.1, local_window_size=(2, 0)):
        return jax.nn.dot_product_attention(
            query, key, value, scale=scale, local_window_size=local_window_size
        )

    ours = nnx_attention(attention_fn=muonjax.nnx.attention_fn(base))
    _, sown = nnx.capture(lambda m: m(X, sow_weights=True), nnx.Intermediate)(ours)
    expected = want(nnx.state(ours, nnx.Param), scale=0.1, local_window_size=(2, 0))
    np.testing.assert_allclose(sown["max_logits"][...], expected, rtol=1e-6)


def test_a_base_that_would_lose_an_argument():
    params = linen().init(jax.random.key(0), X)
    maskless = linen(attention_fn=muonjax.linen.attention_fn(lambda query, key, value: value))
    maskless.apply(params, X)
    with pytest.raises(TypeError, match=r"takes no \['mask'\], which Flax passed"):
        maskless.apply(params, X, mask=MASK)
    with pytest.raises(TypeError, match="is_causal"):
        nnx_attention(attention_fn=muonjax.nnx.attention_fn(lambda query, key, value: value))(
            X, is_causal=True
        )


# Pairs that the base hides by itself.

PADDED = jnp.ones((2, 1, 1, 7), bool).at[1, ..., 4:].set(False)
LENGTHS = jnp.asarray([7, 4])


def measured(base, **call):
    ours = nnx_attention(attention_fn=muonjax.nnx.attention_fn(base))
    _, sown = nnx.capture(lambda m: m(X, sow_weights=True, **call), nnx.Intermediate)(ours)
    return sown["max_logits"][...], nnx.state(ours, nnx.Param)


@pytest.mark.parametrize(
    ("settings", "mask"),
    [
        ({"mask": PADDED}, PADDED),
        ({"key_value_seq_lengths": LENGTHS}, PADDED),
        ({"query_seq_lengths": LENGTHS}, jnp.swapaxes(PADDED, -1, -2)),
        ({"bias": jnp.where(PADDED, 0.0, jnp.finfo(jnp.float32).min)}, PADDED),
        ({"bias": jnp.where(PADDED, 0.0, -1e10)}, PADDED),
        pytest.param(
            {"bias": jnp.where(PADDED, 0.0, jnp.finfo(jnp.float16).min).astype(jnp.float16)},
            PADDED,
            marks=pytest.mark.promotes("Flax's attention adds a float16 bias to float32 logits"),
        ),
        ({"mask": PADDED, "query_seq_lengths": LENGTHS}, PADDED & jnp.swapaxes(PADDED, -1, -2)),
        ({"bias": jnp.where(PADDED, 0.0, -100.0)}, None),  # a bias that hides nothing, as ALiBi's
    ],
)
def test_pairs_that_the_base_hides_are_not_measured(settings, mask):
    got, params = measured(functools.partial(jax.nn.dot_product_attention, **settings))
    np.testing.assert_allclose(got, want(params, mask=mask), rtol=1e-6)
    if mask is not None:
        assert (want(params, mask=mask) != want(params)).any()


def test_a_mask_that_flax_passes_takes_the_place_of_the_base_s():
    got, params = measured(functools.partial(jax.nn.dot_product_attention, mask=PADDED), mask=MASK > 0)
    np.testing.assert_allclose(got, want(params, is_causal=True), rtol=1e-6)


@pytest.mark.parametrize("name", ["segment_ids", "attention_mask", "sliding_window", "kv_lengths"])
def test_bases_that_hide_pairs_in_another_way_are_refused(name):
    def base(query, key, value, **kwargs):
        return jax.nn.dot_product_attention(query, key, value)

    with pytest.raises(ValueError, match=rf"{name}=.* hides pairs from the softmax"):
        muonjax.nnx.attention_fn(functools.partial(base, **{name: jnp.ones(2)}))
    muonjax.nnx.attention_fn(functools.partial(base, **{name: None}))


def test_a_traced_is_causal_is_refused():
    """In our words; Flax 0.12.12 asks for its value first."""
    with pytest.raises(TypeError, match=r"is_causal.* known while tracing|boolean conversion of traced"):
        jax.jit(lambda causal: measured(jax.nn.dot_product_attention, is_causal=causal)[0])(True)


# Slips.


def test_forgotten_parentheses():
    plain = nn.MultiHeadDotProductAttention(4, attention_fn=muonjax.linen.attention_fn)
    with pytest.raises(
        TypeError, match=r"write attention_fn=muonjax.linen.attention_fn\(\), with parentheses"
    ):
        plain.init(jax.random.key(0), X)
    with pytest.raises(TypeError, match=r"write attention_fn=muonjax.nnx.attention_fn\(\), with parentheses"):
        nnx_attention(attention_fn=muonjax.nnx.attention_fn)(X)


def test_nothing_is_sown_outside_of_capture():
    """Flax warns of that, and here a warning is an error; nor are logits made for nothing."""
    ours = nnx_attention()
    ours(X, sow_weights=True)
    plain = nnx_attention(attention_fn=nnx.dot_product_attention)
    programs = [
        jax.make_jaxpr(lambda x, m=m, s=s: m(x, sow_weights=s))(X) for m, s in ((ours, True), (plain, False))
    ]
    assert len(programs[0].eqns) == len(programs[1].eqns)


def test_all_that_hides_pairs_counts_whatever_its_rank():
    rng = np.random.default_rng(0)
    mask, bias = rng.random((5, 7)) < 0.5, np.where(rng.random((3, 1, 7)) < 0.5, -np.inf, 1.0)
    keys, queries = np.array([3, 7]), np.array([5, 2])
    arguments = {"mask": mask, "bias": bias, "key_value_seq_lengths": keys, "query_seq_lengths": queries}
    expected = mask & (bias > 0) & (np.arange(7) < keys[:, None, None, None])
    expected = expected & (np.arange(5)[:, None] < queries[:, None, None, None])
    got = _visible_pairs(jnp.zeros((2, 5, 3, 4)), jnp.zeros((2, 7, 3, 4)), arguments)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("module", [muonjax.linen, muonjax.nnx], ids=["linen", "nnx"])
def test_arguments_by_place_and_by_name_reach_the_base(module):
    """Those of dropout also where they are Flax's defaults, for the base may have others."""
    got = {}

    def base(
        query, key, value, bias=None, mask=None, broadcast_dropout=False, dropout_rate=0.0, deterministic=True
    ):
        got.update(bias=bias, dropout=(broadcast_dropout, dropout_rate, deterministic))
        return value

    x, bias = jnp.ones((1, 2, 1, 4)), jnp.zeros((1, 1, 2, 2))
    module.attention_fn(base)(x, x, x, bias, dropout_rate=0.5, broadcast_dropout=True, deterministic=False)
    assert got["bias"] is bias
    assert got["dropout"] == (True, 0.5, False)
