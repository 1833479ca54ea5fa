"""QK-Clip: exact for every attention, no change to heads below the threshold, and none of the bugs of others."""

import contextlib
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from muonjax._clip.clip_by_statistic import clip_factor
from tests.clip.attentions import (
    ATTENTIONS,
    EXACT,
    X,
    latent,
    loss_fn,
    multi_head,
    projected,
    zero_update,
)
from tests.tools.oracles import SHORT, gradients, queries_and_keys
from tests.tools.tiers import quick, thorough

PARAMS, MAXIMA, SITE = multi_head()


def clips_of(state):
    """Heads that the last clip scaled, and the sum over all clips."""
    found = muonjax.metrics(state)
    return found["qk_clip/num_clipped"], found["qk_clip/total_clipped"]


# At learning rate zero.


@pytest.mark.rounding
@quick("multi-head with biases", "multi-query with RoPE", "fused, heads first")
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_one_clip_is_exact(kind):
    params, maxima, site = ATTENTIONS[kind]()
    before = np.asarray(maxima(params))
    threshold = float(np.median(before))
    tx = muonjax.qk_clip(threshold, site)
    clipped, state = zero_update(tx, params, {"max_logits": before})
    after = np.asarray(maxima(clipped))
    hot = before > threshold
    assert 0 < hot.sum() < hot.size or hot.size == 1
    assert (after <= threshold * EXACT).all()
    assert_allclose(after, np.minimum(before, threshold), rtol=3e-6)
    assert muonjax.metrics(state)["qk_clip/num_clipped"] == hot.sum()
    assert_allclose(
        state.factors["max_logits"], np.where(hot, threshold / before, 1), rtol=1e-6
    )
    apply = functools.partial(muonjax.apply_qk_clip, sites=site, threshold=threshold)
    direct = jax.jit(apply)(params, {"max_logits": before})
    chex.assert_trees_all_close(direct, clipped, rtol=1e-6, atol=1e-7)


def test_calm_heads_that_share_a_key_with_a_hot_one_stay():
    params, maxima, site = multi_head(4, 2)
    clipped = muonjax.apply_qk_clip(
        params, {"max_logits": jnp.asarray([400.0, 1.0, 1.0, 1.0])}, site, 100.0
    )
    before = maxima(params)
    after = maxima(clipped)
    assert_allclose(after / before, [0.25, 1, 1, 1], rtol=1e-5)
    same = [
        (clipped[n]["kernel"] == params[n]["kernel"]).all((0, 2)).tolist()
        for n in ("query", "key")
    ]
    assert same == [[False, True, True, True], [True, True]]


