"""Read from a loss function what it does with an NNX model."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from muonjax._inspect import Program
from muonjax._inspect import inspect as inspect_function


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
      'added: <doctest muonjax.nnx._inspect.inspect[3]>:1'
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"inspect: the first argument of the loss must be the model, got {type(model)}.")
    structure, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        return loss_fn(nnx.merge(structure, params, rest, copy=True), *args, **kwargs)

    loss.__name__ = getattr(loss_fn, "__name__", "loss")
    return inspect_function(loss, params, rest, *args, **kwargs)
