"""Blocks of columns, by which one program serves wide matrices of equal m and any n.

X X^H is the sum of X_j X_j^H over blocks X_j of columns, and Q X has the blocks Q X_j. Blocks of one size, of all
matrices, are one array; `batching` loops over the matrices, and what is here over the blocks of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Int

Function = Callable[[jax.Array], jax.Array]


class Blocks(NamedTuple):
    """X in blocks of columns.

    Attributes:
      blocks: X's, among those of other matrices [all, m * size].
      shape: (m, size), in which each is kept.
      columns: n, or the larger one of a matrix that has the same form.
      start: The number of X's first block.
      stop: The number of the block after its last one.
    """

    blocks: Inexact[Array, "all numbers"]
    shape: tuple[int, int]
    columns: int
    start: Int[Array, ""]
    stop: Int[Array, ""]

    def block(self, j: jax.typing.ArrayLike) -> Inexact[Array, "m size"]:
        """Block number j of all."""
        block = jax.lax.dynamic_index_in_dim(
            self.blocks, j, keepdims=False, allow_negative_indices=False
        )
        return block.reshape(self.shape)

    def map(self, f: Function) -> Blocks:
        """f of each block of X, in its place."""

        def body(j, blocks):
            block = f(self._replace(blocks=blocks).block(j)).reshape(-1)
            return jax.lax.dynamic_update_index_in_dim(
                blocks, block, j, 0, allow_negative_indices=False
            )

        return self._replace(blocks=jax.lax.fori_loop(self.start, self.stop, body, self.blocks))

    def sum(
        self, f: Function, add: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add
    ) -> jax.Array:
        """f of each block of X, added to zero."""
        zero = jax.eval_shape(lambda: f(self.block(0)))
        # With the varying axes of X, inside of `jax.shard_map`.
        zero = jnp.zeros(zero.shape, zero.dtype) + jnp.zeros_like(self.blocks[0, 0], zero.dtype)
        return jax.lax.fori_loop(self.start, self.stop, lambda j, y: add(y, f(self.block(j))), zero)

    def transposed(self, f: Function = lambda x: x) -> Blocks:
        """f of each block's transpose, which has a fast kernel where nothing entry by entry comes before it."""
        barrier = jax.lax.optimization_barrier
        return self.map(lambda x: f(barrier(barrier(x).mT)))._replace(shape=self.shape[::-1])


def block_size(matrices: Sequence[tuple[int, int]], m: int) -> int:
    """The columns of a block, for `matrices` as (how many, n).

    Zeros fill the last block of each. The fewest columns in all, where a block takes as long as 32 of them more.
    """
    sizes = {-(-n // parts) for _, n in matrices for parts in range(1, -(-n // m) + 1)}
    return min(
        sizes, key=lambda size: sum(count * -(-n // size) * (size + 32) for count, n in matrices)
    )