def test_heads_below_the_threshold_are_bit_identical_to_muon_alone():
    grads = gradients(5, PARAMS)
    before = MAXIMA(PARAMS)
    threshold = float(np.median(before))
    calm = np.asarray(before) <= threshold

    def same(got, expected):
        for name in ("query", "key"):
            for leaf in ("kernel", "bias"):
                assert_array_equal(
                    got[name][leaf][..., calm, :], expected[name][leaf][..., calm, :]
                )
                assert (
                    got[name][leaf][..., ~calm, :]
                    != expected[name][leaf][..., ~calm, :]
                ).any()
        assert_array_equal(got["value"]["kernel"], expected["value"]["kernel"])

    muon = muonjax.muon(0.01, newton_schulz=SHORT)
    alone, _ = jax.jit(muon.update)(grads, muon.init(PARAMS), PARAMS)
    # One program for both, which XLA may round otherwise than Muon's: with and without a hot head.
    both = muonjax.muonclip(0.01, [SITE], threshold=threshold, newton_schulz=SHORT)
    update = jax.jit(both.update)
    cold, _ = update(
        grads, both.init(PARAMS), PARAMS, max_logits={"max_logits": jnp.zeros(4)}
    )
    same(
        update(grads, both.init(PARAMS), PARAMS, max_logits={"max_logits": before})[0],
        cold,
    )
    chex.assert_trees_all_close(cold, alone, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_clipped_parameters_keep_their_dtype(dtype):
    params = queries_and_keys(3, 2, 2, dtype=dtype)
    clipped = muonjax.apply_qk_clip(
        params, {"max_logits": jnp.array([400.0, 50.0])}, muonjax.mha_site()
    )
    for leaf in jax.tree.leaves(clipped):
        assert leaf.dtype == dtype
        assert_array_equal(leaf[:, 0], 0.5)
        assert_array_equal(leaf[:, 1], 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_updates_of_calm_heads_pass_bit_by_bit(dtype):
    """−0 passes too, which f·u + (f − 1)·p would turn into 0, and updates of infinite weights, which would be NaN."""
    params = {
        n: {"kernel": jnp.full((3, 2, 2), jnp.inf, dtype)} for n in ("query", "key")
    }
    u = jnp.asarray([-0.0, 1e-7, -3.0], dtype)[:, None, None] * jnp.ones(
        (3, 2, 2), dtype
    )
    tx = muonjax.qk_clip(100.0, muonjax.mha_site())
    low = (
        pytest.warns(
            UserWarning, match=r"a factor near 1 rounds away.*float32 master weights"
        )
        if dtype != jnp.float32
        else contextlib.nullcontext()
    )
    with low:
        state = tx.init(params)
    updates = {n: {"kernel": u} for n in params}
    got, _ = jax.jit(tx.update)(
        updates, state, params, max_logits={"max_logits": jnp.asarray([1.0, 100.0])}
    )
    for name in params:
        assert got[name]["kernel"].dtype == dtype
        assert np.asarray(got[name]["kernel"]).tobytes() == np.asarray(u).tobytes()


def test_half_precision_updates_of_float32_weights_keep_the_bound():
    before = MAXIMA(PARAMS)
    tx = muonjax.qk_clip(5.0, SITE)
    updates = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.bfloat16), PARAMS)
    updates, _ = tx.update(
        updates, tx.init(PARAMS), PARAMS, max_logits={"max_logits": before}
    )
    assert_allclose(MAXIMA(optax.apply_updates(PARAMS, updates)), 5.0, rtol=3e-6)


def test_far_above_the_threshold_the_old_weights_round_and_the_next_step_mends_it():
    """An update is added: p + (f − 1)·p is off by the rounding of p, large compared with a tiny f·p."""
    params, maxima, site = latent(True, "i h d")
    before = maxima(params)
    threshold = float(before.min()) / 1000
    tx = muonjax.qk_clip(threshold, site)
    once, _ = zero_update(tx, params, {"max_logits": before})
    assert maxima(once).max() <= threshold * (1 + 1e-3)
    twice, _ = zero_update(tx, once, {"max_logits": maxima(once)})
    assert maxima(twice).max() <= threshold * EXACT
    direct = muonjax.apply_qk_clip(
        params, {"max_logits": before}, site, threshold
    )  # multiplies
    assert_allclose(maxima(direct), threshold, rtol=3e-6)


def test_a_factor_that_underflows_is_not_zero():
    """γ = 1e-50 is no float32, and from weights of zero a head could not recover."""
    clipped = muonjax.apply_qk_clip(
        PARAMS, {"max_logits": jnp.full_like(MAXIMA(PARAMS), 1e30)}, SITE, 1e-20
    )
    assert all((x != 0).any() for x in jax.tree.leaves(clipped))


# The bugs of others, one test each.


@pytest.mark.nan
@pytest.mark.parametrize("bad", [-5.0, 0.0, -np.inf, np.inf, np.nan])
def test_a_negative_maximum_gives_no_nan(bad):
    """√(τ/S) of a negative maximum made NaN weights. γ is exactly 1 wherever S says nothing."""
    assert_array_equal(
        clip_factor(jnp.asarray([bad, 200.0, 100.0]), 100.0), [1.0, 0.5, 1.0]
    )
    clipped, state = zero_update(
        muonjax.qk_clip(100.0, SITE), PARAMS, {"max_logits": jnp.full(4, bad)}
    )
    jax.tree.map(assert_array_equal, clipped, PARAMS)
    assert muonjax.metrics(state)["qk_clip/num_clipped"] == 0


