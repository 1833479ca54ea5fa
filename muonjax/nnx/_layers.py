"""Which layers of an NNX model can have an adapter, and how the axes of their kernels divide."""

from collections.abc import Iterator
from typing import Any, TypeAlias

from flax import nnx
from jax import lax

from muonjax._adapters.config import Place
from muonjax._trees import joined

Layer: TypeAlias = nnx.Linear | nnx.LinearGeneral | nnx.Conv


def layers(model: nnx.Module) -> Iterator[tuple[str, Layer]]:
    """Paths and layers that can be adapted, in the model's order."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear | nnx.LinearGeneral | nnx.Conv):
            yield joined(path), module


def place_of(layer: Layer) -> Place:
    """The kernel's shape and the division of its axes."""
    shape = tuple(layer.kernel.shape)
    if isinstance(layer, nnx.Conv):
        window = len(layer.kernel_size)
        return Place(shape, window + 1, window)
    return Place(shape, len(layer.in_features) if isinstance(layer.in_features, tuple) else 1)


def function_of(layer: Layer) -> str:
    """The attribute that holds the layer's product, which an adapter replaces."""
    return "conv_general_dilated" if isinstance(layer, nnx.Conv) else "dot_general"


def plain_function(layer: Layer) -> Any:
    """Flax's own value of this attribute."""
    if isinstance(layer, nnx.LinearGeneral):
        return None  # it then takes lax.dot_general when called
    return lax.conv_general_dilated if isinstance(layer, nnx.Conv) else lax.dot_general


def check_plain(layer: Layer, call: str) -> None:
    """Raises ValueError for a layer whose product an adapter can't replace."""
    if isinstance(layer, nnx.Conv) and layer.mask is not None:
        raise ValueError(f"{call}: the convolution has a mask, and ΔW is not masked; remove the mask.")
    own_class = getattr(layer, "dot_general_cls", None)  # LinearGeneral prefers it to its dot_general
    if getattr(layer, function_of(layer)) is not plain_function(layer) or own_class is not None:
        raise ValueError(
            f"{call}: the layer multiplies by a {function_of(layer)} of its own, which an adapter would replace; "
            "leave it out."
        )


def check_kernel(layer: Layer, call: str) -> None:
    """Raises ValueError for a batch of matrices or a stack of layers."""
    if isinstance(layer, nnx.Conv):
        outputs = 1
    else:
        if getattr(layer, "batch_axis", None):
            raise ValueError(f"{call} multiplies a batch of matrices; leave it out.")
        outputs = len(layer.out_features) if isinstance(layer.out_features, tuple) else 1
    if layer.kernel.ndim != place_of(layer).inputs + outputs:
        raise ValueError(
            f"{call} is a stack of layers, its kernel of shape {layer.kernel.shape}; make the stack of LoHaLinear, "
            "or adapt inside nnx.vmap."
        )
