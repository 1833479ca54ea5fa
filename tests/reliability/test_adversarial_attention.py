"""Any queries and keys through `max_logits`, any statistic and threshold through QK-Clip: exact, or left alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from tests.reliability.adversarial import BAD
from tests.tools.oracles import normal_tree
from tests.tools.tiers import examples

FLOAT32 = np.finfo(np.float32)
TINY = float(FLOAT32.tiny)
HUGE = float(FLOAT32.max)

LAYOUTS = [  # heads, key heads, positions of queries and keys, causal, window
    (1, 1, 1, 1, False, None),
    (4, 4, 5, 5, True, None),
    (4, 2, 7, 3, False, 1),
    (4, 1, 6, 9, True, (2, 1)),
    (2, 2, 4, 4, False, None),
]


@functools.partial(jax.jit, static_argnums=(3, 4))
def largest(query, key, mask, causal, window):
    return muonjax.max_logits(
        query,
        key,
        mask=mask,
        is_causal=causal,
        local_window_size=window,
        block=2,
    )


@pytest.mark.nan
@examples(10)
@given(data=st.data())
def test_any_queries_and_keys(data):
    heads, key_heads, T, S, causal, window = data.draw(st.sampled_from(LAYOUTS))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))

    def draw(count, length):
        x = rng.standard_normal((2, length, count, 8)) * 10.0 ** data.draw(
            st.floats(-38, 37)
        )
        x = x.astype(np.float32)
        for index in data.draw(st.lists(st.integers(0, x.size - 1), max_size=2)):
            x.flat[index] = data.draw(
                st.one_of(st.sampled_from(BAD), st.floats(width=32))
            )
        return x

    query = draw(heads, T)
    key = draw(key_heads, S)
    if not (np.isfinite(query).all() and np.isfinite(key).all()):
        # Subnormal numbers may count as zero, whose product with an infinity is NaN.
        query, key = (np.where(np.abs(x) < TINY, 0, x) for x in (query, key))
    mask = rng.random((2, 1, T, S)) < data.draw(st.floats(0, 1))
    got = np.asarray(largest(query, key, mask, causal, window))

    ahead = np.arange(S) - np.arange(T)[:, None]
    left, right = (
        (np.inf, np.inf)
        if window is None
        else (window, window)
        if window == 1
        else window
    )
    seen = mask & (ahead <= (0 if causal else right)) & (-ahead <= left)
    with np.errstate(all="ignore"):
        q = query.astype(np.float64)
        k = np.repeat(key.astype(np.float64), heads // key_heads, axis=2)
        logits = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8)
        # Rounding and overflow depend on these sizes, besides any infinity.
        sizes = np.einsum(
            "bthd,bshd->bhts", *(np.where(np.isfinite(x), np.abs(x), 0) for x in (q, k))
        )
        sizes = np.where(seen, sizes, 0)
    for head in range(heads):
        visible = logits[:, head][np.broadcast_to(seen[:, 0], logits[:, head].shape)]
        size = sizes[:, head].max()
        if not visible.size:
            assert got[head] == -np.inf
        elif np.isnan(visible).any():
            assert np.isnan(got[head])
        elif size < HUGE or np.isfinite(
            got[head]
        ):  # where a sum overflows float32, that may show
            # Subnormal factors may count as zero.
            finite = [np.abs(x)[np.isfinite(x)].max(initial=1) for x in (query, key)]
            lost = TINY * 8 * sum(finite)
            assert_allclose(got[head], visible.max(), rtol=0, atol=1e-5 * size + lost)


def weights(seed, heads, key_heads):
    shapes = {
        name: {"kernel": (6, count, 4), "bias": (count, 4)}
        for name, count in (("query", heads), ("key", key_heads))
    }
    return {"attention": normal_tree(shapes, seed)}


@jax.jit
def clipped(params, signal, threshold):
    """By `apply_qk_clip`, and by `qk_clip` after updates of zero."""
    sites = muonjax.mha_site()
    now = muonjax.apply_qk_clip(params, {"attention": signal}, sites, threshold)
    tx = muonjax.qk_clip(threshold, sites)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(
        zeros, tx.init(params), params, max_logits={"attention": signal}
    )
    return now, optax.apply_updates(params, updates), state


@pytest.mark.nan
@examples(10)
@given(
    key_heads=st.sampled_from([4, 2, 1]),
    signal=arrays(
        np.float32,
        4,
        elements=st.one_of(
            st.floats(width=32), st.sampled_from([*BAD, 0.0, 1e30, 400.0])
        ),
    ),
    threshold=st.one_of(
        st.floats(width=32, min_value=FLOAT32.tiny, allow_infinity=False),
        st.sampled_from([1.0, 100.0]),
    ),
    exponent=st.integers(-20, 20),
    seed=st.integers(0, 2**32),
)
def test_any_statistic_and_threshold(key_heads, signal, threshold, exponent, seed):
    heads = 4
    params = weights(seed, heads, key_heads)
    params = jax.tree.map(lambda p: p * np.float32(2.0**exponent), params)
    now, after, state = clipped(params, signal, np.float32(threshold))
    signal = np.where(np.abs(signal) < TINY, 0, signal)
    with np.errstate(all="ignore"):
        gamma = np.where(
            np.isfinite(signal) & (signal > threshold),
            threshold / signal.astype(np.float64),
            1.0,
        )
    assert_allclose(state.factors["attention"], np.maximum(gamma, TINY), rtol=1e-6)
    params, now, after = (tree["attention"] for tree in (params, now, after))
    factors = {
        name: np.asarray(now[name]["kernel"], np.float64)[0, :, 0]
        / params[name]["kernel"][0, :, 0]
        for name in params
    }
    # The product of both factors is the clip of each head.
    product = factors["query"] * np.repeat(factors["key"], heads // key_heads)
    assert_allclose(product, np.maximum(gamma, TINY), rtol=1e-5, atol=1e-30)
    for name, count in (("query", heads), ("key", key_heads)):
        for leaf in ("kernel", "bias"):
            p, a, b = (np.asarray(tree[name][leaf]) for tree in (params, now, after))
            assert np.isfinite(a).all()
            assert_allclose(b, a, rtol=1e-5, atol=1e-6 * np.abs(p).max())
            quiet = factors[name] == 1
            assert_array_equal(a[..., quiet, :], p[..., quiet, :])
        assert count == len(factors[name])
