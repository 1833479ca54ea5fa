"""Call the Hopper kernel: whether it can run on the device, padding, choice of tiles."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic_gpu_tiles
from pallas_kernels._kernel_batch import launch_batch, refusal
from pallas_kernels._nvidia import suitable_gpu
from pallas_kernels._reference import Operands

# Older versions of Pallas lack the transposed store that the mirror image needs.
NEEDS_JAX = (0, 11)


def symmetric_product(o: Operands) -> jax.Array:
    """The product by the kernel."""
    return launch_batch("hopper", functools.partial(launched, require(o.x.dtype)), o)


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


def require(dtype: jnp.dtype) -> int:
    """The number of multiprocessors of a device that can run the kernel, or an error that says why not."""
    if jax.__version_info__ < NEEDS_JAX:
        reason = f"needs JAX {'.'.join(map(str, NEEDS_JAX))} or newer, this is {jax.__version__}"
        raise NotImplementedError(refusal("hopper", reason))
    # A kernel for Blackwell would be an implementation with its own name: only the schedule is shared.
    return suitable_gpu("hopper", dtype, (9,), "9.0 (H100, H200)").cores
