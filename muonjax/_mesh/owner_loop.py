"""Apply a function to the matrices that a device owns, in loops whose lengths depend on the device.

Owners differ in the number and shapes of their matrices, but all devices run one program. So there is one loop for each
shape. It reads its length, and the offsets of the matrices in the exchanged buffer, from tables that are indexed by the
owner's coordinates in the mesh. Each shape is thus compiled once, for all owners. `layout` explains the words.
"""

import collections
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._common.platform import Policy
from muonjax._matrices.batching import Function
from muonjax._mesh.rounds import Round
from muonjax._mesh.shards import UnitLayout


class _Loop(NamedTuple):
    """The units of one shape, a batch in each step.

    Attributes:
      layouts: The different layouts of units of this shape.
      batch: Number of units in a step, which are of one layout.
      offsets: [owners, steps], where each batch starts in the buffer.
      layout_index: [owners, steps], of each batch's layout in `layouts`.
      length: [owners], number of steps: equal where owners sum over mesh axes, and those that have finished read past
        the end of the buffer.
    """

    layouts: tuple[UnitLayout, ...]
    batch: int
    offsets: np.ndarray
    layout_index: np.ndarray
    length: np.ndarray

    @property
    def width(self) -> int:
        """Columns of the buffer that a batch takes: shares of one shape, from as many devices, are equal."""
        return self.batch * self.layouts[0].share_size


def apply_to_owned(
    f: Function, buffer: jax.Array, round_: Round, mesh_shape: Mapping[str, int], policy: Policy
) -> jax.Array:
    """Apply f to each matrix whose blocks are in the columns of `buffer`, [devices, size]; the results replace them."""
    group, size = round_.group, buffer.shape[1]
    owner = jax.lax.axis_index(group.owner_axes) if group.owner_axes else 0
    loops = _loops(round_, policy)
    if group.tensor:  # one that has finished works on zeros past the end
        buffer = jnp.pad(buffer, ((0, 0), (0, max(loop.width for loop in loops))))

    def own(table: np.ndarray) -> Any:
        """This owner's row; static where all rows are equal."""
        return table[0] if (table == table[0]).all() else jnp.asarray(table)[owner]

    def apply(x: jax.Array) -> jax.Array:
        if not policy.is_cpu or len(x) == 1:
            return f(x, group.tensor)
        # On a CPU one at a time, which is no slower there, and each as a batch of one: without a batch axis, the order
        # of XLA's sums depends on the number of devices, and the result would not be bit for bit equal on every mesh.
        return jax.lax.map(lambda one: f(one[None], group.tensor)[0], x)

    exchanged = {axis: mesh_shape[axis] for axis in group.exchange}
    for loop in loops:
        tables = jnp.asarray(own(loop.offsets)), jnp.asarray(own(loop.layout_index))
        body = functools.partial(_batch_step, apply, loop, exchanged, tables)
        buffer = jax.lax.fori_loop(0, own(loop.length), body, buffer)
    return buffer[:, :size]


def _loops(round_: Round, policy: Policy) -> list[_Loop]:
    """One for each shape of matrices."""
    by_shape: dict[tuple, list[list[tuple[int, UnitLayout]]]] = {}
    for owner, owned in enumerate(round_.owned):
        offset = 0
        for run in owned:
            rows = by_shape.setdefault(run.layout.matrices, [[] for _ in round_.owned])
            rows[owner] += [(offset + i * run.layout.share_size, run.layout) for i in range(run.count)]
            offset += run.count * run.layout.share_size
    loops = []
    for shape, rows in by_shape.items():
        counts = [collections.Counter(layout for _, layout in row) for row in rows]
        layouts = tuple(dict.fromkeys(layout for count in counts for layout in count))
        common = math.gcd(*(number for count in counts for number in count.values()))
        # Units of one layout follow each other in the buffer, as `rounds` puts them, so no batch has two layouts.
        batch = 1 if policy.is_cpu else policy.chunk_size(common, shape[1:])
        length = np.array([len(row) // batch for row in rows])
        offsets = np.full((len(rows), length.max()), round_.size if round_.group.tensor else 0, np.int32)
        layout_index = np.zeros_like(offsets)
        for owner, row in enumerate(rows):
            offsets[owner, : length[owner]] = [offset for offset, _ in row[::batch]]
            layout_index[owner, : length[owner]] = [layouts.index(layout) for _, layout in row[::batch]]
        if round_.group.tensor:
            length[:] = length.max()
        loops.append(_Loop(layouts, batch, offsets, layout_index, length))
    return loops


def _batch_step(
    apply: Callable[[jax.Array], jax.Array],
    loop: _Loop,
    exchanged: Mapping[str, int],
    tables: tuple[jax.Array, jax.Array],
    step: jax.Array,
    buffer: jax.Array,
) -> jax.Array:
    """Takes a batch of matrices from the buffer and writes the results over it.

    Args:
      apply: [matrices, m, n] -> the same.
      loop: Of this shape.
      exchanged: Mesh axes and their sizes.
      tables: This owner's offsets and indices of layouts, [steps].
      step: Which of them.
      buffer: [devices, size].
    """
    offset, layout_index = (table[step] for table in tables)
    start = (0, offset)
    blocks = jax.lax.dynamic_slice(buffer, start, (buffer.shape[0], loop.width))
    assemble, divide = (
        [functools.partial(way, layout, exchanged, loop.batch) for layout in loop.layouts]
        for way in (_assemble, _divide)
    )
    x = jax.lax.switch(layout_index, assemble, blocks)
    # The barriers keep f's operations apart from the exchange: fused with it, f could round differently on each mesh.
    y = jax.lax.optimization_barrier(apply(jax.lax.optimization_barrier(x)))
    return jax.lax.dynamic_update_slice(buffer, jax.lax.switch(layout_index, divide, y), start)


def _assemble(layout: UnitLayout, exchanged: Mapping[str, int], batch: int, blocks: jax.Array) -> jax.Array:
    """[devices, batch of blocks] -> [matrices, m, n]."""
    blocks = blocks.reshape(*exchanged.values(), batch, *layout.share_shape)
    blocks = blocks.transpose(_order(layout, exchanged))
    matrices = jax.vmap(layout.view.to_matrices)(blocks.reshape(batch, *layout.view.leaf_shape))
    matrices = matrices.reshape(-1, *matrices.shape[2:])
    return matrices.mT if layout.tall else matrices


def _divide(layout: UnitLayout, exchanged: Mapping[str, int], batch: int, matrices: jax.Array) -> jax.Array:
    """The inverse of `_assemble`."""
    matrices = matrices.mT if layout.tall else matrices
    units = jax.vmap(layout.view.to_leaf)(matrices.reshape(batch, -1, *matrices.shape[1:]))
    order = _order(layout, exchanged)
    shape = (*exchanged.values(), batch, *layout.share_shape)
    blocks = units.reshape([shape[i] for i in order]).transpose(np.argsort(order))
    return blocks.reshape(max(1, math.prod(exchanged.values())), -1)


def _order(layout: UnitLayout, exchanged: Mapping[str, int]) -> list[int]:
    """Order of the axes (*exchanged, batch, *block) in which the blocks along each axis of the unit are adjacent."""
    batch = len(exchanged)
    order = [batch]
    for i, axes in enumerate(layout.gathered):
        order += [*map(list(exchanged).index, axes), batch + 1 + i]
    return order
