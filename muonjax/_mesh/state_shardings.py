"""Shardings for an optimizer's state: momentum is sharded as its parameter is."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from muonjax._common.arguments import check_text
from muonjax._mesh.distribution import (
    Distribution,
    check_distribution,
    even_sharding,
    partition_spec,
    spread_specs,
)


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
      memory_kind: For the arrays like a parameter, and the scales of int8 momentum: "pinned_host" is the host's memory
        (see `muonjax.offload`), None the device's. Counters and other small arrays stay on the device.

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
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"state_shardings(tx, params): the first argument is a {type(tx).__name__}, no optimizer."
        )
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
