"""The kernel: a symmetric product on Hopper, in Pallas on Mosaic GPU.

One persistent CTA on each multiprocessor walks over the tiles of the lower triangle. In it one
warpgroup loads (TMA), two multiply (wgmma) and store each 64-square twice: as it is, and transposed
to where its mirror image belongs. docs/kernels.md has the drawings.

The structure of the pipeline follows `jax/experimental/pallas/ops/gpu/hopper_matmul_mgpu.py`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._hopper_tiles import (
    BLOCK,
    DEPTH,
    GROUP,
    SQUARE,
    STAGES,
    num_tiles,
    rectangle,
    unfold,
)

# Registers of a thread: 512 are shared by the three threads of the same rank, one of each
# warpgroup. The one that loads gives up what it doesn't need (`setmaxnreg`) to the two that hold
# the accumulators.
LOAD_REGISTERS = 40
MULTIPLY_REGISTERS = 232


def triangle(step: jax.Array, t: int) -> tuple[jax.Array, jax.Array]:
    """The `step`-th tile (i, j) with ``0 <= j <= i < t``,
    in an order that reuses what the L2 cache holds.

    `planar_snake` runs through the rectangle that the triangle folds into in stripes of `GROUP`
    columns, back and forth.
    """
    # In stripes, the tiles that run at the same time share rows of X and of Y.
    height, width = rectangle(t)
    row, column = plgpu.planar_snake(step, (height, width), 1, min(GROUP, width))
    return unfold(row, column, t)


def transforms(minor: int, dtype: jnp.dtype) -> tuple:
    """The tiled, swizzled layout in shared memory that TMA writes and wgmma reads without
    conflicts."""
    # A swizzle permutes the parts of a row of `minor` entries,
    # so that a warp reads from all banks at once.
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(minor * size * 8)
    tiling = plgpu.TilingTransform((8, swizzle // size))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def _kernel(x_gmem, y_gmem, scale_gmem, *refs, addend: bool):
    """What one CTA runs: ``alpha·X Yᵀ + beta·C`` for its tiles,
    by three warpgroups of which the last loads.

    `gmem` is the device's memory, `smem` the shared memory of the CTA. `refs` are C, if there is an
    addend, and the result.
    """
    *c_gmem, out_gmem = refs
    batch, m, k = x_gmem.shape
    dtype = x_gmem.dtype
    part = BLOCK // 2  # rows of a warpgroup's part of a tile, which is one square high
    squares = BLOCK // SQUARE  # squares of a part, side by side
    steps = k // DEPTH
    tiles = num_tiles(m)  # of one matrix
    # A stage that is never filled would never be free again.
    stages = min(STAGES, steps * tiles * batch)
    # Squares of the result that wait for their store in each warpgroup.
    # C takes the shared memory of one.
    slots = squares - 1 if addend else squares

    def shared(number, rows, columns):
        """Shared memory for so many matrices of X's dtype."""
        shape = (number, rows, columns)
        return plgpu.SMEM(shape, dtype, transforms=transforms(columns, dtype))

    @functools.partial(
        pl.run_scoped,
        x_smem=shared(stages, BLOCK, DEPTH),
        y_smem=shared(stages, BLOCK, DEPTH),
        # A stage is full when both copies have arrived,
        # and free when both warpgroups have multiplied.
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        direct_smem=shared(2 * slots, SQUARE, SQUARE),
        mirror_smem=shared(2 * slots, SQUARE, SQUARE),
        c_smem=shared(2 * squares, SQUARE, SQUARE) if addend else None,
        c_full=plgpu.Barrier(num_barriers=2 * squares) if addend else None,
        collective_axes="wg",
    )
    def run_warpgroup(
        x_smem, y_smem, full, free, direct_smem, mirror_smem, c_smem, c_full
    ):
        wg = lax.axis_index("wg")

        def each_tile(body):
            """Decorates ``body(b, i, j, stage)``: runs it at once, for each tile of this CTA,
            one after the other. Nothing is returned.

            The body gets the stage that it uses first, and returns the one after its last, with
            which the next tile begins; the stages go round. `b` is the matrix. The tile has the
            rows from i·BLOCK on, and the columns from j·BLOCK on.
            """

            # `nd_loop` runs the loop at once. It divides the tiles of all matrices among the CTAs.
            # The first tile of each CTA begins with stage 0.
            @plgpu.nd_loop(
                (batch * tiles,), collective_axes="cta", init_carry=jnp.int32(0)
            )
            def run_tile(loop, carry):
                """Calls the body for one tile; `nd_loop` gives what the loop carries, the stage,
                as `carry`."""
                # Tiles are numbered matrix after matrix.
                (number,) = loop.index
                b = lax.div(number, jnp.int32(tiles))
                tile = lax.rem(number, jnp.int32(tiles))
                # Row and column of the tile in the triangle of tiles
                i, j = triangle(tile, pl.cdiv(m, BLOCK))
                return body(b, i, j, carry)

        def following(stage):
            """The next stage of the pipeline; the first one follows the last."""
            return lax.select(stage == stages - 1, jnp.int32(0), stage + 1)

        @pl.when(wg == 2)
        def _load():
            """Copy the slices of X and Y of each tile into the stages, each as soon as it is free:
            the work of the third warpgroup."""
            # It gives up the registers that the two warpgroups that multiply need.
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

            @each_tile
            def load_tile(b, i, j, stage):
                """Copy all slices of k that tile (i, j) of matrix b needs, the first into `stage`.

                Returns the stage after that of the last slice, with which the next tile begins; the
                stages go round. `each_tile` runs this at once, for each tile of this CTA, here in
                the warpgroup that loads.
                """

                def load_slice(s, stage):
                    """Copy slice s of X and Y into the stage once it is `free`;
                    `full` counts the arrivals of both."""
                    columns = pl.ds(s * DEPTH, DEPTH)
                    plgpu.barrier_wait(free.at[stage])
                    # The rows of X and of Y whose products are the tile's rows and columns
                    for operand, first, smem in (
                        (x_gmem, i * BLOCK, x_smem),
                        (y_gmem, j * BLOCK, y_smem),
                    ):
                        source = operand.at[b, pl.ds(first, BLOCK), columns]
                        plgpu.copy_gmem_to_smem(source, smem.at[stage], full.at[stage])
                    return following(stage)

                return lax.fori_loop(0, steps, load_slice, stage)

            # The multiplying warpgroups hand each stage back once at the start and once after each
            # use, and `load_slice` waits once before each use. So each stage was handed back once
            # more than it was waited for, which is awaited before the barriers are released.
            for stage in range(stages):
                plgpu.barrier_wait(free.at[stage])

        @pl.when(wg < 2)
        def _multiply_and_store():
            """Multiply this warpgroup's half of each tile, and store it with its mirror image."""
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            # At the start every stage is free.
            for stage in range(stages):
                plgpu.barrier_arrive(free.at[stage])

            # Runs at once, for each tile of this CTA
            @each_tile
            def multiply_tile(b, i, j, stage):
                """Compute this warpgroup's half of tile (i, j) of matrix b;
                returns the stage after its last slice."""
                # All squares of this warpgroup's part have this first row.
                row = i * BLOCK + wg * part

                def column_of(square):
                    """First column of a square; those above the diagonal are never stored."""
                    return j * BLOCK + square * SQUARE

                def load_c(square):
                    """Start the copy of C's entries for a square into shared memory. It runs while
                    the product is computed, and `store` waits for it.

                    `square` is 0 or 1, from left to right in this warpgroup's part of the tile.
                    """
                    column = column_of(square)
                    # Each square of each warpgroup has its own place in `c_smem`.
                    slot = wg * squares + square

                    # Squares above the diagonal are never stored, so their C is neither copied nor
                    # awaited.
                    @pl.when(column <= row)
                    def in_lower_triangle():
                        rows = pl.ds(row, SQUARE)
                        columns = pl.ds(column, SQUARE)
                        # Only a kernel with an addend calls this: C is the one entry of `c_gmem`.
                        source = c_gmem[0].at[b, rows, columns]
                        plgpu.copy_gmem_to_smem(
                            source, c_smem.at[slot], c_full.at[slot]
                        )

                def store(square, value):
                    """Store alpha·value + beta·C at the place of a 64-square of the result,
                    and mirrored."""
                    column = column_of(square)
                    rows = pl.ds(row, SQUARE)
                    columns = pl.ds(column, SQUARE)
                    # The squares of a warpgroup take its slots in turn, one slot or two.
                    slot = wg * slots + square % slots
                    direct = direct_smem.at[slot]
                    mirror = mirror_smem.at[slot]

                    @pl.when(column > row)
                    def above_diagonal():
                        # Nothing is stored. The wait below counts on one group of copies for each
                        # square, which is missing here; so all copies that have begun are awaited.
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    @pl.when(column <= row)
                    def in_lower_triangle():
                        # Each square is one group of copies to the device's memory. When at most
                        # the last slots - 1 of them still read shared memory,
                        # the one that used this slot before has ended.
                        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                        # alpha X Y^T + beta C, of which `value` is X Y^T
                        result = value * scale_gmem[b, 0]
                        if addend:
                            c_slot = wg * squares + square
                            plgpu.barrier_wait(c_full.at[c_slot])
                            c = c_smem[c_slot].astype(jnp.float32)
                            result = result + scale_gmem[b, 1] * c
                        result = result.astype(dtype)
                        # `mirror` gets the transposed square, `direct` the square as it is.
                        mirror.transpose((1, 0))[...] = result

                        # Below the diagonal the square and its mirror image are two places of the
                        # result.
                        @pl.when(column < row)
                        def below_diagonal():
                            direct[...] = result
                            # Copies read what is committed.
                            plgpu.commit_smem()
                            # The group of copies ends with that of `direct`, after both branches.
                            plgpu.copy_smem_to_gmem(
                                mirror,
                                out_gmem.at[b, columns, rows],
                                commit_group=False,
                            )

                        # The square on the diagonal is one place, and its upper triangle is taken
                        # from `mirror`. Rounding may differ above and below the diagonal:
                        # below counts.
                        @pl.when(column == row)
                        def on_diagonal():
                            # A thread reads entries of `mirror` that others wrote: this waits until
                            # all threads of the warpgroup have written theirs.
                            plgpu.commit_smem()
                            shape = (SQUARE, SQUARE)
                            row_number = lax.broadcasted_iota(jnp.int32, shape, 0)
                            column_number = lax.broadcasted_iota(jnp.int32, shape, 1)
                            is_below = row_number >= column_number
                            direct[...] = jnp.where(is_below, result, mirror[...])
                            plgpu.commit_smem()

                        plgpu.copy_smem_to_gmem(direct, out_gmem.at[b, rows, columns])

                # The squares of C are on their way while the product is computed.
                if addend:
                    for square in range(squares):
                        load_c(square)

                @functools.partial(
                    pl.run_scoped,
                    accumulator=plgpu.WGMMAAccumulatorRef((part, BLOCK), jnp.float32),
                )
                def product(accumulator):
                    """X Yᵀ of this warpgroup's part of the tile, slice by slice of k.

                    `run_scoped` calls this at once, with an accumulator in registers. From there on
                    `product` is what it returns, an array [part, BLOCK].
                    """

                    def add_slice(s, carry):
                        """Add the product of slice s to `accumulator`; `carry` is its stage and the
                        stage of the slice before. Returns those of the next slice.

                        A stage is `full` when the loading warpgroup has copied a slice of X and Y
                        into it, and `free` when both multiplying warpgroups are done with that.
                        """
                        stage, previous = carry
                        plgpu.barrier_wait(full.at[stage])
                        # This warpgroup's half of the tile's rows, and all of its columns
                        x_part = x_smem.at[stage, pl.ds(wg * part, part)]
                        y_transposed = y_smem.at[stage].transpose((1, 0))
                        plgpu.wgmma(accumulator, x_part, y_transposed)
                        # `wgmma` only starts the product. At most one stays in flight, this one. So
                        # the one before is done, and its stage may be filled anew.
                        plgpu.wgmma_wait(1)

                        # The first slice has none before it: its carry is its own stage, twice.
                        # The stage of the last product is handed back after the loop.
                        @pl.when(s > 0)
                        def hand_back():
                            plgpu.barrier_arrive(free.at[previous])

                        return following(stage), stage

                    _, last = lax.fori_loop(0, steps, add_slice, (stage, stage))
                    # Reading the accumulator waits for the last product.
                    value = accumulator[...]
                    plgpu.barrier_arrive(free.at[last])
                    return value

                for square in range(squares):
                    across = SQUARE * square
                    store(square, product[:, across : across + SQUARE])
                # The first stage of the next tile, after those of the `steps` slices of this one
                return lax.rem(stage + steps, jnp.int32(stages))

            plgpu.wait_smem_to_gmem(0)


def launch(x, y, c, scale, *, cores: int) -> jax.Array:
    """One launch: [batch, m, k] gives [batch, m, n], with m rounded up to n, a multiple of 64;
    columns from m on are junk.

    m must be a multiple of 8, and k of 64, as copies into tiled, swizzled shared memory ask: the
    caller pads with `_aligned`. C is [batch, m, n] too, with anything in its columns from m on.
    `scale` is [batch, 2], alpha and beta. Y of None is X, and C of None is nothing.
    """
    batch, m, _ = x.shape
    # Whole squares are stored, so that the result has as many columns.
    columns = pl.cdiv(m, SQUARE) * SQUARE
    # No more CTAs than multiprocessors: each walks over several tiles.
    ctas = min(cores, batch * num_tiles(m))
    run = plgpu.kernel(
        functools.partial(_kernel, addend=c is not None),
        out_type=jax.ShapeDtypeStruct((batch, m, columns), x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        # Pallas calls a warpgroup a thread: two multiply, and the third loads.
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    if y is None:
        y = x
    # `_kernel` gets references to these arrays, and to the result after them.
    if c is None:
        return run(x, y, scale)
    return run(x, y, scale, c)
