"""LoHa's product inside of jax.shard_map: data parallel, and each device with a model of its own."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from muonjax import hadamard_linear
from muonjax.loha import multiply
from tests.tools.oracles import normal
from tests.tools.sharded import DEVICES, check

M = 9
N = 6
R = 3
REPLICATED = P()
SPLIT = P("data")


def random(*shape):
    return normal(*shape, seed=sum(shape))


def factors(*batch):
    return [random(*batch, *shape) for shape in ((M, R), (R, N)) * 2]


def test_linear():
    def loss(x, w, scale, *f):
        return jnp.sum(jnp.tanh(hadamard_linear(x, w, *f, scale=scale)))

    def own_model(*arguments):
        return jnp.sum(jax.vmap(loss)(*arguments))

    check(
        loss,
        (SPLIT, *[REPLICATED] * 6),
        (random(4, M), random(M, N), jnp.float32(0.5), *factors()),
    )
    own = (
        random(DEVICES, 4, M),
        random(DEVICES, M, N),
        random(DEVICES),
        *factors(DEVICES),
    )
    check(own_model, (SPLIT,) * 7, own)


def test_adapters_split_over_devices_under_tokens_that_are_replicated():
    """Each device adapts the same layer in its own way: the cotangents of x and w are summed over devices."""

    def loss(x, w, *f):
        return jnp.sum(jnp.tanh(jax.vmap(functools.partial(hadamard_linear, x, w))(*f)))

    check(
        loss,
        (REPLICATED, REPLICATED, *[SPLIT] * 4),
        (random(4, M), random(M, N), *factors(DEVICES)),
    )


def test_convolution():
    convolve = jax.lax.conv_general_dilated
    dimensions = jax.lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))

    def loss(x, kernel, *f):
        y = multiply(
            convolve,
            x,
            kernel,
            f,
            1.0,
            (1,),
            "SAME",
            dimension_numbers=dimensions,
        )
        return jnp.sum(jnp.tanh(y))

    f = [random(*shape) for shape in ((9, 2), (2, 8)) * 2]
    check(loss, (SPLIT, *[REPLICATED] * 5), (random(4, 5, 3), random(3, 3, 8), *f))
