"""MaxText's decoders at tiny sizes, in its own trainer's loss."""

import os
import pathlib

import jax
from flax import linen as nn
from flax import nnx

from tests.inspect.library_models.linen_models import HEAD
from tests.inspect.library_models.model import Model, model, tokens

TINY = """
    hardware=cpu skip_jax_distributed_system=true dataset_type=synthetic attention=dot_product log_config=false
    enable_checkpointing=false override_model_config=true base_emb_dim=32 base_mlp_dim=48 base_num_query_heads=4
    base_num_kv_heads=2 head_dim=8 base_num_decoder_layers=4 vocab_size=99 max_target_length=16 per_device_batch_size=2
    dtype=float32 remat_policy=full run_name=muonjax
"""


def decoder(name, leaves, attentions=(), per_head=None, settings=""):
    """The model of one of MaxText's own configurations, with other sizes."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train as trainer
    from maxtext.utils import maxtext_utils, model_creation_utils

    base = str(pathlib.Path(pyconfig.__file__).parent / "base.yml")
    words = f"model_name={name} {TINY} {settings}".split()
    config = pyconfig.initialize(["", base, *words])
    mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])

    def make():
        return model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))

    with mesh, nn.logical_axis_rules(config.logical_axis_rules):
        graph, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def loss(params, rest, data):
        with mesh, nn.logical_axis_rules(config.logical_axis_rules):
            whole = nnx.merge(graph, params, rest, copy=True)
            return trainer.loss_fn(whole, config, dict(data), None, None)[0]

    words = (
        "inputs",
        "inputs_position",
        "inputs_segmentation",
        "targets",
        "targets_position",
        "targets_segmentation",
    )
    data = {word: tokens(2, 16) for word in words}
    params, rest = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, rest))
    return Model(loss, params, [rest, data], leaves, attentions, per_head or {})


EMBEDDED = {"token_embedder/embedding": "looked up", "*norm*/scale": "multiplied entry by entry"}
UNTIED = EMBEDDED | {"decoder/logits_dense/kernel": HEAD}
ATTENTION = {"*/{query,key,value}/kernel": "0>2,3", "*/out/kernel": "0,2>3"}  # layers on axis 1
PER_HEAD = {"*/{query,key,value}/kernel": "0>3"}
DENSE = {"*/{wi_0,wi_1,wo}/kernel": "0>2"}
EXPERTS = {"*/gate/kernel": "0>2", "*/{wi_0,wi_1,wo}": "2>3"}


def site(at, heads=4, key_heads=2, axis=2):
    return f"query {at}/query/kernel@{axis} {heads}x1; key {at}/key/kernel@{axis} {key_heads}x1"


@model("maxtext")
def llama2():
    return decoder("llama2-7b", UNTIED | ATTENTION | DENSE, [site("decoder/layers/self_attention")], PER_HEAD)


@model("maxtext")
def llama2_unscanned():
    leaves = UNTIED | {
        "*/{query,key,value}/kernel": "0>1,2",
        "*/out/kernel": "0,1>2",
        "*/{wi_0,wi_1,wo}/kernel": "0>1",
    }
    sites = [site(f"decoder/layers_{i}/self_attention", axis=1) for i in range(4)]
    return decoder("llama2-7b", leaves, sites, {"*/{query,key,value}/kernel": "0>2"}, "scan_layers=false")


@model("maxtext")
def mixtral_ragged():
    """Tokens sorted by expert."""
    leaves = UNTIED | ATTENTION | EXPERTS
    settings = "base_moe_mlp_dim=48 num_experts=4 num_experts_per_tok=2 megablox=false"
    return decoder("mixtral-8x7b", leaves, [site("decoder/layers/self_attention")], PER_HEAD, settings)


@model("maxtext")
def mixtral_dense():
    """Every expert sees every token."""
    leaves = UNTIED | ATTENTION | EXPERTS
    settings = "base_moe_mlp_dim=48 num_experts=4 num_experts_per_tok=2 sparse_matmul=false"
    return decoder("mixtral-8x7b", leaves, [site("decoder/layers/self_attention")], PER_HEAD, settings)


@model("maxtext")
def mixtral_dropping():
    """Each expert has room for some of the tokens: dispatched and combined by products with masks."""
    leaves = UNTIED | ATTENTION | EXPERTS
    settings = (
        "base_moe_mlp_dim=48 num_experts=4 num_experts_per_tok=2 sparse_matmul=false capacity_factor=2.0"
    )
    return decoder("mixtral-8x7b", leaves, [site("decoder/layers/self_attention")], PER_HEAD, settings)


@model("maxtext")
def gemma2():
    """Logits that are capped, in pairs of a local and a global layer."""
    leaves = EMBEDDED | ATTENTION | DENSE
    return decoder("gemma2-2b", leaves, ["refused: a clip would not scale"] * 2, PER_HEAD)


@model("maxtext")
def gemma3():
    """Normalized queries and keys; a tied head; layers scanned in blocks of six, the rest unrolled."""
    leaves = EMBEDDED | {
        "*/layers_remainder/*/{query,key,value}/kernel": "0>1,2",
        "*/layers_remainder/*/out/kernel": "0,1>2",
        "*/layers_remainder/*/{wi_0,wi_1,wo}/kernel": "0>1",
    } | ATTENTION | DENSE  # fmt: skip
    heads = {"*/layers_remainder/*/{query,key,value}/kernel": "0>2"} | PER_HEAD
    return decoder(
        "gemma3-4b", leaves, ["refused: a clip would not scale"] * 8, heads, "base_num_decoder_layers=14"
    )


@model("maxtext")
def qwen3():
    leaves = EMBEDDED | ATTENTION | DENSE
    return decoder("qwen3-0.6b", leaves, ["refused: a clip would not scale"], PER_HEAD)


@model("maxtext")
def qwen3_experts():
    leaves = UNTIED | ATTENTION | EXPERTS
    settings = "base_moe_mlp_dim=48 num_experts=4 num_experts_per_tok=2 megablox=false"
    return decoder("qwen3-30b-a3b", leaves, ["refused: a clip would not scale"], PER_HEAD, settings)


@model("maxtext")
def gpt_oss():
    """A learned logit beside those of the keys, biases everywhere, layers scanned in pairs."""
    leaves = UNTIED | ATTENTION | EXPERTS | {
        "*/{query,key,value,out,gate}/bias": "added",
        "*/{wi_0,wi_1,wo}_bias": "added|looked up",
        "*/sinks": "joined with data",
    }  # fmt: skip
    settings = "base_moe_mlp_dim=48 num_experts=4 num_experts_per_tok=2 megablox=false"
    sites = [
        f"query {at}/query/kernel@2 4x1; query {at}/query/bias@0 4x1; "
        f"key {at}/key/kernel@2 2x1; key {at}/key/bias@0 2x1"
        for at in (f"decoder/layers/layers_{i}/GptOssAttention" for i in range(2))
    ]
    return decoder("gpt-oss-20b", leaves, sites, PER_HEAD, settings)


@model("maxtext")
def deepseek3():
    """Latent attention in all layers, experts in all but the first."""
    latent = {
        "*/wq_a/kernel": "0>2",
        "*/wkv_a/kernel": "0>2/16,4@2",
        "*/wq_b/kernel": "0>2,3",
        "*/wkv_b/kernel": "0>2,3/8,8@3",
        "*/self_attention/out/kernel": "0,2>3",
    }
    leaves = UNTIED | latent | EXPERTS | DENSE
    at = "decoder/{}_layers/self_attention"
    sites = [
        f"query {a}/wq_b/kernel@2 4x1 0:8@3; rotary {a}/wq_b/kernel@2 4x1 8:12@3; key {a}/wkv_b/kernel@2 4x1 0:8@3"
        for a in (at.format("dense"), at.format("moe"))
    ]
    settings = """
        base_moe_mlp_dim=48 num_experts=4 num_experts_per_tok=2 megablox=false first_num_dense_layers=1 q_lora_rank=16
        kv_lora_rank=16 qk_nope_head_dim=8 qk_rope_head_dim=4 v_head_dim=8 base_num_kv_heads=4
    """
    return decoder(
        "deepseek3-671b", leaves, sites, {"*/wq_b/kernel": "0>3", "*/wkv_b/kernel": "0>3/8,8@3"}, settings
    )


@model("maxtext")
def gpt3():
    """Queries, keys and values on an axis of their own, biases, learned positions."""
    leaves = {
        "token_embedder/embedding": "looked up",
        "*/position_embedder/embedding": "looked up",
        "*norm/scale": "multiplied entry by entry",
        "*/qkv_proj/kernel": "0>3,4",
        "*/out/kernel": "0,2>3",
        "*/kernel": "0>2",
        "*/bias": "added",
    }
    at = "decoder/layers/self_attention/qkv_proj"
    line = (
        f"query {at}/kernel@3 4x1 0:1@2; query {at}/bias@2 4x1 0:1@0; "
        f"key {at}/kernel@3 4x1 1:2@2; key {at}/bias@2 4x1 1:2@0"
    )
    return decoder("gpt3-52k", leaves, [line], {"*/qkv_proj/kernel": "0>4"}, "base_num_kv_heads=4")
