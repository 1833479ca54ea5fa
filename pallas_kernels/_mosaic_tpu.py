"""The TPU kernel: a symmetric product by tiles of the lower triangle, in Pallas. Not yet run on a TPU.

Each tile is computed once, k-slice by k-slice, and stored twice: as it is, and transposed to where its mirror image
belongs. Two tiles of the result wait in VMEM for their copies to main memory while the next is multiplied.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend import backend

from pallas_kernels._kernel_batch import launch_batch, rectangle, refusal, unfold
from pallas_kernels._xla import Operands

# Chips whose two cores run one program together and share its tiles ("megacore").
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")

# Rows of a tile. VMEM holds the largest: with slices of 1024 columns, 24 MiB with C.
_TILES = (256, 384, 512, 768, 1024)
_VMEM_BYTES = 64 * 2**20
_LARGEST_DEPTH = 1024

# A tile of T rows multiplies 2 T² k flops and loads 4 T k bytes: on a v5e, 197 TFLOP/s and 820 GB/s, below T = 480
# the loads take longer, and the stores of the result take a part of the memory too.
_ROWS_THAT_HIDE_LOADS = 600


def symmetric_product(o: Operands) -> jax.Array:
    """The product by the kernel."""
    return launch_batch("tpu", functools.partial(launch, cores=_require(o.x.dtype)), o)


def launch(
    x: jax.Array,
    y: jax.Array | None,
    c: jax.Array | None,
    scale: jax.Array,
    *,
    cores: int = 1,
    tile: int | None = None,
    depth: int | None = None,
) -> jax.Array:
    """One launch on [batch, m, k], padded with zeros to whole tiles and cut again.

    Args:
      x, y, c, scale: As `launch_batch` calls it.
      cores: The chip's cores, which share the tiles.
      tile, depth: Rows of a tile and columns of a slice, multiples of 128; None for the rules `pick_tile` and
        `pick_depth`.
    """
    batch, m, k = x.shape
    tile = tile or pick_tile(m)
    depth = depth or pick_depth(k)
    rows, columns = (-(-n // size) * size for n, size in ((m, tile), (k, depth)))
    t = rows // tile
    total = batch * t * (t + 1) // 2
    cores = min(cores, total)
    operands = [_padded(x, rows, columns), _padded(x if y is None else y, rows, columns)]
    operands += [] if c is None else [_padded(c, rows, rows)]
    grid = cores, -(-total // cores), columns // depth
    place = functools.partial(_place, total=total, in_core=grid[1], t=t)
    run = pl.pallas_call(
        functools.partial(_kernel, place=place, total=total, addend=c is not None),
        out_shape=jax.ShapeDtypeStruct((batch, rows, rows), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=_inputs(place, tile, depth, addend=c is not None),
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((tile, tile), jnp.float32),
                pltpu.VMEM((2, tile, tile), x.dtype),
                pltpu.VMEM((2, tile, tile), x.dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * total * tile * tile * columns,
            bytes_accessed=x.dtype.itemsize * (2 * total * tile * columns + batch * rows * rows),
            transcendentals=0,
        ),
        name="symmetric_product_tpu",
    )
    return run(scale, *operands)[:, :m, :m]


def pick_tile(m: int) -> int:
    """Rows of a tile for an m×m result: the least time for its triangle, at least two block rows where they fit."""
    if m <= _TILES[0]:
        return -(-m // 128) * 128

    def cost(tile):
        t = -(-m // tile)
        return t * (t + 1) // 2 * tile * max(tile, _ROWS_THAT_HIDE_LOADS)

    return min((tile for tile in _TILES if tile < m), key=cost)


def pick_depth(k: int) -> int:
    """Columns of a slice: the largest that cuts k, padded to a multiple of 128, without a remainder."""
    blocks = -(-k // 128)
    return 128 * max(n for n in range(1, _LARGEST_DEPTH // 128 + 1) if blocks % n == 0)


def _padded(a: jax.Array, rows: int, columns: int) -> jax.Array:
    missing = [(0, 0), (0, rows - a.shape[1]), (0, columns - a.shape[2])]
    return jnp.pad(a, missing) if any(after for _, after in missing) else a


def _place(core, step, *, total: int, in_core: int, t: int):
    """Matrix, block row and block column of a core's tile; a core that has none left repeats the last one."""
    number = jnp.minimum(core * in_core + step, total - 1)
    of_matrix = t * (t + 1) // 2
    _, width = rectangle(t)
    inside = lax.rem(number, of_matrix)
    return lax.div(number, of_matrix), *unfold(lax.div(inside, width), lax.rem(inside, width), t)


