"""Apply a function to every matrix of sharded leaves, once: at its owner,
to which the devices send it.

`map_on_mesh` runs `exchange` inside of `jax.shard_map` over all axes of the mesh.
Leaves of one group share a round:

1. `_pack`: every device writes the blocks that it stores into a buffer, with a row for each owner.
2. `_all_to_all` sends each row to its owner, which then has all blocks of its matrices.
3. `apply_to_owned`: the owner puts the results of its matrices in the place of their blocks.
4. `_all_to_all` returns the rows.
5. `_share_with_replicas`: where leaves are replicated, each replica has done a part,
   and the others get its results.
6. `_unpack` takes the results of each leaf out of the rows.

`assignment` decides who owns what, and `matrix_shards` explains the words.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from muonjax._common.explicit_axes import sharded_like
from muonjax._common.platform_policy import Policy
from muonjax._matrices.batching import Function, map_leaves
from muonjax._matrices.matrix_view import MatrixView
from muonjax._mesh.apply_to_owned import apply_to_owned
from muonjax._mesh.assignment import Owners, Round, assign_owners, row_length
from muonjax._mesh.distribution import even_sharding
from muonjax._mesh.matrix_shards import ShardedLeaf, view_of_block

Arrays = Sequence[jax.Array]


def map_on_mesh(
    f: Function,
    leaves: Arrays,
    views: Sequence[MatrixView],
    shardings: Sequence[NamedSharding],
    policy: Policy,
) -> list[jax.Array]:
    """f on each matrix of the leaves, once; the results are sharded as the leaves are.

    Args:
      f: Its field `whole` takes matrices [*batch, m, n] with m <= n, and returns the same shape and
        dtype. Its field `exchange_dtype` gives the dtype in which blocks are sent.
      leaves: Arrays.
      views: The view of each leaf.
      shardings: The sharding of each leaf, all on one mesh.
      policy: For the mesh's devices.
    """
    # Everything about the exchange follows from shapes and shardings.
    mesh = shardings[0].mesh
    mesh_shape = dict(mesh.shape)
    _check_mesh(mesh, leaves)
    sharded_leaves = []
    specs = []
    for leaf, view, sharding in zip(leaves, views, shardings, strict=True):
        # Where the mesh axes of an axis of the leaf, together, do not divide it evenly,
        # it counts as not sharded.
        axes = even_sharding(leaf.shape, sharding.spec, mesh_shape)
        sharded_leaves.append(ShardedLeaf(view, axes, f.exchange_dtype(leaf.dtype)))
        specs.append(PartitionSpec(*axes))

    def on_blocks(*blocks):
        if mesh.size == 1:
            # The blocks are whole leaves. A script for a mesh, run on one device, computes the same
            # as without one.
            return tuple(map_leaves(f, blocks, views, policy))
        # Each matrix gets an owner. A round sends all leaves that are sharded over the same mesh
        # axes to their owners, and the results back.
        rounds = assign_owners(sharded_leaves, mesh_shape)
        views_of_blocks = [view_of_block(leaf, mesh_shape) for leaf in sharded_leaves]
        return tuple(exchange(f, blocks, views_of_blocks, rounds, policy))

    # The checker of varying axes can't see that an all-gather makes replicas.
    in_specs = tuple(specs)
    run = jax.shard_map(
        on_blocks, mesh=mesh, in_specs=in_specs, out_specs=in_specs, check_vma=False
    )
    if AxisType.Explicit not in mesh.axis_types:
        return list(run(*leaves))
    # With explicit axis types `shard_map` asks for arrays whose types have its specs. The types of
    # the leaves differ from these where a Distribution says something else, or where mesh axes that
    # do not divide a leaf evenly were left out. The results get the leaves' types again.
    even = [NamedSharding(mesh, spec) for spec in specs]
    results = run(*map(jax.sharding.reshard, leaves, even))
    return list(map(sharded_like, results, leaves))


def _check_mesh(mesh: Mesh | AbstractMesh, leaves: Arrays) -> None:
    """Raise unless each leaf is on one device, or on as many as the mesh has and outside of any
    `jax.shard_map`; JAX's own errors would not name the Distribution.

    `errors_of` begins each message with the public call: "muon(distribution=...) can't run ...".
    """
    for leaf in leaves:
        other = jax.typeof(leaf).sharding.mesh
        # On one device; the type of an array that was made under no mesh has a mesh of size 0.
        if other.size <= 1:
            continue
        if AxisType.Manual in other.axis_types:
            raise ValueError(
                "(distribution=...) can't run inside of another shard_map."
            )
        if other.size != mesh.size:
            raise ValueError(
                f"the Distribution's mesh {dict(mesh.shape)} has {mesh.size} devices, but "
                f"the arrays are on {other.size}, {dict(other.shape)}; make the Distribution with "
                "the mesh of the parameters."
            )


def exchange(
    f: Function,
    blocks: Arrays,
    views: Sequence[MatrixView],
    rounds: Sequence[Round],
    policy: Policy,
) -> list[jax.Array]:
    """Apply f to every matrix once, at its owner:
    the device to which all others send their parts of it.

    Args:
      f: As in `map_on_mesh`; it takes matrices with m <= n.
      blocks: This device's part of each leaf, in the leaf's axes: [2, 16, 64] of a leaf
        [4, 64, 64].
      views: The view of each block, as wide matrices.
      rounds: The owners of all matrices, in a round for each group of leaves that are sharded over
        the same mesh axes.
      policy: The policy for the devices.

    Returns:
      This device's part of the result of each leaf.
    """
    # [matrices, rows of a block, columns of a block] for each leaf
    stacks = list(map(MatrixView.to_matrices, views, blocks))
    # The result of a leaf arrives in parts, one from each owner of some of its matrices. A part is
    # flat: the numbers of this device's blocks. Parts arrive in the order of the leaf's matrices,
    # because all matrices of a leaf are in one round, and its first owner has the first of them.
    parts_of_leaves = [[] for _ in blocks]
    for round_ in rounds:
        for leaf, part in _run_round(f, round_, stacks, policy):
            parts_of_leaves[leaf].append(part)
    outputs = []
    for parts, view, block in zip(parts_of_leaves, views, blocks, strict=True):
        # `to_leaf` gives the flat numbers of all blocks the axes of the block.
        output = view.to_leaf(jnp.concatenate(parts))
        # Parts are in the dtype of the exchange, which may have fewer bits than the leaf's.
        outputs.append(output.astype(block.dtype))
    return outputs


def _run_round(
    f: Function, round_: Round, stacks: Arrays, policy: Policy
) -> Iterator[tuple[int, jax.Array]]:
    """Send the blocks of a group to their owners, apply f there, and send the results back.

    Returns what `_unpack` yields: pairs of a leaf's number and the results for some of the blocks
    of it that this device stores, flat, such as (3, [2048]) for two blocks [16, 64] of leaf 3.
    """
    # The replicas store the same blocks, and each sends those of its own owners. All devices run
    # one program, so the replica's number chooses a branch of it.
    packs = [
        functools.partial(_pack, round_, owners, stacks) for owners in round_.replicas
    ]
    replica = jax.lax.axis_index(round_.group.replica_axes)
    # [owners of a replica, row_size], a row for each owner
    buffer = jax.lax.switch(replica, packs)

    # [devices, row_size], from here on a row from each device,
    # and after the second all-to-all from each owner
    buffer = _all_to_all(buffer, round_)
    buffer = apply_to_owned(f, buffer, round_, policy)
    buffer = _all_to_all(buffer, round_)

    # This replica has the results of its own owners, and here gets those of the others.
    return _unpack(_share_with_replicas(buffer, round_), round_)


def _pack(round_: Round, owners: Owners, stacks: Arrays) -> jax.Array:
    """What this device sends if it belongs to the replica with these owners: a row for each,
    with its blocks of the owner's matrices. `_run_round` chooses by the replica's number.

    `stacks` has this device's blocks of each leaf, [matrices, rows, columns]. An owner of the
    matrices 2 and 3 of a leaf with blocks [16, 64] gets a row of 2048 numbers,
    and zeros up to `row_size`.
    """
    dtype, row_size = round_.group.dtype, round_.row_size
    parts = []
    for owner in owners:
        for matrices in owner:
            stop = matrices.start + matrices.count
            blocks = stacks[matrices.leaf][matrices.start : stop]
            # The dtype of the exchange may have fewer bits than the leaf's: then less is sent.
            parts.append(blocks.reshape(-1).astype(dtype))
        # Padding
        parts.append(jnp.zeros(row_size - row_length(owner), dtype))
    # Each owner's blocks and padding have row_size numbers together.
    return jnp.concatenate(parts).reshape(-1, row_size)


def _unpack(buffers: Arrays, round_: Round) -> Iterator[tuple[int, jax.Array]]:
    """The results for the blocks of this device, cut out of the rows that the owners sent back:
    pairs of a leaf's number and a flat part of it. This is the inverse of `_pack`.

    A block is the part of a matrix that one device stores. There is a buffer [owners, columns] for
    each replica, with a row from each of its owners. A leaf comes once for each owner of some of
    its matrices: an owner of two matrices of leaf 3, in blocks [16, 64], gives (3, [2048]).
    """
    for buffer, owners in zip(buffers, round_.replicas, strict=True):
        for row, owner in zip(buffer, owners, strict=True):
            # An owner's row has its matrices in the order of `_pack`. The padding comes last, and
            # is not read.
            start = 0
            for matrices in owner:
                # The numbers of this device's blocks of these matrices
                stop = start + matrices.size
                yield matrices.leaf, row[start:stop]
                start = stop


def _all_to_all(buffer: jax.Array, round_: Round) -> jax.Array:
    """Row i of the buffer goes to owner i, and the row from owner i takes its place."""
    # A device that is the only owner has all blocks.
    if len(buffer) == 1:
        return buffer
    return jax.lax.all_to_all(buffer, round_.group.exchange_axes, 0, 0)


def _share_with_replicas(buffer: jax.Array, round_: Round) -> list[jax.Array]:
    """The results of all replicas, on each of them: a buffer [owners, columns] for each replica.

    Replicas store the same blocks, and each has worked on a part of the matrices: `buffer`
    [owners, row_size] has a row from each owner of this replica, with its results for the blocks of
    this device. An all-gather returns `row_size` columns
    of each replica, an all-reduce only as many as the replica's longest row, `replica_sizes`.
    """
    replica_axes = round_.group.replica_axes
    if len(round_.replicas) == 1:
        return [buffer]
    if not round_.by_all_reduce:
        return list(jax.lax.all_gather(buffer, replica_axes))
    # Where few replicas have results, a sum is cheaper than an all-gather, which pads all of them
    # to the largest. Each replica writes its columns between zeros; the sum has the columns of all:
    #   [A 0 0] + [0 B 0] + [0 0 C] = [A B C]
    # Replicas with 3, 0 and 2 columns begin at 0, 3 and 3, and the end is 5.
    *starts, end = itertools.accumulate(round_.replica_sizes, initial=0)
    start = jnp.asarray(starts)[jax.lax.axis_index(replica_axes)]
    # `row_size` columns more, since JAX moves an update back that would reach beyond the array.
    shape = (len(buffer), end + round_.row_size)
    columns = jnp.zeros(shape, buffer.dtype)
    # `_pack` has padded each row with zeros, which owners leave, so it may reach into the columns
    # of the next replica, where they add nothing.
    columns = jax.lax.dynamic_update_slice(columns, buffer, (0, start))
    columns = jax.lax.psum(columns[:, :end], replica_axes)
    return jnp.split(columns, starts[1:], axis=1)
