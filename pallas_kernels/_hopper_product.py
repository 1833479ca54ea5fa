"""Call the Hopper kernel: whether it can run on the device, and padding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import backend

from pallas_kernels._hopper_tiles import SQUARE
from pallas_kernels._xla_product import Operands

# Streaming multiprocessors of an H100 SXM, where the device does not say.
CORES = 132
# Older versions of Pallas lack the transposed store that the mirror image needs.
NEEDS_JAX = (0, 11)


def symmetric_product(o: Operands) -> jax.Array:
    """The product by the kernel, in one launch; raises NotImplementedError where it can't run.

    A kernel can't be vectorized by JAX: `jax.vmap` launches it once for each index.
    """
    # The number of multiprocessors; this raises if the kernel can't run.
    cores = require(o.x, o.x.dtype)
    x, y, c, alpha, beta = o.with_one_batch_axis()
    # [batch, 2], as the kernel reads them from the device's memory
    scale = jnp.concatenate([alpha, beta], axis=-1)[:, 0]
    launch = jax.custom_batching.sequential_vmap(functools.partial(launched, cores))
    *batch, m, _ = o.x.shape
    return launch(x, y, c, scale).reshape(*batch, m, m)


def launched(
    cores: int, x: jax.Array, y: jax.Array | None, c: jax.Array | None, scale: jax.Array
) -> jax.Array:
    """alpha·X Yᴴ + beta·C [batch, m, m] in one launch, for operands X [batch, m, k] of any sizes.

    Y of None is X, and C of None is nothing. The operands are padded with zeros to sizes that the
    kernel takes.

    `cores` is the number of the device's multiprocessors; `scale` holds alpha and beta, [batch, 2].
    """
    # Imported only here, because JAX 0.10 lacks what the kernel's file imports.
    from pallas_kernels import _hopper_kernel

    m = x.shape[1]
    # None stays None. C becomes as large as the result of `launch`.
    x, y, c = jax.tree.map(_aligned, (x, y, c))
    # Zeros add nothing to the product, and the rows and columns that they make are cut off.
    out = _hopper_kernel.launch(x, y, c, scale, cores=cores)
    return out[:, :m, :m]


def _aligned(x: jax.Array) -> jax.Array:
    """The array with zeros appended up to multiples of 8 rows and 64 columns:
    [3, 100, 100] -> [3, 104, 128].

    Pallas asks for these of a tiled, swizzled copy.
    """
    _, rows, columns = x.shape
    missing_rows = -rows % 8
    missing_columns = -columns % SQUARE
    if missing_rows == missing_columns == 0:
        return x
    return jnp.pad(x, [(0, 0), (0, missing_rows), (0, missing_columns)])


# Parts of the names of all devices of compute capability 9.0: H20 stands in H200 and GH200 too.
_HOPPER = ("H100", "H800", "H20")


def require(x: jax.Array, dtype: jnp.dtype) -> int:
    """The number of multiprocessors of a device that can run the kernel,
    or an error that says why not."""
    if reason := _unsuitable(x, dtype):
        raise NotImplementedError(
            f"symmetric_product(implementation='hopper') {reason}; "
            'use "blocked" or "reference" instead.'
        )
    # A device that is only described calls them num_cores, an attached one core_count.
    device = _device()
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", None)
    return cores or CORES


def is_chosen(x: jax.Array, dtype: jnp.dtype) -> bool:
    """Whether the kernel can run and was measured."""
    # Other cards of this generation differ in clocks and memory; nobody has timed the kernel there.
    return _device().device_kind == "NVIDIA H100 80GB HBM3" and not _unsuitable(
        x, dtype
    )


def _unsuitable(x: jax.Array, dtype: jnp.dtype) -> str | None:
    """Why the kernel can't run on products of x, whose factors are cast to `dtype`,
    as the end of a sentence; or None.

    The sentence begins with "symmetric_product(implementation='hopper')".
    """
    if jax.__version_info__ < NEEDS_JAX:
        return f"needs JAX {'.'.join(map(str, NEEDS_JAX))} or newer, this is {jax.__version__}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {jnp.dtype(dtype).name}"
    if 0 in x.shape:
        return f"got the empty shape {x.shape}"
    # The default device, or that for which a program is compiled ahead of time. Instructions such
    # as wgmma exist on compute capability 9.0 alone.
    device = _device()
    if device.platform != "gpu" or not any(
        name in device.device_kind for name in _HOPPER
    ):
        return (
            "needs a GPU of compute capability 9.0 (H100, H200), "
            f"the device is {device.device_kind!r}"
        )
    if not _has_whole_matrices(x):
        return (
            "needs whole matrices on each device, and here they may be sharded, so that XLA would "
            "gather them on every device: call it inside of jax.shard_map over all axes, or under "
            "jax.set_mesh of a mesh of one device"
        )
    return None


def _has_whole_matrices(x: jax.Array) -> bool:
    """Whether a kernel gets whole matrices: there is one device,
    or x is inside of a `jax.shard_map` over all axes of its mesh.

    Elsewhere the sharding of x is unknown while it is traced,
    and XLA gathers a kernel's operands on every device.
    """
    # The mesh in context, of `jax.set_mesh` or `jax.shard_map`; without one that of the type of x
    context = jax.sharding.get_abstract_mesh()
    mesh = jax.typeof(x).sharding.mesh if context.empty else context
    if mesh.empty:
        # Without a mesh XLA may still use several devices. It uses one if the context describes the
        # device for which a program is compiled ahead of time, or if this process has only one.
        return bool(context.abstract_device) or jax.device_count() == 1
    # The axes that `jax.shard_map` maps over are manual, and each device sees its own part of x as
    # a whole.
    return mesh.size == 1 or mesh.are_all_axes_manual


def _device() -> Any:
    """The device, or its description where a program is lowered for a machine that isn't here."""
    return (
        jax.sharding.get_abstract_mesh().abstract_device or backend.get_default_device()
    )
