"""Wrong shapes are found by the check of `tests.tools.shapes`."""

import ast
import importlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tools import shapes

pytestmark = pytest.mark.skipif(
    not shapes.AVAILABLE, reason="jaxtyping is not installed"
)

SOURCE = """
from __future__ import annotations
from collections.abc import Sequence
from typing import TYPE_CHECKING
import jax.numpy as jnp
if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

def gram(x: Float[Array, "*batch m n"], scale: Float[Array, ""] | float = 1.0) -> Float[Array, "*batch m m"]:
    return scale * jnp.einsum("...ij,...kj->...ik", x, x) if x.shape[-1] > 1 else x

def double(x: Float[Array, "m n"]):
    return 2 * x

def refuses(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    if x.ndim != 2:
        raise ValueError("a matrix, please")
    return x

def pair(x: Int[Array, "n"]) -> tuple[Int[Array, "n"], Int[Array, "n"] | None]:
    return x, None if x.size < 3 else x[:4]

def transposed(xs: Sequence[Float[Array, "_m _n"]]) -> list[Float[Array, "_n _m"]]:
    return [x.T if x.size > 1 else x[0] for x in xs]

def unchecked(x: int) -> str:
    return x
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "muonjax_with_shapes.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    finder = shapes.Finder(("muonjax_with_shapes",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        yield importlib.import_module("muonjax_with_shapes")
    sys.path.remove(str(folder))
    assert not (folder / "__pycache__").exists(), (
        "ordinary runs would import the checked functions"
    )


def test_accepts_what_fits(module):
    x = jnp.ones((3, 2, 5))
    assert module.gram(x, 2).shape == (3, 2, 2)
    assert jax.jit(jax.vmap(module.gram))(x).shape == (3, 2, 2)
    assert module.pair(jnp.arange(2))[1] is None
    assert len(module.pair(jnp.arange(4))) == 2
    assert len(module.transposed((jnp.ones((2, 3)), np.ones((1, 4))))) == 2
    assert module.unchecked("any") == "any"


@pytest.mark.parametrize(
    ("function", "argument", "names"),
    [
        ("double", jnp.ones(3), r"double: x is float32\[3\], not Float"),
        ("gram", jnp.ones((2, 2), int), r"gram: x is int32\[2, 2\], not Float"),
        ("gram", jnp.ones((2, 1)), r"gram: return is float32\[2, 1\], not Float"),
        ("double", 2.0, "double: x is 2.0, not Float"),
        (
            "transposed",
            [jnp.ones((2, 2)), jnp.ones(2)],
            r"transposed: xs is (.|\n)*, not Sequence",
        ),
        ("transposed", [jnp.ones((1, 1))], r"transposed: return is .*, not list"),
        (
            "transposed",
            jnp.ones((2, 2, 2)),
            "transposed: xs is float32.*, not Sequence",
        ),
        ("pair", jnp.arange(5), r"pair: return is .*, not tuple"),
    ],
)
def test_names_what_does_not_fit(module, function, argument, names):
    with pytest.raises(AssertionError, match=names):
        getattr(module, function)(argument)


def test_what_a_function_refuses_itself_it_refuses(module):
    with pytest.raises(ValueError, match="a matrix, please"):
        module.refuses(jnp.ones(3))


def test_all_shapes_in_the_sources_can_be_evaluated():
    root = pathlib.Path(__file__).parents[2]
    names = {**vars(shapes.jaxtyping), "Array": jax.Array, "np": np}
    found = 0
    for package in shapes.PACKAGES:
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Subscript):
                    continue
                if shapes.names_of(node.value) & shapes.DTYPES:
                    eval(ast.unparse(node), names)
                    found += 1
    assert found > 150
