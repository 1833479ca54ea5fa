"""Read and write LoHa adapters in the files of LyCORIS.

For each layer a file has tensors hada_w1_a … alpha in PyTorch's shapes: a weight is [out, in, *window], and
ΔW = alpha / rank · (w1_a · w1_b) ∘ (w2_a · w2_b) has the outputs on its left. Here a kernel is [*window, in, out],
so each pair is transposed: our w1a is their w1_b, transposed.

A file is untrusted input: everything that its header says is checked before a tensor is read.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from muonjax._adapters.adapter import CORES, MAGNITUDE, Adapter
from muonjax._adapters.config import Place
from muonjax._trees import listed

_ALPHA = "alpha"
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "I64": "int64"}


class TensorInfo(NamedTuple):
    """What the header says of one tensor; its dtype by NumPy's name where an adapter can have it."""

    dtype: str
    shape: tuple[int, ...]


def layer_name(path: str) -> str:
    """LyCORIS's name of a layer: "blocks/0/query" is "lycoris_blocks_0_query"."""
    return "lycoris_" + path.replace("/", "_")


def to_tensors(adapter: Adapter, place: Place) -> dict[str, np.ndarray]:
    """An adapter as LyCORIS's tensors of one layer."""
    w1a, w1b, w2a, w2b = (np.asarray(factor) for factor in adapter.factors)
    if w1a.ndim != 2:
        raise ValueError(
            f"LyCORIS files hold adapters of one layer each, and factors of shape {w1a.shape} are of stacked layers: "
            "save each layer's adapter by itself."
        )
    adapter.check(place.shape)
    rank, tucker = w1a.shape[1], adapter.cores is not None
    window = 1 if tucker else place.window_size
    tensors = {"hada_w1_a": w1b if tucker else w1b.T, "hada_w1_b": _exchanged(w1a, window).T}
    tensors |= {"hada_w2_a": w2b if tucker else w2b.T, "hada_w2_b": _exchanged(w2a, window).T}
    for name, core in zip(CORES, adapter.cores or (), strict=tucker):
        # [*window, in, out] -> [out, in, *window]
        tensors[name] = np.moveaxis(np.asarray(core), (-1, -2), (0, 1))
    # Their scale is alpha / rank, rank-stabilized or not.
    tensors[_ALPHA] = np.asarray(float(adapter.scale) * rank, np.float32)
    if adapter.magnitude is not None:
        tensors[MAGNITUDE] = np.asarray(adapter.magnitude).reshape(_magnitude_shape(place))
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def _magnitude_shape(place: Place) -> tuple[int, ...]:
    return place.outputs, *[1] * max(1, place.window + 1)