def test_accumulation_takes_the_maximum_of_maxima_not_their_sum():
    tx = muonjax.qk_clip(100.0, SITE, every_k=3)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for i, hot in enumerate((60.0, 200.0, 50.0)):
        maxima = jnp.asarray([hot, 60.0, 60.0, 60.0])
        updates, state = update(
            jax.tree.map(jnp.ones_like, PARAMS),
            state,
            PARAMS,
            max_logits={"max_logits": maxima},
        )
        moved = np.asarray(updates["query"]["kernel"] != 1)
        assert moved[:, 0].any() == (i == 2)
        assert not moved[:, 1:].any()
        assert muonjax.metrics(state)["qk_clip/num_clipped"] == (i == 2)
    assert_array_equal(state.running_max["max_logits"], -np.inf)
    _, state = update(
        PARAMS, state, PARAMS, max_logits={"max_logits": jnp.full(4, 300.0)}
    )
    # Between two clips the state shows the last one.
    assert_array_equal(state.maxima["max_logits"], [200.0, 60.0, 60.0, 60.0])
    assert_array_equal(state.factors["max_logits"], [0.5, 1.0, 1.0, 1.0])
    assert_array_equal(state.running_max["max_logits"], 300.0)
    assert clips_of(state) == (1, 1)
    assert int(state.count) == 4


def test_every_head_has_a_count_of_its_own():
    tx = muonjax.qk_clip(100.0, SITE)
    state = tx.init(PARAMS)
    for hot in (
        [400.0, 1.0, 1.0, 1.0],
        [400.0, 200.0, 1.0, 100.0],
        [1.0, 1.0, 1.0, 1.0],
    ):
        _, state = tx.update(
            PARAMS, state, PARAMS, max_logits={"max_logits": jnp.asarray(hot)}
        )
    assert_array_equal(state.clips["max_logits"], [2, 1, 0, 0])
    assert clips_of(state) == (0, 3)


# With other transformations.


def test_multisteps_keeps_the_bound():
    """The clip is outside of `MultiSteps`, which would drop the statistics of all micro-batches but the last."""
    batches = [scale * X for scale in (3.0, 0.5, 0.5, 0.5)]

    @jax.jit
    def maxima(p, x):
        return muonjax.max_logits(projected(p, "query", x), projected(p, "key", x))

    def run(tx):
        p = PARAMS
        state = tx.init(PARAMS)
        for x in batches:
            zeros = jax.tree.map(jnp.zeros_like, p)
            updates, state = tx.update(
                zeros, state, p, max_logits={"max_logits": maxima(p, x)}
            )
            p = optax.apply_updates(p, updates)
        return max(float(maxima(p, x).max()) for x in batches)

    inner = optax.MultiSteps(optax.sgd(0.0), 4).gradient_transformation()
    assert run(optax.chain(inner, muonjax.qk_clip(5.0, SITE, every_k=4))) <= 5 * EXACT


def test_a_threshold_schedule_counts_clips():
    tx = muonjax.qk_clip(
        lambda count: jnp.where(count < 2, 1000.0, 100.0), SITE, every_k=2
    )
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    seen = []
    for _ in range(6):
        _, state = update(
            PARAMS,
            state,
            PARAMS,
            max_logits={"max_logits": jnp.asarray([400.0, 1.0, 1.0, 1.0])},
        )
        seen.append(muonjax.metrics(state)["qk_clip/num_clipped"])
    assert seen == [0, 0, 0, 0, 0, 1]
    assert update._cache_size() == 1


def test_optax_can_map_over_the_state():
    tx = muonjax.qk_clip(5.0, SITE)
    state = optax.tree.map_params(tx, lambda x: x, tx.init(PARAMS))
    assert isinstance(state, type(tx.init(PARAMS)))


# Against an optimizer that pushes one head up, for thousands of steps.


