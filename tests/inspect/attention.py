"""Tiny attention layers, in several spellings, and their largest logits in float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import check_jaxpr
from numpy.testing import assert_allclose, assert_array_equal

from muonjax import value_and_grad

WIDTH = 16
HEADS = 4
SIZE = 4
BATCH = 8
LENGTH = 6


def weights(layers=1):
    shapes = {
        "q": (WIDTH, HEADS, SIZE),
        "k": (WIDTH, HEADS, SIZE),
        "v": (WIDTH, HEADS, SIZE),
        "o": (HEADS, SIZE, WIDTH),
    }
    random = np.random.default_rng(0)

    def draw(shape):
        return (random.standard_normal((layers, *shape)) * 0.4).astype(np.float32)

    return {name: draw(shape) for name, shape in shapes.items()}


def tokens():
    return (
        np.random.default_rng(1)
        .standard_normal((BATCH, LENGTH, WIDTH))
        .astype(np.float32)
    )


def unstacked(w):
    return [{name: value[i] for name, value in w.items()} for i in range(len(w["q"]))]


def softmax(logits):
    """As it is written by hand."""
    weights = jnp.exp(
        logits - jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    )
    return weights / jnp.sum(weights, -1, keepdims=True)


@jax.custom_jvp
def custom_softmax(logits):
    return softmax(logits)


@custom_softmax.defjvp
def _(primals, tangents):
    p = custom_softmax(*primals)
    t = tangents[0]
    return p, p * (t - jnp.sum(p * t, -1, keepdims=True))


def attend(q, k, v, softmax=jax.nn.softmax, causal=False):
    logits = jnp.einsum("bths,buhs->bhtu", q, k) / np.float32(np.sqrt(SIZE))
    if causal:
        logits = jnp.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -jnp.inf)
    return jnp.einsum("bhtu,buhs->bths", softmax(logits), v)


def layer(x, w, attend=attend):
    q, k, v = (jnp.einsum("btd,dhs->bths", x, w[name]) for name in "qkv")
    return x + jnp.einsum("bths,hsd->btd", attend(q, k, v), w["o"])


def layer_with(attend=attend, **settings):
    """`layer` with another attention, or with settings of this one."""
    return functools.partial(layer, attend=functools.partial(attend, **settings))


def unrolled(w, x, layer=layer):
    for i in range(len(w["q"])):
        x = layer(x, {name: value[i] for name, value in w.items()})
    return (x**2).mean()


def scanned(w, x, layer=layer):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2).mean()


def by_hand(w, x, causal=False):
    """[layers, batch, heads], float64."""
    x = np.float64(x)
    maxima = []
    for each in unstacked(jax.tree.map(np.float64, w)):
        q, k, v = (np.einsum("btd,dhs->bths", x, each[name]) for name in "qkv")
        logits = np.einsum("bths,buhs->bhtu", q, k) / np.sqrt(SIZE)
        if causal:
            logits = np.where(
                np.tril(np.ones((x.shape[1], x.shape[1]), bool)), logits, -np.inf
            )
        maxima.append(logits.max((2, 3)))
        p = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("bhtu,buhs->bths", p / p.sum(-1, keepdims=True), v)
        x = x + np.einsum("bths,hsd->btd", out, each["o"])
    return np.stack(maxima)


def assert_as_jax(loss, *args, argnums=0, around=lambda f: f):
    """Loss and gradients equal to the bit those of jax.value_and_grad; the largest logits are returned."""
    ours, jaxs = (
        jax.jit(around(f(loss, argnums)))(*args)
        for f in (value_and_grad, jax.value_and_grad)
    )
    (value, maxima), grads = ours
    assert jax.tree.structure((value, grads)) == jax.tree.structure(jaxs)
    jax.tree.map(assert_array_equal, (value, grads), jaxs)
    return maxima


def check(loss, w, x, expected):
    """Loss and gradients are those of jax.value_and_grad, and the largest logits are the expected ones."""
    check_jaxpr(jax.make_jaxpr(value_and_grad(loss))(w, x).jaxpr)
    maxima = assert_as_jax(loss, w, x)
    found = (
        np.stack([*maxima.values()]) if len(maxima) > 1 else next(iter(maxima.values()))
    )  # layers
    assert (found.shape, found.dtype) == (np.shape(expected), jnp.float32)
    assert_allclose(found, np.float64(expected), rtol=2e-5, atol=2e-5)


dot_product_attention = functools.partial(
    jax.nn.dot_product_attention, implementation="xla"
)
