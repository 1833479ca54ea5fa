"""Beside the way of the gradient: LoHa adapters in the files of LyCORIS, read and written.

A file holds for each layer the tensors hada_w1_a … alpha, of PyTorch's shapes: a weight is [out, in, *window], and
ΔW = alpha / rank · (w1_a · w1_b) ∘ (w2_a · w2_b) has the outputs on its left. Here a kernel is [*window, in, out],
so each pair is transposed: our w1a is their w1_b, turned.
"""

import importlib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._adapters.adapter import Adapter
from muonjax._adapters.names import CORES, FACTORS, MAGNITUDE

_ALPHA = "alpha"
_NAMES = (*FACTORS, *CORES, MAGNITUDE, _ALPHA)


class Place(NamedTuple):
    """Where an adapter goes: a kernel's shape, and how its axes divide.

    Attributes:
      shape: the kernel's, [*in, *out] or [*window, in, out].
      inputs: how many of the first axes are summed over, the window's among them.
      window: how many of the first axes are a convolution's window.
    """

    shape: tuple[int, ...]
    inputs: int
    window: int = 0

    @property
    def outputs(self) -> int:
        """The number of output features."""
        return math.prod(self.shape[self.inputs :])


def layer_name(path: str) -> str:
    """LyCORIS's name of a layer: "blocks/0/query" is "lycoris_blocks_0_query"."""
    return "lycoris_" + path.replace("/", "_")


def to_tensors(adapter: Adapter, place: Place) -> dict[str, np.ndarray]:
    """An adapter as LyCORIS's tensors of one layer."""
    w1a, w1b, w2a, w2b = (np.asarray(factor) for factor in adapter.factors)
    if w1a.ndim != 2:
        raise ValueError(
            f"LyCORIS files hold adapters of one layer each; factors of shape {w1a.shape} are stacked: take them apart."
        )
    adapter.check(place.shape)
    rank = w1a.shape[1]
    window = place.shape[: place.window]
    if adapter.cores is not None:
        sides = {"hada_w1_a": w1b, "hada_w1_b": w1a.T, "hada_w2_a": w2b, "hada_w2_b": w2a.T}
        for name, core in zip(CORES, adapter.cores, strict=True):  # [*window, in, out] -> [out, in, *window]
            sides[name] = np.moveaxis(np.asarray(core), (-1, -2), (0, 1))
    else:
        sides = {"hada_w1_a": w1b.T, "hada_w2_a": w2b.T}
        for name, factor in (("hada_w1_b", w1a), ("hada_w2_b", w2a)):  # rows: window first -> channels first
            grid = factor.reshape(math.prod(window), -1, rank)
            sides[name] = grid.swapaxes(0, 1).reshape(-1, rank).T
    # Their scale is alpha / rank, rank-stabilized or not.
    sides[_ALPHA] = np.asarray(float(adapter.scale) * rank, np.float32)
    if adapter.magnitude is not None:
        sides[MAGNITUDE] = np.asarray(adapter.magnitude).reshape(-1, *[1] * max(1, place.window + 1))
    return {name: np.ascontiguousarray(value) for name, value in sides.items()}


