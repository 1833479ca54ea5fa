"""What each site scales: every layout against an index written out by hand, and what it refuses."""

import re
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from tests.tools.tiers import quick

D, H, K, DH = 6, 4, 2, 3  # input, query heads, key heads, features of a head
GAMMA = np.array([0.25, 1.0, 0.04, 1.0])  # of each query head; exact square roots
THRESHOLD = 100.0


def clip(params, site, gamma=GAMMA, name="attention", **settings):
    """What each parameter was multiplied by, if `gamma` is what the logits ask for."""
    ones = jax.tree.map(lambda x: np.ones(x.shape, np.float32), params)
    statistics = {name: jnp.asarray(THRESHOLD / gamma)}
    apply = jax.jit(
        lambda tree, seen: muonjax.apply_qk_clip(
            tree, seen, site, THRESHOLD, **settings
        )
    )
    return apply({name: ones}, statistics)[name]


def weights(**shapes):
    """{"query.kernel": shape} as a tree of ones."""
    tree = {}
    for path, shape in shapes.items():
        module, leaf = path.split("__")
        tree.setdefault(module, {})[leaf] = np.ones(shape, np.float32)
    return tree


ROOT = np.sqrt(GAMMA)


def rows(*features):
    """Factors [heads, features] from pairs of one number for each head and how many features have it."""
    return np.concatenate(
        [np.repeat(np.asarray(f)[:, None], n, 1) for f, n in features], 1
    )


def arranged(factors, letters, layout, *, bias=False):
    """Factors with axes `letters` as a kernel of this layout, or as its bias."""
    parts = [
        merged or single for merged, single in re.findall(r"\(([^()]*)\)|(\S+)", layout)
    ]
    parts = [part.split() for part in parts if not (bias and part == "i")]
    order = [letter for part in parts for letter in part]
    x = np.transpose(
        factors, [letters.index(letter) for letter in order if letter != "i"]
    )
    if not bias:
        x = np.stack([x] * D, order.index("i"))
    lengths = dict(zip(order, x.shape, strict=True))
    return x.reshape([np.prod([lengths[letter] for letter in part]) for part in parts])


def layouts():
    """Name, site; for each projection its layout and the factors of its heads, and their axes."""
    for layout in ("i h d", "i (h d)", "(h d) i", "h d i", "h i d"):
        for keys, query, key in (("own", ROOT, ROOT), ("shared", GAMMA, np.ones(K))):
            heads = {"num_heads": H, "num_kv_heads": len(key)} if "(" in layout else {}
            projections = {
                "query": (layout, rows((query, DH)), "hd"),
                "key": (layout, rows((key, DH)), "hd"),
            }
            yield (
                f"mha {layout} {keys}",
                muonjax.mha_site(layout=layout, **heads),
                projections,
            )
    nope = 2
    rotary = 3
    value = 4
    for layout in ("i h d", "i (h d)", "(h d) i"):
        for name in ("wq_b", "wq"):
            heads = H if "(" in layout else None
            projections = {
                name: (layout, rows((ROOT, nope), (GAMMA, rotary)), "hd"),
                "wkv_b": (layout, rows((ROOT, nope), (np.ones(H), value)), "hd"),
                "wkv_a": ("i h d", np.ones((1, 5 + rotary)), "hd"),
            }
            site = muonjax.mla_site(
                nope=nope, query=name, layout=layout, num_heads=heads
            )
            yield f"mla {layout} {name}", site, projections
    fused = np.stack([rows((f, DH)) for f in (ROOT, ROOT, np.ones(H))])
    for layout in (
        "i (3 h d)", "i 3 h d", "i 3 (h d)", "i (3 h) d", "3 h i d", "i (h 3 d)", "i h (3 d)", "i h 3 d"
    ):  # fmt: skip
        site = muonjax.fused_qkv_site(num_heads=H, head_dim=DH, layout=layout)
        yield f"fused {layout}", site, {"qkv": (layout, fused, "3hd")}
    for layout, flat in (("i (3 h d)", "i (h d)"), ("i (3 h) d", "i h d")):
        site = muonjax.fused_qkv_site(
            num_heads=H, num_kv_heads=K, head_dim=DH, layout=layout
        )
        factors = rows((np.concatenate([GAMMA, np.ones(2 * K)]), DH))
        yield f"fused grouped {layout}", site, {"qkv": (flat, factors, "hd")}


