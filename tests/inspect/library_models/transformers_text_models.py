"""Flax's language models of Transformers."""

import types

import jax.numpy as jnp
import optax

from tests.inspect.library_models.model import Model, cross_entropy, model, shape, tokens

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
TABLE = "looked up"
POSITIONS = "looked up|added"  # a table of which the program takes constant rows
HEAD = "an output head, as no product follows it"


def each_layer(line: str, layers: int = 2) -> list[str]:
    """The same for each layer, whose number takes the place of `*`."""
    return [line.replace("*", str(i)) for i in range(layers)]


def of(class_name: str, config_name: str, **settings):
    """A model without parameters, and the shapes of its parameters."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, config_name)(**settings)
    made = getattr(transformers, class_name)(config, _do_init=False)
    return made, made.params_shape_tree


def causal(made):
    """Loss of the next token."""

    def loss(params, text):
        return cross_entropy(made(text, params=params).logits[:, :-1], text[:, 1:])

    return loss, [tokens(2, 8)]


def masked(made):
    """Loss of the masked tokens."""

    def loss(params, text, kinds, labels):
        return cross_entropy(made(text, token_type_ids=kinds, params=params).logits, labels)

    return loss, [tokens(2, 8)] * 3


def translating(made):
    def loss(params, text, labels):
        start = jnp.zeros_like(labels[:, :1])
        logits = made(
            text, params=params, decoder_input_ids=jnp.concatenate([start, labels[:, :-1]], 1)
        ).logits
        return cross_entropy(logits, labels)

    return loss, [tokens(2, 8), tokens(2, 6)]


@model("transformers")
def gpt2():
    made, params = of(
        "FlaxGPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=4, vocab_size=99, n_positions=64
    )
    return Model(
        causal(made)[0],
        params,
        causal(made)[1],
        {
            "*/wpe/embedding": POSITIONS,
            "*/c_attn/kernel": "1>0/3@0",  # stored (out, in)
            "*/kernel": "1>0",
        },
        each_layer(
            "query transformer/h/*/attn/c_attn/kernel@0 4x16; query transformer/h/*/attn/c_attn/bias@0 4x16; "
            "key transformer/h/*/attn/c_attn/kernel@0 4x16+64; key transformer/h/*/attn/c_attn/bias@0 4x16+64"
        ),
        {"*/c_attn/kernel": "1>0/12@0"},
    )


@model("transformers")
def gpt2_cross_attention():
    """A decoder that also reads an encoder's states."""
    made, params = of(
        "FlaxGPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=1, n_head=4, vocab_size=99, n_positions=64,
        add_cross_attention=True,
    )  # fmt: skip

    def loss(params, text, states):
        mask = jnp.ones(states.shape[:2], int)
        logits = made(text, params=params, encoder_hidden_states=states, encoder_attention_mask=mask).logits
        return cross_entropy(logits[:, :-1], text[:, 1:])

    at = "transformer/h/0"
    return Model(
        loss,
        params,
        [tokens(2, 8), shape(2, 5, 64)],
        {
            "*/wpe/embedding": POSITIONS,
            "*/attn/c_attn/kernel": "1>0/3@0",
            "*/crossattention/c_attn/kernel": "1>0/2@0",  # keys and values
            "*/kernel": "1>0",
        },
        [
            f"query {at}/attn/c_attn/kernel@0 4x16; query {at}/attn/c_attn/bias@0 4x16; "
            f"key {at}/attn/c_attn/kernel@0 4x16+64; key {at}/attn/c_attn/bias@0 4x16+64",
            f"query {at}/crossattention/q_attn/kernel@0 4x16; query {at}/crossattention/q_attn/bias@0 4x16; "
            f"key {at}/crossattention/c_attn/kernel@0 4x16; key {at}/crossattention/c_attn/bias@0 4x16",
        ],
        {
            "*/attn/c_attn/kernel": "1>0/12@0",
            "*/crossattention/c_attn/kernel": "1>0/8@0",
            "*/q_attn/kernel": "1>0/4@0",
        },
    )


BERT_HEADS = {"*/self/{query,key,value}/kernel": "0>1/4@1"}
BERT = {"*/position_embeddings/embedding": POSITIONS}


def self_attention(at: str, query: str = "query", key: str = "key", biases: str = "qk") -> str:
    """Separate projections of 64 features, 4 heads of 16."""
    parts = [f"query {at}/{query}/kernel@1 4x16", f"key {at}/{key}/kernel@1 4x16"]
    if "q" in biases:
        parts.append(f"query {at}/{query}/bias@0 4x16")
    if "k" in biases:
        parts.append(f"key {at}/{key}/bias@0 4x16")
    return "; ".join(parts)


@model("transformers")
def bert_masked():
    made, params = of("FlaxBertForMaskedLM", "BertConfig", **SIZES)
    leaves = BERT
    sites = each_layer(self_attention("bert/encoder/layer/*/attention/self"))
    return Model(masked(made)[0], params, masked(made)[1], leaves, sites, BERT_HEADS)


