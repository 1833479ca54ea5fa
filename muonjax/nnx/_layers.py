"""Which layers of an NNX model can have an adapter, and how the axes of their kernels divide."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
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
    return Place(shape, np.size(layer.in_features))


def function_of(layer: Layer) -> str:
    """The attribute that holds the layer's product, which an adapter replaces."""
    return "conv_general_dilated" if isinstance(layer, nnx.Conv) else "dot_general"


def plain_function(layer: Layer) -> Any:
    """Flax's own value of this attribute."""
    if isinstance(layer, nnx.LinearGeneral):
        return None  # it then takes lax.dot_general when called
    return lax.conv_general_dilated if isinstance(layer, nnx.Conv) else lax.dot_general