def _inputs(place, tile: int, depth: int, *, addend: bool) -> list[pl.BlockSpec]:
    """What the pipeline brings to VMEM for a tile: a slice of X's rows, one of Y's, and C's tile."""

    def x(core, step, k, scale):
        b, i, _ = place(core, step)
        return b, i, k

    def y(core, step, k, scale):
        b, _, j = place(core, step)
        return b, j, k

    specs = [pl.BlockSpec((1, tile, depth), x), pl.BlockSpec((1, tile, depth), y)]
    return specs + [pl.BlockSpec((1, tile, tile), lambda core, step, k, scale: place(core, step))] * addend


def _kernel(scale, x, y, *refs, place, total: int, addend: bool):
    *c, out, sums, direct, mirror, semaphores = refs
    core, step, k = (pl.program_id(axis) for axis in range(3))
    steps, slices = pl.num_programs(1), pl.num_programs(2)
    tile = sums.shape[0]

    def copies(step):
        """The copies of a tile and its mirror image from slot to main memory, and whether it is on the diagonal."""
        b, i, j = place(core, step)
        slot = lax.rem(step, 2)
        rows, columns = pl.ds(i * tile, tile), pl.ds(j * tile, tile)
        return (
            pltpu.make_async_copy(direct.at[slot], out.at[b, rows, columns], semaphores.at[slot, 0]),
            pltpu.make_async_copy(mirror.at[slot], out.at[b, columns, rows], semaphores.at[slot, 1]),
            i == j,
        )

    def mine(step):
        return (step >= 0) & (core * steps + step < total)

    def wait(step):
        own, image, diagonal = copies(step)

        @pl.when(mine(step))
        def _():
            own.wait()
            pl.when(~diagonal)(image.wait)

    product = lax.dot_general(x[0], y[0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    @pl.when(k == 0)
    def _():
        sums[...] = product

    @pl.when(k > 0)
    def _():
        sums[...] += product

    def store():
        b, _, _ = place(core, step)
        slot = lax.rem(step, 2)
        result = scale[b, 0] * sums[...]
        if addend:
            result += scale[b, 1] * c[0][0].astype(jnp.float32)
        transposed = result.T
        own, image, diagonal = copies(step)

        @pl.when(diagonal)
        def _():
            # Nothing says that the entries (i, j) and (j, i) of a product are rounded equally.
            row, column = (lax.broadcasted_iota(jnp.int32, result.shape, axis) for axis in (0, 1))
            direct[slot] = jnp.where(row >= column, result, transposed).astype(direct.dtype)

        @pl.when(~diagonal)
        def _():
            direct[slot] = result.astype(direct.dtype)
            mirror[slot] = transposed.astype(mirror.dtype)
            image.start()

        own.start()

    @pl.when(k == slices - 1)
    def _():
        wait(step - 2)  # its slot is needed again
        pl.when(mine(step))(store)

        @pl.when(step == steps - 1)
        def _():
            wait(step - 1)
            wait(step)


def _require(dtype: jnp.dtype) -> int:
    """The number of cores of a TPU that can run the kernel, or an error that says why not."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(refusal("tpu", f"takes bfloat16, got {jnp.dtype(dtype).name}"))
    device = jax.sharding.get_abstract_mesh().abstract_device or backend.get_default_device()
    if device.platform != "tpu":
        raise NotImplementedError(refusal("tpu", f"needs a TPU, the device is {device.device_kind!r}"))
    return 2 if device.device_kind in TWO_CORES else 1
