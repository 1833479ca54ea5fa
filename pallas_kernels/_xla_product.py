"""The symmetric product in plain `jnp`: whole, and in blocks.

The result of ``alpha·X Yᴴ + beta·C`` is known to be symmetric (Hermitian for complex numbers), so
only its lower triangle is *read*; the upper one is its mirror image. This is a part of the
definition: every implementation returns ``mirror(lower triangle)``, symmetric bit for bit, also
where rounding makes the two halves differ.

**In blocks**, the lower triangle takes fewer multiply-adds on any platform.

```
[ S₁₁           ]      S_ij = alpha·X_i Y_jᴴ + beta·C_ij for i >= j,
[ S₂₁ S₂₂       ]      and S_ji = S_ijᴴ
[ S₃₁ S₃₂ S₃₃   ]
```

r rows of blocks cost (1 + 1/r)/2 of the full product's multiply-adds, four of them 5/8. A block off
the diagonal is copied twice into the result, the few on the diagonal are mirrored: on a CPU much
cheaper than mirroring the whole matrix, where a transposed pass misses the cache on every element.

Blocks of one size are the same few kernels all over an iteration, and XLA compiles each of them
once. For the same reason the result is put together column by column, which takes the mirroring
along, and scaled as a whole: what differs from product to product comes last. A loop over the
blocks would compile faster still, but run them one after the other:
on two cores a whole iteration takes longer so.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._xla_workarounds import numbers_from_loop

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact


class Operands(NamedTuple):
    """What every implementation of ``alpha·X Yᴴ + beta·C`` takes, checked by the public op.

    Attributes:
      x: [*batch, m, k].
      y: The same shape and dtype; None: X itself.
      c: [*batch, m, m] in X's dtype; None: nothing is added.
      alpha: A number [], or one for each matrix [*#batch, 1, 1], in the accumulator's real dtype.
      beta: As `alpha`; without C it does not count.
    """

    x: jax.Array
    y: jax.Array | None
    c: jax.Array | None
    alpha: jax.Array
    beta: jax.Array

    @property
    def second(self) -> jax.Array:
        """Y, or X in its place."""
        return self.x if self.y is None else self.y

    def with_one_batch_axis(self) -> Operands:
        """The operands of all matrices, [batch, m, k] and so on,
        with an alpha and a beta for each: [batch, 1, 1]."""
        *batch, _, _ = self.x.shape
        alpha = jnp.broadcast_to(self.alpha, (*batch, 1, 1))
        beta = jnp.broadcast_to(self.beta, (*batch, 1, 1))
        size = math.prod(batch)
        return jax.tree.map(
            lambda a: a.reshape(size, *a.shape[-2:]),
            self._replace(alpha=alpha, beta=beta),
        )


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that products are summed in: float32 for half types, otherwise the dtype itself."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def precision(dtype: jnp.dtype) -> lax.Precision | None:
    """The precision that a product of this dtype asks of XLA.

    Products of float32 arrays have float32 precision here. XLA's own default on an accelerator is
    lower (TF32 on an NVIDIA GPU, one bfloat16 pass on a TPU); for more speed, pass bfloat16 arrays.
    If the user has set `jax.default_matmul_precision`, that setting is used.
    """
    # A product of half types sums in float32 anyway, so nothing is asked for it.
    wish = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if jnp.dtype(dtype).itemsize <= 2 or wish is not None:
        return None
    # TF32 keeps ten bits of a float32 number, HIGHEST all of them.
    return lax.Precision.HIGHEST


def product(
    x: Inexact[Array, "*batch m k"], y: Inexact[Array, "*batch n k"]
) -> Inexact[Array, "*batch m n"]:
    """``X Yᴴ`` in the accumulator's dtype."""
    return jnp.einsum(
        "...ik,...jk->...ij",
        x,
        y.conj(),
        precision=precision(x.dtype),
        preferred_element_type=accumulator(x.dtype),
    )


def mirror(p: Inexact[Array, "*batch m m"]) -> Inexact[Array, "*batch m m"]:
    """The Hermitian matrix whose lower triangle is P's: [[1, 9], [2, 3]] gives [[1, 2], [2, 3]]."""
    m = p.shape[-1]
    # The diagonal of a Hermitian matrix is real.
    if jnp.iscomplexobj(p):
        real = p.real.astype(p.dtype)
        p = jnp.where(jnp.eye(m, dtype=bool), real, p)
    # A sum with zeros and not one `where`: XLA's CPU compiler takes a minute over
    # `where(row >= column, p, p.mT)` at 1024 (jaxlib 0.10.2), and none over this.
    lower = jnp.tri(m, dtype=bool)
    below = jnp.where(lower, p, 0)
    above = jnp.where(lower, 0, p.mT.conj())
    return below + above


def symmetric_product(o: Operands) -> Inexact[Array, "*batch m m"]:
    """The product with one full product of XLA's."""
    return scaled_sum(mirror(product(o.x, o.second)), o)


def scaled_sum(
    p: Inexact[Array, "*batch m m"], o: Operands
) -> Inexact[Array, "*batch m m"]:
    """``alpha·P + beta·C`` of a symmetric P, in X's dtype."""
    # The casts are explicit, because JAX's strict mode promotes nothing by itself.
    result = o.alpha.astype(p.dtype) * p
    if o.c is not None:
        result += o.beta.astype(p.dtype) * mirror(o.c).astype(p.dtype)
    # From the accumulator's dtype, once, after C is added.
    return result.astype(o.x.dtype)


# How many rows of blocks there are at most, and how many rows the smallest block has.
_ROWS_OF_BLOCKS = 4
_SMALLEST_BLOCK = 128


def blocked_product(o: Operands, *, platform: str) -> Inexact[Array, "*batch m m"]:
    """alpha·X Yᴴ + beta·C from the blocks of its lower triangle, which are mirrored.

    Small matrices are one full product.
    """
    *batch, m, _ = o.x.shape
    # More rows of blocks save more products, until the blocks are too small to be fast.
    rows = min(_ROWS_OF_BLOCKS, m // _SMALLEST_BLOCK)
    if rows < 2:
        return symmetric_product(o)
    in_blocks = functools.partial(_in_blocks, rows_of_blocks=rows, platform=platform)
    if math.prod(batch) <= 1 or platform != "cpu":
        return in_blocks(o)
    # On a CPU one matrix after the other: the blocks of a whole batch would be copied through main
    # memory. Each pass takes the operands of one matrix, with its alpha and beta.
    products = lax.map(in_blocks, o.with_one_batch_axis())
    return products.reshape(*batch, m, m)


def _in_blocks(
    o: Operands, *, rows_of_blocks: int, platform: str
) -> Inexact[Array, "*batch m m"]:
    """``alpha·P + beta·C`` from blocks of P: ``P_ij = X_i Y_jᴴ`` for i >= j, ``P_ji = P_ijᴴ``."""
    # Block i takes the rows from bounds[i] to bounds[i + 1].
    m = o.x.shape[-2]
    bounds = [m * i // rows_of_blocks for i in range(rows_of_blocks + 1)]
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    # On a CPU the starts come from a loop, so that XLA does not know them:
    # slices of one size are one compiled kernel.
    starts = numbers_from_loop(bounds[:-1], platform)

    def cut(a: jax.Array, i: int) -> jax.Array:
        """The rows of block i. XLA need not test whether a start is negative."""
        return lax.dynamic_slice_in_dim(
            a, starts[i], sizes[i], axis=-2, allow_negative_indices=False
        )

    # Each block below the diagonal is used twice, each on it is mirrored.
    blocks = {}
    for i in range(rows_of_blocks):
        x_i = cut(o.x, i)
        for j in range(i + 1):
            block = product(x_i, cut(o.second, j))
            blocks[i, j] = block
            blocks[j, i] = mirror(block) if i == j else block.mT.conj()
    # First each column of blocks, then all columns. XLA transposes the mirrored blocks while it
    # copies them into their column.
    columns = []
    for j in range(rows_of_blocks):
        column = [blocks[i, j] for i in range(rows_of_blocks)]
        columns.append(jnp.concatenate(column, axis=-2))
    # The blocks have the dtype of the sums. `scaled_sum` rounds, once, after C is added.
    return scaled_sum(jnp.concatenate(columns, axis=-1), o)
