"""Read the header of a safetensors file, and refuse an invalid one before memory is allocated for tensors."""

import json
import math
import os
from typing import Any, NamedTuple

import numpy as np
from jax.numpy import bfloat16

_MOST_BYTES = 100_000_000  # of a header, as in the format's own reader
_MOST_AXES = 8  # of a tensor; a convolution in three dimensions has five
_DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
}


class TensorInfo(NamedTuple):
    """What the header says of one tensor.

    Attributes:
      dtype: A NumPy dtype; the header's own word in quotes where it is none that an adapter can have.
      shape: The tensor's shape.
    """

    dtype: Any
    shape: tuple[int, ...]


def read_header(file: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """The tensors of a file by name.

    Raises:
      ValueError: If the header is not one of the format, or does not fit the file.
    """
    size = os.path.getsize(file)
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(size - 8, _MOST_BYTES):
            raise ValueError(f"its header claims {length:,} bytes, in a file of {size:,}")
        text = opened.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is no JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError("its header is no UTF-8 text") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    return {name: _info(name, entry, size - 8 - length) for name, entry in header.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"its header has {name[:200]!r} twice")
        found[name] = value
    return found


def _info(name: str, entry: Any, size: int) -> TensorInfo:
    """The entry of one tensor, if its bytes are inside of the `size` bytes after the header."""
    name = name[:200]
    impossible = ValueError(f"its header has no possible dtype, shape and data_offsets for {name!r}")
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        well_formed = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= _MOST_AXES
        well_formed = well_formed and all(type(v) is int and 0 <= v < 2**63 for v in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        raise impossible from None
    if not well_formed:
        raise impossible
    if not begin <= end <= size:
        raise ValueError(f"{name!r} would be bytes {begin:,} to {end:,} of {size:,}")
    known = _DTYPES.get(dtype)
    if known is not None and math.prod(shape) * known.itemsize != end - begin:
        raise ValueError(f"{name!r} would have shape {tuple(shape)} and {dtype} in {end - begin:,} bytes")
    return TensorInfo(repr(dtype[:20]) if known is None else known, tuple(shape))
