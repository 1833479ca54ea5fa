"""Check the array shapes and dtypes that annotations state, in every call that a test makes.

The sources write `x: Float[Array, "*batch m n"]` below `from __future__ import annotations` and import the names for
the type checker alone: who runs muonjax neither needs jaxtyping nor evaluates an annotation. While testing, `checked`
decorates each function that has such an annotation (`tests/tools/sources.py`). Other annotations are left to Pyright.
NumPy's arrays pass for JAX's, as in `jax.numpy`.
"""

import ast
import functools
import importlib.util
import inspect
import types
import typing
from collections.abc import Sequence

import jax
import numpy as np

from tests.tools.sources import Decorator

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
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
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


# For `tests.tools.sources`: nothing without jaxtyping.
DECORATORS = (
    [Decorator("shapes", "checked", states_a_shape, only_in=b"jaxtyping")]
    if AVAILABLE
    else []
)
