"""Write the adapters of an NNX model to LyCORIS's files, and read them."""

import os
from collections.abc import Callable

from flax import nnx

from muonjax._adapters import lycoris as _lycoris
from muonjax._adapters.lycoris import layer_name
from muonjax._arguments import errors_of
from muonjax.nnx._loha import LoHa, adapter_of, check_layer, function_of, place_of
from muonjax.nnx._model import adapted_layers, layers


def save_lycoris(
    model: nnx.Module, file: str | os.PathLike[str], *, name_of: Callable[[str], str] = layer_name
) -> None:
    """Writes the model's adapters to a safetensors file, with the names and shapes of LyCORIS.

    Args:
      model: Any NNX module with adapters, merged or not.
      file: Its path; needs the `safetensors` package.
      name_of: From a layer's path to its name in the file; by default "blocks/0/query" is "lycoris_blocks_0_query".

    Raises:
      ValueError: If the model has no adapter, or two layers have one name.
    """
    found = adapted_layers(model, "save_lycoris")
    adapters = {path: (adapter.adapter(), place_of(layer)) for path, layer, adapter in found}
    _lycoris.write(file, adapters, name_of)


def load_lycoris(
    model: nnx.Module,
    file: str | os.PathLike[str],
    *,
    name_of: Callable[[str], str] = layer_name,
    rank_dropout: float = 0.0,
    rngs: nnx.Rngs | None = None,
) -> list[str]:
    """Reads the adapters of a LyCORIS file into the layers that it names, and replaces any that they have.

    Args:
      model: Any NNX module.
      file: A safetensors file of LoHa tensors, with DoRA's magnitudes on the output side if any.
      name_of: As in `save_lycoris`.
      rank_dropout: As in `LoHaLinear`.
      rngs: As in `LoHaLinear`.

    Returns:
      The paths of the adapted layers.

    Raises:
      ValueError: If a tensor is missing, misshapen, of another dtype, not finite, unknown or of no layer of the
        model (the first are named), or a layer has a merged adapter. The model is then unchanged.
    """
    by_path = dict(layers(model))
    found = _lycoris.read(file, {path: place_of(layer) for path, layer in by_path.items()}, name_of)
    for path in found:
        with errors_of(f"load_lycoris: {path!r}"):
            check_layer(by_path[path])
        if (own := adapter_of(by_path[path])) and own.merged:
            raise ValueError(f"load_lycoris: {path!r} has a merged adapter; unmerge the model first.")
    for path, adapter in found.items():
        layer, dtype = by_path[path], by_path[path].kernel.dtype
        adapter = adapter._replace(
            factors=tuple(factor.astype(dtype) for factor in adapter.factors),
            cores=adapter.cores and tuple(core.astype(dtype) for core in adapter.cores),
        )
        is_convolution = isinstance(layer, nnx.Conv)
        loha = LoHa(adapter, is_convolution=is_convolution, rank_dropout=rank_dropout, rngs=rngs)
        setattr(layer, function_of(layer), nnx.data(loha))
    return list(found)
