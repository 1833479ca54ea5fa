"""One launch of a kernel for all matrices of a call: batch axes, `jax.vmap` and shards of a batch are one axis."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels._batch_partitioning import by_batch
from pallas_kernels._reference import Operands

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
    scale = jnp.stack([jnp.broadcast_to(n, batch).reshape(size) for n in (o.alpha, o.beta)], axis=-1)
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
