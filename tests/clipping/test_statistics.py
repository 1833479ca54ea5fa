"""Statistics in every form that Flax hands them back in, and those that fit no site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import muonjax
from tests.clipping.attentions import multi_head, zero_update


def test_statistics_come_in_every_form():
    params, _, site = multi_head()
    params = {"a": {"attention": params}}
    hot = jnp.asarray([400.0, 1.0, 1.0, 1.0])
    expected = None
    for statistics in (
        {"a/attention": hot},
        {"a/attention/max_logits": hot},
        {"a": {"attention": {"max_logits": hot}}},
        {"a": {"attention": {"max_logits": (hot, jnp.ones(4))}}},
        {"intermediates": {"a": {"attention": {"max_logits": (hot,)}, "features": jnp.ones(3)}}},
        nnx.State({"a": {"attention": {"max_logits": nnx.Intermediate(hot)}}}),
        nnx.State({"a": {"attention": {"max_logits": nnx.Intermediate((jnp.ones(4), hot))}}}),
    ):
        got = muonjax.apply_qk_clip(params, statistics, site, 100.0)
        expected = got if expected is None else expected
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert (got["a"]["attention"]["query"]["kernel"] != params["a"]["attention"]["query"]["kernel"]).any()


STATISTICS = [
    ({"other": jnp.ones(4)}, r"sites without statistics \['a/max_logits'\]"),
    ({"a": {"max_logit": jnp.ones(4)}}, "sites without statistics"),
    ({"a": jnp.ones(4), "b": {"max_logits": jnp.ones(4)}}, r"statistics without a site \['b/max_logits'\]"),
    ({"a": jnp.ones(3)}, r"shape \(3,\); the parameters say \(4,\)"),
    ({"a": jnp.ones((2, 4))}, r"shape \(2, 4\)"),
    ({"a": jnp.ones(())}, r"shape \(\)"),
]


@pytest.mark.parametrize(("statistics", "message"), STATISTICS)
def test_statistics_that_do_not_fit(statistics, message):
    params = {"a": multi_head()[0]}
    with pytest.raises(ValueError, match=message):
        muonjax.apply_qk_clip(params, statistics, muonjax.mha_site(), 1.0)
    tx = muonjax.qk_clip(1.0, muonjax.mha_site())
    with pytest.raises(ValueError, match=message):
        jax.jit(tx.update)(params, tx.init(params), params, max_logits=statistics)


def test_statistics_by_module_are_all_claimed():
    """Among intermediates much else may stand; a dict of modules is statistics and nothing else."""
    params = {"a": multi_head()[0]}
    with pytest.raises(ValueError, match=r"statistics without a site \['b'\]"):
        muonjax.apply_qk_clip(params, {"a": jnp.ones(4), "b": jnp.ones(4)}, muonjax.mha_site(), 1.0)


def test_missing_arguments():
    params, _, site = multi_head()
    tx = muonjax.qk_clip(100.0, site)
    with pytest.raises(ValueError, match=r"qk_clip: needs this step's statistics.*TrainState"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match="qk_clip: it scales weights"):
        tx.update(params, tx.init(params), max_logits={"max_logits": jnp.ones(4)})


def test_two_attentions_in_one_module_have_a_statistic_each():
    params, _, _ = multi_head()
    params = {f"{which}_{name}": params[name] for which in ("self", "cross") for name in ("query", "key")}
    sites = [
        muonjax.mha_site("", query=f"{which}_query", key=f"{which}_key", signal=f"{which}_logits")
        for which in ("self", "cross")
    ]
    cold, hot = jnp.ones(4), jnp.full(4, 400.0)
    clipped, state = zero_update(
        muonjax.qk_clip(100.0, sites), params, {"self_logits": hot, "cross_logits": cold}
    )
    np.testing.assert_allclose(
        clipped["self_query"]["kernel"], 0.5 * params["self_query"]["kernel"], rtol=1e-6
    )
    jax.tree.map(np.testing.assert_array_equal, clipped["cross_key"], params["cross_key"])
    assert set(state.factors) == {"self_logits", "cross_logits"}
    shared = [
        muonjax.mha_site("", query=f"{which}_query", key="self_key", signal=which)
        for which in ("self", "cross")
    ]
    with pytest.raises(ValueError, match=r"scale 'self_key/(kernel|bias)', which would be clipped twice"):
        muonjax.qk_clip(100.0, shared).init(params)
