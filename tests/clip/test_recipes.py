"""Attentions as other libraries write them, clipped without a change to them: exact against float64 logits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax
from tests.clip.attentions import EXACT, X, normal, rope

HEADS, SIZE = 4, 8


def brute_force(query, key, scale=SIZE**-0.5):
    """The largest causal logit of each head, from [batch, positions, heads, size] in float64."""
    query, key = (np.asarray(z, np.float64) for z in (query, key))
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    logits = np.einsum("bthd,bshd->bhts", query, key) * scale
    return np.where(np.tri(query.shape[1], dtype=bool), logits, -np.inf).max((0, 2, 3))


def rotated(z):
    """`rope` of the other tests, in float64."""
    half = z.shape[-1] // 2
    angle = np.arange(z.shape[1])[:, None, None] * 100.0 ** (-np.arange(half) / half)
    a, b = z[..., :half], z[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


def heads_of(z, size=SIZE):
    return z.reshape(*z.shape[:-1], -1, size)


def weight(*path):
    def of(params):
        for name in path:
            params = params[name]
        return np.asarray(params, np.float64)

    return of


class Transformers(nn.Module):
    """Two Dense and a reshape, as Transformers' Flax Llama with one shared key head."""

    @nn.compact
    def __call__(self, x):
        q, k, v = (
            heads_of(nn.Dense(n * SIZE, name=name, bias_init=nn.initializers.normal(1.0))(x))
            for name, n in (("q_proj", HEADS), ("k_proj", 1), ("v_proj", 1))
        )
        y = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return nn.Dense(x.shape[-1], name="o_proj")(y.reshape(*x.shape[:-1], -1))


