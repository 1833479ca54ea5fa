"""Sites of models that people train, from paths and shapes of their parameters, and why some have none."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax
from muonjax._clipping.matching import Modules, find_targets
from muonjax._clipping.sites_from import find_sites
from tests.tools.tiers import quick

F32 = jnp.float32


def tree(leaves):
    """{"a/b": shape} as a nested dict of shapes."""
    root = {}
    for path, shape in leaves.items():
        *modules, leaf = path.split("/")
        node = root
        for module in modules:
            node = node.setdefault(module, {})
        node[leaf] = jax.ShapeDtypeStruct(shape, F32)
    return root


def below(root, **shapes):
    return {f"{root}/{path.replace('__', '/')}": shape for path, shape in shapes.items()}


# The parameters, heads if kernels don't tell, and what must be found: the axis of layers and the shape of the maxima.
MODELS = {
    "MaxText, scanned on axis 1": (
        below("params/decoder/layers/self_attention", query__kernel=(64, 3, 8, 16), key__kernel=(64, 3, 2, 16),
              value__kernel=(64, 3, 2, 16), out__kernel=(8, 3, 16, 64)),
        None, (1,), (3, 8),
    ),
    "simply": (
        below("block_0/attn", q_proj__w__0=(64, 8, 16), k_proj__w__0=(64, 4, 16), o_proj__w__0=(64, 8, 16)),
        None, None, (8,),
    ),
    "axlearn, grouped, the output elsewhere": (
        below("decoder/layer0/self_attention/attention", i_proj__q_proj__weight=(64, 16, 8),
              i_proj__k_proj__weight=(64, 4, 8), o_proj__weight=(64, 16, 8)),
        None, None, (16,),
    ),
    "Transformers' Llama": (
        below("model/layers/0/self_attn", q_proj__kernel=(64, 64), k_proj__kernel=(64, 16), v_proj__kernel=(64, 16),
              o_proj__kernel=(64, 64)),
        8, None, (8,),
    ),
    "Transformers' BERT, without its output": (
        below("encoder/layer/0/attention/self", query__kernel=(64, 64), query__bias=(64,), key__kernel=(64, 64),
              key__bias=(64,), value__kernel=(64, 64)),
        4, None, (4,),
    ),
    "Equinox's BERT": (
        below("encoder/attention", query_proj__weight=(64, 64), query_proj__bias=(64,), key_proj__weight=(64, 64),
              key_proj__bias=(64,), output_proj__weight=(64, 64))
        | {"encoder/intermediate/weight": (256, 64)},
        4, None, (4,),
    ),
    "bare arrays": (below("block/attention", wq=(64, 8, 16), wk=(64, 2, 16), wo=(8, 16, 64)), None, None, (8,)),
    "cross-attention": (
        below("decoder/cross", query__kernel=(64, 8, 16), key__kernel=(32, 8, 16), out__kernel=(8, 16, 64)),
        None, None, (8,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_finds_the_attention_of(model):
    leaves, num_heads, scan_axis, maxima = MODELS[model]
    params = tree(leaves)
    (site,) = muonjax.sites_from(params, num_heads=num_heads)
    assert site.scan_axis == scan_axis
    (found,) = muonjax.qk_clip(1.0, site).init(params).maxima.values()
    assert found.shape == maxima


REFUSED = {
    "heads that kernels don't tell": (MODELS["Transformers' Llama"][0], "heads of .* can't be told .*give num_heads"),
    "Qwen 3": (
        MODELS["simply"][0] | below("block_0/attn", q_norm__scale__0=(16,), k_norm__scale__0=(16,)),
        r"normalizes its queries and keys \(.*q_norm",
    ),
    "Gemma 2": (
        below("layer_0/attn", q_einsum__w=(4, 64, 16), k_einsum__w=(4, 64, 16), attn_vec_einsum__w=(4, 16, 64))
        | {f"layer_0/{when}_{what}_norm/scale": (64,) for when in ("pre", "post") for what in ("attention", "ffw")},
        "as Gemma 2, which caps its logits",
    ),
    "Gemma 2 in simply": (
        MODELS["simply"][0] | {f"block_0/{when}_ln_{i}/scale/0": (64,) for when in ("pre", "post") for i in (0, 1)},
        "as Gemma 2, which caps its logits",
    ),
    "T5": (
        below("encoder/SelfAttention", q__kernel=(64, 64), k__kernel=(64, 64),
              relative_attention_bias__embedding=(32, 4)),
        "relative position biases",
    ),
    "DeepSeek": (
        below("layers_0/mla", wq_b__kernel=(32, 4, 24), wkv_b__kernel=(32, 4, 32)),
        r"how 'wkv_b' of 'layers_0/mla' is divided; your function says it: program = muonjax.inspect",
    ),
    "Gemma's library, keys and values in one kernel": (
        below("layer_0/attn", q_einsum__w=(8, 64, 16), kv_einsum__w=(2, 1, 64, 16), attn_vec_einsum__w=(8, 16, 64)),
        "how 'kv_einsum' of 'layer_0/attn' is divided; your function says it",
    ),
    "Bloom's interleaved parts": (
        below("h/0/attn", query_key_value__kernel=(64, 192), dense__kernel=(64, 64)),
        "how 'query_key_value' of 'h/0/attn' is divided.*inspect.*fused_qkv_site",
    ),
    "an axis of layers among equals": (
        below("a", query__kernel=(4, 4, 4, 4), key__kernel=(4, 4, 4, 4), out__kernel=(4, 4, 4, 4)),
        "axis of layers can't be told.*muonjax.inspect",
    ),
    "a stack of square Dense layers, or heads as wide as the input": (
        below("a", q_proj__kernel=(12, 64, 64), k_proj__kernel=(12, 64, 64), o_proj__kernel=(12, 64, 64)),
        "axes of 'a' can't be told .*muonjax.inspect",
    ),
    "the same on axis 1": (
        below("a", query__kernel=(64, 12, 64), key__kernel=(64, 12, 64), out__kernel=(64, 12, 64)),
        "axes of 'a' can't be told .*muonjax.inspect",
    ),
    "the same as PyTorch stores it, with grouped keys": (
        below("a", q_proj__weight=(12, 64, 64), k_proj__weight=(12, 16, 64), o_proj__weight=(12, 64, 64)),
        "axes of 'a' can't be told .*muonjax.inspect",
    ),
    "MaxText's GPT-3, fused and scanned": (
        below("decoder/layers/self_attention", qkv_proj__kernel=(96, 5, 3, 12, 8), qkv_proj__bias=(3, 5, 12, 8),
              out__kernel=(12, 5, 8, 96), out__bias=(96, 5)),
        "how 'qkv_proj' of .* is divided; your function says it.*fused_qkv_site",
    ),
    "Gemma's library, fused": (
        below("layer_0/attn", qkv_einsum__w=(3, 4, 64, 16), attn_vec_einsum__w=(4, 16, 64)),
        "how 'qkv_einsum' of .* is divided; your function says it.*fused_qkv_site",
    ),
    "axlearn, fused and stacked": (
        below("decoder/layer/attention", i_proj__i_proj__qkv_proj__weight=(24, 64, 24, 8),
              o_proj__weight=(24, 64, 16, 8)),
        "how 'qkv_proj' of .* is divided; your function says it.*fused_qkv_site",
    ),
    "Levanter's GPT-2, stacked": (
        below("blocks/stacked/attn", c_attn__weight__0=(4, 128, 3, 8, 16), c_attn__bias__0=(4, 3, 8, 16),
              c_proj__weight__0=(4, 8, 16, 128)),
        "how 'c_attn' of .* is divided; your function says it.*fused_qkv_site",
    ),
    "Transformers' GPT-2, stored (out, in)": (
        below("h/0/attn", c_attn__kernel=(192, 64), c_attn__bias=(192,), c_proj__kernel=(64, 64)),
        "how 'c_attn' of .* is divided; your function says it.*fused_qkv_site",
    ),
    "latent attention by queries and keys": (
        below("layers/0/attn", q_b=(32, 4, 24), k_b=(16, 4, 16), o=(4, 16, 64)), "'layers/0/attn' can't be told"
    ),
    "no attention": ({"dense/kernel": (4, 4)}, "no attention that it knows"),
}  # fmt: skip


@pytest.mark.parametrize("model", REFUSED)
def test_refuses(model):
    leaves, message = REFUSED[model]
    with pytest.raises(ValueError, match=rf"sites_from: .*{message}"):
        muonjax.sites_from(tree(leaves))


@quick(
    "MaxText, scanned on axis 1",
    "axlearn, grouped, the output elsewhere",
    "cross-attention",
    "simply",
    "Transformers' Llama",
    "Transformers' BERT, without its output",
    "Equinox's BERT",
    "bare arrays",
)
@pytest.mark.parametrize("model", MODELS)
def test_scales_the_queries_and_keys_of(model):
    """Every product of a query and its key is scaled by γ of its head, and nothing else is touched."""
    leaves, num_heads, _, maxima = MODELS[model]
    params = jax.tree.map(lambda s: np.ones(s.shape, np.float32), tree(leaves))
    sites = muonjax.sites_from(params, num_heads=num_heads)
    gamma = jnp.asarray(np.random.default_rng(0).uniform(0.1, 0.9, maxima), F32)
    (path,) = muonjax.qk_clip(1.0, sites).init(params).maxima
    clipped = jax.jit(lambda tree, seen: muonjax.apply_qk_clip(tree, seen, sites, 1.0))(
        params, {path: 1 / gamma}
    )
    changed = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.unique(np.round(leaf, 6)).size
        for path, leaf in jax.tree_util.tree_leaves_with_path(clipped)
        if (leaf != 1).any()
    }
    assert changed  # by as many factors as there are heads, and 1 where a part is not scaled
    for name, count in changed.items():
        assert not {"out", "o_proj", "attn_vec_einsum", "wo", "v_proj", "value", "c_proj"} & set(
            name.split("/")
        )
        assert count in (gamma.size, gamma.size + 1), name


def test_queries_and_keys_exchanged():
    """With more key heads than query heads nothing was scaled, and the state said that it was."""
    params = {"a": {"query": {"kernel": jnp.ones((8, 2, 4))}, "key": {"kernel": jnp.ones((8, 4, 4))}}}
    with pytest.raises(
        ValueError, match=r"'a/query/kernel' has 2 heads .* 'a/key/kernel' 4 of 4: .* several query heads"
    ):
        muonjax.adamclip(1e-3, muonjax.mha_site()).init(params)


def test_weights_may_be_stored_either_way():
    params = tree(below("a", q_proj__weight=(64, 64), k_proj__weight=(64, 64), o_proj__weight=(64, 64)))
    with pytest.raises(ValueError, match=r"the order of inputs and outputs of 'a' can't be told .*inspect"):
        muonjax.sites_from(params, num_heads=4)
    (site,) = muonjax.sites_from(params | tree({"up/weight": (256, 64)}), num_heads=4)
    assert site.scales[0].axes == (-2,)


def test_heads_that_contradict_the_kernels():
    leaves = MODELS["simply"][0]
    with pytest.raises(ValueError, match="4 heads of 'block_0/attn' can't be told"):
        muonjax.sites_from(tree(leaves), num_heads=4)
    for num_heads in (0, 100):  # more heads than features divided by zero
        with pytest.raises(ValueError, match=r"give num_heads|100 heads"):
            muonjax.sites_from(tree(MODELS["Transformers' Llama"][0]), num_heads=num_heads)


def test_sites_none_is_sites_from():
    params = {"a": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
    state = muonjax.muonclip(1e-3).init(params)
    assert set(state[-1].maxima) == {"a"}
    assert set(muonjax.adamclip(1e-3).init(params)[-1].maxima) == {"a"}
    with pytest.raises(ValueError, match="qk_clip: no attention that it knows"):
        muonjax.muonclip(1e-3).init({"dense": {"kernel": jnp.ones((8, 2))}})


def test_the_axis_of_layers_may_be_the_last():
    """`nn.scan(variable_axes={"params": -1})` puts layers last in kernels and biases of every rank."""
    shapes = below("layers", query__kernel=(64, 8, 16, 3), query__bias=(8, 16, 3), key__kernel=(64, 8, 16, 3),
                   key__bias=(8, 16, 3), out__kernel=(8, 16, 64, 3), out__bias=(64, 3))  # fmt: skip
    (site,) = muonjax.sites_from(tree(shapes))
    assert site.scan_axis == (-1,)
    assert muonjax.qk_clip(1.0, site).init(tree(shapes)).maxima["layers"].shape == (3, 8)


def calls(count):
    """Function calls, Python's and C's, that finding and matching the sites of so many attentions takes."""
    params = {}
    for i in range(count):
        shapes = below(
            f"layer_{i}/attention", query__kernel=(8, 2, 4), key__kernel=(8, 2, 4), out__kernel=(2, 4, 8)
        )
        params |= tree(shapes | {f"layer_{i}/mlp/kernel": (8, 8)})
    total = 0

    def profile(frame, event, argument):
        nonlocal total
        total += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        modules = Modules(params)
        targets = find_targets(modules, [(site, 100.0) for site in find_sites(modules)])

    finally:
        sys.setprofile(None)
    assert len(targets) == count
    return total


def test_finding_targets_is_linear():
    """It took 1.2, 20 and 114 seconds for 100, 400 and 1,000 attentions."""
    calls(2)  # what is cached is cached
    few, many = calls(20), calls(80)
    assert many < 4.5 * few
