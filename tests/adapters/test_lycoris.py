"""LyCORIS's files: both ways, refused whole when a tensor is wrong, and the package's own ΔW."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from muonjax import linen as linen_loha
from muonjax import nnx as nnx_loha
from muonjax._adapters import lycoris as _lycoris
from muonjax._adapters.adapter import Adapter
from muonjax._adapters.config import Place
from muonjax._adapters.lycoris import from_tensors, problems_of, to_tensors

PLACES = {
    "dense": Place((6, 5), 1),
    "heads": Place((6, 2, 4), 1),
    "out": Place((2, 4, 6), 2),
    "conv": Place((3, 2, 6, 5), 3, 2),
    "conv1": Place((3, 6, 5), 2, 1),
}
RANK = 2


def tensors_of(place, tucker=False, decompose=False, seed=0):
    """One layer of a file, drawn at random."""
    rng = np.random.default_rng(seed)
    window, n = place.shape[: place.window], place.outputs
    m = int(np.prod(place.shape[: place.inputs]))
    if tucker:
        m //= int(np.prod(window))
        shapes = {"hada_w1_a": (RANK, n), "hada_w2_a": (RANK, n)}
        shapes |= dict.fromkeys(("hada_t1", "hada_t2"), (RANK, RANK, *window))
    else:
        shapes = {"hada_w1_a": (n, RANK), "hada_w2_a": (n, RANK)}
    shapes |= {"hada_w1_b": (RANK, m), "hada_w2_b": (RANK, m)}
    if decompose:
        shapes["dora_scale"] = (n, *[1] * (place.window + 1))
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return tensors | {"alpha": np.float32(3.0)}


def delta64(tensors, place):
    """LyCORIS's ΔW [out, in, *window] by its definition, turned into a Flax kernel."""
    t = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    window = place.shape[: place.window]
    sides = []
    for i in (1, 2):
        a, b = t[f"hada_w{i}_a"], t[f"hada_w{i}_b"]
        if "hada_t1" in t:
            sides.append(np.einsum("ij...,jr,ip->pr...", t[f"hada_t{i}"], b, a))
        else:
            sides.append((a @ b).reshape(place.outputs, -1, *window))
    delta = t["alpha"] / RANK * sides[0] * sides[1]
    return np.moveaxis(delta, (0, 1), (-1, -2)).reshape(place.shape)


CASES = [(name, tucker) for name, place in PLACES.items() for tucker in {False, place.window > 0}]


@pytest.mark.parametrize(("name", "tucker"), CASES)
def test_an_adapter_read_has_the_weight_that_lycoris_defines(name, tucker):
    tensors = tensors_of(PLACES[name], tucker)
    assert not problems_of(tensors, PLACES[name], "x")
    got = from_tensors(tensors, PLACES[name]).delta(PLACES[name].shape)
    np.testing.assert_allclose(got, delta64(tensors, PLACES[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "tucker"), CASES)
def test_what_was_read_is_written_back_bit_for_bit(name, tucker):
    tensors = tensors_of(PLACES[name], tucker, decompose=True)
    back = to_tensors(from_tensors(tensors, PLACES[name]), PLACES[name])
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(back[key], value, err_msg=key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("hada_w2_b"), "x.hada_w2_b is missing"),
        (lambda t: t.pop("hada_w1_b"), "x.hada_w1_b is missing"),
        (lambda t: t.pop("alpha"), "x.alpha is missing"),
        (lambda t: t.update(hada_t1=np.ones((2, 2))), "x.hada_t2 is missing"),
        (lambda t: t.update(lokr_w1=np.ones(1)), "'x.lokr_w1' is unknown"),
        (lambda t: t.update(alpha=np.uint8(1)), "x.alpha has dtype uint8"),
        (lambda t: t.update(hada_w1_a=np.ones((5, 2), np.int8)), "x.hada_w1_a has dtype int8"),
        (lambda t: t.update(hada_w1_a=np.ones((5, 2), np.int64)), "x.hada_w1_a has dtype int64"),
        (lambda t: t.update(hada_w2_b=np.ones((2, 6), bool)), "x.hada_w2_b has dtype bool"),
        (lambda t: t.update(hada_w1_a=np.ones((6, 2))), r"x.hada_w1_a has shape \(6, 2\).*needs \(5, 2\)"),
        (lambda t: t.update(hada_w2_b=np.ones((3, 6))), r"x.hada_w2_b has shape \(3, 6\).*needs \(2, 6\)"),
        (lambda t: t.update(hada_w1_b=np.ones((0, 6)), hada_w2_b=np.ones((0, 6))), r"shape \(0, 6\)"),
        (lambda t: t.update(hada_w1_b=np.float32(1.0)), r"x.hada_w1_b has shape \(\)"),
        (lambda t: t.update(dora_scale=np.ones((1, 6))), r"x.dora_scale has shape \(1, 6\).*needs \(5, 1\)"),
    ],
)
def test_wrong_tensors_are_named(change, message):
    tensors = tensors_of(PLACES["dense"])
    change(tensors)
    assert re.search(message, "; ".join(problems_of(tensors, PLACES["dense"], "x")))