def expected_shapes(place: Place, rank: int, tucker: bool, decompose: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of one layer's tensors in a file."""
    window = place.shape[: place.window]
    outputs, inputs = place.outputs, math.prod(place.shape[: place.inputs])
    shapes: dict[str, tuple[int, ...]]
    if tucker:
        inputs //= math.prod(window)
        shapes = dict.fromkeys(CORES, (rank, rank, *window))
        shapes |= {"hada_w1_a": (rank, outputs), "hada_w2_a": (rank, outputs)}
    else:
        shapes = {"hada_w1_a": (outputs, rank), "hada_w2_a": (outputs, rank)}
    shapes |= {"hada_w1_b": (rank, inputs), "hada_w2_b": (rank, inputs), _ALPHA: ()}
    if decompose:
        shapes[MAGNITUDE] = (outputs, *[1] * max(1, place.window + 1))
    return shapes


def from_tensors(tensors: Mapping[str, Any], place: Place, layer: str) -> tuple[Adapter | None, list[str]]:
    """The adapter of LyCORIS's tensors of one layer, or None, and what is wrong with them."""
    tucker = any(name in tensors for name in CORES)
    found = (tensors[name].shape for name in ("hada_w1_b", "hada_w2_b") if name in tensors)
    rank = max(1, next((shape[0] for shape in found if shape), 1))  # an empty or scalar one is misshapen
    shapes = expected_shapes(place, rank, tucker, MAGNITUDE in tensors)
    wrong = [f"{layer}.{name} is missing" for name in shapes if name not in tensors]
    wrong += [f"{layer}.{name} is unknown" for name in tensors if name not in _NAMES]
    wrong += [
        f"{layer}.{name} has shape {tuple(tensors[name].shape)}, the kernel {place.shape} needs {shape}"
        for name, shape in shapes.items()
        if name in tensors
        and tuple(tensors[name].shape) not in ((shape, (1,)) if name == _ALPHA else (shape,))
    ]
    if wrong:
        return None, wrong
    window = place.shape[: place.window]
    # Half precision files: float32 holds every value of theirs.
    named = {name: jnp.asarray(value, jnp.float32) for name, value in tensors.items()}
    scale = float(named[_ALPHA].reshape(())) / rank
    magnitude = named[MAGNITUDE].reshape(-1) if MAGNITUDE in named else None
    if tucker:
        factors = named["hada_w1_b"].T, named["hada_w1_a"], named["hada_w2_b"].T, named["hada_w2_a"]
        t1, t2 = (jnp.moveaxis(named[name], (0, 1), (-1, -2)) for name in CORES)
        return Adapter(factors, scale, (t1, t2), magnitude), []

    def rows(factor: jax.Array) -> jax.Array:
        grid = factor.T.reshape(-1, math.prod(window), rank)
        return grid.swapaxes(0, 1).reshape(-1, rank)

    factors = rows(named["hada_w1_b"]), named["hada_w1_a"].T, rows(named["hada_w2_b"]), named["hada_w2_a"].T
    return Adapter(factors, scale, None, magnitude), []


def write(
    file: str | os.PathLike[str],
    adapters: Mapping[str, tuple[Adapter, Place]],
    name_of: Callable[[str], str] = layer_name,
) -> None:
    """Writes adapters, by the path of their layer, to a safetensors file."""
    names = _unique_names(adapters, name_of)
    tensors = {
        f"{name}.{tensor}": jnp.asarray(value)
        for name, path in names.items()
        for tensor, value in to_tensors(*adapters[path]).items()
    }
    _safetensors().save_file(tensors, os.fspath(file))


def read(
    file: str | os.PathLike[str],
    places: Mapping[str, Place],
    name_of: Callable[[str], str] = layer_name,
) -> dict[str, Adapter]:
    """Reads a safetensors file: the adapters of all layers in it, by path, or, if anything is wrong, none.

    Args:
      file: its path.
      places: where adapters can go, by the path of the layer; more than the file has is fine.
      name_of: from a layer's path to its name in the file.

    Raises:
      ValueError: a tensor that is missing, misshapen, unknown, or of no layer in `places`; all are named.
    """
    layers: dict[str, dict[str, Any]] = {}
    for key, value in _safetensors().load_file(os.fspath(file)).items():
        layer, _, tensor = key.rpartition(".")
        layers.setdefault(layer, {})[tensor] = value
    names = _unique_names(places, name_of)
    found: dict[str, Adapter] = {}
    wrong = [] if layers else ["it holds no tensor"]
    for layer, tensors in layers.items():
        if layer not in names:
            wrong.append(f"no layer of the model is called {layer!r}")
            continue
        path = names[layer]
        adapter, problems = from_tensors(tensors, places[path], layer)
        wrong += problems
        if adapter is not None:
            found[path] = adapter
    if wrong:
        raise ValueError(f"{os.fspath(file)} was not loaded: {'; '.join(wrong)}.")
    return found


def _unique_names(paths: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for path in paths:
        name = name_of(path)
        if name in names:
            raise ValueError(
                f"The layers {names[name]!r} and {path!r} are both called {name!r}; give a name_of that "
                "tells them apart."
            )
        names[name] = path
    return names


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.flax")
    except ImportError:
        raise ImportError("LyCORIS files need safetensors: pip install safetensors.") from None
