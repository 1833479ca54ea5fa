"""The platform of a call, read off its arrays while it is traced."""

from typing import Any

import jax
from jax.core import Tracer

_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


def platform_of(*arrays: Any, mesh: Any = None) -> str:
    """ "cpu", "gpu", "tpu" or another platform's name: where a computation on `arrays` runs.

    The first of these decides:

    1. `mesh`, a `jax.sharding.Mesh`, or an `AbstractMesh` with an abstract device;
    2. the mesh of an array's `NamedSharding`, which traced arrays have in their type;
    3. the device of a concrete array;
    4. the mesh in context (`jax.set_mesh`, `jax.sharding.use_abstract_mesh`);
    5. `jax.default_device`;
    6. JAX's default backend.

    To trace or compile for a device that is not attached, give the arguments shardings on the
    devices of `jax.experimental.topologies`, or trace under a mesh without axes:

        device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            jax.jit(update).trace(gradients)

    All of these are part of the key of JAX's caches: no trace for one platform is used on another.
    """
    device = _device_of(arrays, mesh)
    # `jax.default_device` and the default backend may be the name of a platform.
    name = device if isinstance(device, str) else device.platform
    return _ALIASES.get(name, name)


def kind_of(*arrays: Any, mesh: Any = None) -> str:
    """The kind of the device that `platform_of` finds, such as "TPU v6 lite";
    "" where JAX has no such device."""
    device = _device_of(arrays, mesh)
    # A platform's name may be that of one for which this JAX was not installed.
    try:
        if isinstance(device, str):
            device = jax.devices(device)[0]
    except RuntimeError:
        return ""
    return device.device_kind


def _device_of(arrays: tuple[Any, ...], mesh: Any) -> Any:
    """The device that decides in `platform_of`: a device, an `AbstractDevice`,
    or the name of a platform."""
    # Each is None where it says nothing.
    candidates = (
        # What the caller says, and then what the arrays' types say, which traced arrays have too.
        _of_mesh(mesh),
        *map(_of_sharding, arrays),
        # Where concrete arrays lie.
        *map(_of_device, arrays),
        # Where JAX puts arrays of which nothing is said: on the mesh of `jax.set_mesh`,
        # or on its default device, which may be the name of a platform.
        _of_mesh(jax.sharding.get_abstract_mesh()),
        jax.config.jax_default_device,  # pyright: ignore[reportAttributeAccessIssue]
    )
    for candidate in candidates:
        if candidate:
            return candidate
    return jax.default_backend()


def _of_mesh(mesh: Any) -> Any:
    """A device of a mesh, or the description of one that an abstract mesh may have;
    None without."""
    # All devices of a mesh are of one platform.
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0] if mesh.size else None
    return None if mesh is None else mesh.abstract_device


def _of_sharding(array: Any) -> Any:
    """A device of the mesh of an array's `NamedSharding`; None for other arrays."""
    # A `ShapeDtypeStruct` keeps its sharding itself, an array or a tracer has it in its type.
    holder = array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
    sharding = holder.sharding
    return _of_mesh(getattr(sharding, "mesh", None))


def _of_device(array: Any) -> Any:
    """A device on which a concrete array lies; None while it is traced."""
    # A tracer is an instance of `jax.Array` too.
    concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return next(iter(array.devices())) if concrete else None
