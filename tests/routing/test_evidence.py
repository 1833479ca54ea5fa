"""What decides a leaf where its name does not: rules, its bias, its siblings, named axes, its shape."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import muonjax
from muonjax._routing.dimension_numbers import FusedDimensionNumbers, dimension_numbers, routes
from muonjax._routing.roles import read_roles

D, H, S = 32, 4, 8


def leaf(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def decided(params, **settings):
    return {r.path: r.numbers for r in routes(params, **settings)[0]}


def why(params, **settings):
    return {r.path: r.why for r in routes(params, **settings)[0]}


# Rules


def test_rules_come_before_stacks_are_sought():
    """A leaf with a rule is neither taken for a stack nor a witness that its neighbours are none."""
    ambiguous = {"odd": {"kernel": leaf(4, 4, 4)}, "norm": {"scale": leaf(4, 4)}}
    with pytest.raises(ValueError, match="scan_axis"):
        dimension_numbers(ambiguous)
    assert decided(ambiguous, rules=[("odd", None)]) == {"odd/kernel": None, "norm/scale": None}


def test_a_patch_embedding_as_a_convolution_if_asked():
    params = {"patch_embeddings": {"projection": {"kernel": leaf(16, 16, 3, 768), "bias": leaf(768)}}}
    assert decided(params)["patch_embeddings/projection/kernel"] is None
    convolution = MuonDimensionNumbers((0, 1, 2), 3)
    found = decided(params, rules=[("projection/kernel", convolution)])
    assert found["patch_embeddings/projection/kernel"] == convolution


def test_scan_axis_never_cuts_a_patch_embedding():
    stack = {"dense": {"kernel": leaf(3, D, 64), "bias": leaf(3, 64)}, "norm": {"scale": leaf(3, D)}}
    params = {"patch_embed": {"proj": {"kernel": leaf(16, 16, 3, D), "bias": leaf(D)}}, "layers": stack}
    found = decided(params, scan_axis=0)
    assert found["patch_embed/proj/kernel"] is None
    assert found["layers/dense/kernel"] == MuonDimensionNumbers(1, 2)


def test_a_scan_axis_that_does_not_fit_is_refused():
    """Along axis 0 the kernels of this stack would have 32 and 64 layers."""
    mlp = {"wi": {"kernel": leaf(D, 3, 64)}, "wo": {"kernel": leaf(64, 3, D)}}
    params = {"layers": {"mlp": mlp, "norm": {"scale": leaf(D, 3)}}}
    with pytest.raises(
        ValueError, match=r"scan_axis=0\) would make 32 layers of .*wi/kernel.* and 64 of .*wo"
    ):
        dimension_numbers(params, scan_axis=0)
    assert decided(params, scan_axis=1)["layers/mlp/wi/kernel"] == MuonDimensionNumbers(0, 2)
    assert decided(params) == decided(params, scan_axis=1)


def test_the_suggested_rule_covers_all_layers():
    layer = {"query_key_value": {"kernel": leaf(D, 3 * D), "bias": leaf(3 * D)}}
    with pytest.raises(ValueError, match=r"h/\\d\+/query_key_value/kernel\$', MuonDimensionNumbers\(0, 1\)"):
        dimension_numbers({"h": {str(i): layer for i in range(3)}})


def test_one_paste_decides_a_tree():
    """The message has a rule for every leaf that can't be decided, numbered ones together."""
    odd = {
        f"layers_{i}": {"query_key_value": {"kernel": leaf(8, 24)}, "odd": leaf(3, 4, 5)} for i in range(2)
    }
    with pytest.raises(ValueError, match="nor 3 others") as error:
        dimension_numbers(odd)
    rules = re.search(r"rules=(\[.*?\)\]) ", str(error.value))[1]
    found = decided(odd, rules=eval(rules))
    assert found["layers_1/odd"] is None
    assert found["layers_1/query_key_value/kernel"] == MuonDimensionNumbers(0, 1)


# Biases


