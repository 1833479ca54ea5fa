"""Apply a function to every matrix of sharded leaves, once: at its owner, to which the mesh exchanges it.

What runs inside of `shard_map`, over all axes of the mesh, is a series of rounds. In each

  1. every device packs the blocks that it stores, one row for each device of the exchange;
  2. one `all_to_all` over all mesh axes of the group sends every owner the blocks of its matrices;
  3. the owner applies the function and replaces the blocks by the results;
  4. one `all_to_all` returns them;
  5. where leaves are replicated, one `all_gather` gives the results to all replicas; where only few replicas own units,
     a `psum` with zeros does so.

Owners differ in the number and shapes of their matrices, but all devices run one program. So step 3 is one loop for
each shape. It reads its length, and the offsets of the matrices in the exchanged buffer, from tables that are indexed
by the owner's coordinates in the mesh. Each shape is thus compiled once, for all owners. `assignment` has the words.
"""

import collections
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from muonjax._common.platform import Policy, sharded_like
from muonjax._matrices.batching import Function, map_leaves
from muonjax._matrices.matrix_view import MatrixView
from muonjax._mesh.assignment import OwnedUnits, Round, ShardedLeaf, UnitLayout, assign_owners, seconds_of
from muonjax._mesh.distribution import OnMesh, even_sharding, partition_spec

Arrays = Sequence[jax.Array]


def map_on_mesh(
    on_mesh: OnMesh,
    f: Function,
    leaves: Arrays,
    views: Sequence[MatrixView],
    dtypes: Sequence[jnp.dtype],
    policy: Policy,
    *,
    call: str,
) -> list[jax.Array]:
    """f on each matrix of the leaves, once; the results are sharded as the leaves are.

    Args:
      on_mesh: How the leaves are sharded.
      f: [*batch, m, n] with m <= n, and the mesh axes that shard the columns -> the same shape and dtype.
      leaves: Arrays.
      views: The view of each leaf.
      dtypes: In which each leaf is exchanged.
      policy: For the mesh's devices.
      call: The public function, for errors.
    """
    mesh, mesh_shape = on_mesh.mesh, dict(on_mesh.mesh.shape)
    _check_mesh(mesh, leaves, call)
    sharded = [
        ShardedLeaf(view, even_sharding(leaf.shape, spec, mesh_shape), jnp.dtype(dtype))
        for leaf, view, spec, dtype in zip(leaves, views, on_mesh.specs, dtypes, strict=True)
    ]
    specs = tuple(partition_spec(leaf.sharding) for leaf in sharded)
    if on_mesh.explicit and mesh.size == 1:
        on_blocks = functools.partial(map_leaves, f, views=views, policy=policy)
    else:
        rounds = assign_owners(sharded, mesh_shape, functools.partial(seconds_of, f)).rounds
        on_blocks = functools.partial(exchange, f, views=views, rounds=rounds, policy=policy)
    # check_vma: an all-gather makes replicas, which the checker can't see.
    run = jax.shard_map(
        lambda *blocks: tuple(on_blocks(blocks)), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
    )
    if AxisType.Explicit not in mesh.axis_types:
        return list(run(*leaves))
    pairs = zip(leaves, specs, strict=True)
    results = run(*(jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in pairs))
    return [sharded_like(y, x) for y, x in zip(results, leaves, strict=True)]


def _check_mesh(mesh: Mesh | AbstractMesh, leaves: Arrays, call: str) -> None:
    for other in [jax.typeof(leaf).sharding.mesh for leaf in leaves]:
        if other.size > 1 and AxisType.Manual in other.axis_types:
            raise ValueError(f"{call}(distribution=...) can't run inside of another shard_map.")
        if other.size > 1 and other.size != mesh.size:
            raise ValueError(
                f"{call}: the Distribution's mesh {dict(mesh.shape)} has {mesh.size} devices, but the arrays are on "
                f"{other.size}, {dict(other.shape)}; make the Distribution with the mesh of the parameters."
            )


