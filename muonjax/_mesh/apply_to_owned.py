"""Apply a function to the matrices of one owner, whose blocks the other devices have sent.

The blocks are in a buffer with a row from each device. The owner assembles a matrix from the blocks
in some columns, applies the function, divides the result into blocks again and writes these over
the old ones.

Owners differ in the number and shapes of their matrices, but all devices run one program. So there
is one loop for each shape, which reads the places of the owner's matrices in the buffer, and how
many there are, from tables with a row for each owner. Each shape is compiled once.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._common.platform_policy import Policy
from muonjax._matrices.batching import Function
from muonjax._mesh.assignment import Round
from muonjax._mesh.distribution import Axes
from muonjax._mesh.matrix_shards import ExchangeGroup, MatrixLayout

Owned = list[list[tuple[int, MatrixLayout]]]
"""For each owner its matrices of one shape: the first column in the buffer, and the layout."""


def apply_to_owned(
    f: Function, buffer: jax.Array, round_: Round, policy: Policy
) -> jax.Array:
    """The buffer with the result of `f.whole` in the place of each matrix whose blocks are in its
    columns.

    The buffer [devices, columns] has a row from each device along the exchange axes of the round.
    All devices run one program: a loop for each shape that any owner has, in which a device reads
    the places of its own matrices.
    """
    # The owners of all replicas, as `axis_index(owner_axes)` numbers them: replica by replica
    owners = list(itertools.chain(*round_.replicas))
    owned_by_shape: dict[tuple[int, int], Owned] = {}
    for i, owner in enumerate(owners):
        # An owner's matrices follow each other in the columns: two with blocks of 256 numbers and
        # one with 512 begin in the columns 0, 256 and 512.
        column = 0
        for matrices in owner:
            layout = matrices.layout
            owned = owned_by_shape.setdefault(layout.shape, [[] for _ in owners])
            for _ in range(matrices.count):
                owned[i].append((column, layout))
                column += layout.block_size
    for owned in owned_by_shape.values():
        buffer = _run_loop(f.whole, _loop(owned, policy), round_.group, buffer)
    return buffer


class Loop(NamedTuple):
    """The matrices of one shape, a batch of equally many in each step.

    Attributes:
      layouts: The layouts that matrices of this shape have. Those of one batch have one layout.
      batch_size: How many matrices a batch has.
      places: [owners, steps, 2]: the first column in the buffer of each step's batch,
        and its number in `layouts`.
      steps: [owners], how many steps there are.
    """

    layouts: list[MatrixLayout]
    batch_size: int
    places: np.ndarray
    steps: np.ndarray


def _loop(owned: Owned, policy: Policy) -> Loop:
    """The loop over matrices of one shape, a batch of equally many in each step.

    Each matrix is given by its first column in the buffer and its layout. Where one takes 32
    columns, two owners with the matrices [(0, A), (32, A)] and [(0, A), (32, B)] get with batches
    of one matrix the places [[(0, 0), (32, 0)], [(0, 0), (32, 1)]] and two steps each.
    """
    # How many matrices of each layout an owner has. One shape can have several layouts: leaves that
    # are sharded along other axes.
    counts = [Counter(layout for _, layout in matrices) for matrices in owned]
    layouts = list(dict.fromkeys(itertools.chain(*counts)))
    # On a CPU one matrix after the other is no slower. Each is a batch of one: without a batch
    # axis, the order of XLA's sums depends on the number of devices,
    # and results would not have the same bits on every mesh.
    batch_size = 1
    if not policy.is_cpu:
        # Batches have one size for all layouts and owners, because all devices run one program. The
        # size divides the number of matrices that any owner has of any layout, as `chunk_size`
        # gives a divisor. So all batches are full, and none has two layouts.
        divisor = 0
        for count in counts:
            divisor = math.gcd(divisor, *count.values())
        batch_size = policy.chunk_size(divisor, layouts[0].shape)

    steps = np.array([len(matrices) // batch_size for matrices in owned])
    # An owner with fewer steps than others does not reach the zeros at the end of its row.
    places = np.zeros((len(owned), steps.max(), 2), np.int32)
    for i, matrices in enumerate(owned):
        # An owner's matrices of one layout follow each other in the buffer, as `assign_owners`
        # gives them kind by kind: a batch is so many of them in a row,
        # and its place is that of the first.
        for step, (column, layout) in enumerate(matrices[::batch_size]):
            places[i, step] = column, layouts.index(layout)
    return Loop(layouts, batch_size, places, steps)


def _run_loop(
    apply: Callable[[jax.Array], jax.Array],
    loop: Loop,
    group: ExchangeGroup,
    buffer: jax.Array,
) -> jax.Array:
    """Apply a function to this owner's matrices of one shape,
    whose results replace their blocks in the buffer.

    Args:
      apply: The function of [loop.batch_size, m, n].
      loop: The matrices of all owners.
      group: Its mesh axes number the rows of the buffer, and the owners. Nothing is exchanged here.
      buffer: [devices, columns], a row from each device;
        the blocks of a matrix are in the same columns of all.
    """
    # A branch for each layout: only how blocks become matrices differs,
    # and `apply` is compiled once.
    branches = [
        functools.partial(_assemble, layout, group.exchange_axes)
        for layout in loop.layouts
    ]
    # All matrices have one shape, and all are cut into `len(buffer)` blocks, so the batches of all
    # layouts are equally wide. All batches are full: `_loop` chooses a divisor.
    width = loop.batch_size * loop.layouts[0].block_size
    # The number of this device among the owners. Without owner axes each device is the only owner
    # of its matrices, and `axis_index` of no axes is 0.
    owner = jax.lax.axis_index(group.owner_axes)
    # [steps, 2]
    places = jnp.asarray(loop.places)[owner]

    def step(i, buffer):
        # The first column of this batch, and the number of its layout
        column, number = places[i]
        # [devices, width]
        blocks = jax.lax.dynamic_slice(buffer, (0, column), (len(buffer), width))
        assemble = functools.partial(jax.lax.switch, number, branches)
        # [loop.batch_size, m, n]. Without the barriers XLA would fuse the first and last operations
        # of `apply` with the exchange, and round differently on each mesh.
        x = jax.lax.optimization_barrier(assemble(blocks))
        y = jax.lax.optimization_barrier(apply(x))
        # `assemble` only moves entries, so that its transpose is its inverse.
        (blocks,) = jax.linear_transpose(assemble, blocks)(y)
        return jax.lax.dynamic_update_slice(buffer, blocks, (0, column))

    # Owners may have unequal numbers of matrices. Where all have as many,
    # the loop has one length, which XLA then knows.
    is_equal = (loop.steps == loop.steps[0]).all()
    steps = loop.steps[0] if is_equal else jnp.asarray(loop.steps)[owner]
    return jax.lax.fori_loop(0, steps, step, buffer)


def _assemble(
    layout: MatrixLayout, exchange_axes: Axes, blocks: jax.Array
) -> jax.Array:
    """Matrices [count, m, n] of one layout from their blocks
    [devices, count * elements of a block].

    The coordinates along the mesh axes of the all-to-all, `exchange_axes`, number the devices.
    Each of these mesh axes cuts one axis of a block, which keeps the axes of its leaf: a block of a
    query kernel [d, heads, size] has three. `layout.gathered` has for each axis of a block the mesh
    axes that cut it. This only moves entries: `_run_loop` takes its transpose as its inverse, to
    cut results into blocks.
    """
    # Blocks arrive as (*exchange_axes, count, *axes of a block): those of matrices [16, 64] whose
    # rows "fsdp" shards as (fsdp, count, block rows, columns). A matrix has the rows (fsdp, block
    # rows), so the order is (count, fsdp, block rows, columns): first the count, then for each axis
    # of a block the mesh axes that cut it, and the axis itself.
    count_axis = len(exchange_axes)
    order = [count_axis]
    for axis, gathered in enumerate(layout.gathered):
        order += map(exchange_axes.index, gathered)
        order.append(count_axis + 1 + axis)
    sizes = map(jax.lax.axis_size, exchange_axes)
    blocks = blocks.reshape(*sizes, -1, *layout.block_shape)
    return blocks.transpose(order).reshape(-1, *layout.shape)
