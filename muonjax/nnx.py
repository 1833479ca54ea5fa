"""muonjax for Flax NNX: LoHa adapters of its layers,
and NNX models as functions of their parameters.

Flax's layers take the function that multiplies, `dot_general` or `conv_general_dilated`. An adapter
is a module that replaces this function: the layer,
its kernel and the kernel's path stay what they were.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax

from muonjax import loha
from muonjax._common.arguments import check_pattern, errors_of
from muonjax._common.trees import listed

__all__ = ["LoHaParam", "add_loha", "merge"]

Layer = nnx.Linear | nnx.LinearGeneral | nnx.Conv


class LoHaParam(nnx.Param):
    """A parameter of an adapter, so that `wrt=LoHaParam` trains adapters and nothing else.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> len(nnx.to_flat_state(nnx.state(model, muonjax.nnx.LoHaParam)))
      8
    """


class LoHa(nnx.Module):
    """The adapter of one layer, which replaces its `dot_general` or `conv_general_dilated`;
    at the start ΔW = 0."""

    def __init__(self, layer: Layer, rank: int, scale: float, rngs: nnx.Rngs):
        self.scale = scale
        _check_layer(layer)
        # What the adapter replaces: lax.dot_general, lax.conv_general_dilated,
        # a function of the user's, or None.
        self.replaced = getattr(layer, _product_attribute(layer))
        kernel = layer.kernel
        # By the names of FACTORS: [in, rank], [rank, out], [in, rank], [rank, out]
        shapes = loha.factor_shapes(kernel.shape, _num_input_axes(layer), rank)
        keys = jax.random.split(rngs.params(), len(shapes))
        for (name, shape), key in zip(shapes.items(), keys, strict=True):
            factor = loha.initial(name, key, shape, kernel.dtype)
            setattr(self, name, LoHaParam(factor))

    def factors(self) -> list[jax.Array]:
        """w1a [in, rank], w1b [rank, out], w2a [in, rank], w2b [rank, out]."""
        return [getattr(self, name)[...] for name in loha.FACTORS]

    def __call__(self, lhs, rhs, *args, **settings):
        """As `lax.dot_general` or `lax.conv_general_dilated`, with rhs + ΔW."""
        # An `nnx.LinearGeneral` whose `dot_general` was None called lax.dot_general.
        return loha.multiply(
            self.replaced or lax.dot_general,
            lhs,
            rhs,
            self.factors(),
            self.scale,
            *args,
            **settings,
        )


def add_loha(
    model: nnx.Module,
    path_rule: str,
    *,
    rank: int,
    alpha: float | None = None,
    rngs: nnx.Rngs,
) -> list[str]:
    """Gives LoHa adapters to layers of an existing model, in place: y = x · (W + ΔW) + b,
    and ΔW = 0 at the start.

    Every `nnx.Linear`, `nnx.LinearGeneral` (the projections of an attention) and `nnx.Conv` that
    matches `path_rule` gets one; of a convolution, the kernel is a matrix (window · in) × out.
    Kernels, their paths and the model's outputs stay as they are.
    A single layer is a model too, with the path "".

    Args:
      model: Any NNX module.
      path_rule: A regular expression searched in the layer's path, "blocks/0/attention/query".
      rank: The rank of each of the two products; ΔW has rank up to rank².
      alpha: ΔW is scaled by alpha / rank; None: alpha = rank.
      rngs: The stream "params".

    Returns:
      The paths of the adapted layers.

    Raises:
      ValueError: If no layer matches, or one that matches can't have an adapter: it has one
        already, a mask, a `dot_general_cls` or a batch of matrices, or the rank does not fit. The
        model is then unchanged.

    Example:
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      ['query', 'value']

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    with errors_of("add_loha"):
        scale = loha.scale_of(rank, alpha)
        check_pattern("path_rule", path_rule)
    layers = dict(_layers(model))
    paths = [path for path in layers if re.search(path_rule, path)]
    if not paths:
        raise ValueError(
            f"add_loha(path_rule={path_rule!r}) matches none of the layers "
            f"{listed([*layers], ', ')}."
        )
    # All adapters are made before the first layer changes: making one raises for a layer that can't
    # have it, and an error must leave the model unchanged.
    adapters = {}
    for path in paths:
        with errors_of(f"add_loha: {path!r}"):
            adapters[path] = LoHa(layers[path], rank, scale, rngs)
    for path, adapter in adapters.items():
        layer = layers[path]
        # The adapter replaces `dot_general` or `conv_general_dilated`, which Flax declares as a
        # plain function: `nnx.data` says that the attribute holds variables.
        setattr(layer, _product_attribute(layer), nnx.data(adapter))
    return paths