def expected_shapes(place: Place, rank: int, tucker: bool, decompose: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of one layer's tensors in a file."""
    a = (rank, place.outputs) if tucker else (place.outputs, rank)
    b = (rank, place.rows // (place.window_size if tucker else 1))
    shapes = {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": a, "hada_w2_b": b, _ALPHA: ()}
    if tucker:
        shapes |= dict.fromkeys(CORES, (rank, rank, *place.shape[: place.window]))
    return shapes | ({MAGNITUDE: _magnitude_shape(place)} if decompose else {})


def problems_of(tensors: Mapping[str, Any], place: Place, layer: str) -> list[str]:
    """What is wrong with one layer's tensors, of which only dtypes and shapes are read."""
    tucker = any(name in tensors for name in CORES)
    shapes = expected_shapes(place, _rank(tensors), tucker, MAGNITUDE in tensors)
    wrong = [f"{layer}.{name} is missing" for name in shapes if name not in tensors]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name not in shapes:
            wrong.append(f"{f'{layer}.{name}'!r} is unknown")
        # PyTorch makes an int64 of an alpha that is a Python int.
        elif str(tensor.dtype) not in (*_FLOATS, *(("int64",) if name == _ALPHA else ())):
            wrong.append(
                f"{layer}.{name} has dtype {tensor.dtype}; it must be floating point, 16 bits or more"
            )
        elif shape != shapes[name] and not (name == _ALPHA and shape == (1,)):
            wrong.append(f"{layer}.{name} has shape {shape}, the kernel {place.shape} needs {shapes[name]}")
    return wrong


def from_tensors(tensors: Mapping[str, Any], place: Place) -> Adapter:
    """The adapter of one layer's tensors, which have no `problems_of`; float32 is exact for half precision."""
    named = {name: jnp.asarray(value, jnp.float32) for name, value in tensors.items()}
    rank, tucker = _rank(tensors), CORES[0] in named
    channels = place.rows // place.window_size
    w1a, w2a = (_exchanged(named[b].T, channels) for b in ("hada_w1_b", "hada_w2_b"))
    w1b, w2b = (named[a] if tucker else named[a].T for a in ("hada_w1_a", "hada_w2_a"))
    return Adapter(
        (w1a, w1b, w2a, w2b),
        float(named[_ALPHA].reshape(())) / rank,
        tuple(jnp.moveaxis(named[t], (0, 1), (-1, -2)) for t in CORES) if tucker else None,  # pyright: ignore
        named[MAGNITUDE].reshape(-1) if MAGNITUDE in named else None,
    )


def _exchanged(factor: Any, size: int) -> Any:
    """A factor's rows, numbered by two indices, the first of this size, in the order with the second index first.

    The rows of a convolution's window are in front of its channels here, and behind them in a file.
    """
    return factor.reshape(size, -1, factor.shape[-1]).swapaxes(0, 1).reshape(factor.shape)


def _rank(tensors: Mapping[str, Any]) -> int:
    """The rank of the tensors; 1 where a tensor is empty or scalar, which the check of shapes then reports."""
    shapes = (tensors[name].shape for name in ("hada_w1_b", "hada_w2_b") if name in tensors)
    return max(1, next((shape[0] for shape in shapes if shape), 1))


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
    _package("safetensors.flax").save_file(tensors, os.fspath(file))


def read(
    file: str | os.PathLike[str],
    places: Mapping[str, Place],
    name_of: Callable[[str], str] = layer_name,
) -> dict[str, Adapter]:
    """Reads a safetensors file: the adapters of all layers in it, by path, or, if anything is wrong, none.

    Args:
      file: The file's path.
      places: The kernels that adapters can belong to, by the path of the layer; the file may have fewer.
      name_of: From a layer's path to its name in the file.

    Raises:
      ValueError: If the header is invalid, or a tensor is missing, misshapen, of another dtype, not finite, unknown or
        of no layer in `places`; the first ones are named.
    """
    package, names = _package("safetensors"), _unique_names(places, name_of)
    try:
        # It refuses a header that is invalid or claims what the file does not hold, before it allocates a tensor.
        with package.safe_open(os.fspath(file), framework="flax") as opened:
            layers: dict[str, dict[str, TensorInfo]] = {}
            for key in opened.keys():  # noqa: SIM118  # a file is no mapping
                layer, _, name = key.rpartition(".")
                tensor = opened.get_slice(key)
                dtype = str(tensor.get_dtype())
                info = TensorInfo(_DTYPES.get(dtype, dtype), tuple(tensor.get_shape()))
                layers.setdefault(layer, {})[name] = info
            _check_layers(layers, {name: places[path] for name, path in names.items()})
            return {
                names[layer]: _read_layer(opened, layer, tensors, places[names[layer]])
                for layer, tensors in layers.items()
            }
    except (ValueError, package.SafetensorError) as error:
        raise ValueError(f"{os.fspath(file)} was not loaded: {error}.") from None


def _check_layers(layers: Mapping[str, Mapping[str, TensorInfo]], places: Mapping[str, Place]) -> None:
    """Raises ValueError if a layer or a tensor does not fit."""
    wrong = [] if layers else ["it holds no tensor"]
    for layer, tensors in layers.items():
        if layer in places:
            wrong += problems_of(tensors, places[layer], layer)
        else:
            wrong.append(f"no layer of the model is called {layer!r}")
    if wrong:
        raise ValueError(listed(wrong))


def _read_layer(opened: Any, layer: str, names: Iterable[str], place: Place) -> Adapter:
    tensors = {name: opened.get_tensor(f"{layer}.{name}") for name in names}
    for name, value in tensors.items():
        if not jnp.all(jnp.isfinite(jnp.asarray(value, jnp.float32))):
            raise ValueError(f"{layer}.{name} is not finite in float32")
    return from_tensors(tensors, place)


def _unique_names(paths: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, str]:
    """The layers' paths by their names in a file."""
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


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError("LyCORIS files need safetensors: pip install safetensors.") from None
