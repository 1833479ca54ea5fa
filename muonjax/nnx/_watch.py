"""Report the largest logits of every attention of an existing NNX model, and collect them with its gradients."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from muonjax._value_and_grad import value_and_grad as value_and_grad_of_function
from muonjax.nnx._attention import attention_fn

Model = TypeVar("Model", bound=nnx.Module)


def watch(model: Model) -> Model:
    """Makes every `nnx.MultiHeadAttention` of a model report its largest logits, in place, for QK-Clip.

    Each gets `attention_fn(...)` around the attention function that it has, and sows `max_logits` whenever the model
    runs inside of `nnx.capture` or `value_and_grad`; otherwise it computes what it did before, at the same cost.
    Parameters and their paths stay as they are.

    Args:
      model: Any NNX module; an attention that is watched already stays so.

    Returns:
      The model itself. A warning names the attentions that could not be watched, with the reason.

    Raises:
      ValueError: No attention that can be watched.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> from flax import nnx
      >>> model = muonjax.nnx.watch(nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0)))
      >>> y, sown = nnx.capture(model, nnx.Intermediate)(jnp.ones((2, 6, 8)))
      >>> sown["max_logits"][...].shape
      (4,)
    """
    found, others = [], {}
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, nnx.MultiHeadAttention):
            if hasattr(module, "query") and hasattr(module, "key"):
                others["/".join(map(str, path))] = (
                    "is no nnx.MultiHeadAttention; sow muonjax.max_logits in it"
                )
            continue
        try:
            found.append((module, *_watched(module)))
        except ValueError as error:
            others["/".join(map(str, path))] = str(error)
    reasons = "; ".join(f"{path!r}: {reason}" for path, reason in others.items())
    if not found:
        raise ValueError(
            f"watch: no nnx.MultiHeadAttention in the model that can be watched. {reasons}".rstrip()
        )
    for module, kind, function in found:
        module.attention_fn = function
        object.__setattr__(module, "__class__", kind)
    if others:
        warnings.warn(f"watch: not watched: {reasons}. Leave them out of the clip's sites.", stacklevel=2)
    return model


def value_and_grad(
    loss_fn: Callable[..., Any], *, argnums: int | nnx.DiffState = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`nnx.value_and_grad` that also returns the largest logits of each attention head.

    They are read from the program, as in `muonjax.value_and_grad`. A model that `watch` has prepared sows them instead,
    and what it sows besides is returned too.

    Args:
      loss_fn: A function whose first argument is the model and whose result is the loss.
      argnums: As in `nnx.value_and_grad`.
      has_aux: Whether `loss_fn` returns (loss, aux).

    Returns:
      A function that returns ((loss, statistics), gradients), or with `has_aux` ((loss, (aux, statistics)), gradients);
      pass the statistics to `optimizer.update(model, gradients, max_logits=statistics)`.

    Raises:
      TypeError: If the first argument is no model.
      ValueError: If the loss computes no attention whose logits can be read.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, muonjax.muonclip(1e-2), wrt=nnx.Param)
      >>> def loss_fn(model, x):
      ...     return (model(x) ** 2).mean()
      >>> (loss, stats), grads = muonjax.nnx.value_and_grad(loss_fn)(model, jnp.ones((2, 6, 8)))
      >>> updates = optimizer.update(model, grads, max_logits=stats)
      >>> sorted(muonjax.metrics(optimizer.opt_state))[:2]
      ['qk_clip/largest', 'qk_clip/largest/model']
    """

    def captured(model: nnx.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result, statistics = nnx.capture(loss_fn, nnx.Intermediate)(model, *args, **kwargs)
        return (result[0], (result[1], statistics)) if has_aux else (result, statistics)

    differentiated = nnx.value_and_grad(captured, argnums=argnums, has_aux=True)

    @functools.wraps(loss_fn)
    def value_and_gradients(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"value_and_grad: the first argument of the loss must be the model, got {type(model)}."
            )
        if argnums != 0 or any(hasattr(module, "_muonjax_watched") for _, module in nnx.iter_modules(model)):
            return differentiated(model, *args, **kwargs)
        return _read_from_program(loss_fn, has_aux, model, args, kwargs)

    return value_and_gradients


def _read_from_program(
    loss_fn: Callable[..., Any], has_aux: bool, model: nnx.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    structure, params, rest = nnx.split(model, nnx.Param, ...)

    def pure(params: nnx.State) -> tuple[Any, Any]:
        merged = nnx.merge(structure, params, jax.tree.map(lambda x: x, rest))  # variables of this trace
        result = loss_fn(merged, *args, **kwargs)
        loss, aux = result if has_aux else (result, None)
        return loss, (aux, nnx.state(merged, nnx.Not(nnx.Param)))

    pure.__name__ = getattr(loss_fn, "__name__", "loss")
    (loss, ((aux, changed), max_logits)), gradients = value_and_grad_of_function(pure, has_aux=True)(params)
    nnx.update(model, changed)  # running means, random counts
    return (loss, (aux, max_logits) if has_aux else max_logits), gradients


def _watched(module: nnx.MultiHeadAttention) -> tuple[type, Callable]:
    """The class and the attention function with which an attention reports; raises ValueError if it can't."""
    if module.normalize_qk:
        raise ValueError("normalizes its queries and keys, which bounds its logits without a clip")
    if (
        "sow_weights" not in inspect.signature(type(module).__call__).parameters
    ):  # of a class of the user's own
        raise ValueError(f"{type(module).__name__}.__call__ takes no sow_weights to pass on")
    function = module.attention_fn
    return _reporting_class(type(module)), function if hasattr(function, "reports") else attention_fn(
        function
    )


@functools.cache
def _reporting_class(kind: type) -> type:
    """The class of an attention that always asks for its statistics."""
    if hasattr(kind, "_muonjax_watched"):
        return kind

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, *args, **kwargs | {"sow_weights": True})

    names = {"__call__": functools.wraps(kind.__call__)(call), "_muonjax_watched": True}
    names |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), names)