class Einsum(nn.Module):
    """Of Gemma's library."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param("w", nn.initializers.normal(0.5), self.shape))


class Gemma(nn.Module):
    """Queries from one einsum, keys and values from another."""

    @nn.compact
    def __call__(self, x):
        q = Einsum((HEADS, x.shape[-1], SIZE), name="q_einsum")("BTD,NDH->BTNH", x)
        k, v = Einsum((2, 2, x.shape[-1], SIZE), name="kv_einsum")("BSD,CKDH->CBSKH", x)
        y = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return Einsum((HEADS, SIZE, x.shape[-1]), name="attn_vec_einsum")("BTNH,NHD->BTD", y)


def of_transformers(params):
    return (
        rotated(heads_of(np.asarray(X, np.float64) @ weight(n, "kernel")(params) + weight(n, "bias")(params)))
        for n in ("q_proj", "k_proj")
    )


def of_gemma(params):
    x = np.asarray(X, np.float64)
    q = np.einsum("btd,ndh->btnh", x, weight("q_einsum", "w")(params))
    k = np.einsum("bsd,kdh->bskh", x, weight("kv_einsum", "w")(params)[0])
    return rotated(q), rotated(k)


def outputs(layer):
    """Queries and keys from what Linen captured of their projections."""
    if "q_einsum" in layer:
        return layer["q_einsum"]["__call__"][0], layer["kv_einsum"]["__call__"][0][0]
    return (heads_of(layer[name]["__call__"][0]) for name in ("q_proj", "k_proj"))


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "exact"), [(Transformers(), of_transformers), (Gemma(), of_gemma)])
def test_captured_outputs_of_the_projections(model, exact):
    params = model.init(jax.random.key(0), X)["params"]
    names = ("q_proj", "k_proj", "q_einsum", "kv_einsum")
    _, seen = model.apply(
        {"params": params}, X, capture_intermediates=lambda m, _: m.name in names, mutable=["intermediates"]
    )
    query, key = (rope(z) for z in outputs(seen["intermediates"]))
    before = muonjax.max_logits(query, key, is_causal=True)
    np.testing.assert_allclose(before, brute_force(*exact(params)), rtol=1e-6)
    threshold = float(np.median(before))
    sites = muonjax.inspect(lambda p: (model.apply({"params": p["attn"]}, X) ** 2).sum(), {"attn": params})
    clipped = muonjax.apply_qk_clip({"attn": params}, {"attn": before}, sites, threshold)["attn"]
    after = brute_force(*exact(clipped))
    assert after.max() <= threshold * EXACT
    np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=3e-6)
    untouched = [n for n in params if n in ("v_proj", "o_proj", "attn_vec_einsum")]
    for name in untouched:
        jax.tree.map(np.testing.assert_array_equal, clipped[name], params[name])
    if "kv_einsum" in params:
        np.testing.assert_array_equal(clipped["kv_einsum"]["w"][1], params["kv_einsum"]["w"][1])


def test_maxtext():
    """Layers on axis 1 of Linen's variables, and what its attention sows: [layers, batch, heads]."""
    layers, nope, rank = 3, 6, 5
    kernels = {
        "wq_b": normal(rank, layers, HEADS, SIZE),
        "wkv_b": normal(rank, layers, HEADS, nope + 4, seed=1),
    }
    attention = {name: {"kernel": kernel} for name, kernel in kernels.items()}
    params = {"params": {"decoder": {"layers": {"self_attention": attention}}}}
    latent_q, latent_k, shared = (
        normal(2, 9, n, seed=i) for i, n in ((2, rank), (3, rank), (4, SIZE - nope))
    )

    def logits(params, layer, of):
        q, kv = (
            np.einsum("btr,rhe->bthe", np.asarray(z, np.float64), weight(n, "kernel")(params)[:, layer])
            for n, z in (("wq_b", latent_q), ("wkv_b", latent_k))
        )
        q = np.concatenate([q[..., :nope], rotated(q[..., nope:])], -1)
        rotary = np.broadcast_to(
            rotated(np.asarray(shared, np.float64)[:, :, None]), (2, 9, HEADS, SIZE - nope)
        )
        return of(q, np.concatenate([kv[..., :nope], rotary], -1))

    sown = np.stack([
        [logits(attention, i, lambda q, k, b=b: brute_force(q[b : b + 1], k[b : b + 1])) for b in range(2)]
        for i in range(layers)
    ])  # fmt: skip
    statistics = {"params/decoder/layers/self_attention": jnp.asarray(sown, jnp.float32)}
    site = muonjax.mla_site("params/decoder/layers/self_attention", nope=nope, scan_axis=1)
    threshold = float(np.median(sown.max(1)))
    clipped = muonjax.apply_qk_clip(params, statistics, site, threshold)
    clipped = clipped["params"]["decoder"]["layers"]["self_attention"]
    after = np.stack([logits(clipped, i, brute_force) for i in range(layers)])
    np.testing.assert_allclose(after, np.minimum(sown.max(1), threshold), rtol=3e-6)


def test_kernels_stored_as_equinox_stores_them():
    """(out, in) weights with heads and features on one axis, and one array per attention for the statistics."""
    kernels = {
        f"{n}_proj": {"kernel": normal(HEADS * SIZE, 16, seed=i)} for i, n in enumerate(("query", "key"))
    }
    params = {"layers": [{"attention": kernels}, {"attention": jax.tree.map(lambda w: 2 * w, kernels)}]}

    def exact(attention):
        x = np.asarray(X, np.float64)
        return brute_force(
            *(heads_of(x @ weight(f"{n}_proj", "kernel")(attention).T) for n in ("query", "key"))
        )

    statistics = {
        f"layers/{i}/attention": jnp.asarray(exact(p["attention"])) for i, p in enumerate(params["layers"])
    }
    sites = muonjax.mha_site(query="query_proj", key="key_proj", layout="(h d) i", num_heads=HEADS)
    clipped = muonjax.apply_qk_clip(params, statistics, sites, 5.0)
    for layer in clipped["layers"]:
        np.testing.assert_allclose(exact(layer["attention"]), 5.0, rtol=3e-6)
