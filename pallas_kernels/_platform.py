"""The platform of a call, read off its arrays while it is traced; and what XLA compiles badly there.

Against the latter: constants that XLA does not know, so that it compiles less, and results that it puts in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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

    To trace or compile for a device that is not attached, give the arguments shardings on the devices of
    `jax.experimental.topologies`, or trace under a mesh without axes:

        device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            jax.jit(update).trace(gradients)

    All of these are part of the key of JAX's caches: no trace for one platform is used on another.
    """
    device = _device_of(arrays, mesh)
    name = device if isinstance(device, str) else device.platform
    return _ALIASES.get(name, name)


def kind_of(*arrays: Any, mesh: Any = None) -> str:
    """The kind of the device that `platform_of` finds, such as "TPU v6 lite"; "" where JAX has no such device."""
    device = _device_of(arrays, mesh)
    # A platform's name may be that of one for which this JAX was not installed.
    try:
        if isinstance(device, str):
            device = jax.devices(device)[0]
    except RuntimeError:
        return ""
    return device.device_kind


def _device_of(arrays: tuple[Any, ...], mesh: Any) -> Any:
    """The device that decides in `platform_of`: a device, an `AbstractDevice`, or the name of a platform."""
    candidates = (
        _of_mesh(mesh),
        *map(_of_sharding, arrays),
        *map(_of_device, arrays),
        _of_mesh(jax.sharding.get_abstract_mesh()),
        jax.config.jax_default_device,  # pyright: ignore[reportAttributeAccessIssue]
    )
    for candidate in candidates:
        if candidate:
            return candidate
    return jax.default_backend()


def _of_mesh(mesh: Any) -> Any:
    """A device of a mesh, or the description of one that an abstract mesh may have; None without."""
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


def numbers_from_loop(
    numbers: Sequence[int], platform: str
) -> Sequence[jax.typing.ArrayLike]:
    """The same numbers, on a CPU as int32 results of a loop, so that XLA does not know them.

    Slices at numbers that XLA does not know are one kernel; at constants each is a kernel of its own. With 96 layers of
    one shape, to compile such slices took more than half of the time.
    """
    # Elsewhere each pass of the loop would be a launch; and a single slice is a single kernel either way.
    if platform != "cpu" or len(numbers) < 2:
        return numbers
    # XLA does not run loops while compiling, so that their results are unknown to it.
    table = jnp.asarray(numbers, jnp.int32)
    zeros = (jnp.int32(0),) * len(numbers)

    def shift_in(i, last):
        """Drop the first of the last numbers, and append number i of the table."""
        return (*last[1:], table[i])

    return lax.fori_loop(0, len(numbers), shift_in, zeros)


def materialize(
    f: Callable[[jax.Array], jax.Array], x: jax.Array, platform: str
) -> jax.Array:
    """f(x), of the shape and dtype of x, as an array that XLA keeps in memory and does not compute again.

    On a CPU, XLA computes elementwise operations again for each reader of their result, and keeps their operands until
    the last reader has run. It can't do so with the result of a branch. An `optimization_barrier` is no help, because
    XLA removes it before it fuses. Without this, an update of replicated matrices on a mesh takes a third more memory
    (tests/mesh/test_hlo_table.py).
    """
    if platform != "cpu":
        return f(x)
    # XLA does not know that this number is 1, and so that the branch is always taken.
    _, last_number = numbers_from_loop((0, 1), platform)
    return lax.cond(last_number == 1, f, lambda x: x, x)
