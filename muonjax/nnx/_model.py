"""Add, remove and merge the LoHa adapters of an NNX model, in place."""

import dataclasses
import re
from collections.abc import Callable, Iterator

from flax import nnx

from muonjax._adapters.config import LoHaConfig
from muonjax._arguments import errors_of
from muonjax._trees import joined, listed
from muonjax.nnx._loha import Layer, LoHa, adapter_of, function_of, new_adapter, place_of, plain_function


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

    Every `nnx.Linear`, `nnx.LinearGeneral` (the projections of an attention) and `nnx.Conv` that matches
    `path_rule` gets one. Kernels, their paths and the model's outputs stay as they are: ΔW = 0.

    Args:
      model: Any NNX module.
      path_rule: A regular expression searched in the layer's path, "blocks/0/attention/query", or a function
        of that path.
      rank: As in `LoHaLinear`.
      alpha: As in `LoHaLinear`.
      rank_stabilized: As in `LoHaLinear`.
      rank_dropout: As in `LoHaLinear`.
      decompose: As in `LoHaLinear`.
      tucker: The Tucker form for the convolutions with a window larger than 1.
      rngs: As in `LoHaLinear`.

    Returns:
      The paths of the adapted layers.

    Raises:
      ValueError: If no layer matches, a layer has an adapter already, or the rank does not fit. The model is then
        unchanged.

    Example:
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      ['query', 'value']

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    takes = (lambda path: bool(re.search(path_rule, path))) if isinstance(path_rule, str) else path_rule
    config = LoHaConfig(rank, alpha, rank_stabilized, rank_dropout, decompose, tucker)
    matched = [(path, layer) for path, layer in layers(model) if takes(path)]
    if not matched:
        paths = listed([path for path, _ in layers(model)], ", ")
        raise ValueError(f"add_loha(path_rule={path_rule!r}) matches none of the layers {paths}.")
    new = []
    for path, layer in matched:
        if adapter_of(layer) is not None:
            raise ValueError(f"add_loha: {path!r} has an adapter already; remove_loha removes it.")
        tucker = config.tucker and place_of(layer).window_size > 1
        with errors_of(f"add_loha: {path!r}"):
            new.append(new_adapter(layer, dataclasses.replace(config, tucker=tucker), rngs))
    for (_, layer), adapter in zip(matched, new, strict=True):
        setattr(layer, function_of(layer), nnx.data(adapter))
    return [path for path, _ in matched]


def remove_loha(model: nnx.Module) -> list[str]:
    """Removes every adapter from the model, in place: what `merge` added to the kernels stays there.

    After `merge` this leaves a plain model with the same outputs; without it, the model before `add_loha`.

    Args:
      model: Any NNX module with adapters.

    Returns:
      The paths of the layers that had one.

    Raises:
      ValueError: If the model has no adapter.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> muonjax.nnx.remove_loha(model)
      ['query', 'value']
    """
    found = adapted_layers(model, "remove_loha")
    for _, layer, _ in found:
        setattr(layer, function_of(layer), plain_function(layer))
    return [path for path, _, _ in found]


def merge(model: nnx.Module) -> None:
    """Adds every adapter's ΔW to its kernel, in place; the adapters do nothing until `unmerge`.

    Args:
      model: Any NNX module with adapters.

    Returns:
      None; the model is changed.

    Raises:
      ValueError: If the model has no adapter, or one that is merged already. The model is then unchanged.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> muonjax.nnx.merge(model)
      >>> muonjax.nnx.adapters(model)["query"].merged
      True
    """
    for _, layer, adapter in adapted_layers(model, "merge", merged=False):
        layer.kernel[...], norms = adapter.adapter().merge(layer.kernel[...])
        if adapter.norms is not None:
            adapter.norms[...] = norms
        adapter.merged = True


def unmerge(model: nnx.Module) -> None:
    """Subtracts every adapter's ΔW from its kernel again; exact up to rounding.

    Args:
      model: Any NNX module with merged adapters.

    Returns:
      None; the model is changed.

    Raises:
      ValueError: If the model has no adapter, or one that is not merged.

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
    for _, layer, adapter in adapted_layers(model, "unmerge", merged=True):
        norms = None if adapter.norms is None else adapter.norms[...]
        layer.kernel[...] = adapter.adapter().unmerge(layer.kernel[...], norms)
        adapter.merged = False


def layers(model: nnx.Module) -> Iterator[tuple[str, Layer]]:
    """Paths and layers that can be adapted, in the model's order."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear | nnx.LinearGeneral | nnx.Conv):
            yield joined(path), module


def adapters(model: nnx.Module) -> dict[str, LoHa]:
    """The adapters of a model by the path of their layer.

    Args:
      model: Any NNX module.

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
    found = {path: adapter_of(layer) for path, layer in layers(model)}
    return {path: adapter for path, adapter in found.items() if adapter is not None}


def adapted_layers(
    model: nnx.Module, call: str, *, merged: bool | None = None
) -> list[tuple[str, Layer, LoHa]]:
    """Path, layer and adapter of each adapted layer, one at least; with `merged` given, all of them must be so."""
    found = adapters(model)
    if not found:
        raise ValueError(f"{call}: the model has no LoHa adapter; add_loha adds one.")
    wrong = [path for path, adapter in found.items() if adapter.merged != merged]
    if wrong and merged is not None:
        state = "not merged" if merged else "merged already; merging twice would add ΔW twice"
        raise ValueError(f"{call}: {listed(wrong, ', ')}: {state}.")
    return [(path, layer, found[path]) for path, layer in layers(model) if path in found]
