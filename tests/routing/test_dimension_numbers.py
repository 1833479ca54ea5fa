"""Every leaf of real Flax models, and of trees with the names in use elsewhere, goes where it belongs."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from optax.contrib import MuonDimensionNumbers

from muonjax._matrix_view import matrix_pieces
from muonjax._routing.dimension_numbers import FusedDimensionNumbers, dimension_numbers, routes

D, H, S, MLP, VOCAB, LAYERS = 32, 4, 8, 80, 100, 3  # no two alike, and H·S = D


def leaf(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def matrices(params, **settings):
    """Path to (count, m, n) of every leaf that goes to Muon."""
    found, _ = routes(params, **settings)
    return {r.path: first_matrices(r) for r in found if r.numbers is not None}


def first_matrices(route):
    """Number, rows and columns of a leaf's matrices; of unequal parts, the first."""
    leaf = jax.ShapeDtypeStruct(route.shape, "float32")
    view = matrix_pieces(route.numbers, leaf, call="")[0].view
    return view.batch, view.fan_in, view.fan_out


def numbers_of(params, **settings):
    return {r.path: r.numbers for r in routes(params, **settings)[0]}


class Block(nn.Module):
    bias: bool = True

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm(use_bias=self.bias)(x)
        x = x + nn.MultiHeadDotProductAttention(H, use_bias=self.bias, name="attention")(h, h)
        h = nn.Dense(MLP, use_bias=self.bias)(nn.RMSNorm()(x))
        return x + nn.Dense(D, use_bias=self.bias)(nn.gelu(h)), None


class Model(nn.Module):
    scan_axis: int | None = None
    bias: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, D)(tokens)
        x = x + self.param("position_embedding", nn.initializers.normal(), (6, D))
        if self.scan_axis is None:
            x, _ = nn.remat(Block)(self.bias, name="layers")(x)
        else:
            axes = {"params": self.scan_axis}
            stack = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
            x, _ = stack(self.bias, name="layers")(x, None)
        return nn.Dense(VOCAB)(nn.LayerNorm(name="ln_f")(x))


def linen_params(model, *inputs):
    return jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]


def model_params(**settings):
    return linen_params(Model(**settings), jnp.zeros((2, 6), int))


def block_matrices(count):
    whole = (count, D, D)
    attention = {f"layers/attention/{name}/kernel": whole for name in ("query", "key", "value", "out")}
    return {**attention, "layers/Dense_0/kernel": (count, D, MLP), "layers/Dense_1/kernel": (count, MLP, D)}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scan_axis", [None, 0, 1])
def test_linen_transformer(scan_axis, bias):
    """Kernels of the blocks and nothing else: not the biases, scales, embeddings, positions or the head."""
    params = model_params(scan_axis=scan_axis, bias=bias)
    assert matrices(params) == block_matrices(1 if scan_axis is None else LAYERS)


def test_axes_of_a_scanned_stack():
    """The scan axis is a batch axis wherever it is; heads fold with their size."""
    for scan_axis, query, out in [(0, (1, (2, 3)), ((1, 2), 3)), (1, (0, (2, 3)), ((0, 2), 3))]:
        found = numbers_of(model_params(scan_axis=scan_axis))
        assert found["layers/attention/query/kernel"] == MuonDimensionNumbers(*query)
        assert found["layers/attention/out/kernel"] == MuonDimensionNumbers(*out)


