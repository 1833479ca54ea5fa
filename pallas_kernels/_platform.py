"""The platform of a call, read off its arrays while it is traced; and what XLA compiles badly there.

Against the latter: constants that XLA does not know, so that it compiles less, and results that it puts in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

_NAMES = {"cuda": "gpu", "rocm": "gpu"}


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
    return _NAMES.get(name, name)


def kind_of(*arrays: Any, mesh: Any = None) -> str:
    """The kind of the device that `platform_of` finds, such as "TPU v6 lite"; "" where JAX has no such device."""
    device = _device_of(arrays, mesh)
    try:
        return (jax.devices(device)[0] if isinstance(device, str) else device).device_kind
    except RuntimeError:
        return ""


def _device_of(arrays: tuple[Any, ...], mesh: Any) -> Any:
    """A device, an `AbstractDevice`, or the name of a platform."""
    return (
        _of_mesh(mesh)
        or next(filter(None, map(_of_sharding, arrays)), None)
        or next(filter(None, map(_of_device, arrays)), None)
        or _of_mesh(jax.sharding.get_abstract_mesh())
        or jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        or jax.default_backend()
    )


def _of_mesh(mesh: Any) -> Any:
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0] if mesh.size else None
    return None if mesh is None else mesh.abstract_device


def _of_sharding(array: Any) -> Any:
    sharding = (
        array.sharding if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array).sharding
    )
    return _of_mesh(getattr(sharding, "mesh", None))


def _of_device(array: Any) -> Any:
    concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return next(iter(array.devices())) if concrete else None


def numbers_from_loop(numbers: Sequence[int], platform: str) -> Sequence[jax.typing.ArrayLike]:
    """On a CPU the numbers as results of a loop, int32 each; elsewhere as they are.

    XLA compiles equal kernels once, but a slice at a constant of its own is a kernel of its own: with 96 layers of
    one shape, slicing was more than half of the time that their compilation took.
    """
    # Elsewhere each pass of the loop would be a launch; and a single slice is a single kernel either way.
    if platform != "cpu" or len(numbers) < 2:
        return numbers
    table = jnp.asarray(numbers, jnp.int32)
    none = (jnp.int32(0),) * len(numbers)
    return lax.fori_loop(0, len(numbers), lambda i, found: (*found[1:], table[i]), none)


def materialize(f: Callable[[jax.Array], jax.Array], x: jax.Array, platform: str) -> jax.Array:
    """f(x), of the shape and dtype of x, in memory; on a CPU as the result of a branch that is always taken.

    XLA would compute what is elementwise in f once more for each reader of the result, and keep everything that this
    takes until the last of them has run. An `optimization_barrier` is gone by the time that it decides so.
    """
    if platform != "cpu":
        return f(x)
    _, one = numbers_from_loop((0, 1), platform)
    return lax.cond(one == 1, f, lambda x: x, x)
