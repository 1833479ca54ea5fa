"""Statistics of a step against NumPy, in chains, jitted and in loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax

pytestmark = pytest.mark.nan  # it marks what was not measured

PARAMS = {
    "layer": {
        "kernel": jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)), jnp.float32),
        "bias": jnp.ones(16),
    },
    "head": {"kernel": jnp.full((16, 4), 2.0)},
}
GRADIENTS = jax.tree.map(lambda x: x + 1.0, PARAMS)


def one_step(tx, gradients=GRADIENTS):
    return tx.update(gradients, tx.init(PARAMS), PARAMS)


def test_the_updates_are_those_of_the_inner_transformation():
    inner = muonjax.muon(1e-2)
    want, _ = one_step(inner)
    found, _ = one_step(muonjax.monitor(inner))
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_sizes_are_numpys():
    tx = muonjax.monitor(muonjax.muon(1e-2, decay=0.5), groups=lambda path: path.split("/")[0])
    updates, state = one_step(tx)
    kernel, bias = (np.asarray(updates["layer"][name], np.float64).ravel() for name in ("kernel", "bias"))
    both = np.concatenate([kernel, bias])
    weights = np.concatenate([np.ravel(x) for x in PARAMS["layer"].values()])
    statistics = state.statistics["layer"]
    assert float(statistics["update_rms"]) == pytest.approx(np.sqrt(np.mean(both**2)), rel=1e-5)
    assert float(statistics["weight_rms"]) == pytest.approx(np.sqrt(np.mean(weights**2)), rel=1e-5)
    ratio = np.sqrt(np.mean(both**2)) / np.sqrt(np.mean(weights**2))
    assert float(statistics["update_to_weight"]) == pytest.approx(ratio, rel=1e-5)
    # Muon's momentum is the gradient at first; Adam's first moment a tenth of it.
    momentum = np.sqrt(
        np.sum(GRADIENTS["layer"]["kernel"] ** 2) + np.sum((0.1 * GRADIENTS["layer"]["bias"]) ** 2)
    )
    assert float(statistics["momentum_norm"]) == pytest.approx(momentum, rel=1e-5)
    assert set(state.statistics) == {"layer", "head"}


def test_orthogonality_is_the_least_distance_to_a_multiple_of_an_orthogonal_matrix():
    tx = muonjax.monitor(optax.identity())
    u = np.random.default_rng(1).standard_normal((8, 16))
    for matrix in (u, u.T, 1e-12 * u):
        params = {"dense": {"kernel": jnp.asarray(matrix, jnp.float32)}}
        _, state = tx.update(params, tx.init(params), params)
        gram = u @ u.T
        best = np.trace(gram) / np.sum(gram**2)
        want = np.linalg.norm(best * gram - np.eye(8)) / np.sqrt(8)
        assert float(state.statistics["muon"]["orthogonality"]) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("matrix", "want"),
    [(np.eye(4, 6), 0.0), (np.zeros((4, 6)), 0.0), (np.eye(4, 6)[:, :1] @ np.ones((1, 6)), 0.75**0.5)],
)
def test_orthogonality_at_its_ends(matrix, want):
    tx = muonjax.monitor(optax.identity())
    params = {"dense": {"kernel": jnp.asarray(matrix, jnp.float32)}}
    _, state = tx.update(params, tx.init(params), params)
    assert float(state.statistics["muon"]["orthogonality"]) == pytest.approx(want, abs=1e-3)


def test_non_finite_gradients_are_counted():
    bad = {
        "layer": {"kernel": GRADIENTS["layer"]["kernel"].at[0, 0].set(jnp.nan), "bias": jnp.ones(16)},
        "head": GRADIENTS["head"],
    }
    _, state = one_step(muonjax.monitor(optax.sgd(0.1), groups=lambda path: "all"), bad)
    assert float(state.statistics["all"]["non_finite"]) == pytest.approx(1 / 3)


def test_between_measurements_the_last_values_stay_also_in_a_scan():
    tx = muonjax.monitor(optax.sgd(1.0), groups=lambda path: "all", every_k=3)

    def body(carry, scale):
        state = carry
        _, state = tx.update(jax.tree.map(lambda x: scale * jnp.ones_like(x), PARAMS), state, PARAMS)
        return state, state.statistics["all"]["update_rms"]

    scales = jnp.arange(1.0, 8.0)
    _, rms = jax.jit(lambda: jax.lax.scan(body, tx.init(PARAMS), scales))()
    np.testing.assert_allclose(rms, [1, 1, 1, 4, 4, 4, 7], rtol=1e-6)


def test_a_group_can_be_left_out_and_a_clip_gets_its_statistics():
    params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
    tx = muonjax.monitor(
        muonjax.muonclip(1e-3, muonjax.mha_site()), groups=lambda p: "q" if "query" in p else None
    )
    _, state = tx.update(params, tx.init(params), params, max_logits={"attention": jnp.array([400.0, 50.0])})
    assert set(state.statistics) == {"q"}


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"monitor\(every_k=0\)"):
        muonjax.monitor(optax.sgd(0.1), every_k=0)
    tx = muonjax.monitor(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs params"):
        tx.update(GRADIENTS, tx.init(PARAMS))
