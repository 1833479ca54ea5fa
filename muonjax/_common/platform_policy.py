"""What to do on a platform: one frozen value,
with a rule for each choice that depends on where arrays lie."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._platform_of import kind_of, platform_of


@dataclasses.dataclass(frozen=True)
class Policy:
    """What to do on a platform. Each rule says what it is derived from.

    Attributes:
      platform: "cpu", "gpu", "tpu" or another name; all but "cpu" are accelerators.
      kind: The kind of the device, such as "TPU v6 lite"; "" if it is not known.
    """

    platform: str
    kind: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether the rules for CPUs apply."""
        return self.platform == "cpu"

    def compute_dtype(
        self, dtype: jax.typing.DTypeLike, asked: jax.typing.DTypeLike | None = None
    ) -> jnp.dtype:
        """The dtype of the operands of products of arrays of `dtype`,
        which may be narrower or wider.

        It is `asked`, the user's setting, and without one the platform's: a CPU has no matrix units
        for half types; on accelerators these are 8 times faster or more.
        Complex arrays and float64 keep their own.
        """
        dtype = jnp.dtype(dtype)
        # No half type is complex, and who has float64 arrays wants products in float64.
        if jnp.issubdtype(dtype, jnp.complexfloating) or dtype == jnp.float64:
            return dtype
        if asked is not None:
            # Without JAX's x64 mode this makes float32 of an asked float64.
            return jax.dtypes.canonicalize_dtype(asked)
        if self.is_cpu:
            return jnp.dtype(jnp.float32)
        # float16 has three bits more than bfloat16, but only GPUs surely have it.
        return jnp.dtype(jnp.float16 if self.platform == "gpu" else jnp.bfloat16)

    def exchange_dtype(
        self, dtype: jax.typing.DTypeLike, asked: jax.typing.DTypeLike | None = None
    ) -> jnp.dtype:
        """What a mesh exchanges: bfloat16 where products round to a half type anyway (it has
        float32's range)."""
        # bfloat16 halves the bytes, and the results are no more exact than it.
        compute_bits = jnp.finfo(self.compute_dtype(dtype, asked)).bits
        is_rounded = compute_bits == 16 and jnp.finfo(dtype).bits > 16
        return jnp.dtype(jnp.bfloat16 if is_rounded else dtype)

    @property
    def stack_elements(self) -> float:
        """How many elements several arrays may have together, to be stacked and run as one batch.

        A single array, such as that of scanned layers, may have more; on a TPU `chunk_size` then
        cuts it into batches within the same bound. On an accelerator a stack costs a copy and
        memory, and saves launches. The bounds follow from operations of compiled programs, which
        were counted, and not timed (docs/kernels.md).
        """
        # There is no bound on a CPU: its loop over batches (`chunk_size`) takes each out of the
        # stack where it lies.
        if self.is_cpu:
            return math.inf
        if self.platform == "tpu":
            # As counted, 8 matrices of 1024 x 4096 in two stacks of four take 16 % more time than
            # one by one on a v5e, 53 % more on a v6e, and 29 % less on a v5p. JAX calls a v5e and a
            # v6e "lite": they have less memory bandwidth.
            if "lite" in self.kind:
                # One matrix of 1024 x 4096: the fast memory keeps no larger stack.
                return 4 << 20
            # A little more than the 16 Mi elements of four matrices of 1024 x 4096, or of one of
            # 4096 x 4096.
            return 17 << 20
        # On a GPU or another accelerator, two matrices of 4096 x 4096: a larger stack takes more
        # memory, and smaller ones more launches.
        return 32 << 20

    def pads(self, m: int, columns: int) -> bool:
        """Whether matrices of m rows get so many columns of zeros in all, to share a program.

        Counted: on a GPU a program is about forty launches, in whose time it reads and writes as
        many numbers at least as the zeros may be. Measured on a CPU, where each program takes a
        second to compile: 50 matrices of 27 shapes compile in a fifth of the time,
        and a step takes up to a fourth longer.
        """
        bounds = {"cpu": 32 << 20, "gpu": 8 << 20}
        return m * columns <= bounds.get(self.platform, -1)

    @property
    def one_stack_at_a_time(self) -> bool:
        """Whether a stack waits for the one before it, so that the memory of one serves the next.

        XLA's scheduler for GPUs begins some of several at once and keeps them (counted: twice the
        memory). On a TPU waiting would keep the next stack's copy into the chip's memory from
        running during the products.
        """
        return self.platform == "gpu"

    def chunk_size(self, count: int, shape: tuple[int, int]) -> int:
        """How many of `count` matrices of `shape` run as one batch, a divisor of `count`:
        as many as are fast together.

        On a CPU a batched product is slower than the same products one after the other as soon as
        one matrix fills the caches (measured: benchmarks/optimizer/batching.py at commit 709d0d3e).

        On an accelerator few large launches win, and a loop copies its stack. Counted on a GPU
        (docs/kernels.md): 64 heads of 7168 x 128 take 29 % less time in one batch than in two, and
        less than half of the memory, 128 experts of 2048 x 768 a quarter less time than in eight.
        Four of 4096 x 14336 in one batch would take twice the memory of one at a time.
        """
        # Not 0, by which `bound` could not be divided: `matrix_view` refuses empty matrices.
        size_of_one = math.prod(shape)
        # The elements that a batch may hold
        if self.is_cpu:
            bound = 1 << 18
        elif self.platform == "gpu":
            # A launch of a few matrices of 2048 x 2048 fills the device already,
            # and more of them only take memory.
            is_large = size_of_one >= 2048 * 2048
            bound = 64 << 20 if is_large else 256 << 20
        else:
            # On a TPU, or a platform without a rule, a stack is one batch. A single array may have
            # more elements than a stack of several: it is cut into several batches.
            bound = int(self.stack_elements)
        # As many as fit in the bound, but at least one. All batches have one size, so that they
        # share a program: if five of 12 matrices fit, a batch has four.
        size = max(1, min(count, bound // size_of_one))
        while count % size != 0:
            size -= 1
        return size


def policy_of(*arrays: Any, mesh: Any = None) -> Policy:
    """The policy for a call on these arrays; `platform_of` says how their device is found."""
    return Policy(platform_of(*arrays, mesh=mesh), kind_of(*arrays, mesh=mesh))
