"""Attention inside of a call whose outputs are fixed: measured from its operands, or refused by its name."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from muonjax import inspect, value_and_grad
from tests.inspect.attention import attend, layer_with, tokens, unrolled, weights

W = weights()
X = tokens()


def visible(q, k, v):
    return attend(q, k, v)


def by_blocks(q, k, v):
    """Online softmax over blocks of keys."""

    def block(carry, keys_values):
        largest, total, out = carry
        k, v = keys_values
        logits = jnp.einsum("bths,buhs->bhtu", q, k) / np.float32(2)
        new = jnp.maximum(largest, logits.max(-1))
        weights = jnp.exp(logits - new[..., None])
        scale = jnp.exp(largest - new)
        out = out * scale[..., None] + jnp.einsum("bhtu,buhs->bhts", weights, v)
        return (new, total * scale + weights.sum(-1), out), None

    n, length, heads, _ = q.shape
    start = (
        jnp.full((n, heads, length), -jnp.inf),
        jnp.zeros((n, heads, length)),
        jnp.zeros_like(q.swapaxes(1, 2)),
    )
    blocks = [x.reshape(n, 3, length // 3, *x.shape[2:]).swapaxes(0, 1) for x in (k, v)]
    (_, total, out), _ = jax.lax.scan(block, start, blocks)
    return (out / total[..., None]).swapaxes(1, 2)


@pytest.mark.parametrize("inside", [visible, jax.jit(visible), by_blocks])
def test_attention_with_a_derivative_of_its_own_is_measured_from_its_operands(inside):
    """As flash attention in plain JAX is written. Its derivative stays its own."""
    custom = jax.custom_vjp(inside)
    custom.defvjp(
        lambda *qkv: (inside(*qkv), qkv),
        lambda qkv, g: [3 * x for x in jax.vjp(inside, *qkv)[1](g)],
    )
    w = weights(2)
    x = tokens()
    loss, plain = (
        functools.partial(unrolled, layer=layer_with(f)) for f in (custom, inside)
    )
    (value, maxima), grads = jax.jit(value_and_grad(loss))(w, x)
    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(w, x)
    np.testing.assert_array_equal(value, expected)
    maxima_of_plain = jax.jit(value_and_grad(plain))(w, x)[0][1]
    chex.assert_trees_all_close(
        (grads, maxima), (expected_grads, maxima_of_plain), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_kernel_that_hides_its_logits_is_refused_by_its_name(has_keys):
    def kernel(q, k, v, o):
        o[...] = q[...] + k[...] + v[...]

    def flash(q, k, v):
        out = jax.ShapeDtypeStruct(q.shape, q.dtype)
        k = k if has_keys else q
        return pl.pallas_call(kernel, out_shape=out, interpret=True, name="flash")(
            q, k, v
        )

    loss = functools.partial(unrolled, layer=layer_with(flash))
    (found,) = inspect(loss, W, X).attentions
    assert found.site is None
    assert "'flash' is a call whose logits can't be seen" in found.problem
    with pytest.raises(ValueError, match="'flash' is a call"):
        value_and_grad(loss)(W, X)


def test_cudnn_is_refused_by_its_name(monkeypatch):
    """Traced without a GPU."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91400)
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)

    def attention(q, k, v):
        q, k, v = (
            jnp.pad(x.astype("bfloat16"), [(0, 0)] * 3 + [(0, 64 - x.shape[-1])])
            for x in (q, k, v)
        )
        out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
        return out[..., :4].astype("float32")

    w = weights()
    x = tokens()
    (found,) = inspect(
        functools.partial(unrolled, layer=layer_with(attention)),
        w,
        x,
    ).attentions
    assert (
        "'dot_product_attention_fwd_wrapper' is a call whose logits can't be seen"
        in found.problem
    )
