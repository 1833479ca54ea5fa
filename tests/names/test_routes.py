"""Forms of trees, rules, and what is open; the kinds of layers are in trees/layouts.txt."""

import dataclasses
import re
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

import muonjax
from muonjax._matrices.matrix_view import FusedDimensionNumbers
from muonjax._names.routes import dimension_numbers, routes
from tests.tools.views import leaf

D, H, S, MLP, VOCAB = 32, 4, 8, 80, 100  # no two equal, and H·S = D


def numbers_of(params, **settings):
    found = routes(params, **settings)
    return {path: answer.numbers for path, answer in found.items()}


def matrices(params, **settings):
    """The paths of the leaves that go to Muon."""
    return {path for path, numbers in numbers_of(params, **settings).items() if numbers}


def test_the_gates_of_a_recurrent_cell_are_for_a_program():
    model = nnx.Dict(
        cell=nnx.GRUCell(16, 24, rngs=nnx.Rngs(0)),
        head=nnx.Linear(24, 5, rngs=nnx.Rngs(0)),
    )
    graph, params = nnx.split(model)

    def loss(params, x):
        model = nnx.merge(graph, params)
        carry, _ = model["cell"](jnp.zeros((2, 24)), x)
        return jnp.sum(model["head"](model["cell"](carry, x)[0]))

    with pytest.warns(
        UserWarning,
        match=r"'cell/dense_h/kernel' \(24, 72\): gates of a recurrent cell.*muonjax\.inspect",
    ):
        assert (
            dimension_numbers(params)["cell"]["dense_h"]["kernel"].get_value() is None
        )
    for kernel in ("weight_hh", "weight_hh_l0"):  # Equinox's and PyTorch's
        with pytest.warns(
            UserWarning,
            match=rf"'cell/{kernel}' \(192, 64\): gates of a recurrent cell",
        ):
            dimension_numbers(
                {"cell": {kernel: leaf(192, 64)}, "head": {"weight": leaf(10, 64)}}
            )
    program = muonjax.inspect(loss, params, jnp.ones((2, 16)))
    assert program.decision("cell/dense_h/kernel").numbers == FusedDimensionNumbers(
        0, 1, 3, 1
    )


def test_trees_of_every_kind():
    """Frozen dicts, metadata boxes, tracers and masked nodes are read as plain trees and keep their structure."""
    plain = {
        "up": {"kernel": leaf(D, MLP), "bias": leaf(MLP)},
        "down": {"kernel": leaf(MLP, D)},
    }
    expected = numbers_of(plain)
    assert numbers_of(freeze(plain)) == expected
    boxed = jax.tree.map(
        lambda x: nn.LogicallyPartitioned(x, (None,) * len(x.shape)), plain
    )
    assert numbers_of(boxed) == expected
    kernel = dimension_numbers(boxed)["up"]["kernel"]
    assert kernel.value == MuonDimensionNumbers(0, 1)
    traced = []
    jax.eval_shape(lambda p: traced.append(numbers_of(p)), plain)
    assert traced == [expected]
    masked = {"a": optax.MaskedNode(), "dense": {"kernel": leaf(D, MLP)}}
    assert dimension_numbers(masked, rules=[("^a$", None)]) == {
        "a": optax.MaskedNode(),
        "dense": {"kernel": MuonDimensionNumbers(0, 1)},
    }


def test_integers_are_left_alone():
    tree = {
        "dense": {"kernel": leaf(D, MLP, dtype="int8")},
        "other": {"kernel": leaf(D, MLP, dtype="complex64")},
    }
    assert matrices(tree) == {"other/kernel"}
    assert matrices({"w": np.zeros((2, 3), jax.dtypes.float0)}) == set()
    with pytest.raises(TypeError, match=r"needs float .*'dense/kernel'.*int8"):
        dimension_numbers(tree, rules=[("dense/kernel", MuonDimensionNumbers(0, 1))])


# Rules


@pytest.mark.parametrize("shape", [(1280, 3, 2, 16, 16), (768, 3, 1, 14, 14)])
def test_patches_of_a_video_in_the_order_of_pytorch(shape):
    """The window begins with frames; its side is that of height and width."""
    params = {"patch_embed": {"conv": {"weight": leaf(*shape)}}}
    assert routes(params)["patch_embed/conv/weight"].why == "patch embedding"


def test_rules():
    """The first match decides; the expression is searched; the numbers count the leaf's own axes; a head too."""
    given = MuonDimensionNumbers(1, (2, 3))
    tree = {
        "mystery": {"kernel": leaf(2, 3, 4, 5)},
        "lm_head": {"kernel": leaf(D, VOCAB)},
    }
    rules = [
        ("mystery", given),
        ("lm_head", MuonDimensionNumbers(0, 1)),
        ("kernel", None),
    ]
    assert numbers_of(tree, rules=rules) == {
        "mystery/kernel": given,
        "lm_head/kernel": MuonDimensionNumbers(0, 1),
    }
    assert {answer.why for answer in routes(tree, rules=rules).values()} == {"rule"}
    ambiguous = {"odd": {"kernel": leaf(4, 4, 4)}, "norm": {"scale": leaf(4, 4)}}
    assert numbers_of(ambiguous, rules=[("odd", None)]) == {
        "odd/kernel": None,
        "norm/scale": None,
    }


