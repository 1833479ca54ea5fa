"""A state that was saved under one setting and goes on under another: what may change changes, the rest is refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import muonjax
from tests.tools.oracles import gradients, normal_tree

STATISTICS = {"attention": jnp.asarray([400.0, 50.0])}


def params(width=8):
    attention = {name: {"kernel": (width, 2, 4)} for name in ("query", "key", "value")}
    mlp = {"kernel": (24, width), "bias": (width,)}
    return normal_tree({"attention": attention, "mlp": mlp})


def muonclip(**settings):
    return muonjax.muonclip(0.01, muonjax.mha_site(), **settings)


def advance(tx, tree, state, step, **extra):
    updates, state = jax.jit(tx.update)(
        gradients(step, tree), state, tree, max_logits=STATISTICS, **extra
    )
    return optax.apply_updates(tree, updates), state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Parameters and state of a muonclip run after three steps, and the folder of their checkpoint."""
    tx = muonclip()
    tree = params()
    state = tx.init(tree)
    for step in range(3):
        tree, state = advance(tx, tree, state, step)
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {"params": tree, "opt_state": state})
    return tree, state, folder


def restore(folder, tx, tree):
    like = {"params": tree, "opt_state": tx.init(tree)}
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, like)


def digest(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def test_momentum_may_change_its_dtype(saved):
    tree, state, folder = saved
    tx = muonclip(mu_dtype=jnp.bfloat16)
    restored = restore(folder, tx, tree)
    wide, narrow = (
        optax.tree_utils.tree_get(s, "trace") for s in (state, restored["opt_state"])
    )
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}
    for a, b in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        np.testing.assert_array_equal(a.astype(jnp.bfloat16), b)
    after, _ = advance(tx, restored["params"], restored["opt_state"], 3)
    expected, _ = advance(muonclip(), tree, state, 3)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        # The rounding of the momentum turns a step, whose RMS is 0.2 times the rate, a little.
        assert np.abs(a - b).max() < 0.05 * 0.01
    assert digest(after) != digest(expected)


def test_parameters_may_change_their_dtype(saved):
    tree, _, folder = saved
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree)
    tx = muonclip()
    with pytest.warns(UserWarning, match="float32 master weights"):
        restored = restore(folder, tx, half)
    after, _ = advance(tx, restored["params"], restored["opt_state"], 3)
    assert {p.dtype for p in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    assert all(
        np.isfinite(np.asarray(p, np.float32)).all() for p in jax.tree.leaves(after)
    )


@pytest.mark.parametrize(
    ("tx", "tree", "message"),
    [
        (
            muonclip(),
            params(width=12),
            "muonclip: this state was made for other parameters.*12",
        ),
        (muonclip(adam=optax.sgd(0.1)), params(), "muonclip: .*another `adam`"),
        (
            muonclip(dimension_numbers=lambda p: jax.tree.map(lambda _: None, p)),
            params(),
            "muonclip: .*another routing",
        ),
    ],
)
def test_what_may_not_change_is_refused(saved, tx, tree, message):
    _, state, _ = saved
    with pytest.raises(ValueError, match=message):
        advance(tx, tree, state, 3)


def test_a_momentum_that_would_broadcast_is_refused():
    """A bias that became a column: its momentum would spread over the matrix."""
    tx = muonjax.muon(0.01)
    state = tx.init({"mlp": {"kernel": jnp.ones((1, 8))}})
    tree = {"mlp": {"kernel": jnp.ones((8, 8))}}
    with pytest.raises(ValueError, match=r"\[8, 8\] is \[1, 8\]"):
        tx.update(tree, state, tree)


def test_accumulation_may_change():
    """The largest logits since the last clip go on."""
    tree = params()
    each, fourth = (
        muonjax.qk_clip(100.0, muonjax.mha_site(), every_k=k) for k in (1, 4)
    )
    _, state = fourth.update(tree, fourth.init(tree), tree, max_logits=STATISTICS)
    lower = jax.tree.map(lambda x: x / 2, STATISTICS)
    _, state = each.update(tree, state, tree, max_logits=lower)
    chex.assert_trees_all_equal(state.maxima, STATISTICS)


def test_sites_may_not_change():
    tree = params()
    clips = [
        muonjax.qk_clip(100.0, muonjax.mha_site(path)) for path in (".*", "decoder/.*")
    ]
    state = clips[0].init(tree)
    with pytest.raises(ValueError, match=r"this state was made for \{'attention'"):
        clips[1].update(
            {"decoder": tree},
            state,
            {"decoder": tree},
            max_logits={"decoder": STATISTICS},
        )
