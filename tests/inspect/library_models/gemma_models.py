"""Gemma's own library: its transformers of the second and third generation, with images, adapters, and an encoder."""

import jax

from tests.inspect.library_models.model import arrays, cross_entropy, instance


def next_token(model, inputs, text="tokens"):
    made = instance(model)
    inputs = arrays(inputs)
    params = jax.eval_shape(
        lambda inputs: made.init(jax.random.key(0), **inputs), inputs
    )["params"]

    def loss(params, inputs):
        logits = made.apply({"params": params}, **inputs).logits
        return cross_entropy(logits[:, :-1], inputs[text][:, 1:])

    return loss, params, [inputs]


def adapters(model, inputs):
    """Adapters of each kernel alone are trained."""
    whole_loss, whole, inputs = next_token(model, inputs)
    flat, structure = jax.tree_util.tree_flatten_with_path(whole)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    leaves = {name: leaf for name, (_, leaf) in zip(names, flat, strict=True)}
    trained = {name: leaf for name, leaf in leaves.items() if "lora" in name}
    frozen = {name: leaf for name, leaf in leaves.items() if name not in trained}

    def loss(trained, frozen, inputs):
        every = trained | frozen
        return whole_loss(structure.unflatten([every[name] for name in names]), inputs)

    return loss, trained, [frozen, *inputs]
