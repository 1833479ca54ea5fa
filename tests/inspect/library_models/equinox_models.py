"""Models of Equinox's own layers; parameters are the arrays of a module, the rest is closed over."""

import functools

import jax
import jax.numpy as jnp

from tests.inspect.library_models.model import (
    cross_entropy,
    mean_square,
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


def equinox_images():
    import equinox as eqx

    def make(key):
        k = iter(jax.random.split(key, 9))
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 16, 3, padding=1, key=next(k)),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(16, 32, 3, stride=2, groups=4, key=next(k)),
                eqx.nn.GroupNorm(4, 32),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(32, 32, 3, groups=32, key=next(k)),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.ConvTranspose2d(32, 12, 3, stride=2, key=next(k)),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.AdaptiveAvgPool2d(1),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.WeightNorm(eqx.nn.Linear(12, 20, key=next(k))),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Linear(20, 5, key=next(k)),
            ]
        )

    params, whole = split(make)

    def loss(params, x, labels):
        return cross_entropy(jax.vmap(whole(params))(x), labels)

    return loss, params, [shape(2, 3, 8, 8), tokens(2)]


def equinox_recurrent():
    import equinox as eqx

    class Net(eqx.Module):
        lstm: eqx.nn.LSTMCell
        gru: eqx.nn.GRUCell
        head: eqx.nn.Linear

        def __init__(self, key):
            a, b, c = jax.random.split(key, 3)
            self.lstm, self.gru = (
                eqx.nn.LSTMCell(6, 16, key=a),
                eqx.nn.GRUCell(16, 16, key=b),
            )
            self.head = eqx.nn.Linear(16, 1, key=c)

        def __call__(self, x):
            def step(carry, x):
                memory, state = carry
                memory = self.lstm(x, memory)
                state = self.gru(memory[0], state)
                return (memory, state), state

            start = (jnp.zeros(16), jnp.zeros(16)), jnp.zeros(16)
            return jax.vmap(self.head)(jax.lax.scan(step, start, x)[1])

    params, whole = split(Net)
    return (
        lambda params, x: mean_square(jax.vmap(whole(params))(x)),
        params,
        [shape(2, 7, 6)],
    )


def equinox_ensemble():
    """Five perceptrons at once."""
    import equinox as eqx

    make = functools.partial(eqx.nn.MLP, 6, 3, 16, 2)
    params, whole = split(
        lambda key: eqx.filter_vmap(lambda k: make(key=k))(jax.random.split(key, 5))
    )

    def loss(params, x, y):
        def one(module, x):
            return jax.vmap(module)(x)

        predicted = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), None))(
            whole(params), x
        )
        return mean_square(predicted - y)

    return loss, params, [shape(4, 6), shape(4, 3)]
