"""Tunix's language models, as its trainer merges them, with its default loss."""

import importlib

import jax
import jax.numpy as jnp
from flax import nnx

from tests.inspect.library_models.linen_models import HEAD
from tests.inspect.library_models.model import Model, model, tokens


def language(family, name, config, leaves, attentions, per_head):
    from tunix.sft import peft_trainer, utils

    module = importlib.import_module(f"tunix.models.{family}.model")
    made = nnx.eval_shape(lambda: getattr(module, name)(module.ModelConfig(**config), rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(made, nnx.Param, ...)

    def loss(params, rest, text):
        mask = jnp.ones_like(text, bool)
        inputs = utils.build_positions_from_mask(mask), utils.make_causal_attn_mask(mask)
        result = peft_trainer._default_loss_fn(nnx.merge(graph, params, rest, copy=True), text, mask, *inputs)
        return jax.tree.leaves(result)[0]

    return Model(loss, params, [rest, tokens(2, 8)], leaves, attentions, per_head)


SIZES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
LLAMA = {
    "embedder/input_embedding": "looked up",
    "lm_head/w": HEAD,
    "*norm/w": "multiplied entry by entry",
    "*/{q_proj,k_proj,v_proj}/w": "0>1,2",
    "*/o_proj/w": "0,1>2",
}
DENSE = {"*/{gate_proj,up_proj,down_proj}/kernel": "0>1"}
PER_HEAD = {"*/{q_proj,k_proj,v_proj}/w": "0>2"}
GEMMA = DENSE | {
    "embedder/input_embedding": "looked up",
    "*norm/scale": "multiplied entry by entry",
    "*/q_einsum/w": "1>0,2",
    "*/kv_einsum/w": "2>1,3",
    "*/attn_vec_einsum/w": "0,1>2",
}
GEMMA_PER_HEAD = {"*/q_einsum/w": "1>2", "*/kv_einsum/w": "2>3"}


def each_layer(line):
    return [line.replace("*", str(i)) for i in range(2)]


@model("tunix")
def llama3():
    config = SIZES | {"vocab_size": 99, "rope_theta": 10_000, "norm_eps": 1e-5}
    sites = each_layer("query layers/*/attn/q_proj/w@1 4x1; key layers/*/attn/k_proj/w@1 2x1")
    return language("llama3", "Llama3", config, LLAMA | DENSE, sites, PER_HEAD)


@model("tunix")
def qwen2():
    config = SIZES | {"vocab_size": 99, "rope_theta": 10_000, "norm_eps": 1e-5}
    leaves = LLAMA | DENSE | {"*/{q_bias,k_bias,v_bias}": "added"}
    line = (
        "query layers/*/attn/q_proj/w@1 4x1; query layers/*/attn/q_bias@0 4x8; "
        "key layers/*/attn/k_proj/w@1 2x1; key layers/*/attn/k_bias@0 2x8"
    )
    return language("qwen2", "Qwen2", config, leaves, each_layer(line), PER_HEAD)


@model("tunix")
def qwen3():
    config = SIZES | {"vocab_size": 99, "rope_theta": 10_000, "norm_eps": 1e-5}
    refused = ["refused: a clip would not scale"] * 2
    return language("qwen3", "Qwen3", config, LLAMA | DENSE, refused, PER_HEAD)


@model("tunix")
def qwen3_experts():
    config = SIZES | {
        "vocab_size": 99,
        "rope_theta": 10_000,
        "norm_eps": 1e-5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    leaves = LLAMA | {"*/router/kernel": "0>1", "*/{gate_proj,up_proj,down_proj}": "1>2"}
    refused = ["refused: a clip would not scale"] * 2
    return language("qwen3", "Qwen3", config, leaves, refused, PER_HEAD)


@model("tunix")
def gemma2():
    from tunix.models.gemma.model import AttentionType

    config = SIZES | {
        "num_embed": 99,
        "final_logit_softcap": 30.0,
        "attention_types": [AttentionType.GLOBAL] * 2,
        "attn_logits_soft_cap": 50.0,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
    }
    return language("gemma", "Gemma", config, GEMMA, ["refused: a clip would not scale"] * 2, GEMMA_PER_HEAD)


@model("tunix")
def gemma3():
    config = SIZES | {"num_embed": 99, "sliding_window_size": 4}
    return language(
        "gemma3", "Gemma3", config, GEMMA, ["refused: a clip would not scale"] * 2, GEMMA_PER_HEAD
    )
