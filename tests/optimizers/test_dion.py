"""NorMuon against microsoft/dion's, over ten steps.

dion_normuon.npz holds the weights after each step of dion.NorMuon at commit 0a059a4 with torch 2.15, so that
neither is needed; where both are installed, `pytest -m interop` computes them again: `pip install -e '.[interop]'` and
`pip install git+https://github.com/microsoft/dion`. `python -m tests.optimizers.test_dion` writes the weights anew.

What differs, and is made equal here: Dion's weights are [out, in]; it rounds the momentum to bfloat16 before the
iteration, which is a rounding of our updates between `optax.trace` and `orthogonalize`; and its iteration is given the
exact polar factor, as ours is nearly, for Dion's own is in bfloat16.
"""

import pathlib
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax

GOLDEN = pathlib.Path(__file__).parent / "dion_normuon.npz"
SHAPES = {"wide": (6, 20), "tall": (20, 6), "square": (9, 9)}
RATE = 0.02
DECAY = 0.1
STEPS = 10


def draw(name, step):
    """The weight (step 0) or a gradient, [in, out]; its neurons have norms of different orders."""
    rng = np.random.default_rng([step, *map(ord, name)])
    shape = SHAPES[name]
    return (rng.standard_normal(shape) * np.geomspace(1, 30, shape[1])).astype(
        np.float32
    )


def dion_weights(cautious):
    """The weights [steps, in, out] of dion.NorMuon, by name."""
    torch = pytest.importorskip("torch", reason="pip install -e '.[interop]'")
    # Without torch.compile, which needs a C++ compiler.
    with unittest.mock.patch.object(
        torch, "compile", lambda function=None, **_: function or (lambda f: f)
    ):
        dion = pytest.importorskip(
            "dion", reason="pip install git+https://github.com/microsoft/dion"
        )

    def polar(x, epsilon):
        u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
        return (u @ vh).float()

    weights = {
        name: torch.nn.Parameter(torch.tensor(draw(name, 0).T.copy()))
        for name in SHAPES
    }
    tx = dion.NorMuon(
        [*weights.values()],
        lr=RATE,
        weight_decay=DECAY,
        cautious_wd=cautious,
        nesterov=True,
        adjust_lr="rms_norm",
        newton_schulz_func=polar,
    )
    found = {name: [] for name in SHAPES}
    for step in range(STEPS):
        for name, weight in weights.items():
            weight.grad = torch.tensor(draw(name, step + 1).T.copy())
        tx.step()
        for name, weight in weights.items():
            found[name].append(weight.detach().numpy().T.copy())
    return {name: np.stack(steps) for name, steps in found.items()}


def our_weights(cautious):
    rounded = optax.stateless(
        lambda u, _: jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), u)
    )
    decay = muonjax.cautious_weight_decay if cautious else optax.add_decayed_weights
    tx = optax.chain(
        optax.trace(0.95, nesterov=True),
        rounded,
        muonjax.orthogonalize(newton_schulz=muonjax.NewtonSchulz.accurate()),
        muonjax.normalize_neurons(0.95),
        muonjax.match_rms(0.2),
        decay(DECAY),
        optax.scale_by_learning_rate(RATE),
    )
    params = {name: jnp.asarray(draw(name, 0)) for name in SHAPES}
    state = tx.init(params)
    found = {name: [] for name in SHAPES}
    step = jax.jit(tx.update)
    for i in range(STEPS):
        updates, state = step(
            {name: draw(name, i + 1) for name in SHAPES}, state, params
        )
        params = optax.apply_updates(params, updates)
        for name, weight in params.items():
            found[name].append(np.asarray(weight))
    return {name: np.stack(steps) for name, steps in found.items()}


def golden(cautious):
    """The weights of the file, by name."""
    kind = "cautious" if cautious else "plain"
    with np.load(GOLDEN) as held:
        return {name: held[f"{name}_{kind}"] for name in SHAPES}


def assert_equal(found, expected):
    for name, weights in expected.items():
        moved = np.abs(weights - draw(name, 0)).max()
        np.testing.assert_allclose(
            found[name], weights, rtol=0, atol=1e-4 * moved, err_msg=name
        )


@pytest.mark.parametrize("cautious", [False, True])
def test_ten_steps_equal_dions(cautious):
    assert_equal(our_weights(cautious), golden(cautious))


@pytest.mark.interop
@pytest.mark.parametrize("cautious", [False, True])
def test_the_file_holds_what_dion_computes(cautious):
    assert_equal(dion_weights(cautious), golden(cautious))


if __name__ == "__main__":
    named = {"plain": dion_weights(False), "cautious": dion_weights(True)}
    np.savez_compressed(
        GOLDEN,
        **{f"{n}_{how}": w for how, found in named.items() for n, w in found.items()},
    )
