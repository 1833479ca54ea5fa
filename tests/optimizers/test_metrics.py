"""What optimizer states keep for a log, as one flat dictionary, wherever it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.serialization import to_state_dict

import muonjax
from tests.tools.oracles import SHORT, queries_and_keys

PARAMS = {"attention": queries_and_keys(8, 2, 4)}
HOT = {"attention": jnp.array([400.0, 50.0])}
SITE = muonjax.mha_site()


def clipped(tx):
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS, max_logits=HOT)[1]


def schedule(count):
    return 100.0


@pytest.mark.parametrize("tx", [
    muonjax.qk_clip(100.0, SITE),
    muonjax.muonclip(1e-3, SITE, newton_schulz=SHORT),
    optax.chain(optax.clip(1.0), optax.chain(optax.sgd(0.1), muonjax.qk_clip(schedule, SITE))),
    optax.MultiSteps(muonjax.qk_clip(100.0, SITE), 1),
    optax.inject_hyperparams(muonjax.qk_clip, ("sites", "every_k", "axis_name"))(100.0, SITE),
])  # fmt: skip
def test_finds_the_clip(tx):
    assert muonjax.metrics(clipped(tx)) == {
        "count": 1.0,
        "qk_clip/largest": 400.0,
        "qk_clip/num_clipped": 1.0,
        "qk_clip/total_clipped": 1.0,
        "qk_clip/share_clipped": 0.5,
        "qk_clip/smallest_factor": 0.25,
        "qk_clip/largest/attention": 400.0,
    }


@pytest.mark.nan
def test_before_the_first_step():
    state = muonjax.muonclip(1e-3, SITE, newton_schulz=SHORT).init(PARAMS)
    for found in (muonjax.metrics(state), jax.jit(muonjax.metrics)(state)):
        assert np.isnan(found["qk_clip/largest"])
        assert np.isnan(found["qk_clip/largest/attention"])
        assert (found["count"], found["qk_clip/smallest_factor"]) == (0.0, 1.0)


@pytest.mark.parametrize("tx", [
    muonjax.muon(1e-3, newton_schulz=SHORT),
    muonjax.muonh(lambda count: 1e-3, adam=optax.sgd(0.1), newton_schulz=SHORT),
    optax.MultiSteps(optax.inject_hyperparams(muonjax.muon)(1e-3, newton_schulz=SHORT), 1),
])  # fmt: skip
def test_the_count_and_the_rate_of_any_optimizer(tx):
    params = PARAMS | {
        "count": jnp.ones(()),
        "learning_rate": jnp.ones(()),
    }  # parameters of these names
    state = tx.init(params)
    assert muonjax.metrics(state)["count"] == 0
    for _ in range(2):
        _, state = tx.update(params, state, params)
    found = muonjax.metrics(state)
    assert found.pop("learning_rate", 1e-3) == pytest.approx(1e-3)
    assert found == {"count": 2.0}


@pytest.mark.nan
@pytest.mark.parametrize(("guarded", "logged"), [
    (lambda tx: optax.apply_if_finite(tx, 5), {"num_not_finite": [0, 1, 1, 2]}),
    (lambda tx: optax.MultiSteps(tx, 1, should_skip_update_fn=optax.skip_not_finite), {"is_skipped": [0, 1, 0, 1]}),
])  # fmt: skip
def test_skipped_steps(guarded, logged):
    """Parameters may have these names too."""
    tx = guarded(muonjax.muon(1e-3, newton_schulz=SHORT))
    params = PARAMS | {
        name: jnp.ones(()) for name in ("total_notfinite", "should_skip")
    }
    state = tx.init(params)
    found = []
    for factor in (1.0, jnp.nan, 1.0, jnp.inf):
        grads = jax.tree.map(lambda x, factor=factor: factor * x, params)
        _, state = tx.update(grads, state, params)
        found.append(muonjax.metrics(state))
    (name,) = logged
    assert {name: [row[name] for row in found]} == logged
    assert {*found[-1]} == {"count", name}
    assert found[-1]["count"] == 2


@pytest.mark.nan
def test_several_clips_and_monitors():
    scale = muonjax.Scale(path="kernel", rank=2)
    output = muonjax.Site(path="out", scales=(scale,))
    tx = muonjax.monitor(
        optax.chain(
            muonjax.muonclip(1e-3, SITE, newton_schulz=SHORT),
            muonjax.signal_clip(3.0, output),
        )
    )
    params = PARAMS | {"out": {"kernel": jnp.ones((4, 2))}}
    signals = {"out": jnp.array([6.0, 1.0])}
    _, state = jax.jit(tx.update)(
        params, tx.init(params), params, max_logits=HOT, signals=signals
    )
    found = muonjax.metrics(state)
    assert found["qk_clip/largest"] == 400.0
    assert found["qk_clip_1/smallest_factor"] == 0.5
    assert found["monitor/muon/update_rms"] > 0
    assert all(type(value) is float for value in found.values())


@pytest.mark.nan
def test_inside_of_jit_they_are_arrays():
    tx = muonjax.monitor(muonjax.muonclip(1e-3, SITE, newton_schulz=SHORT))

    @jax.jit
    def step(state):
        _, state = tx.update(PARAMS, state, PARAMS, max_logits=HOT)
        return state, muonjax.metrics(state)

    state, inside = step(tx.init(PARAMS))
    outside = muonjax.metrics(state)
    assert {name: float(x) for name, x in inside.items()} == outside
    assert all(x.dtype == jnp.float32 and x.shape == () for x in inside.values())
    assert outside["qk_clip/largest"] == 400.0


@pytest.mark.nan
@pytest.mark.parametrize(
    "as_mappings", [nnx.state, lambda optimizer: to_state_dict(optimizer.opt_state)]
)
def test_a_state_whose_tuples_have_become_mappings(as_mappings):
    """`nnx.state` and `nnx.split` do so, and with them MaxText's train state; Flax's serialization too."""
    model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    tx = muonjax.monitor(muonjax.muonclip(1e-3, SITE, newton_schulz=SHORT), every_k=1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(
        model,
        nnx.state(model, nnx.Param),
        max_logits={"max_logits": jnp.array([400.0, 50.0])},
    )
    found = muonjax.metrics(optimizer.opt_state)
    assert found["qk_clip/num_clipped"] == 1.0
    assert muonjax.metrics(as_mappings(optimizer)) == found


def test_a_state_without_any():
    assert muonjax.metrics(optax.sgd(1e-3).init(PARAMS)) == muonjax.metrics(()) == {}
