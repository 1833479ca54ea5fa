"""Optimizer state in host memory: copied to the device for an update, and back."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from muonjax._common.arguments import check_transformation, refuse_positional


def offload(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Any Optax transformation, whose state may lie in host memory.

    An array of the state that lies there is copied to the device where the update reads it, and its new value back.
    The copies are asynchronous and one for each array: XLA's scheduler starts the next ones while the last are used; on
    a TPU as many as there is free memory for. The optimizers of muonjax, `trace` and `ema_nesterov` do so by
    themselves, with momentum leaf by leaf so that two leaves at most are on the device, and AdamW's moments at once;
    others, and `optax.MultiSteps` around any, need this wrapper.

    Args:
      tx: Such as `optax.adamw(1e-3)`.

    Returns:
      The same transformation; `state_shardings(tx, params, memory_kind="pinned_host")` places its state.

    Raises:
      TypeError: `tx` is no Optax transformation.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax, optax
      >>> tx = muonjax.offload(optax.adamw(1e-3))
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = {"w": jax.device_put(jnp.ones((4, 8)), jax.NamedSharding(mesh, jax.P()))}
      >>> shardings = muonjax.state_shardings(tx, params, memory_kind="pinned_host")
      >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> updates, state = jax.jit(tx.update)(params, state, params)
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'

    Source: JAX's guide to host offloading.
    """
    check_transformation("offload(tx", tx)
    update = optax.with_extra_args_support(tx).update

    def on_device(updates: optax.Updates, state: Any, params: Any = None, *unnamed: Any, **extra_args: Any):
        refuse_positional(unnamed)
        if not any(map(_is_on_host, jax.tree.leaves(state))):
            return update(updates, state, params, **extra_args)
        here = jax.tree.map(lambda x: _move(x, "Device") if _is_on_host(x) else x, state)
        updates, new = update(updates, here, params, **extra_args)
        return updates, jax.tree.map(lambda x, old: _move(x, "Host") if _is_on_host(old) else x, new, state)

    return optax.GradientTransformationExtraArgs(tx.init, on_device)


def leaf_by_leaf(step: Callable[..., tuple[Any, ...]], updates: Any, *states: Any) -> list[Any]:
    """`step(update, *state)`, the new update and state of one leaf, for each leaf of these trees of one structure.

    What lies in host memory is copied to the device for its step and back, and no step begins before the copy back of
    the one before it has ended: else a scheduler that overlaps copies with the products that follow keeps them all.
    The next leaf's copy to the device is in flight meanwhile.
    """
    leaves, treedef = jax.tree.flatten(updates)
    for state in states:
        jax.tree.map(lambda *_: None, updates, state)  # raises where they are of other parameters
    results: list[tuple[Any, ...]] = []
    back: list[Any] = []  # the last copies to the host
    for u, *state in zip(leaves, *map(jax.tree.leaves, states), strict=True):
        on_host = [_is_on_host(x) for x in state]
        if not any(on_host):
            results.append(step(u, *state))
            continue
        if back:
            u, _ = jax.lax.optimization_barrier((u, back))
        state = [_move(x, "Device") if host else x for x, host in zip(state, on_host, strict=True)]
        u, *new = step(u, *state)
        back = [_move(x, "Host") if host else x for x, host in zip(new, on_host, strict=True)]
        results.append((u, *back))
    return [treedef.unflatten(result[i] for result in results) for i in range(1 + len(states))]


def _is_on_host(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host


def _move(x: jax.Array, space: str) -> jax.Array:
    return jax.device_put(x, jax.memory.Space[space])
