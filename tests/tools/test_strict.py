"""Promotions inside of the packages are found by the strict modes of `tests.tools.strict`, others are not."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax
from tests.tools import sources, strict

SOURCE = b"""
import jax.numpy as jnp

def ranks(x):
    return x + x[0]

def dtypes(x):
    return x + jnp.arange(3)

def transformation(f=ranks):
    def update(x):
        return f(x)
    return update

def each(f, rows):
    return [f(row) for row in rows()]

def rows():
    yield jnp.ones((2, 3))

class Layer:
    def __call__(self, x):
        return ranks(x)

    def __add__(self, x):
        return x + x[0]
"""
X = np.ones((2, 3), np.float32)


@pytest.fixture(scope="module")
def package():
    names = {}
    exec(sources.compile_decorated(SOURCE, "package.py", strict.DECORATORS), names)
    return names


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
@pytest.mark.parametrize("name", ["ranks", "dtypes"])
def test_functions_of_a_package_do_not_promote(package, name, transform):
    x = X[None] if transform is jax.vmap else X
    with pytest.raises(ValueError, match="promotion"):
        transform(package[name])(jnp.asarray(x))


def test_functions_that_a_package_returns_or_calls_do_not_promote(package):
    for function in (
        package["transformation"](),
        package["transformation"](lambda x: x + x[0]),
        package["Layer"](),
    ):
        with pytest.raises(ValueError, match="promotion"):
            function(jnp.asarray(X))
    with pytest.raises(ValueError, match="promotion"):
        package["each"](lambda row: row + row[0], package["rows"])


def test_tests_and_spared_functions_promote(package):
    np.testing.assert_array_equal(jnp.asarray(X) + jnp.arange(3), X + np.arange(3))
    spared = package["transformation"](strict.lenient(lambda x: x + x[0] + jnp.arange(3)))
    np.testing.assert_array_equal(spared(jnp.asarray(X)), 2 * X + np.arange(3))


def test_a_test_can_do_without(package):
    with strict.switched(False):
        np.testing.assert_array_equal(package["ranks"](jnp.asarray(X)), 2 * X)
    with pytest.raises(ValueError, match="promotion"):
        package["ranks"](jnp.asarray(X))


def test_generators_and_special_methods_are_left_as_they_are():
    functions = {node.name: node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.FunctionDef)}
    assert {name for name, node in functions.items() if not strict.computes(node)} == {"rows", "__add__"}


def test_the_option_reaches_the_packages(request):
    strictly = muonjax.muon.__code__.co_filename == strict.__file__
    assert strictly == request.config.getoption("jax_strict")