def exchange(
    f: Function, blocks: Arrays, views: Sequence[MatrixView], rounds: Sequence[Round], policy: Policy
) -> list[jax.Array]:
    """Apply f to every matrix once, at its owner.

    Args:
      f: Takes matrices with m <= n.
      blocks: This device's block of each leaf.
      views: The view of each leaf.
      rounds: The rounds of all leaves.
      policy: The policy for the devices.

    Returns:
      This device's block of each result.
    """
    axes = [view.unit_axes for view in views]
    pairs = zip(blocks, axes, strict=True)
    units = [x.transpose(batch + own).reshape(-1, *(x.shape[i] for i in own)) for x, (batch, own) in pairs]
    parts: list[list[tuple[int, jax.Array]]] = [[] for _ in blocks]  # of each result: (first unit, units)
    for round_ in rounds:
        for run, result in _run_round(f, round_, units, policy):
            parts[run.leaf].append((run.start, result))
    results = []
    for block, (batch, own), found in zip(blocks, axes, parts, strict=True):
        stack = jnp.concatenate([part for _, part in sorted(found, key=lambda one: one[0])])
        order = batch + own
        result = stack.reshape([block.shape[i] for i in order]).transpose(np.argsort(order))
        results.append(result.astype(block.dtype))
    return results


def _run_round(f: Function, round_: Round, units: Arrays, policy: Policy) -> list[tuple[OwnedUnits, Any]]:
    """Results, [units, *axes of a unit], of all that the round exchanges."""
    group = round_.group
    replicas, devices = len(round_.owned), len(round_.owned[0])
    packs = [functools.partial(_pack, round_, owned, units) for owned in round_.owned]
    buffer = jax.lax.switch(jax.lax.axis_index(group.replicas) if replicas > 1 else 0, packs)

    def swap(buffer: jax.Array) -> jax.Array:
        return buffer if devices == 1 else jax.lax.all_to_all(buffer, group.exchange, 0, 0)

    buffer = swap(_apply_to_owned(f, swap(buffer), round_, policy))
    buffers = [buffer] if replicas == 1 else _share_with_replicas(buffer, round_)
    return [result for each in zip(buffers, round_.owned, strict=True) for result in _unpack(*each)]


def _pack(round_: Round, owned: Sequence[Sequence[OwnedUnits]], units: Arrays) -> jax.Array:
    """[devices, size]: a row for each owner, with what it gets from this device."""
    parts, size = [], round_.size
    for own in owned:
        blocks = [units[run.leaf][run.start : run.start + run.count].reshape(-1) for run in own]
        padding = jnp.zeros(size - sum(map(len, blocks)), round_.group.dtype)
        parts += [*(block.astype(round_.group.dtype) for block in blocks), padding]
    return jnp.concatenate(parts).reshape(-1, size)


def _unpack(buffer: jax.Array, owned: list[list[OwnedUnits]]) -> Iterator[tuple[OwnedUnits, jax.Array]]:
    """The inverse of `_pack`."""
    flat = buffer.reshape(-1)
    for owner, own in enumerate(owned):
        start = owner * buffer.shape[1]
        for run in own:
            end = start + run.count * run.layout.size
            yield run, jax.lax.slice_in_dim(flat, start, end).reshape(-1, *run.layout.local_shape)
            start = end


def _share_with_replicas(buffer: jax.Array, round_: Round) -> list[jax.Array]:
    """The buffers of all replicas, on each of them."""
    if not round_.sums:
        return list(jax.lax.all_gather(buffer, round_.group.replicas))
    offsets = [0, *itertools.accumulate(round_.sizes)]
    own = jnp.asarray(offsets)[jax.lax.axis_index(round_.group.replicas)]
    # After a replica's own part there is only padding, which is zero, so it may overlap the part of the next replica.
    padded = jnp.zeros((buffer.shape[0], offsets[-1] + round_.size), buffer.dtype)
    padded = jax.lax.dynamic_update_slice(padded, buffer, (0, own))
    summed = jax.lax.psum(padded[:, : offsets[-1]], round_.group.replicas)
    return [summed[:, start : start + size] for start, size in zip(offsets, round_.sizes, strict=False)]


class _Loop(NamedTuple):
    """The units of one shape, a batch in each step.

    Attributes:
      layouts: The different layouts of units of this shape.
      batch: Number of units in a step, which are of one layout.
      width: Columns of the buffer that a batch takes.
      offsets: [owners, steps], where each batch starts in the buffer.
      layout_index: [owners, steps], of each batch's layout in `layouts`.
      length: [owners], number of steps: equal where owners sum over mesh axes, and those that have finished read past
        the end of the buffer.
    """

    layouts: list[UnitLayout]
    batch: int
    width: int
    offsets: np.ndarray
    layout_index: np.ndarray
    length: np.ndarray


