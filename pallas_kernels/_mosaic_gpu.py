"""Call the Hopper kernel: whether it can run on the device, padding, choice of tiles."""

import functools

import jax
import jax.numpy as jnp
from jax.extend import backend

from pallas_kernels import _mosaic_gpu_tiles
from pallas_kernels._kernel_batch import launch_batch, refusal

# Older versions of Pallas lack the transposed store that the mirror image needs.
NEEDS_JAX = (0, 11)


def symmetric_product(
    x: jax.Array, y: jax.Array | None, c: jax.Array | None, alpha: jax.Array, beta: jax.Array
) -> jax.Array:
    """``alpha·X Yᵀ + beta·C`` by the kernel; the arguments are checked by the public op."""
    cores = _require(x.dtype)
    return launch_batch("hopper", functools.partial(launched, cores), x, y, c, alpha, beta)


def launched(
    cores: int, x: jax.Array, y: jax.Array | None, c: jax.Array | None, scale: jax.Array
) -> jax.Array:
    """The launch on one device, for its part of the batch: padded with zeros, and cut again."""
    from pallas_kernels import _mosaic_gpu_sm90  # only here: JAX 0.10 can't run it

    size, m, _ = x.shape
    y, c = (None if a is None else _aligned(a) for a in (y, c))
    out = _mosaic_gpu_sm90.launch(
        _aligned(x), y, c, scale, tiles=_mosaic_gpu_tiles.pick(m, size, cores), cores=cores
    )
    return out[:, :m, :m]


def _aligned(x: jax.Array) -> jax.Array:
    """Zeros appended up to multiples of 8 rows and 64 columns, as Pallas asks of a tiled, swizzled copy."""
    missing = [
        (0, -n % multiple) for n, multiple in zip(x.shape, (1, 8, _mosaic_gpu_tiles.SQUARE), strict=True)
    ]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x


def _require(dtype: jnp.dtype) -> int:
    """The number of multiprocessors of a device that can run the kernel, or an error that says why not."""
    if jax.__version_info__ < NEEDS_JAX:
        raise NotImplementedError(
            refusal(
                "hopper", f"needs JAX {'.'.join(map(str, NEEDS_JAX))} or newer, this is {jax.__version__}"
            )
        )
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            refusal("hopper", f"takes bfloat16 and float16, got {jnp.dtype(dtype).name}")
        )
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:  # lowering for a machine that isn't here
        if device.platform == "gpu" and any(name in device.device_kind for name in _HOPPER):
            return device.num_cores or _mosaic_gpu_tiles.CORES
        kind = device.device_kind
    else:
        device = backend.get_default_device()
        if device.platform == "gpu" and getattr(device, "compute_capability", None) == "9.0":
            return device.core_count
        kind = device.device_kind
    # A kernel for Blackwell would be an implementation with its own name: only the schedule is shared.
    raise NotImplementedError(
        refusal("hopper", f"needs a GPU of compute capability 9.0 (H100, H200), the device is {kind!r}")
    )


_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
