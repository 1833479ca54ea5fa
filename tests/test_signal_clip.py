import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import muonjax
from muonjax._signal_clip import clip_factor

SITE = muonjax.mha_site()


def normal(*shape, seed=0, scale=1.0):
    return scale * jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def attention(heads=4, key_heads=4, stack=(), seed=0):
    tree = {
        side: {
            "kernel": normal(*stack, 8, h, 4, seed=seed + i, scale=2.0),
            "bias": normal(*stack, h, 4, seed=seed + i + 7),
        }
        for i, (side, h) in enumerate((("query", heads), ("key", key_heads), ("value", key_heads)))
    }
    return {"layer": {"attention": tree}, "mlp": {"kernel": normal(8, 8)}}


def logits(tree, x):
    q, k = (
        jnp.einsum("btd,dhe->bthe", x, tree["layer"]["attention"][s]["kernel"])
        + tree["layer"]["attention"][s]["bias"]
        for s in ("query", "key")
    )
    return muonjax.max_logits(q, k, is_causal=True)


X = normal(2, 9, 8, seed=42)
NAME = "layer/attention"


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (4, 1)])
def test_one_clip_brings_every_head_to_the_threshold(heads, key_heads):
    tree = attention(heads, key_heads)
    before = logits(tree, X)
    threshold = float(np.median(before))
    clipped = muonjax.apply_qk_clip(tree, {NAME: before}, [SITE], threshold)
    after = logits(clipped, X)
    assert (after <= threshold * (1 + 3e-6)).all()
    innocent = np.asarray(before) <= threshold
    np.testing.assert_array_equal(
        clipped["layer"]["attention"]["query"]["kernel"][:, innocent],
        tree["layer"]["attention"]["query"]["kernel"][:, innocent],
    )
    np.testing.assert_allclose(np.asarray(after)[~innocent], threshold, rtol=1e-5)
    for leaf, other in zip(
        jax.tree.leaves(clipped["layer"]["attention"]["value"]),
        jax.tree.leaves(tree["layer"]["attention"]["value"]),
        strict=True,
    ):
        np.testing.assert_array_equal(leaf, other)


def test_shared_keys_stay_untouched():
    tree = attention(4, 2)
    clipped = muonjax.apply_qk_clip(tree, {NAME: logits(tree, X)}, [SITE], 0.1)
    np.testing.assert_array_equal(
        clipped["layer"]["attention"]["key"]["kernel"], tree["layer"]["attention"]["key"]["kernel"]
    )


def test_biases_scale_with_their_kernels():
    """Kernel-only clipping leaves logits above the threshold: every implementation that was read does that."""
    tree = attention()
    clipped = muonjax.apply_qk_clip(tree, {NAME: logits(tree, X)}, [SITE], 1.0)
    kernels_only = jax.tree.map(lambda x: x, clipped)
    for side in ("query", "key"):
        kernels_only["layer"]["attention"][side]["bias"] = tree["layer"]["attention"][side]["bias"]
    assert logits(clipped, X).max() <= 1 + 3e-6
    assert logits(kernels_only, X).max() > 1.1


@pytest.mark.parametrize("bad", [-5.0, 0.0, -np.inf, np.inf, np.nan])
def test_factor_is_one_wherever_the_signal_says_nothing(bad):
    """A negative maximum gave NaN weights elsewhere (sqrt of a negative ratio)."""
    np.testing.assert_array_equal(clip_factor(jnp.asarray([bad, 200.0, 50.0]), 100.0), [1.0, 0.5, 1.0])


