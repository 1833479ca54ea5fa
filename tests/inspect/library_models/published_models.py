"""NanoDO's decoder, big_vision's ViT and the language model of Flax's lm1b, as their public code defines them."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.inspect.library_models.linen_models import parameters
from tests.inspect.library_models.model import cross_entropy, shape, tokens


class NanoDO(nn.Module):
    """No biases, learned positions, a tied head."""

    @nn.compact
    def __call__(self, text):
        embed = nn.Embed(99, 32, name="embed")
        x = embed(text) + nn.Embed(8, 32, name="pos_embed")(jnp.arange(text.shape[1])[None])
        for i in range(2):
            x = self.block(x, f"block_{i}")
        return embed.attend(nn.LayerNorm(use_bias=False, name="out_ln")(x))

    def block(self, x, at):
        y = nn.LayerNorm(use_bias=False, name=f"{at}_ln_a")(x)
        heads = {
            n: nn.DenseGeneral((4, 8), use_bias=False, name=f"{at}_{n}")(y) for n in ("query", "key", "value")
        }
        q = heads["query"] / 8**0.5
        logits = jnp.einsum("...qhd,...khd->...hqk", q, heads["key"]).astype(jnp.float32)
        mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))[None, None]
        shares = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(jnp.float32).min), axis=-1)
        y = jnp.einsum("...hqk,...khd->...qhd", shares, heads["value"])
        x = x + nn.DenseGeneral(32, axis=(-2, -1), use_bias=False, name=f"{at}_out")(y)
        y = nn.LayerNorm(use_bias=False, name=f"{at}_ln_b")(x)
        y = jax.nn.gelu(nn.Dense(128, use_bias=False, name=f"{at}_up")(y))
        return x + nn.Dense(32, use_bias=False, name=f"{at}_down")(y)


def nanodo():
    params, _ = parameters(NanoDO(), tokens(2, 8))

    def loss(params, text):
        return cross_entropy(NanoDO().apply({"params": params}, text)[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 8)]


class ViT(nn.Module):
    """Layers in a scan, and a learned query that pools all patches."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(32, (4, 4), (4, 4), "VALID", name="embedding")(images).reshape(images.shape[0], -1, 32)
        x = x + self.param("pos_embedding", nn.initializers.normal(), (1, x.shape[1], 32))
        block = nn.scan(nn.remat(Block), {"params": 0}, split_rngs={"params": True}, length=3)
        x = nn.LayerNorm(name="encoder_norm")(block(name="encoderblock")(x)[0])
        probe = jnp.tile(
            self.param("probe", nn.initializers.xavier_uniform(), (1, 1, 32)), (x.shape[0], 1, 1)
        )
        x = nn.MultiHeadDotProductAttention(4, name="pool")(probe, x)
        return nn.Dense(10, name="head")(
            (x + MlpBlock(name="pool_mlp")(nn.LayerNorm(name="pool_norm")(x)))[:, 0]
        )


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(64)(x)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(y, y)
        return x + MlpBlock(name="mlp")(nn.LayerNorm()(x)), None


def vit_with_a_learned_query():
    images = shape(2, 8, 8, 3)
    params, _ = parameters(ViT(), images)

    def loss(params, images, labels):
        return cross_entropy(ViT().apply({"params": params}, images), labels)

    return loss, params, [images, tokens(2)]


class LM1B(nn.Module):
    """Shifted text, constant positions, dropout."""

    @nn.compact
    def __call__(self, text):
        embed = nn.Embed(99, 32, name="shared_embedding")
        x = embed(jnp.pad(text, ((0, 0), (1, 0)))[:, :-1]) * 32**0.5
        x = nn.Dropout(0.1, deterministic=False)(x + jnp.sin(jnp.arange(8.0))[None, :, None])
        mask = nn.combine_masks(nn.make_attention_mask(text > 0, text > 0), nn.make_causal_mask(text))
        for i in range(2):
            y = nn.LayerNorm(name=f"norm_a_{i}")(x)
            attention = nn.MultiHeadDotProductAttention(
                4,
                qkv_features=32,
                use_bias=False,
                dropout_rate=0.1,
                deterministic=False,
                name=f"attention_{i}",
            )
            x = x + nn.Dropout(0.1, deterministic=False)(attention(y, mask=mask))
            x = x + MlpBlock(name=f"mlp_{i}")(nn.LayerNorm(name=f"norm_b_{i}")(x))
        return embed.attend(nn.LayerNorm(name="norm_out")(x)) / 32**0.5


def lm1b():
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(LM1B().init, keys, tokens(2, 8))["params"]
    key = jax.eval_shape(lambda: jax.random.key(0))

    def loss(params, key, text):
        logits = LM1B().apply({"params": params}, text, rngs={"dropout": key})
        weights = text > 0
        losses = -jnp.sum(jax.nn.one_hot(text, 99) * nn.log_softmax(logits), -1)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    return loss, params, [key, tokens(2, 8)]
