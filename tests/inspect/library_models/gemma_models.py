"""Gemma's own library: its transformers of the second and third generation, with images, adapters, and an encoder."""

import jax
import jax.numpy as jnp

from tests.inspect.library_models.linen_models import HEAD
from tests.inspect.library_models.model import Model, cross_entropy, model, shape, tokens

SIZES = {
    "num_embed": 99,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "final_logit_softcap": None,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "sliding_window_size": 4,
}
LEAVES = {
    "embedder/input_embedding": "looked up",
    "*/scale": "multiplied entry by entry",
    "*/attn/q_einsum/w": "1>0,2",
    "*/attn/kv_einsum/w": "2>1,3",
    "*/attn_vec_einsum/w": "0,1>2",
    "*/mlp/gating_einsum": "1>2",  # gates and values on an axis of their own
    "*/mlp/linear": "0>1",
}
PER_HEAD = {"*/attn/q_einsum/w": "1>2", "*/attn/kv_einsum/w": "2>3"}


def text(made, leaves, attentions, per_head, inputs=None):
    """The loss of the next token."""
    inputs = [tokens(2, 8)] if inputs is None else inputs
    words = ("tokens", "images")

    def named(arrays):
        return dict(zip(words, arrays, strict=False))

    params = jax.eval_shape(lambda *x: made.init(jax.random.key(0), **named(x)), *inputs)["params"]

    def loss(params, *inputs):
        logits = made.apply({"params": params}, **named(inputs)).logits
        return cross_entropy(logits[:, :-1], inputs[0][:, 1:])

    return Model(loss, params, inputs, leaves, attentions, per_head)


def transformer(dtype=jnp.bfloat16, **settings):
    from gemma import gm

    kinds = gm.nn.config.AttentionType
    config = gm.nn.config.TransformerConfig(
        **SIZES | {"attention_types": [kinds.LOCAL_SLIDING, kinds.GLOBAL], **settings}
    )
    return gm.nn.Transformer(config=config, tokens="tokens", dtype=dtype)


def each_layer(line):
    return [line.replace("*", str(i)) for i in range(2)]


GROUPED = "query layer_*/attn/q_einsum/w@0 4x1; key layer_*/attn/kv_einsum/w@1 2x1 0:1@0"


@model("gemma")
def gemma():
    """The first generation: grouped queries, local layers and global ones."""
    return text(transformer(jnp.float32), LEAVES, each_layer(GROUPED), PER_HEAD)


@model("gemma")
def gemma_one_kernel():
    """As many keys as queries: queries, keys and values on an axis of one kernel; kernels stored (out, in)."""
    leaves = {k: v for k, v in LEAVES.items() if "_einsum/w" not in k or "vec" in k}
    leaves |= {"*/attn/qkv_einsum/w": "2>1,3", "*/mlp/gating_einsum": "2>1"}
    at = "layer_*/attn/qkv_einsum/w@1 4x1"
    made = transformer(num_kv_heads=4, transpose_gating_einsum=True)
    sites = each_layer(f"query {at} 0:1@0; key {at} 1:2@0")
    return text(made, leaves, sites, {"*/attn/qkv_einsum/w": "2>3"})


@model("gemma")
def gemma2():
    made = transformer(attn_logits_soft_cap=50.0, final_logit_softcap=30.0)
    return text(made, LEAVES, ["refused: a clip would not scale"] * 2, PER_HEAD)


@model("gemma")
def gemma3():
    made = transformer(use_qk_norm=True, global_base_frequency=1_000_000)
    return text(made, LEAVES, ["refused: a clip would not scale"] * 2, PER_HEAD)


@model("gemma")
def gemma3_adapters():
    """Adapters of each kernel alone are trained."""
    from gemma import gm

    made = gm.nn.LoRA(rank=3, model=transformer(), dtype=jnp.float32)
    whole = jax.eval_shape(lambda x: made.init(jax.random.key(0), x), tokens(2, 8))["params"]
    flat, structure = jax.tree_util.tree_flatten_with_path(whole)
    is_trained = ["lora" in jax.tree_util.keystr(path) for path, _ in flat]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    trained = {name: leaf for name, (_, leaf), mine in zip(names, flat, is_trained, strict=True) if mine}
    frozen = {name: leaf for name, (_, leaf), mine in zip(names, flat, is_trained, strict=True) if not mine}

    def loss(trained, frozen, text):
        every = trained | frozen
        params = structure.unflatten([every[name] for name in names])
        logits = made.apply({"params": params}, text).logits
        return cross_entropy(logits[:, :-1], text[:, 1:])

    leaves = {
        # Whether the frozen head after the last adapter is one more product or a part of the loss, no program says.
        "layer_1/mlp/_LoRAEinsum_linear/*/b": f"0>1|{HEAD}",
        "*/attn_vec_einsum/*/a": "0,1>2",
        "*/q_einsum/*/b": "0>1,2",
        "*/kv_einsum/*/b": "0>2,3",
        "*_gating_einsum/*/b": "0>2",
        "*": "0>1",
    }
    heads = {"*/q_einsum/*/b": "0>2", "*/kv_einsum/*/b": "0>3"}
    refused = ["refused: a clip would not scale"] * 2
    return Model(loss, trained, [frozen, tokens(2, 8)], leaves, refused, heads)