@pytest.mark.parametrize(("rule", "error", "message"), [
    (("no_such", None), ValueError, "'no_such' matches no leaf; paths look like cube/kernel, dense/kernel"),
    (("(", None), ValueError, r"dimension_numbers\(rules='\('\) is no regular expression"),
    ("dense", TypeError, "'dense'; give pairs"),
    (("dense", "muon"), TypeError, r"\(rules=...\): dimension numbers hold 'muon'"),
    (("dense", MuonDimensionNumbers(0, 2)), ValueError, "names axis 2, but the leaf 'dense/kernel'"),
    (("dense", FusedDimensionNumbers(0, 1, (16, 4), 1)), ValueError, r"leaf 'dense/kernel'.*fill its 80 entries"),
])  # fmt: skip
def test_bad_rules(rule, error, message):
    params = {"dense": {"kernel": leaf(D, MLP)}, "cube": {"kernel": leaf(4, 4, 4)}}
    rules = [rule, ("cube", None)]
    with pytest.raises(error, match=message):
        dimension_numbers(params, rules=rules)


# What is open


@pytest.mark.parametrize(("params", "message"), [
    ({"thing": {"kernel": leaf(3, 16, 32)}}, r"'thing/kernel' \(3, 16, 32\): matrix, axes unknown"),
    ({"attn": {"query_key_value": {"kernel": leaf(D, 3 * D)}}}, "interleaved by head, axes unknown.*muonjax.inspect"),
])  # fmt: skip
def test_what_nothing_tells_goes_to_adam_with_a_warning(params, message):
    with pytest.warns(UserWarning, match=message):
        assert jax.tree.leaves(dimension_numbers(params)) == []


class NnxZoo(nnx.Module):
    """Layers with settings that names do not show."""

    def __init__(self, rngs):
        self.first = nnx.Einsum("btd,hde->bthe", (H, D, S), (H, S), rngs=rngs)
        self.mixer = nnx.Conv(16, 16, (3, 3), feature_group_count=16, rngs=rngs)
        self.doubler = nnx.Conv(16, 32, (3, 3), feature_group_count=16, rngs=rngs)
        self.gate = nnx.Einsum("bde,de->bde", (D, S), rngs=rngs)