def test_an_integer_alpha_of_pytorch_is_read():
    tensors = tensors_of(PLACES["dense"]) | {"alpha": np.int64(4)}
    assert not problems_of(tensors, PLACES["dense"], "x")
    assert from_tensors(tensors, PLACES["dense"]).scale == 2.0


def test_rank_stabilized_scales_survive():
    adapter = Adapter(
        tuple(jnp.ones(s) for s in [(6, 4), (4, 5)] * 2),
        scale=8.0 / 4**0.5,
    )
    tensors = to_tensors(adapter, PLACES["dense"])
    assert tensors["alpha"] / 4 == 4.0
    assert from_tensors(tensors, PLACES["dense"]).scale == 4.0


def test_stacked_adapters_are_refused():
    stack = Adapter(tuple(jnp.ones(s) for s in [(3, 6, 2), (3, 2, 5)] * 2))
    with pytest.raises(ValueError, match="stacked"):
        to_tensors(stack, PLACES["dense"])


# Files


class Model(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.conv = nnx.Conv(8, 4, (3,), rngs=rngs)

    def __call__(self, x):
        return self.conv(self.attention(x))


X = jax.random.normal(jax.random.key(0), (2, 5, 8))


def disturbed(model):
    for i, adapter in enumerate(nnx_loha.adapters(model).values()):
        shape = adapter.hada_w2_b.shape
        adapter.hada_w2_b[...] = jax.random.normal(jax.random.key(i), shape)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(("decompose", "tucker"), [(False, False), (True, False), (False, True)])
def test_nnx_files_give_the_same_model_again(tmp_path, decompose, tucker):
    pytest.importorskip("safetensors")
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    rules = {"rank": 2, "alpha": 5.0, "decompose": decompose, "tucker": tucker}
    nnx_loha.add_loha(model, "query|out|conv", rngs=nnx.Rngs(1), **rules)
    disturbed(model)
    nnx_loha.save_lycoris(model, tmp_path / "a.safetensors")
    loaded = nnx_loha.load_lycoris(other, tmp_path / "a.safetensors")
    assert sorted(loaded) == ["attention/out", "attention/query", "conv"]
    np.testing.assert_array_equal(other(X), model(X))


def test_a_bad_file_is_refused_whole(tmp_path):
    flax = pytest.importorskip("safetensors.flax")
    model = Model(nnx.Rngs(0))
    nnx_loha.add_loha(model, "query|out", rank=2, rngs=nnx.Rngs(1))
    file = tmp_path / "a.safetensors"
    nnx_loha.save_lycoris(model, file)
    tensors = flax.load_file(file)
    del tensors["lycoris_attention_query.hada_w1_a"]
    tensors["lycoris_attention_out.hada_w2_b"] = jnp.ones((2, 9))
    tensors["lora_te_1.hada_w1_a"] = jnp.ones((2, 9))
    flax.save_file(tensors, tmp_path / "bad.safetensors")
    fresh = Model(nnx.Rngs(0))
    with pytest.raises(ValueError, match="was not loaded") as error:
        nnx_loha.load_lycoris(fresh, tmp_path / "bad.safetensors")
    for part in ("query.hada_w1_a is missing", "out.hada_w2_b has shape (2, 9)", "'lora_te_1'"):
        assert part in str(error.value)
    assert not nnx_loha.adapters(fresh)
    nnx_loha.merge(model)
    with pytest.raises(ValueError, match="merged adapter"):
        nnx_loha.load_lycoris(model, file)


# Files from anywhere: the header is written by hand, for the package writes no false one.

ADAPTED = {"up": PLACES["dense"]}


def file_of(tmp_path, header, body=b"", length=None):
    """A safetensors file with this header, a string or a dict."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return file


def entry(dtype="F32", shape=(2, 5), offsets=(0, 40)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


NAME = "lycoris_up.hada_w1_a"
BY_THE_PACKAGE = "while deserializing header"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({NAME: entry(offsets=(0, 10**12))}, BY_THE_PACKAGE),
        ({NAME: entry(offsets=(30, 20))}, BY_THE_PACKAGE),
        ({NAME: entry(shape=(2**62, 2))}, BY_THE_PACKAGE),
        ({NAME: entry(shape=(2**63,))}, BY_THE_PACKAGE),
        ({NAME: entry(shape=(-2, 5))}, BY_THE_PACKAGE),
        ({NAME: entry(shape=(1.5, 5))}, BY_THE_PACKAGE),
        (
            {NAME: entry(shape=(10, *[1] * 1000))},
            r"hada_w1_a has shape \(10, 1, ",
        ),
        ({NAME: entry(offsets=(0, 40, 80))}, BY_THE_PACKAGE),
        ({NAME: {"dtype": "F32"}}, BY_THE_PACKAGE),
        ({NAME: 3}, BY_THE_PACKAGE),
        ({NAME: entry("Q7")}, BY_THE_PACKAGE),
        ({NAME: entry("U8", (5, 8))}, "hada_w1_a has dtype U8; it must be floating point"),
        ({NAME: entry("float32")}, BY_THE_PACKAGE),
        ({"x" * 10**6: entry()}, r"no layer of the model is called ''"),
        ({"x" * 10**6 + ".alpha": entry()}, r"no layer of the model is called 'x{100,200}"),
        ("[" * 100_000, BY_THE_PACKAGE),
        ("[1]", BY_THE_PACKAGE),
        ("{", BY_THE_PACKAGE),
        ({}, "it holds no tensor|" + BY_THE_PACKAGE),
    ],
)
def test_a_false_header_is_refused_before_any_tensor_is_read(tmp_path, monkeypatch, header, message):
    package = pytest.importorskip("safetensors")
    opened = package.safe_open

    class Closed:
        """The file, of which no tensor can be read."""

        def __init__(self, *args, **settings):
            self.file = opened(*args, **settings)

        def __enter__(self):
            self.keys, self.get_slice = self.file.keys, self.file.get_slice
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(package, "safe_open", Closed)
    with pytest.raises(ValueError, match=message) as error:
        _lycoris.read(file_of(tmp_path, header, bytes(40)), ADAPTED)
    assert "x.safetensors was not loaded" in str(error.value)
    assert len(str(error.value)) < 2500


@pytest.mark.parametrize("length", [0, 41, 2**40, 2**64 - 1])
def test_a_false_length_of_the_header_is_refused(tmp_path, length):
    pytest.importorskip("safetensors")
    with pytest.raises(ValueError, match=f"x.safetensors was not loaded: .*{BY_THE_PACKAGE}"):
        _lycoris.read(file_of(tmp_path, {}, bytes(38), length), ADAPTED)
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match=f"short.safetensors was not loaded: .*{BY_THE_PACKAGE}"):
        _lycoris.read(tmp_path / "short.safetensors", ADAPTED)


def work(call):
    """The number of Python and C functions that a call enters."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", ["lycoris_up.x{}", "y{}.x", "z{}"])
