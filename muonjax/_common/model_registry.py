"""Treat a model that is an object as a tree of parameters, and a function of it as a function of that tree.

A tree of arrays passes through as it is. What the models of a library need is written in the module that is registered
for this library. That module imports the library, so it is loaded only when the first object of the library comes.
"""

import importlib
from collections.abc import Callable
from typing import Any

# The module for each library that is registered: {"flax.nnx": "muonjax.nnx"}.
_MODULES: dict[str, str] = {}


def register(library: str, module: str) -> None:
    """Says which module treats the models of a library.

    Args:
      library: The package that defines the base class of the models, "flax.nnx".
      module: A module with the functions `is_model`, `parameters_of`, `as_function_of_parameters` and
        `value_and_grad_of_model`.
    """
    _MODULES[library] = module


def functions_for(tree: Any) -> Any:
    """The module that treats this model; None for a tree, which needs none."""
    # A user's model is a class of their own module, below one of the library.
    for base in type(tree).__mro__:
        for library, module in _MODULES.items():
            if f"{base.__module__}.".startswith(f"{library}."):
                # The library is loaded already, for its object is here.
                functions = importlib.import_module(module)
                return functions if functions.is_model(tree) else None
    return None


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
    """A function of a model, as one of its parameters, and its arguments; for a tree, what was given.

    For a model, `loss(model, batch)` becomes a function of (parameters, other state, batch). The three results are this
    function, the parameters, and (other state, batch).
    """
    functions = functions_for(params)
    if functions is None:
        return fun, params, args
    return functions.as_function_of_parameters(fun, params, args)