@pytest.mark.parametrize(
    ("name", "shape", "bias", "expected"),
    [
        ("up", (2, 2, 64, 32), (32,), MuonDimensionNumbers((0, 1, 2), 3)),  # nnx.ConvTranspose
        ("0", (2, 2, 16, 64), (16,), MuonDimensionNumbers((0, 1, 3), 2)),  # transpose_kernel=True
        ("up", (2, 2, 64, 32), None, MuonDimensionNumbers((0, 1, 2), 3)),
        ("c_fc", (96, D), (96,), MuonDimensionNumbers(1, 0)),  # Hugging Face's Conv1D
        ("projection", (5, 3, D), (D,), MuonDimensionNumbers((0, 1), 2)),
        ("gate", (H, S, S), (H, S), MuonDimensionNumbers(1, 2)),  # block diagonal, as Griffin's gates
        ("sampling_offsets", (D, H, 4, 4, 2), (H, 4, 4, 2), MuonDimensionNumbers(0, (1, 2, 3, 4))),
    ],
)
def test_what_has_a_bias_is_an_output(name, shape, bias, expected):
    layer = {"kernel": leaf(*shape)} | ({"bias": leaf(*bias)} if bias else {})
    assert decided({"block": {name: layer}})[f"block/{name}/kernel"] == expected


def test_a_stack_of_rows_is_no_matrix():
    params = {"experts": {"wi": leaf(4, 1, 16), "wo": leaf(4, 16, 1)}}
    assert why(params) == {"experts/wi": "experts with one row", "experts/wo": "experts with one column"}


def test_an_output_beside_a_value_alone_is_no_attentions():
    read = read_roles([("memory", "v_proj", "kernel"), ("memory", "out", "kernel")])
    assert read[1].name == "dense"


def test_outputs_first():
    """PyTorch's and Equinox's (out, in, *window); one bias in the tree tells it of weights without one."""
    convolution = {"weight": leaf(24, 16, 5, 5), "bias": leaf(24, 1, 1)}
    conv1d = {"weight": leaf(16, 16, 3), "bias": leaf(16, 1)}
    dense = {"weight": leaf(96, D), "bias": leaf(96)}
    params = {"a": convolution, "b": conv1d, "c": dense, "d": {"weight": leaf(D, 96)}}
    found = decided(params)
    assert found["a/weight"] == MuonDimensionNumbers((1, 2, 3), 0)
    assert found["b/weight"] == MuonDimensionNumbers((1, 2), 0)
    assert found["c/weight"] == found["d/weight"] == MuonDimensionNumbers(1, 0)
    assert decided({"d": {"weight": leaf(D, 96)}})["d/weight"] == MuonDimensionNumbers(0, 1)


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (64, 1, 1), (64,)])
@pytest.mark.parametrize("name", ["bias", "scale", "offset", "b"])
def test_vectors_of_any_rank(shape, name):
    params = {"conv": {"kernel": leaf(3, 3, 16, 64), name: leaf(*shape)}}
    assert decided(params) == {"conv/kernel": MuonDimensionNumbers((0, 1, 2), 3), f"conv/{name}": None}


# Attention


