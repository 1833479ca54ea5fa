"""msign inside of jax.shard_map, which checks that values vary over the mesh axes they claim."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from muonjax import msign, polar_express
from tests.tools.sharded import DEVICES, check, mesh


def random(*shape):
    return jnp.asarray(
        np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32
    )


@pytest.mark.parametrize("shape", [(3, 3), (2, 8)])
def test_msign_of_a_replicated_weight_and_of_one_for_each_device(shape):
    f = functools.partial(msign, coefficients=polar_express(6))

    def loss(replicated, own, x):
        return jnp.sum(jnp.tanh(x @ f(replicated)) + jnp.tanh(x @ f(own)))

    arguments = random(*shape), random(DEVICES, *shape), random(DEVICES, 4, shape[0])
    check(loss, (P(), P("data"), P("data")), arguments)


def test_second_derivatives_of_msign():
    """Reverse over reverse, as a model that takes Muon steps inside of its forward pass is trained."""

    def inner(w, x):
        return jnp.sum(jnp.tanh(x @ msign(w, coefficients=polar_express(6))))

    def outer(w, x):
        return jnp.sum(jnp.sin(w - jax.grad(inner)(w, x)))

    check(outer, (P("data"), P("data")), (random(DEVICES, 3, 5), random(DEVICES, 4, 3)))


def test_forward_mode_of_msign():
    def forwards(w):
        f = functools.partial(msign, coefficients=polar_express(6))
        return jax.jvp(f, (w,), (jnp.cos(w),))[1]

    w = random(DEVICES, 3, 5)
    run = jax.shard_map(forwards, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(
        jax.jit(run)(w), jax.jit(forwards)(w), rtol=1e-4, atol=1e-5
    )
