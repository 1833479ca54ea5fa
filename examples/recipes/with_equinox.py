"""Train an Equinox transformer with MuonClip: routing by layer types, largest logits without a change to the model.

pip install "muonjax[equinox]" && python examples/recipes/with_equinox.py
"""

import argparse
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from text_data import Text

import muonjax

VOCABULARY, WIDTH, HEADS = 256, 32, 4


# The model: nothing in it knows of Muon or QK-Clip.


class Block(eqx.Module):
    """Attention and a two-layer perceptron."""

    attention_norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.attention_norm, self.mlp_norm = eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=keys[1])

    def __call__(self, x):  # [time, width]
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(len(x), dtype=bool))
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class Transformer(eqx.Module):
    """A decoder: tokens [time] -> logits [time, vocabulary]."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, layers, key):
        first, last, *others = jax.random.split(key, layers + 2)
        self.embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=first)
        self.blocks = [Block(k) for k in others]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=last)

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


# What MuonClip adds.


class Watched(eqx.Module):
    """An attention that reports its largest logits: `process_heads` receives queries and keys before the softmax."""

    attention: eqx.nn.MultiheadAttention
    report: Callable = eqx.field(static=True)

    def __call__(self, query, key_, value, mask=None, *, process_heads=None, **settings):
        def measured(q, k, v):
            if process_heads is not None:  # such as rotary embeddings
                q, k, v = process_heads(q, k, v)
            self.report(muonjax.max_logits(q, k, mask=mask))
            return q, k, v

        return self.attention(query, key_, value, mask, process_heads=measured, **settings)


def with_max_logits(model, *inputs):
    """The model's output for one example, and the largest logits [heads] of each attention by its path.

    Put it inside of `jax.vmap`, `jax.checkpoint` and the like, so that the statistics are among their results.
    """
    seen = {}

    def watched(path, node):
        if not isinstance(node, eqx.nn.MultiheadAttention):
            return node
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return Watched(node, functools.partial(seen.__setitem__, name))

    def is_attention(node):
        return isinstance(node, eqx.nn.MultiheadAttention)

    output = jax.tree_util.tree_map_with_path(watched, model, is_leaf=is_attention)(*inputs)
    return output, seen


def loss_fn(model, tokens):
    """Cross-entropy of the next token, and the largest logits, [batch, heads] by attention."""
    logits, max_logits = jax.vmap(functools.partial(with_max_logits, model))(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), max_logits


def optimizer(rate, model, threshold=100.0):
    """MuonClip, its matrices by the types of Equinox's layers."""
    params = eqx.filter(model, eqx.is_inexact_array)
    sites = muonjax.sites_from(params, num_heads=HEADS)  # Equinox stores heads and features on one axis
    numbers = muonjax.equinox.dimension_numbers(model)
    return muonjax.muonclip(rate, sites, threshold=threshold, muon_weight_dimension_numbers=numbers)


def train(optimizer, rate, steps, batch=8, context=64):
    """The loss of each step, and the optimizer's state."""
    text, losses = Text(), []
    model = Transformer(2, jax.random.key(0))
    tx = optax.with_extra_args_support(optimizer(rate, model))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, tokens):
        (loss, max_logits), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, tokens)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params, max_logits=max_logits)
        return eqx.apply_updates(model, updates), state, loss

    for i in range(steps):
        model, state, loss = step(model, state, text.batch(0, i, batch, context))
        losses.append(float(loss))
    return losses, state


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--threshold", type=float, default=1.0
    )  # low, so that it takes effect in this tiny model
    args = parser.parse_args()
    losses, state = train(functools.partial(optimizer, threshold=args.threshold), 1e-2, args.steps)
    metrics = muonjax.metrics(state)
    print(
        f"loss {losses[-1]:.3f}, largest logit {metrics['qk_clip/largest']:.2f}, "
        f"{metrics['qk_clip/total_clipped']:.0f} clips"
    )


if __name__ == "__main__":
    main()
