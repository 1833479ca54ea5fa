"""Distribution: how the parameters are sharded over a mesh, as a hashable value; and whether anything says so."""

import dataclasses
import functools
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from muonjax._common.arguments import warn_user
from muonjax._common.trees import broadcast_prefix

Axes = tuple[str, ...]  # mesh axes


@dataclasses.dataclass(frozen=True, eq=False)
class Distribution:
    """Says how parameters are sharded over a mesh; hashable, and never part of an optimizer's state.

    muonjax divides the matrices among the devices by it: each belongs to one device, or, if there are fewer
    matrices than devices, to several that share its work.

    Args:
      mesh: A `jax.sharding.Mesh`.
      param_specs: A tree of `PartitionSpec`s, or of `NamedSharding`s, like the parameters or a prefix of them;
        None marks a replicated leaf.

    Raises:
      ValueError, TypeError: On construction: `mesh` is no mesh, or `param_specs` holds something else than specs,
        or an axis that the mesh lacks.

    Example:
      >>> import jax, muonjax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> distribution = muonjax.Distribution(mesh, {"dense": {"kernel": P("fsdp", None), "bias": P()}})
      >>> tx = muonjax.muon(1e-3, distribution=distribution)
    """

    mesh: Mesh
    param_specs: Any

    def __post_init__(self):
        if not isinstance(self.mesh, Mesh):
            raise TypeError(
                f"Distribution(mesh={self.mesh!r}) needs a jax.sharding.Mesh, such as jax.make_mesh(...)."
            )
        names = tuple(self.mesh.axis_names)
        for path, spec in jax.tree_util.tree_leaves_with_path(self.param_specs, is_leaf=_is_spec):
            where = f"Distribution(param_specs=...) at {jax.tree_util.keystr(path) or 'its root'}"
            if not _is_spec(spec):
                raise TypeError(
                    f"{where} holds {reprlib.repr(spec)}; expected a PartitionSpec, a NamedSharding or None, "
                    "of arrays jax.tree.map(lambda x: x.sharding, params)."
                )
            if unknown := [axis for entry in _mesh_axes(spec) for axis in entry if axis not in names]:
                raise ValueError(f"{where} names the axis {unknown[0]!r}, but the mesh has only {names}.")

    @functools.cached_property
    def _value(self) -> tuple:
        specs, treedef = jax.tree.flatten(self.param_specs, is_leaf=_is_spec)
        return self.mesh, tuple(map(_mesh_axes, specs)), treedef

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Distribution) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, NamedSharding))


def _mesh_axes(spec: PartitionSpec | NamedSharding | None, ndim: int = 0) -> tuple[Axes, ...]:
    """For each axis of an array, the mesh axes that shard it."""
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec or ()]
    return (*entries, *[()] * (ndim - len(entries)))


def size_of(mesh_shape: Mapping[str, int], axes: Axes) -> int:
    """Devices along `axes`."""
    return math.prod(mesh_shape[axis] for axis in axes)


def even_sharding(shape: tuple[int, ...], spec: Any, mesh_shape: Mapping[str, int]) -> tuple[Axes, ...]:
    """For each axis of an array of `shape`, the mesh axes that shard it.

    An axis that they don't divide evenly counts as not sharded: such an array can't enter or leave `jit` sharded.
    """
    return tuple(
        axes if size % size_of(mesh_shape, axes) == 0 else ()
        for size, axes in zip(shape, _mesh_axes(spec, len(shape)), strict=True)
    )


def partition_spec(sharding: tuple[Axes, ...]) -> PartitionSpec:
    """The inverse of `even_sharding`."""
    return PartitionSpec(*(axes or None for axes in sharding))


def spread_specs(specs: Any, tree: Any, *, call: str) -> list[Any]:
    """One spec per leaf of `tree`, from a tree or a prefix of it. Masked nodes are not leaves."""
    what = "the Distribution's param_specs (of an NNX model, nnx.as_pure(specs))"
    entries = broadcast_prefix(specs, tree, is_leaf=_is_spec, call=call, what=what)
    for spec, (path, leaf) in zip(entries, jax.tree_util.tree_leaves_with_path(tree), strict=True):
        if len(_mesh_axes(spec)) > leaf.ndim:
            raise ValueError(
                f"{call}: {spec} at {jax.tree_util.keystr(path)} shards more axes than the leaf of shape {leaf.shape}."
            )
    return entries


def check_distribution(distribution: Any, *, call: str) -> None:
    """Raise unless it is a Distribution or None; a mesh alone does not say how the parameters are sharded."""
    if distribution is not None and not isinstance(distribution, Distribution):
        raise TypeError(
            f"{call}(distribution={type(distribution).__name__}(...)) must be a muonjax.Distribution(mesh, specs), "
            "which says how each parameter is sharded too. Leave it out where the mesh has explicit axis types."
        )


class OnMesh(NamedTuple):
    """A mesh, and how the chosen leaves are sharded over it.

    Attributes:
      mesh: With devices, or that of the leaves' own types.
      specs: The spec of each chosen leaf.
      explicit: Whether the leaves' own types say it, and not the user.
    """

    mesh: Mesh | AbstractMesh
    specs: tuple[Any, ...]
    explicit: bool


def find_mesh(
    distribution: Distribution | None, tree: Any, chosen: Sequence[int], *, call: str
) -> OnMesh | None:
    """How the `chosen` leaves of `tree` are sharded; None: on one device, or nothing says it, or there are none.

    A `distribution` is trusted; without one, explicit axis types say it.
    """
    leaves = jax.tree.leaves(tree)
    if distribution is not None:
        specs = spread_specs(distribution.param_specs, tree, call=call)
        on_mesh = OnMesh(distribution.mesh, tuple(specs[i] for i in chosen), explicit=False)
        return on_mesh if chosen else None
    shardings = [jax.typeof(leaves[i]).sharding for i in chosen]
    # An array that was made under no mesh at all has a mesh without axes.
    for mesh in dict.fromkeys(s.mesh for s in shardings):
        if AxisType.Explicit in mesh.axis_types:
            return OnMesh(mesh, tuple(s.spec for s in shardings), explicit=True)
        if mesh.size > 1 and AxisType.Manual not in mesh.axis_types:
            _warn_of(mesh, call)
    return None


@functools.cache
def _warn_of(mesh: AbstractMesh, call: str) -> None:
    warn_user(
        f"{call}: pass distribution=muonjax.Distribution(mesh, param_specs). The arrays' mesh {dict(mesh.shape)} has "
        "no explicit axis types (its axis types are Auto), so XLA gathers matrices and repeats work on every device."
    )