@pytest.mark.parametrize("scan_axis", [None, 0, 1])
def test_a_matrix_a_head(scan_axis):
    count = H * (1 if scan_axis is None else LAYERS)
    found = matrices(model_params(scan_axis=scan_axis), attention="heads")
    assert found["layers/attention/query/kernel"] == (count, D, S)
    assert found["layers/attention/out/kernel"] == (count // H, D, D)  # whole, as in practice
    assert found["layers/Dense_0/kernel"] == (count // H, D, MLP)


def test_scan_axis_behind():
    """`nn.scan` over -1 or 2 leaves (d, heads, size, layers) and (d, heads, layers, size)."""
    shapes = {"query": (D, H, S), "key": (D, 2, S), "value": (D, 2, S), "out": (H, S, D)}
    last = {name: {"kernel": leaf(*shape, LAYERS)} for name, shape in shapes.items()}
    assert matrices(last)["query/kernel"] == (LAYERS, D, D)
    third = {name: {"kernel": leaf(*shape[:2], LAYERS, shape[2])} for name, shape in shapes.items()}
    assert numbers_of(third)["out/kernel"] == MuonDimensionNumbers((0, 1), 3)


def test_scan_axis_overrides():
    """Where all axes are alike only the caller can know."""
    square = {"dense": {"kernel": leaf(4, 4, 4)}, "norm": {"scale": leaf(4, 4)}}
    with pytest.raises(ValueError, match=r"size 4 fit 'dense/kernel' of shape \(4, 4, 4\).*scan_axis"):
        dimension_numbers(square)
    for axis, expected in [(0, (1, 2)), (1, (0, 2)), (-1, (0, 1))]:
        assert numbers_of(square, scan_axis=axis)["dense/kernel"] == MuonDimensionNumbers(*expected)
    alone = {"thing": {"kernel": leaf(5, 6, 7)}}
    assert matrices(alone, scan_axis=1) == {"thing/kernel": (6, 5, 7)}


def test_nested_scans():
    params = {"inner": {"dense": {"kernel": leaf(2, LAYERS, D, MLP), "bias": leaf(2, LAYERS, MLP)}}}
    params["inner"]["norm"] = {"scale": leaf(2, LAYERS, D)}
    params["norm"] = {"scale": leaf(2, D)}
    assert matrices(params) == {"inner/dense/kernel": (2 * LAYERS, D, MLP)}


def test_two_stacks_of_different_depth():
    def stack(count):
        return {"dense": {"kernel": leaf(count, D, MLP)}, "norm": {"scale": leaf(count, D)}}

    found = matrices({"encoder": stack(3), "decoder": stack(5)})
    assert found == {"decoder/dense/kernel": (5, D, MLP), "encoder/dense/kernel": (3, D, MLP)}


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, D, num_kv_heads=2, decode=False, rngs=rngs)
        self.up = nnx.Linear(D, MLP, rngs=rngs)


class NnxModel(nnx.Module):
    def __init__(self, rngs, stack_axis=None):
        self.embed = nnx.Embed(VOCAB, D, rngs=rngs)
        if stack_axis is None:
            self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        else:

            @nnx.split_rngs(splits=LAYERS)
            @nnx.vmap(in_axes=0, out_axes=stack_axis)
            def blocks(rngs):
                return NnxBlock(rngs)

            self.blocks = blocks(rngs)
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, VOCAB, rngs=rngs)


def nnx_model(**settings):
    return nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0), **settings))


@pytest.mark.parametrize("stack_axis", [None, 0, 1])
def test_nnx_transformer(stack_axis):
    """Shared key heads, a list of blocks and `nnx.vmap` stacks; the module and its state agree."""
    model = nnx_model(stack_axis=stack_axis)
    state = nnx.state(model, nnx.Param)
    count = 1 if stack_axis is None else LAYERS
    block = {
        "attention/query/kernel": (count, D, D),
        "attention/key/kernel": (count, D, 2 * S),
        "attention/value/kernel": (count, D, 2 * S),
        "attention/out/kernel": (count, D, D),
        "up/kernel": (count, D, MLP),
    }
    scopes = ["blocks/0", "blocks/1"] if stack_axis is None else ["blocks"]
    expected = {f"{scope}/{path}": shape for scope in scopes for path, shape in block.items()}
    assert matrices(state) == expected
    assert dimension_numbers(model) == dimension_numbers(nnx.as_pure(state))