@model("gemma")
def gemma3_images():
    """Patches between the tokens, read by a tower of their own."""
    from gemma.multimodal import vision, vision_utils

    images = vision_utils.ViTModel(patch_size=(4, 4), width=24, depth=1, mlp_dim=40, num_heads=3)
    tower = vision.SigLiPFromPatches(
        siglip_encoder=images,
        siglip_exit=vision.VisionExit(output_length=4),
        num_mm_tokens_per_image_prepool=16,
        num_mm_tokens_per_image=4,
        image_height=16,
        image_width=16,
        apply_stop_gradient=False,
    )
    leaves = LEAVES | {
        "embedder/mm_input_projection/w": "0>1",
        "*/embedding/kernel": "an embedding of patches",
        "*/pos_embedding": "added",
        "*/{query,key,value}/kernel": "0>1,2",
        "*/out/kernel": "0,1>2",
        "*/kernel": "0>1",
        "*/bias": "added",
    }
    at = "vision_encoder/siglip_encoder/Transformer/encoderblock_0/MultiHeadDotProductAttention_0"
    pooled = "; ".join(f"{n} {at}/{n}/kernel@1 3x1; {n} {at}/{n}/bias@0 3x1" for n in ("query", "key"))
    sites = [pooled, *["refused: a clip would not scale"] * 2]
    heads = PER_HEAD | {"*/{query,key,value}/kernel": "0>2"}
    made = transformer(jnp.float32, use_qk_norm=True, vision_encoder=tower)
    return text(made, leaves, sites, heads, [tokens(2, 8), shape(2, 16, 16, 3, dtype=jnp.uint8)])


@model("gemma")
def gemma3n():
    """Streams that are mixed by predicted coefficients, an input for each layer, and keys of earlier layers."""
    from gemma.gm.nn.gemma3n import _config, _transformer

    kinds = _config._modules.AttentionType
    config = _config.TransformerConfig(
        **SIZES | {"num_heads": 4}, attention_types=[kinds.LOCAL_SLIDING, kinds.GLOBAL] * 2, use_qk_norm=True,
        use_value_norm=True, transpose_gating_einsum=True, use_altup=True, num_altup_inputs=3, altup_coef_clip=120.0,
        activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0], per_layer_input_dim=6, use_laurel=True, laurel_rank=5,
        kv_cache_sharing_config=_config.KVCacheSharingConfig(0.5, share_global=True, share_local=True),
        query_pre_attn_norm=_config.QueryPreAttentionNormalisation.NONE, scale_plus_one=False,
        guard_against_excess_precision=True,
    )  # fmt: skip
    leaves = LEAVES | {
        "*/mlp/gating_einsum": "2>1",
        "embedder/per_layer_input_embedding": "looked up",
        "embedder/per_layer_input_projection/w": "0>2|0>1,2",  # a part of it for each layer
        "*/correct_output_scale": "multiplied entry by entry",
        "*/altup/prediction_coefs": "0>1,2|0>2",  # for each stream, what it takes of all of them
        "*": "0>1",
    }
    made = _transformer.Gemma3nTransformer(config=config, tokens="tokens")
    return text(made, leaves, ["refused: a clip would not scale"] * 4, PER_HEAD)


@model("gemma")
def t5gemma():
    """An encoder, and a decoder of another width."""
    from gemma.research.t5gemma import modules, t5gemma

    kinds = modules.AttentionType
    sizes = SIZES | {"num_layers": 2, "attention_types": [kinds.LOCAL_SLIDING, kinds.GLOBAL]}
    encoder = modules.TransformerConfig(**sizes | {"embed_dim": 24}, bidirectional=True)
    decoder = modules.TransformerConfig(**sizes, enable_cross_attention=True, kv_embed_dim=24)
    made = t5gemma.T5Gemma(
        t5gemma.T5GemmaConfig(encoder, decoder), target_tokens="target", input_tokens="input"
    )

    def named(arrays):
        return dict(zip(("target_tokens", "input_tokens"), arrays, strict=True))

    inputs = [tokens(2, 8), tokens(2, 6)]
    params = jax.eval_shape(lambda *x: made.init(jax.random.key(0), **named(x)), *inputs)["params"]

    def loss(params, *inputs):
        logits = made.apply({"params": params}, **named(inputs)).logits
        return cross_entropy(logits[:, :-1], inputs[0][:, 1:])

    leaves = {key.replace("/attn/", "*attn/"): right for key, right in LEAVES.items()}
    leaves |= {"*embedder/input_embedding": "looked up"}
    del leaves["embedder/input_embedding"]
    sites = [line.replace("layer_", "encoder/layer_") for line in each_layer(GROUPED)]
    for line in each_layer(GROUPED):
        own = line.replace("layer_", "decoder/layer_")
        sites += [own, own.replace("/attn/", "/cross_attn/")]
    heads = {key.replace("/attn/", "*attn/"): right for key, right in PER_HEAD.items()}
    return Model(loss, params, inputs, leaves, sites, heads)
