"""Keep each matrix of a stack in a TPU's VMEM while a function of it is computed, in Pallas. Not yet run on a TPU.

A matrix is loaded once. What reads it comes first; the rest of the function works on arrays in VMEM, while the next
matrix is loaded into the same place. The result goes to main memory block by block, each while the next is multiplied.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._kernel_batch import folded
from pallas_kernels._mosaic_tpu import TWO_CORES
from pallas_kernels._triangle import rectangle, unfold

# Of each core, by the kind of device.
_VMEM_BYTES = {"TPU v5 lite": 128 << 20, "TPU v6 lite": 128 << 20, "TPU v5": 64 << 20, "TPU v5p": 64 << 20}

# What the compiler needs beside the arrays: sums of products, tiles to be transposed.
_SLACK = 16 << 20

# Columns of a block, at most. Of larger blocks the compiler keeps less in registers.
_LARGEST_WIDTH = 512

Block = Callable[[Any], jax.Array]


def padded(size: int) -> int:
    """The rows or columns that `size` takes in VMEM."""
    return -(-size // 128) * 128


def map_matrices(
    x: jax.Array,
    constants: Callable[[], Sequence[jax.Array]],
    scratch: Any,
    first: Callable[..., None],
    second: Callable[[Any], Block],
    *,
    name: str,
    kind: str,
    flops: float,
) -> jax.Array:
    """The function of each matrix of x [*batch, m, n], padded with zeros to multiples of 128 and cut again.

    Args:
      x: The matrices.
      constants: Gives matrices that all of them share.
      scratch: A tree of `jax.ShapeDtypeStruct`: arrays in VMEM.
      first: Of references to a matrix, to the scratch and to the constants: what reads the matrix.
      second: Of references to the scratch: the rest, up to a function that gives some columns of the result.
      name: Of the implementation, for errors.
      kind: Of the device.
      flops: Of the function of one matrix, for XLA's scheduler.

    Raises:
      NotImplementedError: If VMEM is too small, or the device unknown.
    """
    m, n = x.shape[-2:]
    shape = padded(m), padded(n)
    if kind not in _VMEM_BYTES:
        raise NotImplementedError(f"implementation={name!r} knows {', '.join(_VMEM_BYTES)}, not {kind!r}.")
    needs = _SLACK + sum(
        math.prod(s.shape) * jnp.dtype(s.dtype).itemsize
        for s in jax.tree.leaves((scratch, _buffers(shape, x.dtype), jax.eval_shape(constants)))
    )
    if needs > _VMEM_BYTES[kind]:
        raise NotImplementedError(
            f"implementation={name!r} needs {needs >> 20} MiB of VMEM for a matrix of {m} x {n}, {kind!r} has "
            f"{_VMEM_BYTES[kind] >> 20}; leave the implementation out."
        )

    def launch(x):
        x = jnp.pad(x, ((0, 0), (0, shape[0] - m), (0, shape[1] - n))) if shape != (m, n) else x
        count = len(x)
        cores = min(count, 2 if kind in TWO_CORES else 1)
        leaves, tree = jax.tree.flatten(scratch)
        shared = constants()
        call = pl.pallas_call(
            functools.partial(_kernel, first, second, tree, count, len(shared)),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(cores, -(-count // cores)),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)]
            + [pl.BlockSpec(memory_space=pltpu.VMEM)] * len(shared),
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.VMEM(s.shape, s.dtype) for s in (*_buffers(shape, x.dtype), *leaves)]
            + [pltpu.SemaphoreType.DMA((3,))],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=needs
            ),
            cost_estimate=pl.CostEstimate(
                flops=int(count * flops), bytes_accessed=2 * x.nbytes, transcendentals=0
            ),
            name=name,
        )
        return call(x, *shared)[:, :m, :n]

    return folded(name, launch, x.reshape(-1, m, n)).reshape(x.shape)


def _buffers(shape: tuple[int, int], dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """A matrix, and two blocks of the result."""
    m, n = shape
    return [jax.ShapeDtypeStruct(s, dtype) for s in ((m, n), (2, m, _width(n)))]


def _kernel(first, second, tree, count: int, constants: int, x, *refs):
    shared, (out, own, blocks, *scratch, semaphores) = refs[:constants], refs[constants:]
    scratch = tree.unflatten(scratch)
    step, steps = pl.program_id(1), pl.num_programs(1)
    number = pl.program_id(0) * steps + step
    width = blocks.shape[2]
    per_matrix = own.shape[1] // width

    def load(number):
        return pltpu.make_async_copy(x.at[number], own, semaphores.at[2])

    def store(block):
        slot = lax.rem(step * per_matrix + block, 2)
        columns = pl.ds(pl.multiple_of(block * width, 128), width)
        return pltpu.make_async_copy(blocks.at[slot], out.at[number, :, columns], semaphores.at[slot])

    @pl.when(number < count)
    def _():
        pl.when(step == 0)(load(number).start)
        load(number).wait()
        first(own, scratch, *shared)
        last = (step + 1 == steps) | (number + 1 == count)
        pl.when(~last)(load(number + 1).start)
        result = second(scratch)

        @pl.loop(0, per_matrix)
        def _(block):
            done = step * per_matrix + block
            # All copies are of one size, so this waits for the one that was in the same slot, two blocks ago.
            pl.when(done >= 2)(store(block).wait)
            columns = pl.ds(pl.multiple_of(block * width, 128), width)
            blocks[lax.rem(done, 2)] = result(columns).astype(blocks.dtype)
            store(block).start()

        @pl.when(last)
        def _():
            store(per_matrix - 1).wait()
            pl.when(step * per_matrix + per_matrix >= 2)(store(per_matrix - 2).wait)


def _width(n: int) -> int:
    return max(size for size in range(128, _LARGEST_WIDTH + 1, 128) if n % size == 0)


def each_block(n: int) -> Callable[[Callable[[Any], None]], None]:
    """Runs a function of each block of n columns; in a loop, for the compiler unrolls what is one operation."""
    width = _width(n)

    def run(body):
        pl.loop(0, n // width)(lambda block: body(pl.ds(pl.multiple_of(block * width, 128), width)))

    return run


def symmetric(out: Any, a: Any, y: Any, entries: Callable[[jax.Array, Any], jax.Array]) -> None:
    """A Y^T, known to be symmetric: tiles on and below the diagonal, each stored transposed as well.

    Args:
      out: [m, m], none of the others.
      a, y: [m, k].
      entries: Of a tile of sums in float32, and its place, to what is stored.
    """
    m = out.shape[0]
    size = 256 if m % 256 == 0 else 128
    t = m // size
    tiles, width = t * (t + 1) // 2, rectangle(t)[1]

    # Several tiles in one pass of the loop: the products of one hide what is left to do of another.
    together = next(number for number in (3, 2, 1) if tiles % number == 0)

    @pl.loop(0, tiles, unroll=together)
    def _(number):
        tile = unfold(lax.div(number, width), lax.rem(number, width), t)
        rows, columns = (pl.ds(pl.multiple_of(i * size, 128), size) for i in tile)
        stored = entries(with_transpose(a[rows, :], y[columns, :]), (rows, columns))
        out[columns, rows] = stored.T.astype(out.dtype)
        out[rows, columns] = stored.astype(out.dtype)


def with_transpose(a: jax.Array, y: jax.Array) -> jax.Array:
    """A Y^T, summed in float32."""
    return lax.dot_general(a, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def plain(a: jax.Array, b: jax.Array) -> jax.Array:
    """A B, summed in float32."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
