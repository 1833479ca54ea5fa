"""Apply a function to the matrices of one owner, whose blocks the other devices have sent.

The blocks are in a buffer with a row from each device. The owner assembles a matrix from the blocks in some columns,
applies the function, divides the result into blocks again and writes these over the old ones.

Owners differ in the number and shapes of their matrices, but all devices run one program. So there is one loop for each
shape, which reads the places of the owner's matrices in the buffer, and how many there are, from tables with a row for
each owner. Each shape is compiled once.
"""

import itertools
import math
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

    def apply(x: jax.Array) -> jax.Array:
        """f of the matrices [count, m, n]."""
        if not policy.is_cpu or len(x) == 1:
            return f.whole(x)

        # On a CPU one after the other is no slower. Each goes as a batch of one: without a batch axis, the order of
        # XLA's sums depends on the number of devices, and results would not have the same bits on every mesh.
        def of_one(matrix: jax.Array) -> jax.Array:
            return f.whole(matrix[None])[0]

        return jax.lax.map(of_one, x)

    # Without owner axes there is one owner of what this device stores.
    owner = jax.lax.axis_index(owner_axes) if owner_axes else 0
    for loop in _loops(round_, policy):
        buffer = _run_loop(apply, loop, owner, buffer)
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


Columns = list[dict[MatrixLayout, list[int]]]
"""For each owner and each layout of its matrices, the first column of each matrix in the buffer."""


def _loops(round_: Round, policy: Policy) -> list[Loop]:
    """One loop for each shape of matrices, with their places in the rows of all owners."""
    owners = list(itertools.chain(*round_.replicas))
    # The row for an owner has its matrices one after the other: two with blocks of 256 numbers and one with 512 begin
    # in the columns 0, 256 and 512.
    # columns_of[shape][i][layout] has the first columns of all matrices of this layout in the row for owner i.
    columns_of: dict[tuple[int, ...], Columns] = {}
    for i, owner in enumerate(owners):
        column = 0
        for matrices in owner:
            layout = matrices.layout
            columns = columns_of.setdefault(layout.shape, [{} for _ in owners])
            firsts = range(column, column + matrices.size, layout.block_size)
            columns[i].setdefault(layout, []).extend(firsts)
            column += matrices.size
    return [_loop(columns, round_, policy) for columns in columns_of.values()]


def _loop(columns: Columns, round_: Round, policy: Policy) -> Loop:
    """The loop over matrices of one shape, a batch of equally many in each step.

    Two owners whose columns are [{A: [0, 32]}, {A: [0], B: [32]}], for layouts A and B, get with batches of one matrix
    the places [[(0, 0), (32, 0)], [(0, 0), (32, 1)]] and two steps each.
    """
    # One shape can have several layouts: leaves that are sharded along other axes.
    layouts = list(dict.fromkeys(itertools.chain(*columns)))
    batch_size = 1
    if not policy.is_cpu:
        # Batches have one size for all layouts and owners, because all devices run one program: a divisor of the
        # number of matrices that any owner has of any layout.
        counts: list[int] = []
        for owner in columns:
            counts += map(len, owner.values())
        batch_size = policy.chunk_size(math.gcd(*counts), layouts[0].shape)
    exchanged = {name: jax.lax.axis_size(name) for name in round_.group.exchange_axes}
    batches = [Batch(layout, batch_size, exchanged) for layout in layouts]

    # Each owner has a row, with the place of each step's batch: its first column, and the number of its layout.
    rows: list[list[tuple[int, int]]] = []
    for owner in columns:
        row = []
        for layout, firsts in owner.items():
            # An owner's matrices of one layout follow each other in the buffer, as `assign_owners` gives them kind by
            # kind: a batch is so many of them in a row, and its place is that of the first.
            for column in firsts[::batch_size]:
                row.append((column, layouts.index(layout)))
        rows.append(row)
    steps = np.array(list(map(len, rows)))
    # All rows of a table have one length; an owner with fewer steps does not reach the places that fill up its row.
    for row in rows:
        row += [(0, 0)] * (steps.max() - len(row))
    return Loop(batches, np.array(rows, np.int32), steps)


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