LAYOUTS = {name: case for name, *case in layouts()}


@quick(
    "mha i h d own",
    "mha (h d) i shared",
    "mla i (h d) wq_b",
    "fused i h (3 d)",
    "fused grouped i (3 h) d",
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    site, projections = LAYOUTS[name]
    expected = {
        path: {
            "kernel": arranged(factors, letters, layout),
            "bias": arranged(factors, letters, layout, bias=True),
        }
        for path, (layout, factors, letters) in projections.items()
    }
    scaled = clip(expected, site)
    chex.assert_trees_all_close(scaled, expected, rtol=1e-6)


@quick("0", "-1", "axes5")
@pytest.mark.parametrize("axes", [0, 1, 2, -1, (0, 1), (1, 0)])
def test_stacked_layers_on_any_axis(axes):
    """The axis is one of the stacked parameter; a bias then has its heads elsewhere than its kernel."""
    depths = (2, 5)[: len(axes)] if isinstance(axes, tuple) else (2,)
    gamma = np.random.default_rng(0).uniform(0.1, 0.9, (*depths, H))
    shapes = {"kernel": (D, H, DH), "bias": (H, DH)}
    where = axes if isinstance(axes, tuple) else (axes,)

    def stack(shape):
        x = jnp.ones((*depths, *shape))
        return jnp.moveaxis(x, range(len(depths)), where)

    params = {
        n: {leaf: stack(shape) for leaf, shape in shapes.items()}
        for n in ("query", "key")
    }
    scaled = clip(params, muonjax.mha_site(scan_axis=axes), gamma)
    for leaf in shapes:
        got = np.moveaxis(np.asarray(scaled["query"][leaf]), where, range(len(depths)))
        got = got if leaf == "bias" else got[..., 0, :, :]
        assert_allclose(got, np.sqrt(gamma)[..., None] * np.ones(DH), rtol=1e-6)


def test_a_name_is_a_regular_expression_for_the_whole_path():
    params = {
        "encoder": {
            "attention": weights(query__kernel=(D, H, DH), key__kernel=(D, H, DH))
        }
    }
    params = params | {"decoder": params["encoder"]}
    statistics = {"decoder/attention": jnp.full(H, 400.0)}
    scaled = muonjax.apply_qk_clip(
        params, statistics, muonjax.mha_site("decoder/.*"), THRESHOLD
    )
    assert_array_equal(scaled["decoder"]["attention"]["query"]["kernel"], 0.5)
    assert_array_equal(scaled["encoder"]["attention"]["query"]["kernel"], 1)
    with pytest.raises(
        ValueError,
        match=r"'coder' matches no module.*\['decoder/attention/key', ",
    ):
        muonjax.apply_qk_clip(params, statistics, muonjax.mha_site("coder"), THRESHOLD)


def test_parameter_trees_of_every_kind():
    linen = nn.MultiHeadDotProductAttention(
        H, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "heads", None))
    )
    boxed = {"attention": linen.init(jax.random.key(0), jnp.ones((1, 2, 8)))["params"]}
    model = nnx.Dict(
        attention=nnx.MultiHeadAttention(H, 8, decode=False, rngs=nnx.Rngs(0))
    )
    state = nnx.state(model, nnx.Param)
    for tree in (
        boxed,
        freeze(boxed),
        state,
        nnx.to_pure_dict(state),
        jax.tree.map(lambda x: x, state),
    ):
        for seen in (tree, jax.eval_shape(lambda tree=tree: tree)):
            assert set(muonjax.qk_clip(1.0, muonjax.mha_site()).init(seen).factors) == {
                "attention"
            }
        scaled = muonjax.apply_qk_clip(
            tree, {"attention": jnp.full(H, 400.0)}, muonjax.mha_site(), THRESHOLD
        )
        assert jax.tree.structure(scaled) == jax.tree.structure(tree)
        halves = [
            np.allclose(a, 0.5 * b) and np.any(b)
            for a, b in zip(*map(jax.tree.leaves, (scaled, tree)), strict=True)
        ]
        assert sum(halves) == 2  # two kernels; the biases are zero


