"""Where an optimizer's state lies: in host memory between updates, and sharded as its parameter is."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from muonjax._common.arguments import check_text, check_transformation, refuse_positional
from muonjax._mesh.distribution import (
    Distribution,
    check_distribution,
    even_sharding,
    partition_spec,
    spread_specs,
)


def offload(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an Optax transformation, so that its state can be in host memory.

    The update copies each array that is there to the device when it reads it, and copies the new value back. The
    copies are asynchronous, one for each array: XLA's scheduler starts the next ones while the last are used, on a
    TPU as many as fit into free memory. The optimizers of muonjax, `trace` and `ema_nesterov` do so without this
    wrapper: momentum leaf by leaf, so that two leaves at most are on the device, and AdamW's moments at once. Other
    transformations, and `optax.MultiSteps` around any, need it.

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


def state_shardings(
    tx: optax.GradientTransformation,
    params: Any,
    distribution: Distribution | None = None,
    *,
    memory_kind: str | None = None,
) -> Any:
    """Shardings for the optimizer's state, so that momentum is sharded as its parameter is.

    Without them `jax.jit(tx.init)` returns a whole copy of the momentum on every device of an Auto mesh, and with
    explicit axis types it asks for `jax.set_mesh`.

    Args:
      tx: Any Optax transformation.
      params: Arrays or `jax.ShapeDtypeStruct`s.
      distribution: How the parameters are sharded. None: as the arrays are.
      memory_kind: Where to keep the arrays that are like a parameter, and the scales of int8 momentum:
        "pinned_host" is the host's memory (see `muonjax.offload`), None the device's. Counters and other small
        arrays stay on the device.

    Returns:
      A tree of `NamedSharding`s like `tx.init(params)`. What `tx.init` makes with explicit axis types stays as it is.
      Otherwise a leaf whose path ends in a parameter's path, and which has its shape, is sharded as the parameter;
      so are the scales of int8 momentum; all else is replicated.

    Raises:
      ValueError: If the specs do not fit the parameters, nothing says how these are sharded, or the devices have no
        such memory.

    Example:
      >>> import jax, muonjax
      >>> from jax.sharding import PartitionSpec as P
      >>> params = {"kernel": jax.numpy.ones((4, 8))}
      >>> distribution = muonjax.Distribution(jax.make_mesh((1,), ("fsdp",)), {"kernel": P("fsdp")})
      >>> tx = muonjax.muon(1e-3, distribution=distribution)
      >>> shardings = muonjax.state_shardings(tx, params, distribution)
      >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
    """
    check_transformation("state_shardings(tx", tx)
    check_distribution(distribution, call="state_shardings")
    if memory_kind is not None:
        check_text("state_shardings", memory_kind=memory_kind)
    mesh, found = (distribution.mesh, distribution.param_specs) if distribution else _sharding_of(params)
    specs, mesh_shape = spread_specs(found, params, call="state_shardings"), dict(mesh.shape)

    of_params = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(params), specs, strict=True)
    }

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        explicit = None if leaf.sharding is None else leaf.sharding.spec
        # Not optax.tree.map_params: it fails where a tree of labels or a mask is fixed.
        for start in range(len(path) + 1):
            shape, spec = of_params.get(path[start:], (None, None))
            if shape is None:
                continue
            # Scales of int8 momentum: of the parameter's axes, the last is one of blocks.
            of_blocks = start and path[start - 1] == GetAttrKey("scale") and shape[:-1] == leaf.shape[:-1]
            if shape == leaf.shape or of_blocks:
                if explicit is None:
                    explicit = partition_spec(even_sharding(leaf.shape, spec, mesh_shape))
                return NamedSharding(mesh, explicit, memory_kind=memory_kind)
        return NamedSharding(mesh, explicit or PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(tx.init, params))


def _sharding_of(params: Any) -> tuple[Any, Any]:
    """The mesh and the shardings that arrays, or `jax.ShapeDtypeStruct`s with a sharding, say by themselves."""
    found = jax.tree.map(lambda x: getattr(x, "sharding", None), params)
    specs = jax.tree.map(lambda spec: spec if isinstance(spec, NamedSharding) else None, found)
    meshes = {spec.mesh for spec in jax.tree.leaves(specs)}
    if len(meshes) != 1:
        raise ValueError(
            f"state_shardings(params) finds {len(meshes)} meshes under the parameters; give it the distribution."
        )
    return meshes.pop(), specs
