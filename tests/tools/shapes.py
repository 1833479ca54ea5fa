"""Check the array shapes and dtypes that annotations state, in every call that a test makes.

The sources write `x: Float[Array, "*batch m n"]` below `from __future__ import annotations` and import the names for
the type checker alone: who runs muonjax neither needs jaxtyping nor evaluates an annotation. While testing, `checked`
decorates each function that has such an annotation. Ordinary runs import the same files without it: what is compiled
here is never kept. Other annotations are left to Pyright. NumPy's arrays pass for JAX's, as in `jax.numpy`.
"""

import ast
import functools
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader

import jax
import numpy as np

AVAILABLE = importlib.util.find_spec("jaxtyping") is not None

if AVAILABLE:
    import jaxtyping

    DTYPES = {
        name
        for name, value in vars(jaxtyping).items()
        if isinstance(value, type) and issubclass(value, jaxtyping.AbstractDtype)
    }


def names_of(annotation: ast.expr | None) -> set[str]:
    return (
        {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
        if annotation
        else set()
    )


def states_a_shape(function: ast.FunctionDef) -> bool:
    arguments = ast.walk(function.args)
    annotations = [
        function.returns,
        *(a.annotation for a in arguments if isinstance(a, ast.arg)),
    ]
    return any(names_of(annotation) & DTYPES for annotation in annotations)


def fits(value, hint) -> bool:
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in inner)
    if origin is tuple and Ellipsis not in inner:
        return (
            isinstance(value, tuple)
            and len(value) == len(inner)
            and all(map(fits, value, inner))
        )
    if origin in (list, tuple, Sequence):
        return isinstance(value, origin) and all(fits(item, inner[0]) for item in value)
    if hint is float:
        return isinstance(value, float | int)
    return (
        isinstance(value, hint)
        if isinstance(hint, type) and hint is not typing.Any
        else True
    )


def checked(function):
    """`function`, which raises where it took or made an array of another shape or dtype than its annotations state."""
    arrays = {"Array": jax.Array | np.ndarray, "ArrayLike": jax.typing.ArrayLike}
    names = {**vars(jaxtyping), **arrays, **function.__globals__}
    signature = inspect.signature(function)
    stated = {
        name: text
        for name, text in function.__annotations__.items()
        if names_of(ast.parse(text, mode="eval").body) & DTYPES
    }
    hints = functools.cache(
        lambda: {name: eval(text, names) for name, text in stated.items()}
    )

    def check(name, value):
        if not fits(value, hints()[name]):
            got = (
                f"{value.dtype}{list(value.shape)}"
                if hasattr(value, "shape")
                else repr(value)
            )
            raise AssertionError(
                f"{function.__module__}.{function.__qualname__}: {name} is {got}, not {stated[name]}"
            )

    @functools.wraps(function)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        result = function(*args, **kwargs)  # first, for what it refuses itself
        with jaxtyping.jaxtyped("context"):
            for name, value in {**bound, "return": result}.items():
                if name in stated:
                    check(name, value)
        return result

    return call


PACKAGES = ("muonjax", "pallas_kernels")
CHECKED = "__import__('tests.tools.shapes').tools.shapes.checked"


class Loader(SourceFileLoader):
    """Compiles a file whose functions that state a shape are `checked`."""

    def get_code(self, fullname):
        source = self.get_data(self.path)
        if b"jaxtyping" not in source:
            return super().get_code(fullname)
        tree = ast.parse(source, filename=self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and states_a_shape(node):
                # Inside of the source's own decorators.
                decorator = ast.parse(CHECKED, mode="eval").body
                node.decorator_list.append(ast.copy_location(decorator, node))
        # Not by the base, which would keep what is compiled here for ordinary runs.
        tree = ast.fix_missing_locations(tree)
        return compile(tree, self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    """Finds the modules of `packages`, whose functions are checked."""

    def __init__(self, packages: Sequence[str]):
        self.packages = packages

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in self.packages:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def install():
    """Before the first import of a package; nothing without jaxtyping."""
    if early := [name for name in PACKAGES if name in sys.modules]:
        raise RuntimeError(
            f"{early[0]} was imported before the tests could check its functions."
        )
    if AVAILABLE:
        sys.meta_path.insert(0, Finder(PACKAGES))