# Refusals.


def attention(**more):
    return weights(**({"query__kernel": (D, H, DH), "key__kernel": (D, H, DH)} | more))


@pytest.mark.parametrize(("tree", "site", "message"), [
    ({}, {"path": "decoder/.*"}, r"'decoder/.*' matches no module with 'query'.* whole path.*'attention/key'"),
    ({}, {"query": "q"}, "no module with 'q'"),
    ({"query__lora_a": (D, 2)}, {}, r"attention/query/lora_a.* feed the queries or keys"),
    ({"query__kernel": (D, H * DH)}, {}, "layout"),
    ({"query__kernel": (2, D, H, DH)}, {}, "disagree on the stack"),
    ({"query__kernel": (2, 2, D, H, DH)}, {"scan_axis": 0}, "scan_axis"),
    ({"query__kernel": (2, 2, D, H, DH)}, {"scan_axis": (0, -5)}, r"layers on axes \(0, -5\)"),
    ({"query__kernel": (2, D, H, DH)}, {"scan_axis": 5}, r"layers on axes \(5,\).*scan_axis"),
    ({"query__kernel": (D, 3, DH)}, {}, r"heads of .*query/kernel' 3 of 3 features, .*key/kernel' 4 .* a multiple"),
    ({"query__bias": (2 * H, DH)}, {}, "heads of"),
    ({"query__kernel": (D, 2, DH)}, {}, "give num_kv_heads"),
    ({"query__kernel": (D, H * DH)}, {"layout": "i (h d)", "num_heads": 5}, "does not hold 5 heads"),
])  # fmt: skip
def test_refusals(tree, site, message):
    with pytest.raises(ValueError, match=message):
        muonjax.qk_clip(1.0, muonjax.mha_site(**site)).init(
            {"attention": attention(**tree)}
        )


@quick("query_ln", "_key_norm", "LayerNorm_0")
@pytest.mark.parametrize("norm", [
    "query_norm", "query_ln", "_key_norm", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "norm_q", "norm_k", "ln_q",
    "k_ln", "query_rmsnorm", "query_layer_norm", "qk_norm", "QKNorm", "LayerNorm_0", "RMSNorm_1", "norm", "q_scale",
])  # fmt: skip
def test_norms_of_other_libraries(norm):
    """Clipped, such a module would not change its logits, and its weights would shrink at every step."""
    params = {"attention": attention(**{f"{norm}__scale": (DH,)})}
    message = rf"normalizes its queries and keys \({norm}\).*Take it out of the sites.* give its Site norms=''"
    scales = muonjax.mha_site().scales
    for site in (muonjax.mha_site(), muonjax.Site(path="attention", scales=scales)):
        with pytest.raises(ValueError, match=message):
            muonjax.qk_clip(1.0, site).init(params)
    muonjax.qk_clip(1.0, muonjax.Site(path="attention", scales=scales, norms="")).init(
        params
    )
    fused = {
        "attention": weights(qkv__kernel=(D, 3 * H * DH), **{f"{norm}__scale": (DH,)})
    }
    with pytest.raises(ValueError, match=norm):
        muonjax.qk_clip(1.0, muonjax.fused_qkv_site(num_heads=H, head_dim=DH)).init(
            fused
        )


@pytest.mark.parametrize(
    "names", [("q_norm", "kv_norm"), ("q_layernorm", "kv_layernorm")]
)
def test_norms_of_latents_are_no_norms_of_queries(names):
    latents = {f"{name}__scale": (5,) for name in names}
    params = {
        "mla": weights(wq_b__kernel=(5, H, 5), wkv_b__kernel=(5, H, 6), **latents)
    }
    muonjax.qk_clip(1.0, muonjax.mla_site(nope=2)).init(params)
    with pytest.raises(ValueError, match="k_norm"):
        muonjax.qk_clip(1.0, muonjax.mla_site(nope=2)).init(
            {"mla": params["mla"] | weights(k_norm__scale=(2,))}
        )


