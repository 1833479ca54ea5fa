"""Keep arrays sharded as they should be on a mesh with explicit axis types.

There the type of an array says how it is sharded, and only `reshard` changes that. Inside of a
`shard_map` it says along which mesh axes the array differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped


def is_explicit(x: Any) -> bool:
    """Whether x is on a mesh with explicit axis types."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def varying(aval: Any) -> frozenset[Any]:
    """The mesh axes along which an array inside a `shard_map` differs from device to device."""
    # Newer versions of JAX have it in `mat`.
    kind = getattr(aval, "mat", None)
    return aval.vma if kind is None else kind.varying


def sharded_like(x: Shaped[Array, "*x"], other: Any) -> Shaped[Array, "*x"]:
    """x, sharded as `other`, of equal rank; as it is where `other` is not on a mesh with explicit
    axis types."""
    return (
        jax.sharding.reshard(x, jax.typeof(other).sharding) if is_explicit(other) else x
    )


def whole_along(
    x: Shaped[Array, "*x"], axis: int, step: int | None
) -> Shaped[Array, "*x"]:
    """x, so that it can be cut along `axis`: gathered along it, where the parts do not fit its
    shards; as it is where its mesh has no explicit axis types.

    With explicit axis types JAX refuses to cut a sharded axis into parts that the shards can't
    share equally.

    Args:
      x: An array, such as a kernel of queries, keys and values with all their columns on one axis.
      axis: The axis that the caller cuts.
      step: The caller cuts at multiples of it. Where the shards can share `step` entries equally, x
        is not gathered: on 4 devices, parts of 16 and 8 entries with the step 8 stay sharded, and
        18 and 6 are gathered. None: gathered.
    """
    if not is_explicit(x):
        return x
    sharding = jax.typeof(x).sharding
    num_shards = x.shape[axis] // sharding.shard_shape(x.shape)[axis]
    # Then the length of each part, a multiple of `step`, is one of the number of shards too.
    if step and step % num_shards == 0:
        return x
    spec = [*sharding.spec]
    spec[axis] = None
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def zero_beside(x: Any, axes: tuple[int, ...] | None = None) -> Int[Array, "*#x"]:
    """A zero to add to a new array, which is then on x's mesh, where that has explicit axis types.

    Without it, `init` would make a state on no mesh, and the first `update` return one on x's mesh.
    `jit` would compile `update` twice, for two types of the state, and could not write the new
    state into the buffers of the old one.

    Args:
      x: An array.
      axes: For a new array in which these axes of x, counted from 0, have size 1: (0,) for an x
        [64, 32] gives zeros [1, 32], sharded as x is along the axis of 32. None: a scalar. Without
        such a mesh the zero is always a scalar, which broadcasts in the sum.
    """
    if isinstance(x, jax.Array) and is_explicit(x):
        # A sum over what depends on x, since `jit` forgets the mesh of zeros_like(x). The sum of
        # `isnan(x)` is finite: 0 · x itself could be NaN.
        return 0 * jnp.sum(jnp.isnan(x), axes, keepdims=axes is not None)
    return jnp.zeros([], int)
