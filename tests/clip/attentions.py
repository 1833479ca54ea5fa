"""Attentions as functions from parameters to each head's largest logit, for the tests of the clip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muonjax
from tests.tools.oracles import normal

EXACT = 1 + 3e-6

X = normal(2, 9, 16, seed=42)


def rope(x, base=100.0):
    """Rotary embedding of [*batch, T, heads, D]."""
    half = x.shape[-1] // 2
    a = x[..., :half]
    b = x[..., half:]
    angle = np.arange(x.shape[-3])[:, None, None] * base ** (-np.arange(half) / half)
    angle = jnp.broadcast_to(jnp.asarray(angle, x.dtype), a.shape)
    return jnp.concatenate(
        [
            a * jnp.cos(angle) - b * jnp.sin(angle),
            a * jnp.sin(angle) + b * jnp.cos(angle),
        ],
        -1,
    )


def zero_update(tx, params, statistics):
    """The parameters after one step at learning rate zero, and the clip's state."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = jax.jit(tx.update)(
        zeros, tx.init(params), params, max_logits=statistics
    )
    return optax.apply_updates(params, updates), state


def projected(p, name, x=X):
    y = jnp.einsum("btd,dhe->bthe", x, p[name]["kernel"])
    return y + p[name]["bias"][None, None] if "bias" in p[name] else y


def loss_fn(params, x):
    """A loss of parameters that `multi_head` makes."""
    q, k, v = (projected(params, name, x) for name in ("query", "key", "value"))
    return (jax.nn.dot_product_attention(q, k, v) ** 2).mean()


def multi_head(heads=4, key_heads=4, rotate=lambda x: x, seed=0):
    params = {
        name: {
            "kernel": normal(16, h, 8, seed=seed + i),
            "bias": normal(h, 8, seed=seed + 7 + i, scale=3.0),
        }
        for i, (name, h) in enumerate(
            (("query", heads), ("key", key_heads), ("value", key_heads))
        )
    }

    def maxima(p):
        return muonjax.max_logits(
            rotate(projected(p, "query")), rotate(projected(p, "key")), is_causal=True
        )

    return params, jax.jit(maxima), muonjax.mha_site()


def latent(low_rank, layout, heads=4, nope=8, rotary=4, value=6, rank=12):
    flat = "(" in layout
    sizes = {"wkv_a": (16, rank + rotary), "wkv_b": (rank, heads, nope + value)}
    sizes |= (
        {"wq_a": (16, rank), "wq_b": (rank, heads, nope + rotary)}
        if low_rank
        else {"wq": (16, heads, nope + rotary)}
    )
    params = {
        n: {"kernel": normal(*s, seed=i)} for i, (n, s) in enumerate(sizes.items())
    }
    if flat:
        params = jax.tree.map(lambda w: w.reshape(w.shape[0], -1), params)

    def kernel(p, name):
        return p[name]["kernel"].reshape(
            -1, heads, p[name]["kernel"].size // heads // sizes[name][0]
        )

    def maxima(p):
        latent_q = X @ p["wq_a"]["kernel"] if low_rank else X
        q = jnp.einsum(
            "btr,rhe->bthe", latent_q, kernel(p, "wq_b" if low_rank else "wq")
        )
        c = X @ p["wkv_a"]["kernel"]
        kv = jnp.einsum("btr,rhe->bthe", c[..., :rank], kernel(p, "wkv_b"))
        shared = jnp.broadcast_to(rope(c[..., None, rank:]), (*kv.shape[:-1], rotary))
        q = jnp.concatenate([q[..., :nope], rope(q[..., nope:])], -1)
        return muonjax.max_logits(
            q, jnp.concatenate([kv[..., :nope], shared], -1), is_causal=True
        )

    site = muonjax.mla_site(
        nope=nope,
        query="wq_b" if low_rank else "wq",
        layout=layout,
        num_heads=heads if flat else None,
    )
    return params, jax.jit(maxima), site


def fused(layout, shape, heads=4, size=8):
    params = {
        "qkv": {"kernel": normal(16, *shape), "bias": normal(*shape, seed=1, scale=3.0)}
    }
    order = "3hd" if layout.index("3") < layout.index("h") else "h3d"

    def maxima(p):
        y = jnp.tensordot(X, p["qkv"]["kernel"], 1) + p["qkv"]["bias"]
        y = y.reshape(
            *X.shape[:2],
            *(3 if c == "3" else heads if c == "h" else size for c in order),
        )
        q, k, _ = jnp.moveaxis(y, 2 + order.index("3"), 0)
        return muonjax.max_logits(q, k)

    return (
        params,
        jax.jit(maxima),
        muonjax.fused_qkv_site(num_heads=heads, head_dim=size, layout=layout),
    )


ATTENTIONS = {
    "multi-head with biases": functools.partial(multi_head),
    "grouped 8:2 with RoPE": functools.partial(multi_head, 8, 2, rope),
    "multi-query with RoPE": functools.partial(multi_head, 8, 1, rope),
    "latent, low-rank query": functools.partial(latent, True, "i h d"),
    "latent, direct query": functools.partial(latent, False, "i h d"),
    "latent, flat kernels": functools.partial(latent, True, "i (h d)"),
    "fused, flat": functools.partial(fused, "i (3 h d)", (96,)),
    "fused, parts first": functools.partial(fused, "i 3 h d", (3, 4, 8)),
    "fused, heads first": functools.partial(fused, "i (h 3 d)", (96,)),
}
