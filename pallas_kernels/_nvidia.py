"""The NVIDIA GPU that a program is compiled for, attached or only described."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import backend

from pallas_kernels._kernel_batch import refusal

# The major compute capability of devices that are only described, by a part of their name.
_DESCRIBED = {"H100": 9, "H200": 9, "H800": 9, "H20": 9, "GH200": 9, "B200": 10, "B300": 10}
# Streaming multiprocessors, where a description does not say.
_CORES = {9: 132, 10: 148}


class Gpu(NamedTuple):
    """Its major compute capability, and the number of its multiprocessors."""

    capability: int
    cores: int


def suitable_gpu(implementation: str, dtype: jnp.dtype, capabilities: tuple[int, ...], named: str) -> Gpu:
    """The GPU, if it and `dtype` suit a kernel; otherwise an error that says what does not.

    Args:
      implementation: The kernel's name.
      dtype: The dtype of the operands: bfloat16 and float16 suit.
      capabilities: Major compute capabilities that suit.
      named: These in words.
    """
    if dtype not in (jnp.bfloat16, jnp.float16):
        reason = f"takes bfloat16 and float16, got {jnp.dtype(dtype).name}"
        raise NotImplementedError(refusal(implementation, reason))
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:  # lowering for a machine that isn't here
        capability = next((found for name, found in _DESCRIBED.items() if name in device.device_kind), 0)
        cores = device.num_cores
    else:
        device = backend.get_default_device()
        major = str(getattr(device, "compute_capability", "")).partition(".")[0]
        capability = int(major) if major.isdigit() else 0  # AMD's are names
        cores = getattr(device, "core_count", None)
    if device.platform != "gpu" or capability not in capabilities:
        reason = f"needs a GPU of compute capability {named}, the device is {device.device_kind!r}"
        raise NotImplementedError(refusal(implementation, reason))
    return Gpu(capability, cores or _CORES[capability])
