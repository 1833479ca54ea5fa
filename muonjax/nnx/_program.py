"""What the program of a loss does with an NNX model, and its gradients with the largest logits of attentions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from muonjax._inspect import Program, check_arguments
from muonjax._inspect import inspect as inspect_function
from muonjax._value_and_grad import with_max_logits


def inspect(loss_fn: Callable[..., Any], model: nnx.Module, *args: Any, **kwargs: Any) -> Program:
    """`muonjax.inspect` for a function of an NNX model; nothing is computed, and the model stays as it is.

    Args:
      loss_fn: Your loss `loss_fn(model, *args, **kwargs)`.
      model: The model; its `nnx.Param`s are the parameters.
      *args: Further arguments, arrays or `jax.ShapeDtypeStruct`s.
      **kwargs: Keyword arguments of `loss_fn`.

    Returns:
      A `Program`, for `nnx.Optimizer(model, muonjax.muonclip(1e-3, program), wrt=nnx.Param)`.

    Raises:
      TypeError: If `model` is no NNX module.
      ValueError: As `muonjax.inspect`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0))
      >>> program = muonjax.nnx.inspect(lambda model, x: (model(x) ** 2).mean(), model, jnp.ones((2, 6, 8)))
      >>> program.why("key/bias")
      'added: <doctest muonjax.nnx._program.inspect[3]>:1'
    """
    _check_model("inspect", model)
    check_arguments(loss_fn, model, *args, **kwargs)
    structure, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        return loss_fn(nnx.merge(structure, params, rest, copy=True), *args, **kwargs)

    loss.__name__ = getattr(loss_fn, "__name__", "loss")
    return inspect_function(loss, params, rest, *args, **kwargs)


def value_and_grad(
    loss_fn: Callable[..., Any], *, argnums: int | nnx.DiffState = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`nnx.value_and_grad` that also returns the largest logits of each attention head.

    They are read from the program, as in `muonjax.value_and_grad`: nothing in the model has to report them. What a
    kernel hides is not read.

    Args:
      loss_fn: A function whose first argument is the model and whose result is the loss.
      argnums: As in `nnx.value_and_grad`.
      has_aux: Whether `loss_fn` returns (loss, aux).

    Returns:
      A function that returns ((loss, max_logits), gradients), or with `has_aux` ((loss, (aux, max_logits)), gradients);
      pass them on by `optimizer.update(model, gradients, max_logits=max_logits)`. They are [*layers, heads] by the path
      of the attention, "blocks/0/attention".

    Raises:
      TypeError: If the first argument is no model.
      ValueError: If the loss computes no attention whose logits can be read.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x):
      ...     return (model(x) ** 2).mean()
      >>> program = muonjax.nnx.inspect(loss_fn, model, jnp.ones((2, 6, 8)))
      >>> optimizer = nnx.Optimizer(model, muonjax.muonclip(1e-2, program), wrt=nnx.Param)
      >>> (loss, max_logits), grads = muonjax.nnx.value_and_grad(loss_fn)(model, jnp.ones((2, 6, 8)))
      >>> updates = optimizer.update(model, grads, max_logits=max_logits)
      >>> sorted(muonjax.metrics(optimizer.opt_state))[:2]
      ['qk_clip/largest', 'qk_clip/largest/model']
    """

    def measured(model: nnx.Module, *rest: Any) -> tuple[Any, Any]:
        given = (model, *rest)  # together: they may share random numbers
        structure, params, others = nnx.split(given, _is_parameter_of_the_model, ...)

        def pure(params: Any) -> tuple[Any, Any]:
            variables = jax.tree.map(lambda x: x, others)  # of this trace
            model, *args, kwargs = merged = nnx.merge(structure, nnx.State({0: params}), variables)
            result = loss_fn(model, *args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            return loss, (aux, nnx.state(merged, nnx.Variable))

        pure.__name__ = getattr(loss_fn, "__name__", "loss")
        loss, ((aux, changed), max_logits) = with_max_logits(pure, 0, True)(params.get(0, {}))
        nnx.update(given, changed)  # running means, random counts
        return loss, (aux, max_logits) if has_aux else max_logits

    differentiated = nnx.value_and_grad(measured, argnums=argnums, has_aux=True)

    @functools.wraps(loss_fn)
    def value_and_gradients(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        _check_model("value_and_grad", model)
        return differentiated(model, *args, kwargs)  # Flax takes no keywords

    return value_and_gradients


def _check_model(call: str, model: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"muonjax.nnx.{call}: the first argument of the loss must be the model, got {type(model).__name__}. Of a "
            f"loss of parameters it is muonjax.{call}."
        )


def _is_parameter_of_the_model(path: tuple[Any, ...], value: Any) -> bool:
    return path[0] == 0 and isinstance(value, nnx.Param)