@model("transformers")
def bert_classifier():
    made, params = of("FlaxBertForSequenceClassification", "BertConfig", **SIZES)

    def loss(params, text, kinds, labels):
        return cross_entropy(made(text, token_type_ids=kinds, params=params).logits, labels)

    leaves = BERT | {"classifier/kernel": HEAD}
    sites = each_layer(self_attention("bert/encoder/layer/*/attention/self"))
    return Model(loss, params, [tokens(2, 8), tokens(2, 8), tokens(2)], leaves, sites, BERT_HEADS)


@model("transformers")
def bert_spans():
    """Begin and end of an answer: a softmax over positions."""
    made, params = of("FlaxBertForQuestionAnswering", "BertConfig", **SIZES)

    def loss(params, text, kinds, begin, end):
        out = made(text, token_type_ids=kinds, params=params)
        return cross_entropy(out.start_logits, begin) + cross_entropy(out.end_logits, end)

    leaves = BERT | {"qa_outputs/kernel": HEAD}
    sites = each_layer(self_attention("bert/encoder/layer/*/attention/self"))
    return Model(loss, params, [tokens(2, 8), tokens(2, 8), tokens(2), tokens(2)], leaves, sites, BERT_HEADS)


@model("transformers")
def roformer():
    made, params = of("FlaxRoFormerForMaskedLM", "RoFormerConfig", **SIZES)
    leaves = {k: v for k, v in BERT.items() if "position" not in k}
    sites = each_layer(self_attention("roformer/encoder/layer/*/attention/self"))
    return Model(masked(made)[0], params, masked(made)[1], leaves, sites, BERT_HEADS)


@model("transformers")
def electra():
    made, params = of("FlaxElectraForPreTraining", "ElectraConfig", embedding_size=32, **SIZES)

    def loss(params, text, kinds, is_replaced):
        logits = made(text, token_type_ids=kinds, params=params).logits
        return optax.sigmoid_binary_cross_entropy(logits, is_replaced).mean()

    leaves = BERT | {"*/dense_prediction/kernel": f"{HEAD}|multiplied by vectors"}
    sites = each_layer(self_attention("electra/encoder/layer/*/attention/self"))
    return Model(loss, params, [tokens(2, 8)] * 3, leaves, sites, BERT_HEADS)


@model("transformers")
def albert():
    """Two layers with the same parameters: one attention, called twice."""
    made, params = of("FlaxAlbertForMaskedLM", "AlbertConfig", embedding_size=32, **SIZES)
    leaves = BERT
    sites = [self_attention("albert/encoder/albert_layer_groups/0/albert_layers/0/attention")]
    heads = {"*/attention/{query,key,value}/kernel": "0>1/4@1"}
    return Model(masked(made)[0], params, masked(made)[1], leaves, sites, heads)


@model("transformers")
def distilbert():
    made, params = of(
        "FlaxDistilBertForMaskedLM", "DistilBertConfig", dim=64, n_layers=2, n_heads=4, hidden_dim=256,
        vocab_size=99, max_position_embeddings=64,
    )  # fmt: skip

    def loss(params, text, labels):
        return cross_entropy(made(text, params=params).logits, labels)

    leaves = {"*/position_embeddings/embedding": POSITIONS}
    sites = each_layer(self_attention("distilbert/transformer/layer/*/attention", "q_lin", "k_lin"))
    heads = {"*/{q_lin,k_lin,v_lin}/kernel": "0>1/4@1"}
    return Model(loss, params, [tokens(2, 8)] * 2, leaves, sites, heads)


@model("transformers")
def bloom():
    """Queries, keys and values of a head side by side; ALiBi."""
    made, params = of(
        "FlaxBloomForCausalLM", "BloomConfig", hidden_size=64, n_layer=2, n_head=4, vocab_size=99
    )
    fused = "transformer/h/*/self_attention/query_key_value"
    return Model(
        causal(made)[0],
        params,
        causal(made)[1],
        {"*/query_key_value/kernel": "0>1/4x16,16,16@1"},
        each_layer(
            f"query {fused}/kernel@1 4x16/48; query {fused}/bias@0 4x16/48; "
            f"key {fused}/kernel@1 4x16+16/48; key {fused}/bias@0 4x16+16/48"
        ),
        {"*/query_key_value/kernel": "0>1/12@1"},
    )


SEPARATE = {"*/{q_proj,k_proj,v_proj}/kernel": "0>1/4@1"}


@model("transformers")
def gptj():
    """A rotary embedding of neighbouring features, of half of them."""
    made, params = of(
        "FlaxGPTJForCausalLM", "GPTJConfig", n_embd=64, n_layer=2, n_head=4, vocab_size=99, n_positions=64,
        rotary_dim=8,
    )  # fmt: skip
    leaves = {"lm_head/kernel": HEAD}
    sites = each_layer(self_attention("transformer/h/*/attn", "q_proj", "k_proj", ""))
    return Model(causal(made)[0], params, causal(made)[1], leaves, sites, SEPARATE)