@pytest.mark.parametrize("side", ["query", "key"])
def test_frozen_and_adapter_only_attention(side):
    site = muonjax.mha_site()
    frozen = {"attention": attention() | {side: {"kernel": optax.MaskedNode()}}}
    with pytest.raises(
        ValueError, match=f"'attention/{side}/kernel' that is not masked out"
    ):
        muonjax.qk_clip(1.0, site).init(frozen)
    mask = jax.tree_util.tree_map_with_path(
        lambda path, _: side not in jax.tree_util.keystr(path),
        {"attention": attention()},
    )
    with pytest.raises(
        ValueError,
        match=r"masked out.*If it is frozen.*take 'attention' out of the sites",
    ):
        optax.masked(muonjax.qk_clip(1.0, site), mask).init({"attention": attention()})
    adapter = {"attention": attention() | {side: {"lora_a": jnp.ones((D, 2))}}}
    with pytest.raises(
        ValueError, match=f"no parameter 'attention/{side}/kernel'.*adapter"
    ):
        muonjax.qk_clip(1.0, site).init(adapter)


def test_an_attention_that_is_frozen_whole():
    """Nothing but masked leaves is left of it, which is not Optax's placeholder without leaves."""
    clip = optax.masked(
        muonjax.qk_clip(1.0, muonjax.mha_site()),
        lambda params: jax.tree.map(lambda _: False, params),
    )
    with pytest.raises(ValueError, match="masked out"):
        clip.init({"attention": attention()})


def test_a_frozen_attention_before_the_clip_is_scaled():
    """It stands among the parameters with updates of zero, as at learning rate zero: its logits are held."""
    params = {"attention": attention()}
    frozen = optax.partition(
        {"frozen": optax.set_to_zero()}, jax.tree.map(lambda _: "frozen", params)
    )
    tx = optax.chain(frozen, muonjax.qk_clip(THRESHOLD, muonjax.mha_site()))
    updates, _ = tx.update(
        params,
        tx.init(params),
        params,
        max_logits={"attention": jnp.full(H, 4 * THRESHOLD)},
    )
    assert_array_equal(updates["attention"]["query"]["kernel"], -0.5)


def test_two_sites_for_one_module():
    sites = [muonjax.mha_site(), muonjax.mha_site("attention")]
    with pytest.raises(ValueError, match="two sites match 'attention'"):
        muonjax.qk_clip(1.0, sites).init({"attention": attention()})


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_kernels_that_cannot_be_scaled_are_refused_by_name(dtype):
    params = {"attention": jax.tree.map(lambda x: x.astype(dtype), attention())}
    with pytest.raises(
        TypeError, match=rf"'attention/query/kernel' is {dtype.__name__}; only.*float32"
    ):
        muonjax.qk_clip(1.0, muonjax.mha_site()).init(params)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: muonjax.mha_site("("), "no regular expression"),
    (lambda: muonjax.mha_site(layout="d h"), "can't be read"),
    (lambda: muonjax.mha_site(layout="d i h"), "can't be read"),
    (lambda: muonjax.mha_site(layout="i (h i d)", num_heads=2), "can't be read"),
    (lambda: muonjax.mha_site(layout="i h) (d"), "can't be read"),
    (lambda: muonjax.mha_site(layout="i ((h d)", num_heads=2), "can't be read"),
    (lambda: muonjax.mha_site(layout="i (h d)"), "give num_heads"),
    (lambda: muonjax.mha_site(layout="i (h d)", num_heads=0), "num_heads=0.* at least 1"),
    (lambda: muonjax.mha_site(num_heads=4, num_kv_heads=0), "num_kv_heads=0.* at least 1"),
    (lambda: muonjax.mla_site(nope=0), r"mla_site\(nope=0\).* at least 1"),
    (lambda: muonjax.fused_qkv_site(num_heads=4, head_dim=0), r"fused_qkv_site\(head_dim=0\).* at least 1"),
    (lambda: muonjax.mla_site(nope=2, layout="i (3 h d)", num_heads=2), "can't be read"),
    (lambda: muonjax.fused_qkv_site(num_heads=4, head_dim=2, layout="i (h d)"), "can't be read"),
    (lambda: muonjax.fused_qkv_site(num_heads=4, head_dim=2, num_kv_heads=2, layout="i (h 3 d)"), "grouped keys"),
    (lambda: muonjax.fused_qkv_site(num_heads=4, head_dim=2, num_kv_heads=2, layout="i 3 h d"), "grouped keys"),
])  # fmt: skip
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SCALES = muonjax.mha_site().scales


