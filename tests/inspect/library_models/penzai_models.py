"""Penzai's transformers, of named arrays."""

import jax

from tests.inspect.library_models.linen_models import HEAD
from tests.inspect.library_models.model import Model, cross_entropy, model, shape, tokens

LEAVES = {
    "*scale.weights": "multiplied entry by entry",
    "*/attention/query.weights": "0>1,2,3",
    "*/attention/{key,value}.weights": "0>1,2",
    "*/attention/output.weights": "0,1,2>3",
    "*/mlp/*.weights": "0>1",
}
PER_HEAD = {"*/attention/query.weights": "0>3", "*/attention/{key,value}.weights": "0>2"}
LINE = "query lm/block_*/attention/query.weights@1,2 4x1; key lm/block_*/attention/key.weights@1 2x1"
SITES = [LINE.replace("*", str(i)) for i in range(2)]


def language(leaves, attentions, **settings):
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=32, projection_dim=8, mlp_hidden_dim=48,
        num_decoder_blocks=2, vocab_size=99, **settings,
    )  # fmt: skip
    made = llamalike_common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0), name="lm")
    slots, values = pz.unbind_params(made, freeze=True)
    arrays, structure = jax.tree.flatten(values)
    names = [str(value.label) for value in values]

    def loss(params, text):
        values = structure.unflatten([params[name] for name in names])
        whole = pz.bind_variables(slots, values, unfreeze_as_copy=True)
        positions = pz.nx.arange("seq", text.shape[1])
        logits = whole(pz.nx.wrap(text, "batch", "seq"), token_positions=positions)
        return cross_entropy(logits.unwrap("batch", "seq", "vocabulary")[:, :-1], text[:, 1:])

    params = {name: shape(*x.shape) for name, x in zip(names, arrays, strict=True)}
    return Model(loss, params, [tokens(2, 8)], LEAVES | leaves, attentions, PER_HEAD)


@model("penzai")
def llama():
    return language({"*lm_head.weights": HEAD}, SITES, mlp_variant="swiglu", tie_embedder_and_logits=False)


@model("penzai")
def gemma():
    return language({}, SITES, mlp_variant="geglu_approx", tie_embedder_and_logits=True)


@model("penzai")
def gemma2():
    settings = {"attn_logits_soft_cap": 50.0, "use_post_attn_norm": True, "use_post_ffw_norm": True}
    refused = ["refused: a clip would not scale"] * 2
    return language({}, refused, mlp_variant="geglu_approx", tie_embedder_and_logits=True, **settings)
