"""The clip where JAX promotes neither dtypes nor ranks by itself, and settings that are NumPy's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax
from tests.clip.attentions import EXACT, multi_head, normal
from tests.tools.tiers import quick


@pytest.fixture(params=["dtypes", "ranks"])
def strict(request):
    mode = (
        jax.numpy_dtype_promotion("strict")
        if request.param == "dtypes"
        else jax.numpy_rank_promotion("raise")
    )
    with mode:
        yield


@quick("dtypes-1-4", others="nightly")
@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("every_k", [1, 2])
def test_qk_clip(key_heads, every_k):
    with jax.numpy_rank_promotion("allow"):  # the attention of the test is not what is tested
        params, maxima, site = multi_head(4, key_heads)
        before = maxima(params)
    tx = muonjax.qk_clip(5.0, site, every_k=every_k)
    state, updates = tx.init(params), jax.tree.map(jnp.zeros_like, params)
    for _ in range(every_k):
        updates, state = jax.jit(tx.update)(updates, state, params, max_logits={"max_logits": before})
    direct = muonjax.apply_qk_clip(params, {"max_logits": before}, site, 5.0)
    with jax.numpy_rank_promotion("allow"):
        assert maxima(optax.apply_updates(params, updates)).max() <= 5 * EXACT
        assert maxima(direct).max() <= 5 * EXACT
    assert int(state.num_clipped) == int((before > 5).sum()) > 0


@pytest.mark.usefixtures("strict")
def test_half_precision_weights_and_updates():
    params, _, site = multi_head()
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    tx = muonjax.qk_clip(100.0, site)
    with pytest.warns(UserWarning, match="rounds away"):
        state = tx.init(params)
    updates = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    hot = {"max_logits": jnp.full(4, 400.0)}
    updates, _ = jax.jit(tx.update)(updates, state, params, max_logits=hot)
    np.testing.assert_array_equal(
        updates["query"]["kernel"], -0.5 * params["query"]["kernel"].astype(jnp.float32)
    )
    halves = muonjax.apply_qk_clip(params, hot, site, 100.0)
    np.testing.assert_array_equal(2 * halves["key"]["bias"], params["key"]["bias"])


@quick("dtypes", others="nightly")
@pytest.mark.usefixtures("strict")
def test_signal_clip():
    params = {"out": {"kernel": normal(6, 8), "bias": normal(8)}}
    scales = (muonjax.Scale(path="kernel", rank=2), muonjax.Scale(path="bias", rank=1, optional=True))
    tx = muonjax.signal_clip(muonjax.SignalRule(muonjax.Site(path="out", scales=scales, signal="max"), 1.0))
    updates, state = tx.update(params, tx.init(params), params, signals={"out": jnp.full(8, 4.0)})
    np.testing.assert_allclose(updates["out"]["bias"], -0.5 * params["out"]["bias"], rtol=1e-6)
    assert int(state.total_clipped) == 8


@quick("dtypes-settings1-dtypes0", others="nightly")
@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("dtypes", [(jnp.float32, jnp.float32), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("settings", [
    {"is_causal": True, "block_q": 4, "block_k": 5}, {"local_window_size": (2, 1), "block_k": 4},
    {"mask": jnp.ones((13, 13), bool)}, {"scale": np.float64(0.5)},
])  # fmt: skip
def test_max_logits(dtypes, settings):
    query, key = (normal(2, 13, 4, 8, seed=i).astype(dtype) for i, dtype in enumerate(dtypes))
    largest = muonjax.max_logits(query, key, **settings)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        np.testing.assert_array_equal(largest, muonjax.max_logits(query, key, **settings))
    assert largest.dtype == jnp.float32


@pytest.mark.usefixtures("strict")
def test_the_bound():
    np.testing.assert_array_equal(
        muonjax.max_logits_bound(jnp.full((2, 5, 3), -jnp.inf, jnp.bfloat16)), -np.inf
    )


# NumPy's numbers, and values that are only known when the program runs.


@pytest.mark.thorough
def test_numpy_settings():
    params, _, _ = multi_head()
    hot = {"max_logits": jnp.full(4, 400.0)}
    flat = jax.tree.map(lambda p: p.reshape(*p.shape[:-2], -1), params)
    sites = muonjax.mha_site(
        layout="i (h d)", num_heads=np.int64(4), num_kv_heads=np.int32(4), scan_axis=None
    )
    tx = muonjax.qk_clip(np.float32(100), sites, every_k=np.int64(1))
    _, state = tx.update(flat, tx.init(flat), flat, max_logits=hot)
    assert state.maxima[""].shape == (4,)
    query = normal(1, 6, 2, 4)
    np.testing.assert_array_equal(
        muonjax.max_logits(
            query, query, block_q=np.int64(2), block_k=np.int32(3), local_window_size=np.int64(1)
        ),
        muonjax.max_logits(query, query, block_q=2, block_k=3, local_window_size=1),
    )
    stacked = jax.tree.map(lambda p: jnp.stack([p, p], 1), params)
    for axis in (np.int64(1), [np.int64(1)]):
        assert muonjax.qk_clip(1.0, muonjax.mha_site(scan_axis=axis)).init(stacked).maxima[""].shape == (2, 4)
    muonjax.mla_site(nope=np.int64(2))
    muonjax.fused_qkv_site(num_heads=np.int64(4), head_dim=np.int64(2))


@pytest.mark.parametrize("name", ["is_causal", "local_window_size", "block_q"])
def test_traced_settings_are_refused(name):
    query = normal(1, 6, 2, 4)
    with pytest.raises((TypeError, ValueError), match=rf"max_logits\({name}=.*(True or False|whole number)"):
        jax.jit(lambda value: muonjax.max_logits(query, query, **{name: value}))(1)


def test_bools_of_numpy():
    query = normal(1, 6, 2, 4)
    np.testing.assert_array_equal(
        muonjax.max_logits(query, query, is_causal=np.True_),
        muonjax.max_logits(query, query, is_causal=True),
    )
