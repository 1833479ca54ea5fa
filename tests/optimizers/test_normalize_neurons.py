"""NorMuon's normalization against NumPy in float64, written from algorithm 1 of the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import muonjax
from tests.tools.views import MATRICES


def oracle(
    updates: list[np.ndarray], decay: float = 0.95, eps: float = 1e-8
) -> tuple[list[np.ndarray], np.ndarray]:
    """The normalized updates of one matrix [fan_in, fan_out], step by step, and its second moment after them."""
    v = np.zeros(updates[0].shape[1])
    results = []
    for o in updates:
        v = decay * v + (1 - decay) * np.mean(np.abs(o) ** 2, axis=0)
        p = o / (np.sqrt(v) + eps)
        results.append(p * np.linalg.norm(o) / np.linalg.norm(p))
    return results, v


def run(tx, updates):
    state = tx.init({"w": updates[0]})
    update = jax.jit(tx.update)
    results = []
    for u in updates:
        y, state = update({"w": u}, state)
        results.append(np.asarray(y["w"], np.float64))
    return results, state


def draw(shape, steps=20, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.geomspace(1, 30, shape[-1])
    return [
        (rng.standard_normal(shape) * scale).astype(np.float32) for _ in range(steps)
    ]


@pytest.mark.parametrize("eps", [1e-8, 0.1])
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (1, 5), (5, 1)])
def test_twenty_steps_are_the_papers(shape, eps):
    updates = draw(shape)
    found, state = run(muonjax.normalize_neurons(eps=eps), updates)
    want, moment = oracle([u.astype(np.float64) for u in updates], eps=eps)
    assert_allclose(found, want, rtol=1e-5)
    assert_allclose(state.second_moment["w"], moment[None], rtol=1e-5)
    assert state.second_moment["w"].shape == (1, shape[1])
    assert state.second_moment["w"].dtype == jnp.float32


@pytest.mark.parametrize(("shape", "numbers", "matrices"), MATRICES)
def test_each_matrix_and_each_part_is_its_own(shape, numbers, matrices):
    updates = draw(shape)
    for power, matrix in enumerate(matrices):
        for u in updates:
            u[matrix] *= 10.0**power
    found, _ = run(muonjax.normalize_neurons(dimension_numbers={"w": numbers}), updates)
    for matrix in matrices:
        want, _ = oracle([np.float64(u[matrix]) for u in updates])
        np.testing.assert_allclose([y[matrix] for y in found], want, rtol=1e-5)


@pytest.mark.nan
def test_zeros_stay_zeros_and_nan_stays_in_its_matrix():
    tx = muonjax.normalize_neurons()
    tree = {
        "zero": jnp.zeros((3, 4)),
        "bad": jnp.full((3, 4), jnp.nan),
        "good": jnp.eye(3),
    }
    updates, _ = jax.jit(tx.update)(tree, tx.init(tree))
    assert not updates["zero"].any()
    assert np.isnan(updates["bad"]).all()
    assert_allclose(updates["good"], np.eye(3), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_dtypes_are_kept_and_the_state_is_float32(dtype):
    tx = muonjax.normalize_neurons()
    tree = {"w": jnp.ones((3, 4), dtype)}
    state = tx.init(tree)
    updates, after = tx.update(tree, state)
    assert updates["w"].dtype == dtype
    assert (
        after.second_moment["w"].dtype == state.second_moment["w"].dtype == jnp.float32
    )


def test_a_state_of_other_parameters_is_refused():
    tx = muonjax.normalize_neurons()
    with pytest.raises(
        ValueError,
        match=r"normalize_neurons: the state has.* \[\(1, 4\)\], these updates need \[\(1, 5\)\]",
    ):
        tx.update({"w": jnp.ones((3, 5))}, tx.init({"w": jnp.ones((3, 4))}))
