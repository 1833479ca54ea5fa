"""Train a Keras model on JAX with Muon: `Optimizer` makes a Keras optimizer of any Optax transformation.

pip install -e . keras && python examples/recipes/with_keras.py
"""

import argparse
import functools
import os
from collections import OrderedDict

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from keras import layers
from text_data import Text

import muonjax

VOCABULARY, WIDTH, HEADS = 256, 64, 4


class Optimizer(keras.optimizers.Optimizer):
    """An Optax transformation as a Keras optimizer, for Keras 3 with the backend JAX.

    The transformation gets the model's variables as nested dicts with the names that Keras gives them, such as
    `params["transformer"]["query"]["kernel"]`: `muonjax.tabulate(optimizer.params(model.trainable_variables))`. All of
    its state are variables of the optimizer, so that Keras saves and restores it with `save_weights`.

    Args:
      transformation: Such as `muonjax.muon(2e-3)`, with its own learning rate and weight decay.
      learning_rate: A factor, or a schedule of factors, on top of the transformation's; callbacks can change it.
      **settings: Those of `keras.optimizers.Optimizer`: `global_clipnorm`, `gradient_accumulation_steps`, `use_ema`, ….

    """

    def __init__(self, transformation, learning_rate=1.0, **settings):
        if keras.backend.backend() != "jax":
            raise ValueError(
                f"Optimizer needs Keras's backend 'jax', not {keras.backend.backend()!r}: set the "
                "environment variable KERAS_BACKEND=jax before keras is imported."
            )
        super().__init__(learning_rate=learning_rate, **settings)
        self.transformation = transformation

    def params(self, variables, values=None):
        """The tree that the transformation gets: `values`, by default those of `variables`, by Keras's paths.

        In the order of the variables, for Keras numbers names, and `dense_10` comes before `dense_9`.
        """
        tree = OrderedDict()
        for variable, value in zip(variables, values or [v.value for v in variables], strict=True):
            *layers, name = variable.path.split("/")
            node = functools.reduce(
                lambda node, layer: node.setdefault(layer, OrderedDict()), layers, tree
            )
            if name in node:
                raise ValueError(
                    f"Optimizer: two variables are called {variable.path!r}; give their layers a name=."
                )
            node[name] = value
        return tree

    def build(self, variables):
        """Makes the transformation's state, as variables of this optimizer."""
        if self.built:
            return
        super().build(variables)
        leaves, self._structure = jax.tree.flatten(self.transformation.init(self.params(variables)))
        self._state = [
            self.add_variable(leaf.shape, dtype=leaf.dtype.name, name=f"state_{i}")
            for i, leaf in enumerate(leaves)
        ]
        for variable, leaf in zip(self._state, leaves, strict=True):
            variable.assign(leaf)

    @property
    def state(self):
        """The transformation's state, such as for `muonjax.metrics`."""
        return self._structure.unflatten([variable.value for variable in self._state])

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        params = self.params(trainable_variables)
        updates, state = self.transformation.update(
            self.params(trainable_variables, grads), self.state, params
        )
        for variable, leaf in zip(self._state, jax.tree.leaves(state), strict=True):
            variable.assign(leaf)
        variables = self.params(trainable_variables, trainable_variables)
        jax.tree.map(
            lambda variable, update: variable.assign_add(learning_rate * update), variables, updates
        )


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
