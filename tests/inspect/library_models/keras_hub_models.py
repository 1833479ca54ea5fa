"""Keras-hub's tasks and backbones on JAX, as functions of their trainable variables."""

import jax
import jax.numpy as jnp

from tests.inspect.library_models.model import (
    arrays,
    cross_entropy,
    instance,
    shape,
)


def next_token(logits, text):
    return cross_entropy(logits[:, :-1], text[:, 1:])


def square(predicted, wanted):
    return jnp.mean((predicted - wanted) ** 2)


def pairs(logits, _):
    return -jnp.mean(jax.nn.log_sigmoid((2 * jnp.eye(len(logits)) - 1) * logits))


LOSSES = {
    "next token": next_token,
    "label": cross_entropy,
    "square": square,
    "pairs": pairs,
}


def built(model, task, probe):
    """A backbone, with a task around it or a dense layer on its first position."""
    import keras

    keras.utils.clear_session()  # the numbers in names begin again
    with keras.StatelessScope(initialize_variables=False):
        made = instance(model)
        if probe:
            head = keras.layers.Dense(probe, name="probe")
            made = keras.Model(made.input, head(made.output[:, 0]))
        if task:
            arguments = {
                "backbone": made,
                "preprocessor": None,
                "compile": False,
            }
            made = instance(task | arguments)
    return made


def shapes(variables):
    named = {}
    for variable in variables:  # two towers have names in common
        path = f"second/{variable.path}" if variable.path in named else variable.path
        assert path not in named
        named[path] = shape(*variable.shape, dtype=variable.dtype)
    return named


def keras_model(
    model, inputs, loss, of, task=None, probe=None, table=None, output=None
):
    """The loss of what is predicted `of` an input, and the losses of layers; a `table` of the parameters as head."""
    made = built(model, task, probe)
    all_params = shapes(made.trainable_variables)
    all_rest = shapes(made.non_trainable_variables)
    words = [spec.name for spec in jax.tree.leaves(made.input)]
    is_single = not isinstance(made.input, (dict, list))

    def whole(params, rest, inputs):
        data = inputs["images"] if is_single else {word: inputs[word] for word in words}
        values = (
            [params[name] for name in all_params],
            [rest[name] for name in all_rest],
        )
        out, _, losses = made.stateless_call(
            *values, data, training=True, return_losses=True
        )
        if output:
            out = out[output]
        if table:
            out = out @ params[table].T
        return LOSSES[loss](out, inputs[of]) + sum(losses)

    return whole, all_params, [all_rest, arrays(inputs)]