def test_many_unknown_tensors_cost_linear_work_and_a_short_message(tmp_path, name):
    pytest.importorskip("safetensors")
    messages = []

    def refuse(count):
        header = {name.format(i): entry(shape=(0,), offsets=(0, 0)) for i in range(count)}
        file = file_of(tmp_path, header)

        def call():
            with pytest.raises(ValueError, match=r"was not loaded") as error:
                _lycoris.read(file, ADAPTED)
            messages.append(str(error.value))

        return work(call)

    few, many = refuse(1000), refuse(10_000)
    assert many < 11 * few
    assert max(map(len, messages)) < 2000


@pytest.mark.nan
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("name", ["hada_w1_a", "hada_w2_b", "alpha"])
def test_a_tensor_that_is_not_finite_in_float32_is_refused(tmp_path, name, bad):
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = {f"lycoris_up.{key}": np.asarray(v) for key, v in tensors_of(PLACES["dense"]).items()}
    tensors[f"lycoris_up.{name}"] = np.array(tensors[f"lycoris_up.{name}"], np.float64)
    numpy.save_file(tensors, tmp_path / "x.safetensors")
    _lycoris.read(tmp_path / "x.safetensors", ADAPTED)
    tensors[f"lycoris_up.{name}"][...] = bad
    numpy.save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=f"lycoris_up.{name} is not finite"):
        _lycoris.read(tmp_path / "x.safetensors", ADAPTED)


def test_writing_needs_an_adapter_and_names_that_differ(tmp_path):
    model = Model(nnx.Rngs(0))
    with pytest.raises(ValueError, match="no LoHa adapter"):
        nnx_loha.save_lycoris(model, tmp_path / "a.safetensors")
    nnx_loha.add_loha(model, "query|out", rank=2, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="both called 'x'"):
        nnx_loha.save_lycoris(model, tmp_path / "a.safetensors", name_of=lambda path: "x")


