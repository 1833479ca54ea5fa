"""Write the adapters of a Linen model to LyCORIS's files, and read them."""

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from muonjax._adapters import lycoris as _lycoris
from muonjax._adapters.adapter import SCALE, Adapter
from muonjax._adapters.config import Place
from muonjax._adapters.lycoris import layer_name
from muonjax._trees import joined, listed
from muonjax.linen._loha import HOLDER
from muonjax.linen._parameters import adapters_in, flat_parameters


def save_lycoris(
    params: Any,
    file: str | os.PathLike[str],
    *,
    name_of: Callable[[str], str] = layer_name,
    convolutions: str = "(?i)conv",
) -> None:
    """Writes the adapters in `params` to a safetensors file, with the names and shapes of LyCORIS.

    Args:
      params: The adapted model's parameters.
      file: Its path; needs the `safetensors` package.
      name_of: From a layer's path to its name in the file; by default "Block_0/Dense_1" is
        "lycoris_Block_0_Dense_1".
      convolutions: A regular expression searched in a layer's path. The shape of a kernel with
        three axes does not show whether its first axis is a window, and files order the rows of a window differently.

    Raises:
      ValueError: If `params` has no adapter, adapters stacked by `nn.scan`, or two layers of one name.
    """
    flat = flat_parameters(params)
    adapters, places = adapters_in(flat), _places(flat, convolutions)
    if not adapters:
        raise ValueError("save_lycoris(params, …): no LoHa adapter in it.")
    found = {joined(layer): adapter for layer, adapter in adapters.items()}
    _lycoris.write(file, {path: (adapter, places[path]) for path, adapter in found.items()}, name_of)


def load_lycoris(
    params: Any,
    file: str | os.PathLike[str],
    *,
    name_of: Callable[[str], str] = layer_name,
    convolutions: str = "(?i)conv",
) -> Any:
    """The adapted model's parameters, with its adapters replaced by those of a LyCORIS file.

    Args:
      params: The parameters of a model made with the file's rank, `decompose` and `tucker`.
      file: As in `save_lycoris`.
      name_of: As in `save_lycoris`.
      convolutions: As in `save_lycoris`.

    Returns:
      A tree like `params`.

    Raises:
      ValueError: If a tensor is missing, misshapen, of another dtype, not finite, unknown or of no adapted layer,
        or an adapter has another rank or kind than the model's; the first ones are named.
    """
    flat = flat_parameters(params)
    found = _lycoris.read(file, _places(flat, convolutions), name_of)
    wrong = []
    for layer, own in adapters_in(flat).items():
        if (adapter := found.get(joined(layer))) is None:
            continue  # a file may hold fewer layers than the model adapts
        # The module would not read a tensor that it does not expect: it must be the module of this file.
        theirs, ours = ({name: value.shape for name, value in a.named().items()} for a in (adapter, own))
        if theirs != ours:
            wrong.append(f"{joined(layer)} is {_kind(adapter)} in the file, {_kind(own)} in the model")
            continue
        for name, value in (adapter.named() | {SCALE: adapter.scale}).items():
            path = (*layer, HOLDER, name)
            flat[path] = jnp.asarray(value, flat[path].dtype)
    if wrong:
        raise ValueError(f"{os.fspath(file)} was not loaded: {listed(wrong)}; make the model like the file.")
    return unflatten_dict(flat)


def _places(flat: Mapping[tuple[str, ...], jax.Array], convolutions: str) -> dict[str, Place]:
    """The kernels of adapted layers by path."""
    places: dict[str, Place] = {}
    for layer, adapter in adapters_in(flat).items():
        path = joined(layer)
        outputs = adapter.factors[1].shape[-1]
        places[path] = _place(path, flat[(*layer, "kernel")].shape, outputs, convolutions)
    return places


def _place(path: str, kernel: tuple[int, ...], outputs: int, convolutions: str) -> Place:
    if len(kernel) > 2 and re.search(convolutions, path):
        return Place(kernel, len(kernel) - 1, len(kernel) - 2)
    axes = 1
    while math.prod(kernel[-axes:]) < outputs:
        axes += 1
    return Place(kernel, len(kernel) - axes)


def _kind(adapter: Adapter) -> str:
    return (
        f"rank={adapter.factors[0].shape[-1]}, tucker={adapter.cores is not None}, "
        f"decompose={adapter.magnitude is not None}"
    )
