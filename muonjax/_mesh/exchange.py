"""On a mesh, third: matrices travel to their homes, through a function, and back. Knows no iteration.

Inside `shard_map`, a lane at a time: every device packs what it stores, a row for each device of the exchange; one
`all_to_all` over all of the lane's mesh axes; each device puts one matrix after the other together, calls the function,
and writes the pieces over the old ones; one `all_to_all` back, and an `all_gather` over the replicas. A device's
matrices differ from another's in number and shape, so the loops read offsets and lengths from tables by the device's
place in the mesh: each shape is compiled once, whoever owns it.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._mesh.assignment import OwnerPlan, Shipment, size_of
from muonjax._mesh.layout import Kind, Lane, Leaf, unit_axes
from muonjax._policy import Policy

Function = Callable[..., jax.Array]
"""[*batch, m, n], and the mesh axes over which the columns are cut (default: none) -> the same shape and dtype."""


def exchange(f: Function, blocks: Sequence[jax.Array], plan: OwnerPlan, platform: str) -> list[jax.Array]:
    """f on every matrix; call it inside of `shard_map` over all axes of the mesh.

    Args:
      f: Takes matrices with m <= n.
      blocks: This device's part of each leaf.
      plan: Who calls f on which matrix.
      platform: Of the devices.

    Returns:
      This device's part of each result.
    """
    units = [_to_units(block, leaf) for block, leaf in zip(blocks, plan.leaves, strict=True)]
    arrived: list[list[tuple[int, jax.Array]]] = [[] for _ in blocks]
    for lane, trips in plan.shipments.items():
        for trip in trips:
            for leaf, start, part in _travel(f, lane, trip, units, plan.mesh_shape, platform):
                arrived[leaf].append((start, part))
    results = []
    for block, leaf, parts in zip(blocks, plan.leaves, arrived, strict=True):
        stack = jnp.concatenate([part for _, part in sorted(parts, key=lambda entry: entry[0])])
        results.append(_from_units(stack, leaf, block.shape).astype(block.dtype))
    return results


def _to_units(block: jax.Array, leaf: Leaf) -> jax.Array:
    """[*leaf axes] -> [units, *the axes of a unit], on this device."""
    batch, own = unit_axes(leaf.view)
    block = block.transpose(batch + own)
    return block.reshape(-1, *block.shape[len(batch) :])


def _from_units(stack: jax.Array, leaf: Leaf, shape: tuple[int, ...]) -> jax.Array:
    batch, own = unit_axes(leaf.view)
    order = batch + own
    return stack.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def _travel(
    f: Function,
    lane: Lane,
    trip: Shipment,
    units: Sequence[jax.Array],
    mesh_shape: Mapping[str, int],
    platform: str,
) -> list[tuple[int, int, jax.Array]]:
    """There, f, and back: (leaf, first unit, [units, *axes of a unit]) of everything on board."""
    copies, devices = size_of(mesh_shape, lane.replicas), size_of(mesh_shape, lane.exchange)
    slots = _slots(lane, mesh_shape)
    size = trip.elements
    if size == 0:
        return []

    def pack(copy: int) -> jax.Array:
        """[devices, size]: the row at slots[home, share] is for the device that is that share of that home."""
        rows: list[list[jax.Array]] = [[] for _ in range(devices)]
        for own, runs in zip(slots, trip.homes[copy * len(slots) : (copy + 1) * len(slots)], strict=True):
            filled = 0
            for run in runs:
                shared = _share(units[run.leaf][run.start : run.start + run.count], run.kind)
                for slot, part in zip(own, shared.astype(lane.dtype), strict=True):
                    rows[slot].append(part)
                filled += run.count * run.kind.elements
            for slot in own:
                rows[slot].append(jnp.zeros(size - filled, lane.dtype))
        return jnp.concatenate([part for row in rows for part in row]).reshape(devices, size)

    if copies > 1:
        packs = [functools.partial(pack, copy) for copy in range(copies)]
        buffer = jax.lax.switch(jax.lax.axis_index(lane.replicas), packs)
    else:
        buffer = pack(0)
    if devices > 1:
        buffer = jax.lax.all_to_all(buffer, lane.exchange, 0, 0)
    buffer = _at_home(f, buffer, lane, trip, mesh_shape, platform)
    if devices > 1:
        buffer = jax.lax.all_to_all(buffer, lane.exchange, 0, 0)
    buffer = jax.lax.all_gather(buffer, lane.replicas) if copies > 1 else buffer[None]

    results = []
    for home, runs in enumerate(trip.homes):
        copy, own = divmod(home, len(slots))
        start = 0
        for run in runs:
            stop = start + run.count * run.kind.elements
            shared = jnp.stack([buffer[copy, slot, start:stop] for slot in slots[own]])
            results.append((run.leaf, run.start, _unshare(shared, run.kind)))
            start = stop
    return results


def _slots(lane: Lane, mesh_shape: Mapping[str, int]) -> list[list[int]]:
    """Rank within the exchange of [home, share], for the homes of one replica."""
    sizes = [mesh_shape[axis] for axis in lane.exchange]
    order = sorted(range(len(sizes)), key=lambda i: lane.exchange[i] in lane.tensor)
    shares = size_of(mesh_shape, lane.shares)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, shares).tolist()


def _share(units: jax.Array, kind: Kind) -> jax.Array:
    """[units, *local] -> [shares, elements of all units]."""
    axis, count = kind.split
    cut = (*kind.local[:axis], count, kind.piece[axis], *kind.local[axis + 1 :])
    return jnp.moveaxis(units.reshape(-1, *cut), 1 + axis, 0).reshape(count, -1)


def _unshare(shares: jax.Array, kind: Kind) -> jax.Array:
    axis, count = kind.split
    parts = jnp.moveaxis(shares.reshape(count, -1, *kind.piece), 0, 1 + axis)
    return parts.reshape(-1, *kind.local)


class _Loop(NamedTuple):
    """One shape's matrices at home, a chunk a turn."""

    kinds: tuple[Kind, ...]
    batch: int  # units a turn
    offsets: np.ndarray  # [homes, turns]
    variants: np.ndarray  # [homes, turns]: which of the kinds
    turns: np.ndarray  # [homes]


