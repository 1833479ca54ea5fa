"""Statistics have one form, {module path: [*layers, heads]}; all others and those that fit no site raise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from tests.clip.attentions import X, loss_fn, multi_head, zero_update
from tests.tools.oracles import SHORT, normal, queries_and_keys

PARAMS, _, SITE = multi_head()
HOT = jnp.asarray([400.0, 1.0, 1.0, 1.0])


def same(got, expected):
    jax.tree.map(assert_array_equal, got, expected)


def test_axes_of_a_batch_are_refused():
    """The first of two axes may be micro-batches as well as layers, so that the caller takes the maximum."""
    params = {"a": queries_and_keys(4, 8, 2, 4)}
    by_layer = jnp.ones((4, 2)).at[0].set(400.0)
    stacked = jnp.stack([by_layer, by_layer])
    with pytest.raises(
        ValueError, match=r"'a' has shape \(2, 4, 2\).*take the maximum over all other"
    ):
        muonjax.apply_qk_clip(params, {"a": stacked}, muonjax.mha_site(), 100.0)
    clipped = muonjax.apply_qk_clip(
        params, {"a": stacked.max(0)}, muonjax.mha_site(), 100.0
    )
    assert_array_equal(clipped["a"]["key"]["kernel"][:, 0, 0, 0], [0.5, 1, 1, 1])


def test_a_stack_of_one_layer():
    """A scan of length one is no loop for the program, whose statistic has no axis of layers then."""
    params = {"a": queries_and_keys(1, 8, 2, 4)}
    tx = muonjax.qk_clip(10.0, muonjax.mha_site())
    state = tx.init(params)
    assert state.factors["a"].shape == (1, 2)
    hot = jnp.array([40.0, 5.0])
    for statistic in (hot, hot[None], np.asarray(hot), hot.astype(int)):
        _, new = jax.jit(tx.update)(params, state, params, max_logits={"a": statistic})
        assert_allclose(new.factors["a"], [[0.25, 1.0]])
    with pytest.raises(
        ValueError, match=r"has shape \(3,\); the parameters say \(1, 2\)"
    ):
        tx.update(params, state, params, max_logits={"a": jnp.ones(3)})


MISMATCHES = [
    (
        {"other": HOT},
        r"sites without statistics \[a\], statistics without a site \[other\]",
    ),
    ({}, r"sites without statistics \[a\], statistics without a site \[\]"),
    (
        {"a": HOT, "b": HOT},
        r"statistics without a site \[b\].*such as muonjax.value_and_grad",
    ),
    (
        {"intermediates": {"a": {"max_logits": (HOT,)}}},
        r"statistics without a site \[intermediates\]",
    ),
    ({"a": jnp.ones(3)}, r"'a' has shape \(3,\); the parameters say \(4,\)"),
    (
        {"a": jnp.ones(12)},
        r"shape \(12,\).* fits the sites of muonjax.inspect",
    ),  # of an ensemble, by its program
    ({"a": jnp.ones((4, 2))}, r"shape \(4, 2\)"),
    ({"a": 400.0}, r"shape \(\)"),
    ({"a": jnp.ones((0, 4))}, r"shape \(0, 4\)"),
    ({"a": (HOT,)}, "give an array of real numbers"),
    ({"a": HOT + 0j}, "give an array of real numbers"),
    ({"a": {"max_logits": HOT}}, "'a' is {.*; give an array of real numbers"),
    ({"a": None}, "'a' is None; give"),
    ({"a": jnp.ones(4, bool)}, "'a' is .*; give"),
    (
        5.0,
        r"max_logits=float: max_logits is a dict \{module path: array \[\*layers, heads\]\}",
    ),
]


@pytest.mark.parametrize(("statistics", "message"), MISMATCHES)
def test_statistics_that_do_not_fit(statistics, message):
    params = {"a": PARAMS}
    with pytest.raises((ValueError, TypeError), match=rf"^apply_qk_clip: .*{message}"):
        muonjax.apply_qk_clip(params, statistics, muonjax.mha_site(), 1.0)
    tx = muonjax.muonclip(1.0, muonjax.mha_site())
    with pytest.raises((ValueError, TypeError), match=rf"^muonclip: .*{message}"):
        tx.update(params, tx.init(params), params, max_logits=statistics)


def test_stacked_statistics_in_another_order():
    params = {"a": queries_and_keys(3, 12, 2, 4)}
    with pytest.raises(
        ValueError,
        match=r"shape \(2, 3\); the parameters say \(3, 2\), layers before heads",
    ):
        muonjax.apply_qk_clip(params, {"a": jnp.ones((2, 3))}, muonjax.mha_site(), 1.0)


def test_missing_arguments():
    """The two lines that are shown run."""
    program = muonjax.inspect(loss_fn, PARAMS, X)
    tx = muonjax.muonclip(1e-3, program, newton_schulz=SHORT)
    state = tx.init(PARAMS)
    with pytest.raises(
        ValueError, match=r"(?s)muonclip: update needs max_logits .*TrainState"
    ) as error:
        tx.update(PARAMS, state, PARAMS)
    first, second = str(error.value).splitlines()
    assert len(str(error.value)) < 300
    names = {
        "muonjax": muonjax,
        "loss_fn": loss_fn,
        "params": PARAMS,
        "batch": X,
        "tx": tx,
        "state": state,
    }
    exec(first.partition("on): ")[2].removesuffix(", then"), names)
    exec(f"updates, state = {second.removesuffix('.')}", names)
    assert int(names["state"][-1].count) == 1
    tx = muonjax.qk_clip(100.0, muonjax.mha_site())
    with pytest.raises(ValueError, match="qk_clip needs params"):
        tx.update(PARAMS, tx.init(PARAMS), max_logits={"max_logits": jnp.ones(4)})


def test_modules_of_lists_and_integers():
    one_head = jax.tree.map(lambda p: p[..., :1, :], PARAMS)
    clipped = muonjax.apply_qk_clip(
        {"layers": [one_head, one_head]},
        {"layers/0": np.array([400.0]), "layers/1": 1.0},
        SITE,
        100.0,
    )
    same(clipped["layers"][0]["key"]["bias"], 0.5 * one_head["key"]["bias"])
    same(clipped["layers"][1]["key"]["bias"], one_head["key"]["bias"])
    clipped = muonjax.apply_qk_clip(
        {0: PARAMS, 1: PARAMS}, {0: jnp.full(4, 400.0), 1: jnp.ones(4)}, SITE, 100.0
    )
    same(clipped[0]["key"]["kernel"], 0.5 * PARAMS["key"]["kernel"])
    same(clipped[1], PARAMS)


class Fused(nn.Module):
    """An attention whose projections are one kernel."""

    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.moveaxis(nn.DenseGeneral((3, 4, 3), name="qkv_proj")(x), -3, 0)
        return nn.DenseGeneral(12, axis=(-2, -1), name="out")(
            nn.dot_product_attention(q, k, v)
        )


def test_the_program_s_statistic_of_a_fused_projection():
    """The smallest module of the parameters is the projection itself."""
    x = normal(2, 5, 12)
    model = nn.Sequential([Fused(), Fused()])
    params = model.init(jax.random.key(0), x)["params"]
    loss = lambda params: (model.apply({"params": params}, x) ** 2).mean()  # noqa: E731
    (_, statistics), _ = jax.jit(muonjax.value_and_grad(loss))(params)
    assert list(statistics) == ["layers_0/qkv_proj", "layers_1/qkv_proj"]
    threshold = 0.5 * statistics["layers_0/qkv_proj"].max()
    by_program = muonjax.apply_qk_clip(
        params, statistics, muonjax.inspect(loss, params), threshold
    )
    site = muonjax.fused_qkv_site(
        num_heads=4, head_dim=3, name="qkv_proj", layout="i 3 h d"
    )
    statistics = {path.removesuffix("/qkv_proj"): x for path, x in statistics.items()}
    same(muonjax.apply_qk_clip(params, statistics, site, threshold), by_program)
    assert (
        by_program["layers_0"]["qkv_proj"]["kernel"]
        != params["layers_0"]["qkv_proj"]["kernel"]
    ).any()


def test_two_attentions_in_one_module_have_a_statistic_each():
    params, _, _ = multi_head()
    params = {
        f"{which}_{name}": params[name]
        for which in ("self", "cross")
        for name in ("query", "key")
    }
    sites = [
        dataclasses.replace(
            muonjax.mha_site("a", query=f"{which}_query", key=f"{which}_key"),
            signal=f"{which}_logits",
        )
        for which in ("self", "cross")
    ]
    cold = jnp.ones(4)
    hot = jnp.full(4, 400.0)
    statistics = {"a/self_logits": hot, "a/cross_logits": cold}
    clipped, state = zero_update(
        muonjax.qk_clip(100.0, sites), {"a": params}, statistics
    )
    assert_allclose(
        clipped["a"]["self_query"]["kernel"],
        0.5 * params["self_query"]["kernel"],
        rtol=1e-6,
    )
    same(clipped["a"]["cross_key"], params["cross_key"])
    assert set(state.factors) == set(statistics)
    shared = [
        dataclasses.replace(
            muonjax.mha_site("a", query=f"{which}_query", key="self_key"), signal=which
        )
        for which in ("self", "cross")
    ]
    with pytest.raises(
        ValueError,
        match=r"scale 'a/self_key/(kernel|bias)', which would be clipped twice",
    ):
        muonjax.qk_clip(100.0, shared).init({"a": params})


def test_scales_of_one_site_overlap():
    scales = (*SITE.scales, SITE.scales[0])
    with pytest.raises(ValueError, match=r"two scales of one, scale 'query/kernel'"):
        muonjax.qk_clip(1.0, muonjax.Site(path="", scales=scales)).init(PARAMS)
