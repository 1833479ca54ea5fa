"""Settings that are NumPy's numbers, and values that are only known when the program runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax
from tests.clip.attentions import multi_head, normal


@pytest.mark.thorough
def test_numpy_settings():
    params, _, _ = multi_head()
    hot = {"max_logits": jnp.full(4, 400.0)}
    flat = jax.tree.map(lambda p: p.reshape(*p.shape[:-2], -1), params)
    sites = muonjax.mha_site(
        layout="i (h d)",
        num_heads=np.int64(4),
        num_kv_heads=np.int32(4),
        scan_axis=None,
    )
    tx = muonjax.qk_clip(np.float32(100), sites, every_k=np.int64(1))
    _, state = tx.update(flat, tx.init(flat), flat, max_logits=hot)
    assert state.maxima["max_logits"].shape == (4,)
    query = normal(1, 6, 2, 4)
    np.testing.assert_array_equal(
        muonjax.max_logits(
            query,
            query,
            block=np.int64(2),
            local_window_size=np.int64(1),
        ),
        muonjax.max_logits(query, query, block=2, local_window_size=1),
    )
    stacked = jax.tree.map(lambda p: jnp.stack([p, p], 1), params)
    for axis in (np.int64(1), [np.int64(1)]):
        assert muonjax.qk_clip(1.0, muonjax.mha_site(scan_axis=axis)).init(
            stacked
        ).maxima["max_logits"].shape == (2, 4)
    muonjax.mla_site(nope=np.int64(2))
    muonjax.fused_qkv_site(num_heads=np.int64(4), head_dim=np.int64(2))


@pytest.mark.parametrize("name", ["is_causal", "local_window_size", "block"])
def test_traced_settings_are_refused(name):
    query = normal(1, 6, 2, 4)
    with pytest.raises(
        (TypeError, ValueError),
        match=rf"max_logits\({name}=.*(True or False|whole number)",
    ):
        jax.jit(lambda value: muonjax.max_logits(query, query, **{name: value}))(1)
