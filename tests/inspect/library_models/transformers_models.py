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


def maker(loss, *targets):
    """A maker of models: `loss` of what a model returns for `call`, and of the targets, or of the table's labels."""

    def make(call, labels=None, **names):
        module, params = made(**names)

        def loss_of_call(params, call, *targets):
            return loss(module(**call, params=params), *targets)

        given = [array(labels)] if labels else targets
        return loss_of_call, params, [arrays(call), *given]

    return make


def span_loss(out, begin, end):
    """Begin and end of an answer: a softmax over positions."""
    return cross_entropy(out.start_logits, begin) + cross_entropy(out.end_logits, end)


def replaced_loss(out, is_replaced):
    return optax.sigmoid_binary_cross_entropy(out.logits, is_replaced).mean()


def pair_loss(out):
    logits = out.logits_per_image
    labels = jnp.arange(logits.shape[0])
    return cross_entropy(logits, labels) + cross_entropy(logits.T, labels)


def alignment_loss(out, labels):
    """A loss over all alignments of sound and text."""
    no_padding = jnp.zeros(out.logits.shape[:2])
    return optax.ctc_loss(
        out.logits, no_padding, labels, jnp.zeros(labels.shape)
    ).mean()


labelled = maker(lambda out, labels: cross_entropy(out.logits, labels))
spans = maker(span_loss, tokens(2), tokens(2))
replaced_tokens = maker(replaced_loss, tokens(2, 8))
pairs = maker(pair_loss)
alignments = maker(alignment_loss, tokens(2, 5))


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