def test_nnx_paths_with_and_without_value():
    """`nnx.Optimizer` initialises with boxes, `kernel.value`, and updates without."""
    state = nnx.state(nnx_model(), nnx.Param)
    boxed, pure = numbers_of(state), numbers_of(nnx.as_pure(state))
    assert boxed == pure
    assert not any(path.endswith("value") for path in boxed if "attention/value" not in path)


class NnxZoo(nnx.Module):
    """Layers whose kernels no name explains."""

    def __init__(self, rngs):
        self.first = nnx.Einsum("btd,hde->bthe", (H, D, S), (H, S), rngs=rngs)
        self.second = nnx.Einsum("bed,edf->bef", (5, D, MLP), rngs=rngs)
        self.third = nnx.LinearGeneral((H, S), (3, 7), axis=(-2, -1), use_bias=False, rngs=rngs)
        self.fourth = nnx.LinearGeneral(D, MLP, batch_axis={0: 5}, axis=-1, rngs=rngs)
        self.stem = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.mixer = nnx.Conv(16, 16, (3, 3), feature_group_count=16, rngs=rngs)
        self.doubler = nnx.Conv(16, 32, (3, 3), feature_group_count=16, rngs=rngs)
        self.groups = nnx.Conv(16, 32, (3,), feature_group_count=4, use_bias=False, rngs=rngs)
        self.upward = nnx.ConvTranspose(8, 12, (3,), transpose_kernel=True, rngs=rngs)
        self.adapter = nnx.LoRA(D, 2, MLP, rngs=rngs)
        self.words = nnx.Embed(VOCAB, D, rngs=rngs)
        self.gate = nnx.Einsum("bde,de->bde", (D, S), rngs=rngs)
        self.c_attn = nnx.Linear(D, 3 * D, rngs=rngs)
        self.lm_head = nnx.Linear(D, VOCAB, rngs=rngs)


def test_settings_that_names_do_not_show_are_warned_about():
    """Groups and an einsum's letters, in NNX and Equinox: the layers say that there are some, names do not."""
    zoo = nnx.eval_shape(lambda: NnxZoo(nnx.Rngs(0)))
    with pytest.raises(ValueError, match="first/kernel"):
        dimension_numbers(zoo)
    plain = nnx.Dict(up=nnx.Linear(D, MLP, rngs=nnx.Rngs(0)), down=nnx.Linear(MLP, D, rngs=nnx.Rngs(0)))
    for name in ("mixer", "doubler", "gate"):
        model = nnx.Dict(**{name: getattr(zoo, name)}, **plain)
        with pytest.warns(UserWarning, match=rf"takes {name}/kernel for plain kernels.*muonjax\.inspect"):
            dimension_numbers(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dimension_numbers(model, rules=[(name, None)])
    eqx = pytest.importorskip("equinox")
    model = eqx.filter_eval_shape(lambda: eqx.nn.Conv2d(16, 32, 3, groups=4, key=jax.random.key(0)))
    with pytest.warns(UserWarning, match=r"takes 0/weight for plain kernels"):
        dimension_numbers([eqx.filter(model, lambda x: hasattr(x, "dtype"))])


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):  # [batch, 8, 8, 3]
        x = nn.BatchNorm(use_running_average=True)(nn.Conv(16, (3, 3), use_bias=False)(x))
        x = nn.Conv(16, (3, 3), feature_group_count=16)(x)
        x = nn.Conv(24, (4, 4), name="stem")(x)
        x = nn.Conv(20, (3,))(x.reshape(x.shape[0], -1, 24))
        x = nn.DenseGeneral((4, 5))(x)
        return nn.DenseGeneral(11, axis=(-2, -1))(x)


