"""NanoDO's decoder, big_vision's ViT and the language model of Flax's lm1b, as their public code defines them."""

import jax.numpy as jnp
from flax import linen as nn

from tests.inspect.library_models.linen_models import parameters
from tests.inspect.library_models.model import cross_entropy, shape, tokens


class ViT(nn.Module):
    """Layers in a scan, and a learned query that pools all patches."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(32, (4, 4), (4, 4), "VALID", name="embedding")(images).reshape(
            images.shape[0], -1, 32
        )
        x = x + self.param(
            "pos_embedding", nn.initializers.normal(), (1, x.shape[1], 32)
        )
        block = nn.scan(
            nn.remat(Block),
            {"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x = nn.LayerNorm(name="encoder_norm")(block(name="encoderblock")(x)[0])
        probe = jnp.tile(
            self.param("probe", nn.initializers.xavier_uniform(), (1, 1, 32)),
            (x.shape[0], 1, 1),
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
