"""Exchange sharded matrices with their owners: pack, all-to-all, apply a function, all-to-all back, unpack.

Runs inside `shard_map` over all axes of the mesh. Each round has these steps. Every device packs the blocks that it
stores, one row for each device of the exchange. One `all_to_all` over all mesh axes of the group sends every owner the
blocks of its matrices. The owner applies the function and replaces the blocks by the results (see `owner_loop`). One
`all_to_all` returns them. Where leaves are replicated, one `all_gather` gives the results to all replicas; where only
few replicas own units, a `psum` with zeros does so.

Units, blocks and shares are explained in `layout`.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._common.platform import Policy
from muonjax._matrices.batching import Function
from muonjax._mesh.assignment import Assignment
from muonjax._mesh.owner_loop import apply_to_owned
from muonjax._mesh.rounds import Round
from muonjax._mesh.shards import ShardedLeaf, UnitLayout, size_of, unit_axes


def exchange(
    f: Function, blocks: Sequence[jax.Array], assignment: Assignment, policy: Policy
) -> list[jax.Array]:
    """Apply f to every matrix once, at its owner.

    Args:
      f: Takes matrices with m <= n.
      blocks: This device's block of each leaf.
      assignment: The owner of each matrix.
      policy: The policy for the devices.

    Returns:
      This device's block of each result.
    """
    units = [_to_units(block, leaf) for block, leaf in zip(blocks, assignment.leaves, strict=True)]
    results: list[list[tuple[int, jax.Array]]] = [[] for _ in blocks]
    for round_ in assignment.rounds:
        if round_.size:
            _run_round(f, round_, units, results, assignment, policy)
    arrays = []
    for block, leaf, parts in zip(blocks, assignment.leaves, results, strict=True):
        stack = jnp.concatenate([part for _, part in sorted(parts, key=lambda entry: entry[0])])
        arrays.append(_from_units(stack, leaf, block.shape).astype(block.dtype))
    return arrays


def _to_units(block: jax.Array, leaf: ShardedLeaf) -> jax.Array:
    """[*axes of the leaf] -> [units, *axes of a unit], on this device."""
    batch, own = unit_axes(leaf.view)
    block = block.transpose(batch + own)
    return block.reshape(-1, *block.shape[len(batch) :])


def _from_units(stack: jax.Array, leaf: ShardedLeaf, shape: tuple[int, ...]) -> jax.Array:
    batch, own = unit_axes(leaf.view)
    order = batch + own
    return stack.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def _run_round(
    f: Function,
    round_: Round,
    units: Sequence[jax.Array],
    results: Sequence[list[tuple[int, jax.Array]]],
    assignment: Assignment,
    policy: Policy,
) -> None:
    """Appends (first unit, [units, *axes of a unit]) to the results of each leaf."""
    group, mesh_shape = round_.group, assignment.mesh_shape
    replicas, devices = size_of(mesh_shape, group.replicas), size_of(mesh_shape, group.exchange)
    ranks = group.ranks(mesh_shape)  # the owners come replica by replica
    packs = [functools.partial(_pack, round_, units, r * len(ranks), ranks) for r in range(replicas)]
    buffer = jax.lax.switch(jax.lax.axis_index(group.replicas) if replicas > 1 else 0, packs)
    if devices > 1:
        buffer = jax.lax.all_to_all(buffer, group.exchange, 0, 0)
    buffer = apply_to_owned(f, buffer, round_, mesh_shape, policy)
    if devices > 1:
        buffer = jax.lax.all_to_all(buffer, group.exchange, 0, 0)
    _unpack(_share_with_replicas(buffer, round_, replicas), round_, ranks, results)


def _unpack(
    buffers: Sequence[jax.Array],
    round_: Round,
    ranks: list[list[int]],
    results: Sequence[list[tuple[int, jax.Array]]],
) -> None:
    """The inverse of `_pack`, from [devices, size] of each replica."""
    for owner, owned in enumerate(round_.owned):
        replica, index = divmod(owner, len(ranks))
        flat, start = buffers[replica].reshape(-1), 0
        for run in owned:
            width = run.count * run.layout.share_size
            places = [rank * buffers[replica].shape[1] + start for rank in ranks[index]]
            shares = jnp.stack([jax.lax.slice_in_dim(flat, place, place + width) for place in places])
            results[run.leaf].append((run.start, _from_shares(shares, run.layout)))
            start += width


def _share_with_replicas(buffer: jax.Array, round_: Round, replicas: int) -> list[jax.Array]:
    """The buffers of all replicas, on each of them."""
    if replicas == 1:
        return [buffer]
    if not round_.sums(replicas):
        return list(jax.lax.all_gather(buffer, round_.group.replicas))
    sizes = round_.sizes(replicas)
    offsets = [0, *itertools.accumulate(sizes)]
    own = jnp.asarray(offsets)[jax.lax.axis_index(round_.group.replicas)]
    # After a replica's own part there is only padding, which is zero, so it may overlap the part of the next replica.
    padded = jnp.zeros((buffer.shape[0], offsets[-1] + round_.size), buffer.dtype)
    padded = jax.lax.dynamic_update_slice(padded, buffer, (0, own))
    summed = jax.lax.psum(padded[:, : offsets[-1]], round_.group.replicas)
    return [summed[:, start : start + size] for start, size in zip(offsets, sizes, strict=False)]


def _pack(round_: Round, units: Sequence[jax.Array], first_owner: int, ranks: list[list[int]]) -> jax.Array:
    """[devices, size]: a row for each rank, with what the owner at this rank gets from this device."""
    rows: dict[int, list[jax.Array]] = {}
    for own, owned in zip(ranks, round_.owned[first_owner : first_owner + len(ranks)], strict=True):
        shares = [_to_shares(units[run.leaf][run.start : run.start + run.count], run.layout) for run in owned]
        padding = round_.size - sum(share.shape[1] for share in shares)
        for index, rank in enumerate(own):
            row = [share[index].astype(round_.group.dtype) for share in shares]
            rows[rank] = [*row, jnp.zeros(padding, round_.group.dtype)]
    return jnp.concatenate([part for rank in sorted(rows) for part in rows[rank]]).reshape(-1, round_.size)


def _to_shares(units: jax.Array, layout: UnitLayout) -> jax.Array:
    """[units, *local_shape] -> [shares, elements of all units]."""
    axis, count = layout.split_axis, layout.num_shares
    shape = layout.local_shape
    divided = units.reshape(-1, *shape[:axis], count, layout.share_shape[axis], *shape[axis + 1 :])
    return jnp.moveaxis(divided, 1 + axis, 0).reshape(count, -1)


def _from_shares(shares: jax.Array, layout: UnitLayout) -> jax.Array:
    """The inverse of `_to_shares`."""
    parts = shares.reshape(layout.num_shares, -1, *layout.share_shape)
    return jnp.moveaxis(parts, 0, 1 + layout.split_axis).reshape(-1, *layout.local_shape)