def test_convolutions_and_general_dense():
    assert matrices(linen_params(Convolutions(), jnp.zeros((1, 8, 8, 3)))) == {
        "Conv_0/kernel": (1, 27, 16),
        "Conv_2/kernel": (1, 72, 20),
        "DenseGeneral_0/kernel": (1, 20, 20),
        "DenseGeneral_1/kernel": (1, 20, 11),
        "stem/kernel": (1, 16 * 16, 24),
    }


def test_a_square_window_needs_no_name():
    assert matrices({"stage": {"kernel": leaf(7, 7, 3, 64)}}) == {"stage/kernel": (1, 147, 64)}
    with pytest.raises(ValueError, match="stage/kernel"):
        dimension_numbers({"stage": {"kernel": leaf(7, 5, 3, 64)}})


def test_scanned_convolutions():
    """(3, 3, 3, in, out) of three layers and a window of three: the norm tells how deep the stack is."""
    params = {"Conv_0": {"kernel": leaf(3, 3, 3, 16, 24)}, "BatchNorm_0": {"scale": leaf(3, 24)}}
    assert matrices(params) == {"Conv_0/kernel": (3, 9 * 16, 24)}
    last = {"Conv_0": {"kernel": leaf(3, 3, 16, 24, 5)}, "BatchNorm_0": {"scale": leaf(24, 5)}}
    assert matrices(last) == {"Conv_0/kernel": (5, 9 * 16, 24)}


def test_batched_dense_general():
    dense = nn.DenseGeneral(MLP, batch_dims=(0,))
    with pytest.raises(ValueError, match=r"'x/kernel' \(matrix\) of shape \(5, 32, 80\).*rule"):
        matrices({"x": linen_params(dense, jnp.zeros((5, D)))})


def test_linen_einsum():
    """With a bias the output axes are known; without one, three axes could be anything."""
    with_bias = linen_params(nn.Einsum((D, H, S), "...d,dhe->...he"), jnp.zeros((1, D)))
    assert matrices({"mix": with_bias}) == {"mix/kernel": (1, D, D)}
    without = {
        "mix": linen_params(nn.Einsum((D, H, S), "...d,dhe->...he", use_bias=False), jnp.zeros((1, D)))
    }
    with pytest.raises(ValueError, match=r"'mix/kernel' \(matrix\) of shape \(32, 4, 8\).*rule"):
        dimension_numbers(without)


def dense(*shape, bias=True):
    return {"kernel": leaf(*shape)} | ({"bias": leaf(shape[-1])} if bias else {})


def test_fused_query_key_value():
    assert numbers_of({"attn": {"c_attn": dense(D, 3 * D)}})["attn/c_attn/kernel"] == FusedDimensionNumbers(
        0, 1, 3, 1
    )
    transposed = {"attn": {"c_attn": {"kernel": leaf(3 * D, D), "bias": leaf(3 * D)}}}  # Hugging Face's GPT-2
    assert numbers_of(transposed)["attn/c_attn/kernel"] == FusedDimensionNumbers(1, 0, 3, 0)
    four = {"qkv_proj": {"kernel": leaf(D, 3, H, S), "bias": leaf(3, H, S)}}
    assert numbers_of(four)["qkv_proj/kernel"] == MuonDimensionNumbers(0, (2, 3))
    assert matrices(four, attention="heads") == {"qkv_proj/kernel": (3 * H, D, S)}
    stacked = {"qkv": {"kernel": leaf(5, D, 3 * D), "bias": leaf(5, 3 * D)}, "norm": {"scale": leaf(5, D)}}
    assert numbers_of(stacked)["qkv/kernel"] == FusedDimensionNumbers(1, 2, 3, 2)
    assert matrices(stacked) == {"qkv/kernel": (15, D, D)}
    assert matrices({"kv_proj": dense(D, 16), "gate_up_proj": dense(D, 2 * MLP)}) == {
        "kv_proj/kernel": (2, D, 8),
        "gate_up_proj/kernel": (2, D, MLP),
    }


