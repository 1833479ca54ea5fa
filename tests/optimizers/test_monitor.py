"""Statistics of a step against NumPy, in chains, jitted and in loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax
from tests.tools.oracles import SHORT, normal

pytestmark = pytest.mark.nan  # it marks what was not measured

PARAMS = {
    "layer": {
        "kernel": normal(8, 16),
        "bias": jnp.ones(16),
    },
    "head": {"kernel": jnp.full((16, 4), 2.0)},
}
GRADIENTS = jax.tree.map(lambda x: x + 1.0, PARAMS)


def one_step(tx, gradients=GRADIENTS):
    return jax.jit(tx.update)(gradients, tx.init(PARAMS), PARAMS)


def test_the_updates_are_those_of_the_inner_transformation():
    inner = muonjax.muon(1e-2, newton_schulz=SHORT)
    want, _ = one_step(inner)
    found, _ = one_step(muonjax.monitor(inner))
    jax.tree.map(np.testing.assert_array_equal, found, want)


def measured(tx, params, updates=None):
    """The statistics of one step."""
    updates = params if updates is None else updates
    _, state = jax.jit(tx.update)(updates, tx.init(params), params)
    return jax.tree.map(float, state.statistics)


def test_sizes_are_numpys():
    updates, state = one_step(
        muonjax.monitor(muonjax.muon(1e-2, decay=0.5, newton_schulz=SHORT))
    )
    statistics = jax.tree.map(float, state.statistics)
    # By names the head is AdamW's.
    for group, leaves in {"muon": ("kernel",), "adam": ("bias", "head")}.items():
        sizes = []
        for tree in (updates, PARAMS):
            flat = tree["layer"] | tree["head"] | {"head": tree["head"]["kernel"]}
            flat["kernel"] = tree["layer"]["kernel"]
            entries = [np.asarray(flat[name], np.float64).ravel() for name in leaves]
            sizes.append(np.sqrt(np.mean(np.concatenate(entries) ** 2)))
        found = [
            statistics[f"{group}/{name}"]
            for name in ("update_rms", "weight_rms", "update_to_weight")
        ]
        assert found == pytest.approx([*sizes, sizes[0] / sizes[1]], rel=1e-5)


def orthogonality(matrix):
    params = {"dense": {"kernel": jnp.asarray(matrix, jnp.float32)}}
    return measured(muonjax.monitor(optax.identity()), params)["muon/orthogonality"]


def test_orthogonality_is_the_least_distance_to_a_multiple_of_an_orthogonal_matrix():
    random = np.random.default_rng(1).standard_normal((8, 16))
    one_direction = np.eye(8)[:, :1] @ np.ones((1, 16))
    for u in (random, np.eye(8, 16), one_direction):
        gram = u @ u.T
        best = np.trace(gram) / np.sum(gram**2)
        want = np.linalg.norm(best * gram - np.eye(8)) / np.sqrt(8)
        for matrix in (u, u.T, 1e-12 * u):
            assert orthogonality(matrix) == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert orthogonality(np.zeros((4, 6))) == 0


@pytest.mark.parametrize("count", [3, 7, 49])
def test_the_share_of_leaves_that_are_not_finite(count):
    """Without one exactly zero: 1 - sum / count is not, where XLA multiplies by a rounded 1 / count."""
    tx = muonjax.monitor(optax.sgd(0.1))
    params = {str(i): jnp.ones(1) for i in range(count)}
    for bad, share in ((0, 0.0), (1, 1 / count), (count, 1.0)):
        gradients = {n: jnp.inf * x if int(n) < bad else x for n, x in params.items()}
        found = measured(tx, params, gradients)["adam/non_finite"]
        assert found == pytest.approx(share, abs=0.0, rel=1e-6)


HEADS = {"attention": {name: {"kernel": normal(8, 2, 4)} for name in "qk"}}
A_MATRIX_A_HEAD = muonjax.MuonDimensionNumbers(0, 2)
SETTINGS = muonjax.NewtonSchulz.accurate()
PLAIN_MUON = {"weight_decay": 0.0, "newton_schulz": SETTINGS}


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: tx,
        lambda tx: optax.chain(
            optax.clip_by_global_norm(1.0), optax.chain(tx, optax.scale(2.0))
        ),
        lambda tx: optax.MultiSteps(tx, 1),
        lambda tx: optax.masked(tx, {"attention": True}),
        lambda tx: optax.GradientTransformation(tx.init, jax.jit(tx.update)),
    ],
)
def test_matrices_are_those_of_the_program(around):
    """Per head, and a leaf that a rule gave to Adam under "adam"; another program than the optimizer's is refused."""
    numbers = {"attention": {"q": A_MATRIX_A_HEAD, "k": None}}
    inner = around(muonjax.muon(1e-2, numbers, **PLAIN_MUON))
    with pytest.raises(ValueError, match=r"monitor\(muon\(1e-3, program\), program\)"):
        muonjax.monitor(inner, muonjax.MuonDimensionNumbers(0, 2)).init(HEADS)
    tx = muonjax.monitor(inner, numbers)
    state = tx.init(HEADS)
    update = jax.jit(tx.update)
    for _ in range(2):
        _, state = update(HEADS, state, HEADS)
    assert float(state.statistics["muon/orthogonality"]) < 1e-3
    assert float(state.statistics["adam/weight_rms"]) > 0


