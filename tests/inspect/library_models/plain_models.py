"""Models in plain JAX, as papers and their public code define them."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.inspect.library_models.model import cross_entropy, shape, tokens


def weights(**shapes):
    return {name: shape(*sizes) for name, sizes in shapes.items()}


def rms_norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * weight


def rotary(x):
    """The two halves of the features are rotated."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    cos = jnp.cos(angles)[None, :, None]
    sin = jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def causal_softmax(logits):
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(mask, logits, -1e30))


def latent_attention():
    """DeepSeek's: compressed queries and keys, and a rotary part of the key that all heads share."""
    params = weights(
        q_a=(32, 16),
        q_norm=(16,),
        q_b=(16, 4, 12),
        kv_a=(32, 20),
        kv_norm=(16,),
        kv_b=(16, 4, 16),
        o=(4, 8, 32),
        head=(32, 9),
    )

    def loss(p, x, labels):
        q = jnp.einsum("btr,rhs->bths", rms_norm(x @ p["q_a"], p["q_norm"]), p["q_b"])
        q = jnp.concatenate([q[..., :8], rotary(q[..., 8:])], -1)
        kv = x @ p["kv_a"]
        shared = rotary(kv[:, :, None, 16:])
        own = jnp.einsum(
            "btr,rhs->bths", rms_norm(kv[..., :16], p["kv_norm"]), p["kv_b"]
        )
        k = jnp.concatenate(
            [own[..., :8], jnp.broadcast_to(shared, (*own.shape[:3], 4))], -1
        )
        a = causal_softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(12))
        z = jnp.einsum("bhqk,bkhd->bqhd", a, own[..., 8:])
        return cross_entropy(jnp.einsum("bqhd,hde->bqe", z, p["o"]) @ p["head"], labels)

    return loss, params, [shape(2, 5, 32), tokens(2, 5)]


def chosen_experts():
    """Mixtral's: the best two of four, tokens sorted by expert, products of ragged groups."""
    params = weights(
        first=(20, 32),
        router=(32, 4),
        gate=(4, 32, 48),
        up=(4, 32, 48),
        down=(4, 48, 32),
        head=(32, 7),
    )

    def loss(p, x, labels):
        x = jnp.tanh(x @ p["first"])
        best, which = jax.lax.top_k(x @ p["router"], 2)
        order = jnp.argsort(which.reshape(-1))
        tokens = jnp.repeat(x, 2, axis=0)[order]
        sizes = jnp.bincount(which.reshape(-1), length=4)
        y = jax.nn.silu(
            jax.lax.ragged_dot(tokens, p["gate"], sizes)
        ) * jax.lax.ragged_dot(tokens, p["up"], sizes)
        y = jax.lax.ragged_dot(y, p["down"], sizes)[jnp.argsort(order)].reshape(
            *which.shape, 32
        )
        x = x + jnp.einsum("tk,tkd->td", jax.nn.softmax(best), y)
        return cross_entropy(x @ p["head"], labels)

    return loss, params, [shape(10, 20), tokens(10)]