def test_experts():
    params = {"moe": {"router": dense(D, 5, bias=False), "experts": {"wi": {"kernel": leaf(5, D, MLP)}}}}
    params["moe"]["experts"]["wi"]["bias"] = leaf(5, MLP)
    params["norm"] = {"scale": leaf(D)}
    assert matrices(params) == {"moe/experts/wi/kernel": (5, D, MLP), "moe/router/kernel": (1, D, 5)}
    assert {r.path: r.why for r in routes(params)[0]}["moe/router/kernel"] == "router"
    stacked = {
        "layers": jax.tree.map(lambda x: leaf(6, *x.shape), params | {"query": {"kernel": leaf(D, H, S)}})
    }
    assert matrices(stacked)["layers/moe/experts/wi/kernel"] == (30, D, MLP)
    assert matrices(stacked)["layers/query/kernel"] == (6, D, D)
    maxtext = {
        "MoeBlock_0": {
            "gate": dense(D, 6, 5, bias=False),
            "wi_0": leaf(5, 6, D, MLP),
            "wo": leaf(5, 6, MLP, D),
        }
    }
    maxtext["norm"] = {"scale": leaf(D, 6)}  # scanned at axis 1, below the experts
    assert numbers_of(maxtext)["MoeBlock_0/wo"] == MuonDimensionNumbers(2, 3)
    assert matrices(maxtext)["MoeBlock_0/gate/kernel"] == (6, D, 5)
    assert matrices({"mlp": {"wi": leaf(5, D, MLP), "wo": leaf(5, MLP, D)}}) == {
        "mlp/wi": (5, D, MLP),
        "mlp/wo": (5, MLP, D),
    }


def test_gemma_names():
    attn = {"q_einsum": {"w": leaf(H, D, S)}, "kv_einsum": {"w": leaf(2, 2, D, S)}}
    attn |= {"attn_vec_einsum": {"w": leaf(H, S, D)}, "_query_norm": {"scale": leaf(S)}}
    params = {"layer_0": {"attn": attn, "mlp": {"gating_einsum": leaf(2, D, MLP), "linear": leaf(MLP, D)}}}
    params["embedder"] = {"input_embedding": leaf(VOCAB, D)}
    numbers = {path.removeprefix("layer_0/"): n for path, n in numbers_of(params).items() if n}
    assert numbers == {
        "attn/q_einsum/w": MuonDimensionNumbers(1, (0, 2)),
        "attn/kv_einsum/w": MuonDimensionNumbers(2, (1, 3)),
        "attn/attn_vec_einsum/w": MuonDimensionNumbers((0, 1), 2),
        "mlp/gating_einsum": MuonDimensionNumbers(1, 2),
        "mlp/linear": MuonDimensionNumbers(0, 1),
    }
    assert matrices(params, attention="heads")["layer_0/attn/kv_einsum/w"] == (4, D, S)
    scanned = jax.tree.map(lambda x: leaf(7, *x.shape), params["layer_0"])
    assert matrices(scanned)["attn/q_einsum/w"] == (7, D, D)


