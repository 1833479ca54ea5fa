"""Hyperball against NumPy in float64, written from the paper's equation; and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax
from muonjax import MuonDimensionNumbers
from tests.tools.oracles import trained
from tests.tools.tiers import quick
from tests.tools.views import MATRICES


def oracle(w: np.ndarray, updates: list[np.ndarray], eta: float) -> np.ndarray:
    """The weight [m, n] after all updates."""
    for o in updates:
        radius = np.linalg.norm(w)
        moved = w - eta * radius * o / np.linalg.norm(o)
        w = radius * moved / np.linalg.norm(moved)
    return w


def run(tx, w, updates):
    params, _ = trained(tx, {"w": jnp.asarray(w)}, [{"w": u} for u in updates])
    return np.asarray(params["w"], np.float64)


def draw(shape, steps=20):
    rng = np.random.default_rng(1)
    return [
        (rng.standard_normal(shape) * 10.0**s).astype(np.float32)
        for s in np.linspace(-3, 3, steps)
    ]


@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
@pytest.mark.parametrize("eta", [0.02, 1.5])
def test_twenty_steps_are_the_papers(shape, eta):
    w = draw(shape, 1)[0]
    updates = draw(shape)
    want = oracle(w.astype(np.float64), [u.astype(np.float64) for u in updates], eta)
    found = run(muonjax.hyperball(eta), w, updates)
    assert np.linalg.norm(found - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize(("shape", "numbers", "matrices"), MATRICES)
def test_each_matrix_and_each_part_has_its_own_sphere(shape, numbers, matrices):
    w = draw(shape, 1)[0]
    updates = draw(shape)
    for power, matrix in enumerate(matrices):
        w[matrix] *= 10.0**power
    found = run(muonjax.hyperball(0.1, dimension_numbers={"w": numbers}), w, updates)
    for matrix in matrices:
        want = oracle(np.float64(w[matrix]), [u[matrix] for u in updates], 0.1)
        assert np.linalg.norm(found[matrix] - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.nan
def test_a_zero_update_moves_nothing_and_nan_stays_in_its_matrix():
    tx = muonjax.hyperball(0.1)
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))}
    updates = {"a": jnp.zeros((2, 3)), "b": jnp.full((2, 3), jnp.nan)}
    found, _ = jax.jit(tx.update)(updates, tx.init(params), params)
    np.testing.assert_array_equal(found["a"], np.zeros((2, 3)))
    assert np.isnan(found["b"]).all()


DIRECTIONS = {
    "orthogonal": lambda key, bank: bank[jax.random.randint(key, (), 0, len(bank))],
    "random": lambda key, bank: jax.random.normal(key, bank.shape[1:], bank.dtype),
    "constant": lambda key, bank: jnp.ones_like(bank[0]),
}


@pytest.mark.rounding
@quick(
    "bfloat16-orthogonal", "bfloat16-constant", "float32-orthogonal", others="nightly"
)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_norm_holds_over_thousands_of_steps(dtype, direction):
    """Within one rounding of each entry, however many steps; without R in the state, bfloat16 loses up to 5 %."""
    rng = np.random.default_rng(0)
    orthogonal = np.linalg.qr(rng.standard_normal((32, 64, 64)))[0]
    bank = jnp.asarray(orthogonal, dtype)
    tx = muonjax.hyperball(0.02)
    weights = {"w": jnp.asarray(rng.standard_normal((64, 64)), dtype)}
    start = np.linalg.norm(np.asarray(weights["w"], np.float64))

    def step(carry, key):
        params, state = carry
        found, state = tx.update({"w": DIRECTIONS[direction](key, bank)}, state, params)
        # Rounded, and not kept in float32 until the sum.
        params = optax.apply_updates(params, jax.lax.optimization_barrier(found))
        return (params, state), jnp.linalg.norm(params["w"].astype(jnp.float32))

    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))
    _, norms = run(
        (weights, tx.init(weights)), jax.random.split(jax.random.key(0), 4000)
    )
    # Half a bit of the weight, and half a bit of a step of a fiftieth of it; the sums of squares are in float32.
    bound = 0.51 * float(jnp.finfo(dtype).eps) + 1e-6
    assert np.abs(np.asarray(norms) / start - 1).max() < bound


def test_what_changes_the_norm_from_outside_is_followed():
    """Float32 by more than rounding, bfloat16 by more than its last bit."""
    tx = muonjax.hyperball(0.02)
    w, (u,) = draw((6, 8), 1)[0], draw((6, 8), 1)
    for dtype, factor, follows in [
        ("float32", 0.999, True),
        ("bfloat16", 0.9, True),
        ("bfloat16", 0.996, False),
    ]:
        start = {"w": jnp.asarray(w, dtype)}
        state = tx.init(start)
        changed = jax.tree.map(
            lambda x, f=factor: (x.astype(jnp.float32) * f).astype(x.dtype), start
        )
        found, state = tx.update({"w": jnp.asarray(u, dtype)}, state, changed)
        norms = [
            np.linalg.norm(np.asarray(x["w"], np.float64))
            for x in (start, changed, optax.apply_updates(changed, found))
        ]
        assert norms[2] == pytest.approx(
            norms[int(follows)], rel=float(jnp.finfo(dtype).eps) + 1e-6
        )
        kept = float(state.rms["w"][0, 0]) * 48**0.5
        assert kept == pytest.approx(norms[int(follows)], rel=1e-6)


@pytest.mark.parametrize("of_weight", [1e-30, 1e-21, 1.0, 1e20, 1e36])
@pytest.mark.parametrize("of_update", [1e-30, 1e-20, 1e20, 1e36])
def test_sizes_from_1e_minus_30_to_1e36(of_weight, of_update):
    w, (u,) = draw((5, 7), 1)[0] / 1e-3, draw((5, 7), 1)
    u = u / np.abs(u).max()
    expected = oracle(w.astype(np.float64) * of_weight, [u.astype(np.float64)], 0.02)
    tx = muonjax.hyperball(0.02)
    params = {"w": jnp.asarray(w * np.float32(of_weight))}
    updates, _ = jax.jit(tx.update)(
        {"w": jnp.asarray(u * np.float32(of_update))}, tx.init(params), params
    )
    found = np.asarray(optax.apply_updates(params, updates)["w"], np.float64)
    assert np.linalg.norm(found - expected) < 2e-6 * np.linalg.norm(expected)


def test_a_state_that_was_restored_in_bfloat16():
    w, (u,) = draw((6, 8), 1)[0], draw((6, 8), 1)
    tx = muonjax.hyperball(0.02)
    restored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tx.init({"w": w}))
    found, state = jax.jit(tx.update)({"w": u}, restored, {"w": w})
    assert state.rms["w"].dtype == jnp.float32
    assert np.linalg.norm(w + found["w"]) == pytest.approx(np.linalg.norm(w), rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_step_to_the_middle_of_the_ball_moves_nothing(scale):
    w = draw((5, 7), 1)[0]
    np.testing.assert_array_equal(run(muonjax.hyperball(1.0), w, [scale * w]), w)


def test_a_state_of_other_parameters_is_refused():
    tx = muonjax.hyperball(0.1)
    numbers = {"w": MuonDimensionNumbers(1, 2)}
    with pytest.raises(
        ValueError, match=r"hyperball: the state has shapes \[\(1, 1\)\].*\(2, 1, 1\)"
    ):
        muonjax.hyperball(0.1, dimension_numbers=numbers).update(
            {"w": jnp.ones((2, 3, 4))},
            tx.init({"w": jnp.ones((3, 4))}),
            {"w": jnp.ones((2, 3, 4))},
        )


def test_a_schedule_and_a_leaf_that_is_no_matrix():
    tx = muonjax.hyperball(
        optax.linear_schedule(1.0, 0.0, 2), dimension_numbers={"b": None}
    )
    params = {"b": jnp.ones(3)}
    state = tx.init({"b": jnp.ones(3)})
    steps = []
    for _ in range(3):
        found, state = tx.update({"b": jnp.ones(3)}, state, params)
        steps.append(float(found["b"][0]))
    assert steps == [-1.0, -0.5, 0.0]


def test_bad_input_is_refused():
    tx = muonjax.hyperball(0.1)
    with pytest.raises(ValueError, match=r"hyperball: \['w'\] has a matrix of zeros"):
        tx.init({"w": jnp.zeros((2, 2))})
