"""The NNX door's functions of a model with LoHa adapters: add, remove, merge, save, load; all in place."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from muonjax._adapters import lycoris as _lycoris
from muonjax._adapters.adapter import fresh_adapter
from muonjax._adapters.lycoris import Place, layer_name
from muonjax.nnx._loha import LoHa, check_plain, function_of, plain_function


def add_loha(
    model: nnx.Module,
    path_rule: str | Callable[[str], bool],
    *,
    rank: int,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    rank_dropout: float = 0.0,
    decompose: bool = False,
    tucker: bool = False,
    rngs: nnx.Rngs,
) -> list[str]:
    """Gives LoHa adapters to layers of an existing model, in place.

    Every `nnx.Linear`, `nnx.LinearGeneral` (the projections of an attention) and `nnx.Conv` that `path_rule`
    takes gets one. Kernels, their paths and the model's outputs stay as they are: ΔW = 0.

    Args:
      model: any NNX module.
      path_rule: a regular expression searched in the layer's path, "blocks/0/attention/query", or a function
        of that path.
      rank: as in `LoHaLinear`.
      alpha: as in `LoHaLinear`.
      rank_stabilized: as in `LoHaLinear`.
      rank_dropout: as in `LoHaLinear`.
      decompose: as in `LoHaLinear`.
      tucker: the Tucker form for the convolutions with a window larger than 1.
      rngs: as in `LoHaLinear`.

    Returns:
      The paths of the adapted layers.

    Raises:
      ValueError: no layer matches, a layer has an adapter already or a rank that does not fit; the model is
        then as it was.

    Example:
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      ['query', 'value']

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    takes = (lambda path: bool(re.search(path_rule, path))) if isinstance(path_rule, str) else path_rule
    adapters = []
    for path, layer in _layers(model):
        if not takes(path):
            continue
        if _holder(layer) is not None:
            raise ValueError(f"add_loha: {path!r} has an adapter already; a second one would hide the first.")
        window = _check_layer("add_loha", path, layer)
        kernel = layer.kernel[...]
        try:
            adapter = fresh_adapter(
                kernel,
                rngs.params(),
                rank=rank,
                alpha=alpha,
                rank_stabilized=rank_stabilized,
                decompose=decompose,
                inputs=_inputs(layer),
                window=window,
                tucker=tucker and any(size > 1 for size in kernel.shape[:window]),
            )
        except ValueError as error:
            raise ValueError(f"add_loha: {path!r}: {error}") from None
        holder = LoHa(adapter, is_convolution=window > 0, rank_dropout=rank_dropout, rngs=rngs)
        adapters.append((path, layer, holder))
    if not adapters:
        raise ValueError(
            f"add_loha(path_rule={path_rule!r}) takes none of the layers "
            f"{', '.join(path for path, _ in _layers(model))}."
        )
    for _, layer, adapter in adapters:
        setattr(layer, function_of(layer), nnx.data(adapter))
    return [path for path, _, _ in adapters]


def remove_loha(model: nnx.Module) -> list[str]:
    """Takes every adapter out of the model, in place: what `merge` put into the kernels stays there.

    After `merge` this leaves a plain model that does the same; without it, the model before `add_loha`.

    Args:
      model: any NNX module with adapters.

    Returns:
      The paths of the layers that had one.

    Raises:
      ValueError: no adapter in the model.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> muonjax.nnx.remove_loha(model)
      ['query', 'value']
    """
    found = [(path, layer) for path, layer in _layers(model) if _holder(layer) is not None]
    if not found:
        raise ValueError("remove_loha: the model has no LoHa adapter.")
    for _, layer in found:
        setattr(layer, function_of(layer), plain_function(layer))
    return [path for path, _ in found]


def merge(model: nnx.Module) -> None:
    """Adds every adapter's ΔW to its kernel, in place; the adapters rest until `unmerge`.

    Args:
      model: any NNX module with adapters.

    Returns:
      None; the model is changed.

    Raises:
      ValueError: no adapter in the model, or one that is merged already; the model is then as it was.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> muonjax.nnx.merge(model)
      >>> muonjax.nnx.adapters(model)["query"].merged
      True
    """
    for layer, adapter in _adapted(model, "merge", merged=True):
        layer.kernel[...], norms = adapter.adapter().merge(layer.kernel[...])
        if adapter.norms is not None:
            adapter.norms[...] = norms
        adapter.merged = True


def unmerge(model: nnx.Module) -> None:
    """Takes every adapter's ΔW out of its kernel again, to rounding.

    Args:
      model: any NNX module with merged adapters.

    Returns:
      None; the model is changed.

    Raises:
      ValueError: no adapter in the model, or one that is not merged.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> muonjax.nnx.merge(model)
      >>> muonjax.nnx.unmerge(model)
      >>> muonjax.nnx.adapters(model)["query"].merged
      False
    """
    for layer, adapter in _adapted(model, "unmerge", merged=False):
        norms = None if adapter.norms is None else adapter.norms[...]
        layer.kernel[...] = adapter.adapter().unmerge(layer.kernel[...], norms)
        adapter.merged = False


