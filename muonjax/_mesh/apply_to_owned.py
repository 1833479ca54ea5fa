"""Apply a function to the matrices of one owner, whose blocks the other devices have sent.

The blocks are in a buffer with a row from each device. The owner assembles a matrix from the blocks in some columns,
applies the function, divides the result into blocks again and writes these over the old ones.

Owners differ in the number and shapes of their matrices, but all devices run one program. So there is one loop for each
shape, which reads the places of the owner's matrices in the buffer, and how many there are, from tables with a row for
each owner. Each shape is compiled once.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._common.platform_policy import Policy
from muonjax._matrices.batching import Function
from muonjax._mesh.assignment import Round
from muonjax._mesh.matrix_shards import MatrixLayout


def apply_to_owned(
    f: Function, buffer: jax.Array, round_: Round, policy: Policy
) -> jax.Array:
    """Apply `f.whole` to each matrix whose blocks are in the columns of the buffer; the results take their place.

    The buffer [devices, columns] has a row from each device along the exchange axes of the round.
    """
    owner_axes = round_.group.owner_axes
    # Without owner axes there is one owner of what this device stores.
    owner = jax.lax.axis_index(owner_axes) if owner_axes else 0
    for loop in _loops(round_, policy):
        buffer = _run_loop(f.whole, loop, owner, buffer)
    return buffer


class Batch(NamedTuple):
    """Matrices of one layout that an owner works on at once.

    Attributes:
      layout: Their layout.
      count: How many there are.
      exchanged: Size of each mesh axis of the all-to-all. Their coordinates number the rows of the buffer.
    """

    layout: MatrixLayout
    count: int
    exchanged: dict[str, int]

    @property
    def width(self) -> int:
        """How many columns of the buffer they take."""
        return self.count * self.layout.block_size

    @property
    def _order(self) -> list[int]:
        """The axes (*exchanged, count, *block), with those next to each other that make up one axis of a matrix."""
        # A matrix [16, 64] whose rows "fsdp" shards arrives as (fsdp, count, block rows, columns). Its rows are
        # (fsdp, block rows), so the order is (count, fsdp, block rows, columns).
        names = list(self.exchanged)
        count_axis = len(names)
        order = [count_axis]
        for axis, gathered in enumerate(self.layout.gathered):
            order += map(names.index, gathered)
            order.append(count_axis + 1 + axis)
        return order

    @property
    def _shape(self) -> tuple[int, ...]:
        """(*exchanged, count, *block)."""
        return (*self.exchanged.values(), self.count, *self.layout.block_shape)

    def assemble(self, rows: jax.Array) -> jax.Array:
        """Blocks [devices, count * elements of a block] -> [count, m, n]."""
        matrices = rows.reshape(self._shape).transpose(self._order)
        return matrices.reshape(self.count, *self.layout.shape)

    def divide(self, matrices: jax.Array) -> jax.Array:
        """The inverse of `assemble`."""
        blocks = matrices.reshape([self._shape[axis] for axis in self._order])
        return blocks.transpose(np.argsort(self._order)).reshape(-1, self.width)


class Loop(NamedTuple):
    """The matrices of one shape, a batch in each step.

    Attributes:
      batches: A batch of each layout that matrices of this shape have.
      places: [owners, steps, 2]: the first column in the buffer of each step's batch, and its number in `batches`.
      steps: [owners], how many steps there are.
    """

    batches: list[Batch]
    places: np.ndarray
    steps: np.ndarray


Owned = list[list[tuple[int, MatrixLayout]]]
"""For each owner its matrices of one shape: the first column in the buffer, and the layout."""


def _loops(round_: Round, policy: Policy) -> list[Loop]:
    """One loop for each shape of matrices, with their places in the rows of all owners."""
    owners = list(itertools.chain(*round_.replicas))
    owned_by_shape: dict[tuple[int, int], Owned] = {}
    for i, owner in enumerate(owners):
        # The row for an owner has its matrices one after the other: two with blocks of 256 numbers and one with 512
        # begin in the columns 0, 256 and 512.
        column = 0
        for matrices in owner:
            layout = matrices.layout
            owned = owned_by_shape.setdefault(layout.shape, [[] for _ in owners])
            for _ in range(matrices.count):
                owned[i].append((column, layout))
                column += layout.block_size
    return [_loop(owned, round_, policy) for owned in owned_by_shape.values()]


def _loop(owned: Owned, round_: Round, policy: Policy) -> Loop:
    """The loop over matrices of one shape, a batch of equally many in each step.

    Two owners with the matrices [(0, A), (32, A)] and [(0, A), (32, B)], for layouts A and B, get with batches of one
    matrix the places [[(0, 0), (32, 0)], [(0, 0), (32, 1)]] and two steps each.
    """
    # How many matrices of each layout an owner has. One shape can have several layouts: leaves that are sharded along
    # other axes.
    counts = [Counter(layout for _, layout in matrices) for matrices in owned]
    layouts = list(dict.fromkeys(itertools.chain(*counts)))
    # On a CPU one matrix after the other is no slower. Each is a batch of one: without a batch axis, the order of XLA's
    # sums depends on the number of devices, and results would not have the same bits on every mesh.
    batch_size = 1
    if not policy.is_cpu:
        # Batches have one size for all layouts and owners, because all devices run one program: a divisor of the
        # number of matrices that any owner has of any layout.
        divisor = 0
        for count in counts:
            divisor = math.gcd(divisor, *count.values())
        batch_size = policy.chunk_size(divisor, layouts[0].shape)
    exchanged = {name: jax.lax.axis_size(name) for name in round_.group.exchange_axes}
    batches = [Batch(layout, batch_size, exchanged) for layout in layouts]

    steps = np.array([len(matrices) // batch_size for matrices in owned])
    # An owner with fewer steps than others does not reach the zeros at the end of its row.
    places = np.zeros((len(owned), steps.max(), 2), np.int32)
    for i, matrices in enumerate(owned):
        # An owner's matrices of one layout follow each other in the buffer, as `assign_owners` gives them kind by
        # kind: a batch is so many of them in a row, and its place is that of the first.
        for step, (column, layout) in enumerate(matrices[::batch_size]):
            places[i, step] = column, layouts.index(layout)
    return Loop(batches, places, steps)


def _run_loop(
    apply: Callable[[jax.Array], jax.Array], loop: Loop, owner: Any, buffer: jax.Array
) -> jax.Array:
    """Apply a function to this owner's matrices of one shape, whose results replace their blocks in the buffer.

    The buffer [devices, columns] has a row from each device; the blocks of a matrix are in the same columns of all.
    `owner` is the number of this device among the owners, a tracer on more than one.
    """
    places = jnp.asarray(_row_of(owner, loop.places))
    # A branch for each layout: only how blocks become matrices differs, and `apply` is compiled once.
    assemble = [batch.assemble for batch in loop.batches]
    divide = [batch.divide for batch in loop.batches]
    # All have one shape, so one width.
    width = loop.batches[0].width

    def step(i, buffer):
        column, layout = places[i]
        # [devices, width] -> [matrices, m, n]
        rows = jax.lax.dynamic_slice(buffer, (0, column), (len(buffer), width))
        x = jax.lax.switch(layout, assemble, rows)
        # XLA would fuse its first and last operations with the exchange, and round differently on each mesh.
        # The barriers prevent that.
        x = jax.lax.optimization_barrier(x)
        y = jax.lax.optimization_barrier(apply(x))
        rows = jax.lax.switch(layout, divide, y)
        return jax.lax.dynamic_update_slice(buffer, rows, (0, column))

    # Owners have unequal numbers of matrices.
    steps = _row_of(owner, loop.steps)
    return jax.lax.fori_loop(0, steps, step, buffer)


def _row_of(owner: Any, table: np.ndarray) -> Any:
    """This owner's row of a table: a constant if all rows are equal, so that XLA knows it."""
    # With equal numbers of matrices the loop of all owners has one known length.
    if (table == table[0]).all():
        return table[0]
    return jnp.asarray(table)[owner]
