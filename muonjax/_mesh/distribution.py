"""Say how parameters are sharded over a mesh: by a `Distribution`,
or by the types of the arrays themselves.

`Distribution` is the public value: a mesh and the specs of the parameters. `shardings_on_mesh`
decides which of the two says it for the matrices of one update. On a mesh with explicit axis types
the arrays' types do. On any other mesh an array inside of `jit` does not show how it is sharded, so
only a `Distribution` can, and muonjax warns without one.

Inside of this folder a sharding is a tuple with the names of the mesh axes for each axis of the
array: `even_sharding`.
"""

import dataclasses
import itertools
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from muonjax._common.arguments import warn_once
from muonjax._common.explicit_axes import varying
from muonjax._common.trees import broadcast_prefix

Axes = tuple[str, ...]
"""Names of mesh axes."""
MeshShape = Mapping[str, int]
"""The size of each mesh axis."""


@dataclasses.dataclass(frozen=True, eq=False)
class Distribution:
    """Says how parameters are sharded over a mesh; never part of an optimizer's state.

    muonjax divides the matrices among the devices by it: each belongs to one device.

    Args:
      mesh: A `jax.sharding.Mesh`.
      param_specs: A tree of `PartitionSpec`s, or of `NamedSharding`s, like the parameters or a
        prefix of them; None marks a replicated leaf.

    Raises:
      ValueError, TypeError: On construction: `mesh` is no mesh, or `param_specs` holds something
        else than specs, or an axis that the mesh lacks.

    Example:
      >>> import jax, muonjax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> specs = {"dense": {"kernel": P("fsdp", None), "bias": P()}}
      >>> distribution = muonjax.Distribution(mesh, specs)
      >>> tx = muonjax.muon(1e-3, distribution=distribution)
    """

    mesh: Mesh
    param_specs: Any

    def __post_init__(self):
        if not isinstance(self.mesh, Mesh):
            raise TypeError(
                f"Distribution(mesh={self.mesh!r}) needs a jax.sharding.Mesh; see jax.make_mesh."
            )
        specs = jax.tree.leaves_with_path(self.param_specs, is_leaf=_is_spec)
        for path, spec in specs:
            place = jax.tree_util.keystr(path) or "its root"
            where = f"Distribution(param_specs=...) at {place}"
            if not _is_spec(spec):
                raise TypeError(
                    f"{where} holds {reprlib.repr(spec)}; expected a PartitionSpec of the mesh's "
                    "axes, a NamedSharding or None, of arrays jax.tree.map(lambda x: x.sharding, "
                    "params)."
                )
            # `PartitionSpec.UNCONSTRAINED`, by which XLA chooses the shards, is refused here too:
            # it is no name of a mesh axis, and nobody would know the shards.
            for name in itertools.chain(*_mesh_axes_by_axis(spec)):
                if name not in self.mesh.axis_names:
                    raise ValueError(
                        f"{where} names the axis {name!r}, but the mesh has only "
                        f"{self.mesh.axis_names}."
                    )


def _is_spec(x: Any) -> bool:
    """Whether x is a leaf of a tree of specs."""
    return isinstance(x, PartitionSpec | NamedSharding | None)


def _mesh_axes_by_axis(spec: PartitionSpec | NamedSharding | None) -> tuple[Axes, ...]:
    """For each axis that `spec` has, the mesh axes that shard it.

    P("fsdp", None, ("data", "tensor")) gives (("fsdp",), (), ("data", "tensor")).
    """
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    sharding = []
    # An axis is sharded by no mesh axis (None), by one ("fsdp"), or by several ("data", "fsdp").
    for entry in spec or ():
        names = entry if isinstance(entry, tuple) else (entry,)
        sharding.append(tuple(name for name in names if name is not None))
    return tuple(sharding)


def devices_along(mesh_shape: MeshShape, axes: Axes) -> int:
    """How many devices there are along these mesh axes together."""
    return math.prod(mesh_shape[axis] for axis in axes)


def even_sharding(
    shape: tuple[int, ...], spec: Any, mesh_shape: MeshShape
) -> tuple[Axes, ...]:
    """For each axis of an array of `shape`, the mesh axes that shard it.

    An axis that they don't divide evenly counts as not sharded: such an array can't enter or leave
    `jit` sharded. On a mesh {"fsdp": 4, "tensor": 2} an array [6, 8] with P("fsdp", "tensor") gives
    ((), ("tensor",)).
    """
    sharding = []
    # A spec may be shorter than the array has axes. No mesh axis shards the others.
    padded = itertools.chain(_mesh_axes_by_axis(spec), itertools.repeat(()))
    for size, axes in zip(shape, padded, strict=False):
        is_even = size % devices_along(mesh_shape, axes) == 0
        sharding.append(axes if is_even else ())
    return tuple(sharding)