def test_linen_files_give_the_same_parameters_again(tmp_path):
    pytest.importorskip("safetensors")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.MultiHeadAttention(num_heads=2, qkv_dot_general_cls=linen_loha.loha(2, alpha=5.0))(x)
            return linen_loha.LoHaConv(4, (3,), rank=3, decompose=True)(x)

    params = Network().init(jax.random.key(0), X)["params"]
    adapters, frozen = linen_loha.split_adapters(params)
    params = linen_loha.join_adapters(jax.tree.map(lambda v: v + 0.3, adapters), frozen)
    linen_loha.save_lycoris(params, tmp_path / "a.safetensors")
    other = linen_loha.join_adapters(adapters, frozen)
    other = linen_loha.load_lycoris(other, tmp_path / "a.safetensors")
    assert jax.tree.structure(other) == jax.tree.structure(params)
    for one, two in zip(jax.tree.leaves(other), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, two)


def test_names_with_a_slash_stay_apart(tmp_path):
    pytest.importorskip("safetensors")
    dense = [linen_loha.LoHaDense(6, rank=2).init(jax.random.key(i), X)["params"] for i in range(2)]
    params = {"a/b": dense[0], "a": {"b": dense[1]}}
    file = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="both called"):  # "a_b", by LyCORIS's rule
        linen_loha.save_lycoris({"a_b": dense[0], "a": {"b": dense[1]}}, file)
    linen_loha.save_lycoris(params, file, name_of=repr)
    loaded = linen_loha.load_lycoris(params, file, name_of=repr)
    for one, two in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_linen_model_of_another_kind_than_the_file_is_refused(tmp_path):
    pytest.importorskip("safetensors")

    def params(**settings):
        return linen_loha.LoHaDense(6, **settings).init(jax.random.key(0), X)["params"]

    def dense(params):
        return {"dense": params}

    linen_loha.save_lycoris(dense(params(rank=3, decompose=True)), tmp_path / "a.safetensors")
    message = (
        "dense is rank=3, tucker=False, decompose=True in the file, rank=2, tucker=False, decompose=False"
    )
    with pytest.raises(ValueError, match=message):
        linen_loha.load_lycoris(dense(params(rank=2)), tmp_path / "a.safetensors")


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(_lycoris.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install safetensors"):
        _lycoris.read("x.safetensors", {})


# The package itself


@pytest.mark.interop
@pytest.mark.parametrize("alpha", [1.0, 3.0])
@pytest.mark.parametrize(
    "settings", [{}, {"weight_decompose": True}, {"use_tucker": True}, {"rs_lora": True}]
)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_lycoris_lora_makes_the_same_weight(kind, settings, alpha):
    torch = pytest.importorskip("torch")
    loha = pytest.importorskip("lycoris.modules.loha")
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 5) if kind == "linear" else torch.nn.Conv2d(6, 5, (3, 2))
    module = loha.LohaModule("x", layer, lora_dim=2, alpha=alpha, **settings)
    with torch.no_grad():
        module.hada_w2_a.normal_()
    place = PLACES["dense" if kind == "linear" else "conv"]
    tensors = {name: value.detach().numpy() for name, value in module.custom_state_dict().items()}
    assert not problems_of(tensors, place, "x")
    adapter = from_tensors(tensors, place)

    def kernel(weight):  # [out, in, *window] -> [*window, in, out]
        return np.moveaxis(weight.detach().numpy(), (0, 1), (-1, -2))

    # get_weight, not get_diff_weight: that one of LyCORIS 4.1.3 applies the scale twice.
    want = kernel(module.get_weight(module.shape))
    assert np.abs(adapter.delta(place.shape) - want).max() <= 1e-6 * np.abs(want).max()

    x = torch.randn(3, 6, *([] if kind == "linear" else [8, 8]))
    base = jnp.asarray(kernel(layer.weight))
    merged, _ = adapter.merge(base)
    x_here = jnp.asarray(np.moveaxis(x.numpy(), 1, -1))
    if kind == "linear":
        got = x_here @ merged
    else:
        got = jax.lax.conv_general_dilated(
            x_here, merged, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    want = np.moveaxis(module(x).detach().numpy(), 1, -1) - layer.bias.detach().numpy()
    np.testing.assert_allclose(got, want, atol=2e-5)

    # And back: what we write, the package reads.
    written = {name: torch.tensor(value) for name, value in to_tensors(adapter, place).items()}
    order = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "alpha", "dora_scale")
    with torch.no_grad():
        again = loha.LohaModule.make_module_from_state_dict("x", layer, *(written.get(n) for n in order))
        np.testing.assert_allclose(
            again.get_weight(again.shape).numpy(), module.get_weight(module.shape).numpy(), rtol=1e-6
        )
