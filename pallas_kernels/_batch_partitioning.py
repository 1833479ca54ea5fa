"""Let XLA shard a kernel over its batch, and refuse every other sharding.

XLA's partitioner can't see how a kernel may be sharded. Under `jit` alone it would gather a sharded operand on every
device and run the whole launch on each of them, without a message.
"""

import itertools
from collections.abc import Callable

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


def by_batch(function: Callable[..., jax.Array], implementation: str) -> Callable[..., jax.Array]:
    """`function`, with each device of a mesh computing its own part of the batch.

    Args:
      function: Maps arrays [batch, ...], or `None` for one, to one array [batch, m, n]. Each matrix of the
        result depends on the same matrix of the arguments alone.
      implementation: Its name, for error messages.

    Returns:
      The same function. On one device and inside `jax.shard_map` nothing changes. An operand that is sharded
      along another axis than the first raises ValueError: while it is traced where the mesh's axes are
      explicit, and where they are automatic while it is compiled, inside a `jax.errors.JaxRuntimeError`.
    """
    # In a function without keywords, which `custom_partitioning` can't take.
    partitioned = custom_partitioning(lambda *arguments: function(*arguments))

    def partition(mesh, arguments, result):
        batch = _batch_axes([a.sharding.spec for a in jax.tree.leaves(arguments)], implementation)

        def sharded(a):
            return NamedSharding(mesh, PartitionSpec(batch, *[None] * (len(a.shape) - 1)))

        # Whole matrices of the result on each device, whatever their user asks for: cutting them later moves nothing.
        return mesh, function, sharded(result), jax.tree.map(sharded, arguments)

    def rule(mesh, arguments, results):
        # Only along the batch may a sharding propagate from one array to another.
        del mesh
        own = (f"own{n}" for n in itertools.count())

        def axes(values):
            return ", ".join(" ".join(["batch", *(next(own) for _ in value.shape[1:])]) for value in values)

        return f"{axes(arguments)} -> {axes(results)}"

    partitioned.def_partition(partition, sharding_rule=rule)

    @jax.jit  # outside of `jit` the partitioner does not run
    def run(*arguments):
        shardings = [jax.typeof(a).sharding for a in jax.tree.leaves(arguments)]
        batch = _batch_axes([sharding.spec for sharding in shardings], implementation)
        if batch is None:
            return partitioned(*arguments)
        # The mesh is explicit: its axes are in the arrays' types, which a kernel does not accept.
        mesh = next(sharding.mesh for sharding in shardings if not sharding.mesh.empty)
        out = NamedSharding(mesh, PartitionSpec(batch, None, None))
        return jax.sharding.auto_axes(partitioned, axes=mesh.axis_names, out_sharding=out)(*arguments)

    return run


def _batch_axes(specs: list[PartitionSpec], implementation: str) -> str | tuple[str, ...] | None:
    """The mesh axes over which the batch is sharded."""
    if any(axis is not None for spec in specs for axis in spec[1:]):
        raise ValueError(
            f"implementation={implementation!r} needs whole matrices on each device, got operands "
            f"[batch, rows, columns] sharded as {', '.join(map(str, specs))}; call it inside jax.shard_map, or "
            "gather the matrices first with jax.lax.with_sharding_constraint (jax.reshard on an explicit mesh)."
        )
    return next((spec[0] for spec in specs if spec and spec[0] is not None), None)
