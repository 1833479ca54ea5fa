"""Keras-hub's models for images, pairs of text and image, and diffusion, on JAX."""

import jax
import jax.numpy as jnp

from tests.inspect.library_models.keras_hub_text_models import (
    ATTENTION,
    NORM,
    PER_HEAD,
    built,
    each_layer,
    site,
)
from tests.inspect.library_models.linen_models import HEAD
from tests.inspect.library_models.model import cross_entropy, model, shape, tokens

PATCHES = "an embedding of patches"
CONVOLUTION = {"*/kernel": "0,1,2>3"}


def classifying(family, leaves, attentions=(), per_head=None, size=32, task=None, output=(), **settings):
    """Images of three channels, and a class for each of them, or for each of their pixels."""

    def measure(logits, inputs, params):
        return cross_entropy(logits, inputs["labels"])

    return built(
        f"{family}Backbone", {"images": shape(2, size, size, 3), "labels": tokens(2, *output)}, leaves, attentions,
        per_head, measure=measure, task=task or f"{family}ImageClassifier", options={"num_classes": 5},
        image_shape=(size, size, 3), **settings,
    )  # fmt: skip


@model("keras_hub")
def deit():
    leaves = {
        "*_token": "joined with data",
        "*/position_embedding": "added",
        "*/patch_embedding/kernel": PATCHES,
        "predictions/kernel": HEAD,
    } | NORM | ATTENTION  # fmt: skip
    sites = [site(f"deit_encoder/transformer_block_{i}/mha") for i in (1, 2)]
    sizes = {"patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "intermediate_dim": 128}
    return classifying("DeiT", leaves, sites, PER_HEAD, 16, **sizes)


@model("keras_hub")
def swin():
    """Windows, every second time shifted, with a learned bias on the logits."""
    leaves = {
        "*/relative_position_bias_table": "looked up|added",
        "patch_embedding/*/kernel": PATCHES,
        "*/attention_qkv/kernel": "0>1/3@1",
        "predictions/kernel": HEAD,
    } | NORM  # fmt: skip
    refused = ["refused: a clip would not scale"] * 4
    heads = {"stage_0/*/attention_qkv/kernel": "0>1/6@1", "stage_1/*/attention_qkv/kernel": "0>1/12@1"}
    return classifying(
        "SwinTransformer", leaves, refused, heads, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        patch_size=4,
    )  # fmt: skip


@model("keras_hub")
def segformer():
    """Keys and values of fewer pixels, depthwise convolutions between dense layers, levels put together."""
    leaves = {
        "conv2d_4/kernel": HEAD,
        "*/{conv2d,conv2d_1,conv2d_2,conv2d_3}/kernel": "0,1,2>3",
        "*/{depthwise_conv2d,depthwise_conv2d_1}/kernel": "a depthwise convolution",
    } | NORM  # fmt: skip
    at = "hierarchical_encoder_{}_0/seg_former_multihead_attention{}"
    sites = [
        site(at.format(0, ""), "1x16", "1x16", query="dense", key="dense_1"),
        site(at.format(1, "_1"), "2x16", "2x16", query="dense_6", key="dense_7"),
    ]
    heads = {"*_attention_1/{dense_6,dense_7,dense_8}/kernel": "0>1/2@1"}

    def make(image_shape):
        from keras_hub import models

        encoder = models.MiTBackbone(
            layerwise_depths=[1, 1], num_layers=2, layerwise_num_heads=[1, 2], layerwise_sr_ratios=[4, 1],
            max_drop_path_rate=0.1, layerwise_patch_sizes=[7, 3], layerwise_strides=[4, 2], hidden_dims=[16, 32],
            image_shape=image_shape,
        )  # fmt: skip
        return models.SegFormerBackbone(image_encoder=encoder, projection_filters=24)

    return built(
        make, {"images": shape(2, 32, 32, 3), "labels": tokens(2, 32, 32)}, leaves, sites, heads,
        measure=lambda logits, inputs, params: cross_entropy(logits, inputs["labels"]),
        task="SegFormerImageSegmenter", options={"num_classes": 5}, image_shape=(32, 32, 3),
    )  # fmt: skip


@model("keras_hub")
def dinov3():
    """A rotation of the patches alone, keys without a bias, gated layers; a linear probe."""
    leaves = {
        "*_{token,tokens}": "joined with data",
        "*/projection/kernel": PATCHES,
        "*/lambda1": "multiplied entry by entry",
        "probe/kernel": HEAD,
    } | NORM  # fmt: skip
    at = "encoder/layers_*/attention"
    sites = each_layer(site(at, "4x16", "4x16", query="q_proj", key="k_proj", biases=("query",)))
    heads = {"*/{q_proj,k_proj,v_proj}/kernel": "0>1/4@1"}

    def make(**settings):
        import keras
        from keras_hub import models

        backbone = models.DINOV3Backbone(**settings)
        return keras.Model(backbone.input, keras.layers.Dense(5, name="probe")(backbone.output[:, 0]))

    return built(
        make, {"pixel_values": shape(2, 16, 16, 3), "labels": tokens(2)}, leaves, sites, heads,
        measure=lambda logits, inputs, params: cross_entropy(logits, inputs["labels"]), patch_size=4, num_layers=2,
        hidden_dim=64, num_heads=4, intermediate_dim=128, num_register_tokens=2, use_mask_token=False,
        use_gated_mlp=True, use_key_bias=False, image_shape=(16, 16, 3),
    )  # fmt: skip


@model("keras_hub")
def siglip():
    """Two towers whose products with each other are no attention; a learned query that pools all patches."""
    leaves = {
        "embedding/patch_embedding/kernel": PATCHES,
        "*embedding/position_embedding/embeddings": "looked up|added",
        "head/variable": "a learned input",
        "siglip_head/logit_scale": "exp|multiplied"
    } | NORM | ATTENTION  # fmt: skip
    at = "encoder_block_0/self_attn"
    sites = [site(at), site("head/attention"), site(f"second/{at}")]

    def make(image_shape):
        from keras_hub import models

        sizes = {"hidden_dim": 64, "num_layers": 1, "num_heads": 4, "intermediate_dim": 128}
        images = models.SigLIPVisionEncoder(patch_size=4, image_shape=image_shape, **sizes)
        text = models.SigLIPTextEncoder(vocabulary_size=99, embedding_dim=64, max_sequence_length=8, **sizes)
        return models.SigLIPBackbone(images, text)

    def measure(out, inputs, params):
        sign = 2 * jnp.eye(3) - 1
        return -jnp.mean(jax.nn.log_sigmoid(sign * out["text_logits"]))

    return built(
        make, {"images": shape(3, 16, 16, 3), "token_ids": tokens(3, 8)}, leaves, sites,
        PER_HEAD, measure=measure, image_shape=(16, 16, 3),
    )  # fmt: skip


def denoising(out, inputs, params):
    return jnp.mean((out - inputs["noise"]) ** 2)


@model("keras_hub")
def stable_diffusion_3():
    """Text and image attend to both, each with projections of its own; modulations by one kernel."""

    def make(**settings):
        from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

        return MMDiT(**settings)

    leaves = {
        "*/patch_embedding/kernel": PATCHES,
        "position_embedding/embeddings": "by names: dynamic_slice",
        "joint_block_1/context_block/ada_layer_norm/dense/kernel": "0>1/2@1",
        "output_ada_layer_norm/dense/kernel": "0>1/2@1",
        "*/ada_layer_norm/dense/kernel": "0>1/6@1",
        "*/attention_qkv/kernel": "0>1/3@1",
        "output_dense/kernel": HEAD,
    }  # fmt: skip
    fused = [f"joint_block_{{}}/{side}_block/attention_qkv" for side in ("context", "x")]
    line = "; ".join(
        f"{factor} {at}/{leaf}{offset}"
        for at in fused
        for factor, offset in (("query", ""), ("key", "+64"))
        for leaf in ("kernel@1 4x16", "bias@0 4x16")
    )
    inputs = {
        "latent": shape(2, 8, 8, 5), "context": shape(2, 7, 20), "pooled_projection": shape(2, 24),
        "timestep": shape(2, 1), "noise": shape(2, 8, 8, 5),
    }  # fmt: skip
    return built(
        make, inputs, leaves, [line.format(i, i, i, i, i, i, i, i) for i in range(2)],
        {"*/attention_qkv/kernel": "0>1/12@1"}, measure=denoising, patch_size=2, hidden_dim=64, num_layers=2,
        num_heads=4, position_size=6, latent_shape=(8, 8, 5), context_shape=(None, 20), pooled_projection_shape=(24,),
    )  # fmt: skip


@model("keras_hub")
def flux():
    """Normalized queries and keys of two streams, then of one whose kernel holds a dense layer too."""
    leaves = {
        "double_stream_block/*modulation*/kernel": "0>1/6@1",
        "single_stream_block/*modulation*/kernel": "0>1/3@1",
        "double_stream_block/{dense_7,dense_12}/kernel": "0>1/3@1",
        "single_stream_block/dense_16/kernel": "0>1/64,64,64,128@1",
        "last_layer/dense_19/kernel": HEAD,
        "last_layer/*/dense_20/kernel": "0>1/2@1",
    } | NORM  # fmt: skip
    fused = ",".join(["16"] * 12 + ["128"])
    heads = {
        "double_stream_block/{dense_7,dense_12}/kernel": "0>1/12@1",
        "single_stream_block/dense_16/kernel": f"0>1/{fused}@1",
    }
    inputs = {
        "image": shape(2, 16, 5), "image_ids": shape(2, 16, 3), "text": shape(2, 7, 20), "text_ids": shape(2, 7, 3),
        "y": shape(2, 24), "timesteps": shape(2), "guidance": shape(2), "noise": shape(2, 16, 5),
    }  # fmt: skip
    return built(
        "FluxBackbone", inputs, leaves, ["refused: a clip would not scale"] * 2, heads, measure=denoising,
        input_channels=5, hidden_size=64, mlp_ratio=2.0, num_heads=4, depth=1, depth_single_blocks=1,
        axes_dim=[4, 6, 6], theta=1e4, use_bias=True, image_shape=(16, 5), text_shape=(7, 20), image_ids_shape=(16, 3),
        text_ids_shape=(7, 3), y_shape=(24,),
    )  # fmt: skip


@model("keras_hub")
def autoencoder():
    """Attention of one head, its projections 1 × 1 convolutions; means and variances by one kernel."""

    def make(**settings):
        from keras_hub.src.models.vae.vae_backbone import VAEBackbone

        return VAEBackbone(**settings)

    leaves = {
        "encoder/output_projection/kernel": "0,1,2>3/2@3",
        "decoder/output_projection/kernel": HEAD,
    } | NORM | CONVOLUTION  # fmt: skip
    line = site("*/mid_attention", "1x64", "1x64", 3, (), "query_conv2d", "key_conv2d")
    line += "; query */mid_attention/query_conv2d/bias@0 1x64; key */mid_attention/key_conv2d/bias@0 1x64"
    return built(
        make, {"images": shape(2, 16, 16, 3)}, leaves, [line.replace("*", side) for side in ("encoder", "decoder")],
        measure=lambda out, inputs, params: jnp.mean((out - inputs["images"]) ** 2), encoder_num_filters=[32, 64],
        encoder_num_blocks=[1, 1], decoder_num_filters=[64, 32], decoder_num_blocks=[1, 1], sampler_method="sample",
        input_channels=3, sample_channels=4, output_channels=3, image_shape=(16, 16, 3),
    )  # fmt: skip


@model("keras_hub")
def resnet():
    leaves = {"predictions/kernel": HEAD} | NORM | CONVOLUTION
    return classifying(
        "ResNet", leaves, input_conv_filters=[16], input_conv_kernel_sizes=[7], stackwise_num_filters=[64, 96],
        stackwise_num_blocks=[1, 1], stackwise_num_strides=[1, 2], block_type="bottleneck_block",
    )  # fmt: skip


@model("keras_hub")
def efficientnet():
    """Depthwise convolutions, squeeze and excitation."""
    leaves = {
        "predictions/kernel": HEAD,
        "*dwconv*/kernel": "a depthwise convolution",
    } | NORM | CONVOLUTION  # fmt: skip
    threes = {
        f"stackwise_{word}": value
        for word, value in (
            ("width_coefficients", [1.0] * 3), ("depth_coefficients", [1.0] * 3), ("kernel_sizes", [3, 3, 5]),
            ("num_repeats", [1] * 3), ("input_filters", [32, 16, 24]), ("output_filters", [16, 24, 40]),
            ("expansion_ratios", [1, 4, 4]), ("squeeze_and_excite_ratios", [0.25, 0, 0.25]), ("strides", [1, 2, 1]),
            ("block_types", ["v1", "fused", "unfused"]),
        )
    }  # fmt: skip
    return classifying("EfficientNet", leaves, **threes, num_features=48)


@model("keras_hub")
def xception():
    """Separable convolutions."""
    leaves = {
        "predictions/kernel": HEAD,
        "*/depthwise_kernel": "a depthwise convolution",
        "*/pointwise_kernel": "0,1,2>3",
    } | NORM | CONVOLUTION  # fmt: skip
    filters = [[8, 12], [16, 16], [24, 24]]
    return classifying(
        "Xception", leaves, stackwise_conv_filters=filters, stackwise_pooling=[True, True, False]
    )


@model("keras_hub")
def densenet():
    """Every layer reads all before it."""
    leaves = {"predictions/kernel": HEAD} | NORM | CONVOLUTION
    return classifying("DenseNet", leaves, stackwise_num_repeats=[2, 1], growth_rate=8)
