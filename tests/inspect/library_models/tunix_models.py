"""Tunix's language models, as its trainer merges them, with its default loss."""

import importlib

import jax
import jax.numpy as jnp
from flax import nnx

from tests.inspect.library_models.model import instance, tokens


def language(family, name, config):
    from tunix.sft import peft_trainer, utils

    module = importlib.import_module(f"tunix.models.{family}.model")
    made = nnx.eval_shape(
        lambda: getattr(module, name)(
            module.ModelConfig(**instance(config)), rngs=nnx.Rngs(0)
        )
    )
    graph, params, rest = nnx.split(made, nnx.Param, ...)

    def loss(params, rest, text):
        mask = jnp.ones_like(text, bool)
        inputs = (
            utils.build_positions_from_mask(mask),
            utils.make_causal_attn_mask(mask),
        )
        result = peft_trainer._default_loss_fn(
            nnx.merge(graph, params, rest, copy=True), text, mask, *inputs
        )
        return jax.tree.leaves(result)[0]

    return loss, params, [rest, tokens(2, 8)]
