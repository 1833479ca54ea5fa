"""One launch of a kernel for all matrices of a call: batch axes, `jax.vmap` and shards of a batch are one axis.

XLA's partitioner can't see how a kernel may be sharded. Under `jit` alone it would gather a sharded operand on every
device and run the whole launch on each of them, without a message. Here it is told the batch, and refuses all else.

The blocks of a lower triangle are numbered without a table and without a square root. Folding the lower right corner of
a triangle of t block rows up gives a full rectangle: t × (t+1)/2 blocks for odd t, (t+1) × t/2 for even t. Rows and
columns of the rectangle follow from a number by a division.
"""

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels._xla import Operands


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
            return ", ".join(
                " ".join(["batch", *(next(own) for _ in value.shape[1:])]) for value in values
            )

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
        return jax.sharding.auto_axes(partitioned, axes=mesh.axis_names, out_sharding=out)(
            *arguments
        )

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


Launch = Callable[..., jax.Array]


def launch_batch(implementation: str, launch: Launch, o: Operands) -> jax.Array:
    """The product for [*batch, m, k].

    Args:
      implementation: Its name, for error messages.
      launch: The kernel on one device: x and y [batch, m, k], c [batch, m, m] and the scales alpha and beta
        [batch, 2] in float32 to [batch, m, m]; y and c may be None.
      o: An output of any batch.
    """
    *batch, m, _ = o.x.shape
    if 0 in o.x.shape:
        raise NotImplementedError(refusal(implementation, f"got the empty shape {o.x.shape}"))
    size = math.prod(batch)
    scale = jnp.stack(
        [jnp.broadcast_to(n, batch).reshape(size) for n in (o.alpha, o.beta)], axis=-1
    )
    flat = jax.tree.map(lambda a: a.reshape(size, *a.shape[-2:]), (o.x, o.y, o.c))
    return _folded(implementation, launch, *flat, scale).reshape(*batch, m, m)


def _folded(implementation: str, launch: Launch, *arguments: jax.Array | None) -> jax.Array:
    """The kernel on arrays [batch, ...]; `jax.vmap` makes the batch longer."""
    run = jax.custom_batching.custom_vmap(by_batch(launch, implementation))

    @run.def_vmap
    def _(size, batched, *arguments):
        def fold(argument, is_batched):
            if argument is None:
                return None
            if not is_batched:
                argument = jnp.broadcast_to(argument, (size, *argument.shape))
            return argument.reshape(-1, *argument.shape[2:])

        out = _folded(implementation, launch, *map(fold, arguments, batched))
        return out.reshape(size, -1, *out.shape[1:]), True

    return run(*arguments)


def refusal(implementation: str, reason: str) -> str:
    """The message of an implementation that can't run."""
    return f'symmetric_product(implementation={implementation!r}) {reason}; use "blocked" or "reference" instead.'


Index = int | jax.Array


def rectangle(t: int) -> tuple[int, int]:
    """Rows and columns of the folded triangle of t block rows."""
    return (t, (t + 1) // 2) if t % 2 else (t + 1, t // 2)


def unfold(row: Index, column: Index, t: int) -> tuple[jax.Array, jax.Array]:
    """The block (i, j) with ``0 <= j <= i < t`` at a place of the rectangle."""
    odd = t % 2
    _, width = rectangle(t)
    lower = row >= column if odd else row > column
    i = jnp.where(lower, row if odd else row - 1, width + column - odd)
    j = jnp.where(lower, column, width + row)
    return i, j