@pytest.mark.parametrize(("fields", "message"), [
    ({"axes": (-3,)}, "must be different axes of the 2"),
    ({"axes": (0, -2)}, "different axes"),
    ({"entries": 0}, "at least 1, or None"),
    ({"span": (2, 1)}, "above 2"),
    ({"span": (-1, None)}, "at least 0"),
    ({"part": (2, 2)}, "above 2"),
    ({"groups": 0}, "at least 1"),
])  # fmt: skip
def test_a_scale_by_hand_is_checked(fields, message):
    with pytest.raises(
        (TypeError, ValueError), match=rf"^Scale\({next(iter(fields))}=.*{message}"
    ):
        muonjax.Scale(**{"path": "key/kernel", "rank": 2} | fields)


@pytest.mark.parametrize(("fields", "message"), [
    ({"scales": SCALES[0]}, "a sequence of muonjax.Scale"),
    ({"scales": ("query",)}, "a sequence of muonjax.Scale"),
    ({"scales": ()}, "at least one"),
    ({"norms": "("}, "no regular expression"),
    ({"norms": None}, "must be a string"),
])  # fmt: skip
def test_a_site_by_hand_is_checked(fields, message):
    with pytest.raises(
        (TypeError, ValueError), match=rf"^Site\({next(iter(fields))}=.*{message}"
    ):
        muonjax.Site(**{"path": "a", "scales": SCALES} | fields)


def test_exact_sites_skip_what_is_not_trained_by_one_path_alone():
    """A regular expression that matches nothing is a mistake of a hand, and a module without its query is one too."""
    scales = tuple(scale for scale in muonjax.mha_site().scales if not scale.optional)
    a, b = (muonjax.Site(path=path, scales=scales, exact=True) for path in ("a", "b"))
    pattern = muonjax.Site(path="a|c", scales=scales)
    brackets = muonjax.Site(path="block[0]", scales=scales, exact=True)
    given = {"a": attention()}
    assert set(muonjax.qk_clip(1.0, [a, brackets]).init(given).factors) == {"a"}
    assert set(muonjax.qk_clip(1.0, [a, b]).init({"a": attention()}).factors) == {"a"}
    assert set(muonjax.qk_clip(1.0, pattern).init({"a": attention()}).factors) == {"a"}
    masked = {
        "a": attention(),
        "b": attention() | {"query": {"kernel": optax.MaskedNode()}},
    }
    assert set(muonjax.qk_clip(1.0, [a, b]).init(masked).factors) == {"a"}
    with pytest.raises(ValueError, match=r"'a\|c' matches no module"):
        muonjax.qk_clip(1.0, [a, pattern]).init({"b": attention()})
    with pytest.raises(
        ValueError,
        match="no attention of the program is trained here: parameters of a, b are missing",
    ):
        muonjax.qk_clip(1.0, [a, b]).init({"c": attention()})


@pytest.mark.parametrize("sites", [[], "attention", [None]])
def test_no_sites(sites):
    with pytest.raises(
        TypeError,
        match=rf"qk_clip\(sites={re.escape(repr(sites))}\).*muonjax\.mha_site",
    ):
        muonjax.qk_clip(1.0, sites)
    with pytest.raises(
        TypeError, match=rf"apply_qk_clip\(sites={re.escape(repr(sites))}\)"
    ):
        muonjax.apply_qk_clip(
            {"attention": attention()}, {"attention": jnp.ones(H)}, sites
        )


# Other libraries' names and layouts.


def test_parameters_under_other_names():
    params = {"attention": weights(query__w=(D, H, DH), key__w=(D, H, DH))}
    with pytest.raises(
        ValueError,
        match=r"no parameter 'attention/query/kernel'.*another name, write a Site",
    ):
        muonjax.qk_clip(1.0, muonjax.mha_site()).init(params)
    scales = [
        muonjax.Scale(path=f"{name}/w", rank=3, axes=(-2, -1), factor=name)
        for name in ("query", "key")
    ]
    site = muonjax.Site(path="attention", scales=tuple(scales))
    for scaled in jax.tree.leaves(clip(params["attention"], site)):
        assert_allclose(scaled[0, :, 0], ROOT, rtol=1e-6)