@pytest.mark.rounding
@pytest.mark.parametrize(
    "kind",
    [
        "latent, low-rank query",
        *map(
            thorough, ["multi-head with biases", "grouped 8:2 with RoPE", "fused, flat"]
        ),
    ],
)
def test_tug_of_war(kind):
    """Every factor of one head's logit is pushed up, together by 1 % per step, for 3,000 steps."""
    params, maxima, site = ATTENTIONS[kind]()
    before = maxima(params)
    start = muonjax.apply_qk_clip(params, {"max_logits": before}, site, 4.0)
    tx = muonjax.qk_clip(5.0, site)
    hot = jnp.where(jnp.arange(before.size) == 0, 5.0 * 1.01, 0.0)
    # What the clip would scale down, and by how much, is what is pushed up.
    ones = jax.tree.map(jnp.ones_like, params)
    push = jax.tree.map(
        lambda f: 1 / f - 1, muonjax.apply_qk_clip(ones, {"max_logits": hot}, site, 5.0)
    )

    def step(carry, _):
        params, state = carry
        largest = maxima(params)
        updates, state = tx.update(
            jax.tree.map(jnp.multiply, push, params),
            state,
            params,
            max_logits={"max_logits": largest},
        )
        return (optax.apply_updates(params, updates), state), largest

    (end, state), history = jax.jit(
        lambda carry: jax.lax.scan(step, carry, None, length=3000)
    )((start, tx.init(start)))
    assert (
        5.0 * 0.9999 <= history[100:, 0].min() <= history[100:, 0].max() <= 5.0 * 1.0102
    )
    assert_array_equal(
        history[:, 1:], np.broadcast_to(history[0, 1:], history[:, 1:].shape)
    )
    assert_array_equal(state.clips["max_logits"] > 2900, jnp.arange(before.size) == 0)
    for old, new, pushed in zip(*map(jax.tree.leaves, (start, end, push)), strict=True):
        assert_array_equal(np.where(pushed > 0, 0, new), np.where(pushed > 0, 0, old))
        ratio = np.asarray(new / old)[np.asarray(pushed) > 0]
        assert (
            (ratio > 1) & (ratio < 5.1 / 4)
        ).all()  # from 4 to 5.05, between the factors


# Refusals.


OPTIMIZERS = [muonjax.qk_clip, muonjax.muonclip, muonjax.adamclip]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"threshold": 0.0},
            ValueError,
            r"\(threshold=0.0\) must be positive and finite",
        ),
        ({"threshold": np.bool_(True)}, TypeError, "must be a number or a schedule"),
        ({"every_k": 0}, ValueError, r"\(every_k=0\)"),
        ({"axis_name": ""}, TypeError, r"\(axis_name=''\)"),
        ({"axis_name": ("a", 1.5)}, TypeError, r"\(axis_name=\('a', 1.5\)\)"),
    ],
)
def test_bad_settings(make, arguments, error, message):
    rate = {} if make is muonjax.qk_clip else {"learning_rate": 1e-3}
    with pytest.raises(error, match=rf"^{make.__name__}.*{message}"):
        make(**{"threshold": 100.0} | rate | arguments, **{NAMES[make]: SITE})


NAMES = {make: list(inspect.signature(make).parameters)[1] for make in OPTIMIZERS}


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_without_a_program(make):
    """The two lines that are shown make the optimizer."""
    with pytest.raises(
        ValueError, match=rf"^{make.__name__} needs to know where attention is: "
    ) as error:
        make(1e-3)
    first, second = str(error.value).splitlines()
    first = first.partition(": ")[2].removesuffix(", then")
    names = {"muonjax": muonjax, "loss_fn": loss_fn, "params": PARAMS, "batch": X}
    exec(f"{first}\n{second}", names)
    assert jax.tree.leaves(names["tx"].init(PARAMS))


def test_a_site_for_another_signal_is_no_site_of_qk_clip():
    site = muonjax.Site(path="out", scales=(muonjax.Scale(path="kernel", rank=2),))
    with pytest.raises(ValueError, match="a factor 'output', not query, key or whole"):
        muonjax.qk_clip(1.0, site).init({"out": {"kernel": jnp.ones((4, 2))}})