def adapters(model: nnx.Module) -> dict[str, LoHa]:
    """The adapters of a model by the path of their layer.

    Args:
      model: any NNX module.

    Returns:
      A dict from the layer's path, "blocks/0/query", to its `LoHa`.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> sorted(muonjax.nnx.adapters(model))
      ['query', 'value']
    """
    found = {path: _holder(layer) for path, layer in _layers(model)}
    return {path: adapter for path, adapter in found.items() if adapter is not None}


def save_lycoris(
    model: nnx.Module, file: str | os.PathLike[str], *, name_of: Callable[[str], str] = layer_name
) -> None:
    """Writes the model's adapters as LyCORIS names and shapes them, to a safetensors file.

    Args:
      model: with adapters, merged or not.
      file: its path; needs the `safetensors` package.
      name_of: from a layer's path, "blocks/0/query", to its name in the file; "lycoris_blocks_0_query".

    Raises:
      ValueError: no adapter in the model, or two layers of one name.
    """
    found = {
        path: (holder.adapter(), _place(layer))
        for path, layer in _layers(model)
        if (holder := _holder(layer)) is not None
    }
    if not found:
        raise ValueError("save_lycoris: the model has no LoHa adapter; add_loha adds one.")
    _lycoris.write(file, found, name_of)


def load_lycoris(
    model: nnx.Module,
    file: str | os.PathLike[str],
    *,
    name_of: Callable[[str], str] = layer_name,
    rank_dropout: float = 0.0,
    rngs: nnx.Rngs | None = None,
) -> list[str]:
    """Gives the layers that a LyCORIS file names the file's adapters, in place of any that they have.

    Args:
      model: any NNX module.
      file: a safetensors file of LoHa tensors, with DoRA's magnitudes on the output side if any.
      name_of: from a layer's path to its name in the file.
      rank_dropout: as in `LoHaLinear`.
      rngs: as in `LoHaLinear`.

    Returns:
      The paths of the adapted layers.

    Raises:
      ValueError: a tensor that is missing, misshapen, unknown or of no layer, all named; a layer with a merged
        adapter. The model is then as it was.
    """
    layers = dict(_layers(model))
    found = _lycoris.read(file, {path: _place(layer) for path, layer in layers.items()}, name_of)
    for path in found:
        _check_layer("load_lycoris", path, layers[path])
        if (holder := _holder(layers[path])) is not None and holder.merged:
            raise ValueError(f"load_lycoris: {path!r} has a merged adapter; unmerge the model first.")
    for path, adapter in found.items():
        layer, dtype = layers[path], layers[path].kernel.dtype
        adapter = adapter._replace(
            factors=tuple(factor.astype(dtype) for factor in adapter.factors),
            cores=adapter.cores and tuple(core.astype(dtype) for core in adapter.cores),
        )
        holder = LoHa(
            adapter, is_convolution=isinstance(layer, nnx.Conv), rank_dropout=rank_dropout, rngs=rngs
        )
        setattr(layer, function_of(layer), nnx.data(holder))
    return list(found)


def _place(layer: Any) -> Place:
    window = len(layer.kernel_size) if isinstance(layer, nnx.Conv) else 0
    return Place(tuple(layer.kernel.shape), _inputs(layer), window)


def _adapted(model: nnx.Module, call: str, *, merged: bool) -> list[tuple[Any, LoHa]]:
    found = [(path, layer, _holder(layer)) for path, layer in _layers(model)]
    found = [(path, layer, adapter) for path, layer, adapter in found if adapter is not None]
    if not found:
        raise ValueError(f"{call}: the model has no LoHa adapter; add_loha adds one.")
    wrong = [path for path, _, adapter in found if adapter.merged == merged]
    if wrong:
        state = "merged already; merging twice would add ΔW twice" if merged else "not merged"
        raise ValueError(f"{call}: {', '.join(wrong)}: {state}.")
    return [(layer, adapter) for _, layer, adapter in found]


def _layers(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Layers that can be adapted, in the model's order."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear | nnx.LinearGeneral | nnx.Conv):
            yield "/".join(map(str, path)), module


def _holder(layer: Any) -> LoHa | None:
    value = getattr(layer, function_of(layer))
    return value if isinstance(value, LoHa) else None


def _inputs(layer: Any) -> int:
    """How many axes of the kernel, from its first, are summed over."""
    if isinstance(layer, nnx.Conv):
        return len(layer.kernel_size) + 1
    return len(layer.in_features) if isinstance(layer.in_features, tuple) else 1


def _check_layer(call: str, path: str, layer: Any) -> int:
    """How many axes of the kernel are a window; raises ValueError for what can't be adapted."""
    if _holder(layer) is None:
        check_plain(layer, f"{call}: {path!r}")
    if isinstance(layer, nnx.Conv):
        window = len(layer.kernel_size)
        axes = window + 2
    else:
        if getattr(layer, "batch_axis", None):
            raise ValueError(f"{call}: {path!r} multiplies a batch of matrices; leave it out.")
        outputs = layer.out_features if isinstance(layer.out_features, tuple) else (layer.out_features,)
        window, axes = 0, _inputs(layer) + len(outputs)
    if layer.kernel.ndim != axes:
        raise ValueError(
            f"{call}: {path!r} is a stack of layers, its kernel of shape {layer.kernel.shape}; make the stack "
            "of LoHaLinear, or adapt inside nnx.vmap."
        )
    return window