def _loops(trip: Shipment, platform: str) -> list[_Loop]:
    entries: dict[tuple, list[list[tuple[int, Kind]]]] = {}
    for home, runs in enumerate(trip.homes):
        offset = 0
        for run in runs:
            rows = entries.setdefault(run.kind.shape, [[] for _ in trip.homes])
            rows[home] += [(offset + i * run.kind.elements, run.kind) for i in range(run.count)]
            offset += run.count * run.kind.elements
    loops = []
    for shape, rows in entries.items():
        kinds = tuple(dict.fromkeys(kind for row in rows for _, kind in row))
        counts = [sum(kind == one for _, kind in row) for row in rows for one in kinds]
        batch = 1 if platform == "cpu" else Policy(platform).chunk_size(math.gcd(*counts), shape[1:])
        turns = np.array([len(row) // batch for row in rows])
        offsets = np.zeros((len(rows), turns.max()), np.int32)
        variants = np.zeros_like(offsets)
        for home, row in enumerate(rows):
            offsets[home, : turns[home]] = [offset for offset, _ in row[::batch]]
            variants[home, : turns[home]] = [kinds.index(kind) for _, kind in row[::batch]]
        loops.append(_Loop(kinds, batch, offsets, variants, turns))
    return loops


def _at_home(
    f: Function, buffer: jax.Array, lane: Lane, trip: Shipment, mesh_shape: Mapping[str, int], platform: str
) -> jax.Array:
    """f on each matrix whose pieces lie in the columns of `buffer`, [devices, size]."""
    loops = _loops(trip, platform)
    home = jax.lax.axis_index(lane.homes) if lane.homes else 0
    sizes = [mesh_shape[axis] for axis in lane.exchange]
    size = buffer.shape[1]

    def mine(table: np.ndarray) -> Any:
        """The row of this device's home; static where all homes agree."""
        return table[0] if (table == table[0]).all() else jnp.asarray(table)[home]

    def each(x: jax.Array) -> jax.Array:
        if platform != "cpu":
            return f(x, lane.tensor)
        # On a CPU one at a time, for that is no slower there. A matrix gets the same bits whoever shares its home, if
        # it is a batch of one: without a batch axis, XLA orders its sums by the number of devices.
        return f(x, lane.tensor) if len(x) == 1 else jax.lax.map(lambda one: f(one[None], lane.tensor)[0], x)

    # Homes that sum over mesh axes turn in step; who has nothing left takes zeros past the end.
    idle = max(loop.batch * loop.kinds[0].elements for loop in loops) if lane.tensor else 0
    buffer = jnp.pad(buffer, ((0, 0), (0, idle))) if idle else buffer
    for loop in loops:
        if lane.tensor:
            busy = np.arange(loop.offsets.shape[1]) < loop.turns[:, None]
            loop = loop._replace(
                offsets=np.where(busy, loop.offsets, size), turns=np.full_like(loop.turns, loop.turns.max())
            )
        offsets, variants = jnp.asarray(mine(loop.offsets)), jnp.asarray(mine(loop.variants))
        gather = [functools.partial(_gather, kind, lane, sizes, loop.batch) for kind in loop.kinds]
        scatter = [functools.partial(_scatter, kind, lane, sizes, loop.batch) for kind in loop.kinds]

        def turn(i, buffer, loop=loop, offsets=offsets, variants=variants, gather=gather, scatter=scatter):
            width = loop.batch * loop.kinds[0].elements
            pieces = jax.lax.dynamic_slice(buffer, (0, offsets[i]), (buffer.shape[0], width))
            x = jax.lax.switch(variants[i], gather, pieces)
            # Barriers: how a matrix came here must not change how XLA fuses, and so rounds, what f does to it.
            y = jax.lax.optimization_barrier(each(jax.lax.optimization_barrier(x)))
            return jax.lax.dynamic_update_slice(
                buffer, jax.lax.switch(variants[i], scatter, y), (0, offsets[i])
            )

        buffer = jax.lax.fori_loop(0, mine(loop.turns), turn, buffer)
    return buffer[:, :size]


def _gather(kind: Kind, lane: Lane, sizes: Sequence[int], batch: int, pieces: jax.Array) -> jax.Array:
    """[devices, batch of pieces] -> [batch, m, n]."""
    pieces = pieces.reshape(*sizes, batch, *kind.piece).transpose(_order(kind, lane))
    matrices = jax.vmap(kind.view.to_matrices)(pieces.reshape(batch, *kind.view.leaf_shape))
    matrices = matrices.reshape(-1, *matrices.shape[2:])
    return matrices.mT if kind.tall else matrices


def _scatter(kind: Kind, lane: Lane, sizes: Sequence[int], batch: int, matrices: jax.Array) -> jax.Array:
    """The inverse of `_gather`."""
    matrices = matrices.mT if kind.tall else matrices
    whole = jax.vmap(kind.view.to_leaf)(matrices.reshape(batch, -1, *matrices.shape[1:]))
    order = _order(kind, lane)
    shape = (*sizes, batch, *kind.piece)
    return (
        whole.reshape([shape[i] for i in order])
        .transpose(np.argsort(order))
        .reshape(max(1, math.prod(sizes)), -1)
    )


def _order(kind: Kind, lane: Lane) -> list[int]:
    """Axes of (*exchange, batch, *piece) such that the pieces of each of the unit's axes meet."""
    batch = len(lane.exchange)
    order = [batch]
    for i, cuts in enumerate(kind.cuts):
        order += [*map(lane.exchange.index, cuts), batch + 1 + i]
    return order
