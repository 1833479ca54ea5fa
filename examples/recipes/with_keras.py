"""Train a Keras model on JAX with Muon: `muonjax.keras.Optimizer` around any Optax transformation.

pip install -e . keras && python examples/recipes/with_keras.py
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from keras import layers
from text_data import Text

import muonjax
from muonjax.keras import Optimizer

VOCABULARY, WIDTH, HEADS = 256, 64, 4


def optimizer(rate):
    return muonjax.muon(rate)


def make_model(context, blocks=2):
    """A decoder: tokens [batch, time] -> logits [batch, time, vocabulary]."""
    tokens = keras.Input((context,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="tokens")(tokens)
    x += layers.Embedding(context, WIDTH, name="positions")(np.arange(context))
    for block in range(blocks):
        y = layers.LayerNormalization(name=f"attention_norm_{block}")(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{block}")
        x += attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"mlp_norm_{block}")(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"up_{block}")(y)
        x += layers.Dense(WIDTH, name=f"down_{block}")(y)
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="head")(x))


class Losses(keras.callbacks.Callback):
    """Keeps the loss of each step; Keras gives the mean since the epoch's first."""

    def __init__(self):
        super().__init__()
        self.means = []

    def on_train_batch_end(self, batch, logs=None):
        self.means.append(logs["loss"])

    def steps(self):
        sums = np.cumsum(np.ones(len(self.means))) * self.means
        return np.diff(sums, prepend=0).tolist()


def train(optimizer, rate, steps, batch=8, context=64):
    """The loss of each step, and the optimizer's state."""
    text, losses = Text(), Losses()
    windows = np.concatenate([text.batch(0, step, batch, context) for step in range(steps)])
    keras.utils.set_random_seed(0)
    model = make_model(context)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(Optimizer(optimizer(rate)), loss)
    fit = {"batch_size": batch, "shuffle": False, "verbose": 0}
    model.fit(windows[:, :-1], windows[:, 1:], callbacks=[losses], **fit)
    return losses.steps(), model.optimizer.state


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    print(f"loss {train(optimizer, 1e-2, parser.parse_args().steps)[0][-1]:.3f}")


if __name__ == "__main__":
    main()
