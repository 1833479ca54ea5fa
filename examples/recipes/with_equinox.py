"""Train an Equinox transformer with MuonClip: `inspect` reads the loss function, so the model does not change.

pip install -e . equinox && python examples/recipes/with_equinox.py
"""

import argparse
import functools

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


def loss_fn(params, static, windows):
    """Cross-entropy of the next token; `params` are the arrays of the model, `static` is the rest."""
    logits = jax.vmap(eqx.combine(params, static))(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


# What MuonClip adds.


def optimizer(rate, program, threshold=100.0):
    return muonjax.muonclip(rate, program, threshold=threshold)


def train(optimizer, rate, steps, batch=8, context=64):
    """The loss of each step, and the optimizer's state."""
    text, losses = Text(), []
    params, static = eqx.partition(Transformer(2, jax.random.key(0)), eqx.is_inexact_array)
    program = muonjax.inspect(loss_fn, params, static, text.batch(0, 0, batch, context))
    tx = optax.with_extra_args_support(optimizer(rate, program))
    state = tx.init(params)

    @jax.jit
    def step(params, state, windows):
        (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(params, static, windows)
        updates, state = tx.update(grads, state, params, max_logits=max_logits)
        return eqx.apply_updates(params, updates), state, loss

    for i in range(steps):
        params, state, loss = step(params, state, text.batch(0, i, batch, context))
        losses.append(float(loss))
    return losses, state


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    # Low, so that it takes effect in this tiny model
    parser.add_argument("--threshold", type=float, default=1.0)
    args = parser.parse_args()
    losses, state = train(functools.partial(optimizer, threshold=args.threshold), 1e-2, args.steps)
    metrics = muonjax.metrics(state)
    print(
        f"loss {losses[-1]:.3f}, largest logit {metrics['qk_clip/largest']:.2f}, "
        f"{metrics['qk_clip/total_clipped']:.0f} clips"
    )


if __name__ == "__main__":
    main()
