"""Keras-hub's language models on JAX: its tasks and backbones as functions of their trainable variables."""

import os

import jax
import jax.numpy as jnp

from tests.inspect.library_models.linen_models import HEAD
from tests.inspect.library_models.model import Model, cross_entropy, model, shape, tokens

os.environ.setdefault("KERAS_BACKEND", "jax")
SIZES = {"vocabulary_size": 99, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "intermediate_dim": 128}
GROUPED = {k: v for k, v in SIZES.items() if k != "num_heads"} | {
    "num_query_heads": 4,
    "num_key_value_heads": 2,
}
TASK = {"preprocessor": None, "compile": False}


def built(
    name, inputs, leaves, attentions=(), per_head=None, *, measure, task=None, options=None, **settings
):
    """A backbone, with `task` around it; `measure(outputs, inputs, params)` is added to the losses of its layers."""
    import keras
    import keras_hub

    keras.utils.clear_session()  # the numbers in names begin again
    make = name if callable(name) else getattr(keras_hub.models, name)
    with keras.StatelessScope(initialize_variables=False):
        made = make(**settings)
        if task is not None:
            made = getattr(keras_hub.models, task)(backbone=made, **TASK, **(options or {}))

    def shapes(variables):
        named = {}
        for v in variables:  # two towers have names in common
            path = f"second/{v.path}" if v.path in named else v.path
            assert path not in named
            named[path] = shape(*v.shape, dtype=v.dtype)
        return named

    all_params, all_rest = shapes(made.trainable_variables), shapes(made.non_trainable_variables)
    words = [spec.name for spec in jax.tree.leaves(made.input)]
    is_single = not isinstance(made.input, (dict, list))

    def loss(params, rest, inputs):
        own = inputs["images"] if is_single else {word: inputs[word] for word in words}
        values = [params[name] for name in all_params], [rest[name] for name in all_rest]
        out, _, losses = made.stateless_call(*values, own, training=True, return_losses=True)
        return measure(out, inputs, params) + sum(losses)

    return Model(loss, all_params, [all_rest, inputs], leaves, attentions, per_head or {})


def causal(family, leaves, attentions=(), per_head=None, **settings):
    inputs = {"token_ids": tokens(2, 8), "padding_mask": tokens(2, 8)}

    def measure(logits, inputs, params):
        return cross_entropy(logits[:, :-1], inputs["token_ids"][:, 1:])

    return built(
        f"{family}Backbone", inputs, leaves, attentions, per_head,
        measure=measure, task=f"{family}CausalLM", **settings,
    )  # fmt: skip


def masked(family, leaves, attentions=(), per_head=None, **settings):
    words = ("token_ids", "segment_ids", "padding_mask")
    inputs = dict.fromkeys(words, tokens(2, 8)) | dict.fromkeys(("mask_positions", "labels"), tokens(2, 3))

    def measure(logits, inputs, params):
        return cross_entropy(logits, inputs["labels"])

    return built(
        f"{family}Backbone", inputs, leaves, attentions, per_head,
        measure=measure, task=f"{family}MaskedLM", **settings,
    )  # fmt: skip


def translating(family, leaves, attentions=(), per_head=None, **settings):
    words = ("encoder_token_ids", "encoder_padding_mask", "decoder_token_ids", "decoder_padding_mask")

    def measure(logits, inputs, params):
        return cross_entropy(logits[:, :-1], inputs["decoder_token_ids"][:, 1:])

    return built(
        f"{family}Backbone", dict.fromkeys(words, tokens(2, 8)), leaves, attentions, per_head,
        measure=measure, task=f"{family}Seq2SeqLM", **settings,
    )  # fmt: skip


def tied(table, output=None):
    """The loss of a backbone whose table is the head too."""

    def measure(out, inputs, params):
        logits = (out if output is None else out[output]) @ params[table].T
        text = inputs["token_ids" if output is None else "decoder_token_ids"]
        return cross_entropy(logits[:, :-1], text[:, 1:])

    return measure


