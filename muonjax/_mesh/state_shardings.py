"""Place an optimizer's state: each array that is like a parameter is sharded as the parameter is.

An array of the state is like a parameter if its path ends in the parameter's path and it has the
parameter's shape. The scales of int8 momentum count too: their last axis is one of blocks.
All other arrays are replicated.
"""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from muonjax._common.arguments import check_text, check_transformation, errors_of
from muonjax._mesh.distribution import (
    Distribution,
    check_distribution,
    even_sharding,
    spread_specs,
)

Path = tuple[Any, ...]


def state_shardings(
    tx: optax.GradientTransformation,
    params: Any,
    distribution: Distribution | None = None,
    *,
    memory_kind: str | None = None,
) -> Any:
    """Shardings for the optimizer's state, so that momentum is sharded as its parameter is.

    Without them `jax.jit(tx.init)` returns a whole copy of the momentum on every device of an Auto
    mesh, and with explicit axis types it asks for `jax.set_mesh`.

    Args:
      tx: Any Optax transformation.
      params: Arrays or `jax.ShapeDtypeStruct`s.
      distribution: How the parameters are sharded. None: as the arrays are.
      memory_kind: Where to keep the arrays that are like a parameter, and the scales of int8
        momentum: "pinned_host" is the host's memory (see `muonjax.offload`), None the device's.
        Counters and other small arrays stay on the device.

    Returns:
      A tree of `NamedSharding`s like `tx.init(params)`. What `tx.init` makes with explicit axis
      types stays as it is. Otherwise a leaf whose path ends in a parameter's path, and which has
      its shape, is sharded as the parameter; so are the scales of int8 momentum;
      all else is replicated.

    Raises:
      ValueError: If the specs do not fit the parameters, nothing says how these are sharded, or the
        devices have no such memory.

    Example:
      >>> import jax, muonjax
      >>> from jax.sharding import PartitionSpec as P
      >>> params = {"kernel": jax.numpy.ones((4, 8))}
      >>> distribution = muonjax.Distribution(jax.make_mesh((1,), ("fsdp",)), {"kernel": P("fsdp")})
      >>> tx = muonjax.muon(1e-3, distribution=distribution)
      >>> shardings = muonjax.state_shardings(tx, params, distribution)
      >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
    """
    with errors_of("state_shardings"):
        check_transformation("tx", tx)
        check_distribution(distribution)
        if memory_kind is not None:
            check_text(memory_kind=memory_kind)
        if distribution is None:
            mesh, specs = _sharding_of_arrays(params)
        else:
            mesh, specs = distribution.mesh, distribution.param_specs
        # By path: the parameters, and their specs.
        leaves = dict(jax.tree.leaves_with_path(params))
        spec_of = dict(zip(leaves, spread_specs(specs, params), strict=True))

    def sharding(path, leaf):
        parameter = parameter_like(path, leaf.shape, leaves)
        spec = PartitionSpec()
        if leaf.sharding is not None:
            # With explicit axis types `tx.init` has sharded it already.
            spec = leaf.sharding.spec
        elif parameter is not None:
            axes = even_sharding(leaf.shape, spec_of[parameter], dict(mesh.shape))
            spec = PartitionSpec(*axes)
        # Counters and other small arrays stay on the device.
        kind = None if parameter is None else memory_kind
        return NamedSharding(mesh, spec, memory_kind=kind)

    return jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(tx.init, params))


def parameter_like(
    path: Path, shape: tuple[int, ...], params: dict[Path, Any]
) -> Path | None:
    """The path of the parameter that an array of the state is like; None for any other array, such
    as a counter.

    `optax.tree.map_params` can't say it for all transformations: it calls `init` with a placeholder
    for all parameters, which the dimension numbers of an `optax.contrib.muon`, a tree, do not fit.
    """
    # state[0].momentum["dense"]["kernel"] ends in the path of params["dense"]["kernel"]. The
    # longest end counts that is the path of a parameter of this shape. The empty end is the path of
    # a parameter that is the whole tree.
    for start in range(len(path) + 1):
        end = path[start:]
        if end not in params:
            continue
        # int8 momentum has a scale for each block of the parameter's last axis.
        is_scale = start > 0 and path[start - 1] == GetAttrKey("scale")
        param_shape = params[end].shape
        if shape == param_shape or (is_scale and shape[:-1] == param_shape[:-1]):
            return end
    return None


def _sharding_of_arrays(params: Any) -> tuple[Any, Any]:
    """The mesh and the tree of shardings of arrays, or of `jax.ShapeDtypeStruct`s with a sharding;
    None, which counts as replicated, for an array without a `NamedSharding`."""

    def named_sharding(leaf):
        sharding = getattr(leaf, "sharding", None)
        return sharding if isinstance(sharding, NamedSharding) else None

    shardings = jax.tree.map(named_sharding, params)
    # Arrays of the state that are like no parameter, such as counters, are replicated on the mesh
    # of the parameters, so there has to be one.
    meshes = {sharding.mesh for sharding in jax.tree.leaves(shardings)}
    if len(meshes) != 1:
        # `errors_of` puts "state_shardings" before it.
        raise ValueError(
            f"(params) finds {len(meshes)} meshes; give it the distribution."
        )
    return meshes.pop(), shardings
