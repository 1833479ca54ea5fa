"""Statistics in every form that Flax hands them back in, and those that fit no site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import muonjax
from tests.clipping.attentions import multi_head, zero_update
from tests.tools.oracles import normal


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


def test_statistics_of_every_batch():
    """MaxText sows [batch, heads], stacked [layers, batch, heads], in the attention or in a module inside of it."""
    params, _, site = multi_head()
    hot = jnp.asarray([400.0, 1.0, 1.0, 1.0])
    expected = muonjax.apply_qk_clip({"a": params}, {"a": hot}, site, 100.0)
    batch = jnp.stack([hot, jnp.ones(4), -hot])
    for statistics in (
        {"a": batch},
        {"intermediates": {"a": {"max_logits": (batch,)}}},
        {"a": {"attention_op": {"max_logits": batch}}},
    ):
        got = muonjax.apply_qk_clip({"a": params}, statistics, site, 100.0)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        # Linen's variables, and what Linen collected.
        (got,) = muonjax.apply_qk_clip({"params": {"a": params}}, statistics, site, 100.0).values()
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    layers = jax.tree.map(lambda p: jnp.stack([p, p, p]), params)
    by_layer = {"a": jnp.stack([batch, jnp.ones((3, 4)), -abs(batch)])}
    stacked = muonjax.apply_qk_clip({"a": layers}, by_layer, site, 100.0)["a"]["query"]["kernel"]
    np.testing.assert_array_equal(stacked[0], expected["a"]["query"]["kernel"])
    np.testing.assert_array_equal(stacked[1:], layers["query"]["kernel"][1:])


def test_a_list_of_numbers_is_an_array():
    """And not several calls, of which the largest counts."""
    params, _, site = multi_head()
    got = muonjax.apply_qk_clip({"a": params}, {"a": [400.0, 1.0, 1.0, 1.0]}, site, 100.0)
    expected = muonjax.apply_qk_clip({"a": params}, {"a": jnp.asarray([400.0, 1.0, 1.0, 1.0])}, site, 100.0)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    one_head = jax.tree.map(lambda p: p[..., :1, :], params)
    with pytest.raises(ValueError, match=r"shape \(4,\); the parameters say \(1,\)"):
        muonjax.apply_qk_clip({"a": one_head}, {"a": [400.0, 1.0, 1.0, 1.0]}, site, 100.0)


def test_statistics_of_lists_of_modules():
    params, _, site = multi_head()
    one_head = jax.tree.map(lambda p: p[..., :1, :], params)
    clipped = muonjax.apply_qk_clip(
        {"layers": [one_head, one_head]},
        {"layers": [{"max_logits": 400.0}, {"max_logits": 1.0}]},
        site,
        100.0,
    )
    np.testing.assert_array_equal(clipped["layers"][0]["key"]["bias"], 0.5 * one_head["key"]["bias"])
    np.testing.assert_array_equal(clipped["layers"][1]["key"]["bias"], one_head["key"]["bias"])


def test_statistics_under_another_path():
    params = {"attention": multi_head()[0]}
    with pytest.raises(
        ValueError,
        match=r"without statistics \['attention/max_logits'\], .* has 'model/attention/max_logits' \[4\]",
    ):
        muonjax.apply_qk_clip(
            params, {"model": {"attention": {"max_logits": jnp.ones(4)}}}, muonjax.mha_site()
        )
    with pytest.raises(ValueError, match=r"statistics without a site \['max_logits'\]"):
        muonjax.apply_qk_clip(params, {"max_logits": jnp.ones(4)}, muonjax.mha_site())


STATISTICS = [
    ({"other": jnp.ones(4)}, r"sites without statistics \['a/max_logits'\]"),
    ({"a": {"max_logit": jnp.ones(4)}}, "sites without statistics"),
    ({"a": jnp.ones(4), "b": {"max_logits": jnp.ones(4)}}, r"statistics without a site \['b/max_logits'\]"),
    ({"a": jnp.ones(3)}, r"shape \(3,\); the parameters say \(4,\)"),
    ({"a": jnp.ones((4, 2))}, r"shape \(4, 2\)"),
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


class Fused(nn.Module):
    """An attention whose projections are one kernel."""

    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.moveaxis(nn.DenseGeneral((3, 4, 3), name="qkv_proj")(x), -3, 0)
        return nn.DenseGeneral(12, axis=(-2, -1), name="out")(nn.dot_product_attention(q, k, v))


def test_the_program_s_statistic_of_a_fused_projection():
    """The program names the projection, a site its module: the statistic of the one fitted no site of the other."""
    x = normal(2, 5, 12)
    model = nn.Sequential([Fused(), Fused()])
    params = model.init(jax.random.key(0), x)["params"]
    loss = lambda params: (model.apply({"params": params}, x) ** 2).mean()  # noqa: E731
    (_, statistics), _ = jax.jit(muonjax.value_and_grad(loss))(params)
    assert list(statistics) == ["layers_0/qkv_proj", "layers_1/qkv_proj"]
    by_module = muonjax.fused_qkv_site(num_heads=4, head_dim=3, name="qkv_proj", layout="i 3 h d")
    by_names, by_program = (
        muonjax.apply_qk_clip(params, statistics, sites, 0.5 * statistics["layers_0/qkv_proj"].max())
        for sites in (by_module, muonjax.inspect(loss, params).sites)
    )
    jax.tree.map(np.testing.assert_array_equal, by_names, by_program)
    assert (by_names["layers_0"]["qkv_proj"]["kernel"] != params["layers_0"]["qkv_proj"]["kernel"]).any()


def test_the_program_s_statistic_of_an_ensemble():
    """Its heads are those of all members, of which names make layers."""
    params = {"a": {name: {"kernel": jnp.ones((3, 8, 4, 2))} for name in ("query", "key")}}
    with pytest.raises(ValueError, match=r"shape \(12,\).* fits the sites of muonjax.inspect"):
        muonjax.apply_qk_clip(params, {"a": jnp.ones(12)}, muonjax.mha_site(), 1.0)


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


def test_a_stack_of_one_layer():
    """A scan of length one is no loop for the program, whose statistic has no axis of layers then."""
    params = {"a": {name: {"kernel": jnp.ones((1, 8, 2, 4))} for name in ("query", "key")}}
    tx = muonjax.qk_clip(10.0, muonjax.mha_site())
    state = tx.init(params)
    assert state.factors["a"].shape == (1, 2)
    for statistic in (jnp.array([40.0, 5.0]), jnp.array([[40.0, 5.0]])):
        _, new = jax.jit(tx.update)(params, state, params, max_logits={"a": statistic})
        np.testing.assert_allclose(new.factors["a"], [[0.25, 1.0]])
    with pytest.raises(ValueError, match=r"have shape \(3,\); the parameters say \(1, 2\)"):
        tx.update(params, state, params, max_logits={"a": jnp.ones(3)})