def site(at, heads="4x1", key_heads="4x1", axis=1, biases=("query", "key"), query="query", key="key"):
    """Heads on an axis of their own; a bias has them one axis earlier."""
    parts = []
    for factor, name, count in (("query", query, heads), ("key", key, key_heads)):
        parts.append(f"{factor} {at}/{name}/kernel@{axis} {count}")
        if factor in biases:
            parts.append(f"{factor} {at}/{name}/bias@{axis - 1} {count}")
    return "; ".join(parts)


def each_layer(line, count=2):
    return [line.replace("*", str(i)) for i in range(count)]


TABLES = {"*position_embedding/embeddings": "added"}
NORM = {"*/gamma": "multiplied entry by entry"}
TABLE = {"token_embedding/embeddings": "looked up"}
EMBEDDED = TABLE | {"token_embedding/reverse_embeddings": HEAD}
QUERIES = {"*/{query,key,value,query_dense,key_dense,value_dense}/kernel": "0>1,2"}
ATTENTION = QUERIES | {"*/attention_output/kernel": "0,1>2"}
PER_HEAD = {"*/{query,key,value,query_dense,key_dense,value_dense}/kernel": "0>2"}


@model("keras_hub")
def gpt2():
    leaves = TABLES | NORM | ATTENTION
    sites = each_layer(site("transformer_layer_*/self_attention"))
    return causal("GPT2", leaves, sites, PER_HEAD, **SIZES, max_sequence_length=8)


@model("keras_hub")
def gpt_neox():
    """Queries, keys and values of a head side by side; a rotation of half of the features; parallel blocks."""
    at = "transformer_layer_*/self_attention/query_key_value"
    line = (
        f"query {at}/kernel@1 4x1 0:16@2; query {at}/bias@0 4x1 0:16@1; "
        f"key {at}/kernel@1 4x1 16:32@2; key {at}/bias@0 4x1 16:32@1"
    )
    leaves = {"*/query_key_value/kernel": "0>1,2/3@2"} | NORM
    heads = {"*/query_key_value/kernel": "0>2/3@2"}
    return causal(
        "GPTNeoX", leaves, each_layer(line), heads, **SIZES, rotary_percentage=0.5, max_sequence_length=8
    )


@model("keras_hub")
def bloom():
    """ALiBi."""
    leaves = TABLE | NORM | QUERIES
    line = site("transformer_layer_*/self_attention", query="query_dense", key="key_dense")
    return causal("Bloom", leaves, each_layer(line), PER_HEAD, **SIZES)


@model("keras_hub")
def falcon():
    """ALiBi that is added before the logits are scaled."""
    leaves = TABLE | NORM | QUERIES
    refused = ["refused: a clip would not scale"] * 2
    sizes = {k: v for k, v in SIZES.items() if k != "num_heads"}
    return causal("Falcon", leaves, refused, PER_HEAD, **sizes, num_attention_heads=4)


@model("keras_hub")
def llama():
    leaves = EMBEDDED | ATTENTION
    line = site("transformer_layer_*/self_attention", key_heads="2x1", biases=())
    return causal("Llama", leaves, each_layer(line), PER_HEAD, **GROUPED)


@model("keras_hub")
def mixtral():
    """Every expert sees every token; a loss of the router's own."""
    leaves = EMBEDDED | ATTENTION | {"*/experts/*": "1>2"}
    line = site("transformer_layer_*/self_attention", key_heads="2x1", biases=())
    return causal("Mixtral", leaves, each_layer(line), PER_HEAD, **GROUPED, num_experts=3, sliding_window=4)


GEMMA = {
    "token_embedding/embeddings": "looked up",
    "*/{query,key,value}/kernel": "1>0,2",
    "*/attention_output/kernel": "0,1>2",
}
GEMMA_PER_HEAD = {"*/{query,key,value}/kernel": "1>2"}


@model("keras_hub")
def gemma():
    """Heads before features; rotated halves that are interleaved."""
    line = (
        "query decoder_block_*/attention/query/kernel@0 4x1; key decoder_block_*/attention/key/kernel@0 2x1"
    )
    return causal("Gemma", GEMMA, each_layer(line), GEMMA_PER_HEAD, **GROUPED, head_dim=8)