def attention(query, key, value, out, leaf_name="kernel"):
    shapes = {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": out}
    return {"attn": {name: {leaf_name: leaf(*shape)} for name, shape in shapes.items()}}


@pytest.mark.parametrize(
    ("shapes", "projection", "out"),
    [
        (((D, H, S), (D, 2, S), (D, 2, S), (H, S, D)), (0, (1, 2)), ((0, 1), 2)),  # Flax
        (((D, 3, S), (D, 1, S), (D, 1, S), (D, 3, S)), (0, (1, 2)), ((1, 2), 0)),  # simply, axlearn
        (((3, D, S), (1, D, S), (1, D, S), (3, S, D)), (1, (0, 2)), ((0, 1), 2)),  # Gemma
        (((3, S, D), (1, S, D), (1, S, D), (D, 3, S)), (2, (0, 1)), ((1, 2), 0)),  # outputs first
    ],
)
def test_the_projections_agree_on_their_axes(shapes, projection, out):
    found = decided(attention(*shapes))
    for name in ("q_proj", "k_proj", "v_proj"):
        assert found[f"attn/{name}/kernel"] == MuonDimensionNumbers(*projection)
    assert found["attn/o_proj/kernel"] == MuonDimensionNumbers(*out)
    heads = decided(attention(*shapes), attention="heads")
    assert heads["attn/o_proj/kernel"] == found["attn/o_proj/kernel"]  # whole
    assert shapes[0][heads["attn/q_proj/kernel"].output_axis] == S


def test_projections_that_do_not_agree_are_refused():
    with pytest.raises(ValueError, match=r"attn/.*rules="):
        dimension_numbers(
            attention((D, H, S), (D, H, S), (D, H, S), (5, 7, D)) | {"norm": {"scale": leaf(D)}}
        )


def test_unequal_parts_from_the_output_kernel():
    fused = {"qkv_proj": {"weight": leaf(D, 6, S)}, "o_proj": {"weight": leaf(D, H, S)}}
    found = decided({"attention": fused, "norm": {"scale": leaf(D)}})
    assert found["attention/qkv_proj/weight"] == FusedDimensionNumbers(0, (1, 2), (4, 1, 1), 1)
    stacked = jax.tree.map(lambda x: leaf(7, *x.shape), {"attention": fused, "norm": {"scale": leaf(D)}})
    assert decided(stacked)["attention/qkv_proj/weight"] == FusedDimensionNumbers(1, (2, 3), (4, 1, 1), 2)
    assert decided(stacked, attention="heads")["attention/qkv_proj/weight"] == MuonDimensionNumbers(1, 3)
    with pytest.raises(ValueError, match=r"qkv_proj.*parts=\(queries, keys, values\)"):
        dimension_numbers({"attn": {"qkv_proj": {"kernel": leaf(D, 48)}}})


def test_folded_heads_are_told_by_a_module_or_a_program():
    """A norm as long as a head would be a size alone."""
    params = attention((D, 48), (D, 16), (D, 16), (48, D))
    params["attn"]["q_norm"] = {"scale": leaf(S)}
    with pytest.raises(ValueError, match=r"(q_proj|k_proj).*muonjax\.inspect"):
        dimension_numbers(params, attention="heads")


def test_factors_of_einsums():
    """[*in, rank] and [rank, *out] share the rank, also where it equals the number of heads."""
    lora = {"lora_a": leaf(D, H), "lora_b": leaf(H, H, S)}
    out = {"lora_a": leaf(H, S, H), "lora_b": leaf(H, D)}
    found = decided({"q_einsum": lora, "attn_vec_einsum": out})
    assert found["q_einsum/lora_b"] == MuonDimensionNumbers(0, (1, 2))
    assert found["attn_vec_einsum/lora_a"] == MuonDimensionNumbers((0, 1), 2)
    stacked = {"q_proj": {"lora_a": leaf(3, D, 2), "lora_b": leaf(3, 2, D)}}
    assert decided(stacked)["q_proj/lora_b"] == MuonDimensionNumbers(1, 2)


def test_gates_are_stored_as_their_down_kernel_is():
    mlp = {"gating_einsum": leaf(2, 64, D), "linear": leaf(64, D)}
    assert decided({"mlp": mlp})["mlp/gating_einsum"] == MuonDimensionNumbers(2, 1)


def test_what_only_sizes_would_tell_is_refused():
    """Grouped keys in a flat kernel, queries by key head, pairs of unnamed arrays [d, heads, size]."""
    flat = {"qkv_proj": {"kernel": leaf(D, 48)}, "o_proj": {"kernel": leaf(32, D)}}
    grouped = {"q": leaf(D, 2, 3, S), "k": leaf(D, 2, S), "v": leaf(D, 2, S), "o": leaf(2, 3, S, D)}
    for params in (flat, grouped, {"wx_in": leaf(D, H, S), "wb_in": leaf(D, 2, 6)}):
        with pytest.raises(ValueError, match="can't tell"):
            decided({"attn": params})


# Arrays that are no matrices


@pytest.mark.parametrize(("name", "shape"), [("posemb", (2, 1, 9, D)), ("masks-FREEZE_ME", (2, D, D))])
def test_bare_arrays_that_are_no_matrices(name, shape):
    """What is put before a sequence, or added to it; a constant mask."""
    assert decided({name: leaf(*shape), "head": {"kernel": leaf(D, D)}})[name] is None


@pytest.mark.parametrize(
    ("name", "shape"), [("R", (4, 4, D, D)), ("weights_re", (D, D, 12, 12)), ("bottleneck", (1, 5, D))]
)
def test_bare_arrays_that_only_look_like_matrices(name, shape):
    """An sLSTM's recurrence by gate and head, a Fourier layer's weights by frequency, tokens: refused."""
    with pytest.raises(ValueError, match="can't tell"):
        decided({"layer": {name: leaf(*shape)}})


@pytest.mark.parametrize("beside", ["log_step", "Lambda_re"])
def test_letters_beside_state_space_parameters(beside):
    """S4's P and DSS' W; a W alone is a matrix."""
    assert decided({"seq": {"P": leaf(S, D), beside: leaf(S, D)}})["seq/P"] is None
    assert decided({"layer": {"W": leaf(S, D)}})["layer/W"] == MuonDimensionNumbers(0, 1)


# Heads


def test_the_last_layer_of_a_classifier():
    """No other parameter takes its output; a hidden layer's output is taken by the next."""
    sizes = [784, 512, 256, 10]
    layers = {
        f"Dense_{i}": {"kernel": leaf(sizes[i], sizes[i + 1]), "bias": leaf(sizes[i + 1])} for i in range(3)
    }
    found = decided(layers)
    assert found["Dense_2/kernel"] is None
    assert found["Dense_1/kernel"] == MuonDimensionNumbers(0, 1)
    assert (
        why(layers)["Dense_2/kernel"]
        == "output head: the last of its kind, no other parameter takes its output"
    )
    assert decided({"dense": layers["Dense_2"]})["dense/kernel"] == MuonDimensionNumbers(
        0, 1
    )  # alone, nobody can tell


def test_what_is_split_before_use_is_no_head():
    """Modulations (d, 6·d) are taken in parts."""
    params = {"norm": {"scale": leaf(D)}, "modulation": {"kernel": leaf(D, 6 * D)}}
    assert decided(params)["modulation/kernel"] == MuonDimensionNumbers(0, 1)


@pytest.mark.parametrize("name", ["Dense_0", "modulation"])
def test_the_only_dense_layer_after_the_last_norm(name):
    """The head of a Conformer (512, 1024), though 1024 is twice a width of the model; not what a name tells."""
    block = {"norm": {"scale": leaf(D)}, "Dense_0": {"kernel": leaf(D, D)}}
    found = decided({"block_0": block, "LayerNorm_0": {"scale": leaf(D)}, name: {"kernel": leaf(D, 2 * D)}})
    assert (found[f"{name}/kernel"] is None) == (name == "Dense_0")


@pytest.mark.parametrize("name", ["layers_0", "block_0"])
def test_a_single_block_has_no_head(name):
    """Jamba's and Mamba's x_proj is taken apart, an xLSTM's gates act at once."""
    block = {
        "in_proj": {"kernel": leaf(D, 64)},
        "igate": {"kernel": leaf(D, 4)},
        "x_proj": {"kernel": leaf(64, 18)},
    }
    found = decided({name: block | {"norm": {"scale": leaf(D)}}})
    assert all(found[f"{name}/{m}/kernel"] == MuonDimensionNumbers(0, 1) for m in block)


def test_a_head_for_each_layer():
    """Deformable DETR refines its boxes after each layer; within a head, what its next layer takes is hidden."""
    sizes = [D, D, 4]
    embed = {f"Dense_{i}": {"kernel": leaf(sizes[i], sizes[i + 1])} for i in range(2)}
    found = decided({"norm": {"scale": leaf(D)}, "bbox_embed0": embed, "bbox_embed1": embed})
    assert [found[f"bbox_embed1/Dense_{i}/kernel"] for i in range(2)] == [MuonDimensionNumbers(0, 1), None]


@pytest.mark.parametrize("name", ["pre_logits", "router_logits"])
def test_names_that_only_look_like_heads(name):
    params = {"norm": {"scale": leaf(D)}, name: {"kernel": leaf(D, D)}}
    assert decided(params)[f"{name}/kernel"] == MuonDimensionNumbers(0, 1)


# Named axes


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Named:
    """Like Haliax's NamedArray."""

    array: object
    axes: tuple

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(children[0], axes)


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


def named(**sizes):
    return Named(leaf(*sizes.values()), tuple(Axis(name, size) for name, size in sizes.items()))


def test_named_axes_tell_all():
    stack = {
        "q_proj": {"weight": named(layers=3, kv_head=2, q_heads_per_group=2, head_size=S, embed=D)},
        "o_proj": {"weight": named(layers=3, embed=D, kv_head=2, q_heads_per_group=2, head_size=S)},
        "up_proj": {"weight": named(layers=3, mlp=96, embed=D)},
        "down_proj": {"weight": named(layers=3, embed=D, mlp=96)},
        "norm": {"weight": named(layers=3, embed=D)},
    }
    params = {"layers": stack, "token_table": named(vocab=100, embed=D)}
    assert decided(params) == {
        "layers/down_proj/weight/0": MuonDimensionNumbers(2, 1),
        "layers/norm/weight/0": None,
        "layers/o_proj/weight/0": MuonDimensionNumbers((2, 3, 4), 1),
        "layers/q_proj/weight/0": MuonDimensionNumbers(4, (1, 2, 3)),
        "layers/up_proj/weight/0": MuonDimensionNumbers(2, 1),
        "token_table/0": None,
    }
    assert dimension_numbers(params)["layers"]["o_proj"]["weight"].array == MuonDimensionNumbers((2, 3, 4), 1)
    heads = decided(params, attention="heads")
    assert heads["layers/q_proj/weight/0"] == MuonDimensionNumbers(4, 3)


# Unequal parts


def test_unequal_parts_are_matrices_of_their_own():
    """Each part is orthogonalized and scaled as if it were a leaf."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((3, 16, 24)), "float32")
    numbers = FusedDimensionNumbers(1, 2, parts=(16, 4, 4), axis=2)
    tx = optax.chain(
        muonjax.orthogonalize(dimension_numbers=numbers), muonjax.match_rms(dimension_numbers=numbers)
    )
    whole, _ = jax.jit(tx.update)(w, tx.init(w))
    plain = MuonDimensionNumbers(1, 2)
    one = optax.chain(
        muonjax.orthogonalize(dimension_numbers=plain), muonjax.match_rms(dimension_numbers=plain)
    )
    parts = [jax.jit(one.update)(p, one.init(p))[0] for p in jnp.split(w, (16, 20), axis=2)]
    np.testing.assert_allclose(whole, jnp.concatenate(parts, axis=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "axis", "message"),
    [
        ((16, 4), 1, r"leaf 'w' of shape \(8, 24\).*sum to 24"),
        ((16, 8, 0), 1, "must be positive"),
        (5, 1, "must divide 24"),
        (0, 1, "must divide 24"),
    ],
)
def test_parts_that_do_not_fit(parts, axis, message):
    params, numbers = {"w": jnp.ones((8, 24))}, FusedDimensionNumbers(0, 1, parts, axis)
    with pytest.raises(ValueError, match=message):
        muonjax.muon(1e-3, {"w": numbers}).init(params)
    with pytest.raises(ValueError, match=r"'w'.*(sum to|must be|must divide)"):
        dimension_numbers(params, rules=[("w", numbers)])


def test_tables_of_unequal_parts_and_empty_leaves():
    numbers = {"w": FusedDimensionNumbers(0, 1, (16, 4, 4), 1), "none": None}
    assert "8×16 + 2 of 8×4" in muonjax.tabulate({"w": leaf(8, 24), "none": None}, numbers)
    assert "3 matrices in 1 leaf" in muonjax.tabulate({"w": leaf(8, 24), "none": None}, numbers)


# Warnings


def test_muon_without_matrices_says_so():
    with pytest.warns(UserWarning, match="none of the parameters is a matrix"):
        muonjax.muon(1e-3).init({"scale": jnp.ones(4)})


def test_flax_names_decide_where_heads_are_larger_than_the_model():
    """Latent attention of width 16 and a query of rank 8 agrees with no arrangement; the name `kernel` is Flax's."""

    def latent(name):
        shapes = {"wq_a": (16, 8), "wq_b": (8, 2, 24), "wkv_b": (8, 2, 40), "out": (2, 24, 16)}
        return {"attention": {module: {name: leaf(*shape)} for module, shape in shapes.items()}}

    found = decided(latent("kernel"))
    assert found["attention/out/kernel"] == MuonDimensionNumbers((0, 1), 2)
    assert found["attention/wq_b/kernel"] == MuonDimensionNumbers(0, (1, 2))
    with pytest.raises(ValueError, match="can't tell"):
        decided(latent("w"))
