"""The optimizer of the recipe for Keras, in Keras's own training loop, against Keras's optimizers and Optax by hand."""

import os
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend", allow_module_level=True)
sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples" / "recipes"))
from with_keras import Optimizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # Keras's own
TOKENS = np.random.default_rng(0).integers(0, 11, (16, 6))


def trained(optimizer, epochs=2, number=0):
    """A model after 2 epochs of 4 batches; Keras numbers layers in the order in which they are made."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((6,), dtype="int32"),
        keras.layers.Embedding(11, 8),
        keras.layers.Dense(16, activation="relu", name=f"dense_{number}"),
        keras.layers.Dense(8, name=f"dense_{number + 1}"),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(11, name=f"dense_{number + 2}"),
    ]
    model = keras.Sequential(layers)
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.fit(
        TOKENS,
        TOKENS[:, 0],
        epochs=epochs,
        batch_size=4,
        shuffle=False,
        verbose=0,
    )
    return model


def assert_same(a, b, rtol=1e-4):
    for x, y in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{}, {"global_clipnorm": 0.1}, {"gradient_accumulation_steps": 2}],
)
def test_it_is_the_optimizer_of_keras_that_optax_has_too(settings):
    """Not Adam: its ε stands in another place in Keras."""
    ours = Optimizer(optax.sgd(0.1, momentum=0.9), **settings)
    assert_same(
        trained(ours),
        trained(keras.optimizers.SGD(0.1, momentum=0.9, **settings)),
    )


def test_the_rate_of_keras_is_a_factor():
    assert_same(
        trained(Optimizer(optax.sgd(0.2), learning_rate=0.5)),
        trained(Optimizer(optax.sgd(0.1))),
    )


def test_muon_gets_the_paths():
    optimizer = Optimizer(muonjax.muon(1e-2))
    model = trained(optimizer)
    table = str(muonjax.tabulate(optimizer.params(model.trainable_variables)))
    assert all(words in table for words in ("Muon", "embedding", "output head"))


def test_its_state_is_saved(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    model = trained(Optimizer(muonjax.muon(1e-2)))
    model.save_weights(path)
    other = trained(
        Optimizer(muonjax.muon(1e-2)), epochs=1, number=9
    )  # and "dense_10" < "dense_9"
    other.load_weights(path)
    for x, y in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(x, y)
    model.save(str(tmp_path / "model.keras"))
    again = keras.saving.load_model(str(tmp_path / "model.keras"), compile=False)
    assert_same(again, model, 0)


def test_two_variables_with_one_path_are_refused():
    variables = [keras.Variable(jnp.ones(2), name="same") for _ in range(2)]
    with pytest.raises(
        ValueError,
        match="two variables are called 'same'; give their layers a name=",
    ):
        Optimizer(muonjax.muon(1e-2)).build(variables)