@model("keras_hub")
def gemma2():
    options = {
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "use_sliding_window_attention": True,
    }
    options |= {"attention_logit_soft_cap": 50.0, "final_logit_soft_cap": 30.0, "sliding_window_size": 4}
    refused = ["refused: a clip would not scale"] * 2
    return causal("Gemma", GEMMA, refused, GEMMA_PER_HEAD, **GROUPED, head_dim=8, **options)


@model("keras_hub")
def gemma3():
    options = {"use_sliding_window_attention": True, "sliding_window_size": 4, "image_size": 16}
    refused = ["refused: a clip would not scale"] * 2
    return causal("Gemma3", GEMMA, refused, GEMMA_PER_HEAD, **GROUPED, head_dim=8, **options)


@model("keras_hub")
def gemma3n():
    """Streams that are mixed by predicted coefficients, an input for each layer, and keys of earlier layers.

    The head of keras_hub's own task is no parameter: it is the table as it was when the model was made.
    """
    leaves = {
        "*_block_{2,3}/attention/{k_proj,v_proj,k_norm}/*": "never used",
        "*/per_layer_model_projection/kernel": "0>1/4@1|0>1",  # a part of it for each layer
    }
    heads = {"*_block_{0,1}/attention/{k_proj,v_proj}/kernel": "0>1/2@1", "*/q_proj/kernel": "0>1/4@1"}
    return built(
        "Gemma3nBackbone", {"token_ids": tokens(2, 8), "padding_mask": shape(2, 8, dtype=jnp.bool)}, leaves,
        ["refused: a clip would not scale"] * 4, heads,
        measure=tied("text_model/embed_tokens/embedding/embeddings"), text_vocab_size=99, text_hidden_size=64,
        num_hidden_layers=4, pad_token_id=0, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=[128] * 4, hidden_activation="gelu_approximate", sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2, rope_theta=1e4, max_position_embeddings=8,
        vocab_size_per_layer_input=99, hidden_size_per_layer_input=6, altup_num_inputs=3, laurel_rank=5,
        num_kv_shared_layers=2, activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
    )  # fmt: skip


@model("keras_hub")
def gpt_oss():
    """A learned logit beside those of the keys, and experts whose gates and values are interleaved."""
    leaves = EMBEDDED | ATTENTION | {
        "*/sinks": "joined with data",
        "*/gate_up_proj": "1>2/128x1,1@2",
        "*/down_proj": "1>2",
    }  # fmt: skip
    line = site("transformer_layer_*/self_attention", key_heads="2x1")
    return causal("GptOss", leaves, each_layer(line), PER_HEAD, **GROUPED, num_experts=3, sliding_window=4)


@model("keras_hub")
def qwen3_5_experts():
    """A gated delta net, then attention whose queries stand beside gates; experts, one of them for all tokens."""
    leaves = EMBEDDED | {
        "*/conv1d_kernel": "a depthwise convolution",
        "*/A_log": "exp|multiplied",
        "*/in_proj_qkv/kernel": "0>1/16,16,48@1",
        "*/query/kernel": "0>1,2/2@2",
        "*/{key,value}/kernel": "0>1,2",
        "*/attention_output/kernel": "0,1>2",
        "*/shared_expert_gate/kernel": "multiplied by vectors",
        "*/experts/expert_feedforward_gate_dense": "1>2/2@2",
        "*/experts/expert_feedforward_output_dense": "1>2"
    }  # fmt: skip
    return causal(
        "Qwen3_5Moe", leaves, ["refused: a clip would not scale"],
        {
            "*/query/kernel": "0>2/2@2",
            "*/{key,value}/kernel": "0>2",
            "*/in_proj_qkv/kernel": "0>1/8,8,8,8,12,12,12,12@1",
        },
        vocabulary_size=99, num_layers=2, num_query_heads=4, num_key_value_heads=2, head_dim=8, hidden_dim=64,
        moe_intermediate_dim=20, shared_expert_intermediate_size=24, num_experts=3, top_k=2,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=12,
    )  # fmt: skip


@model("keras_hub")
def bert():
    leaves = {"pooled_dense/*": "never used"} | TABLES | NORM | ATTENTION
    sites = each_layer(site("transformer_layer_*/self_attention_layer"))
    return masked("Bert", leaves, sites, PER_HEAD, **SIZES, max_sequence_length=8)


