"""Call the Hopper kernel: whether it can run on the device, padding, and the one visible rule that picks its tiles.

A cooperative thread array (CTA) owns a tile of ``rows·block`` by ``block`` entries of the result. Two
compute warpgroups halve its rows. Only tiles that touch the lower triangle are visited: a triangle of ``t``
block rows has ``t(t+1)/2`` of them instead of ``t²``, so the gain depends on how well that number fills the
chip's multiprocessors ("waves"), and the rule below counts just that.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import backend

from pallas_kernels._kernel_batch import launch_batch, refusal
from pallas_kernels._xla import Operands

# Elements of k that one stage of the pipeline loads: 64 half-precision numbers fill the 128-byte swizzle.
DEPTH = 64
# The epilogue stores squares of this size: 64 rows are what one warpgroup's wgmma writes.
SQUARE = 64
# Shared memory that one CTA may use on compute capability 9.0, in bytes (CUDA programming guide, table of
# technical specifications), less a little for barriers and alignment.
SHARED_MEMORY = 227 * 1024 - 2048
# Streaming multiprocessors of an H100 SXM, where the device does not say.
CORES = 132


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of one launch.

    Attributes:
      block: columns of a CTA's tile, 64 or 128.
      rows: the tile's rows in units of `block`, 1 or 2; each warpgroup needs at least 64 rows.
      stages: how many k-slices of X and Y are in flight, at least 2.
      slots: how many 64-squares of the result, each with its mirror image, may wait for their store, 1 or 2.
      group: block columns that the schedule keeps together for the L2 cache.
    """

    block: int = 128
    rows: int = 1
    stages: int = 4
    slots: int = 2
    group: int = 8

    def __post_init__(self):
        if self.shared_memory(addend=False) > SHARED_MEMORY:
            raise ValueError(
                f"{self} needs {self.shared_memory(addend=False)} bytes of shared memory; a CTA on Hopper "
                f"has {SHARED_MEMORY}. Take fewer stages or slots."
            )

    @property
    def squares(self) -> int:
        """64-squares of the result that one warpgroup stores."""
        return (self.rows * self.block // 2 // SQUARE) * (self.block // SQUARE)

    def shared_memory(self, *, addend: bool) -> int:
        """Bytes for the pipeline, the result's squares and their mirror images, and C's squares."""
        square = 2 * SQUARE * SQUARE
        slots = min(self.slots, self.squares)
        stage = 2 * (self.rows + 1) * self.block * DEPTH
        return self.stages * stage + 2 * slots * 2 * square + addend * 2 * min(2, self.squares) * square

    def with_addend(self) -> "Tiles":
        """The same tiles with room for C: slots, then stages, make way."""
        tiles = self
        if tiles.shared_memory(addend=True) > SHARED_MEMORY and tiles.slots > 1:
            tiles = dataclasses.replace(tiles, slots=1)
        while tiles.shared_memory(addend=True) > SHARED_MEMORY:
            tiles = dataclasses.replace(tiles, stages=tiles.stages - 1)
        return tiles

    def count(self, m: int) -> int:
        """CTA tiles that touch the lower triangle of an m×m result."""
        t = math.ceil(m / (self.rows * self.block))
        return self.rows * t * (t + 1) // 2

    def waves(self, m: int, batch: int, cores: int = CORES) -> int:
        """Rounds in which every multiprocessor works on one tile."""
        return math.ceil(batch * self.count(m) / cores)


# What one round costs for each shape of tile, in units of a 128×128 tile's. From the bytes that a tile loads for each
# multiply-add: no tile was timed alone. Only the order of the candidates depends on it.
_COST = {(128, 1): 1.0, (128, 2): 1.85, (64, 2): 0.6}

SHAPES = (
    Tiles(block=128, rows=1, stages=5, slots=2),
    Tiles(block=128, rows=2, stages=4, slots=1),
    Tiles(block=64, rows=2, stages=7, slots=1),
)


def pick(m: int, batch: int, cores: int = CORES) -> Tiles:
    """The tiles with the fewest waves, weighed by what a wave of theirs costs."""
    return min(SHAPES, key=lambda tiles: tiles.waves(m, batch, cores) * _COST[tiles.block, tiles.rows])


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
    out = _mosaic_gpu_sm90.launch(_aligned(x), y, c, scale, tiles=pick(m, size, cores), cores=cores)
    return out[:, :m, :m]


def _aligned(x: jax.Array) -> jax.Array:
    """Zeros appended up to multiples of 8 rows and 64 columns, as Pallas asks of a tiled, swizzled copy."""
    missing = [(0, -n % multiple) for n, multiple in zip(x.shape, (1, 8, SQUARE), strict=True)]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x


# Parts of the names of all devices of compute capability 9.0: H20 stands in H200 and GH200 too.
_HOPPER = ("H100", "H800", "H20")


def require(dtype: jnp.dtype) -> int:
    """The number of multiprocessors of a device that can run the kernel, or an error that says why not."""
    if reason := _unsuitable(dtype):
        raise NotImplementedError(refusal("hopper", reason))
    device = _device()
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or CORES


def is_chosen(x: jax.Array, dtype: jnp.dtype) -> bool:
    """Whether the kernel can run and was measured, and takes whole matrices there.

    Under `jit` alone the sharding of x is unknown while it is traced: there has to be one device, or all of them are
    inside of `jax.shard_map`.
    """
    context = jax.sharding.get_abstract_mesh()
    mesh = jax.typeof(x).sharding.mesh if context.empty else context
    alone = mesh.size == 1 if not mesh.empty else context.abstract_device or jax.device_count() == 1
    measured = _device().device_kind == "NVIDIA H100 80GB HBM3"
    return measured and bool(alone or mesh.are_all_axes_manual) and not _unsuitable(dtype)


def _unsuitable(dtype: jnp.dtype) -> str | None:
    """Why the kernel can't run; a kernel for Blackwell would be an implementation with its own name."""
    if jax.__version_info__ < NEEDS_JAX:
        return f"needs JAX {'.'.join(map(str, NEEDS_JAX))} or newer, this is {jax.__version__}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {jnp.dtype(dtype).name}"
    device = _device()
    if device.platform == "gpu" and any(name in device.device_kind for name in _HOPPER):
        return None
    return f"needs a GPU of compute capability 9.0 (H100, H200), the device is {device.device_kind!r}"


def _device() -> Any:
    """The device, or its description where a program is lowered for a machine that isn't here."""
    return jax.sharding.get_abstract_mesh().abstract_device or backend.get_default_device()
