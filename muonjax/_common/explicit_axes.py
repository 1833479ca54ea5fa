"""Arrays on a mesh with explicit axis types: their type says how they are sharded, and only `reshard` changes it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped


def is_explicit(x: Any) -> bool:
    """Whether x is on a mesh with explicit axis types."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def sharded_like(x: Shaped[Array, "*x"], other: Any) -> Shaped[Array, "*x"]:
    """x, sharded as `other`, of equal rank; as it is where `other` is not on a mesh with explicit axis types."""
    return jax.sharding.reshard(x, jax.typeof(other).sharding) if is_explicit(other) else x


def whole_along(x: Shaped[Array, "*x"], axis: int, step: int | None = None) -> Shaped[Array, "*x"]:
    """x, gathered along `axis`; with `step` not where cuts at its multiples can leave the parts sharded."""
    if not is_explicit(x):
        return x
    mesh, spec = jax.typeof(x).sharding.mesh, [*jax.typeof(x).sharding.spec]
    axes = spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)
    if step and step % math.prod(mesh.shape[name] for name in axes if name is not None) == 0:
        return x
    spec[axis] = None
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def zero_beside(x: Any, axes: tuple[int, ...] | None = None) -> Int[Array, "*#x"]:
    """A zero to add to a new array, which is then on x's mesh, where that has explicit axis types.

    A state that `init` makes on no mesh, and `update` returns on one, can't be donated: JAX compiles again after the
    first step, and may give XLA a buffer of another size.

    Args:
      x: An array.
      axes: Zeros with these axes of size 1, sharded as x is along the others; None: a scalar.
    """
    # Not of zeros_like(x): jit would not see that x, and with it the mesh, is needed.
    if isinstance(x, jax.Array) and is_explicit(x):
        return 0 * jnp.sum(jnp.isnan(x), axes, keepdims=axes is not None)
    return jnp.zeros([1 if i in axes else size for i, size in enumerate(x.shape)] if axes else [], int)