@model("keras_hub")
def albert():
    """Two layers with the same parameters: one attention, called twice."""
    leaves = {"pooled_dense/*": "never used"} | TABLES | NORM | ATTENTION
    sites = [site("group_0_inner_layer_0/self_attention_layer")]
    return masked("Albert", leaves, sites, PER_HEAD, **SIZES, embedding_dim=20, max_sequence_length=8)


@model("keras_hub")
def deberta():
    """Logits of contents and positions, with the same projections."""
    learned = dict.fromkeys(("rel_embedding/rel_embedding", "rel_embedding/*/gamma"), "a learned input")
    leaves = {**learned, **NORM, "*/{query,key,value}/kernel": "0>1,2"}
    refused = ["refused: a clip would not scale"] * 2  # but added to those of positions
    return masked("DebertaV3", leaves, refused, PER_HEAD, **SIZES, max_sequence_length=8, bucket_size=6)


@model("keras_hub")
def roformer():
    """A rotation of neighbouring features."""
    leaves = TABLE
    line = site(
        "transformer_layer_*/attention_layer",
        "4x16",
        "4x16",
        biases=(),
        query="q_dense_layer",
        key="k_dense_layer",
    )
    heads = {"*/{q_dense_layer,k_dense_layer,v_dense_layer}/kernel": "0>1/4@1"}
    return masked("RoformerV2", leaves, each_layer(line), heads, **SIZES, head_size=16)


@model("keras_hub")
def f_net():
    """Tokens are mixed by a Fourier transform."""
    leaves = {"logits/kernel": HEAD} | TABLES | NORM
    sizes = {k: v for k, v in SIZES.items() if k != "num_heads"}
    return built(
        "FNetBackbone", dict.fromkeys(("token_ids", "segment_ids"), tokens(2, 8)) | {"labels": tokens(2)}, leaves,
        measure=lambda logits, inputs, params: cross_entropy(logits, inputs["labels"]),
        task="FNetTextClassifier", options={"num_classes": 5}, **sizes, max_sequence_length=8,
    )  # fmt: skip


@model("keras_hub")
def xlnet():
    """Logits of contents, positions and segments, each with a bias of its own on the queries."""
    leaves = {
        "*/mask_emb": "never used",
        "*/segment_encoding": "by names: select_n is not followed",
        **NORM,
        "*/{query,key,value,encoding}/kernel": "0>1,2",
        "*/attention_output/kernel": "1,2>0",
    }
    return built(
        "XLNetBackbone", dict.fromkeys(("token_ids", "padding_mask", "segment_ids"), tokens(2, 8)), leaves,
        ["refused: a clip would not scale"] * 2,
        {"*/{query,key,value,encoding}/kernel": "0>2"},
        measure=tied("content_query_embedding/word_embedding/embeddings"), **SIZES,
    )  # fmt: skip


@model("keras_hub")
def t5():
    """A learned relative bias that the first layer makes for all; none in cross attention."""
    leaves = {"*self_attention/embeddings": "looked up|added", "*/weight": "multiplied entry by entry"}
    bias = "refused: a clip would not scale"
    at = "transformer_decoder_layer_*/cross_attention"
    cross = each_layer(site(at, "4x8", "4x8", biases=(), query="query_projector", key="key_projector"))
    heads = {"*/{query_projector,key_projector,value_projector}/kernel": "0>1/4@1"}
    return translating(
        "T5", leaves, [bias, bias, bias, cross[0], bias, cross[1]], heads, **SIZES, key_value_dim=8
    )


@model("keras_hub")
def bart():
    leaves = TABLES | NORM | ATTENTION
    at = "transformer_decoder_layer_{}/{}_attention"
    sites = each_layer(site("transformer_encoder_layer_*/self_attention_layer"))
    sites += [site(at.format(i, kind)) for i in range(2) for kind in ("self", "cross")]
    return translating("Bart", leaves, sites, PER_HEAD, **SIZES, max_sequence_length=8)