def _loops(round_: Round, policy: Policy) -> list[_Loop]:
    """One for each shape of matrices."""
    by_shape: dict[tuple, list[list[tuple[int, UnitLayout]]]] = {}
    owners = list(itertools.chain(*round_.owned))
    for owner, owned in enumerate(owners):
        offset = 0
        for run in owned:
            rows = by_shape.setdefault(run.layout.matrices, [[] for _ in owners])
            end = offset + run.count * run.layout.size
            rows[owner] += [(start, run.layout) for start in range(offset, end, run.layout.size)]
            offset = end
    loops = []
    for shape, rows in by_shape.items():
        counts = [collections.Counter(layout for _, layout in row) for row in rows]
        layouts = list(dict.fromkeys(layout for count in counts for layout in count))
        common = math.gcd(*(number for count in counts for number in count.values()))
        # Units of one layout follow each other in the buffer, as `Round` says, so no batch has two layouts.
        batch = 1 if policy.is_cpu else policy.chunk_size(common, shape[1:])
        length = np.array([len(row) // batch for row in rows])
        offsets = np.full((len(rows), length.max()), round_.size if round_.group.tensor else 0, np.int32)
        layout_index = np.zeros_like(offsets)
        for owner, row in enumerate(rows):
            offsets[owner, : length[owner]] = [offset for offset, _ in row[::batch]]
            layout_index[owner, : length[owner]] = [layouts.index(layout) for _, layout in row[::batch]]
        if round_.group.tensor:
            length[:] = length.max()
        loops.append(_Loop(layouts, batch, batch * layouts[0].size, offsets, layout_index, length))
    return loops


def _apply_to_owned(f: Function, buffer: jax.Array, round_: Round, policy: Policy) -> jax.Array:
    """Apply f to each matrix whose blocks are in the columns of `buffer`, [devices, size]; the results replace them."""
    group, (devices, size) = round_.group, buffer.shape
    owner = jax.lax.axis_index(group.owner_axes) if group.owner_axes else 0
    exchanged = {axis: jax.lax.axis_size(axis) for axis in group.exchange}
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

    def run(loop: _Loop, buffer: jax.Array) -> jax.Array:
        offsets, layout_index = jnp.asarray(own(loop.offsets)), jnp.asarray(own(loop.layout_index))
        assemble = [functools.partial(_assemble, layout, exchanged, loop.batch) for layout in loop.layouts]
        divide = [functools.partial(_divide, layout, exchanged, loop.batch) for layout in loop.layouts]

        def step(i: jax.Array, buffer: jax.Array) -> jax.Array:
            start, index = (0, offsets[i]), layout_index[i]
            blocks = jax.lax.dynamic_slice(buffer, start, (devices, loop.width))
            x = jax.lax.switch(index, assemble, blocks)
            # The barriers keep f's operations apart from the exchange: fused with it, f could round differently on
            # each mesh.
            y = jax.lax.optimization_barrier(apply(jax.lax.optimization_barrier(x)))
            return jax.lax.dynamic_update_slice(buffer, jax.lax.switch(index, divide, y), start)

        return jax.lax.fori_loop(0, own(loop.length), step, buffer)

    for loop in loops:
        buffer = run(loop, buffer)
    return buffer[:, :size]


def _assemble(layout: UnitLayout, exchanged: Mapping[str, int], batch: int, blocks: jax.Array) -> jax.Array:
    """[devices, batch of blocks] -> [matrices, m, n]."""
    blocks = blocks.reshape(*exchanged.values(), batch, *layout.local_shape)
    blocks = blocks.transpose(_order(layout, exchanged))
    matrices = jax.vmap(layout.view.to_matrices)(blocks.reshape(batch, *layout.view.leaf_shape))
    matrices = matrices.reshape(-1, *matrices.shape[2:])
    return matrices.mT if layout.tall else matrices


def _divide(layout: UnitLayout, exchanged: Mapping[str, int], batch: int, matrices: jax.Array) -> jax.Array:
    """The inverse of `_assemble`."""
    matrices = matrices.mT if layout.tall else matrices
    units = jax.vmap(layout.view.to_leaf)(matrices.reshape(batch, -1, *matrices.shape[1:]))
    order = _order(layout, exchanged)
    shape = (*exchanged.values(), batch, *layout.local_shape)
    blocks = units.reshape([shape[i] for i in order]).transpose(np.argsort(order))
    return blocks.reshape(max(1, math.prod(exchanged.values())), -1)


def _order(layout: UnitLayout, exchanged: Mapping[str, int]) -> list[int]:
    """Order of the axes (*exchanged, batch, *block) in which the blocks along each axis of the unit are adjacent."""
    batch = len(exchanged)
    order = [batch]
    for i, axes in enumerate(layout.gathered):
        order += [*map(list(exchanged).index, axes), batch + 1 + i]
    return order