@model("transformers")
def gpt_neo():
    """A local attention after a global one."""
    made, params = of(
        "FlaxGPTNeoForCausalLM", "GPTNeoConfig", hidden_size=64, num_layers=2, num_heads=4, vocab_size=99,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=64, window_size=4,
    )  # fmt: skip
    leaves = {"*/wpe/embedding": POSITIONS}
    sites = each_layer(self_attention("transformer/h/*/attn/attention", "q_proj", "k_proj", ""))
    return Model(causal(made)[0], params, causal(made)[1], leaves, sites, SEPARATE)


@model("transformers")
def llama():
    made, params = of("FlaxLlamaForCausalLM", "LlamaConfig", **SIZES)
    leaves = {"lm_head/kernel": HEAD}
    sites = each_layer(self_attention("model/layers/*/self_attn", "q_proj", "k_proj", ""))
    return Model(causal(made)[0], params, causal(made)[1], leaves, sites, SEPARATE)


def grouped(at: str, key_heads: int) -> str:
    return f"query {at}/q_proj/kernel@1 4x16; key {at}/k_proj/kernel@1 {key_heads}x16"


@model("transformers")
def mistral():
    made, params = of("FlaxMistralForCausalLM", "MistralConfig", **SIZES, num_key_value_heads=2)
    leaves = {"lm_head/kernel": HEAD}
    heads = {"*/q_proj/kernel": "0>1/4@1", "*/{k_proj,v_proj}/kernel": "0>1/2@1"}
    sites = each_layer(grouped("model/layers/*/self_attn", 2))
    return Model(causal(made)[0], params, causal(made)[1], leaves, sites, heads)


@model("transformers")
def gemma():
    """One key head for all queries; a tied head; norms that scale by 1 + weight."""
    made, params = of("FlaxGemmaForCausalLM", "GemmaConfig", **SIZES, num_key_value_heads=1, head_dim=16)
    leaves = {}
    sites = each_layer(grouped("model/layers/*/self_attn", 1))
    return Model(causal(made)[0], params, causal(made)[1], leaves, sites, {"*/q_proj/kernel": "0>1/4@1"})


@model("transformers")
def opt():
    made, params = of(
        "FlaxOPTForCausalLM", "OPTConfig", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=256,
        vocab_size=99, max_position_embeddings=64, word_embed_proj_dim=64,
    )  # fmt: skip
    leaves = {"*/embed_positions/embedding": POSITIONS}
    sites = each_layer(self_attention("model/decoder/layers/*/self_attn", "q_proj", "k_proj"))
    return Model(causal(made)[0], params, causal(made)[1], leaves, sites, SEPARATE)


BART_SIZES = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}


def encoder_decoder(biases: str = "qk", layers: int = 2) -> list[str]:
    encoder = each_layer(
        self_attention("model/encoder/layers/*/self_attn", "q_proj", "k_proj", biases), layers
    )
    decoder = [
        self_attention(f"model/decoder/layers/{i}/{attention}", "q_proj", "k_proj", biases)
        for i in range(layers)
        for attention in ("self_attn", "encoder_attn")
    ]
    return encoder + decoder


@model("transformers")
def bart():
    made, params = of("FlaxBartForConditionalGeneration", "BartConfig", **BART_SIZES)
    leaves = {"*/embed_positions/embedding": POSITIONS, "final_logits_bias": "no gradient"}
    return Model(translating(made)[0], params, translating(made)[1], leaves, encoder_decoder(), SEPARATE)


@model("transformers")
def pegasus():
    """Sinusoidal positions, norms before the layers."""
    made, params = of("FlaxPegasusForConditionalGeneration", "PegasusConfig", **BART_SIZES)
    leaves = {"final_logits_bias": "no gradient"}
    return Model(translating(made)[0], params, translating(made)[1], leaves, encoder_decoder(), SEPARATE)


class _WithOldClip(types.ModuleType):
    """`jax.numpy` with the argument names that T5's file has: `clip(x, a_max=...)`."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    @staticmethod
    def clip(x, a_min=None, a_max=None):
        return jnp.clip(x, a_min, a_max)


@model("transformers")
def t5():
    """A learned relative bias on the logits of self-attention; none in cross attention."""
    from transformers.models.t5 import modeling_flax_t5

    modeling_flax_t5.jnp = _WithOldClip("jnp")
    made, params = of(
        "FlaxT5ForConditionalGeneration", "T5Config", d_model=64, d_kv=16, d_ff=256, num_layers=2, num_heads=4,
        vocab_size=99,
    )  # fmt: skip
    refused = ["refused: a clip would not scale"]
    cross = [
        f"query {at}/q/kernel@1 4x16; key {at}/k/kernel@1 4x16"
        for at in (f"decoder/block/{i}/layer/1/EncDecAttention" for i in range(2))
    ]
    return Model(
        translating(made)[0],
        params,
        translating(made)[1],
        {"*/relative_attention_bias/embedding": "looked up|added"},
        [*refused * 2, *refused, cross[0], *refused, cross[1]],
        {"*/{q,k,v}/kernel": "0>1/4@1"},
    )
