"""Keep an optimizer's state in the host's memory, and copy it to the device for the update alone.

`state_shardings(..., memory_kind="pinned_host")` places the state there. `offload` wraps any Optax
transformation and copies its whole state at once. `leaf_by_leaf` copies the state of one leaf at a
time, so that the momentum of two leaves at most is on the device.
An array that is on the device stays there in both.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from muonjax._common.arguments import check_transformation, errors_of, refuse_positional


def offload(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an Optax transformation, so that its state can be in host memory.

    The update copies each array that is there to the device when it reads it, and copies the new
    value back. The copies are asynchronous, one for each array: XLA's scheduler starts the next
    ones while the last are used, on a TPU as many as fit into free memory. The optimizers of
    muonjax, `trace` and `ema_nesterov` do so without this wrapper: momentum leaf by leaf, so that
    two leaves at most are on the device, and AdamW's moments at once. Other transformations, and
    `optax.MultiSteps` around any, need it.

    Args:
      tx: Such as `optax.adamw(1e-3)`.

    Returns:
      The same transformation; `state_shardings(tx, params, memory_kind="pinned_host")` places its
      state.

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
    with errors_of("offload"):
        check_transformation("tx", tx)
    inner_update = optax.with_extra_args_support(tx).update

    def update(updates, state, params=None, *unnamed, **extra_args):
        refuse_positional(unnamed)
        # Where nothing is in host memory, the update stays as it is, also one whose new state has
        # another structure, which the last line does not take.
        if not any(map(_is_on_host, jax.tree.leaves(state))):
            return inner_update(updates, state, params, **extra_args)
        on_device = jax.tree.map(_to_device, state)
        updates, new_state = inner_update(updates, on_device, params, **extra_args)
        # The new state has the structure of the old one.
        return updates, jax.tree.map(_to_place_of, state, new_state)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def leaf_by_leaf(
    step: Callable[..., tuple[Any, ...]], updates: Any, *states: Any
) -> list[Any]:
    """[updates, *states], trees of the results of `step(update, *state)` for each leaf of these
    trees of one structure.

    A step returns (new update, *new state) of its leaf. What is in host memory is copied to
    the device for its step and back. The next leaf's copy to the device is in flight meanwhile.
    """
    leaves, treedef = jax.tree.flatten(updates)
    # This raises if a state is of other parameters.
    states_of_leaves = zip(*map(treedef.flatten_up_to, states), strict=True)
    results = []
    # The new state of the offloaded leaf before this one, on its way to the host
    copies_to_host = []
    for update, state in zip(leaves, states_of_leaves, strict=True):
        is_offloaded = any(map(_is_on_host, state))
        if is_offloaded:
            # No step begins before the last step's copies have ended. A scheduler that overlaps
            # copies with the products that follow would keep the state of all leaves on the device.
            # A copy to the device waits for nothing, and the scheduler starts it shortly before the
            # step that reads it.
            update, _ = jax.lax.optimization_barrier((update, copies_to_host))
        update, *new_state = step(update, *map(_to_device, state))
        new_state = list(map(_to_place_of, state, new_state))
        if is_offloaded:
            copies_to_host = new_state
        results.append((update, *new_state))
    # A tree of the updates, and one of each part of the state, also where there is no leaf.
    trees = []
    for i in range(1 + len(states)):
        trees.append(treedef.unflatten(result[i] for result in results))
    return trees


def _is_on_host(x: Any) -> bool:
    """Whether it is an array, or a traced one, in the host's memory."""
    return (
        isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host
    )


def _to_device(x: Any) -> Any:
    """x on the device; unchanged if it is there already."""
    return jax.device_put(x, jax.memory.Space.Device) if _is_on_host(x) else x


def _to_place_of(old: Any, new: Any) -> Any:
    """`new` in host memory if `old`, which it replaces, is there."""
    return jax.device_put(new, jax.memory.Space.Host) if _is_on_host(old) else new