def update(tx, state, tree, statistics, scale=0.01):
    grads = jax.tree.map(lambda p: scale * jnp.ones_like(p), tree)
    return jax.jit(tx.update)(grads, state, tree, max_logits=statistics)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_below_the_threshold_are_bit_identical(dtype):
    tree = jax.tree.map(lambda p: p.astype(dtype), attention())
    tx = muonjax.qk_clip(100.0, [SITE])
    statistics = {NAME: jnp.asarray([400.0, 99.0, -3.0, 100.0])}
    updates, _ = update(tx, tx.init(tree), tree, statistics)
    for side in ("query", "key"):
        for name in ("kernel", "bias"):
            u = updates["layer"]["attention"][side][name]
            np.testing.assert_array_equal(u[..., 1:, :], jnp.full_like(u[..., 1:, :], 0.01))
            p = tree["layer"]["attention"][side][name]
            new = (p + u)[..., 0, :].astype(jnp.float32)
            want = 0.5 * (p.astype(jnp.float32) + 0.01)[..., 0, :]
            np.testing.assert_allclose(new, want, rtol=0.02 if dtype == jnp.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_layers_clip_per_layer_and_head(axis):
    """One hot head must not clip that head in every scanned layer."""
    tree = attention(stack=(3,))
    if axis == 1:
        tree = jax.tree.map(lambda p: jnp.moveaxis(p, 0, 1) if p.ndim > 2 else p, tree)
    statistics = jnp.ones((3, 4)).at[1, 2].set(400.0)
    clipped = muonjax.apply_qk_clip(tree, {NAME: statistics}, [muonjax.mha_site(scan_axis=axis)], 100.0)
    for name in ("kernel", "bias"):
        ratio = clipped["layer"]["attention"]["query"][name] / tree["layer"]["attention"]["query"][name]
        ratio = np.asarray(jnp.moveaxis(ratio, axis, 0))
        expected = np.ones((3, 4))
        expected[1, 2] = 0.5
        np.testing.assert_allclose(ratio[(..., 0)] if name == "bias" else ratio[:, 0, :, 0], expected)


def test_accumulation_takes_the_maximum_of_maxima():
    """Summing the maxima over micro-batches would clip a calm head."""
    tree = attention()
    tx = muonjax.qk_clip(100.0, [SITE], every_k=3)
    state = tx.init(tree)
    for i, hot in enumerate((60.0, 200.0, 50.0)):
        updates, state = update(tx, state, tree, {NAME: jnp.asarray([hot, 60.0, 60.0, 60.0])})
        moved = np.asarray(updates["layer"]["attention"]["query"]["kernel"]) != np.float32(0.01)
        assert moved[:, 0].any() == (i == 2)
        assert not moved[:, 1:].any()
    np.testing.assert_array_equal(state.max_logits[NAME], [200.0, 60.0, 60.0, 60.0])
    assert (int(state.count), int(state.num_clipped), int(state.total_clipped)) == (3, 1, 1)
    assert (np.asarray(state.running_max[NAME]) == -np.inf).all()


def test_replicas_agree_through_the_axis_name():
    tree = attention()
    tx = muonjax.qk_clip(100.0, [SITE], axis_name="data")
    state = tx.init(tree)
    zeros = jax.tree.map(jnp.zeros_like, tree)
    statistics = jnp.asarray([[400.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 200.0]])
    updates, _ = jax.vmap(lambda s: tx.update(zeros, state, tree, max_logits={NAME: s}), axis_name="data")(
        statistics
    )
    kernel = updates["layer"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(kernel[0], kernel[1])
    assert np.asarray(kernel[0, :, 0]).any()
    assert np.asarray(kernel[0, :, 3]).any()


def test_a_threshold_can_be_a_schedule():
    tree = attention()
    tx = muonjax.qk_clip(lambda count: jnp.where(count == 0, 1000.0, 100.0), [SITE])
    state = tx.init(tree)
    for clipped in (0, 1):
        _, state = update(tx, state, tree, {NAME: jnp.asarray([400.0, 1.0, 1.0, 1.0])})
        assert int(state.num_clipped) == clipped


def test_tug_of_war_leaves_the_innocent_alone():
    """One head pushed up 1 % a step for 1,000 steps, beside three calm ones that share its key."""
    tree = attention(4, 1)
    tx = muonjax.qk_clip(5.0, [SITE])

    def step(carry, _):
        tree, state = carry
        largest = logits(tree, X)
        push = tree["layer"]["attention"]["query"]["kernel"] * jnp.asarray([0.01, 0, 0, 0])[:, None]
        updates = jax.tree.map(jnp.zeros_like, tree)
        updates["layer"]["attention"]["query"]["kernel"] = push
        updates, state = tx.update(updates, state, tree, max_logits={NAME: largest})
        return (optax.apply_updates(tree, updates), state), largest

    start = muonjax.apply_qk_clip(tree, {NAME: logits(tree, X)}, [SITE], 4.0)
    (end, _), history = jax.jit(lambda c: jax.lax.scan(step, c, None, length=1000))((start, tx.init(start)))
    assert history[100:, 0].max() <= 5.0 * 1.011
    np.testing.assert_array_equal(
        end["layer"]["attention"]["query"]["kernel"][:, 1:],
        start["layer"]["attention"]["query"]["kernel"][:, 1:],
    )
    np.testing.assert_array_equal(
        end["layer"]["attention"]["key"]["kernel"], start["layer"]["attention"]["key"]["kernel"]
    )


# Through Flax.


@pytest.mark.parametrize("scan_axis", [None, 0, 1])
def test_linen_end_to_end(scan_axis):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            mask = nn.make_causal_mask(x[..., 0])
            y = nn.MultiHeadDotProductAttention(
                4,
                attention_fn=muonjax.linen.attention_fn(),
                bias_init=nn.initializers.normal(1.0),
                name="attention",
            )(x, mask=mask, sow_weights=True)
            return x + y, None

    if scan_axis is None:
        model = Layer()
    else:
        model = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": scan_axis, "intermediates": 0},
            split_rngs={"params": True},
            length=3,
        )()
    params = model.init(jax.random.key(0), X)["params"]
    params = jax.tree.map(lambda p: 3 * p, params)

    @jax.jit
    def statistics(params):
        return model.apply({"params": params}, X, mutable=["intermediates"])[1]["intermediates"]

    site = muonjax.mha_site(scan_axis=scan_axis or 0)
    sown = statistics(params)
    (before,) = jax.tree.leaves(sown)
    threshold = float(jnp.median(before))
    clipped = muonjax.apply_qk_clip(params, sown, [site], threshold)
    (after,) = jax.tree.leaves(statistics(clipped))
    first = (
        after if scan_axis is None else after[0]
    )  # deeper layers see other inputs once the first is clipped
    assert (np.asarray(first) <= threshold * (1 + 3e-6)).all()
    assert (np.asarray(before) > threshold).any()


@pytest.mark.parametrize("key_heads", [4, 2])
def test_nnx_end_to_end(key_heads):
    model = nnx.MultiHeadAttention(
        4, 8, num_kv_heads=key_heads, decode=False, attention_fn=muonjax.nnx.attention_fn(), rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(model, nnx.Param)

    def statistics(params):
        model = nnx.merge(graph, params)
        return nnx.capture(lambda m, x: m(3 * x, is_causal=True, sow_weights=True), nnx.Intermediate)(
            model, X
        )[1]

    before = jax.tree.leaves(statistics(params))[0]
    clipped = muonjax.apply_qk_clip(params, statistics(params), [SITE], float(before.min()))
    after = jax.tree.leaves(statistics(clipped))[0]
    np.testing.assert_allclose(after, before.min(), rtol=3e-6)


def test_attention_is_unchanged_and_its_mask_is_honoured():
    plain = nn.MultiHeadDotProductAttention(4)
    ours = nn.MultiHeadDotProductAttention(4, attention_fn=muonjax.linen.attention_fn())
    params = plain.init(jax.random.key(0), X)
    mask = nn.make_causal_mask(X[..., 0])
    np.testing.assert_array_equal(ours.apply(params, X, mask=mask), plain.apply(params, X, mask=mask))
    _, sown = ours.apply(params, X, mask=mask, sow_weights=True, mutable=["intermediates"])
    assert list(sown["intermediates"]) == ["max_logits"]
    unmasked = ours.apply(params, X, sow_weights=True, mutable=["intermediates"])[1]
    assert (sown["intermediates"]["max_logits"] <= unmasked["intermediates"]["max_logits"]).all()
    assert (sown["intermediates"]["max_logits"] < unmasked["intermediates"]["max_logits"]).any()


# Refusals.


@pytest.mark.parametrize(
    ("tree", "statistics", "site", "message"),
    [
        (attention(), {NAME: jnp.ones(4)}, muonjax.mha_site("decoder/.*"), "matches no module"),
        (attention(), {"other": jnp.ones(4)}, SITE, "without statistics \\['layer/attention'\\]"),
        (attention(), {NAME: jnp.ones(3)}, SITE, r"shape \(3,\); the parameters say \(4,\)"),
        (
            attention(),
            {NAME: {"max_logits": jnp.ones(4)}, "x": {"max_logits": jnp.ones(4)}},
            SITE,
            "statistics without a site \\['x'\\]",
        ),
        (
            {"a": attention()["layer"]["attention"] | {"query_ln": {"scale": jnp.ones(4)}}},
            {"a": jnp.ones(4)},
            SITE,
            "normalizes its queries and keys",
        ),
        (
            {"a": {"query": {"kernel": jnp.ones((8, 4, 4))}, "key": {"kernel": optax.MaskedNode()}}},
            {"a": jnp.ones(4)},
            SITE,
            "masked out of the optimizer",
        ),
        (
            {"a": {"query": {"kernel": jnp.ones((8, 4, 4))}}},
            {"a": jnp.ones(4)},
            SITE,
            "has no parameter 'a/key/kernel'",
        ),
        ({"a": {"query": {"kernel": jnp.ones((8, 4))}}}, {"a": jnp.ones(4)}, SITE, "has 3 axes"),
    ],
)
def test_refusals(tree, statistics, site, message):
    with pytest.raises(ValueError, match=message):
        muonjax.apply_qk_clip(tree, statistics, [site], 1.0)


def test_missing_arguments():
    tree = attention()
    tx = muonjax.qk_clip(100.0, [SITE])
    with pytest.raises(ValueError, match="qk_clip needs this step's statistics"):
        tx.update(tree, tx.init(tree), tree)
    with pytest.raises(ValueError, match="qk_clip scales weights"):
        tx.update(tree, tx.init(tree), max_logits={NAME: jnp.ones(4)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"sites": []}, "clips nothing"),
        ({"every_k": 0}, "every_k=0"),
        ({"shared_keys": "none"}, "shared_keys='none'"),
    ],
)
def test_bad_settings(arguments, message):
    settings = {"threshold": 100.0, "sites": [SITE]} | arguments
    with pytest.raises(ValueError, match=message):
        muonjax.qk_clip(**settings)