def test_key_heads_that_were_forgotten():
    """Four query heads and one shared key head, given as four and four, would clip the wrong features."""
    params = {"attention": weights(q_proj__kernel=(D, 4 * DH), k_proj__kernel=(D, DH))}
    site = {"query": "q_proj", "key": "k_proj", "layout": "i (h d)", "num_heads": 4}
    with pytest.raises(
        ValueError,
        match=r"kernel' 4 of 12 features.*kernel' 4 of 3 features.*give num_kv_heads",
    ):
        muonjax.qk_clip(1.0, muonjax.mha_site(**site)).init(
            {"attention": weights(q_proj__kernel=(D, 48), k_proj__kernel=(D, 12))}
        )
    with pytest.raises(ValueError, match="does not hold 4 heads"):
        muonjax.qk_clip(1.0, muonjax.mha_site(**site)).init(params)
    assert muonjax.qk_clip(1.0, muonjax.mha_site(**site, num_kv_heads=1)).init(params)


# Leaves that people have.


def test_leaves_that_are_none_or_something_else():
    params = {
        "attention": attention()
        | {"query": {"kernel": jnp.ones((D, H, DH)), "bias": None}},
        0: {
            "rng": jax.random.key(0),
            "step": 3,
            "mask": optax.MaskedNode(),
            "none": None,
            "int4": jnp.ones(2, jnp.int4),
        },
    }
    params = {str(name): value for name, value in params.items()} | {
        "list": [None, jnp.ones(2)]
    }
    tx = muonjax.qk_clip(THRESHOLD, muonjax.mha_site())
    hot = {"attention": jnp.full(H, 4 * THRESHOLD)}
    updates, _ = tx.update(params, tx.init(params), params, max_logits=hot)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert_array_equal(
        updates["attention"]["query"]["kernel"], 0.0
    )  # half of 1 + 1, less 1
    assert updates["0"]["step"] == 3


@pytest.mark.parametrize("missing", [None, optax.MaskedNode()])
def test_updates_without_a_leaf_for_a_hot_weight(missing):
    params = {"attention": attention()}
    tx = muonjax.qk_clip(1.0, muonjax.mha_site())
    updates = {"attention": attention() | {"query": {"kernel": missing}}}
    with pytest.raises(
        ValueError, match="qk_clip: the updates have no leaf 'attention/query/kernel'"
    ):
        tx.update(
            updates, tx.init(params), params, max_logits={"attention": jnp.ones(H)}
        )


def calls(count, sites):
    """Function calls, Python's and C's, that it takes to find so many attentions."""
    params = {
        f"layer_{i}": {"attention": attention(), "mlp": {"kernel": np.ones((8, 8))}}
        for i in range(count)
    }
    total = 0

    def profile(frame, event, argument):
        nonlocal total
        total += event in ("call", "c_call")

    tx = muonjax.qk_clip(100.0, sites(count))
    shapes = jax.eval_shape(lambda: params)
    sys.setprofile(profile)
    try:
        assert len(jax.eval_shape(tx.init, shapes).factors) == count
    finally:
        sys.setprofile(None)
    return total


@pytest.mark.parametrize("sites", [
    lambda count: muonjax.mha_site("layer_.*/attention"),
    lambda count: [muonjax.mha_site(f"layer_{i}/attention") for i in range(count)],
])  # fmt: skip
def test_finding_attentions_is_linear(sites):
    """It took 1.2, 20 and 114 seconds for 100, 400 and 1,000 attentions."""
    calls(2, sites)  # what is cached is cached
    few = calls(20, sites)
    many = calls(80, sites)
    assert many < 4.5 * few


def test_a_span_ends_where_its_run_does():
    """A head of eight features has no 16 to scale."""
    scale = muonjax.Scale(path="kernel", rank=2, entries=2, span=(0, 16))
    site = muonjax.Site(path="head", scales=(scale,))
    with pytest.raises(ValueError, match=r"2 heads, features \(0, 16\) of each"):
        muonjax.signal_clip(1.0, site).init({"head": {"kernel": jnp.ones((D, 16))}})
