"""normuon and muonh are the chains that their docstrings say."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from numpy.testing import assert_array_equal

import muonjax
from tests.tools.oracles import SHORT, trained

PARAMS = {
    "dense": {
        "kernel": jax.random.normal(jax.random.key(0), (8, 16)),
        "bias": jnp.ones(16),
    }
}
GRADIENTS = [
    jax.tree.map(lambda x, k=k: jnp.sin(k * x), PARAMS) for k in (1.0, 2.0, 3.0)
]


def run(tx, gradients=GRADIENTS):
    return trained(tx, PARAMS, gradients)[0]


def by_hand(*members):
    """The chain for the kernel, AdamW for the bias."""
    return optax.partition(
        {
            "m": optax.chain(
                optax.trace(0.95, True),
                muonjax.orthogonalize(newton_schulz=SHORT),
                *members,
            ),
            "a": optax.adamw(1e-3, b2=0.95),
        },
        {"dense": {"kernel": "m", "bias": "a"}},
    )


def test_normuon_is_its_chain():
    chain = by_hand(
        muonjax.normalize_neurons(0.9),
        muonjax.match_rms(0.2),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(1e-2),
    )
    adam = optax.adamw(1e-3, b2=0.95)
    found = run(
        muonjax.normuon(
            1e-2, neuron_decay=0.9, weight_decay=0.1, adam=adam, newton_schulz=SHORT
        )
    )
    chex.assert_trees_all_close(found, run(chain), rtol=1e-6)


def test_muonh_is_its_chain():
    adam = optax.adamw(1e-3, b2=0.95)
    found = run(muonjax.muonh(0.02, adam=adam, newton_schulz=SHORT))
    chex.assert_trees_all_close(found, run(by_hand(muonjax.hyperball(0.02))), rtol=1e-6)


def test_muonhs_own_adam_has_no_weight_decay():
    still = [jax.tree.map(jnp.zeros_like, PARAMS)] * 3
    found = run(muonjax.muonh(0.02, adam_learning_rate=1.0, newton_schulz=SHORT), still)
    assert_array_equal(found["dense"]["bias"], PARAMS["dense"]["bias"])


def test_adam_has_one_rate():
    with pytest.raises(ValueError, match=r"muonh\(adam_learning_rate=None\) needs"):
        muonjax.muonh(0.02)
    with pytest.raises(ValueError, match=r"muon\(adam_learning_rate=.*takes one"):
        muonjax.muon(0.02, adam_learning_rate=1e-3, adam=optax.sgd(0.1))


def test_another_rate_of_adam_decays_neither_biases_nor_matrices_otherwise():
    tx = muonjax.muon(0.02, adam_learning_rate=1.0, newton_schulz=SHORT)
    still = jax.tree.map(jnp.zeros_like, PARAMS)
    found = run(tx, [still])
    assert_array_equal(found["dense"]["bias"], PARAMS["dense"]["bias"])
    kernel = PARAMS["dense"]["kernel"]
    chex.assert_trees_all_close(found["dense"]["kernel"], 0.998 * kernel, rtol=1e-6)


NUMBERS = {"dense": {"kernel": muonjax.MuonDimensionNumbers(), "bias": None}}


@pytest.mark.parametrize(
    ("tx", "like_parameters"),
    [
        # The momentum of the kernel, and two moments of the bias.
        (muonjax.muon(1e-3), 3),
        pytest.param(muonjax.monitor(muonjax.muon(1e-3)), 3, marks=pytest.mark.nan),
        pytest.param(
            muonjax.monitor(optax.sgd(1e-3, momentum=0.9), NUMBERS),
            2,
            marks=pytest.mark.nan,
        ),
        (muonjax.normuon(1e-3, NUMBERS), 4),
        (muonjax.muonh(1e-3, adam_learning_rate=1e-3, program=NUMBERS), 4),
        (muonjax.hyperball(1e-3, dimension_numbers=NUMBERS), 1),
        (muonjax.normalize_neurons(dimension_numbers=NUMBERS), 1),
        (muonjax.orthogonalize(dimension_numbers=NUMBERS), 0),
    ],
)
def test_optax_finds_what_is_like_a_parameter(tx, like_parameters):
    found = optax.tree_map_params(tx, lambda _: "like", jax.eval_shape(tx.init, PARAMS))
    assert jax.tree.leaves(found).count("like") == like_parameters