def test_settings_that_names_do_not_show_are_warned_about():
    """Groups and an einsum's letters, in NNX and Equinox: the layers say that there are some, names do not."""
    zoo = nnx.eval_shape(lambda: NnxZoo(nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="'first/kernel'"):
        dimension_numbers(zoo)
    plain = nnx.Dict(
        up=nnx.Linear(D, MLP, rngs=nnx.Rngs(0)),
        down=nnx.Linear(MLP, D, rngs=nnx.Rngs(0)),
    )
    for name in ("mixer", "doubler", "gate"):
        model = nnx.Dict(**{name: getattr(zoo, name)}, **plain)
        with pytest.warns(
            UserWarning,
            match=rf"to Adam: '{name}/kernel'.*groups, an einsum.*muonjax\.inspect",
        ):
            assert dimension_numbers(model)[name].kernel is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dimension_numbers(model, rules=[(name, None)])
    eqx = pytest.importorskip("equinox")
    model = eqx.filter_eval_shape(
        lambda: eqx.nn.Conv2d(16, 32, 3, groups=4, key=jax.random.key(0))
    )
    with pytest.warns(UserWarning, match=r"to Adam: '0/weight'.*groups, an einsum"):
        dimension_numbers([eqx.filter(model, lambda x: hasattr(x, "dtype"))])


def suggested_rules(message):
    """The rules of a warning, as a person pastes them."""
    return eval(re.search(r"rules=(\[.*?\])\)", message)[1])


def test_ends_of_a_model_are_warned_about_once_in_one_line():
    sizes = [(784, 64), (64, 64), (64, 10)]
    params = {f"Dense_{i}": {"kernel": leaf(*shape)} for i, shape in enumerate(sizes)}
    params |= {"nodes": leaf(40, 16), "mix": {"kernel": leaf(16, 784)}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (dimension_numbers, muonjax.tabulate, dimension_numbers):
            call(params)
    (text,) = (str(warning.message) for warning in caught)
    assert text.startswith(
        "muonjax can't tell by names alone what these leaves are, and gives them to Adam: 'Dense_2/kernel' (64, 10): "
        "output head: the last of its kind, no other parameter takes its output; 'nodes' (40, 16): no other parameter "
    )
    assert "program = muonjax.inspect(loss_fn, params, batch)" in text
    assert "\n" not in text
    rules = suggested_rules(text)
    assert rules == [(r"^Dense_2/kernel$", None)]
    given = [(pattern, MuonDimensionNumbers(0, 1)) for pattern, _ in rules]
    assert "Dense_2/kernel" in matrices(params, rules=given)


@pytest.mark.parametrize(("others", "is_silent"), [
    ({}, False),
    ({"bias": leaf(4, 16), "ln": {"scale": leaf(6, 16)}}, False),
    ({"lm_head": {"kernel": leaf(16, 50)}}, True),
    ({"embed": {"embedding": leaf(50, 16)}}, True),
])  # fmt: skip
def test_a_model_without_a_named_end_is_warned_about(others, is_silent):
    """Two layers that feed each other may be a whole model, whose ends belong to AdamW."""
    params = {"a": {"kernel": leaf(16, 32)}, "b": {"kernel": leaf(32, 16)}} | others
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert matrices(params) == {"a/kernel", "b/kernel"}
        # A rule decides, and one matrix has nothing before or after it.
        dimension_numbers(params, rules=[("^a", None)])
        dimension_numbers({"a": params["a"]})
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (not is_silent)
    for text in texts:
        assert "all 2 matrices, 'a/kernel' (16, 32) and 'b/kernel' (32, 16) too" in text
        assert "muonjax.inspect(loss_fn, params, batch)" in text


def test_what_a_program_does_not_follow_is_never_given_to_muon_without_its_reason():
    """The answers are those of names; a leaf that the program decided, by a rule, is not warned about."""
    reason = "custom_vmap_call is not followed: model.py:12"
    params = {
        "up": {"kernel": leaf(32, 80)},
        "down": {"kernel": leaf(80, 32)},
        "odd": {"kernel": leaf(3, 4, 5)},
        "mid": {"scale": leaf(4, 4, 4), "bias": leaf(4)},
    }
    decided = [("^down", MuonDimensionNumbers(0, 1))]
    with pytest.warns(UserWarning, match="names") as caught:
        found = numbers_of(
            params,
            rules=decided,
            reasons=dict.fromkeys(
                ["up/kernel", "odd/kernel", "mid/scale", "mid/bias"], reason
            ),
        )
    (text,) = (str(warning.message) for warning in caught)
    assert f"'up/kernel' (32, 80), Muon: {reason}; by its name dense" in text
    assert f"'odd/kernel' (3, 4, 5), Adam: {reason}; by its name matrix, axes" in text
    assert f"'mid/scale' (4, 4, 4), Adam: {reason}; by its name " in text
    assert "mid/bias" not in text  # a vector is Adam's in any case
    assert "muonjax.inspect(" not in text  # that was done
    assert "muonjax.tabulate(params, program)" in text
    assert found == numbers_of(params, rules=[*decided, ("odd", None)])


def test_muon_without_matrices_says_so():
    with pytest.warns(UserWarning, match="none of the parameters is a matrix"):
        muonjax.muon(1e-3).init({"scale": jnp.ones(4)})


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


def test_axes_with_names_are_for_a_program():
    weight = Named(leaf(96, D), (Axis("mlp", 96), Axis("embed", D)))
    params = {name: {"weight": weight} for name in ("up_proj", "down_proj")}
    with pytest.warns(
        UserWarning, match=r"names of axes, axes unknown.*muonjax\.inspect"
    ):
        assert jax.tree.leaves(dimension_numbers(params)) == []

    def loss(params, x):
        return (
            jnp.tanh(x @ params["up_proj"]["weight"].array.T)
            @ params["down_proj"]["weight"].array
        ).sum()

    tx = muonjax.muon(1e-3, muonjax.inspect(loss, params, leaf(4, D)))
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert updates["up_proj"]["weight"].axes == weight.axes


# Unequal parts


def test_unequal_parts_are_matrices_of_their_own():
    """Each part is orthogonalized and scaled as if it were a leaf."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((3, 16, 24)), "float32")
    numbers = FusedDimensionNumbers(1, 2, parts=(16, 4, 4), axis=2)

    def update(numbers, w):
        tx = optax.chain(
            muonjax.orthogonalize(dimension_numbers=numbers),
            muonjax.match_rms(dimension_numbers=numbers),
        )
        return jax.jit(tx.update)(w, tx.init(w))[0]

    parts = [
        update(MuonDimensionNumbers(1, 2), p) for p in jnp.split(w, (16, 20), axis=2)
    ]
    np.testing.assert_allclose(
        update(numbers, w), jnp.concatenate(parts, axis=2), rtol=1e-5, atol=1e-6
    )
    given = {"w": FusedDimensionNumbers(0, 1, (16, 4, 4), 1), "none": None}
    assert "8×16 + 2 of 8×4" in muonjax.tabulate(
        {"w": leaf(8, 24), "none": None}, given
    )