def test_names_of_other_libraries():
    """Hugging Face, T5X, nanoGPT, BERT and MLA."""
    llama = {k: dense(D, D, bias=False) for k in ("q_proj", "k_proj", "v_proj", "o_proj")}
    llama = {
        "embed_tokens": {"embedding": leaf(VOCAB, D)},
        "self_attn": llama,
        "lm_head": dense(D, VOCAB, bias=False),
    }
    assert matrices(llama) == {f"self_attn/{k}/kernel": (1, D, D) for k in llama["self_attn"]}
    t5x = {k: {"kernel": leaf(D, 6, D)} for k in ("query", "key", "value", "out")}
    t5x = {"attention": t5x, "mlp": {"wo": {"kernel": leaf(MLP, 6, D)}}, "norm": {"scale": leaf(D, 6)}}
    assert matrices(t5x)["attention/out/kernel"] == (6, D, D)
    assert matrices(t5x)["mlp/wo/kernel"] == (6, MLP, D)
    last = {k: {"kernel": leaf(D, D, 6)} for k in ("q_proj", "k_proj", "v_proj", "o_proj")}
    last = {"attention": last, "up_proj": {"kernel": leaf(D, MLP, 6)}, "norm": {"scale": leaf(D, 6)}}
    assert numbers_of(last)["attention/o_proj/kernel"] == MuonDimensionNumbers(0, 1)
    gpt = {"wte": {"embedding": leaf(VOCAB, D)}, "wpe": {"embedding": leaf(4 * D, D)}}
    gpt["h"] = {"0": {"mlp": {"c_fc": dense(D, 4 * D), "c_proj": dense(4 * D, D)}}}
    assert set(matrices(gpt)) == {"h/0/mlp/c_fc/kernel", "h/0/mlp/c_proj/kernel"}
    bert = {
        "embeddings": {"word_embeddings": {"embedding": leaf(VOCAB, D)}},
        "pooler": {"dense": dense(D, D)},
    }
    bert["cls"] = {"predictions": {"transform": {"dense": dense(D, D)}, "decoder": dense(D, VOCAB)}}
    assert set(matrices(bert)) == {"cls/predictions/transform/dense/kernel", "pooler/dense/kernel"}
    mla = {
        "wq_a": leaf(6, D, 24),
        "wq_b": leaf(6, 24, H, 20),
        "wkv_b": leaf(6, 16, H, 28),
        "out": leaf(6, H, S, D),
    }
    mla = {"mla": {name: {"kernel": shape} for name, shape in mla.items()}, "norm": {"scale": leaf(6, D)}}
    assert matrices(mla)["mla/wkv_b/kernel"] == (6, 16, H * 28)
    assert matrices(mla)["mla/out/kernel"] == (6, D, D)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("query/bias", (H, S)),
        ("layers/query/bias", (6, H, S)),
        ("norm/scale", (6, D)),
        ("input_layernorm/weight", (6, D)),
        ("Embed_0/embedding", (VOCAB, D)),
        ("embed_tokens/weight", (VOCAB, D)),
        ("wpe", (128, D)),
        ("pos_embedding", (1, 128, D)),
        ("relative_attention_bias/embedding", (32, H)),
        ("rel_pos_bias_table", (49, H)),
        ("cls_token", (1, 4, D)),
        ("mask_token", (1, D)),
        ("lm_head/kernel", (D, VOCAB)),
        ("lm_head", (D, VOCAB)),
        ("logits_dense/kernel", (D, VOCAB)),
        ("heads/0/kernel", (D, VOCAB)),
        ("classifier/kernel", (D, 10)),
        ("mixer/A_log", (128, 16)),
        ("mixer/D", (4, 16)),
        ("time_decay", (4, 16)),
        ("dwconv/kernel", (7, 7, 1, D)),
        ("conv1d/kernel", (4, 1, D)),
        ("dense/kernel", (D, 1)),
        ("dense/kernel", (1, D)),
        ("lora_magnitude", (6, D)),
        ("temperature", ()),
        ("patch_embed/kernel", (D, MLP)),
        ("anything", (D,)),
    ],
)
def test_never_to_muon(path, shape):
    tree = leaf(*shape)
    for name in reversed(path.split("/")):
        tree = {name: tree}
    assert matrices(tree) == {}


@pytest.mark.parametrize(
    "path",
    [
        "a/w",
        "strange/kernel",
        "foo",
        "a",
        "attn/wq",
        "wo",
        "w1a",
        "w2b",
        "hada_w1_a",
        "q_proj/lora_a",
        "x_lora/a",
        "x_lora/b",
        "adaln/norm1_linear/kernel",
        "MultiHead_0/wq",
        "lm_head/dense/kernel",
        "dt_proj/kernel",
        "gate/kernel",
    ],
)
def test_unknown_matrices_go_to_muon(path):
    tree = leaf(D, MLP)
    for name in reversed(path.split("/")):
        tree = {name: tree}
    assert list(matrices(tree).values()) == [(1, D, MLP)]