def merge(model: nnx.Module) -> None:
    """Adds every adapter's ΔW to its kernel and removes the adapters, in place;
    the outputs stay as they are.

    Args:
      model: Any NNX module with adapters.

    Returns:
      None; the model is changed.

    Raises:
      ValueError: If the model has no adapter, as after merging.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> muonjax.nnx.merge(model)
      >>> nnx.state(model, muonjax.nnx.LoHaParam)
      State({})
    """
    has_adapter = False
    for _, layer in _layers(model):
        # "dot_general" or, of a convolution, "conv_general_dilated":
        # an adapter stands there in place of the function.
        attribute = _product_attribute(layer)
        adapter = getattr(layer, attribute)
        if not isinstance(adapter, LoHa):
            continue
        has_adapter = True
        # A new value of the same variable, since an optimizer may refer to it.
        kernel = layer.kernel
        kernel[...] = loha.adapted_kernel(kernel[...], adapter.factors(), adapter.scale)
        # The layer multiplies as before it had an adapter: by its own function, or by None, Flax's
        # default. `add_loha` marked the attribute by `nnx.data`, with which the function would be a
        # leaf of the model; `nnx.static` takes the mark back.
        setattr(layer, attribute, nnx.static(adapter.replaced))
    if not has_adapter:
        raise ValueError("merge(model): no LoHa adapter in it; was it merged already?")


def _layers(model: nnx.Module) -> Iterator[tuple[str, Layer]]:
    """Paths and layers that can be adapted, in the model's order."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Layer):
            yield "/".join(map(str, path)), module


def _num_input_axes(layer: Layer) -> int:
    """The number of the kernel's first axes that are summed over:
    of a convolution the window and the channels."""
    if isinstance(layer, nnx.Conv):
        return len(layer.kernel_size) + 1
    return np.size(layer.in_features)


def _product_attribute(layer: Layer) -> str:
    """The name of the attribute that holds the layer's product,
    which an adapter replaces: "dot_general"."""
    return "conv_general_dilated" if isinstance(layer, nnx.Conv) else "dot_general"


def _check_layer(layer: Layer) -> None:
    """Raises ValueError for a layer that can't have a new adapter."""
    # An adapter replaces the layer's `dot_general`, or the `conv_general_dilated` of a convolution.
    if isinstance(getattr(layer, _product_attribute(layer)), LoHa):
        raise ValueError(
            "the layer has an adapter already; muonjax.nnx.merge(model) adds it to the kernel."
        )
    if isinstance(layer, nnx.Conv) and layer.mask is not None:
        raise ValueError("the layer has a mask, and ΔW is not masked; remove the mask.")
    # LinearGeneral prefers its dot_general_cls to its dot_general.
    if getattr(layer, "dot_general_cls", None) is not None:
        raise ValueError(
            "the layer has a dot_general_cls, which goes before an adapter; leave it out, or give "
            "dot_general."
        )
    # A kernel has axes for inputs and outputs. A LinearGeneral with a `batch_axis` and a stack of
    # layers, as `nnx.vmap` makes it, have more.
    if layer.kernel.ndim != _num_input_axes(layer) + np.size(layer.out_features):
        raise ValueError(
            "the layer has a batch of matrices or a stack of layers; leave it out, or adapt inside "
            "nnx.vmap."
        )


# How the rest of muonjax reads an NNX model; see `muonjax._common.nnx_models`.


