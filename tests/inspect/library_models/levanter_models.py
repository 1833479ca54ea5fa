"""Levanter's language models, with its own loss, whose head and cross-entropy are computed in blocks."""

import jax

from tests.inspect.library_models.model import Model, model, tokens

HEAD = "an output head, as no product follows it"


def language(config, leaves, attentions=(), per_head=None):
    """`config.build` and the loss that Levanter's trainer differentiates, of one text."""
    import equinox as eqx
    import haliax as hax
    from levanter.models.lm_model import LmExample

    # Experts are chosen in a shard_map. Its trainer sets a mesh too.
    jax.set_mesh(jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]))
    whole = eqx.filter_eval_shape(lambda: config.build(hax.Axis("vocab", 99), key=jax.random.key(0)))
    arrays, static = eqx.partition(whole, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    params, structure = jax.tree.flatten(arrays)
    paths = [
        jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree.leaves_with_path(arrays)
    ]
    names = [path.removesuffix("/0") for path in paths]  # the array of a named array

    def loss(params, text):
        model = eqx.combine(jax.tree.unflatten(structure, [params[name] for name in names]), static)

        example = LmExample.causal(hax.named(text, config.max_Pos))
        return model.compute_next_token_loss(example, key=jax.random.key(0)).scalar()

    return Model(loss, dict(zip(names, params, strict=True)), [tokens(8)], leaves, attentions, per_head or {})


SIZES = {"max_seq_len": 8, "hidden_dim": 32, "num_layers": 3, "num_heads": 4}
TIED = {"*token_embeddings/weight": "looked up", "*norm/weight": "multiplied entry by entry"}
LLAMA = TIED | {"lm_head/weight": HEAD}
ATTENTION = {  # stored (layers, out, in)
    "*/q_proj/weight": "4>1,2,3",
    "*/{k_proj,v_proj}/weight": "3>1,2",
    "*/o_proj/weight": "2,3>1",
}
DENSE = {"*/{gate_proj,up_proj,down_proj}/weight": "2>1"}
PER_HEAD = {"*/q_proj/weight": "4>3", "*/{k_proj,v_proj}/weight": "3>2"}


AT = "transformer/layers/stacked/self_attn"
# Of the queries' axes (layers, key heads, queries of a key head, size) two count heads.
SITE = f"query {AT}/q_proj/weight@1,2 4x1; key {AT}/k_proj/weight@1 2x1"


@model("levanter")
def llama():
    from levanter.models.llama import LlamaConfig

    config = LlamaConfig(**SIZES, intermediate_dim=48, num_kv_heads=2)
    return language(config, LLAMA | ATTENTION | DENSE, [SITE], PER_HEAD)


@model("levanter")
def gpt2():
    from levanter.models.gpt2 import Gpt2Config

    config = Gpt2Config(**SIZES)
    leaves = {
        "*token_embeddings/weight": "looked up",
        "*position_embeddings/weight": "looked up|added",
        "*ln_*/weight": "multiplied entry by entry",
        "*/c_attn/weight": "1>3,4",
        "*attn/c_proj/weight": "1,2>3",
        "*/weight": "1>2",
        "*/bias": "added",
    }
    at = "transformer/blocks/stacked/attn/c_attn"
    line = (
        f"query {at}/weight@3 4x1 0:1@2; query {at}/bias@2 4x1 0:1@1; "
        f"key {at}/weight@3 4x1 1:2@2; key {at}/bias@2 4x1 1:2@1"
    )
    return language(config, leaves, [line], {"*/c_attn/weight": "1>4"})


@model("levanter")
def mixtral():
    from levanter.models.mixtral import MixtralConfig

    config = MixtralConfig(
        **SIZES, intermediate_dim=48, num_kv_heads=2, n_routed_experts=4, num_experts_per_tok=2
    )
    experts = {"*/gate/weight": "2>1|1>2", "*/{w1,w2,w3}/weight": "2>3|3>2"}
    return language(config, LLAMA | ATTENTION | experts, [SITE], PER_HEAD)


@model("levanter")
def qwen3():
    from levanter.models.qwen import Qwen3Config

    config = Qwen3Config(**SIZES, intermediate_dim=48, num_kv_heads=2)
    return language(config, LLAMA | ATTENTION | DENSE, ["refused: a clip would not scale"], PER_HEAD)


@model("levanter")
def gemma2():
    from levanter.models.gemma import Gemma2Config

    config = Gemma2Config(**SIZES, intermediate_dim=48, num_kv_heads=2, head_dim=8)
    return language(config, TIED | ATTENTION | DENSE, ["refused: a clip would not scale"], PER_HEAD)
