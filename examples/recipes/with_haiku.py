"""Train a Haiku model with MuonClip: `inspect` reads the loss function, so the model does not change.

pip install -e . dm-haiku && python examples/recipes/with_haiku.py
"""

import argparse

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from text_data import Text

import muonjax

VOCABULARY, WIDTH, HEADS = 256, 64, 4


def decoder(tokens, blocks=2):
    """Tokens [batch, time] -> logits [batch, time, vocabulary]; nothing in it knows of Muon."""
    time = tokens.shape[-1]
    x = hk.Embed(VOCABULARY, WIDTH)(tokens)
    x += hk.get_parameter("positions", (time, WIDTH), init=hk.initializers.RandomNormal(0.02))
    for _ in range(blocks):
        attention = hk.MultiHeadAttention(
            HEADS, WIDTH // HEADS, w_init=hk.initializers.VarianceScaling()
        )
        y = hk.LayerNorm(-1, True, True)(x)
        x += attention(y, y, y, mask=jnp.tri(time, dtype=bool)[None, None])
        y = hk.LayerNorm(-1, True, True)(x)
        x += hk.nets.MLP([4 * WIDTH, WIDTH], activation=jax.nn.gelu)(y)
    return hk.Linear(VOCABULARY)(x)


model = hk.without_apply_rng(hk.transform(decoder))


def loss_fn(params, windows):
    logits = model.apply(params, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def optimizer(rate, program):
    return muonjax.muonclip(rate, program, threshold=100.0)


def train(optimizer, rate, steps, batch=8, context=64):
    """The loss of each step, and the optimizer's state."""
    text, losses = Text(), []
    params = model.init(jax.random.key(0), text.batch(0, 0, batch, context)[:, :-1])
    program = muonjax.inspect(loss_fn, params, text.batch(0, 0, batch, context))
    tx = optax.with_extra_args_support(optimizer(rate, program))
    state = tx.init(params)

    @jax.jit
    def step(params, state, windows):
        (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(params, windows)
        updates, state = tx.update(grads, state, params, max_logits=max_logits)
        return optax.apply_updates(params, updates), state, loss

    for i in range(steps):
        params, state, loss = step(params, state, text.batch(0, i, batch, context))
        losses.append(float(loss))
    return losses, state


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    losses, state = train(optimizer, 1e-2, parser.parse_args().steps)
    print(f"loss {losses[-1]:.3f}, largest logit {muonjax.metrics(state)['qk_clip/largest']:.2f}")


if __name__ == "__main__":
    main()