def parameters_of(model: nnx.Module) -> Any:
    """The arrays of the model's `nnx.Param`s by path."""
    return nnx.as_pure(nnx.state(model, nnx.Param))


def as_function_of_parameters(
    fun: Callable[..., Any], model: nnx.Module, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """`fun(model, *args)` as a function of arrays:
    (the function, parameters, (other state, *args)).

    The function is called with the parameters, the other state and `args`.
    """
    # `state` has what does not train, such as running means and counts of random numbers.
    structure, params, state = nnx.split(model, nnx.Param, ...)

    def of_parameters(params, state, *args, **kwargs):
        """`fun` of a copy of the model, so that a loss that updates running means leaves the
        caller's model alone."""
        # Without `copy` the new model would share its variables with the caller's.
        return fun(nnx.merge(structure, params, state, copy=True), *args, **kwargs)

    return of_parameters, params, (state, *args)


def value_and_grad_of_model(
    with_max_logits: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` of `fun(model, ...)` that also returns the largest logits.

    Args:
      with_max_logits: Makes of (fun, argnums, has_aux) a function with the arguments of `fun` that
        returns (loss, (aux, max_logits)). It does not differentiate.
      fun: The loss.
      argnums: As in `nnx.value_and_grad`.
      has_aux: Whether `fun` returns (loss, aux).

    Returns:
      A function of the arguments of `fun` with the result ((loss, max_logits), gradients), or
      ((loss, (aux, max_logits)), gradients) where `fun` has aux.
    """

    def measured(*given):
        """What `nnx.value_and_grad` differentiates: (model, *args, kwargs) -> (loss, max_logits),
        or (loss, (aux, max_logits)) where `fun` has aux. `kwargs` is one argument, a dict."""
        # The largest logits are found in a program of the model's parameters, whose paths name the
        # attentions. `params` has every `nnx.Param` of the model, at {0: ...}, as the model is
        # argument 0. `others` has all else: running means, random numbers, the arrays of a batch.
        # Arguments may share variables, so they are split together, and not one by one.
        structure, params, others = nnx.split(given, _is_parameter_of_model, ...)

        def of_parameters(params_of_model, others):
            """(loss, (aux, variables)): `fun` as a function of arrays, with all variables of its
            arguments as it leaves them."""
            # `nnx.merge` needs them where `nnx.split` found them: at argument 0.
            of_arguments = nnx.State({0: params_of_model})
            # `copy=True` makes new variables. `fun` may change its variables, and NNX refuses that
            # for variables that were made outside of the trace.
            merged = nnx.merge(structure, of_arguments, others, copy=True)
            *args, kwargs = merged
            result = fun(*args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            return loss, (aux, nnx.state(merged, nnx.Variable))

        # Errors of `with_max_logits` name the caller's function.
        of_parameters.__name__ = getattr(fun, "__name__", "loss")
        # `argnums=0`: the model's parameters are those of its program. The caller's own `argnums`
        # are for `nnx.value_and_grad`, which differentiates all of `measured`.
        with_maxima = with_max_logits(of_parameters, argnums=0, has_aux=True)
        # `params` of a model without parameters is empty.
        loss, ((aux, variables), max_logits) = with_maxima(params.get(0, {}), others)
        # `fun` may have changed running means or counts of random numbers. `given` is the model as
        # `nnx.value_and_grad` traces it, which hands its variables on to the caller's.
        nnx.update(given, variables)
        return loss, ((aux, max_logits) if has_aux else max_logits)

    # `argnums` are the caller's, and may name a part of the model or several arguments.
    differentiated = nnx.value_and_grad(measured, argnums=argnums, has_aux=True)
    # `nnx.value_and_grad` takes no keyword arguments, so they are one more positional argument.
    return lambda *args, **kwargs: differentiated(*args, kwargs)


def _is_parameter_of_model(path: tuple[Any, ...], value: Any) -> bool:
    """Whether a variable of the arguments is a parameter of the first one, which is the model."""
    return path[0] == 0 and isinstance(value, nnx.Param)
