import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax


def dense(q, k, mask=None, causal=False, scale=None):
    q, k = (
        np.asarray(q, np.float64),
        np.repeat(np.asarray(k, np.float64), q.shape[-2] // k.shape[-2], axis=-2),
    )
    logits = np.einsum("...thd,...shd->...hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    keep = np.ones(logits.shape, bool)
    if causal:
        t, s = logits.shape[-2:]
        keep &= np.arange(s) <= np.arange(t)[:, None] + s - t
    if mask is not None:
        keep &= np.asarray(mask, bool)
    logits = np.where(keep, logits, -np.inf)
    return np.moveaxis(logits, -3, 0).reshape(logits.shape[-3], -1).max(1)


def inputs(batch=(2,), t=13, s=13, heads=4, key_heads=4, size=8, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((*batch, t, heads, size))
    k = rng.standard_normal((*batch, s, key_heads, size))
    return jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32)


@pytest.mark.parametrize("blocks", [(512, 512), (4, 4), (5, 3), (1, 13)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("t", "s", "key_heads", "batch"), [(13, 13, 4, (2,)), (6, 17, 2, ()), (17, 6, 1, (2, 3))]
)
def test_equals_the_dense_maximum(blocks, causal, t, s, key_heads, batch):
    q, k = inputs(batch, t, s, key_heads=key_heads)
    largest = muonjax.max_logits(q, k, is_causal=causal, block_q=blocks[0], block_k=blocks[1])
    np.testing.assert_allclose(largest, dense(q, k, causal=causal), rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 4, 13, 13), (1, 1, 13, 13), (2, 1, 1, 13), (13, 13), (1, 4, 13, 1)])
def test_masks_of_every_shape(shape):
    q, k = inputs()
    mask = np.random.default_rng(3).random(shape) < 0.3
    largest = muonjax.max_logits(q, k, mask=jnp.asarray(mask), block_q=4, block_k=5)
    np.testing.assert_allclose(largest, dense(q, k, mask), rtol=1e-5)


def test_a_head_that_is_masked_everywhere_is_minus_infinity():
    q, k = inputs()
    mask = jnp.ones((1, 4, 13, 13)).at[:, 2].set(0)
    largest = muonjax.max_logits(q, k, mask=mask)
    assert largest[2] == -jnp.inf
    assert np.isfinite(np.delete(largest, 2)).all()


def test_signed_scaled_and_without_gradient():
    q, k = jnp.ones((3, 1, 4)), -jnp.ones((3, 1, 4))
    np.testing.assert_allclose(muonjax.max_logits(q, k, scale=0.5), [-2.0])
    gradient = jax.grad(lambda q: muonjax.max_logits(q, k).sum())(q)
    np.testing.assert_array_equal(gradient, 0)


def test_half_precision_is_summed_in_float32():
    q, k = inputs(size=64)
    half = muonjax.max_logits(q.astype(jnp.bfloat16), k.astype(jnp.bfloat16))
    assert half.dtype == jnp.float32
    rounded = [np.asarray(x.astype(jnp.bfloat16), np.float32) for x in (q, k)]
    np.testing.assert_allclose(half, dense(*rounded), rtol=1e-5)


def test_memory_is_blocks_and_no_square():
    q = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
    compiled = jax.jit(lambda q, k: muonjax.max_logits(q, k, is_causal=True)).lower(q, q).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 32 * 2**20


def test_bad_shapes():
    q, k = inputs()
    with pytest.raises(ValueError, match="share batch and head size"):
        muonjax.max_logits(q, k[..., :4])
    with pytest.raises(ValueError, match="multiple of the key's"):
        muonjax.max_logits(q, k[..., :3, :])
    with pytest.raises(ValueError, match="block_q=0"):
        muonjax.max_logits(q, k, block_q=0)
