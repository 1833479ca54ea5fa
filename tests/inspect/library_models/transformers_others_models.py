"""Flax's models of Transformers for images, sound, and pairs of text and image."""

import jax.numpy as jnp
import optax

from tests.inspect.library_models.model import Model, cross_entropy, model, shape, tokens
from tests.inspect.library_models.transformers_text_models import (
    HEAD,
    POSITIONS,
    SEPARATE,
    SIZES,
    each_layer,
    encoder_decoder,
    of,
    self_attention,
)

VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "image_size": 32,
    "patch_size": 8,
}
PATCHES = "an embedding of patches"
SELF_HEADS = {"*/attention/{query,key,value}/kernel": "0>1/4@1"}


def classifying(made):
    def loss(params, images, labels):
        return cross_entropy(made(images, params=params).logits, labels)

    return loss


@model("transformers")
def vit():
    made, params = of("FlaxViTForImageClassification", "ViTConfig", **VISION)
    leaves = {
        "*/cls_token": "joined with data",
        "*/position_embeddings": "added",
        "*/projection/kernel": PATCHES,
        "classifier/kernel": HEAD,
    }
    sites = each_layer(self_attention("vit/encoder/layer/*/attention/attention"))
    return Model(classifying(made), params, [shape(2, 3, 32, 32), tokens(2)], leaves, sites, SELF_HEADS)


@model("transformers")
def dinov2():
    """Layer scales, positions that are interpolated, and a token for masked patches, of which there are none."""
    made, params = of(
        "FlaxDinov2ForImageClassification", "Dinov2Config", hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, image_size=28, patch_size=14,
    )  # fmt: skip
    leaves = {
        "*/cls_token": "joined with data",
        "*/mask_token": "never used",
        "*/position_embeddings": "added",
        "*/lambda1": "multiplied entry by entry",
        "*/projection/kernel": PATCHES,
        "classifier/kernel": HEAD,
    }
    sites = each_layer(self_attention("dinov2/encoder/layer/*/attention/attention"))
    return Model(classifying(made), params, [shape(2, 3, 28, 28), tokens(2)], leaves, sites, SELF_HEADS)


@model("transformers")
def beit():
    """A learned relative bias on the logits."""
    made, params = of(
        "FlaxBeitForImageClassification", "BeitConfig", **VISION, use_relative_position_bias=True
    )
    leaves = {
        "*/cls_token": "joined with data",
        "*/relative_position_bias_table": "looked up|added",
        "*{lambda_1,lambda_2}": "multiplied entry by entry",
        "*/projection/kernel": PATCHES,
        "classifier/kernel": HEAD,
    }
    refused = ["refused: a clip would not scale"] * 2
    return Model(classifying(made), params, [shape(2, 3, 32, 32), tokens(2)], leaves, refused, SELF_HEADS)


def convolutional(class_name: str, config_name: str, **settings):
    """Parameters alone are inspected; running averages of normalization are an input."""
    made, variables = of(class_name, config_name, **settings)

    def loss(params, averages, images, labels):
        variables = {"params": params, "batch_stats": averages}
        out, _ = made(images, params=variables, train=True)
        return cross_entropy(out.logits, labels)

    inputs = [variables["batch_stats"], shape(4, 3, 32, 32), tokens(4)]
    return loss, variables["params"], inputs


@model("transformers")
def resnet():
    loss, params, inputs = convolutional(
        "FlaxResNetForImageClassification", "ResNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]
    )  # fmt: skip
    leaves = {
        "classifier/*/kernel": HEAD,
        "*/embedder/*/kernel": "0,1,2>3",
        "*/{0,2}/convolution/kernel": "2>3",  # 1 × 1
        "*/1/convolution/kernel": "0,1,2>3",
        "*/shortcut/convolution/kernel": "2>3",
    }
    return Model(loss, params, inputs, leaves)