def spread_specs(specs: Any, tree: Any) -> list[PartitionSpec]:
    """One spec per leaf of `tree`, from a tree of specs, shardings or None, or a prefix of it.

    What Optax has masked is no leaf of `tree` and gets no spec, also if `specs` has one for it.
    """
    what = "the Distribution's param_specs (of an NNX model, nnx.as_pure(specs))"
    entries = broadcast_prefix(specs, tree, is_leaf=_is_spec, what=what)
    leaves = jax.tree.leaves_with_path(tree)
    specs_of_leaves = []
    for entry, (path, leaf) in zip(entries, leaves, strict=True):
        # Only the names of mesh axes count: the mesh of a sharding is ignored, and None, of a
        # replicated leaf, names none.
        spec = PartitionSpec(*_mesh_axes_by_axis(entry))
        # JAX would raise only where the array is used.
        if len(spec) > leaf.ndim:
            raise ValueError(
                f"{spec} at {jax.tree_util.keystr(path)} shards more axes than the leaf of shape "
                f"{leaf.shape}."
            )
        specs_of_leaves.append(spec)
    return specs_of_leaves


def shardings_of(tree: Any, distribution: Distribution | None) -> list[NamedSharding]:
    """How each leaf of `tree` is sharded: as the `distribution` says,
    or else the types of the arrays.

    On an Auto mesh an array inside of `jit` does not show its sharding,
    and seems not to be sharded.
    """
    if distribution is None:
        return [jax.typeof(leaf).sharding for leaf in jax.tree.leaves(tree)]
    specs = spread_specs(distribution.param_specs, tree)
    return [NamedSharding(distribution.mesh, spec) for spec in specs]


def shards_of_last_axis(tree: Any, distribution: Distribution | None) -> list[int]:
    """Into how many shards the last axis of each leaf is cut, as far as that is known.

    No shard may cut the blocks of int8 momentum, which are along this axis. A weight with
    P(None, "tensor") on a mesh {"fsdp": 4, "tensor": 2} has two shards. An axis that the mesh does
    not divide evenly has one. So has, without a Distribution, any axis on an Auto mesh, where the
    types of arrays do not show how they are sharded.
    """
    shards = []
    shardings = shardings_of(tree, distribution)
    for leaf, sharding in zip(jax.tree.leaves(tree), shardings, strict=True):
        # An array that was made under no mesh has in its type a mesh without axes: one shard.
        mesh_shape = dict(sharding.mesh.shape)
        # A scalar is in one piece, as an axis of one entry is.
        sharded = even_sharding(leaf.shape or (1,), sharding.spec, mesh_shape)
        shards.append(devices_along(mesh_shape, sharded[-1]))
    return shards


def check_distribution(distribution: Any) -> None:
    """Raise unless it is a Distribution or None; a mesh alone does not say how the parameters are
    sharded."""
    if not isinstance(distribution, Distribution | None):
        raise TypeError(
            f"(distribution={type(distribution).__name__}(...)) must be a "
            "muonjax.Distribution(mesh, specs), which says how each parameter is sharded too. "
            "Leave it out where the mesh has explicit axis types."
        )


def shardings_on_mesh(
    distribution: Distribution | None, tree: Any, chosen: list[int]
) -> list[NamedSharding] | None:
    """How the `chosen` leaves of `tree` are sharded over a mesh: as `distribution` says,
    or else explicit axis types.

    None if no leaf is chosen, or nothing says how they are sharded: they were made under no mesh,
    are inside of a `jax.shard_map`, or are on an Auto mesh. This warns if that mesh has several
    devices, and if matrices inside of a `shard_map` differ between devices, which is known unless
    it has `check_vma=False`.

    All are returned on one mesh: on a mesh {"fsdp": 4} with explicit axis types, a leaf that was
    made under no mesh is replicated over "fsdp".
    """
    # The shardings of all leaves, so that specs that fit no leaf are refused.
    shardings = shardings_of(tree, distribution)
    shardings = [shardings[i] for i in chosen]
    # The Distribution's mesh, or the first one with explicit axis types, counts for all. An array
    # that was made under no mesh has in its type a mesh of size 0, which is passed over.
    for mesh in dict.fromkeys(sharding.mesh for sharding in shardings):
        if distribution is not None or AxisType.Explicit in mesh.axis_types:
            return [NamedSharding(mesh, sharding.spec) for sharding in shardings]
        # Inside of a user's shard_map (manual axes) an array is what one device has, and there is
        # nothing to share.
        if AxisType.Manual in mesh.axis_types:
            if any(varying(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)):
                warn_once(
                    "muonjax: inside of a shard_map the matrices differ between devices, and each "
                    "device orthogonalizes its own. If these are parts of larger matrices, that is "
                    "wrong: update outside of it, with a muonjax.Distribution."
                )
        elif mesh.size > 1:
            warn_once(
                "muonjax: pass distribution=muonjax.Distribution(mesh, param_specs). The arrays' "
                f"mesh {dict(mesh.shape)} has no explicit axis types (its axis types are Auto), so "
                "XLA gathers matrices and repeats work on every device."
            )
    return None
