"""Flax's models of Transformers."""

import types

import jax.numpy as jnp
import optax

from tests.inspect.library_models.model import (
    array,
    arrays,
    cross_entropy,
    shape,
    tokens,
)


class _WithOldClip(types.ModuleType):
    """`jax.numpy` with the argument names that T5's file has: `clip(x, a_max=...)`."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    @staticmethod
    def clip(x, a_min=None, a_max=None):
        return jnp.clip(x, a_min, a_max)


def made(model, config, settings):
    """A model without parameters, and the shapes of its parameters."""
    import transformers
    from transformers.models.t5 import modeling_flax_t5

    modeling_flax_t5.jnp = _WithOldClip("jnp")
    transformers.logging.set_verbosity_error()
    configuration = getattr(transformers, config)(**settings)
    module = getattr(transformers, model)(configuration, _do_init=False)
    return module, module.params_shape_tree


def next_token(call, text="input_ids", **names):
    module, params = made(**names)

    def loss(params, call):
        inputs = call | {text: call[text][:, :-1]}
        return cross_entropy(module(**inputs, params=params).logits, call[text][:, 1:])

    return loss, params, [arrays(call)]


def labelled(call, labels, **names):
    module, params = made(**names)

    def loss(params, call, labels):
        return cross_entropy(module(**call, params=params).logits, labels)

    return loss, params, [arrays(call), array(labels)]


def spans(call, **names):
    """Begin and end of an answer: a softmax over positions."""
    module, params = made(**names)

    def loss(params, call, begin, end):
        out = module(**call, params=params)
        return cross_entropy(out.start_logits, begin) + cross_entropy(
            out.end_logits, end
        )

    return loss, params, [arrays(call), tokens(2), tokens(2)]


def replaced_tokens(call, **names):
    module, params = made(**names)

    def loss(params, call, is_replaced):
        logits = module(**call, params=params).logits
        return optax.sigmoid_binary_cross_entropy(logits, is_replaced).mean()

    return loss, params, [arrays(call), tokens(2, 8)]


def batch_normalized(**names):
    """Parameters alone are inspected; running averages of normalization are an input."""
    module, variables = made(**names)

    def loss(params, averages, images, labels):
        variables = {"params": params, "batch_stats": averages}
        out, _ = module(images, params=variables, train=True)
        return cross_entropy(out.logits, labels)

    return (
        loss,
        variables["params"],
        [variables["batch_stats"], shape(4, 3, 32, 32), tokens(4)],
    )


def pairs(call, **names):
    module, params = made(**names)

    def loss(params, call):
        logits = module(**call, params=params).logits_per_image
        labels = jnp.arange(logits.shape[0])
        return cross_entropy(logits, labels) + cross_entropy(logits.T, labels)

    return loss, params, [arrays(call)]


def alignments(call, **names):
    """A loss over all alignments of sound and text."""
    module, params = made(**names)

    def loss(params, call, labels):
        logits = module(**call, params=params).logits
        no_padding = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
        return optax.ctc_loss(logits, no_padding[0], labels, no_padding[1]).mean()

    return loss, params, [arrays(call), tokens(2, 5)]
