"""Where arrays lie: how parameters are sharded over a mesh, and an optimizer's state as they are, or in host memory.

A `Distribution` says how, as a hashable value, or the arrays' own types do.
"""

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from muonjax._common.arguments import check_text, check_transformation, refuse_positional, warn_user
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
            raise TypeError(f"Distribution(mesh={self.mesh!r}) needs a jax.sharding.Mesh; see jax.make_mesh.")
        names = tuple(self.mesh.axis_names)
        for path, spec in jax.tree_util.tree_leaves_with_path(self.param_specs, is_leaf=_is_spec):
            where = f"Distribution(param_specs=...) at {jax.tree_util.keystr(path) or 'its root'}"
            if not _is_spec(spec) or PartitionSpec.UNCONSTRAINED in (getattr(spec, "spec", spec) or ()):
                raise TypeError(
                    f"{where} holds {reprlib.repr(spec)}; expected a PartitionSpec of the mesh's axes, a NamedSharding "
                    "or None, of arrays jax.tree.map(lambda x: x.sharding, params)."
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
    pairs = zip(shape, _mesh_axes(spec, len(shape)), strict=True)
    return tuple(axes if size % size_of(mesh_shape, axes) == 0 else () for size, axes in pairs)


def partition_spec(sharding: tuple[Axes, ...]) -> PartitionSpec:
    """The inverse of `even_sharding`."""
    return PartitionSpec(*(axes or None for axes in sharding))


def spread_specs(specs: Any, tree: Any, *, call: str) -> list[Any]:
    """One spec per leaf of `tree`, from a tree or a prefix of it. Masked nodes are not leaves."""
    what = "the Distribution's param_specs (of an NNX model, nnx.as_pure(specs))"
    entries = broadcast_prefix(specs, tree, is_leaf=_is_spec, call=call, what=what)
    for spec, (path, leaf) in zip(entries, jax.tree_util.tree_leaves_with_path(tree), strict=True):
        if len(_mesh_axes(spec)) > leaf.ndim:
            where = f"{spec} at {jax.tree_util.keystr(path)}"
            raise ValueError(f"{call}: {where} shards more axes than the leaf of shape {leaf.shape}.")
    return entries


def shards_of_last_axis(tree: Any, distribution: Distribution | None, *, call: str) -> list[int]:
    """Into how many shards the last axis of each leaf is cut, as far as that is known."""
    leaves = jax.tree.leaves(tree)
    if distribution is None:
        shardings = [(own.mesh, own.spec) for own in (jax.typeof(leaf).sharding for leaf in leaves)]
    else:
        specs = spread_specs(distribution.param_specs, tree, call=call)
        shardings = [(distribution.mesh, spec) for spec in specs]
    return [
        size_of(dict(mesh.shape), ((), *even_sharding(leaf.shape, spec, dict(mesh.shape)))[-1])
        for leaf, (mesh, spec) in zip(leaves, shardings, strict=True)
    ]


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


def find_mesh(distribution: Distribution | None, tree: Any, chosen: list[int], *, call: str) -> OnMesh | None:
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

    pairs = zip(jax.tree.leaves_with_path(params), specs, strict=True)
    of_params = {path: (leaf.shape, spec) for (path, leaf), spec in pairs}

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
        raise ValueError(f"state_shardings(params) finds {len(meshes)} meshes; give it the distribution.")
    return meshes.pop(), specs
