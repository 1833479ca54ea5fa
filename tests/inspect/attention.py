"""Tiny attention layers, in several spellings, and their largest logits in float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import check_jaxpr, jaxpr_as_fun

from muonjax._inspect.report import run
from muonjax._inspect.versions import opened

WIDTH, HEADS, SIZE = 16, 4, 4
BATCH, LENGTH = 8, 6


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
    return np.random.default_rng(1).standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)


def unstacked(w):
    return [{name: value[i] for name, value in w.items()} for i in range(len(w["q"]))]


def softmax(logits):
    """As it is written by hand."""
    weights = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True)))
    return weights / jnp.sum(weights, -1, keepdims=True)


@jax.custom_jvp
def custom_softmax(logits):
    return softmax(logits)


@custom_softmax.defjvp
def _(primals, tangents):
    p, t = custom_softmax(*primals), tangents[0]
    return p, p * (t - jnp.sum(p * t, -1, keepdims=True))


def attend(q, k, v, softmax=jax.nn.softmax, causal=False):
    logits = jnp.einsum("bths,buhs->bhtu", q, k) / np.float32(np.sqrt(SIZE))
    if causal:
        logits = jnp.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -jnp.inf)
    return jnp.einsum("bhtu,buhs->bths", softmax(logits), v)


def layer(x, w, attend=attend):
    q, k, v = (jnp.einsum("btd,dhs->bths", x, w[name]) for name in "qkv")
    return x + jnp.einsum("bths,hsd->btd", attend(q, k, v), w["o"])


def unrolled(w, x, layer=layer):
    for i in range(len(w["q"])):
        x = layer(x, {name: value[i] for name, value in w.items()})
    return (x**2).mean()


def scanned(w, x, layer=layer):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2).mean()


def by_hand(w, x, causal=False):
    """[layers, batch, heads], float64."""
    x, maxima = np.float64(x), []
    for each in unstacked(jax.tree.map(np.float64, w)):
        q, k, v = (np.einsum("btd,dhs->bths", x, each[name]) for name in "qkv")
        logits = np.einsum("bths,buhs->bhtu", q, k) / np.sqrt(SIZE)
        if causal:
            logits = np.where(np.tril(np.ones((x.shape[1], x.shape[1]), bool)), logits, -np.inf)
        maxima.append(logits.max((2, 3)))
        p = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("bhtu,buhs->bths", p / p.sum(-1, keepdims=True), v)
        x = x + np.einsum("bths,hsd->btd", out, each["o"])
    return np.stack(maxima)


def report(closed, probes):
    """The jaxpr with the maxima of the probes as further outputs."""
    return jax.make_jaxpr(functools.partial(run, closed, probes))(*closed.in_avals)


def reporting(loss, find_probes):
    """The loss with the maxima of the probes that the tests' own finder finds."""

    def function(w, x):
        closed = jax.make_jaxpr(loss)(w, x)
        leaves = jax.tree.leaves((w, x))
        probes = [probe for _, probe in find_probes(closed, len(jax.tree.leaves(w)))]
        value, *maxima = jaxpr_as_fun(report(closed, probes))(*leaves)
        return value, maxima

    return function


def check(loss, w, x, expected, find_probes, **jit):
    """Loss and gradients equal to the bit those of jax.value_and_grad, and the maxima are the expected ones."""
    closed = jax.make_jaxpr(loss)(w, x)
    check_jaxpr(opened(report(closed, [probe for _, probe in find_probes(closed, len(jax.tree.leaves(w)))])))
    (value, maxima), grads = jax.jit(jax.value_and_grad(reporting(loss, find_probes), has_aux=True), **jit)(
        w, x
    )
    other, others = jax.jit(jax.value_and_grad(loss), **jit)(w, x)
    np.testing.assert_array_equal(value, other)
    jax.tree.map(np.testing.assert_array_equal, grads, others)
    assert {maximum.dtype for maximum in maxima} == {jnp.dtype("float32")}
    np.testing.assert_allclose(np.stack(maxima), np.float64(expected), rtol=2e-5, atol=2e-5)


dot_product_attention = functools.partial(jax.nn.dot_product_attention, implementation="xla")
