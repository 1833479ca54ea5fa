"""Treat an NNX model as a tree of parameters, and a function of it as a function of that tree.

A tree of arrays passes through as it is. What NNX models need is in `muonjax.nnx`, which imports
Flax, so it is loaded only when the first model comes.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def functions_for(tree: Any) -> Any:
    """`muonjax.nnx` for an NNX model; None for a tree, which needs none."""
    # Where a model is, Flax is loaded already.
    flax_nnx = sys.modules.get("flax.nnx")
    if flax_nnx is None or not isinstance(tree, flax_nnx.Module):
        return None
    return importlib.import_module("muonjax.nnx")


def is_model(tree: Any) -> bool:
    """Whether it is a model that is an object, as an `nnx.Module` is."""
    return functions_for(tree) is not None


def parameters_of(tree: Any) -> Any:
    """The arrays of a model's parameters by path; any other tree as it is."""
    functions = functions_for(tree)
    return tree if functions is None else functions.parameters_of(tree)


def as_function_of_parameters(
    fun: Callable[..., Any], params: Any, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """`fun` as a function of a tree of parameters: (function, params, args), to be called as
    `function(params, *args)`.

    A tree gives what was given. For an NNX model in its place, the function takes (parameters,
    state, *args) and calls `fun(model, *args)` with a model of these. Then `params` are the arrays
    that train, and the new args begin with the state, which has all others, such as running means.
    """
    # The module `muonjax.nnx`, which has a function of the same name; None for a tree
    functions = functions_for(params)
    if functions is None:
        return fun, params, args
    return functions.as_function_of_parameters(fun, params, args)
