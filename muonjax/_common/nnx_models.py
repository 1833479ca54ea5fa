"""Split the NNX models that a function is given; Flax is looked up where the caller has imported it."""

import sys
from collections.abc import Callable
from typing import Any

import jax


def is_model(tree: Any) -> bool:
    """Whether it is an `nnx.Module`, which only a program that has imported Flax NNX can hold."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(tree, nnx.Module)


def parameters_of(tree: Any) -> Any:
    """The arrays of the `nnx.Param`s of a model by path; any other tree as it is."""
    if not is_model(tree):
        return tree
    nnx = sys.modules["flax.nnx"]
    return nnx.as_pure(nnx.state(tree, nnx.Param))


def as_function_of_parameters(
    fun: Callable[..., Any], params: Any, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """`fun(model, *args)` as a function of the model's parameters and its other state; any other one as it is."""
    if not is_model(params):
        return fun, params, args
    nnx = sys.modules["flax.nnx"]
    structure, params, rest = nnx.split(params, nnx.Param, ...)

    def of_parameters(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        return fun(nnx.merge(structure, params, rest, copy=True), *args, **kwargs)

    of_parameters.__name__ = getattr(fun, "__name__", "loss")
    return of_parameters, params, (rest, *args)


def value_and_grad_of_model(
    with_max_logits: Callable[..., Any], fun: Callable[..., Any], argnums: Any, has_aux: bool
) -> Callable[..., Any]:
    """`nnx.value_and_grad` of `fun(model, ...)` that also returns the largest logits.

    Args:
      with_max_logits: Makes a function of parameters return (loss, (aux, max_logits)).
      fun: The loss.
      argnums: As in `nnx.value_and_grad`.
      has_aux: Whether `fun` returns (loss, aux).
    """
    nnx = sys.modules["flax.nnx"]

    def measured(*given: Any) -> tuple[Any, Any]:
        # All arguments together, for they may share random numbers.
        structure, params, others = nnx.split(given, _is_parameter_of_the_first, ...)

        def of_parameters(params: Any) -> tuple[Any, Any]:
            variables = jax.tree.map(lambda x: x, others)  # of this trace
            *args, kwargs = merged = nnx.merge(structure, nnx.State({0: params}), variables)
            result = fun(*args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            return loss, (aux, nnx.state(merged, nnx.Variable))

        of_parameters.__name__ = getattr(fun, "__name__", "loss")
        loss, ((aux, changed), max_logits) = with_max_logits(of_parameters, 0, True)(params.get(0, {}))
        nnx.update(given, changed)  # running means, random counts
        return loss, (aux, max_logits) if has_aux else max_logits

    differentiated = nnx.value_and_grad(measured, argnums=argnums, has_aux=True)
    return lambda *args, **kwargs: differentiated(*args, kwargs)  # Flax takes no keywords


def _is_parameter_of_the_first(path: tuple[Any, ...], value: Any) -> bool:
    return path[0] == 0 and isinstance(value, sys.modules["flax.nnx"].Param)