def test_dimension_numbers_where_nothing_else_tells():
    params = {
        "block": {"mystery": jnp.ones((2, 3, 4, 5, 6))},
        "dense": {"kernel": jnp.eye(4)},
    }
    with pytest.warns(UserWarning, match="can't tell by names alone.*'block/mystery'"):
        muonjax.monitor(optax.sgd(0.1)).init(params)
    numbers = {"block": muonjax.MuonDimensionNumbers(-2, -1), "dense": None}
    found = measured(muonjax.monitor(optax.sgd(0.1), numbers), params)
    # Rank one of five.
    assert found["muon/orthogonality"] == pytest.approx(0.8**0.5, rel=1e-4)
    assert found["adam/weight_rms"] == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", np.float64])
def test_a_state_that_was_restored_in_another_dtype(dtype):
    tx = muonjax.monitor(optax.sgd(0.1), every_k=2)
    _, state = one_step(tx)
    restored = state._replace(
        statistics=jax.tree.map(lambda x: np.asarray(x, dtype), state.statistics)
    )
    _, after = jax.jit(tx.update)(GRADIENTS, restored, PARAMS)
    for name, value in after.statistics.items():
        assert value.dtype == jnp.float32
        assert float(value) == pytest.approx(float(state.statistics[name]), rel=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1e-35, 1e-25, 1e-20, 1e20, 1e37])
def test_sizes_of_any_weights_and_updates(size, dtype):
    tx = muonjax.monitor(optax.identity())
    rng = np.random.default_rng(2)
    params = {
        "dense": {"kernel": jnp.asarray(size * rng.standard_normal((4, 6)), dtype)}
    }
    updates = jax.tree.map(lambda x: x / 2, params)
    found = measured(tx, params, updates)
    want = np.sqrt(np.mean(np.asarray(params["dense"]["kernel"], np.float64) ** 2))
    assert found["muon/weight_rms"] == pytest.approx(want, rel=1e-6)
    assert found["muon/update_rms"] == pytest.approx(want / 2, rel=1e-6)
    assert found["muon/update_to_weight"] == pytest.approx(0.5, rel=1e-6)
    assert 0 < found["muon/orthogonality"] < 1


def test_nothing_over_nothing_is_nothing():
    tx = muonjax.monitor(optax.identity())
    for weight, update, ratio in ((0, 0, 0.0), (1, 0, 0.0), (0, 1, float("inf"))):
        params, updates = ({"bias": jnp.full(3, 1.0 * x)} for x in (weight, update))
        assert measured(tx, params, updates)["adam/update_to_weight"] == ratio


def test_what_is_infinite_is_shown():
    tx = muonjax.monitor(optax.identity())
    for value in (jnp.inf, jnp.nan):
        found = measured(tx, {"bias": jnp.array([1.0, value])})
        np.testing.assert_equal(found["adam/update_rms"], float(value))


def test_between_measurements_the_last_values_stay_also_in_a_scan():
    tx = muonjax.monitor(optax.sgd(1.0), every_k=3)

    def body(carry, scale):
        state = carry
        _, state = tx.update(
            jax.tree.map(lambda x: scale * jnp.ones_like(x), PARAMS), state, PARAMS
        )
        return state, state.statistics["adam/update_rms"]

    scales = jnp.arange(1.0, 8.0)
    _, rms = jax.jit(lambda: jax.lax.scan(body, tx.init(PARAMS), scales))()
    np.testing.assert_allclose(rms, [1, 1, 1, 4, 4, 4, 7], rtol=1e-6)