def test_adapters_in_a_stack():
    """One attention kernel alone could be (d, heads, size): its adapters show that it is a stack."""
    q = {"kernel": leaf(3, D, D), "lora_a": leaf(3, D, 2), "lora_b": leaf(3, 2, D)}
    assert matrices({"q_proj": q}) == {
        "q_proj/kernel": (3, D, D),
        "q_proj/lora_a": (3, D, 2),
        "q_proj/lora_b": (3, 2, D),
    }


def test_vocabulary_only_beside_the_embedding():
    """A byte model's (64, 256) may be a head or a feed-forward layer: the place decides."""
    params = {
        "Embed_0": {"embedding": leaf(256, 64)},
        "Dense_0": dense(64, 256),
        "Block_0": {"Dense_0": dense(64, 256)},
    }
    assert set(matrices(params)) == {"Block_0/Dense_0/kernel"}
    square = {"Embed_0": {"embedding": leaf(64, 64)}, "Dense_0": dense(64, 64)}
    assert set(matrices(square)) == {"Dense_0/kernel"}
    positions = {"position_embed": {"embedding": leaf(256, 64)}, "Dense_0": dense(64, 256)}
    assert set(matrices(positions)) == {"Dense_0/kernel"}
    tied = {"Embed_0": {"embedding": leaf(256, 64)}, "Block_0": {"Dense_0": dense(64, 256)}}
    assert set(matrices(tied)) == {"Block_0/Dense_0/kernel"}


@pytest.mark.parametrize(("rows", "is_table"), [(VOCAB, True), (MLP, False), (D, False)])
def test_a_table_with_a_bias_has_the_models_vocabulary(rows, is_table):
    """It is the table of a tied head. As many rows as another leaf has are features, of what it embeds."""
    params = {
        "wte": {"weight": leaf(rows, D), "bias": leaf(rows)},
        "h": {"0": {"up": dense(D, MLP), "down": dense(MLP, D)}},
    }
    assert ("wte/weight" not in matrices(params)) == is_table


def test_trees_of_every_kind():
    """Frozen dicts, metadata boxes, tracers and masked nodes route alike and keep their structure."""
    plain = model_params(scan_axis=1)
    expected = numbers_of(plain)
    assert numbers_of(freeze(plain)) == expected
    boxed = jax.tree.map(lambda x: nn.LogicallyPartitioned(x, (None,) * len(x.shape)), plain)
    assert numbers_of(boxed) == expected
    result = dimension_numbers(boxed)
    assert result["layers"]["Dense_0"]["kernel"].value == MuonDimensionNumbers(0, 2)

    traced = []
    jax.eval_shape(lambda p: traced.append(numbers_of(p)), plain)
    assert traced == [expected]

    masked = {"a": optax.MaskedNode(), "dense": {"kernel": leaf(D, MLP)}}
    assert dimension_numbers(masked) == {
        "a": optax.MaskedNode(),
        "dense": {"kernel": MuonDimensionNumbers(0, 1)},
    }
    assert dimension_numbers(masked, rules=[("^a$", None)])["a"] == optax.MaskedNode()


def test_integers_are_left_alone():
    tree = {
        "dense": {"kernel": leaf(D, MLP, dtype="int8")},
        "other": {"kernel": leaf(D, MLP, dtype="complex64")},
    }
    assert set(matrices(tree)) == {"other/kernel"}
    assert matrices({"w": np.zeros((2, 3), jax.dtypes.float0)}) == {}
    with pytest.raises(TypeError, match=r"needs float .*'dense/kernel'.*int8"):
        dimension_numbers(tree, rules=[("dense/kernel", MuonDimensionNumbers(0, 1))])


