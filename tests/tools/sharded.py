"""A function inside of jax.shard_map, which checks which values vary over the mesh, against the same without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

DEVICES = 2


def mesh():
    return jax.make_mesh(
        (DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )


def check(loss, specs, arguments):
    """A loss, summed over devices, and its gradient in every argument are those without a mesh."""
    value_and_gradients = jax.value_and_grad(loss, argnums=tuple(range(len(arguments))))

    def sharded(*arguments):
        value, gradients = value_and_gradients(*arguments)
        return jax.lax.psum(value, "data"), gradients

    run = jax.shard_map(sharded, mesh=mesh(), in_specs=specs, out_specs=(P(), specs))
    value, gradients = jax.jit(run)(*arguments)
    expected, expected_gradients = jax.jit(value_and_gradients)(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(
            one, other, atol=1e-4 * float(jnp.max(jnp.abs(other)))
        )
