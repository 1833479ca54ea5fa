"""Blocks of columns, by which one program serves wide matrices of equal m and any n.

X X^H is the sum of X_j X_j^H over blocks X_j of columns, and Q X has the blocks Q X_j. The blocks of all matrices have
one size and are one array. `batching` loops over the matrices, and the functions here over the blocks of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from muonjax._common.linalg import entry, with_entry

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Int

Function = Callable[[jax.Array], jax.Array]


class Blocks(NamedTuple):
    """X in blocks of columns.

    With m = 2 and blocks of 4 columns, [2, 8] and [2, 12] are two and three of five blocks [5, 2 * 4]: the first has
    `start` 0 and `stop` 2, the second 2 and 5.

    Attributes:
      blocks: X's, among those of other matrices [all, m * size].
      shape: (m, size), the shape of a block.
      columns: n, or that of a longer matrix that takes the same form.
      start: The number of X's first block.
      stop: The number of the block after X's last one.
    """

    blocks: Inexact[Array, "all numbers"]
    shape: tuple[int, int]
    columns: int
    start: Int[Array, ""]
    stop: Int[Array, ""]

    def block(self, number: jax.typing.ArrayLike) -> Inexact[Array, "m size"]:
        """The block with this number, of all."""
        return entry(self.blocks, number).reshape(self.shape)

    def map(self, f: Function) -> Blocks:
        """f of each block of X, in its place; the result of f has as many entries as a block."""

        # The loop carries the blocks of all matrices, and changes X's: XLA writes into them without a copy.
        def body(j: jax.Array, blocks: jax.Array) -> jax.Array:
            block = self._replace(blocks=blocks).block(j)
            return with_entry(blocks, j, f(block).reshape(-1))

        blocks = jax.lax.fori_loop(self.start, self.stop, body, self.blocks)
        return self._replace(blocks=blocks)

    def sum(
        self, f: Function, add: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add
    ) -> jax.Array:
        """f of each block of X, [m, size], added up from zero.

        `add` may be another function for which zero is neutral, as the maximum of absolute values.
        """

        def body(j: jax.Array, total: jax.Array) -> jax.Array:
            return add(total, f(self.block(j)))

        # Blocks of one size give terms of one shape.
        term = jax.eval_shape(lambda: f(self.block(0)))
        zero = jnp.zeros(term.shape, term.dtype)
        # In `jax.shard_map` a loop's total has one type from the start, which says over which mesh axes it varies.
        # Adding a zero made from a number of X gives it those of X.
        zero += jnp.zeros_like(self.blocks[0, 0], term.dtype)
        return jax.lax.fori_loop(self.start, self.stop, body, zero)

    def transposed(self, f: Function = lambda x: x) -> Blocks:
        """f of each block's transpose."""

        def transpose(block: jax.Array) -> jax.Array:
            # XLA has a fast kernel for a transpose, if no operation entry by entry joins it.
            block = jax.lax.optimization_barrier(block)
            return f(jax.lax.optimization_barrier(block.mT))

        return self.map(transpose)._replace(shape=self.shape[::-1])


def block_size(matrices: Sequence[tuple[int, int]], m: int) -> int:
    """The columns of a block, for `matrices` of m rows as (how many, n).

    Zeros fill the last block of each matrix. The size has the least cost, in columns, if a block costs 32 of them: two
    matrices of 1536 columns and four of 4608 get blocks of 1536.
    """

    # Zeros count as columns, since they are multiplied too.
    def cost(size: int) -> int:
        columns = 0
        for count, n in matrices:
            num_blocks = -(-n // size)
            columns += count * num_blocks * (size + 32)
        return columns

    # The candidates cut each n into equal parts of about m columns or more.
    sizes = set()
    for _, n in matrices:
        for parts in range(1, -(-n // m) + 1):
            sizes.add(-(-n // parts))
    return min(sizes, key=cost)
