"""The kernel: `composition` on Hopper, one matrix for each CTA, in Pallas on Mosaic GPU. Not yet run on a GPU.

R comes in once, everything else stays in shared memory and registers, and alpha T + beta I goes out. A warpgroup has 64
rows of each matrix. All of them are symmetric, so that each product is A Bᵀ of rows in memory; a barrier of the
warpgroups stands where one reads what the others write.

Products are of float16 with float32 sums. Q is rounded, and is then what the step is made of; R is kept as the sum of
two float16 numbers, and multiplied as both.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu_sm90 import transforms

# Rows of a warpgroup.
ROWS = 64


def _kernel(r_gmem, out_gmem, *, rows: Sequence[tuple[float, float, float]], alpha: float, beta: float):
    _, m, _ = r_gmem.shape
    groups = m // ROWS

    def shared(dtype):
        return plgpu.SMEM((m, m), dtype, transforms=transforms(m, dtype))

    @functools.partial(
        pl.run_scoped,
        total_smem=shared(jnp.float32),
        high_smem=shared(jnp.float16),
        low_smem=shared(jnp.float16),
        q_smem=shared(jnp.float16),
        t_smem=shared(jnp.float16),
        loaded=plgpu.Barrier(num_barriers=groups),
        met=plgpu.Barrier(num_arrivals=groups),
        collective_axes="wg",
    )
    def _(total_smem, high_smem, low_smem, q_smem, t_smem, loaded, met):
        wg, matrix = lax.axis_index("wg"), lax.axis_index("matrix")
        own = pl.ds(wg * ROWS, ROWS)

        def product(*pairs):
            """The sum of A Bᵀ over the pairs of A, of which the own rows, and B."""

            @functools.partial(pl.run_scoped, accumulator=plgpu.WGMMAAccumulatorRef((ROWS, m), jnp.float32))
            def result(accumulator):
                for a, b in pairs:
                    plgpu.wgmma(accumulator, a.at[own], b.transpose((1, 0)))
                return accumulator[...]

            return result

        def meet():
            plgpu.commit_smem()
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def split(value):
            """Own rows of R, as a sum of two numbers."""
            high = value.astype(jnp.float16)
            high_smem[own] = high
            low_smem[own] = (value - high.astype(jnp.float32)).astype(jnp.float16)

        def plus_r(value):
            return value + high_smem[own].astype(jnp.float32) + low_smem[own].astype(jnp.float32)

        plgpu.copy_gmem_to_smem(r_gmem.at[matrix, own], total_smem.at[own], loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])
        split(total_smem[own])
        total_smem[own] = jnp.zeros((ROWS, m), jnp.float32)
        meet()

        @pl.loop(0, len(rows))  # unrolled, the loop's addresses would take more registers than there are
        def _(step):
            def own_of(numbers):
                return functools.reduce(
                    lambda found, i: jnp.where(step == i, numbers[i], found), range(1, len(rows)), numbers[0]
                )

            square, linear, factor = map(
                own_of, zip(*((c / b, b / a, a**2) for a, b, c in rows), strict=True)
            )
            q = linear * plus_r(square * product((high_smem, high_smem)))
            q_smem[own] = q.astype(jnp.float16)
            t_smem[own] = total_smem[own].astype(jnp.float16)
            meet()
            more = product((t_smem, q_smem))
            total_smem[own] = more + q_smem[own].astype(jnp.float32) + total_smem[own]

            @pl.when(step < len(rows) - 1)
            def _():
                once = plus_r(product((q_smem, high_smem), (q_smem, low_smem)))
                meet()  # all have read R
                split(once)
                plgpu.commit_smem()
                split(factor * plus_r(product((high_smem, q_smem), (low_smem, q_smem))))
                meet()

        row, column = (lax.broadcasted_iota(jnp.int32, (ROWS, m), axis) for axis in (0, 1))
        out = alpha * total_smem[own]
        t_smem[own] = jnp.where(row + wg * ROWS == column, out + beta, out).astype(jnp.float16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(t_smem.at[own], out_gmem.at[matrix, own])
        plgpu.wait_smem_to_gmem(0)


def launch(r: jax.Array, rows: Sequence[tuple[float, float, float]], alpha: float, beta: float) -> jax.Array:
    """One launch: R [batch, m, m], m = 64 or 128, gives alpha T + beta I in float16."""
    batch, m, _ = r.shape
    run = plgpu.kernel(
        functools.partial(_kernel, rows=rows, alpha=alpha, beta=beta),
        out_type=jax.ShapeDtypeStruct(r.shape, jnp.float16),
        grid=(batch,),
        grid_names=("matrix",),
        num_threads=m // ROWS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    with jax.named_scope(f"polynomials:{len(rows)}"):  # in profiles, and for counting
        return run(r)