def test_rules():
    """The first match decides; the expression is searched; the numbers count the leaf's own axes."""
    params = model_params(scan_axis=0)
    given = MuonDimensionNumbers(1, (2, 3))
    found = numbers_of(params, rules=[("Dense_0/kernel$", None), ("Dense", MuonDimensionNumbers(-2, -1))][:1])
    assert found["layers/Dense_0/kernel"] is None
    assert found["layers/Dense_1/kernel"] == MuonDimensionNumbers(1, 2)
    odd = {"mystery": {"kernel": leaf(2, 3, 4, 5)}}
    assert numbers_of(odd, rules=[("mystery", given), ("kernel", None)]) == {"mystery/kernel": given}


def test_a_rule_overrules_what_a_head_is():
    params = {"lm_head": dense(D, VOCAB)}
    assert matrices(params, rules=[("lm_head/kernel", MuonDimensionNumbers(0, 1))]) == {
        "lm_head/kernel": (1, D, VOCAB)
    }


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (
            ("no_such", None),
            ValueError,
            "'no_such' matches no leaf; paths look like cube/kernel, dense/kernel",
        ),
        (("dense", "muon"), TypeError, "'muon' for 'dense'"),
        (("dense", MuonDimensionNumbers(0, 2)), ValueError, "names axis 2, but the leaf 'dense/kernel'"),
        (("dense", MuonDimensionNumbers(0, -2)), ValueError, "'dense/kernel'.* twice"),
        (("vector", MuonDimensionNumbers(0, 1)), ValueError, "needs matrices, but the leaf 'vector'"),
        (("dense", FusedDimensionNumbers(0, 1, 3, 1)), ValueError, "`parts` must divide"),
        (("cube", FusedDimensionNumbers(0, 1, 2, 2)), ValueError, "`axis` must be one of"),
    ],
)
def test_bad_rules(rule, error, message):
    params = {"dense": {"kernel": leaf(D, MLP)}, "vector": leaf(D), "cube": {"kernel": leaf(4, 4, 4)}}
    rules = [rule, *([("cube", None)] if rule[0] != "cube" else [])]
    with pytest.raises(error, match=message):
        dimension_numbers(params, rules=rules)


@pytest.mark.parametrize(
    ("params", "settings", "message"),
    [
        (
            {"thing": {"kernel": leaf(3, 16, 32)}},
            {},
            r"'thing/kernel' \(matrix\) of shape \(3, 16, 32\).*rules=\[",
        ),
        ({"attn": {"query_key_value": dense(D, 3 * D)}}, {}, "interleaved"),
        ({"attn": {"c_attn": dense(D, 2 * D)}}, {}, "c_attn"),
        ({"q_proj": dense(D, D)}, {"attention": "heads"}, "q_proj.*heads are folded.*FusedDimensionNumbers"),
        ({"attn": {"c_attn": dense(D, 3 * D)}}, {"attention": "heads"}, "c_attn.*heads are folded"),
        (
            {"query": {"kernel": leaf(D, 2, 3, S)}, "norm": {"scale": leaf(D)}},
            {},
            r"query/kernel.*\(32, 2, 3, 8\)",
        ),
        ({"dense": dense(D, D)}, {"attention": "head"}, "'head'. is unknown; use 'whole' or 'heads'"),
    ],
)
def test_what_cannot_be_decided_raises(params, settings, message):
    with pytest.raises(ValueError, match=message):
        dimension_numbers(params, **settings)


def test_an_nnx_module_stands_for_its_parameters():
    heads = functools.partial(dimension_numbers, attention="heads", rules=[("up/kernel", None)])
    model = nnx_model()
    assert heads(model)["blocks"][0]["attention"]["query"]["kernel"] == MuonDimensionNumbers(0, 2)
    assert heads(nnx.as_pure(nnx.state(model, nnx.Param))) == heads(model)
