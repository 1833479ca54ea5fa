"""LoHa's functions inside of jax.shard_map: data parallel, and each device with a model of its own."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from muonjax import hadamard_dot, hadamard_linear, hadamard_weight
from muonjax._adapters.adapter import Adapter
from tests.tools.oracles import normal
from tests.tools.sharded import DEVICES, check
from tests.tools.tiers import quick

M, N, R = 9, 6, 3
REPLICATED, SPLIT = P(), P("data")


def random(*shape):
    return normal(*shape, seed=sum(shape))


def factors(*batch):
    return [random(*batch, *shape) for shape in ((M, R), (R, N)) * 2]


@quick("rows")
@pytest.mark.parametrize("form", ["rows", "kronecker"])
def test_dot(form):
    def loss(x, *f):
        return jnp.sum(jnp.tanh(hadamard_dot(x, *f, form=form)))

    check(loss, (SPLIT, *[REPLICATED] * 4), (random(4, M), *factors()))


@quick("kronecker")
@pytest.mark.parametrize("form", ["rows", "kronecker"])
def test_linear(form):
    def loss(x, w, scale, *f):
        return jnp.sum(jnp.tanh(hadamard_linear(x, w, *f, scale=scale, form=form)))

    def own_model(*arguments):
        return jnp.sum(jax.vmap(loss)(*arguments))

    check(loss, (SPLIT, *[REPLICATED] * 6), (random(4, M), random(M, N), jnp.float32(0.5), *factors()))
    own = random(DEVICES, 4, M), random(DEVICES, M, N), random(DEVICES), *factors(DEVICES)
    check(own_model, (SPLIT,) * 7, own)


def test_the_magnitude_of_dora():
    def loss(x, w, magnitude, *f):
        return jnp.sum(jnp.tanh(hadamard_linear(x, w, *f, magnitude=magnitude)))

    magnitude = 1 + jnp.abs(random(N))
    check(loss, (SPLIT, *[REPLICATED] * 6), (random(4, M), random(M, N), magnitude, *factors()))


def test_adapters_split_over_devices_under_tokens_that_are_replicated():
    """Each device adapts the same layer in its own way: the cotangents of x and w are summed over devices."""

    def loss(x, w, *f):
        return jnp.sum(jnp.tanh(jax.vmap(functools.partial(hadamard_linear, x, w))(*f)))

    check(loss, (REPLICATED, REPLICATED, *[SPLIT] * 4), (random(4, M), random(M, N), *factors(DEVICES)))


def test_weight():
    def loss(x, *f):
        return jnp.sum(jnp.tanh(x @ hadamard_weight(*f)))

    check(loss, (SPLIT, *[REPLICATED] * 4), (random(4, M), *factors()))


def test_convolution():
    """256 channels are convolved in two blocks."""
    dimensions = jax.lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))

    def loss(x, kernel, *f):
        y = Adapter(f).convolution(x, kernel, (1,), "SAME", dimension_numbers=dimensions)
        return jnp.sum(jnp.tanh(y))

    f = [random(*shape) for shape in ((9, 2), (2, 256)) * 2]
    check(loss, (SPLIT, *[REPLICATED] * 5), (random(4, 5, 3), random(3, 3, 256), *f))
