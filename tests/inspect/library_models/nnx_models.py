"""Models of Flax NNX's own layers: parameters are a state, the module is merged inside of the loss."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.inspect.library_models.model import (
    cross_entropy,
    mean_square,
    shape,
    tokens,
)


def split(make, kind=nnx.Param):
    """The static part, shapes of the parameters, and of all else."""
    return nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), kind, ...)


class Block(nnx.Module):
    def __init__(self, rngs, **options):
        self.norm_a, self.norm_b = (
            nnx.LayerNorm(64, rngs=rngs),
            nnx.RMSNorm(64, rngs=rngs),
        )
        self.a = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs, **options)
        self.gate = nnx.Linear(64, 128, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(64, 128, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(128, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.a(self.norm_a(x), mask=nnx.make_causal_mask(x[..., 0]))
        y = self.norm_b(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Language(nnx.Module):
    def __init__(self, rngs, **options):
        self.table = nnx.Embed(99, 64, rngs=rngs)
        self.layers = nnx.List([Block(rngs, **options) for _ in range(2)])
        self.norm_out = nnx.LayerNorm(64, rngs=rngs)

    def __call__(self, text):
        x = self.table(text)
        for layer in self.layers:
            x = layer(x)
        return self.table.attend(self.norm_out(x))


def nnx_language(module="Language", **options):
    """The next token, by one of the modules of this file."""
    kind = globals()[module]
    graph, params, rest = split(lambda rngs: kind(rngs, **options))

    def loss(params, rest, text):
        logits = nnx.merge(graph, params, rest)(text)
        return cross_entropy(logits[:, :-1], text[:, 1:])

    return loss, params, [rest, tokens(2, 8)]


class Scanned(nnx.Module):
    """Layers made by `nnx.vmap`, run by `nnx.scan`, rematerialized."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs):
            return Block(rngs)

        self.table, self.layers = nnx.Embed(99, 64, rngs=rngs), layers(rngs)

    def __call__(self, text):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return self.table.attend(run(self.table(text), self.layers))


class FusedBlock(nnx.Module):
    """One projection for queries, keys and values, which `jax.nn.dot_product_attention` takes."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.qkv = nnx.LinearGeneral(32, (3, 4, 8), rngs=rngs)
        self.out = nnx.LinearGeneral((4, 8), 32, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.moveaxis(self.qkv(self.norm(x)), 2, 0)
        return x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


def nnx_fused_in_a_jax_scan():
    """`jax.lax.scan` and `jax.checkpoint` over the layers' state."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def layers(rngs):
        return FusedBlock(rngs)

    graph, params, rest = split(layers)

    def loss(params, rest, x):
        @jax.checkpoint
        def run(x, state):
            return nnx.merge(graph, *state)(x), None

        return mean_square(jax.lax.scan(run, x, (params, rest))[0])

    return loss, params, [rest, shape(2, 6, 32)]


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(30, 16, rngs=rngs)
        kinds = (
            nnx.LSTMCell,
            nnx.OptimizedLSTMCell,
            nnx.GRUCell,
            nnx.SimpleCell,
        )
        self.layers = nnx.List([nnx.RNN(kind(16, 16, rngs=rngs)) for kind in kinds])
        self.head = nnx.Linear(16, 30, rngs=rngs)

    def __call__(self, text):
        x = self.table(text)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