@model("transformers")
def regnet():
    """Grouped convolutions: a matrix for each group."""
    loss, params, inputs = convolutional(
        "FlaxRegNetForImageClassification", "RegNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
        groups_width=8,
    )  # fmt: skip
    leaves = {
        "classifier/*/kernel": HEAD,
        "*/embedder/*/kernel": "0,1,2>3",
        "*/stages/0/*/layer/1/convolution/kernel": "0,1,2>3/2@3",
        "*/stages/1/*/layer/1/convolution/kernel": "0,1,2>3/4@3",
        "*/kernel": "2>3",  # 1 × 1, squeeze and excitation too
    }
    return Model(loss, params, inputs, leaves)


@model("transformers")
def clip():
    """Two towers whose products with each other are no attention, and whose last projections are no heads."""
    made, params = of(
        "FlaxCLIPModel", "CLIPConfig", text_config=dict(SIZES), vision_config=dict(VISION), projection_dim=32
    )  # fmt: skip

    def loss(params, text, images):
        pairs = made(text, images, params=params).logits_per_image
        labels = jnp.arange(pairs.shape[0])
        return cross_entropy(pairs, labels) + cross_entropy(pairs.T, labels)

    leaves = {
        "logit_scale": "exp|multiplied",
        "*/class_embedding": "joined with data",
        "*/position_embedding/embedding": POSITIONS,
        "*/patch_embedding/kernel": PATCHES,
    }
    sites = [
        *each_layer(self_attention("vision_model/encoder/layers/*/self_attn", "q_proj", "k_proj")),
        *each_layer(self_attention("text_model/encoder/layers/*/self_attn", "q_proj", "k_proj")),
    ]
    return Model(loss, params, [tokens(3, 8), shape(3, 3, 32, 32)], leaves, sites, SEPARATE)


@model("transformers")
def whisper():
    """Convolutions before the layers, keys without a bias."""
    made, params = of(
        "FlaxWhisperForConditionalGeneration", "WhisperConfig", d_model=64, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        vocab_size=99, num_mel_bins=8, max_source_positions=16, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip

    def loss(params, sound, text):
        logits = made(sound, params=params, decoder_input_ids=text[:, :-1]).logits
        return cross_entropy(logits, text[:, 1:])

    leaves = {
        "*/encoder/embed_positions/embedding": "no gradient",
        "*/decoder/embed_positions/embedding": POSITIONS,
        "*/{conv1,conv2}/kernel": "0,1>2",
    }
    return Model(loss, params, [shape(2, 8, 32), tokens(2, 7)], leaves, encoder_decoder("q", 1), SEPARATE)


@model("transformers")
def wav2vec2():
    """Convolutions over sound, a grouped one with normalized weights, and a loss over all alignments."""
    made, params = of(
        "FlaxWav2Vec2ForCTC", "Wav2Vec2Config", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, conv_dim=[16, 16], conv_stride=[2, 2], conv_kernel=[3, 3], num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=32, do_stable_layer_norm=True,
        feat_extract_norm="layer",
    )  # fmt: skip

    def loss(params, sound, labels):
        logits = made(sound, params=params).logits
        no_padding = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
        return optax.ctc_loss(logits, no_padding[0], labels, no_padding[1]).mean()

    leaves = {
        "*/masked_spec_embed": "never used",
        "lm_head/kernel": HEAD,
        "*/conv_layers/0/conv/kernel": "0>2",  # of one feature
        "*/conv_layers/1/conv/kernel": "0,1>2",
        "*/pos_conv_embed/conv/weight_v": "1,2>0/4@0",  # stored (out, in, window)
        "*/pos_conv_embed/conv/weight_g": "multiplied entry by entry",
    }
    sites = each_layer(self_attention("wav2vec2/encoder/layers/*/attention", "q_proj", "k_proj"))
    return Model(loss, params, [shape(2, 256), tokens(2, 5)], leaves, sites, SEPARATE)
