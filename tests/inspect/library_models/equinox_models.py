"""Models of Equinox's own layers; parameters are the arrays of a module, the rest is closed over."""

import jax
import jax.numpy as jnp

from tests.inspect.library_models.model import (
    cross_entropy,
    shape,
    tokens,
)


def split(make):
    """Shapes of a module's arrays, and a function that gives the module for arrays."""
    import equinox as eqx

    module = eqx.filter_eval_shape(make, jax.random.key(0))
    arrays, static = eqx.partition(
        module, lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    return arrays, lambda arrays: eqx.combine(arrays, static)


def block_of():
    """Attention and a perceptron, with norms before them."""
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        perceptron: eqx.nn.MLP
        norms: list

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(
                4, 32, use_query_bias=True, use_output_bias=True, key=a
            )
            self.perceptron = eqx.nn.MLP(32, 32, 64, 2, jax.nn.gelu, key=b)
            self.norms = [eqx.nn.LayerNorm(32), eqx.nn.RMSNorm(32)]

        def __call__(self, x):
            y = jax.vmap(self.norms[0])(x)
            mask = jnp.tril(jnp.ones((x.shape[0],) * 2, bool))
            x = x + self.attention(y, y, y, mask)
            return x + jax.vmap(self.perceptron)(jax.vmap(self.norms[1])(x))

    return Block


def equinox_scan():
    """Layers made by `filter_vmap`, run by `jax.lax.scan` under `jax.checkpoint`, a tied head."""
    import equinox as eqx

    class Language(eqx.Module):
        shared: eqx.nn.Shared
        layers: eqx.Module

        def __init__(self, key):
            a, b, c = jax.random.split(key, 3)
            tied = (
                eqx.nn.Embedding(99, 32, key=a),
                eqx.nn.Linear(32, 99, use_bias=False, key=b),
            )
            self.shared = eqx.nn.Shared(
                tied, lambda pair: pair[1].weight, lambda pair: pair[0].weight
            )
            block = block_of()
            self.layers = eqx.filter_vmap(block)(jax.random.split(c, 3))

        def __call__(self, text):
            table, head = self.shared()
            arrays, static = eqx.partition(self.layers, eqx.is_array)

            @jax.checkpoint
            def run(x, arrays):
                return eqx.combine(arrays, static)(x), None

            x, _ = jax.lax.scan(run, jax.vmap(table)(text), arrays)
            return jax.vmap(head)(x)

    params, whole = split(Language)

    def loss(params, text):
        return cross_entropy(jax.vmap(whole(params))(text)[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 8)]


def equinox_rotary():
    """The rotary embedding of Equinox, given to its attention by `process_heads`."""
    import equinox as eqx

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        rotary: eqx.nn.RotaryPositionalEmbedding
        head: eqx.nn.Linear

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(4, 32, key=a)
            self.rotary = eqx.nn.RotaryPositionalEmbedding(8)
            self.head = eqx.nn.Linear(32, 9, key=b)

        def __call__(self, x):
            def turn(q, k, v):
                rotate = jax.vmap(self.rotary, in_axes=1, out_axes=1)
                return rotate(q), rotate(k), v

            return jax.vmap(self.head)(self.attention(x, x, x, process_heads=turn))

    params, whole = split(Layer)

    def loss(params, x, labels):
        return cross_entropy(jax.vmap(whole(params))(x), labels)

    return loss, params, [shape(2, 6, 32), tokens(2, 6)]
