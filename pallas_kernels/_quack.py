"""Call QuACK's symmetric product (package quack-kernels) on NVIDIA's Hopper and Blackwell. No GPU has run it here yet.

QuACK is written in NVIDIA's CuTe DSL and runs inside of JAX's programs through `cutlass.jax`. It computes tiles of the
lower triangle, in clusters of two CTAs, and stores each a second time, transposed. Its tiles and its schedule are those
that QuACK itself takes for the chip; Marin trains with the same ones and reports why not to change them
(`lib/levanter/src/levanter/grug/_moe/quack_symmetric_cute.py` there): narrower tiles gave wrong results for shapes that
a benchmark had not covered, and the dynamic schedule raced.

Source: github.com/Dao-AILab/quack, `quack/gemm_symmetric.py`.
"""

# QuACK and CUTLASS are in the extra `quack`, for NVIDIA GPUs alone.
# pyright: reportMissingImports=false
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._kernel_batch import launch_batch, refusal
from pallas_kernels._platform import Gpu, suitable_gpu
from pallas_kernels._reference import Operands, epilogue, mirror

# Rows and columns of a tile, by the major compute capability.
_TILES = {9: (128, 256), 10: (256, 256)}
_CLUSTER = (2, 1, 1)
_SWIZZLE = 8


def symmetric_product(o: Operands) -> jax.Array:
    """The product by QuACK.

    The kernel makes X Yᵀ. Where there are scales or C, a pass of XLA's follows, with one rounding more than in the
    other implementations.
    """
    return launch_batch("quack", functools.partial(_launched, *_require(o.x.dtype)), o)


def _launched(
    capability: int, cores: int, x: jax.Array, y: jax.Array | None, c: jax.Array | None, scale: jax.Array
) -> jax.Array:
    """One launch on [batch, m, k], padded with zeros to multiples of 8 as TMA asks, and cut again."""
    _, m, k = x.shape

    def padded(a):
        return jnp.pad(a, ((0, 0), (0, -m % 8), (0, -k % 8))) if m % 8 or k % 8 else a

    p = _product(capability, cores, padded(x), padded(x if y is None else y))[:, :m, :m]
    p = epilogue(p.astype(jnp.float32), c, scale[:, 0], scale[:, 1])
    # The tiles on the diagonal hold both halves of X Yᵀ as they were computed, and C may differ above the diagonal.
    return (p if y is None and c is None else mirror(p)).astype(x.dtype)


def _product(capability: int, cores: int, x: jax.Array, y: jax.Array) -> jax.Array:
    """The kernel: X Yᵀ for [batch, m, k] with m and k multiples of 8."""
    import cutlass.jax as cutlass_jax

    batch, m, _ = x.shape
    operand = cutlass_jax.TensorSpec(divisibility=(1, 1, 8), static=False)
    call = cutlass_jax.cutlass_call(
        _launcher(capability, cores, x.dtype.name),
        output_shape_dtype=(jax.ShapeDtypeStruct((batch, m, m), x.dtype),),
        input_spec=(operand, operand),
        output_spec=(operand,),
        use_static_tensors=False,
        # Shapes are part of its key anyway. Without a key it would serialize the program, and fail on the markers for a
        # profiler that QuACK puts there (nvidia-cutlass-dsl 4.8.1, quack-kernels 0.6.5).
        compile_key=("muonjax", capability, cores, x.dtype.name),
    )
    (out,) = call(x, y)
    return out


@functools.cache  # one function object for each choice, by which `cutlass.jax` finds what it has compiled
def _launcher(capability: int, cores: int, dtype: str) -> Any:
    """A CuTe function of (stream, x, y, out)."""
    import cutlass
    from cutlass import cute
    from quack import gemm_symmetric
    from quack.tile_scheduler import TileSchedulerOptions

    kernel = {9: gemm_symmetric.GemmSymmetricSm90, 10: gemm_symmetric.GemmSymmetricSm100}[capability]
    element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype]
    clusters = cores // (_CLUSTER[0] * _CLUSTER[1])

    @cute.jit
    def launch(stream, x, y, out):
        # A static schedule: each cluster takes every so-many-th tile.
        gemm = kernel(cutlass.Float32, element, _TILES[capability], _CLUSTER, use_clc_persistence=False)
        transposed = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[0, 2, 1]))
        arguments = kernel.EpilogueArguments(transposed)
        schedule = TileSchedulerOptions(
            max_active_clusters=cutlass.Int32(clusters), max_swizzle_size=cutlass.Int32(_SWIZZLE)
        )
        gemm(x, y, out, None, arguments, schedule, None, stream)

    return launch


def _require(dtype: jnp.dtype) -> Gpu:
    """The GPU that the kernel is compiled for, or an error that says why it can't be."""
    gpu = suitable_gpu("quack", dtype, tuple(_TILES), "9.0 or 10.x")
    try:
        import cutlass.jax  # noqa: F401
        import quack.gemm_symmetric  # noqa: F401
    except ImportError as error:
        reason = f'needs the packages of pip install "muonjax[quack]" ({error})'
        raise NotImplementedError(refusal("quack", reason)) from error
    return gpu