@model("keras_hub")
def t5gemma():
    """Grouped queries in cross attention, to an encoder of another width."""
    leaves = ATTENTION
    sites = [
        site(at, key_heads="2x1", biases=())
        for at in (
            "encoder_layer_0/self_attention",
            "decoder_layer_0/self_attention",
            "decoder_layer_0/cross_attention",
        )
    ]
    sides = {
        f"{side}_{word}": value
        for side, width in (("encoder", 48), ("decoder", 64))
        for word, value in (
            ("hidden_dim", width), ("intermediate_dim", width + 32), ("num_layers", 1), ("num_attention_heads", 4),
            ("num_key_value_heads", 2), ("head_dim", 8), ("layer_types", ["full_attention"]),
        )
    }  # fmt: skip
    return translating(
        "T5Gemma", leaves, sites, PER_HEAD, vocabulary_size=99, **sides, cross_attention_hidden_size=48
    )


def hearing(family, inputs, leaves, attentions, table, **settings):
    """Sound to text, with the decoder's own table as the head."""
    inputs |= {"decoder_token_ids": tokens(2, 8), "decoder_padding_mask": shape(2, 8, dtype=jnp.bool)}
    return built(
        f"{family}Backbone", inputs, leaves | NORM | ATTENTION, attentions, PER_HEAD,
        measure=tied(table, "decoder_sequence_output"), **settings,
    )  # fmt: skip


@model("keras_hub")
def whisper():
    """Convolutions before the layers, keys without a bias."""
    sites = [site("transformer_encoder_layer_0/self_attention_layer", biases=("query",))]
    sites += [
        site(f"transformer_decoder_layer_0/{kind}_attention", biases=("query",)) for kind in ("self", "cross")
    ]
    return hearing(
        "Whisper", {"encoder_features": shape(2, 16, 7)}, TABLES | {"*conv_layer_{1,2}/kernel": "0,1>2"}, sites,
        "decoder_token_and_position_embedding/token_embedding/embeddings", **SIZES | {"num_layers": 1},
        num_mels=7, max_encoder_sequence_length=16, max_decoder_sequence_length=8,
    )  # fmt: skip


@model("keras_hub")
def moonshine():
    """Waves; a rotation of some features; a gate beside the decoder's values."""
    leaves = TABLE | {"{conv1,conv2,conv3}/kernel": "0,1>2", "*/moonshine_mlp/dense_1/kernel": "0>1/2@1"}
    sites = [
        site(at, biases=())
        for at in (
            "encoder_block_0/self_attention_layer",
            "decoder_block_0/moonshine_multi_head_attention",
            "decoder_block_0/moonshine_multi_head_attention_1",
        )
    ]
    inputs = {
        "encoder_input_values": shape(2, 2048, 1),
        "encoder_padding_mask": shape(2, 2048, dtype=jnp.bool),
    }
    return hearing(
        "Moonshine", inputs, leaves, sites, "token_embedding/embeddings", vocabulary_size=99, filter_dim=64,
        encoder_num_layers=1, decoder_num_layers=1, hidden_dim=64, intermediate_dim=128, encoder_num_heads=4,
        decoder_num_heads=4,
    )  # fmt: skip


@model("keras_hub")
def rwkv7():
    """A delta rule over time, in a loop; low-rank decays, gates and rates."""
    leaves = {
        "token_embedding/embeddings": "looked up",
        "head/kernel": HEAD,
        **NORM,
        "*/{beta,w0,a0,v0}": "added",
        "*/{x_r,x_w,x_k,x_v,x_a,x_g,k_k,k_a,r_k,time_mix_k}": "multiplied entry by entry",
        "*": "0>1",
    }
    inputs = {"token_ids": tokens(2, 8), "padding_mask": tokens(2, 8)}
    heads = {"*/{receptance,key,value}/kernel": "0>1/4@1", "*/{w2,a2,v2}": "0>1/4@1"}
    return built(
        "RWKV7Backbone", inputs, leaves, (), heads, vocabulary_size=99, num_layers=2, hidden_size=64, head_size=16,
        intermediate_dim=128, gate_lora=6, mv_lora=5, aaa_lora=7, decay_lora=9,
        measure=lambda logits, inputs, params: cross_entropy(logits[:, :-1], inputs["token_ids"][:, 1:]),
    )  # fmt: skip
