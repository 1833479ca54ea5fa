"""Paths, prefixes and dtypes of trees."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import muonjax
from muonjax._common.arguments import errors_of
from muonjax._common.trees import (
    broadcast_prefix,
    dtype_of,
    flatten_paths,
    flatten_with_names,
    tree_of,
)


def test_paths():
    """Flax's boxes add no name; masked leaves are leaves, and None is not; integers and attributes are names."""
    tree = {
        "a": [1.0, None, optax.MaskedNode()],
        "b": nn.Partitioned(2.0, ("x",)),
        3: (),
    }
    tree = {
        "t": tree["a"],
        "b": tree["b"],
        "n": nnx.State({"k": nnx.Param(jnp.ones(2))}),
    }
    assert list(flatten_paths(tree)) == ["b", "n/k", "t/0", "t/2"]
    paths, leaves = flatten_with_names(tree)
    assert len(paths) == len(leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Attention:
    query: float
    key: float
    value: float


def test_an_attribute_called_value_is_a_name():
    assert list(flatten_paths({"attention": Attention(1.0, 2.0, 3.0)})) == [
        "attention/query",
        "attention/key",
        "attention/value",
    ]


def test_two_leaves_never_have_one_path():
    """A name with a slash, as Haiku's have, is left as it is."""
    assert list(flatten_paths({"mlp/~/linear": {"w": 1.0}})) == ["mlp/~/linear/w"]
    with pytest.raises(ValueError, match="both called 'a/b/w'; rename one"):
        flatten_paths({"a/b": {"w": 1.0}, "a": {"b": {"w": 2.0}}})


def is_leaf(x):
    return x is None or isinstance(x, str)


def broadcast(prefix, tree):
    with errors_of("f(x=...)"):
        return broadcast_prefix(prefix, tree, is_leaf=is_leaf, what="the labels")


def test_prefix_broadcasting():
    tree = {"a": {"b": 1, "c": (2, 3)}, "d": optax.MaskedNode(), "e": 4}
    assert broadcast("x", tree) == ["x"] * 4
    assert broadcast({"a": None, "d": "y", "e": "z"}, tree) == [None, None, None, "z"]
    assert broadcast({"a": {"b": "x", "c": None}, "d": None, "e": "z"}, tree) == [
        "x",
        None,
        None,
        "z",
    ]


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (
            {"a": "x"},
            r"^f\(x=...\): the labels are neither .*difference on key sets is \W*b\W*$",
        ),
        (
            {"a": "x", "b": {"c": "y", "d": "z"}},
            r"key sets is \W*d",
        ),  # ['d'] in JAX 0.12
        ([], "different types at key path"),
        ({"a": "x", "b": nnx.State({"c": "y"})}, "different types.*State"),
    ],
)
def test_no_prefix(prefix, message):
    """The message names one leaf and never prints the trees."""
    with pytest.raises(ValueError, match=message):
        broadcast(prefix, {"a": jnp.ones(3), "b": {"c": jnp.ones(3)}})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Callable:
    w: jax.Array
    b: jax.Array

    def __call__(self, x):
        return x @ self.w + self.b


@pytest.mark.thorough
def test_trees_that_can_be_called():
    """An Equinox module is a tree, though it can be called; a function and a partial are functions."""
    tree = Callable(jnp.ones((4, 8)), jnp.ones(8))
    assert tree_of(tree, None) is tree
    assert tree_of(lambda params: params + 1, 1) == 2
    for numbers in (None, Callable(muonjax.MuonDimensionNumbers(), None)):
        tx = muonjax.muon(1e-2, numbers)
        updates, _ = tx.update(tree, tx.init(tree), tree)
        assert isinstance(updates, Callable)
        assert updates.w.shape == (4, 8)


def test_dtypes():
    assert dtype_of(1.0) == jnp.float32
    assert dtype_of(jax.ShapeDtypeStruct((2,), "bfloat16")) == jnp.bfloat16
    assert jnp.issubdtype(dtype_of(jax.random.key(0)), jax.dtypes.prng_key)
