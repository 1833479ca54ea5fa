"""Apply a function to every matrix of sharded leaves, once and not on every device."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from muonjax._common.explicit_axes import sharded_like
from muonjax._common.platform import Policy
from muonjax._matrices.batching import Function, map_leaves
from muonjax._matrices.matrix_view import MatrixView
from muonjax._mesh.assignment import Assignment, assign_owners
from muonjax._mesh.cost_model import Work, count_work
from muonjax._mesh.distribution import OnMesh, even_sharding, partition_spec
from muonjax._mesh.exchange import exchange
from muonjax._mesh.shards import ShardedLeaf


def map_on_mesh(
    on_mesh: OnMesh,
    f: Function,
    leaves: Sequence[jax.Array],
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
      views: Of each leaf.
      dtypes: In which each leaf is exchanged.
      policy: For the mesh's devices.
      call: The public function, for errors.
    """
    if not leaves:
        return []
    mesh = on_mesh.mesh
    _check_mesh(mesh, leaves, call)
    if on_mesh.explicit and mesh.size == 1:
        specs = on_mesh.specs

        def on_blocks(*blocks):
            return tuple(map_leaves(f, blocks, views, policy))
    else:
        assignment = assign(on_mesh, f, leaves, views, dtypes)
        specs = tuple(partition_spec(leaf.sharding) for leaf in assignment.leaves)

        def on_blocks(*blocks):
            return tuple(exchange(f, blocks, assignment, policy))

    # check_vma: an all-gather makes replicas, which the checker can't see.
    run = jax.shard_map(on_blocks, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    if AxisType.Explicit not in mesh.axis_types:
        return list(run(*leaves))
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    results = run(*map(jax.sharding.reshard, leaves, shardings))
    return [sharded_like(y, x) for y, x in zip(results, leaves, strict=True)]


def assign(
    on_mesh: OnMesh,
    f: Function,
    leaves: Sequence[Any],
    views: Sequence[MatrixView],
    dtypes: Sequence[jnp.dtype],
) -> Assignment:
    """Assign an owner to each matrix; only the shapes of leaves and mesh count.

    Args:
      on_mesh: How the leaves are sharded.
      f: As in `map_on_mesh`.
      leaves: Arrays or `jax.ShapeDtypeStruct`s.
      views: Of each leaf.
      dtypes: In which each leaf is exchanged.
    """

    @functools.cache
    def cost(dtype, m: int, columns: int, devices: int) -> Work:
        x = jax.ShapeDtypeStruct((m, columns), dtype)
        axis_name = ("columns",) if devices > 1 else ()
        return count_work(lambda x: f(x, axis_name), x, axis_sizes={"columns": devices})

    mesh_shape = dict(on_mesh.mesh.shape)
    sharded = [
        ShardedLeaf(view, even_sharding(leaf.shape, spec, mesh_shape), jnp.dtype(dtype))
        for leaf, view, spec, dtype in zip(leaves, views, on_mesh.specs, dtypes, strict=True)
    ]
    return assign_owners(sharded, mesh_shape, cost)


def _check_mesh(mesh: Mesh | AbstractMesh, leaves: Sequence[jax.Array], call: str) -> None:
    for other in [jax.typeof(leaf).sharding.mesh for leaf in leaves]:
        if other.size > 1 and AxisType.Manual in other.axis_types:
            raise ValueError(
                f"{call}(distribution=...) runs its own shard_map, and can't run inside of another; call it outside."
            )
        if other.size > 1 and other.size != mesh.size:
            raise ValueError(
                f"{call}: the Distribution's mesh {dict(mesh.shape)} has {mesh.size} devices, but the arrays are on "
                f"{other.size}, {dict(other.shape)}; make the Distribution with the mesh of the parameters."
            )
