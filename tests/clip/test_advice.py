"""The code that an error message advises, taken from the message and run."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import muonjax
from tests.tools.oracles import SHORT, queries_and_keys


def calls(message):
    """Every `muonjax.f(...)` or `optax.f(...)` with its arguments in a message."""
    found = []
    for match in re.finditer(r"(muonjax|optax)\.[\w.]+\(", message):
        depth = 1
        end = match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(message[end], 0)
            end += 1
        found.append(message[match.start() : end])
    return found


ATTENTION = {"a": queries_and_keys(8, 2, 4)}
SITE = muonjax.mha_site()


@pytest.mark.parametrize("make", [muonjax.muonclip, muonjax.adamclip, muonjax.qk_clip])
def test_every_k_in_inject_hyperparams(make):
    with pytest.raises(ValueError, match=r"every_k=.* needs a whole number") as error:
        optax.inject_hyperparams(make)(1.0, SITE, every_k=2).init(ATTENTION)
    (code,) = calls(str(error.value))
    tx = eval(code.replace("...", "make"), {"optax": optax, "make": make})(
        1.0, SITE, every_k=2
    )
    assert tx.init(ATTENTION)


def test_a_mesh_in_place_of_a_distribution():
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(TypeError, match=r"must be a muonjax\.Distribution") as error:
        muonjax.muonclip(1e-3, SITE, distribution=mesh)
    (code,) = calls(str(error.value))
    names = {"muonjax": muonjax, "mesh": mesh, "specs": jax.sharding.PartitionSpec()}
    assert muonjax.muonclip(1e-3, SITE, distribution=eval(code, names)).init(ATTENTION)


def of(make, rate=1e-3):
    settings = {"newton_schulz": SHORT} if "muon" in make.__name__ else {}
    return (
        make(rate, SITE, **settings)
        if "clip" in make.__name__
        else make(rate, **settings)
    )


OPTIMIZERS = [
    muonjax.muon,
    muonjax.normuon,
    muonjax.muonclip,
    muonjax.adamclip,
    muonjax.qk_clip,
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_states(make):
    tx = of(make)
    statistics = {"a": jnp.ones(2)}
    more = {"max_logits": statistics} if "clip" in make.__name__ else {}
    state = tx.init(ATTENTION)
    for exchanged in ((ATTENTION, ATTENTION, state), (state, ATTENTION, ATTENTION)):
        with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params\)"):
            tx.update(*exchanged, **more)
    if make is not muonjax.qk_clip:
        with pytest.raises(
            TypeError, match=r"takes all further arguments by name.*max_logits="
        ):
            tx.update(ATTENTION, state, ATTENTION, statistics)
    others = (
        optax.adamw(1e-3), optax.sgd(0.1, 0.9), optax.chain(*[optax.scale(1.0)] * 3), muonjax.muonclip(1e-3, SITE),
        muonjax.adamclip(1e-3, SITE), optax.chain(optax.scale(1.0), muonjax.qk_clip(1.0, SITE)),
    )  # fmt: skip
    for other in others:
        theirs = other.init(ATTENTION)
        if jax.tree.structure(theirs) == jax.tree.structure(state):
            continue
        with pytest.raises(
            ValueError, match=f"{make.__name__}: this is the state of another optimizer"
        ):
            tx.update(ATTENTION, theirs, ATTENTION, **more)


@pytest.mark.parametrize("make", [muonjax.muon, muonjax.muonclip])
def test_integers_are_left_as_they_are(make):
    """AdamW's weight decay counted 100 down to 99 at the first step."""
    params = ATTENTION | {"count": jnp.array(100), "w": jnp.ones(3)}
    tx = of(make, 1e-2)
    for gradient in (jnp.array(0), jnp.array(0.0), jnp.zeros((), jax.dtypes.float0)):
        grads = jax.tree.map(jnp.ones_like, params) | {"count": gradient}
        more = {"max_logits": {"a": jnp.ones(2)}} if make is muonjax.muonclip else {}
        updates, state = tx.update(grads, tx.init(params), params, **more)
        assert updates["count"].dtype == params["count"].dtype
        assert optax.apply_updates(params, updates)["count"] == 100
        assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
        assert updates["w"].dtype == jnp.float32
